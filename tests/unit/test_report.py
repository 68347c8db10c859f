"""What the report takes out of a run folder: missing, damaged, half-written and hostile files included."""

from __future__ import annotations

import base64
import json
import math
import random
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from offbeat.commands.report import lines as said
from offbeat.commands.report import report
from offbeat.errors import ConfigError, RunError
from offbeat.metrics.writer import RunFolder, encode_line, samples_file
from offbeat.report import collect as collecting
from offbeat.report.collect import Report, collect
from offbeat.report.curves import (
    alarm_list,
    clean_records,
    curves,
    evaluation_times,
    evaluations,
    ranges,
    totals,
    trained,
)
from offbeat.report.header import drops, failure_of, journal_facts, settings, status
from offbeat.report.lines import Lines, number, short, text, whole
from offbeat.report.page import content_policy, embedded_json, page
from offbeat.report.sample_chunks import TEXT_LIMIT, pack
from offbeat.report.sample_index import SampleIndex, choose, group_curves, groups_of, head_of
from offbeat.report.timeline import columns, covered_us, drawing, nesting, read_trace, timeline
from offbeat.testing.recorded_run import Recorded, write_run

HOSTILE = "</script><img src=x onerror=alert(1)>\x1b[31m\u202eabc\u2066 \u2028 <!-- & ' \""
SMALL = Recorded(steps=6, prompts_per_step=4, samples_per_prompt=4, eval_every=3, eval_prompts=5, eval_samples=2)


@pytest.fixture(scope="module", name="small")
def _small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "small"
    write_run(folder, SMALL)
    return folder


def sample(**changes: Any) -> dict[str, Any]:
    base: dict[str, Any] = {"step": 0, "eval": None, "prompt_id": "a/0", "sample_index": 0, "epoch": 0, "source": "a"}
    base |= {"prompt": "1+1=", "completion": "2", "reward": 1.0, "parts": {"exact": 1.0}, "errors": []}
    base |= {"advantage": 0.5, "finish_reason": "stop", "versions": [[0, 2]], "engine": "engine-0"}
    return base | {"prompt_tokens": 4, "completion_tokens": 2} | changes


def run_with(folder: Path, **files: bytes | str) -> Path:
    """A run folder with these files; `config` is config.json, and so on."""
    names = {"config": "config.json", "trace": "trace.json", "older": "samples.older.jsonl", "lock": ".lock"}
    folder.mkdir(exist_ok=True)
    for key, content in files.items():
        path = folder / names.get(key, f"{key}.jsonl")
        path.write_bytes(content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content)
    return folder


def made(folder: Path) -> Report:
    return collect(folder, samples_bytes=1_000_000)


def unpacked(packed: str) -> Any:
    return json.loads(zlib.decompress(base64.b64decode(packed)))


def kept_samples(found: Report) -> list[dict[str, Any]]:
    return [one for chunk in found.samples.chunks for group in unpacked(chunk) for one in group["samples"]]


# --- values ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "expected"),
    [(1, 1), (0.5, 0.5), (True, None), ("1", None), (None, None), (math.nan, None), (math.inf, None), (10**400, None)],
)
def test_a_number_is_a_finite_number(value: object, expected: float | None) -> None:
    assert number(value) == expected


def test_whole_numbers_are_those_that_a_browser_has_exactly() -> None:
    assert [whole(value) for value in (3, 3.0, 3.5, -1, 1e18, "3", None)] == [3, 3, None, -1, None, None, None]


def test_numbers_are_shortened_to_six_digits() -> None:
    values = [0.1234567, 1e-9, 3.0, math.nan, None]
    assert [short(value) for value in values] == [0.123457, 1e-9, 3, None, None]


def test_half_a_surrogate_pair_becomes_a_character_that_utf8_has() -> None:
    assert text("a\ud800b") == "a\ufffdb"
    assert text("\ud83d\ude00") == "\U0001f600"
    assert [text(None), text(3)] == ["", "3"]


# --- lines ----------------------------------------------------------------------------------------------------------


