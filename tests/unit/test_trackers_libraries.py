"""Each library's own reader finds every point once, also after a resume, under the names of metrics.jsonl.

What is not installed is skipped: the extra `track` has all four. Nothing here needs a network.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import json
import os
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from offbeat.config import parse_config
from offbeat.trackers import tracking

Record: TypeAlias = dict[str, Any]
Points: TypeAlias = list[tuple[int, float]]
HOSTILE = "<script>alert(1)</script> | ![x](http://192.0.2.1/x.png)\n\n# `no` heading\n\u202eesrever"


def needs(*modules: str) -> pytest.MarkDecorator:
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")


def record(step: int, part: int = 0) -> Record:
    """`part` shows in the value, so that it can be told which part of a run a point is from."""
    values = {"step": step, "weights_version": step, "reward_mean": step + part / 8, "kl_reference": None}
    return {**values, "tokens_generated": 40 + step, "reward/length": 0.5, "nonfinite": []}


def last_evaluation(step: int) -> Record:
    return {"step": step, "weights_version": step, "eval/held/avg@4": step / 4, "nonfinite": []}


def samples(step: int) -> list[Record]:
    row = {"step": step, "prompt_id": "data/0", "prompt": "1+1=", "reward": 1.0, "parts": {"length": 1.0}}
    return [{**row, "completion": f"{HOSTILE} {i}", "versions": [[step, 3]], "advantage": None} for i in range(4)]


def part_of_run(folder: Path, tracker: Record, first: int, new: list[Record], history: list[Record]) -> None:
    """One part of a run with this tracker; warnings fail the test."""
    config = parse_config(
        {
            "model": "m",
            "steps": 6,
            "prompts_per_step": 1,
            "data": [{"source": "rows.jsonl", "rewards": {"rewards.py:f": 1.0}}],
            "trackers": [tracker],
        }
    )
    warnings: list[str] = []

    async def main() -> None:
        tracked = tracking(config, folder, next_step=first, history=history, warn=warnings.append, finish_s=60)
        async with tracked as trackers:
            for one in new:
                trackers.recorded(one, samples(one["step"]) if "reward_mean" in one else [])

    asyncio.run(main())
    assert warnings == []


def three_parts(folder: Path, tracker: Record) -> None:
    """Steps 0 to 3 and saved at 2; resumed at 2 to the end at 4; resumed with more steps, to 6."""
    folder.mkdir()
    first = [record(step) for step in range(4)]
    part_of_run(folder, tracker, 0, first, [])
    second = [record(step, 1) for step in (2, 3)]
    part_of_run(folder, tracker, 2, [*second, last_evaluation(4)], first[:2])
    again = {**record(4, 2), **last_evaluation(4)}
    part_of_run(folder, tracker, 4, [again, record(5, 2), last_evaluation(6)], [*first[:2], *second])


KEPT: Points = [(0, 0.0), (1, 1.0), (2, 2.0), (3, 3.0), (4, 4.25), (5, 5.25)]
"""reward_mean where a tracker keeps the values that came first."""
REPLACED: Points = [(0, 0.0), (1, 1.0), (2, 2.125), (3, 3.125), (4, 4.25), (5, 5.25)]
EVALUATED: Points = [(4, 1.0), (6, 1.5)]


@needs("tensorboard", "torch")
def test_tensorboard_shows_each_point_once_and_of_repeated_steps_the_later(tmp_path: Path) -> None:
    three_parts(tmp_path / "run", {"kind": "tensorboard"})
    reader: Any = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    events = reader.EventAccumulator(str(tmp_path / "run" / "tensorboard"), size_guidance={"tensors": 0})
    events.Reload()

    def points(tag: str) -> Points:
        return [(event.step, event.value) for event in events.Scalars(tag)]

    assert points("reward_mean") == REPLACED
    assert points("eval/held/avg@4") == EVALUATED
    assert "kl_reference" not in events.Tags()["scalars"]
    tables = events.Tensors("samples/text_summary")
    assert [event.step for event in tables] == list(range(6))
    text = tables[0].tensor_proto.string_val[0].decode()
    assert all(line.startswith("    ") for line in text.split("\n") if line not in ("", "---")), text
    assert json.loads(events.Tensors("config/text_summary")[0].tensor_proto.string_val[0])["steps"] == 6
    outcomes = [event.tensor_proto.string_val[0].strip() for event in events.Tensors("outcome/text_summary")]
    assert outcomes[-1] == b"done"
    hparams: Any = importlib.import_module("tensorboard.plugins.hparams.plugin_data_pb2")
    data = hparams.HParamsPluginData()
    data.ParseFromString(events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content)
    assert data.session_start_info.hparams["trainer.lr"].number_value == 1e-6


@needs("mlflow")
def test_mlflow_has_each_point_once_in_one_run(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/store.db"
    artifacts = {"artifact_location": (tmp_path / "artifacts").as_uri()}
    three_parts(
        tmp_path / "run", {"kind": "mlflow", "url": url, "project": "sums", "tags": ["a"], "options": artifacts}
    )
    client: Any = importlib.import_module("mlflow").MlflowClient(tracking_uri=url)
    (run,) = client.search_runs([client.get_experiment_by_name("sums").experiment_id])

    def points(key: str) -> Points:
        return sorted((point.step, point.value) for point in client.get_metric_history(run.info.run_id, key))

    assert points("reward_mean") == KEPT
    assert points("eval/held/avg_4") == EVALUATED
    assert (run.info.run_name, run.info.status, run.data.tags["outcome"]) == ("run", "FINISHED", "done")
    assert run.data.tags["tag.a"] == "true"
    assert (run.data.params["trainer.lr"], run.data.params["data.0.source"]) == ("1e-06", f"{Path.cwd()}/rows.jsonl")
    stored = sorted(path.name for path in tmp_path.glob("artifacts/*/artifacts/samples/*"))
    assert stored == [f"step-{step:06d}.json" for step in range(6)]
    table = json.loads(next(tmp_path.glob("artifacts/*/artifacts/samples/step-000003.json")).read_text())
    assert dict(zip(table["columns"], table["data"][2], strict=True))["completion"] == f"{HOSTILE} 2"


def leet(file: Path) -> list[Record]:
    """Records of a .wandb file, read by wandb's own inspector."""
    done = subprocess.run(
        [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(file)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@needs("wandb")
def test_wandb_offline_has_each_point_once_under_one_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef0123456789abcdef01234567")
    three_parts(tmp_path / "run", {"kind": "wandb", "mode": "offline", "tags": ["a"]})
    files = list(tmp_path.glob("run/wandb/offline-run-*/*.wandb"))
    parts = [leet(file) for file in files]
    runs = [one["run"] for records in parts for one in records if one["type"] == "run"]
    assert len(runs) == 3
    assert len({run["run_id"] for run in runs}) == 1
    assert {run["display_name"] for run in runs} == {"run"}
    assert runs[0]["config"]["update"]["steps"] == 6
    history = [one["history"]["item"] for records in parts for one in records if one["type"] == "history"]
    assert sorted((row["step"], row["reward_mean"]) for row in history if "reward_mean" in row) == KEPT
    assert sorted((row["step"], row["eval/held/avg@4"]) for row in history if "eval/held/avg@4" in row) == EVALUATED
    assert sorted(row["step"] for row in history if "samples.path" in row) == list(range(6))
    assert len({row["_step"] for row in history}) == len(history)  # no row of one part hides one of another
    table = json.loads(next(tmp_path.glob("run/wandb/offline-run-*/files/media/table/samples_7_*")).read_text())
    assert dict(zip(table["columns"], table["data"][2], strict=True))["completion"] == f"{HOSTILE} 2"
    for path in (tmp_path / "run").rglob("*"):
        assert path.is_dir() or b"0123456789abcdef0123456789abcdef01234567" not in path.read_bytes(), path


@needs("trackio")
def test_trackio_has_each_point_once_in_one_run(tmp_path: Path) -> None:
    """In a process of its own: the library reads where its files are when it is imported."""
    code = "import sys; sys.path[:0] = sys.argv[2:]; import test_trackers_libraries as t; from pathlib import Path; "
    code += "t.three_parts(Path(sys.argv[1]), {'kind': 'trackio', 'project': 'sums'})"
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "run"), str(Path(__file__).parent)],
        env={**os.environ, "TRACKIO_DIR": str(tmp_path / "trackio")},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    with sqlite3.connect(tmp_path / "trackio" / "sums.db") as store:
        rows = store.execute("select run_name, step, metrics from metrics order by id").fetchall()
    assert {name for name, _, _ in rows} == {"run"}
    found = [(step, json.loads(text)) for _, step, text in rows]
    assert [(step, m["reward_mean"]) for step, m in found if "reward_mean" in m] == KEPT
    assert [(step, m["eval/held/avg@4"]) for step, m in found if "eval/held/avg@4" in m] == EVALUATED
    tables = [(step, m["samples"]) for step, m in found if "samples" in m]
    assert [step for step, _ in tables] == list(range(6))
    assert found[-1][1]["outcome"] == "done"
