"""A recorded sample as lines to read. Pure: (style, text) pairs, styles are those of rich.

Every line of a text that a model or a data set wrote begins with `│`, so that it cannot pass for one of ours; control
characters are taken out where lines are printed (`figures.printable`).
"""

from __future__ import annotations

from typing import TypeAlias

from offbeat.metrics import figures
from offbeat.metrics.recorded import RecordedSample

Line: TypeAlias = tuple[str, str]


def sample_lines(sample: RecordedSample, limit: int | None = None, *, now: RecordedSample | None = None) -> list[Line]:
    """Prompt, completion, rewards. Texts above `limit` characters are shown with their two ends; None: whole.

    `now`: the sample with the scores that it has been given since; they are shown beside the old ones.
    """
    where = f"step {sample.step}" if sample.eval is None else f"eval {sample.eval} at version {sample.step}"
    change = "" if now is None else f" → {figures.short(now.reward)}"
    head = [f"{sample.prompt_id} #{sample.sample_index}", where, f"reward {figures.short(sample.reward)}{change}"]
    if sample.advantage is not None:
        head.append(f"advantage {figures.signed(sample.advantage, 2)}")
    lines = [("bold", f"── {' · '.join(head)}"), ("dim", f"   {_facts(sample)}")]
    if sample.parts:
        lines.append(("", f"   {'' if now is None else 'before: '}{_parts(sample)}"))
    if now is not None:
        lines.append(("", f"   now: {_parts(now)}"))
    lines += [("red", f"   error: {line}") for error in (now or sample).errors for line in error.split("\n")]
    return [
        *lines,
        ("dim", "   prompt"),
        *_quoted(sample.prompt, limit),
        ("dim", "   completion"),
        *_quoted(sample.completion, limit),
        ("", ""),
    ]


def _parts(sample: RecordedSample) -> str:
    return " · ".join(f"{name} {figures.short(value)}" for name, value in sample.parts.items())


def _facts(sample: RecordedSample) -> str:
    """`231 tokens, cut off · version 39 · epoch 1 · engine-0`"""
    ends = {"length": ", cut off at the limit", "abort": ", cut short"}
    tokens = "1 token" if sample.completion_tokens == 1 else f"{sample.completion_tokens} tokens"
    versions = sorted({version for version, _ in sample.versions})
    facts = [f"{tokens}{ends.get(sample.finish_reason, '')}"]
    if versions:
        facts.append(f"version {'–'.join(str(v) for v in dict.fromkeys((versions[0], versions[-1])))}")
    if sample.epoch:
        facts.append(f"epoch {sample.epoch}")
    return " · ".join([*facts, *filter(None, [sample.engine])])


def _quoted(text: str, limit: int | None) -> list[Line]:
    if limit is not None and len(text) > limit:
        half = limit // 2
        text = f"{text[:half]}\n… {len(text) - 2 * half:,} characters not shown …\n{text[-half:]}"
    return [("", f"   │ {line}") for line in text.split("\n")] if text else [("dim", "   │ (nothing)")]
