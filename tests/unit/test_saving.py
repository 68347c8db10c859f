"""Saving: what is told when it takes long."""

from __future__ import annotations

import asyncio
import io
from pathlib import Path
from typing import Any

import pytest

from offbeat.checkpoint import CheckpointStore
from offbeat.config import parse_config
from offbeat.journal import Journal
from offbeat.recording import RunSaver

CONFIG = {
    "model": "fake",
    "steps": 4,
    "prompts_per_step": 4,
    "data": [{"source": "rows.jsonl", "rewards": {"fake:fake": 1.0}}],
}


class SlowDisk:
    """A trainer whose files take `seconds` to write."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    async def save(self, folder: str) -> None:
        await asyncio.sleep(self.seconds)
        (Path(folder) / "model").mkdir()


@pytest.mark.parametrize(("seconds", "told"), [(0.5, 1), (0.0, 0)])
def test_a_save_that_waits_for_the_disk_is_told_of_once_and_a_quick_one_is_not(
    tmp_path: Path, seconds: float, told: int
) -> None:
    heard: list[str] = []
    trainer: Any = SlowDisk(seconds)
    saver = RunSaver(
        parse_config(CONFIG),
        CheckpointStore(tmp_path / "checkpoints"),
        trainer,
        write_tokenizer=lambda path: None,
        journal=Journal(io.BytesIO()),
        history=[],
        data="",
        inputs={"rewards.py": "digest"},
        started_s=0.0,
        warn=heard.append,
        slow_s=0.2,
    )

    async def body() -> None:
        await saver.save(2, 2)
        await asyncio.sleep(0.3)

    asyncio.run(body())
    assert CheckpointStore(tmp_path / "checkpoints").at(2).state.inputs == {"rewards.py": "digest"}
    assert len(heard) == told
    for text in heard:
        assert text.startswith(
            "the checkpoint of step 2 is still being saved after 0.2 s: the run waits for the disk of"
        )
        assert str(tmp_path / "checkpoints") in text
