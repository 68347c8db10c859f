"""`offbeat export`: the model of a checkpoint as a folder that transformers, vLLM and others load.

    checkpoint (digests checked) ─▶ <output>.writing (weights, tokenizer, card) ─▶ loaded again, compared ─▶ <output>

The folder is there when all of that has worked, and not before. `--push` comes last.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Collection, Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from offbeat.checkpoint import Checkpoint, CheckpointStore
from offbeat.commands.printing import console, phase, show
from offbeat.commands.run_config import run_config
from offbeat.config import Config, Dtype
from offbeat.durable import sync_tree
from offbeat.errors import ConfigError, ModelError, RunError
from offbeat.export.card import Facts, card, evaluations
from offbeat.export.push import Hub, check_push, hub_api, push
from offbeat.export.weights import Written, check_model, needed_bytes, write_model
from offbeat.journal import Resumed, read_journal
from offbeat.metrics.best import best, scores
from offbeat.metrics.figures import counted, decimal, size
from offbeat.metrics.writer import RunFolder, read_metrics
from offbeat.models import inspect_model
from offbeat.saved_models import choose_checkpoint, lineage, model_folder


@dataclass(frozen=True)
class Order:
    """What to export, and where to."""

    step: int | None = None
    """None: the newest."""
    best: bool = False
    """The saved step with the highest `metric`."""
    metric: str | None = None
    """`<set>`, `<set>/avg@k` or `<set>/pass@k`; None: `checkpoint.best` of the config, else its first [[eval]] set."""
    dtype: Dtype | None = None
    """None: the base model's, where that is bfloat16, else float32."""
    output: Path | None = None
    """None: `<run>/exports/step-<n>`."""
    push: str | None = None
    public: bool = False


def export(path: Path, order: Order, *, hub: Hub | None = None, out: Console | None = None) -> Path:
    """Returns the folder. Raises `ConfigError` before anything is written, and `RunError`; then nothing is left."""
    run = RunFolder.open(path)
    config = run_config(run)
    if order.push is not None:
        hub = hub or hub_api()
        check_push(hub, order.push, public=order.public)
    elif order.public:
        raise ConfigError("--public is for --push OWNER/NAME; leave it out, or say where to push.")
    step, why = _step(run, config, order)
    with phase("checking the checkpoint's files"):
        checkpoint = choose_checkpoint(run, step)
    target = (order.output or run.path / "exports" / f"step-{checkpoint.step}").absolute()
    base, revision, origins = lineage(config)
    dtype, reason = (order.dtype, "as asked for") if order.dtype else default_dtype(base, revision)
    with while_it_is_there(checkpoint):
        _check_target(target, model_folder(checkpoint), dtype)
    name = order.push.rpartition("/")[2] if order.push else f"{run.path.name}-step-{checkpoint.step}"
    facts = Facts(name, checkpoint.step, base, revision, len(origins), dtype, why, resumed_at(run.journal))
    with while_it_is_there(checkpoint):
        written = _write(run, config, checkpoint, facts, target)
    show([("", line) for line in _lines(target, facts, reason, written)], out or console())
    if order.push is not None and hub is not None:
        with phase(f"pushing to {order.push}"):
            address = push(hub, target, order.push, public=order.public, message=f"Step {checkpoint.step}")
        seen = "public" if order.public else "private"
        show([("", f"pushed     {address} ({seen})")], out or console())
    return target


def resumed_at(journal: Path) -> tuple[int, ...]:
    """Steps at which the run was resumed, each once, in order; of a journal that is damaged those before the damage."""
    steps: set[int] = set()
    with contextlib.suppress(OSError, ValueError):
        steps.update(event.step for _, event in read_journal(journal) if isinstance(event, Resumed))
    return tuple(sorted(steps))


@contextlib.contextmanager
def while_it_is_there(checkpoint: Checkpoint) -> Generator[None]:
    """A run that trains meanwhile may remove the checkpoint: an error is then that, whatever it looks like."""
    try:
        yield
    except Exception as error:
        if (checkpoint.folder / "complete.json").is_file():
            raise
        raise RunError(
            f"the checkpoint of step {checkpoint.step} was removed while it was read: the run trains and keeps the "
            "newest checkpoint.keep_last; export again, or a step that stays (checkpoint.keep_every, checkpoint.best). "
            "Nothing was kept of it."
        ) from error


