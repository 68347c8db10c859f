"""The run folder: what is written can be read, whatever happened while writing."""

from __future__ import annotations

import errno
import fcntl
import io
import json
import math
import os
import resource
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_values import scored

from offbeat.errors import ConfigError, RunError
from offbeat.metrics.samples import bounded, sample_objects
from offbeat.metrics.writer import (
    JsonLines,
    RunFolder,
    encode_line,
    metrics_file,
    read_metrics,
    samples_file,
    write_whole,
)


def steps_of(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_bytes().splitlines()]


def test_two_runs_that_start_in_one_second_get_folders_of_their_own(tmp_path: Path) -> None:
    made = [RunFolder.create("sort", base=tmp_path / "runs", now=1_800_000_000.0) for _ in range(3)]
    names = [folder.path.name for folder in made]
    assert len(set(names)) == 3
    assert all(name.startswith("sort-20270115-") for name in names)
    assert names[1] == names[0] + "-2"
    assert all(folder.logs.is_dir() for folder in made)


def test_a_given_folder_is_made_or_taken_when_empty(tmp_path: Path) -> None:
    assert RunFolder.create("x", run_dir=tmp_path / "a" / "b").path == tmp_path / "a" / "b"
    (tmp_path / "empty").mkdir()
    assert RunFolder.create("x", run_dir=tmp_path / "empty").path == tmp_path / "empty"


