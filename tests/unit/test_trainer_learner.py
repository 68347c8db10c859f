"""Updates: what is applied, what is skipped, what is counted, what comes back after a resume."""

from __future__ import annotations

import copy
import json
import random
import weakref
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from offbeat.config import LossSection, TrainerSection
from offbeat.errors import ModelError, RunError, TrainingDiverged
from offbeat.memory import checkpoint_bytes, read_shape
from offbeat.testing.tiny_model import tiny_moe, tiny_qwen3
from offbeat.trainer import state
from offbeat.trainer.learner import Learner
from offbeat.trainer.loading import load_model
from offbeat.trainer.optimizer import learning_rate
from offbeat.trainer.tensor_file import write_tensors
from offbeat.types import Batch, MiniBatch, Sampling, SupervisedSample, TrainSample

SAMPLING = Sampling(max_new_tokens=16)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_qwen3(tmp_path_factory.mktemp("model") / "tiny", vocab=40, layers=1, tied=True)


def learner_of(folder: Path, *, total: int = 20, **trainer: Any) -> Learner:
    model = load_model(str(folder), None, init="pretrained", seed=0)
    section = TrainerSection.model_validate(
        {"dtype": "float32", "lr": 1e-2, "warmup_steps": 3, "micro_batch_tokens": 12, **trainer}
    )
    return Learner(model, section, LossSection(), total_updates=total)


def sample(seed: int, advantage: float = 1.0, length: int = 5) -> TrainSample:
    rng = np.random.default_rng(seed)
    return TrainSample(
        prompt_token_ids=rng.integers(2, 40, size=4).astype(np.int32),
        token_ids=rng.integers(2, 40, size=length).astype(np.int32),
        logprobs=np.full(length, -3.0, dtype=np.float32),
        advantages=np.full(length, advantage, dtype=np.float32),
        loss_mask=np.ones(length, dtype=np.uint8),
    )


def minibatch(seed: int, count: int = 4) -> MiniBatch:
    samples = tuple(sample(seed * 100 + i, (-1.0) ** i) for i in range(count))
    return MiniBatch(samples=samples, denominator=float(5 * count))


EMPTY = MiniBatch(samples=(), denominator=0.0)


def batch(step: int, *minibatches: MiniBatch) -> Batch:
    return Batch(step=step, minibatches=minibatches or (minibatch(step),), sampling=SAMPLING)


def broken(seed: int) -> MiniBatch:
    """Four micro-batches, one of which is not finite."""
    good = minibatch(seed)
    bad = sample(seed + 7, advantage=float("nan"))
    return MiniBatch(samples=(*good.samples[:3], bad), denominator=good.denominator)


def weights(learner: Learner) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in learner.model.named_parameters()}


def equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def test_a_step_publishes_one_version_whatever_is_in_it_B173(folder: Path) -> None:
    learner = learner_of(folder)
    result = learner.update(batch(0, *(minibatch(i) for i in range(4))))
    assert (result.weights_version, result.optimizer_updates, result.skipped_updates) == (1, 4, 0)
    result = learner.update(batch(1, EMPTY))
    assert (result.weights_version, result.optimizer_updates, result.skipped_updates) == (2, 4, 1)
    assert result.metrics["empty_updates"] == 1


def test_an_update_without_tokens_changes_nothing_and_the_next_one_works_B041(folder: Path) -> None:
    learner, twin = learner_of(folder), learner_of(folder)
    before = weights(learner)
    for step in range(9):  # more than max_skipped_updates: these do not count to it
        result = learner.update(batch(step, EMPTY, EMPTY))
        assert result.skipped_updates == 2
        assert np.isnan(result.metrics["loss"])
    assert equal(weights(learner), before)
    found, wanted = learner.update(batch(9)), twin.update(batch(9))
    assert found.metrics["lr"] == wanted.metrics["lr"]
    assert equal(weights(learner), weights(twin))
    assert not equal(weights(learner), before)