def test_lines_that_cannot_be_read_are_counted_and_the_others_are_used(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"a": 1}\n\n[1]\nnonsense\n\xff\xfe\n{"a": NaN}\n{"a": "\\ud800"}\n{"a": 4')
    lines = Lines.open(path)
    assert [value["a"] for _, value in lines.objects()][::2] == [1, "\ud800"]
    assert lines.broken == 3
    assert lines.remark() == "x.jsonl: 3 lines could not be read and are left out; its last line was not finished."


def test_a_whole_object_without_its_line_feed_is_used(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b'{"a": 1}')
    lines = Lines.open(tmp_path / "x")
    assert list(lines.objects()) == [(0, {"a": 1})]
    assert lines.broken == 0


def test_what_is_appended_after_opening_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b'{"a": 1}\n')
    lines = Lines.open(path)
    with path.open("ab") as file:
        file.write(b'{"a": 2}\n')
    assert list(lines.objects()) == [(0, {"a": 1})]


def test_files_that_are_not_there_or_empty_or_folders_have_no_lines_and_say_so(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    (tmp_path / "folder").mkdir()
    found = {name: Lines.open(tmp_path / name) for name in ("missing", "empty", "folder")}
    assert all(list(lines.objects()) == [] for lines in found.values())
    assert [lines.remark() for lines in found.values()] == [
        "missing is not there.",
        "empty is empty.",
        "folder cannot be read.",
    ]


def test_a_line_beyond_the_limit_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offbeat.report.lines.LINE_LIMIT", 20)
    (tmp_path / "x").write_bytes(b'{"a": 1}\n{"a": "' + b"y" * 100 + b'"}\n{"a": 3}\n')
    lines = Lines.open(tmp_path / "x")
    assert [value["a"] for _, value in lines.objects()] == [1, 3]
    assert lines.broken == 1


# --- curves ---------------------------------------------------------------------------------------------------------


def test_records_are_ordered_by_step_and_the_later_of_two_wins() -> None:
    records = clean_records([{"step": 1, "loss": 1.0}, {"step": 0, "loss": 2.0}, {"step": 1, "loss": 3.0}, {"x": 1}])
    assert [(record["step"], record["loss"]) for record in records] == [(0, 2.0), (1, 3.0)]


def test_values_that_are_no_numbers_are_null_and_infinite_ones_are_listed() -> None:
    (record,) = clean_records([{"step": 0, "loss": math.inf, "lr": "high", "ess": None, "nonfinite": ["entropy"]}])
    assert record["loss"] is None
    assert "lr" not in record
    assert record["nonfinite"] == ["entropy", "loss"]


def test_keys_that_only_some_steps_have_are_null_at_the_others() -> None:
    found = curves(clean_records([{"step": 0, "a": 1}, {"step": 1, "b": 2}, {"step": 5, "a": 3}]), {}, None)
    assert found["steps"] == [0, 1, 5]
    assert found["series"] == {"a": [1, None, 3], "b": [None, 2, None]}


def test_the_error_of_the_reward_is_exact_where_samples_tell_it_and_a_bound_elsewhere() -> None:
    records = clean_records([{"step": s, "reward_mean": 0.5, "reward_std": 0.4} for s in range(2)])
    assert curves(records, {0: 0.05}, 16)["reward_error"] == [0.05, 0.1]
    assert curves(records, {}, None)["reward_error"] == [None, None]


def test_a_long_run_is_thinned_evenly_and_keeps_its_last_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offbeat.report.curves.STEP_LIMIT", 10)
    found = curves(clean_records([{"step": s, "loss": s} for s in range(36)]), {}, None)
    assert found["steps"] == [0, 4, 8, 12, 16, 20, 24, 28, 32, 35]
    assert found["steps_total"] == 36


def test_evaluations_are_drawn_over_the_version_that_they_are_about() -> None:
    records = clean_records(
        [
            {"step": 0, "eval/held/avg@4": 0.2, "eval/held/avg@4_error": 0.01, "eval/held/weights_version": 0},
            {"step": 2, "eval/held/avg@4": 0.4, "eval/held/pass@2": 0.5, "eval/held/pass@10": 0.9},
            {"step": 3, "weights_version": 3, "eval/held/avg@4": 0.5, "eval/held/avg@4_error": None},
        ]
    )
    (held,) = evaluations(records)
    assert held["versions"] == [0, 2, 3]
    assert [score["name"] for score in held["scores"]] == ["avg@4", "pass@2", "pass@10"]
    assert held["scores"][0] == {"name": "avg@4", "values": [0.2, 0.4, 0.5], "errors": [0.01, None, None]}
    assert [record["step"] for record in trained(records)] == []


def test_the_time_of_the_last_evaluation_counts_and_makes_no_step() -> None:
    last = {"step": 2, "weights_version": 2, "time_evaluate_s": 4.0, "eval/held/weights_version": 2}
    records = clean_records(
        [
            {"step": 0, "reward_mean": 0.1, "time_evaluate_s": 3.0, "eval/held/weights_version": 0},
            {"step": 1, "reward_mean": 0.2, "time_evaluate_s": 0.0},
            last,
        ]
    )
    assert evaluation_times(records) == {"versions": [0, 2], "seconds": [3, 4]}
    assert totals(records)["time_evaluate_s"] == 7
    assert [record["step"] for record in trained(records)] == [0, 1]


def test_each_alarm_is_there_once_with_its_steps() -> None:
    lines = [{"step": s, "reward_errors": int(s in (2, 3, 4, 9)), "reward_error_first": "f: E"} for s in range(10)]
    steps = clean_records(lines)
    assert list(curves(steps, {}, None)["series"]) == ["reward_errors"]
    (alarm,) = alarm_list(steps)
    assert alarm["kind"] == "reward-errors"
    assert (alarm["step"], alarm["steps"], alarm["count"], alarm["now"]) == (2, "2–4, 9", 4, True)
    assert alarm["newest"].startswith("step 9: 1 reward call failed and counted as 0; the first: f: E. The texts")


def test_steps_are_written_as_ranges() -> None:
    assert ranges([1, 2, 3, 5, 7, 8]) == "1–3, 5, 7–8"
    assert ranges(list(range(0, 40, 2)), limit=2) == "0, 2, …"
    assert ranges([]) == ""


# --- header ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("last", "planned", "locked", "failed", "expected"),
    [
        (79, 80, False, False, "done"),
        (79, 80, False, True, "failed"),
        (40, 80, True, True, "running"),
        (40, 80, False, True, "failed"),
        (40, 80, False, False, "interrupted"),
        (None, 80, False, False, "interrupted"),
        (40, None, False, False, "unknown"),
    ],
)
def test_how_a_run_stands(last: int | None, planned: int | None, locked: bool, failed: bool, expected: str) -> None:
    done = 0 if last is None else last + 1
    assert status(steps_done=done, last_step=last, planned=planned, locked=locked, failed=failed) == expected


