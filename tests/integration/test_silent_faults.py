"""Faults that end nothing, in a real run: each is said in words.

An engine that misses a transfer, or computes with other weights than it shows, is in `test_learning.py`; one that
loads wrongly in `test_weight_sync.py`; weights that are no numbers in `test_weight_sync_failures.py`.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tiny_run import BASE, command, write_config, write_project

from offbeat.metrics.trends import SLOW_STEPS

pytestmark = pytest.mark.integration


def test_a_slow_engine_a_constant_reward_and_a_slow_disk_are_noticed(tmp_path: Path) -> None:
    project = write_project(tmp_path / "project")
    (project / "always.py").write_text("def always(completion):\n    return 0.5\n")
    rewards = {"rewards.py:length": 1.0, "always.py:always": 1.0}
    config = write_config(
        project,
        steps=SLOW_STEPS,
        data=[{**BASE["data"][0], "rewards": rewards}],
        rollout={"replicas": 2},
        checkpoint={"every_steps": SLOW_STEPS},
        limits={"stall_s": 2.0},
    )
    faults = "engine-1/engine.step=sleep:0.06; trainer.save=sleep:4"
    ended = command("train", config, "--run-dir", tmp_path / "run", faults=faults)
    assert ended.code == 0, ended.told
    assert ended.err == "", "a disk that takes longer than limits.stall_s is no stall"
    assert re.search(r"! step 7: engine-1 takes \S+ times as long for a token as the other engines", ended.out)
    assert re.search(r"! step \d: reward function always has returned \.50 for every sample", ended.out)