def test_one_broken_micro_batch_of_four_skips_the_whole_update_B158(folder: Path) -> None:
    learner, twin = learner_of(folder), learner_of(folder)
    learner.update(batch(0))
    twin.update(batch(0))
    result = learner.update(batch(1, broken(5), minibatch(1)))
    wanted = twin.update(batch(1, minibatch(1)))
    assert (result.skipped_updates, result.optimizer_updates) == (1, 2)
    assert result.metrics["nonfinite_updates"] == 1
    assert equal(weights(learner), weights(twin))
    for name, value in wanted.metrics.items():
        if name != "nonfinite_updates":
            assert result.metrics[name] == value, name
    assert learner.counters.skipped_updates == 1


def test_too_many_broken_updates_in_a_row_end_the_run(folder: Path) -> None:
    learner = learner_of(folder, max_skipped_updates=3)
    learner.update(batch(0, broken(1), broken(2), EMPTY))
    learner.update(batch(1))  # a good one starts the count anew
    learner.update(batch(2, broken(1), broken(2)))
    before = weights(learner)
    with pytest.raises(TrainingDiverged, match=r"update 0 of step 3.*3 times in a row"):
        learner.update(batch(3, broken(3)))
    assert equal(weights(learner), before)


def test_the_tied_embedding_keeps_its_dtype_and_its_tie_B157(folder: Path) -> None:
    learner = learner_of(folder, dtype="bfloat16")
    learner.update(batch(0))
    embedding = learner.model.get_input_embeddings().weight
    head = learner.model.get_output_embeddings()
    assert head is not None
    assert head.weight is embedding
    assert embedding.dtype == torch.float32
    assert {p.dtype for p in learner.model.parameters()} == {torch.float32}
    assert all(s["exp_avg"].dtype == torch.float32 for s in learner.policy.state.values())


def test_bfloat16_compute_follows_float32_and_small_updates_are_not_lost(folder: Path) -> None:
    """An update at lr 1e-6 moves float32 master weights by 1e-6; bfloat16 ones it would leave where they are."""
    learner = learner_of(folder, dtype="bfloat16", lr=1e-6, warmup_steps=0)
    before = weights(learner)
    metrics = learner.update(batch(0)).metrics
    assert metrics["loss"] == pytest.approx(learner_of(folder).update(batch(0)).metrics["loss"], rel=0.1)
    moved = max(float((w - before[n]).abs().max()) for n, w in weights(learner).items())
    assert 5e-7 < moved < 2e-6


def test_metrics_of_a_step_are_finite_and_named(folder: Path) -> None:
    metrics = learner_of(folder).update(batch(0, minibatch(0), minibatch(1))).metrics
    assert all(np.isfinite(value) for value in metrics.values())
    assert metrics["tokens_trained"] == 40
    assert metrics["updates"] == 2
    assert 0 < metrics["ess"] <= 1
    assert 0 <= metrics["clip_fraction_low"] <= 1
    assert metrics["ratio_max"] >= metrics["ratio_mean"]
    assert metrics["lr"] == pytest.approx((1e-2 / 3 + 2e-2 / 3) / 2)


def test_the_learning_rate_rises_then_falls_to_the_ratio_at_the_last_update() -> None:
    def rates(schedule: Any, warmup: int = 4, ratio: float = 0.1) -> list[float]:
        return [learning_rate(i, 20, peak=2.0, warmup=warmup, schedule=schedule, min_ratio=ratio) for i in range(22)]

    assert rates("constant")[:6] == [0.5, 1.0, 1.5, 2.0, 2.0, 2.0]
    assert rates("constant", warmup=0) == [2.0] * 22
    for schedule in ("linear", "cosine"):
        found = rates(schedule)
        assert found[3] == 2.0
        assert found[19:] == pytest.approx([0.2] * 3)
        assert all(a >= b for a, b in pairwise(found[3:]))
    assert rates("linear")[11] == pytest.approx(2.0 * (0.1 + 0.9 * 0.5))
    assert rates("cosine")[11] == pytest.approx(2.0 * (0.1 + 0.9 * 0.5))