def test_the_journal_tells_resumes_drops_and_times() -> None:
    events: list[dict[str, Any]] = [
        {"event": "started", "step": 0, "time": 100.0},
        {"event": "dropped", "step": 2, "reason": "no spread", "samples": [["a/0", 0, [0, 1]], ["a/1", 0, [0, 1]]]},
        {"event": "dropped", "step": 3, "reason": "no spread", "samples": [["a/2", 0, [0, 1]]]},
        {"event": "dropped", "step": 4, "reason": "the run was stopped"},
        {"event": "resumed", "step": 3, "time": 160.0, "offset": 20},
        {"event": "dropped", "step": 3, "reason": "no spread", "samples": [["a/2", 0, [0, 1]], 7, []]},
        {"event": "dropped", "step": 3, "reason": None, "samples": "x"},
        {"event": "saved", "step": 6, "time": "soon"},
        {"event": ["x"]},
    ]
    found = journal_facts((10 * i, event) for i, event in enumerate(events))
    assert (found.started_s, found.ended_s, found.resumed_at, found.saved_at) == (100.0, 160.0, [3], 6)
    assert drops(found) == [["no spread", 6, 2], ["no reason given", 0, 1]]


def test_settings_are_flat_and_in_order() -> None:
    config = {"model": "m", "trainer": {"lr": 1e-6, "betas": [0.9, 0.99]}, "data": [{"source": "a"}], "x": {}}
    assert settings(config) == [
        ["model", "m"],
        ["trainer.lr", "1e-06"],
        ["trainer.betas", "[0.9, 0.99]"],
        ["data[0].source", "a"],
        ["x", "{}"],
    ]


def test_the_error_of_a_failed_run_is_found_in_its_log() -> None:
    log = (
        "2027-01-31 15:45:00,123 ERROR offbeat: the run failed\n"
        "Traceback (most recent call last):\n"
        '  File "x.py", line 3, in f\n'
        "    raise WorkerDied()\n"
        "offbeat.errors.WorkerDied: engine-0: killed by SIGKILL\n"
        "last lines of its log:\nhello: world\n"
        "2027-01-31 15:45:00,125 ERROR offbeat: in engine-0:\nTraceback\nValueError: inner\n"
    )
    assert failure_of(log) == "offbeat.errors.WorkerDied: engine-0: killed by SIGKILL"
    assert failure_of("all well\n") is None


# --- timeline -------------------------------------------------------------------------------------------------------


