"""`offbeat eval`: the held-out sets of a config, for its model or for a checkpoint of a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from offbeat.build import System
from offbeat.commands.run_config import run_config
from offbeat.commands.serving import serve
from offbeat.config import load_config
from offbeat.errors import ConfigError
from offbeat.evaluate import EvalResult, evaluate
from offbeat.host import require_host
from offbeat.metrics.display import Display
from offbeat.metrics.writer import RunFolder
from offbeat.nearest import run_hint
from offbeat.prepare import prepare
from offbeat.saved_models import choose_checkpoint, model_at_hand


def evaluate_only(
    target: Path, overrides: Sequence[str], *, step: int | None, display: Display
) -> tuple[EvalResult, ...]:
    """The [[eval]] sets of a config's model, or of a run's checkpoint. Writes into no run; keeps logs if it fails."""
    checkpoint = None
    if target.is_dir():
        folder = RunFolder.open(target)
        config = run_config(folder, overrides)
        checkpoint = choose_checkpoint(folder, step)
    elif step is not None:
        raise ConfigError(f"--step {step} is for the folder of a run, and {target} is none; leave it out.")
    elif not target.exists():
        raise ConfigError(
            f"{target}: no such file or folder; give a TOML file, or the folder of a run. {run_hint(target)}"
        )
    else:
        config = load_config(target, overrides)
    if not config.eval:
        raise ConfigError(f"{target} has no [[eval]] set; add one with a name and a source.")
    prepared = prepare(config, at_hand=checkpoint and model_at_hand(config, checkpoint))
    require_host(config)

    async def body(system: System, version: int) -> tuple[EvalResult, ...]:
        if checkpoint is None and prepared.warmup is not None:
            display.warn("the supervised warm-up is not run: this evaluates the model as it is given")
        results = await evaluate(
            prepared.eval_sets,
            system.engine,
            system.reward,
            step=version,
            version=version,
            run_seed=prepared.config.seed,
            begins=lambda eval_set: display.phase(f"evaluating {eval_set}", total=eval_set.samples),
        )
        for result in results:
            display.evaluation(result)
        return tuple(results)

    return serve("eval", prepared, display, body, checkpoint=checkpoint)