def test_supervised_updates_teach_with_a_state_of_their_own(folder: Path) -> None:
    learner = learner_of(folder)
    data = [
        SupervisedSample(prompt_token_ids=np.asarray([3, 4 + i]), token_ids=np.asarray([9 + i, 1])) for i in range(4)
    ]
    losses = [learner.supervise(data, 3e-3, last=i == 39).metrics["loss"] for i in range(40)]
    assert losses[-1] < 0.2 * losses[0]
    assert learner.supervised is None
    assert not learner.policy.state
    assert (learner.counters.weights_version, learner.counters.optimizer_updates) == (0, 0)


def test_supervised_loss_is_the_token_mean_of_cross_entropy_whatever_the_split(folder: Path) -> None:
    data = [SupervisedSample(prompt_token_ids=np.asarray([3, 4]), token_ids=np.arange(2, 3 + n)) for n in (1, 6, 2)]
    losses = [learner_of(folder, micro_batch_tokens=b).supervise(data, 0.0, last=True).metrics for b in (1, 20, 99)]
    model = load_model(str(folder), None, init="pretrained", seed=0).requires_grad_(False)
    total = 0.0
    for item in data:
        ids = torch.tensor([[*item.prompt_token_ids.tolist(), *item.token_ids.tolist()]])
        logs = model(input_ids=ids).logits[0].double().log_softmax(-1)
        total -= sum(float(logs[1 + i, t]) for i, t in enumerate(item.token_ids.tolist()))
    for metrics in losses:
        assert metrics["loss"] == pytest.approx(total / 12, rel=1e-5)
        assert metrics["grad_norm"] == pytest.approx(losses[0]["grad_norm"], rel=1e-5)


def test_a_run_resumed_anywhere_has_the_same_rates_and_the_same_bits_B017(folder: Path, tmp_path: Path) -> None:
    """B088 too: what is drawn at random goes on where it was, in Python, numpy and torch."""
    options: dict[str, Any] = {"schedule": "cosine", "warmup_steps": 6, "weight_decay": 0.1}
    whole = learner_of(folder, **options)
    rates: list[float] = []
    saved: dict[int, tuple[Any, Any]] = {}
    random.seed(5)
    for done in range(20):
        if done in (1, 5, 19):
            state.save(whole, tmp_path / str(done), 0)
            saved[done] = copy.copy(whole.counters), (random.random(), np.random.rand(), float(torch.rand(())))
        rates.append(whole.update(batch(done)).metrics["lr"])

    for done, (counters, drawn) in saved.items():
        second = learner_of(folder, **options)
        second.supervise([SupervisedSample(prompt_token_ids=np.array([3]), token_ids=np.array([4]))], 1.0, last=False)
        state.load(second, tmp_path / str(done), 0)
        assert (random.random(), np.random.rand(), float(torch.rand(()))) == drawn
        assert second.counters == counters
        assert second.supervised is None
        assert [second.update(batch(i)).metrics["lr"] for i in range(done, 20)] == rates[done:]
        assert equal(weights(second), weights(whole))
        assert second.counters == whole.counters


def test_a_saved_model_folder_loads_by_itself(folder: Path, tmp_path: Path) -> None:
    learner = learner_of(folder)
    learner.update(batch(0))
    files = state.save(learner, tmp_path, 0)
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert equal(dict(loaded.named_parameters()), weights(learner))
    on_disk = {p for p in tmp_path.rglob("*") if p.is_file()}
    assert set(files) == on_disk
    assert {p.suffix for p in on_disk} == {".json", ".safetensors"}


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("shard_bytes", [20_000, 1 << 30])
def test_a_saved_model_has_the_files_and_names_of_the_model_that_it_came_from(
    tmp_path: Path, tied: bool, shard_bytes: int
) -> None:
    """B028: no conversion; whatever loads the original loads what was saved, in one file or in shards."""
    source = tiny_qwen3(tmp_path / "source", vocab=40, layers=1, tied=tied)
    learner, other = learner_of(source), learner_of(source)
    learner.update(batch(0))
    (tmp_path / "out").mkdir()
    state.save(learner, tmp_path / "out", 0, shard_bytes=shard_bytes)
    saved = tmp_path / "out" / "model"
    assert (saved / "model.safetensors.index.json").exists() == (shard_bytes < 1 << 30)
    found, wanted = tensors_of(saved), tensors_of(source)
    assert {name: t.shape for name, t in found.items()} == {name: t.shape for name, t in wanted.items()}
    assert ("lm_head.weight" in found) != tied
    for name in ("config.json", "generation_config.json"):
        before, after = (json.loads((folder / name).read_text()) for folder in (source, saved))
        assert {key: after.get(key) for key in before if key != "transformers_version"} == {
            key: value for key, value in before.items() if key != "transformers_version"
        }
    loaded: Any = AutoModelForCausalLM.from_pretrained(saved)
    assert equal(dict(loaded.named_parameters()), weights(learner))
    state.load(other, tmp_path / "out", 0)
    assert equal(weights(other), weights(learner))