def span(pid: int, name: str, category: str, start: float, dur: float, step: int | None = 0, tid: int = 0) -> bytes:
    event = {"ph": "X", "pid": pid, "tid": tid, "name": name, "cat": category, "ts": start, "dur": dur}
    return json.dumps({**event, "args": {"step": step}}).encode() + b",\n"


def process(pid: int, name: str, order: int) -> list[bytes]:
    base = {"ph": "M", "pid": pid, "tid": 0}
    named = {**base, "name": "process_name", "args": {"name": name}}
    sort = {**base, "name": "process_sort_index", "args": {"sort_index": order}}
    return [json.dumps(one).encode() + b",\n" for one in (named, sort)]


def test_busy_time_is_a_union_and_the_pause_between_two_parts_is_in_none() -> None:
    hour = 3600e6
    lines = [b"[\n", *process(7, "engine-0", 2), *process(3, "trainer-0", 1)]
    lines += [span(7, "generate", "generate", 0, 4e6), span(7, "decode", "generate", 1e6, 3e6)]
    lines += [span(3, "train", "train", 2e6, 6e6), span(3, "train", "train", hour, 2e6), b"]\n"]
    found = timeline(read_trace(lines))
    assert found["traced_s"] == 10
    trainer, engine = found["processes"]
    assert (trainer["name"], trainer["busy_s"], trainer["by_category"]) == ("trainer-0", 8, {"train": 8})
    assert (engine["busy_s"], engine["idle_s"], engine["by_category"]) == (4, 6, {"generate": 4})
    assert [(one["name"], one["seconds"], one["count"]) for one in engine["by_name"]] == [
        ("generate", 4, 1),
        ("decode", 3, 1),
    ]


def test_one_name_counts_apart_for_each_thing_that_it_was_done_for() -> None:
    lines = [*process(7, "engine-0", 1), span(7, "decode", "sync", 0, 1e6), span(7, "decode", "evaluate", 1e6, 6e6)]
    lines += [span(7, "decode", "generate", 7e6, 2e6), span(7, "prefill", "evaluate", 9e6, 1e6)]
    (engine,) = timeline(read_trace(lines))["processes"]
    assert [(one["name"], one["category"], one["seconds"]) for one in engine["by_name"]] == [
        ("decode", "evaluate", 6),
        ("decode", "generate", 2),
        ("decode", "sync", 1),
        ("prefill", "evaluate", 1),
    ]


def test_the_union_of_intervals_equals_one_counted_instant_by_instant() -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        start = np.sort(rng.integers(0, 100, size=12)).astype(float)
        end = start + rng.integers(0, 20, size=12)
        instants = {int(t) for a, b in zip(start, end, strict=True) for t in range(int(a), int(b))}
        assert covered_us(start, end) == len(instants)


def test_events_inside_others_are_drawn_below_them() -> None:
    lines = [span(1, "step", "train", 0, 10e6), span(1, "a", "train", 0, 4e6), span(1, "b", "train", 4e6, 6e6)]
    lines += [span(1, "inner", "train", 5e6, 1e6), span(1, "next", "train", 10e6 - 1, 1e6), span(2, "x", "sync", 1, 2)]
    trace = read_trace(lines)
    assert nesting(columns(trace)).tolist() == [0, 1, 0, 1, 2, 0]
    drawn = drawing(trace)
    assert drawn["lanes"] == [0, 0, 0, 1]
    assert drawn["processes"] == ["process 1", "process 2"]
    assert np.cumsum(drawn["start"]).tolist() == [0, 0, 1, 4_000_000, 5_000_000, 9_999_999]


def test_the_longest_events_are_drawn_when_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offbeat.report.timeline.EVENT_LIMIT", 3)
    trace = read_trace([span(1, "x", "train", 100 * i, i) for i in range(10)])
    assert drawing(trace)["dur"] == [7, 8, 9]
    assert timeline(trace)["events_total"] == 10


def test_both_files_of_a_trace_are_read_and_a_lost_beginning_is_told_of(tmp_path: Path) -> None:
    """Times are in seconds of the run's first start, in both files."""
    run_with(tmp_path, trace=b"[\n" + span(1, "b", "train", 200e6, 10e6))
    (tmp_path / "trace.older.json").write_bytes(b"[\n" + span(1, "a", "train", 1e6, 30e6).rstrip(b",\n") + b"\n]\n")
    found = made(tmp_path)
    assert found.value["timeline"]["events_total"] == 2
    assert found.value["timeline"]["traced_s"] == 40
    assert not [remark for remark in found.value["remarks"] if remark.startswith("trace")]
    (tmp_path / "trace.older.json").write_bytes(b"[\n" + span(1, "a", "train", 100e6, 30e6) + b"nonsense\n")
    told = [remark for remark in made(tmp_path).value["remarks"] if remark.startswith("trace")]
    assert told == [
        "trace.older.json: 1 line could not be read and is left out.",
        "trace.older.json begins 100 s after the run did: earlier spans were not kept.",
    ]


