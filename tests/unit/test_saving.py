"""Saving: what is told when it takes long, and what must be safe before."""

from __future__ import annotations

import asyncio
import errno
import io
import os
from pathlib import Path
from typing import Any

import pytest

from offbeat.checkpoint import CheckpointStore
from offbeat.config import parse_config
from offbeat.errors import RunError
from offbeat.journal import Journal
from offbeat.metrics.writer import JsonLines
from offbeat.recording import RunSaver
from offbeat.weights.parity import Baseline

CONFIG = {
    "model": "fake",
    "steps": 4,
    "prompts_per_step": 4,
    "data": [{"source": "rows.jsonl", "rewards": {"fake:fake": 1.0}}],
}

BASELINE = Baseline("bfloat16", 0.02, 1)


class SlowDisk:
    """A trainer whose files take `seconds` to write."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    async def save(self, folder: str) -> None:
        await asyncio.sleep(self.seconds)
        (Path(folder) / "model").mkdir()


def saver(store: CheckpointStore, seconds: float = 0.0, **others: Any) -> RunSaver:
    given: dict[str, Any] = {"journal": Journal(io.BytesIO()), "inputs": {}, **others}
    trainer: Any = SlowDisk(seconds)
    return RunSaver(
        parse_config(CONFIG),
        store,
        trainer,
        write_tokenizer=lambda path: None,
        history=[],
        data="",
        started_s=0.0,
        **given,
    )


@pytest.mark.parametrize(("seconds", "told"), [(0.5, 1), (0.0, 0)])
def test_a_save_that_waits_for_the_disk_is_told_of_once_and_a_quick_one_is_not(
    tmp_path: Path, seconds: float, told: int
) -> None:
    heard: list[str] = []
    slow = saver(
        CheckpointStore(tmp_path / "checkpoints"),
        seconds,
        inputs={"rewards.py": "digest"},
        parity=lambda: BASELINE,
        warn=heard.append,
        slow_s=0.2,
    )

    async def body() -> None:
        await slow.save(2, 2)
        await asyncio.sleep(0.3)

    asyncio.run(body())
    state = CheckpointStore(tmp_path / "checkpoints").at(2).state
    assert (state.inputs, state.parity) == ({"rewards.py": "digest"}, BASELINE)
    assert len(heard) == told
    for text in heard:
        assert text.startswith(
            "the checkpoint of step 2 is still being saved after 0.2 s: the run waits for the disk of"
        )
        assert str(tmp_path / "checkpoints") in text


def test_a_checkpoint_is_made_only_once_the_lines_before_it_are_safe(tmp_path: Path) -> None:
    """Else a resume after a power cut would go on from a step of which metrics and samples are gone."""
    store = CheckpointStore(tmp_path / "checkpoints")

    def full() -> None:
        assert store.steps() == []
        raise OSError(errno.ENOSPC, "no space left on device")

    with pytest.raises(RunError, match=r"checkpoint of step 2 cannot be saved: .*no space left"):
        asyncio.run(saver(store, sync_lines=full).save(2, 2))
    assert store.steps() == []
    synced = list[list[int]]()
    asyncio.run(saver(store, sync_lines=lambda: synced.append(store.steps())).save(2, 2))
    assert (synced, store.steps()) == ([[]], [2])


def test_what_fails_after_a_save_does_not_say_that_the_save_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "the file")

    store, heard = CheckpointStore(tmp_path / "checkpoints"), list[str]()
    with monkeypatch.context() as patched:
        patched.setattr(CheckpointStore, "prune", full)
        asyncio.run(saver(store, warn=heard.append).save(2, 2))
    (text,) = heard
    assert text.startswith("an old checkpoint cannot be removed: ")
    assert "the file" in text
    with monkeypatch.context() as patched:
        patched.setattr(Journal, "saved", full)
        with pytest.raises(OSError, match="the file"):
            asyncio.run(saver(store).save(4, 4))
    assert store.steps() == [2, 4]


def test_lines_are_synced_file_and_name_also_when_the_file_moves_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced = list[int]()
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.fstat(descriptor).st_ino))
    with JsonLines(tmp_path / "samples.jsonl", limit_bytes=10, older=tmp_path / "older.jsonl") as lines:
        lines.write({"text": "more than ten bytes"})
        first = (tmp_path / "samples.jsonl").stat().st_ino
        assert synced == []
        lines.write({"text": "more"})
        assert (tmp_path / "older.jsonl").stat().st_ino == first
        assert first in synced
        synced.clear()
        lines.sync()
        assert synced == [(tmp_path / "samples.jsonl").stat().st_ino, tmp_path.stat().st_ino]
