"""One run, and everything that can be done with it afterwards; and `try`, which tells its first step in advance."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny_run import command, records, write_config, write_project, write_rows

from offbeat.commands.export import Order, export
from offbeat.testing.fake_hub import FakeHub
from offbeat.testing.leaks import no_leaks

pytestmark = pytest.mark.integration

STRICT = """
def strict(completion: str, answer: str) -> float | None:
    if len(completion) == 1:
        return None
    if len(completion) == 2:
        raise LookupError("two")
    return float(len(completion) > 3) + 0.001 * int(answer)
"""


@pytest.fixture(scope="module", name="project")
def _project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_project(tmp_path_factory.mktemp("project"))
    write_rows(folder / "heldout.jsonl", [{"prompt": f"{i}-{i}=", "answer": "0"} for i in range(4)])
    (folder / "strict.py").write_text(STRICT)
    return folder


@pytest.fixture(scope="module", name="config")
def _config(project: Path) -> Path:
    held = {"name": "heldout", "source": "heldout.jsonl", "samples_per_prompt": 2, "every_steps": 1}
    return write_config(project, steps=2, eval=[held])


@pytest.fixture(scope="module", name="run")
def _run(project: Path, config: Path) -> Path:
    ended = command("train", config, "--run-dir", project / "run")
    assert ended.code == 0, ended.told
    return project / "run"


@pytest.fixture(autouse=True)
def _nothing_is_left_behind() -> Iterator[None]:
    before = passing_folders()
    with no_leaks(adopt=True):
        yield
    assert passing_folders() == before


def passing_folders() -> set[Path]:
    return {path for name in ("try", "rescore") for path in Path(tempfile.gettempdir()).glob(f"offbeat-{name}-*")}


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_try_samples_and_scores_what_the_first_step_of_the_run_did(
    config: Path, run: Path, project: Path, tmp_path: Path
) -> None:
    before = set(project.rglob("*"))
    files = ("--json", tmp_path / "figures.json", "--samples", tmp_path / "s.jsonl")
    ended = command("try", config, "-n", "2", *files, cwd=tmp_path)
    assert ended.code == 0, ended.told
    assert ended.err == "", ended.told
    assert set(project.rglob("*")) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["figures.json", "s.jsonl"]

    told = ("prompt_id", "sample_index", "epoch", "row", "prompt", "completion", "reward", "parts", "versions")
    first = [line for line in lines_of(run / "samples.jsonl") if line["step"] == 0 and line["eval"] is None]
    tried = lines_of(tmp_path / "s.jsonl")
    assert [[line[key] for key in told] for line in tried] == [[line[key] for key in told] for line in first]
    figures = json.loads((tmp_path / "figures.json").read_text())
    step = records(run)[0]
    assert figures["reward_mean"] == pytest.approx(step["reward_mean"])
    assert figures["truncated_fraction"] == pytest.approx(step["truncated_fraction"])
    assert figures["groups_with_spread_fraction"] == pytest.approx(1 - step["groups_without_spread_fraction"])
    assert "worst 3 of 8 samples" in ended.out
    for sentence in figures["verdicts"]:
        assert f"! {sentence}" in ended.out

    again = command("rescore", tmp_path / "s.jsonl", "--rewards", config)
    assert again.code == 0, again.told
    assert "no sample's reward has changed" in again.out


def test_samples_of_the_run_can_be_read(run: Path) -> None:
    shown = command("samples", run, "--eval", "heldout", "--step", "2", "--group", "-n", "1")
    assert shown.code == 0, shown.told
    assert shown.out.count("── heldout/3 #") == 2
    worst = command("samples", run, "--worst", "-n", "16")
    told = [float(line.split("reward ")[1].split(" ")[0]) for line in worst.out.splitlines() if line[:2] == "──"]
    assert told == sorted(told)
    assert len(told) == 16
    refused = command("samples", run, "--step", "9")
    assert (refused.code, refused.out) == (2, "")
    assert "it has" in refused.err


def test_a_changed_reward_is_compared_with_the_recorded_one(run: Path, tmp_path: Path) -> None:
    before = contents(run)
    same = command("rescore", run)
    assert same.code == 0, same.told
    assert "no sample's reward has changed" in same.out
    output = tmp_path / "new.jsonl"
    rewards = 'data.0.rewards={"strict.py:strict"=1.0, "rewards.py:length"=0.5}'  # beside the run's config
    changed = command("rescore", run, rewards, "--output", output, cwd=tmp_path)
    assert changed.code == 0, changed.told
    assert "           strict – → " in changed.out
    assert "largest changes" in changed.out
    assert contents(run) == before

    # Graded again here, from the texts alone: the answer of a prompt `4+4=` is 8.
    new = lines_of(output)
    old = [line for line in lines_of(run / "samples.jsonl") if line["eval"] is None]
    assert len(new) == len(old) == 16
    for line, was in zip(new, old, strict=True):
        assert line["old"] == {"reward": was["reward"], "parts": was["parts"]}
        length = len(line["completion"])
        answer = 2 * int(line["prompt"].partition("+")[0])
        strict = {1: None, 2: 0.0}.get(length, float(length > 3) + 0.001 * answer)
        assert line["parts"].get("strict") == (None if strict is None else pytest.approx(strict))
        assert len(line["errors"]) == (length == 2)
        assert line["reward"] == pytest.approx((strict or 0.0) + 0.5 * was["parts"]["length"])


def test_the_best_step_is_exported_and_a_run_starts_from_it(
    config: Path, project: Path, run: Path, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    points = {record["step"]: record["eval/heldout/avg@2"] for record in records(run) if "eval/heldout/avg@2" in record}
    best = min((1, 2), key=lambda step: (-points[step], step))
    ended = command("export", run, "--best", "--output", tmp_path / "out")
    assert ended.code == 0, ended.told
    assert f"model      step {best} · highest heldout of the saved steps" in ended.out
    saved = run / "checkpoints" / f"step-{best}" / "trainer-0" / "model"
    made = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    for name, tensor in AutoModelForCausalLM.from_pretrained(saved).state_dict().items():
        assert made[name].equal(tensor)
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("3+3=").input_ids
    assert f"| heldout/avg@2 | {points[0]:.3f}".replace("0.", ".") in (tmp_path / "out" / "README.md").read_text()
    refused = command("export", run, "--output", tmp_path / "out")
    assert refused.code == 2
    assert "is there already and not empty" in refused.err

    hub = FakeHub()
    pushed = export(run, Order(step=1, output=tmp_path / "pushed", dtype="bfloat16", push="me/sums"), hub=hub)
    assert hub.there == {"me/sums": True}
    assert hub.uploads == [("me/sums", sorted(path.name for path in pushed.iterdir()), "Step 1")]
    assert {"README.md", "config.json", "model.safetensors", "tokenizer.json"} <= set(hub.uploads[0][1])

    checked = command("check", config, f"model={run}")
    assert "model   from step 2 of " in checked.out
    second = tmp_path / "second"
    started = command("train", config, f"model={run / 'checkpoints' / 'step-1'}", "steps=1", "--run-dir", second)
    assert started.code == 0, started.told
    assert "from step 1 of" in started.out
    kept = json.loads((second / "config.json").read_text())["model"]
    assert kept == str(run / "checkpoints" / "step-1" / "trainer-0" / "model")
    # Version 0 of the new run is version 1 of the other: the same held-out samples.
    first = {key: value for key, value in records(second)[0].items() if key.startswith("eval/")}
    assert first["eval/heldout/weights_version"] == 0
    assert first["eval/heldout/avg@2"] == points[1]


def test_a_damaged_checkpoint_is_exported_by_nobody(run: Path, tmp_path: Path) -> None:
    import shutil

    damaged = tmp_path / "damaged"
    shutil.copytree(run, damaged)
    weights = damaged / "checkpoints" / "step-2" / "trainer-0" / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x00")
    before = contents(damaged)
    ended = command("export", damaged, "--step", "2")
    assert ended.code == 2, ended.told
    assert "model.safetensors is corrupted (its digest differs)" in ended.err
    assert contents(damaged) == before