def test_a_trace_that_is_damaged_gives_what_is_whole() -> None:
    strange: list[dict[str, Any]] = [{"ph": "X", "ts": "x"}, {"ph": "X", "ts": 1, "dur": -1}, {"ph": "B"}, {}]
    lines = [b"[\n", *(json.dumps(one).encode() + b",\n" for one in strange), b"[1],\n", b"7,\n"]
    lines += [b'{"ph": "X", "ts": 5, "dur": 2},\n', b'{"ph": "X", "ts": 9, "du']
    trace = read_trace(lines)
    assert len(trace.start_us) == 1
    assert trace.broken == 5
    found = timeline(trace)
    assert found["processes"][0]["by_category"] == {"other": 0.000002}
    assert timeline(read_trace([]))["events_total"] == 0


# --- samples --------------------------------------------------------------------------------------------------------


def index_of(samples: list[dict[str, Any]]) -> tuple[SampleIndex, list[bytes]]:
    index, lines = SampleIndex(), [encode_line(one) for one in samples]
    for i, line in enumerate(lines):
        head = head_of(line)
        assert head is not None
        index.add(0, i, len(line), head)
    return index, lines


def test_a_line_is_a_sample_when_it_has_a_step_and_a_prompt() -> None:
    assert head_of(b'{"step": 0, "prompt_id": "a"}') is not None
    for line in (b"{}", b'{"step": 0}', b'{"step": -1, "prompt_id": "a"}', b'{"step": 1e30, "prompt_id": "a"}', b"[]"):
        assert head_of(line) is None


def test_values_of_a_wrong_type_are_missing_ones() -> None:
    head = head_of(b'{"step": 2.0, "prompt_id": 7, "reward": "high", "errors": 3, "epoch": [], "prompt": "\\ud800"}')
    assert head is not None
    assert (head.step, head.prompt_id, head.reward, bool(head.errors), head.epoch) == (2, "7", None, True, None)


def test_groups_tell_how_the_prompts_of_a_step_differ() -> None:
    rewards = {"easy": [1.0, 1.0], "mid": [1.0, 0.0], "hard": [0.0, 0.0], "unscored": [None, None]}
    samples = [sample(prompt_id=name, reward=r) for name, values in rewards.items() for r in values]
    samples += [sample(eval="held", prompt_id="h", reward=0.3), sample(step=1, prompt_id="easy", reward=0.25)]
    index, _ = index_of(samples)
    found = group_curves(index, groups_of(index, TEXT_LIMIT))
    assert found["steps"] == [0, 1]
    assert [column[0] for column in found["quantiles"]] == [0, 0.1, 0.25, 0.5, 0.75, 0.9, 1]
    assert found["errors"] == [pytest.approx(0.5 / math.sqrt(3), abs=1e-6), None]
    assert found["with_spread"] == [pytest.approx(1 / 3, abs=1e-6), 0]


def many_samples(steps: int = 40, prompts: int = 10) -> list[dict[str, Any]]:
    rng = random.Random(1)
    samples: list[dict[str, Any]] = []
    for step in range(steps):
        if step % 10 == 0:
            samples += [sample(step=step, eval="held", prompt_id=f"h/{i}") for i in range(20)]
        for prompt in range(prompts):
            for index in range(4):
                value = sample(step=step, prompt_id=f"p/{prompt}", sample_index=index, reward=rng.random())
                samples.append(
                    value | {"completion": f"{rng.random()}" * 5, "completion_tokens": rng.randrange(100_000)}
                )
    return samples


def test_every_step_and_the_newest_evaluation_are_kept_when_not_all_fit() -> None:
    index, _ = index_of(many_samples())
    groups = groups_of(index, TEXT_LIMIT)
    blocks = list(index.blocks)
    kept = choose(index, groups, 0.3 * float(groups.bytes.sum()))
    assert kept == choose(index, groups, 0.3 * float(groups.bytes.sum()))
    held = [blocks[int(groups.block[g])] for g in kept]
    per_step = {step: held.count((None, step)) for step in range(40)}
    assert max(per_step.values()) - min(per_step.values()) <= 1
    assert min(per_step.values()) >= 1
    assert held.count(("held", 30)) == 20
    assert float(groups.bytes[kept].sum()) <= 0.3 * float(groups.bytes.sum())


