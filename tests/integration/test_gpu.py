"""Real runs on a CUDA device; run by hand: `pytest -m gpu tests/integration/test_gpu.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_run import merge, write_config, write_project

import offbeat
from offbeat.config import load_config
from offbeat.devices import choose_device
from offbeat.testing.leaks import no_leaks

pytestmark = pytest.mark.gpu

CUDA: dict[str, Any] = {
    "rollout": {"device": "cuda:0"},
    "trainer": {"device": "cuda:0"},
    "weights": {"parity_every": 1},
}


def run(folder: Path, **changes: Any) -> tuple[dict[str, Any], ...]:
    project = write_project(folder / "project")
    config = load_config(write_config(project, **merge(CUDA, changes)))
    # Looking for the device loads the driver into this process, whose descriptors stay open. No context is made.
    assert choose_device("cuda:0").type == "cuda"
    with no_leaks():
        result = offbeat.run(config, run_dir=folder / "run")
    return tuple(dict(record) for record in result.history)


@pytest.mark.parametrize("max_staleness", [0, 1])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_engine_and_trainer_on_one_gpu_agree_after_every_sync(tmp_path: Path, dtype: str, max_staleness: int) -> None:
    history = run(tmp_path, max_staleness=max_staleness, steps=4, trainer={"dtype": dtype})
    gaps = [record["logprob_gap_max"] for record in history]
    assert max(gaps) <= (1e-3 if dtype == "float32" else 0.5)
    assert [record["staleness_max"] for record in history] == [0, *[max_staleness] * 3]
    assert all(record["skipped_updates"] == 0 for record in history)


def test_two_engines_share_a_gpu_with_the_trainer(tmp_path: Path) -> None:
    history = run(tmp_path, rollout={"replicas": 2})
    assert max(record["logprob_gap_max"] for record in history) <= 1e-3


def test_an_engine_on_the_gpu_follows_a_trainer_on_the_cpu(tmp_path: Path) -> None:
    """Digests are equal on every kind of device, or the first sync fails."""
    history = run(tmp_path, trainer={"device": "cpu"})
    assert max(record["logprob_gap_max"] for record in history) <= 1e-3
