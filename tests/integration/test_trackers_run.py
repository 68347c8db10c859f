"""A real run with a tracker of the user's own: told every step, and told on from there when the run is resumed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_run import command, records, write_config, write_project

from offbeat.testing.leaks import no_leaks

pytestmark = pytest.mark.integration

TRACKER = """
import json
from offbeat.trackers import Opened


class Lines:
    def __init__(self, broken=False):
        self.broken = broken

    def start(self, run):
        self.file = (run.folder / "lines.jsonl").open("a")
        self.write("start", run.name, run.next_step, run.delivered)
        return Opened(run.delivered)

    def write(self, *call):
        print(json.dumps(call), file=self.file, flush=True)

    def log(self, step, metrics):
        if self.broken:
            raise RuntimeError("no route to host")
        self.write("log", step, dict(metrics))

    def samples(self, step, rows):
        self.write("samples", step, list(rows))

    def finish(self, outcome):
        self.write("finish", outcome.status, outcome.error)


class Broken(Lines):
    def log(self, step, metrics):
        raise RuntimeError("no route to host")
"""


def calls(run: Path, name: str) -> list[Any]:
    lines = [json.loads(line) for line in (run / "lines.jsonl").read_text().splitlines()]
    return [line[1:] for line in lines if line[0] == name]


def test_a_tracker_gets_what_metrics_jsonl_has_also_from_a_resumed_run(tmp_path: Path) -> None:
    project = write_project(tmp_path)
    (project / "mine.py").write_text(TRACKER)
    trackers = [{"kind": "mine.py:Lines", "samples": 3}, {"kind": "mine.py:Broken"}]
    config = write_config(project, steps=1, eval=[{"name": "held", "source": "train.jsonl"}], trackers=trackers)
    run = tmp_path / "run"
    with no_leaks(adopt=True):
        ended = command("train", config, "--run-dir", run)
        assert ended.code == 0, ended.told
        assert ended.told.count("mine.py:Broken: RuntimeError: no route to host. The run goes on") == 1
        assert "2 of 2 records were not delivered" in ended.told
        ended = command("resume", run, "steps=2")
        assert ended.code == 0, ended.told
    assert calls(run, "finish").count(["done", None]) == 4
    assert ["run", 1, 1] in calls(run, "start")
    evaluated = [key for record in records(run) for key in record if key.startswith("eval/")]
    assert evaluated
    logged: dict[int, dict[str, float]] = {}
    for step, metrics in calls(run, "log"):
        assert not set(logged.get(step, ())) & set(metrics), f"step {step} was logged twice"
        logged.setdefault(step, {}).update(metrics)
    recorded = {one["step"]: one for one in records(run)}
    assert logged.keys() == recorded.keys() == {0, 1, 2}
    for step, record in recorded.items():
        numbers = {key: value for key, value in record.items() if isinstance(value, int | float) and key != "step"}
        assert logged[step].keys() == numbers.keys()
        for key, value in numbers.items():
            # Step 1 was evaluated by both parts: the point that came first stays.
            assert logged[step][key] == value or key.startswith(("eval/", "time_evaluate_s")), key
    assert [step for step, _ in calls(run, "samples")] == [0, 1]
    (_, rows), _ = calls(run, "samples")
    assert len(rows) == 3
    assert {"prompt", "completion", "reward", "parts", "versions"} <= rows[0].keys()


def test_what_is_missing_is_sent_by_the_command_track(tmp_path: Path) -> None:
    """No run is needed for it: a folder with metrics.jsonl and a config is enough."""
    (tmp_path / "mine.py").write_text(TRACKER)
    run = tmp_path / "run"
    run.mkdir()
    data = [{"source": "train.jsonl", "rewards": {"rewards.py:length": 1.0}}]
    kind = f"{tmp_path / 'mine.py'}:Lines"
    config = {"model": "m", "steps": 2, "prompts_per_step": 1, "data": data, "trackers": [{"kind": kind}]}
    (run / "config.json").write_text(json.dumps(config))
    (run / "metrics.jsonl").write_text("".join(f'{{"step": {step}, "reward_mean": 0.5}}\n' for step in range(2)))
    for _ in range(2):
        ended = command("track", run)
        assert ended.code == 0, ended.told
        assert "2 records are with" in ended.out
    assert calls(run, "log") == [[0, {"reward_mean": 0.5}], [1, {"reward_mean": 0.5}]]
    config["trackers"] = [{"kind": kind.replace("Lines", "Broken")}]
    (run / "config.json").write_text(json.dumps(config))
    ended = command("track", run)
    assert ended.code == 1
    assert "no route to host" in ended.err
