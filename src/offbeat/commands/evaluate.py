"""`offbeat eval`: the held-out sets of a config, for its model or for a checkpoint of a run."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from offbeat.aftermath import aftermath
from offbeat.build import Prepared, prepare, start
from offbeat.checkpoint import Checkpoint, CheckpointStore
from offbeat.config import load_config, parse_config
from offbeat.errors import ConfigError
from offbeat.evaluate import EvalResult, evaluate
from offbeat.host import require_host
from offbeat.interrupt import Interrupt
from offbeat.metrics.display import Display
from offbeat.metrics.writer import RunFolder
from offbeat.showing import activity, header
from offbeat.supervision import unless_a_worker_dies


def evaluate_only(
    target: Path, overrides: Sequence[str], *, step: int | None, display: Display
) -> tuple[EvalResult, ...]:
    """The [[eval]] sets of a config's model, or of a run's checkpoint. Writes into no run; keeps logs if it fails."""
    checkpoint = None
    if target.is_dir():
        folder = RunFolder.open(target)
        config = parse_config(folder.read_config(), overrides)
        checkpoint = _checkpoint_of(folder, step)
    elif step is not None:
        raise ConfigError(f"--step {step} is for the folder of a run, and {target} is none; leave it out.")
    elif not target.exists():
        raise ConfigError(f"{target}: no such file or folder; give a TOML file, or the folder of a run.")
    else:
        config = load_config(target, overrides)
    if not config.eval:
        raise ConfigError(f"{target} has no [[eval]] set; add one with a name and a source.")
    prepared = prepare(config)
    require_host(config)
    logs = RunFolder(Path(tempfile.mkdtemp(prefix="offbeat-eval-")))
    logs.logs.mkdir()
    with aftermath(logs):
        try:
            results = asyncio.run(_evaluate(prepared, logs, checkpoint, display))
        except (asyncio.CancelledError, KeyboardInterrupt):
            shutil.rmtree(logs.path, ignore_errors=True)
            raise KeyboardInterrupt from None
        finally:
            display.close()
    shutil.rmtree(logs.path, ignore_errors=True)
    return results


def _checkpoint_of(folder: RunFolder, step: int | None) -> Checkpoint:
    store = CheckpointStore(folder.checkpoints)
    if step is not None:
        return store.at(step)
    checkpoint, _ = store.latest()
    if checkpoint is None:
        raise ConfigError(f"{folder.path} has no complete checkpoint to evaluate.")
    return checkpoint


async def _evaluate(
    prepared: Prepared, logs: RunFolder, checkpoint: Checkpoint | None, display: Display
) -> tuple[EvalResult, ...]:
    with Interrupt(asyncio.current_task(), display.warn).installed():
        display.begin(header(prepared))
        display.phase("starting processes")
        async with start(prepared, logs) as system:

            async def main() -> tuple[EvalResult, ...]:
                version = 0
                if checkpoint is not None:
                    await system.trainer.load(str(checkpoint.folder / "trainer-0"))
                    version = checkpoint.state.weights_version
                elif prepared.warmup is not None:
                    display.warn("the supervised warm-up is not run: this evaluates the model as it is given")
                display.phase("first weight sync")
                await system.weights.sync(version)
                results = await evaluate(
                    prepared.eval_sets,
                    system.engine,
                    system.reward,
                    step=version,
                    version=version,
                    run_seed=prepared.config.seed,
                )
                for result in results:
                    display.evaluation(result)
                return tuple(results)

            async with activity(system, display):
                return await unless_a_worker_dies(main(), system.workers)