def test_a_folder_with_other_things_in_it_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(ConfigError, match=r"is not empty \(thesis.tex\).*choose another"):
        RunFolder.create("x", run_dir=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_folder_with_a_run_is_refused_with_the_command_to_continue_it(tmp_path: Path) -> None:
    folder = RunFolder.create("x", run_dir=tmp_path / "run")
    folder.write_config({"steps": 3})
    metrics_file(folder).close()
    with pytest.raises(ConfigError, match=r"holds a run already.*'offbeat resume "):
        RunFolder.create("x", run_dir=tmp_path / "run")


def test_a_file_in_the_way_is_an_error_of_the_user(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be used as a folder"):
        RunFolder.create("x", run_dir=tmp_path / "file")
    with pytest.raises(ConfigError, match="cannot make the run folder"):
        RunFolder.create("x", base=tmp_path / "file")


def test_only_the_folder_of_a_run_can_be_opened(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        RunFolder.open(tmp_path / "gone")
    with pytest.raises(ConfigError, match=r"has no config.json"):
        RunFolder.open(tmp_path)
    for other in ("[]", "{}", '{"model_type": "qwen3", "model": 1, "steps": 2, "data": 3}'):
        (tmp_path / "config.json").write_text(other)
        with pytest.raises(ConfigError, match=r"has a config.json that is no run's"):
            RunFolder.open(tmp_path)
    written = {"model": "Ünï\ud800", "steps": math.inf, "data": []}
    RunFolder.create("x", run_dir=tmp_path / "run").write_config(written)
    assert RunFolder.open(tmp_path / "run").read_config() == {"model": "Ünï\ufffd", "steps": None, "data": []}


def test_a_line_can_be_read_before_the_file_is_closed(tmp_path: Path) -> None:
    with JsonLines(tmp_path / "m.jsonl") as lines:
        lines.write({"step": 0})
        assert steps_of(tmp_path / "m.jsonl") == [0]
        lines.write({"step": 1})
        assert steps_of(tmp_path / "m.jsonl") == [0, 1]


def test_a_resumed_file_has_each_step_once(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    with JsonLines(path) as lines:
        lines.write_all({"step": step, "run": 1} for step in range(5))
    with path.open("ab") as file:
        file.write(b'{"step": 5, "ru')  # killed in the middle of a line
    with JsonLines(path, next_step=3) as lines:
        lines.write_all({"step": step, "run": 2} for step in range(3, 6))
    found = [json.loads(line) for line in path.read_bytes().splitlines()]
    assert [(o["step"], o["run"]) for o in found] == [(0, 1), (1, 1), (2, 1), (3, 2), (4, 2), (5, 2)]
    assert [file.name for file in tmp_path.iterdir()] == ["m.jsonl"]


@pytest.mark.parametrize("cut", range(1, 14))
def test_a_line_cut_anywhere_never_joins_the_next_one(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "m.jsonl"
    whole = encode_line({"step": 0}) + encode_line({"step": 1})
    path.write_bytes(whole[:-cut] if cut < 13 else whole)
    with JsonLines(path, next_step=2) as lines:
        lines.write({"step": 2})
    # Only the line feed lost: the line is whole.
    assert steps_of(path) == ([0, 1, 2] if cut in {1, 13} else [0, 2])


def test_lines_that_are_no_objects_of_a_step_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"step": 0}\n\x00\x00\x00\n[1]\n{"other": 1}\n\xff\xfe{"step": 1}\n{"step": 1}\n\n')
    JsonLines(path, next_step=9).close()
    assert steps_of(path) == [0, 1]


def test_samples_stay_bounded_and_the_newest_are_kept(tmp_path: Path) -> None:
    folder = RunFolder.create("x", run_dir=tmp_path / "run")
    with samples_file(folder, limit_bytes=200) as lines:
        for step in range(40):
            lines.write_all({"step": step, "i": i} for i in range(2))
    files = sorted(folder.path.glob("samples*.jsonl"))
    assert [file.name for file in files] == ["samples.jsonl", "samples.older.jsonl"]
    assert sum(file.stat().st_size for file in files) < 2 * 200 + 2 * 50
    kept = steps_of(files[1]) + steps_of(files[0])
    assert kept == sorted(kept)
    assert kept[-1] == 39
    with samples_file(folder, next_step=36, limit_bytes=200):
        pass
    assert max(step for file in files for step in steps_of(file)) == 35


def test_metrics_can_be_read_while_a_line_is_being_written(tmp_path: Path) -> None:
    folder = RunFolder.create("x", run_dir=tmp_path / "run")
    with pytest.raises(RunError, match="no step of this run has finished"):
        read_metrics(folder)
    with metrics_file(folder) as lines:
        lines.write({"step": 0, "overlap": 0.5})
    with folder.metrics.open("ab") as file:
        file.write(b'{"step": 1, "over')
    assert read_metrics(folder) == read_metrics(folder.path) == [{"step": 0, "overlap": 0.5}]


# Named characters that have broken writers, rather than all of Unicode: half pairs, line ends, controls, quotes.
awkward = st.text(st.sampled_from('aé中🎵\ud800\udfb5\u2028\u2029\x85\x0b\x1c\n\r"\\\x00\x1b'), max_size=8)
anything = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats() | awkward,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(awkward, inner, max_size=3),
    max_leaves=8,
)


@settings(deadline=None)
@given(st.dictionaries(awkward, anything, max_size=4))
def test_whatever_is_written_is_one_line_of_strict_json(values: dict[str, object]) -> None:
    line = encode_line(values)
    text = line.decode("utf-8")  # strict: no surrogate got through
    assert len(text.splitlines()) == 1

    def refuse(name: str) -> None:
        raise AssertionError(name)

    json.loads(text, parse_constant=refuse)


def test_texts_come_back_as_they_were_but_for_half_pairs() -> None:
    text = 'tab\t line\n quote" ünï 中 🎵 \u2028 \x85 \x00 \x1b[31m'
    back = json.loads(encode_line({"a": text, "b": "x\ud83dy", "c": "\ud83c\udfb5"}))
    assert back == {"a": text, "b": "x\ufffdy", "c": "🎵"}


def test_numpy_values_are_numbers() -> None:
    values = {"a": np.float32(0.5), "b": np.int64(3), "c": np.array([1, 2]), "d": np.float64("nan"), "e": Path("/x")}
    assert json.loads(encode_line(values)) == {"a": 0.5, "b": 3, "c": [1, 2], "d": None, "e": "/x"}


def test_a_sample_has_all_that_is_needed_to_look_at_it_or_score_it_again() -> None:
    one = scored(
        "data/7",
        2,
        reward=0.75,
        versions=[3, 3, 4],
        epoch=1,
        parts={"a.py:f": 0.75},
        errors=("late",),
        finish_reason="length",
    )
    (found,) = sample_objects(5, [one], [-0.5])
    assert json.loads(encode_line(found)) == {
        "step": 5,
        "eval": None,
        "prompt_id": "data/7",
        "sample_index": 2,
        "epoch": 1,
        "source": "data",
        "row": one.prompt.row_digest,
        "prompt": "two plus three is",
        "completion": "five",
        "reward": 0.75,
        "parts": {"a.py:f": 0.75},
        "errors": ["late"],
        "advantage": -0.5,
        "finish_reason": "length",
        "versions": [[3, 2], [4, 1]],
        "engine": "engine-0",
        "prompt_tokens": 4,
        "completion_tokens": 3,
    }
    (unknown,) = sample_objects(5, [one], evaluation="test")
    assert (unknown["advantage"], unknown["eval"]) == (None, "test")
    with pytest.raises(ValueError):
        sample_objects(5, [one], [0.1, 0.2])


def test_a_text_without_end_is_cut_in_the_middle_and_says_so() -> None:
    assert bounded("a" * 10, 10) == "a" * 10
    cut = bounded("a" * 500 + "b" * 500, 100)
    assert cut.startswith("a" * 50 + "\n… 900 characters left out …\n")
    assert cut.endswith("b" * 50)


def test_two_processes_cannot_train_into_one_folder(tmp_path: Path) -> None:
    folder = RunFolder.create("run", base=tmp_path)
    with folder.locked(), pytest.raises(ConfigError, match="in use by another offbeat"), folder.locked():
        pass
    with folder.locked():
        pass


class SmallDisk(io.BytesIO):
    """Takes what fits, three bytes at a time, and then has no space left."""

    room = 20

    def write(self, data: Any) -> int:
        fits = bytes(data[: min(3, self.room - len(self.getvalue()))])
        if not fits:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(fits)


def test_a_line_that_does_not_fit_on_the_disk_is_not_there_at_all_and_the_next_may_fit() -> None:
    disk = SmallDisk()
    path = Path("run/metrics.jsonl")
    write_whole(disk, b"twelve bytes", path)
    with pytest.raises(OSError, match=r"No space left on device: 'run/metrics\.jsonl'") as caught:
        write_whole(disk, b"and twelve more", path)
    assert caught.value.errno == errno.ENOSPC
    assert disk.getvalue() == b"twelve bytes"
    write_whole(disk, b"and few", path)
    assert disk.getvalue() == b"twelve bytesand few"


def test_a_rewrite_that_fails_leaves_the_old_file_and_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f'{{"step": {step}, "text": "{"x" * 100_000}"}}\n' for step in range(20)))
    before = path.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    too_large = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, limits[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            JsonLines(path, next_step=19)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, too_large)
    assert path.read_bytes() == before
    assert [one.name for one in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_look_at_the_lock_in_the_very_moment_does_not_keep_a_run_from_starting(tmp_path: Path) -> None:
    """`offbeat report` holds it, shared, while it looks whether the run is training."""
    folder = RunFolder.create("run", run_dir=tmp_path / "run")
    with (folder.path / ".lock").open("a+") as look:
        fcntl.flock(look, fcntl.LOCK_SH)
        threading.Timer(0.05, fcntl.flock, (look, fcntl.LOCK_UN)).start()
        with folder.locked():
            assert (folder.path / ".lock").read_text() == str(os.getpid())
        fcntl.flock(look, fcntl.LOCK_SH)
        with pytest.raises(ConfigError, match="is in use by another offbeat"), folder.locked():
            pass
