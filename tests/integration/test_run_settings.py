"""Settings that a user may choose, each in a short real run: what it does is read from the files of the run."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import io
import json
import sysconfig
import venv
from collections import Counter
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_run import BASE, command, merge, records, write_config, write_project, write_rows

import offbeat
from offbeat.config import Section, TrackerSection, config_fields, load_config
from offbeat.testing.leaks import no_leaks
from offbeat.testing.tiny_model import tiny_gpt2, tiny_moe
from offbeat.trackers.opening import make_tracker
from offbeat.trainer.learner import Learner
from offbeat.trainer.loading import load_model
from offbeat.trainer.settings import TrainerSettings
from offbeat.types import Batch, MiniBatch, Sampling, TrainSample

pytestmark = pytest.mark.integration

REWARDS = '''
import asyncio


def spread(completions: list[str], answers: list[str]) -> list[float]:
    """A group at once: the longest gets 1."""
    longest = max(map(len, completions))
    return [float(len(completion) == longest) for completion in completions]


async def patient(completion: str, answer: str) -> float:
    await asyncio.sleep(0.01)
    return completion.count(answer[0]) / 10
'''


@pytest.fixture(scope="module", name="project")
def _project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_project(tmp_path_factory.mktemp("project"))
    (folder / "more.py").write_text(REWARDS)
    write_rows(folder / "heldout.jsonl", [{"prompt": f"{i}-{i}=", "answer": "0"} for i in range(4)])
    return folder


@pytest.fixture(autouse=True)
def _nothing_is_left_behind() -> Iterator[None]:
    with no_leaks(adopt=True):
        yield


def train(config: Path, run: Path) -> list[dict[str, Any]]:
    """Trains and returns the records of its steps."""
    ended = command("train", config, "--run-dir", run)
    assert ended.code == 0, ended.told
    assert ended.err == "", ended.told
    return [record for record in records(run) if "reward_mean" in record]


def samples(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> None:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)


@dataclass(frozen=True)
class Mixed:
    """A finished run with most of what a config can say, and the keys that were read on the way."""

    run: Path
    steps: list[dict[str, Any]]
    read: frozenset[tuple[str, str]]


@contextlib.contextmanager
def reading() -> Generator[set[tuple[str, str]]]:
    """(class of the section, key) of whatever the code asks a config for, its own checks left out."""
    found: set[tuple[str, str]] = set()
    own = Path(inspect.getfile(Section)).parent

    def watched(section: Section, name: str) -> Any:
        frame = inspect.currentframe()
        assert frame is not None
        assert frame.f_back is not None
        caller = frame.f_back.f_code
        if Path(caller.co_filename).parent != own or caller.co_name in ("resolve", "engine_dtype"):
            found.add((type(section).__name__, name))
        return object.__getattribute__(section, name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Section, "__getattribute__", watched, raising=False)
        yield found


@pytest.fixture(scope="module", name="mixed")
def _mixed(project: Path, tmp_path_factory: pytest.TempPathFactory) -> Mixed:
    run = tmp_path_factory.mktemp("mixed") / "run"
    too_long = [{"question": "1*" * 20, "solution": "1"}]
    write_parquet(
        project / "table.parquet", [{"question": f"{i}*{i}=", "solution": str(i * i)} for i in range(8)] + too_long
    )
    lines = {
        **BASE["data"][0],
        "name": "lines",
        "weight": 3.0,
        "rewards": {"more.py:spread": 1.0, "more.py:patient": 0.5},
    }
    table = {
        "name": "table",
        "source": "table.parquet",
        "format": "text",
        "prompt": "question",
        "answer": "solution",
        "max_prompt_tokens": 16,
        "rewards": {"exact_match": 1.0, "rewards.py:length": 0.0},
    }
    heldout = {
        "name": "heldout",
        "source": "heldout.jsonl",
        "every_steps": 2,
        "samples_per_prompt": 2,
        "temperature": 0.0,
        "rewards": {"exact_match": 1.0},
    }
    config = write_config(
        project,
        recipe="dr_grpo",
        max_staleness=0,
        prompts_per_step=4,
        updates_per_step=2,
        epochs_per_batch=2,
        sampling={"temperature": 0.7, "top_p": 0.95, "top_k": 40, "min_p": 0.001},
        data=[lines, table],
        warmup={"source": "train.jsonl", "format": "text", "answer": "answer", "steps": 1, "samples_per_step": 4},
        eval=[heldout],
        trackers=[{"kind": "tensorboard"}],
    )
    with no_leaks(adopt=True), reading() as found:
        steps = train(config, run)
        make_tracker(TrackerSection(kind="wandb"))  # what a run does with one; the library need not be installed
        trainer = TrainerSettings.of(load_config(config))  # what the trainer's own process does with its part
        with contextlib.redirect_stderr(io.StringIO()):
            model = load_model(trainer.model, None, init="pretrained", seed=0)
        learner = Learner(model, trainer.trainer_section(), trainer.loss_section(), total_updates=2)
        broken = TrainSample(
            prompt_token_ids=np.array([3], np.int32),
            token_ids=np.array([4], np.int32),
            logprobs=np.array([np.nan], np.float32),
            advantages=np.ones(1, np.float32),
            loss_mask=np.ones(1, np.uint8),
        )
        minibatches = (MiniBatch(samples=(broken,), denominator=1.0),)
        learner.update(Batch(step=0, minibatches=minibatches, sampling=Sampling(max_new_tokens=4)))
    return Mixed(run, steps, frozenset(found))


def test_every_key_of_a_config_is_read_in_a_run(mixed: Mixed) -> None:
    """B018: a key that nothing asks for would be a setting that does nothing."""

    keys = {(section.__name__, name) for section in Section.__subclasses__() for name in section.model_fields}
    assert {name for _, name in keys} >= {path.split(".")[-1] for path in config_fields()}
    # The recipe is applied, and gone, before there is a config.
    assert keys - mixed.read == {("Config", "recipe")}


def test_on_policy_with_truncated_sampling_several_updates_mixed_data_and_rewards_of_all_kinds(mixed: Mixed) -> None:
    steps = mixed.steps
    resolved = json.loads((mixed.run / "config.json").read_text())
    assert resolved["loss"]["scale_by_std"] is False
    assert resolved["loss"]["aggregation"] == "constant"

    assert [record["weights_version"] for record in steps] == [0, 1, 2]
    assert [record["staleness_max"] for record in steps] == [0, 0, 0]
    assert [record["updates"] for record in steps] == [4, 4, 4]
    assert [record["updates_behind_max"] for record in steps] == [3, 3, 3]  # within the step itself
    # The engine and the trainer mean the same by temperature and truncation.
    assert steps[0]["logprob_gap_max"] < 1e-3
    assert all(record["outside_nucleus_fraction"] < 0.05 for record in steps)

    trained = [sample for sample in samples(mixed.run) if sample["eval"] is None]
    assert Counter(sample["source"] for sample in trained) == {"lines": 36, "table": 12}
    assert {tuple(sorted(s["parts"])) for s in trained if s["source"] == "lines"} == {("patient", "spread")}
    from_table = [sample for sample in trained if sample["source"] == "table"]
    assert any(s["parts"]["length"] for s in from_table)  # weight 0: recorded, and no part of the reward
    assert [s["reward"] for s in from_table] == [s["parts"]["exact_match"] for s in from_table]
    groups = Counter((s["step"], s["prompt_id"]) for s in trained if s["parts"].get("spread") == 1.0)
    assert len(groups) == 9  # every group had a longest

    evaluated = [sample for sample in samples(mixed.run) if sample["eval"] == "heldout"]
    assert {(s["step"], s["versions"][0][0]) for s in evaluated} == {(0, 0), (2, 2), (3, 3)}
    texts = {(s["step"], s["prompt_id"], s["completion"]) for s in evaluated}
    assert len(texts) == len(evaluated) / 2  # greedy: both samples of a prompt are the same
    with_eval = [r for r in records(mixed.run) if any(key.startswith("eval/") for key in r)]
    assert [record["eval/heldout/weights_version"] for record in with_eval] == [0, 2, 3]


def other_environment(folder: Path, marker: Path) -> Path:
    """A virtual environment that sees what this one has. Each start of its interpreter leaves a line in `marker`."""
    venv.create(folder, with_pip=False, symlinks=True)
    packages = sysconfig.get_path("purelib")
    (site,) = folder.glob("lib/python*/site-packages")
    line = "os.environ.get('OFFBEAT_PROCESS', 'no process') + ' ' + sys.prefix + chr(10)"
    (site / "all.pth").write_text(
        f"import os, site, sys; site.addsitedir({packages!r}); open({str(marker)!r}, 'a').write({line})\n"
    )
    return folder / "bin/python"


def test_one_step_off_policy_in_bfloat16_over_ipv6_with_two_engines_of_another_environment(
    project: Path, tmp_path: Path
) -> None:
    python = other_environment(tmp_path / "venv", tmp_path / "starts")
    config = write_config(
        project,
        trainer={"dtype": "bfloat16"},
        weights={"host": "::1", "parity_every": 1},
        rollout={"replicas": 2, "python": str(python)},
    )
    steps = train(config, tmp_path / "run")
    assert [record["staleness_max"] for record in steps] == [0, 1, 1]
    assert [record["staleness_min"] for record in steps] == [0, 1, 1]
    assert all(record["logprob_gap_max"] < 0.5 for record in steps)
    assert steps[0]["logprob_gap_max"] > 1e-5  # not float32 by mistake
    assert {sample["engine"] for sample in samples(tmp_path / "run")} == {"engine-0", "engine-1"}
    started = (tmp_path / "starts").read_text().splitlines()
    assert {line for line in started if not line.startswith("no process")} == {
        f"engine-{number} {tmp_path / 'venv'}" for number in (0, 1)
    }


def test_a_run_from_python_with_a_function_as_reward_a_chat_template_and_another_architecture(
    project: Path, tmp_path: Path
) -> None:
    with contextlib.redirect_stderr(io.StringIO()):  # transformers draws a progress bar
        tiny_gpt2(project / "gpt2", layers=1)
    template = "{% for message in messages %}{{ message.content }}{% endfor %}{{ ' (' + mood + ')' }}"
    (project / "chat.jinja").write_text(template)
    spec = importlib.util.spec_from_file_location("own_rewards", project / "rewards.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    config = merge(
        BASE,
        {
            "model": str(project / "gpt2"),
            "steps": 2,
            "sampling": {"chat_template": str(project / "chat.jinja"), "chat_template_kwargs": {"mood": "calm"}},
            "data": [{**BASE["data"][0], "source": str(project / "train.jsonl"), "format": "chat", "system": "Add: "}],
        },
    )
    result = offbeat.run(config, "trainer.lr=1e-4", reward=module.length, run_dir=tmp_path / "run")
    assert result.folder == tmp_path / "run"
    assert not result.interrupted
    assert [record["step"] for record in result.history] == [0, 1]
    assert [record["lr"] for record in result.history] == [1e-4, 1e-4]
    assert result.checkpoint == tmp_path / "run/checkpoints/step-2"
    first = samples(tmp_path / "run")[0]
    assert first["prompt"] == "Add: 0+0= (calm)"
    assert set(first["parts"]) == {"length"}


def test_a_mixture_of_experts_learns_from_a_reasoning_gym_task(project: Path, tmp_path: Path) -> None:
    with contextlib.redirect_stderr(io.StringIO()):
        tiny_moe(project / "moe", layers=1)
    data = {
        "name": "sums",
        "source": "reasoning_gym:chain_sum",
        "options": {"size": 12, "min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
        "format": "text",
        "answer": "answer",
        "max_prompt_tokens": 200,
        "rewards": {"reasoning_gym": 1.0, "rewards.py:length": 0.1},
    }
    steps = train(write_config(project, model="moe", steps=2, data=[data]), tmp_path / "run")
    assert steps[0]["logprob_gap_max"] < 1e-3
    assert all(record["grad_norm"] > 0 for record in steps)
    assert all("reward/reasoning_gym" in record for record in steps)
    assert all("+" in sample["prompt"] or "-" in sample["prompt"] for sample in samples(tmp_path / "run"))