class OnDevice(torch.Tensor):
    """As if it were elsewhere: `cpu()` makes a copy, and the copies that live are known."""

    copies: ClassVar[weakref.WeakSet[torch.Tensor]] = weakref.WeakSet()
    most: ClassVar[int] = 0

    def cpu(self, *_: Any, **__: Any) -> torch.Tensor:
        copy = torch.Tensor(self.as_subclass(torch.Tensor).clone())
        OnDevice.copies.add(copy)
        OnDevice.most = max(OnDevice.most, len(OnDevice.copies))
        return copy


def test_a_save_copies_one_tensor_at_a_time_to_the_host(folder: Path, tmp_path: Path) -> None:
    """B125: and not the whole optimizer."""
    learner = learner_of(folder)
    learner.update(batch(0))
    moments = {name: learner.policy.state[p]["exp_avg"].clone() for name, p in learner.model.named_parameters()}
    for values in learner.policy.state.values():
        values["exp_avg"] = values["exp_avg"].as_subclass(OnDevice)
    state.save(learner, tmp_path, 0)
    assert OnDevice.most == 1
    written = load_file(tmp_path / "trainer-rank-0.safetensors")
    assert len(written) == 2 * len(moments) + 1
    assert all(torch.equal(written[f"policy/exp_avg/{name}"], moment) for name, moment in moments.items())


@pytest.mark.parametrize("tied", [True, False])
def test_a_checkpoint_takes_the_room_that_was_estimated(tmp_path: Path, tied: bool) -> None:
    """B102, B047: what `offbeat check` says of the disk."""
    source = tiny_qwen3(tmp_path / "m", vocab=4000, layers=1, tied=tied)
    learner = learner_of(source)
    learner.update(batch(0))
    (tmp_path / "out").mkdir()
    written = sum(path.stat().st_size for path in state.save(learner, tmp_path / "out", 0))
    assert written == pytest.approx(checkpoint_bytes(read_shape(str(source), None)), rel=0.1)


def test_tensors_of_any_shape_are_written_as_the_library_reads_them(tmp_path: Path) -> None:
    tensors = {
        "odd": torch.arange(5, dtype=torch.uint8),
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 3),
        "turned": torch.arange(6.0).reshape(2, 3).T,
        "Ω": torch.full((2, 2), float("nan")),
    }
    write_tensors(tensors, tmp_path / "t.safetensors")
    read = load_file(tmp_path / "t.safetensors")
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert read[name].dtype == tensor.dtype
        assert torch.equal(read[name].nan_to_num(7), tensor.nan_to_num(7))


def test_an_expert_model_survives_the_way_to_disk_and_back(tmp_path: Path) -> None:
    """transformers holds experts fused in memory and splits them on disk."""
    source = tiny_moe(tmp_path / "moe", vocab=40, layers=1)
    learner, other = learner_of(source), learner_of(source)
    learner.update(batch(0))
    (tmp_path / "out").mkdir()
    state.save(learner, tmp_path / "out", 0)
    state.load(other, tmp_path / "out", 0)
    assert equal(weights(other), weights(learner))
    learner.update(batch(1))
    other.update(batch(1))
    assert equal(weights(other), weights(learner))


