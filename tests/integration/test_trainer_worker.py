"""The trainer as a process: what it answers, what a failure in it looks like from outside, how it resumes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import pytest

from offbeat.config import LimitsSection, LossSection, TrainerSection
from offbeat.errors import RemoteError, WorkerDied
from offbeat.rpc.client import Hub, ProcessSpec
from offbeat.testing.leaks import no_leaks
from offbeat.testing.tiny_model import tiny_qwen3
from offbeat.trainer.client import RemoteTrainer
from offbeat.trainer.settings import TrainerSettings
from offbeat.types import Batch, MiniBatch, Sampling, SupervisedSample, TrainSample

pytestmark = pytest.mark.integration
R = TypeVar("R")
SAMPLING = Sampling(max_new_tokens=8, temperature=0.7)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_qwen3(tmp_path_factory.mktemp("model") / "tiny", vocab=40, layers=1)


def with_trainer(
    model: Path,
    log: Path,
    body: Callable[[RemoteTrainer], Awaitable[R]],
    env: Mapping[str, str] | None = None,
    **trainer: Any,
) -> R:
    """Runs `body` against one trainer process; bounded."""
    section = TrainerSection.model_validate({"dtype": "float32", "lr": 1e-2, "threads": 1, "device": "cpu", **trainer})
    settings = TrainerSettings(
        model=str(model),
        trainer=section.model_dump(mode="json"),
        loss=LossSection().model_dump(mode="json"),
        total_updates=8,
    )
    spec = ProcessSpec(
        name="trainer-0",
        module="offbeat.trainer.worker",
        settings=msgspec.to_builtins(settings),
        log=log / "trainer-0.log",
        env={"OMP_NUM_THREADS": "1", **(env or {})},
    )

    async def main() -> R:
        async with asyncio.timeout(120), Hub() as hub:
            return await body(RemoteTrainer(await hub.start(spec, start_s=90), LimitsSection()))

    with no_leaks():
        return asyncio.run(main())


def batch(step: int, advantage: float = 1.0) -> Batch:
    rng = np.random.default_rng(step)
    samples = tuple(
        TrainSample(
            prompt_token_ids=rng.integers(2, 40, size=3).astype(np.int32),
            token_ids=rng.integers(2, 40, size=5).astype(np.int32),
            logprobs=np.full(5, -3.0, np.float32),
            advantages=np.full(5, advantage * (-1) ** i, np.float32),
            loss_mask=np.ones(5, np.uint8),
        )
        for i in range(4)
    )
    return Batch(step=step, minibatches=(MiniBatch(samples=samples, denominator=20.0),), sampling=SAMPLING)


PAIRS = [([3, 4, 5], [6, 7, 1]), ([9], [8]), ([9, 9], [])]


def test_a_trainer_learns_scores_saves_and_resumes_to_the_same_numbers(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    folder.mkdir()

    async def first(trainer: RemoteTrainer) -> Any:
        start = await trainer.describe()
        assert (start.weights_version, start.optimizer_updates, start.vocab_size) == (0, 0, 40)
        assert start.max_length == 256
        before = await trainer.logprobs(PAIRS, SAMPLING)
        assert [len(values) for values in before] == [3, 1, 0]
        assert all(np.isfinite(values).all() and (values <= 0).all() for values in before)
        taught = [SupervisedSample(prompt_token_ids=np.asarray([3], np.int32), token_ids=np.asarray([4, 1], np.int32))]
        losses = [(await trainer.supervise(taught, 1e-2, last=i == 4)).metrics["loss"] for i in range(5)]
        assert losses[-1] < losses[0]
        result = await trainer.update(batch(0))
        assert (result.weights_version, result.optimizer_updates, result.skipped_updates) == (1, 1, 0)
        after = await trainer.logprobs(PAIRS, SAMPLING)
        assert np.abs(after[0] - before[0]).max() > 1e-4
        await trainer.save(str(folder))
        return after, await trainer.update(batch(1)), await trainer.logprobs(PAIRS, SAMPLING)

    async def second(trainer: RemoteTrainer) -> Any:
        await trainer.load(str(folder))
        assert (await trainer.describe()).weights_version == 1
        return (
            await trainer.logprobs(PAIRS, SAMPLING),
            await trainer.update(batch(1)),
            await trainer.logprobs(PAIRS, SAMPLING),
        )

    saved, continued = with_trainer(model, tmp_path, first), with_trainer(model, tmp_path, second)
    for left, right in ((saved[0], continued[0]), (saved[2], continued[2])):
        assert all(np.array_equal(a, b) for a, b in zip(left, right, strict=True))
    assert saved[1].metrics == continued[1].metrics
    assert saved[1].weights_version == continued[1].weights_version == 2


def test_failures_reach_the_controller_with_their_own_words_and_the_trainer_lives_on(
    model: Path, tmp_path: Path
) -> None:
    async def body(trainer: RemoteTrainer) -> None:
        with pytest.raises(RemoteError, match=r"trainer-rank-0\.json: is missing"):
            await trainer.load(str(tmp_path))
        result = await trainer.update(batch(0, advantage=float("nan")))
        assert (result.skipped_updates, result.weights_version) == (1, 1)
        with pytest.raises(RemoteError, match="2 times in a row") as caught:
            await trainer.update(batch(1, advantage=float("nan")))
        assert caught.value.type_name.endswith("TrainingDiverged")
        assert (await trainer.describe()).optimizer_updates == 0

    with_trainer(model, tmp_path, body, max_skipped_updates=2)


def test_a_model_that_cannot_be_loaded_says_so_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")

    async def body(trainer: RemoteTrainer) -> None:
        pytest.fail("the trainer started")

    with pytest.raises((RemoteError, WorkerDied), match="cannot be loaded"):
        with_trainer(tmp_path, tmp_path, body)
