"""README.md of an exported model. Every figure comes from the run's own records; what was not measured is not there.

Paths of this machine are left out: a local file or folder is called by its last name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import offbeat
from offbeat.config import Config, Dtype
from offbeat.metrics import figures
from offbeat.metrics.best import scores

_MEASURED = re.compile(r"^eval/(.+/(?:avg|pass)@\d+)$")
_HUB_ID = re.compile(r"^[\w.-]+/[\w.-]+$")


@dataclass(frozen=True)
class Facts:
    """What a card tells beside the config and the records."""

    name: str
    step: int
    base: str
    """The model that training began with: a hub id, or a path."""
    base_revision: str | None
    warm_starts: int
    """Runs between the base and this one, each begun with a checkpoint of the one before."""
    dtype: Dtype
    why: str = ""
    """Why this step: empty, or e.g. `highest heldout of the saved steps`."""
    resumed_at: tuple[int, ...] = ()
    """Steps at which the run was resumed: only the settings of its last part are kept."""


def card(facts: Facts, config: Config, records: Sequence[Mapping[str, Any]]) -> str:
    """The whole file: metadata of the hub, then text."""
    on_hub = not Path(facts.base).exists() and _HUB_ID.match(facts.base) is not None
    head = ["library_name: transformers", "pipeline_tag: text-generation", "tags:", "- offbeat", f"- {config.recipe}"]
    if on_hub:
        head.insert(0, f"base_model: {json.dumps(facts.base)}")
    parts = [
        "\n".join(["---", *head, "---"]),
        f"# {_plain(facts.name)}",
        f"Trained from {_start(facts, config, on_hub=on_hub)} by reinforcement learning with offbeat "
        f"{offbeat.__version__}, for {facts.step} of {config.steps} steps."
        f"{f' Chosen: {_plain(facts.why)}.' if facts.why else ''}",
        _table(("", ""), _training(facts, config)),
        *_resumes(facts),
        "## Evaluation",
        _evaluations(facts, config, records),
        "## Use",
        _usage(config),
    ]
    return "\n\n".join(parts) + "\n"


def _start(facts: Facts, config: Config, *, on_hub: bool) -> str:
    base = _base(facts, on_hub=on_hub)
    return f"random weights, with the architecture and tokenizer of {base}," if config.init == "random" else base


def _base(facts: Facts, *, on_hub: bool) -> str:
    revision = f" at revision `{facts.base_revision}`" if facts.base_revision else ""
    name = f"[{facts.base}](https://huggingface.co/{facts.base})" if on_hub else f"`{_last(facts.base)}`"
    runs = f" (through {figures.counted(facts.warm_starts, 'earlier run')})" if facts.warm_starts else ""
    return f"{name}{revision}{runs}"


def _training(facts: Facts, config: Config) -> list[tuple[str, str]]:
    sampling, loss = config.sampling, config.loss
    rows = [
        ("algorithm", f"{config.recipe}, clip {loss.clip_low:g}/{loss.clip_high:g}, {loss.aggregation}"),
        ("batch", f"{config.prompts_per_step} prompts × {config.samples_per_prompt} samples a step"),
        ("staleness", f"at most {config.max_staleness} weights version" + ("s" if config.max_staleness > 1 else "")),
        ("learning rate", f"{config.trainer.lr:g}, {config.trainer.schedule}"),
        ("sampling", f"temperature {sampling.temperature:g}, at most {sampling.max_new_tokens} new tokens"),
        ("seed", str(config.seed)),
        ("weights", f"{facts.dtype}; trained with float32 master weights, computed in {config.trainer.dtype}"),
    ]
    if config.warmup is not None:
        rows.insert(0, ("warm-up", f"{config.warmup.steps} supervised steps on {_last(config.warmup.source)}"))
    for section in config.data:
        rewards = ", ".join(f"{_last(name)} × {weight:g}" for name, weight in section.rewards.items())
        rows.append((f"data: {section.name}", f"{_last(section.source)}; rewards {rewards}"))
    return rows


def _resumes(facts: Facts) -> list[str]:
    """A resume may change settings, and nothing keeps those from before."""
    if not facts.resumed_at:
        return []
    steps = ", ".join(map(str, facts.resumed_at))
    return [f"The run was resumed at step {steps}. These are the settings of its last part; earlier ones may differ."]


def _evaluations(facts: Facts, config: Config, records: Sequence[Mapping[str, Any]]) -> str:
    steps = dict.fromkeys((0, facts.step))
    rows: list[tuple[str, ...]] = []
    for name in evaluations(records):
        values, errors = scores(records, name), scores(records, f"{name}_error")
        if facts.step in values:
            rows.append((name, *(figures.with_error(values[s], errors.get(s)) if s in values else "" for s in steps)))
    if not rows:
        return f"This step was not evaluated in training ({figures.counted(len(config.eval), 'held-out set')})."
    columns = ("metric", *(f"step {step}" for step in steps))
    sources = ", ".join(f"{section.name} is {_last(section.source)}" for section in config.eval)
    return (
        f"{_table(columns, rows)}\n\nMean reward (`avg@k`) and share of prompts with a passing sample (`pass@k`) of k "
        f"samples a prompt, ± one standard error over prompts. Held-out sets: {_plain(sources)}."
    )


def evaluations(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Every `<set>/avg@k` and `<set>/pass@k` that was measured, in order of first appearance."""
    found = [match[1] for record in records for key in record if (match := _MEASURED.match(key))]
    return [name for name in dict.fromkeys(found) if scores(records, name)]


def _usage(config: Config) -> str:
    """As the first source of the training data was prompted: another system message would be another prompt."""
    data, named = config.data[0], config.sampling.chat_template_kwargs
    prompt = 'tokenizer("…", return_tensors="pt")'
    if data.format == "chat":
        system = f'{{"role": "system", "content": {data.system!r}}}, ' if data.system is not None else ""
        settings = f", **{named!r}" if named else ""
        prompt = (
            f'tokenizer.apply_chat_template(\n    [{system}{{"role": "user", "content": "…"}}],\n'
            f'    add_generation_prompt=True, return_tensors="pt", return_dict=True{settings},\n)'
        )
    return f"""\
```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(".")
model = AutoModelForCausalLM.from_pretrained(".", dtype="auto")
inputs = {prompt}
output = model.generate(**inputs, max_new_tokens={config.sampling.max_new_tokens})
print(tokenizer.decode(output[0][inputs["input_ids"].shape[1] :], skip_special_tokens=True))
```"""


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *([_plain(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _last(name: str) -> str:
    """`/home/me/rewards.py:correct` → `rewards.py:correct`; what is no path stays whole."""
    return name.rsplit("/", 1)[-1] if name.startswith(("/", "./", "../", "~")) else name


def _plain(text: str) -> str:
    """On one line, and no markup of ours in it."""
    return re.sub(r"([|<>`\[\]*_\\])", r"\\\1", " ".join(figures.printable(text, "utf-8").split()))