def test_of_each_step_the_most_telling_groups_are_kept() -> None:
    index, _ = index_of(many_samples(steps=1))
    groups = groups_of(index, TEXT_LIMIT)
    kept = choose(index, groups, float(groups.bytes.sum()) * 0.65)
    training = [g for g in kept if groups.block[g] == 1]
    own = np.flatnonzero(groups.block == 1)
    for wanted in (
        own[np.argmin(groups.low[own])],
        own[np.argmax(groups.high[own])],
        own[np.argmax((groups.high - groups.low)[own])],
        own[np.argmax(groups.longest[own])],
    ):
        assert wanted in training


def test_the_room_for_samples_is_never_passed_and_nearly_used() -> None:
    samples = many_samples()
    rng = random.Random(2)
    for one in samples:
        one["completion"] = "".join(chr(rng.randrange(0x4E00, 0x9000)) for _ in range(100))
    index, lines = index_of(samples)
    groups = groups_of(index, TEXT_LIMIT)
    packed = pack(index, groups, lambda _, offset, __: lines[offset], 150_000)
    assert 75_000 < packed.size <= 150_000
    assert 0 < len(packed.groups) < len(index.groups)
    assert pack(index, groups, lambda _, offset, __: lines[offset], 0).groups == ()
    assert len(pack(index, groups, lambda _, offset, __: lines[offset], 10_000_000).groups) == len(index.groups)


@pytest.mark.parametrize("limit", [3_000, 30_000])
def test_groups_that_fit_only_when_they_are_packed_are_in_the_page(limit: int) -> None:
    """Each is larger than the room, as it lies in samples.jsonl."""
    samples = [sample(step=step, completion="aha! " * 10_000, sample_index=i) for step in range(20) for i in range(2)]
    index, lines = index_of(samples)
    packed = pack(index, groups_of(index, TEXT_LIMIT), lambda _, offset, __: lines[offset], limit)
    assert packed.groups
    assert packed.size <= limit
    assert unpacked(packed.chunks[0])[0]["samples"][0]["completion"].startswith("aha! ")


def test_a_chunk_has_whole_groups_and_the_index_leads_to_them() -> None:
    index, lines = index_of(many_samples())
    packed = pack(index, groups_of(index, TEXT_LIMIT), lambda _, offset, __: lines[offset], 10_000_000)
    columns_ = unpacked(packed.index)
    chunks = [unpacked(chunk) for chunk in packed.chunks]
    assert columns_["sets"] == [None, "held"]
    first = 0
    for chunk, at, count, step in zip(
        *(columns_["groups"][key] for key in ("chunk", "at", "count", "step")), strict=True
    ):
        group = chunks[chunk][at]
        assert len(group["samples"]) == count
        assert [one["reward"] for one in group["samples"]] == columns_["samples"]["reward"][first : first + count]
        assert 0 <= step < 40
        first += count
    assert first == len(lines)


def test_long_texts_keep_their_two_ends(tmp_path: Path) -> None:
    long = "a" * 700_000 + "z" * 700_000
    found = made(run_with(tmp_path, samples=encode_line(sample(completion=long, prompt="q" * 9_000))))
    (one,) = kept_samples(found)
    assert one["completion"].startswith("aaa")
    assert one["completion"].endswith("zzz")
    assert "characters left out" in one["completion"]
    assert len(one["completion"]) < TEXT_LIMIT + 100
    assert found.value["samples"]["cut"] == 2


# --- whole runs -----------------------------------------------------------------------------------------------------


def test_a_whole_run_has_everything(small: Path) -> None:
    found = made(small)
    value = found.value
    assert value["header"]["status"] == "done"
    assert value["header"]["versions"] == [0, 6]
    assert value["remarks"] == []
    assert value["curves"]["steps"] == list(range(6))
    assert all(error > 0 for error in value["curves"]["reward_error"])
    assert value["curves"]["evaluations"][0]["versions"] == [0, 3, 6]
    assert [one["name"] for one in value["timeline"]["processes"]] == [
        "controller",
        "trainer-0",
        "engine-0",
        "engine-1",
        "rewards",
    ]
    assert value["samples"]["samples"] == value["samples"]["samples_kept"] == 6 * 16 + 3 * 10
    assert len(kept_samples(found)) == 126


