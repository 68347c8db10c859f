"""`offbeat check`: what a run would do, without starting anything."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from offbeat.config import Config
from offbeat.errors import ConfigError
from offbeat.host import host_problems, memory_problem
from offbeat.memory import Lengths, SetSize, checkpoint_bytes, estimate_memory, read_shape
from offbeat.metrics import figures
from offbeat.metrics.status import batch_arithmetic
from offbeat.prepare import Prepared, prepare
from offbeat.showing import saved_when, slow_dtypes

PROMPT_CHARACTERS = 1500


def check(config: Config, *, tokens: bool, console: Console | None = None) -> None:
    """Print it. Raises `ConfigError` with every problem found."""
    out = console or Console(highlight=False, soft_wrap=True, emoji=False, markup=False)
    prepared = prepare(config)

    def line(label: str, text: str) -> None:
        # A terminal that cannot show a character shows another one; the command goes on.
        out.print(Text(f"{label:<8}", "bold").append(figures.printable(text, out.encoding), "not bold"))

    for label, text in rows(prepared):
        line(label, text)
    for problem in host_problems(config, ask=False):
        line("machine", f"! not this one: {problem}")
    for problem in slow_here(config):
        line("machine", f"! {problem}")
    prompt = prepared.prompts.batch(0)[0]
    line("prompt", f"{prompt.id}, {len(prompt.token_ids)} tokens:")
    for text in prompt.text[:PROMPT_CHARACTERS].split("\n"):
        line("", text)
    if len(prompt.text) > PROMPT_CHARACTERS:
        line("", f"… and {len(prompt.text) - PROMPT_CHARACTERS} more characters")
    if tokens:
        pieces = prepared.tokenizer.convert_ids_to_tokens([int(i) for i in prompt.token_ids])
        for index, (token_id, piece) in enumerate(zip(prompt.token_ids, pieces, strict=True)):
            line("", f"{index:>5}  {int(token_id):>7}  {piece!r}")
    else:
        line("", "(--tokens shows its token ids)")


def slow_here(config: Config) -> list[str]:
    """Nothing on a machine that lacks the devices: that is said already."""
    try:
        return slow_dtypes(config)
    except ConfigError:
        return []


def rows(prepared: Prepared) -> list[tuple[str, str]]:
    """(label, text) of everything but the prompt."""
    return [*_size_rows(prepared), *_process_rows(prepared.config), *_data_rows(prepared), *_learning_rows(prepared)]


def _size_rows(prepared: Prepared) -> list[tuple[str, str]]:
    """The model, and what it takes of memory and disk."""
    config, size = prepared.config, figures.size
    shape = read_shape(str(prepared.model.folder), None)
    lengths = _lengths(prepared)
    memory = estimate_memory(config, shape, lengths)
    problem = memory_problem(config, shape, lengths)
    return [
        ("model", f"{prepared.model_name} · {prepared.model.model_type} · {_count(shape.parameters)} parameters"),
        ("memory", f"about {size(memory.trainer)} for the trainer, {size(memory.engine)} for each engine"),
        *([] if problem is None else [("memory", f"! {problem}")]),
        (
            "disk",
            f"about {size(checkpoint_bytes(shape))} for a checkpoint · {config.checkpoint.keep_last} are kept, "
            f"and one more while it is saved · {saved_when(config)}",
        ),
    ]


def _process_rows(config: Config) -> list[tuple[str, str]]:
    """How much a step is, and who does it."""
    arithmetic = batch_arithmetic(
        prompts=config.prompts_per_step,
        samples_per_prompt=config.samples_per_prompt,
        updates=config.updates_per_step,
        epochs=config.epochs_per_batch,
        max_staleness=config.max_staleness,
    )
    engines = (
        f"{config.rollout.replicas} × {config.rollout.engine} · {config.engine_dtype} · weights over "
        f"{config.weights.backend} on {config.weights.host}"
    )
    return [("batch", arithmetic), ("engines", engines)]


def _data_rows(prepared: Prepared) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for source in prepared.prompts.sources:
        epoch = prepared.prompts.steps_per_epoch[source.name]
        text = f"{source.name}: {len(source.kept):,} rows · {source.dropped} too long · {epoch:.1f} steps per epoch"
        found.append(("data", f"{text} · rewards {_rewards(source.section.rewards)}"))
    for data in prepared.eval_data:
        asked = f"{len(data.prompts)} prompts × {data.section.samples_per_prompt}"
        asked += f" · {data.source.dropped} too long" if data.source.dropped else ""
        found.append(("eval", f"{data.name}: {asked} · rewards {_rewards(data.rewards)}"))
    return found


def _learning_rows(prepared: Prepared) -> list[tuple[str, str]]:
    """What is sampled, where it stops, and what is learned from it."""
    config, sampling, loss = prepared.config, prepared.sampling, prepared.config.loss
    stops = ", ".join(f"{prepared.tokenizer.convert_ids_to_tokens(i)} ({i})" for i in sampling.stop_token_ids)
    unused = " ".join(f"{key}={value}" for key, value in prepared.model.unused_generation_config.items())
    return [
        (
            "sample",
            f"temperature {sampling.temperature:g} · top_p {sampling.top_p:g} · top_k {sampling.top_k} · "
            f"min_p {sampling.min_p:g} · at most {sampling.max_new_tokens} new tokens",
        ),
        ("stop", stops + (f" · NOT used of generation_config.json: {unused}" if unused else "")),
        (
            "recipe",
            f"{config.recipe} · std scaling {'on' if loss.scale_by_std else 'off'} · clip {loss.clip_low:g}/"
            f"{loss.clip_high:g} · dual clip {loss.dual_clip or 'off'} · {loss.aggregation} · lr {config.trainer.lr:g} "
            f"({config.trainer.schedule} after {config.trainer.warmup_steps} updates)",
        ),
    ]


def _lengths(prepared: Prepared) -> Lengths:
    """Of the prompts in use, and of the first warm-up step, which stands for all."""
    warmup = [] if prepared.warmup is None else prepared.warmup.batch(0)
    return Lengths(
        prompt=max(source.longest for source in prepared.prompts.sources),
        warmup=max((len(s.prompt_token_ids) + len(s.token_ids) for s in warmup), default=0),
        sets=tuple(
            SetSize(prompts=len(data.prompts), longest=max(len(prompt.token_ids) for prompt in data.prompts))
            for data in prepared.eval_data
        ),
    )


def _rewards(functions: dict[str, float]) -> str:
    return ", ".join(f"{name.rsplit('/', 1)[-1]} × {weight:g}" for name, weight in functions.items())


def _count(number: int) -> str:
    for size, unit in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return str(number)