@pytest.mark.parametrize(
    "name", ["trainer-rank-0.json", "trainer-rank-0.safetensors", "model/model.safetensors", "model/config.json"]
)
@pytest.mark.parametrize("damage", ["missing", "truncated", "garbage"])
def test_a_damaged_file_is_named(folder: Path, tmp_path: Path, name: str, damage: str) -> None:
    learner = learner_of(folder)
    learner.update(batch(0))
    state.save(learner, tmp_path, 0)
    path = tmp_path / name
    content = path.read_bytes()
    match damage:
        case "missing":
            path.unlink()
        case "truncated":
            path.write_bytes(content[: len(content) // 2])
        case _:
            path.write_bytes(bytes(reversed(content)))
    with pytest.raises(RunError, match=name.split("/")[0]):
        state.load(learner_of(folder), tmp_path, 0)


def test_the_state_of_another_model_is_refused(folder: Path, tmp_path: Path) -> None:
    learner = learner_of(folder)
    learner.update(batch(0))
    state.save(learner, tmp_path, 0)
    other = tiny_qwen3(tmp_path / "other", vocab=40, layers=2)
    with pytest.raises(RunError, match="model"):
        state.load(learner_of(other), tmp_path, 0)


def test_a_checkpoint_of_another_format_is_refused(folder: Path, tmp_path: Path) -> None:
    state.save(learner_of(folder), tmp_path, 0)
    path = tmp_path / "trainer-rank-0.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": "offbeat-trainer/9"}))
    with pytest.raises(RunError, match="offbeat-trainer/9"):
        state.load(learner_of(folder), tmp_path, 0)


def test_random_weights_are_a_function_of_the_seed(folder: Path) -> None:
    def made(seed: int) -> dict[str, torch.Tensor]:
        return dict(load_model(str(folder), None, init="random", seed=seed).named_parameters())

    assert equal(made(1), made(1))
    assert not equal(made(1), made(2))


def test_a_bfloat16_model_on_disk_gets_float32_master_weights(tmp_path: Path) -> None:
    source = tiny_qwen3(tmp_path / "m", vocab=40, layers=1, dtype="bfloat16")
    model = load_model(str(source), None, init="pretrained", seed=0)
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_a_narrow_model_is_refused(folder: Path) -> None:
    model = copy.deepcopy(load_model(str(folder), None, init="pretrained", seed=0)).bfloat16()
    with pytest.raises(ModelError, match="not float32"):
        Learner(model, TrainerSection(), LossSection(), total_updates=1)


def test_a_model_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="nowhere"):
        load_model(str(tmp_path / "nowhere"), None, init="pretrained", seed=0)


def test_weights_that_are_no_numbers_are_not_saved(folder: Path, tmp_path: Path) -> None:
    learner = learner_of(folder)
    with torch.no_grad():
        learner.model.get_parameter("model.norm.weight")[3] = torch.nan
    with pytest.raises(RunError, match=r"^model\.norm\.weight has values that are NaN.* no checkpoint is made of them"):
        state.save(learner, tmp_path, 0)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("make", [tiny_qwen3, tiny_moe])
def test_one_micro_batch_tells_of_each_layer_forward_and_backward(
    tmp_path: Path, make: Any, checkpointing: bool
) -> None:
    """On a slow machine one micro-batch takes minutes; the stall limit must not take it for one that hangs."""
    path = make(tmp_path / "model", vocab=40, layers=3)
    told: list[str | None] = []
    section = TrainerSection(dtype="float32", gradient_checkpointing=checkpointing)
    model = load_model(str(path), None, init="pretrained", seed=0)
    learner = Learner(model, section, LossSection(), total_updates=5, progress=told.append)
    learner.update(batch(0))
    first, *within, last = told
    assert (first, set(within), last) == ("update, micro-batch 1 of 1", {None}, "update, optimizer")
    assert len(within) >= 3 + 3 + 2 + 1  # layers forward, layers backward, the head both ways, its scores
    told.clear()
    learner.logprobs([sample(0)], SAMPLING)
    assert told == ["logprobs", *[None] * (3 + 1 + 1)]  # layers, head, results
    told.clear()
    pair = SupervisedSample(prompt_token_ids=np.arange(2, 5, dtype=np.int32), token_ids=np.ones(2, dtype=np.int32))
    learner.supervise([pair], 1e-3, last=True)
    assert (told[0], told[-1]) == ("supervise", "supervise, optimizer")
    assert told.count(None) >= 9