def _step(run: RunFolder, config: Config, order: Order) -> tuple[int | None, str]:
    """The step that is meant, and why."""
    if not order.best:
        if order.metric is not None:
            raise ConfigError("--metric says what --best goes by; add --best, or leave it out.")
        return order.step, ""
    if order.step is not None:
        raise ConfigError("--step and --best are two choices of a checkpoint; leave one out.")
    if not config.eval:
        raise ConfigError(f"--best: {run.path} has no [[eval]] set to go by; name a step with --step.")
    evaluation = order.metric or config.checkpoint.best or config.eval[0].name
    saved = CheckpointStore(run.checkpoints).steps()
    return best_saved(read_metrics(run), evaluation, saved)


def best_saved(records: Sequence[Mapping[str, Any]], evaluation: str, saved: Collection[int]) -> tuple[int, str]:
    """The saved step where `evaluation` is highest, and so in words. Raises `ConfigError` with what there is."""
    measured = scores(records, evaluation)
    if not measured:
        there = ", ".join(evaluations(records)) or "nothing"
        raise ConfigError(f"--best by {evaluation!r}: the run has not measured it; measured is {there}.")
    step = best({version: value for version, value in measured.items() if version in saved})
    if step is None:
        raise ConfigError(
            f"--best by {evaluation!r}: it was measured at versions {sorted(measured)}, saved are {sorted(saved)}; "
            "evaluate and save at the same steps (eval.every_steps, checkpoint.every_steps)."
        )
    return step, f"highest {evaluation} of the saved steps, {decimal(measured[step], 3)}"


def default_dtype(base: str, revision: str | None) -> tuple[Dtype, str]:
    """bfloat16 where the base model is: its users serve that, at half the size, and the engines sampled at it.

    Everything else is kept as trained, in float32.
    """
    try:
        values = inspect_model(base, revision, "random").config
    except ModelError:
        return "float32", "as trained; the base model is not at hand to see what it is stored in"
    text = values.get("text_config")
    found = [part.get(key) for part in (values, text or {}) for key in ("dtype", "torch_dtype")]
    stored = next((value for value in found if value), None)
    if stored == "bfloat16":
        return "bfloat16", "that of the base model; --dtype float32 keeps every bit"
    return "float32", f"as trained; the base model is {stored}" if stored else "as trained"


def _check_target(target: Path, source: Path, dtype: Dtype) -> None:
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"--output {target}: is there already and not empty; choose another folder.")
    existing = target.parent
    while not existing.is_dir():
        existing = existing.parent
    need, free = needed_bytes(source, dtype), shutil.disk_usage(existing).free
    if need > free:
        raise ConfigError(
            f"--output {target}: {size(need)} are needed and {size(free)} are free there; make "
            "room, or choose a folder on another disk."
        )


def _write(run: RunFolder, config: Config, checkpoint: Checkpoint, facts: Facts, target: Path) -> Written:
    """Aside, then compared, then renamed."""
    source = model_folder(checkpoint)
    aside = target.with_name(f".{target.name}.writing")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(aside, ignore_errors=True)  # of an export that was killed
        aside.mkdir()
        with phase(f"writing the model in {facts.dtype}"):
            write_model(source, aside, facts.dtype, config.sampling.stop_token_ids)
            readme = aside / "README.md"
            readme.write_text(card(facts, config, read_metrics(run)), encoding="utf-8")
            for file in aside.iterdir():  # safetensors makes its files for their owner alone
                file.chmod(readme.stat().st_mode)
        with phase("loading it again and comparing"):
            written = check_model(source, aside, facts.dtype)
            sync_tree(aside)
        aside.rename(target)
    except OSError as error:
        raise RunError(f"{target} cannot be written: {error}; nothing was kept of it.") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return written


def _lines(target: Path, facts: Facts, reason: str, written: Written) -> list[str]:
    rounding = (
        f"logprobs within {decimal(written.gap_max, 3)} of float32, {decimal(written.gap_mean, 4)} on average"
        if facts.dtype != "float32"
        else "logits equal"
    )
    return [
        f"model      step {facts.step}" + (f" · {facts.why}" if facts.why else ""),
        f"dtype      {facts.dtype} ({reason})",
        f"checked    loaded again with transformers: {counted(written.tensors, 'tensor')} equal to the checkpoint's "
        f"· {rounding}",
        f"size       {size(written.bytes)} in {counted(written.files, 'file')} · {written.parameters:,} parameters",
        f"folder     {target}",
    ]