def test_the_same_run_gives_the_same_page(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collecting.time, "time", lambda: 1_800_000_000.0)
    assert "".join(page(made(small))) == "".join(page(made(small)))


@pytest.mark.parametrize("name", ["config.json", "metrics.jsonl", "samples.jsonl", "trace.json", "journal.jsonl"])
@pytest.mark.parametrize("what", ["missing", "empty", "half", "noise"])
def test_any_file_may_be_missing_empty_cut_or_damaged(small: Path, tmp_path: Path, name: str, what: str) -> None:
    for path in small.iterdir():
        if path.suffix in (".json", ".jsonl"):
            (tmp_path / path.name).write_bytes(path.read_bytes())
    path = tmp_path / name
    content = path.read_bytes()
    noise = random.Random(3).randbytes(3000)
    match what:
        case "missing":
            path.unlink()
        case "empty":
            path.write_bytes(b"")
        case "half":
            path.write_bytes(content[: len(content) // 2 + 3])
        case _:
            path.write_bytes(content[:200] + noise + content[200:])
    found = made(tmp_path)
    told = [remark for remark in found.value["remarks"] if remark.startswith(name)]
    expected = not (what == "missing" and name == "journal.jsonl") and not (what == "half" and name == "trace.json")
    assert bool(told) == expected
    assert "".join(page(found)).endswith("</html>\n")


def test_values_of_any_kind_in_any_place_give_a_page(tmp_path: Path) -> None:
    rng = random.Random(4)
    values: list[Any] = [None, True, -1, 10**30, 0.5, "x", HOSTILE, [], [1, [2]], {}, {"a": [None]}, "\ud800"]

    def damaged(one: dict[str, Any]) -> str:
        return json.dumps({key: rng.choice(values) if rng.random() < 0.4 else value for key, value in one.items()})

    metrics = [{"step": i, "reward_mean": 0.5, "eval/h/avg@2": 0.1, "eval/h/weights_version": i} for i in range(40)]
    metrics = [
        m | {"nonfinite": [], "reward_errors": 1, "skipped_updates": 1, "truncated_fraction": 1} for m in metrics
    ]
    events = [json.loads(span(1, "a", "train", i, 1).rstrip(b",\n")) for i in range(40)]
    journal = [{"event": "resumed", "step": i, "time": 1.0, "reason": "x"} for i in range(40)]
    folder = run_with(
        tmp_path,
        config=damaged({"model": "m", "steps": 3, "data": [], "eval": [], "trainer": {}, "sampling": {}}),
        metrics="".join(damaged(one) + "\n" for one in metrics),
        samples="".join(damaged(sample(step=i)) + "\n" for i in range(200)),
        trace="[\n" + "".join(damaged(one) + ",\n" for one in events),
        journal="".join(damaged(one) + "\n" for one in journal),
    )
    assert "".join(page(made(folder))).endswith("</html>\n")


def test_a_resumed_run_has_each_step_once_and_says_where_it_went_on(small: Path, tmp_path: Path) -> None:
    metrics = (small / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    journal = [{"event": "started", "step": 0, "time": 1.0}, {"event": "resumed", "step": 3, "time": 99.0}]
    folder = run_with(
        tmp_path,
        config=(small / "config.json").read_bytes(),
        metrics=b"".join([*metrics[:5], *metrics[3:]]),
        journal=b"".join(map(encode_line, journal)),
    )
    value = made(folder).value
    assert value["curves"]["steps"] == list(range(6))
    assert (value["header"]["resumes"], value["header"]["resumed_at"]) == (1, [3])
    assert value["header"]["wall_s"] == 98


def test_samples_that_were_moved_to_the_older_file_come_first(tmp_path: Path) -> None:
    folder = run_with(tmp_path, older=encode_line(sample(step=0)), samples=encode_line(sample(step=1)))
    assert unpacked(made(folder).samples.index)["groups"]["step"] == [0, 1]


def test_a_file_that_is_moved_aside_while_it_is_read_is_read_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder.create("x", run_dir=tmp_path / "run")
    with samples_file(folder, limit_bytes=10) as file:
        file.write(sample(step=0))
        original = collecting.groups_of

        def between_the_passes(*arguments: Any) -> Any:
            file.write(sample(step=1))
            return original(*arguments)

        monkeypatch.setattr(collecting, "groups_of", between_the_passes)
        found = made(folder.path)
    assert (folder.path / "samples.older.jsonl").exists()
    assert [one["completion"] for one in kept_samples(found)] == ["2"]


def test_a_run_that_trains_now_is_called_so(small: Path, tmp_path: Path) -> None:
    folder = RunFolder.create("x", run_dir=tmp_path / "run")
    metrics = (small / "metrics.jsonl").read_bytes().splitlines(keepends=True)[0]
    run_with(folder.path, metrics=metrics, config=(small / "config.json").read_bytes())
    with folder.locked():
        assert made(folder.path).value["header"]["status"] == "running"
    assert made(folder.path).value["header"]["status"] == "interrupted"


def test_a_run_that_failed_says_why(tmp_path: Path) -> None:
    folder = run_with(tmp_path, metrics=encode_line({"step": 0, "loss": 1.0}))
    (folder / "logs").mkdir()
    (folder / "logs" / "controller.log").write_text(
        "2027-01-31 15:45:00,123 ERROR offbeat: the run failed\nTraceback:\n  x\noffbeat.errors.RunError: disk full\n"
    )
    header = made(folder).value["header"]
    assert (header["status"], header["failure"]) == ("failed", "offbeat.errors.RunError: disk full")


# --- page -----------------------------------------------------------------------------------------------------------


def test_no_text_of_a_run_can_end_the_element_that_holds_it(tmp_path: Path) -> None:
    hostile = sample(prompt=HOSTILE, completion=HOSTILE, prompt_id=HOSTILE, source=HOSTILE, eval=HOSTILE)
    hostile |= {"parts": {HOSTILE: 1.0}, "errors": [HOSTILE], "engine": HOSTILE, "finish_reason": HOSTILE}
    metrics = {"step": 0, f"reward/{HOSTILE}": 1.0, HOSTILE: 2.0, f"eval/{HOSTILE}/avg@4": 0.5, "nonfinite": [HOSTILE]}
    folder = run_with(
        tmp_path / "run",
        config=encode_line({"model": HOSTILE, HOSTILE: HOSTILE}),
        metrics=encode_line(metrics),
        samples=encode_line(hostile),
        trace=b"[\n" + span(1, HOSTILE, HOSTILE, 0, 1),
        journal=encode_line({"event": "dropped", "step": 0, "reason": HOSTILE}),
    )
    found = made(folder)
    made_page = "".join(page(found))
    assert "onerror=alert" in made_page, "the text is there, as data"
    assert "<img" not in made_page
    assert made_page.count("<script") == made_page.count("</script>")
    assert json.loads(embedded_json(found.value)) == found.value


def test_the_title_is_escaped(tmp_path: Path) -> None:
    folder = run_with(tmp_path / "<b>&x", metrics=b'{"step": 0}\n')
    assert "<title>&lt;b&gt;&amp;x · offbeat report</title>" in "".join(page(made(folder)))


def test_the_policy_lets_nothing_in() -> None:
    policy = content_policy(["let a;"], ["b {}"])
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    for word in ("unsafe", "http", "data:", "blob:", "*", "self"):
        assert word not in policy


def test_no_template_names_a_place_on_a_network(small: Path) -> None:
    made_page = "".join(page(made(small)))
    outside = [line for line in made_page.splitlines() if "://" in line]
    # uPlot names its home in a comment; SVG has a name space that looks like an address.
    assert all("github.com/leeoniya/uPlot" in line or "www.w3.org/2000/svg" in line for line in outside)


def test_the_page_is_replaced_whole_or_not_at_all(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "page.html"
    assert report(small, output=output).bytes == output.stat().st_size
    before = output.read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(RunError, match=r"cannot be written: .*No space left.*--output"):
        report(small, output=output)
    assert output.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path, words in (
        (tmp_path, "none of a run's files"),
        (tmp_path / "x", "not exist"),
        (tmp_path / "file", "file"),
    ):
        with pytest.raises(ConfigError, match=words):
            report(path)


def test_an_output_that_cannot_be_is_refused(small: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is a folder"):
        report(small, output=tmp_path)
    with pytest.raises(ConfigError, match="there is no folder"):
        report(small, output=tmp_path / "no" / "page.html")


def test_what_is_said_has_the_path_and_what_was_left_out(small: Path, tmp_path: Path) -> None:
    made_ = report(small, output=tmp_path / "p.html", samples_mb=0.002)
    first, second, *rest = said(made_)
    assert first == f"report     {tmp_path / 'p.html'}"
    assert " of 126 samples · " in second
    assert rest == []
