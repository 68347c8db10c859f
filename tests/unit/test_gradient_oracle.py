"""The gradient of an update against a float64 reference that knows no batching: however the work is split."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from offbeat.algorithms.batching import make_batch
from offbeat.config import LossSection, TrainerSection
from offbeat.testing.oracle import OracleLoss, OracleSample, double, oracle_gradient, oracle_logprobs
from offbeat.testing.tiny_model import tiny_gpt2, tiny_qwen3
from offbeat.trainer.learner import Learner
from offbeat.types import Batch, MiniBatch, Prompt, Rollout, Sampling, Scored, SupervisedSample

VOCAB = 40
EOS = 1  # also the pad id of the models here
LENGTHS = (1, 50, 3, 100)
SPLITS = {"1x4": 1, "2x2": 2 * 107, "4x1": 4 * 107, "3+1": 3 * 107}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder: Path = tmp_path_factory.mktemp("models")
    options: dict[str, Any] = {"vocab": VOCAB, "pad_is_eos": True}
    tiny_gpt2(folder / "gpt2", tied=True, **options)
    tiny_qwen3(folder / "qwen3", tied=True, **options)
    tiny_qwen3(folder / "untied", tied=False, layers=1, **options)
    return {
        name: AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float32).eval()
        for name in ("gpt2", "qwen3", "untied")
    }


def draw(
    model: Any,
    lengths: tuple[int, ...] = LENGTHS,
    *,
    sampling: Sampling | None = None,
    noise: float = 0.5,
    seed: int = 0,
) -> list[OracleSample]:
    """Samples of two groups whose behaviour logprobs lie around the model's own, so that some ratios are clipped."""
    sampling = sampling or Sampling(max_new_tokens=256)
    random = np.random.default_rng(seed)
    samples: list[OracleSample] = []
    for index, length in enumerate(lengths):
        # The stop id, which is the pad id too, stands inside the prompt and at the end.
        prompt = [EOS, *random.integers(2, VOCAB, size=2 + index).tolist()]
        tokens = [*random.integers(2, VOCAB, size=length - 1).tolist(), EOS]
        with torch.no_grad():
            own = oracle_logprobs(double(model), prompt, tokens, sampling)
        own = torch.where(torch.isfinite(own), own, -3.0).cpu().numpy()
        behaviour = (own + random.normal(0, noise, size=length)).astype(np.float32)
        reward = float(random.normal())
        samples.append(OracleSample(("p", index % 2), prompt, tokens, behaviour.tolist(), reward))
    return samples


def scored(samples: list[OracleSample]) -> list[Scored]:
    result: list[Scored] = []
    for index, sample in enumerate(samples):
        prompt_ids = np.asarray(sample.prompt, dtype=np.int32)
        rollout = Rollout(
            prompt_id=repr(sample.group),
            sample_index=index,
            epoch=0,
            prompt_token_ids=prompt_ids,
            token_ids=np.asarray(sample.tokens, dtype=np.int32),
            logprobs=np.asarray(sample.behaviour, dtype=np.float32),
            versions=((0, len(sample.tokens)),),
            finish_reason="stop" if sample.tokens[-1] == EOS else "length",
            engine="engine-0",
            started_s=0.0,
            finished_s=1.0,
            loss_mask=None if sample.mask is None else np.asarray(sample.mask, dtype=np.uint8),
        )
        prompt = Prompt(id=rollout.prompt_id, epoch=0, source="t", token_ids=prompt_ids, text="", columns={})
        result.append(Scored(rollout=rollout, prompt=prompt, text="", reward=sample.reward, parts={}))
    return result


def loss_section(loss: OracleLoss) -> LossSection:
    return LossSection(**dataclasses.asdict(loss))


def batch_of(samples: list[OracleSample], sampling: Sampling, loss: OracleLoss) -> Batch:
    return make_batch(0, scored(samples), sampling, loss=loss_section(loss), updates_per_step=1, epochs_per_batch=1)


def learner_of(model: Any, loss: OracleLoss, budget: int = 4096, **trainer: Any) -> Learner:
    section = TrainerSection(dtype=trainer.pop("dtype", "float32"), micro_batch_tokens=budget, **trainer)
    return Learner(model, section, loss_section(loss), total_updates=10)


def gradients_of(learner: Learner, minibatch: MiniBatch, sampling: Sampling) -> dict[str, np.ndarray]:
    learner.gradient(minibatch, sampling)
    grads = {
        name: (torch.zeros_like(p) if p.grad is None else p.grad).numpy().copy()
        for name, p in learner.model.named_parameters()
    }
    learner.model.zero_grad(set_to_none=True)
    return grads


def gradient(
    model: Any, samples: list[OracleSample], sampling: Sampling, loss: OracleLoss, budget: int = 4096
) -> dict[str, np.ndarray]:
    batch = batch_of(samples, sampling, loss)
    return gradients_of(learner_of(model, loss, budget), batch.minibatches[0], sampling)


def distance(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> float:
    """Largest difference, relative to the largest element of the whole gradient."""
    assert found.keys() == wanted.keys()
    scale = max(float(np.abs(g).max()) for g in wanted.values())
    assert scale > 0
    return max(float(np.abs(found[name] - wanted[name]).max()) for name in wanted) / scale


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "constant"])
@pytest.mark.parametrize("name", ["gpt2", "qwen3"])
def test_every_split_gives_the_gradient_of_the_oracle_B012(models: dict[str, Any], name: str, aggregation: Any) -> None:
    sampling = Sampling(max_new_tokens=256, temperature=0.8)
    loss = OracleLoss(aggregation=aggregation)
    samples = draw(models[name], sampling=sampling)
    _, wanted = oracle_gradient(models[name], samples, sampling, loss)
    for split, budget in SPLITS.items():
        assert distance(gradient(models[name], samples, sampling, loss, budget), wanted) < 5e-6, split


@pytest.mark.parametrize("name", ["gpt2", "untied"])
def test_order_and_padding_width_do_not_change_the_gradient_B021_B065(models: dict[str, Any], name: str) -> None:
    sampling, loss = Sampling(max_new_tokens=256), OracleLoss()
    samples = draw(models[name], (4, 9, 2, 30))
    _, wanted = oracle_gradient(models[name], samples, sampling, loss)
    for order in ([3, 1, 0, 2], [2, 0, 1, 3]):
        for budget in (1, 40, 4096):
            found = gradient(models[name], [samples[i] for i in order], sampling, loss, budget)
            assert distance(found, wanted) < 5e-6


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "constant"])
def test_shards_of_two_ranks_add_up_to_the_oracle_B012_B020_B041(models: dict[str, Any], aggregation: Any) -> None:
    """Unequal numbers of micro-batches, and a rank without samples: denominators are global, so shares add up."""
    sampling, loss = Sampling(max_new_tokens=256), OracleLoss(aggregation=aggregation)
    samples = draw(models["gpt2"])
    _, wanted = oracle_gradient(models["gpt2"], samples, sampling, loss)
    whole = batch_of(samples, sampling, loss).minibatches[0]
    learner = learner_of(models["gpt2"], loss, budget=110)
    for cut in (0, 1, 3):
        shards = [whole.samples[:cut], whole.samples[cut:]]
        parts = [
            gradients_of(learner, MiniBatch(samples=shard, denominator=whole.denominator), sampling) for shard in shards
        ]
        assert distance({n: parts[0][n] + parts[1][n] for n in wanted}, wanted) < 5e-6


@pytest.mark.parametrize(
    "loss",
    [
        OracleLoss(scale_by_std=False),
        OracleLoss(dual_clip=None),
        OracleLoss(clip_low=0.05, clip_high=0.4, dual_clip=1.2),
    ],
)
def test_each_choice_of_the_loss_gives_the_gradient_of_the_oracle(models: dict[str, Any], loss: OracleLoss) -> None:
    sampling = Sampling(max_new_tokens=64)
    samples = draw(models["qwen3"], (12, 20, 7, 30), noise=1.0)
    _, wanted = oracle_gradient(models["qwen3"], samples, sampling, loss)
    assert distance(gradient(models["qwen3"], samples, sampling, loss), wanted) < 5e-6


@pytest.mark.parametrize("temperature", [0.6, 1.5])
def test_temperature_scales_the_logits_in_the_gradient_too_B040_B127(
    models: dict[str, Any], temperature: float
) -> None:
    sampling, loss = Sampling(max_new_tokens=64, temperature=temperature), OracleLoss()
    samples = draw(models["gpt2"], (5, 8, 3, 9), sampling=sampling)
    _, wanted = oracle_gradient(models["gpt2"], samples, sampling, loss)
    assert distance(gradient(models["gpt2"], samples, sampling, loss), wanted) < 5e-6
    plain = Sampling(max_new_tokens=64)
    assert distance(gradient(models["gpt2"], samples, plain, loss), wanted) > 1e-2


@pytest.mark.parametrize("filters", [{"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.05}, {"top_k": 9, "top_p": 0.9}])
def test_truncated_sampling_is_replayed_B049(models: dict[str, Any], filters: dict[str, Any]) -> None:
    """Uniform random tokens fall outside the nucleus often: those are left out, in both."""
    sampling, loss = Sampling(max_new_tokens=64, temperature=1.2, **filters), OracleLoss()
    samples = draw(models["gpt2"], (15, 18, 13, 19), sampling=sampling)
    value, wanted = oracle_gradient(models["gpt2"], samples, sampling, loss)
    assert distance(gradient(models["gpt2"], samples, sampling, loss), wanted) < 5e-6
    result = learner_of(models["gpt2"], loss, lr=1e-12).gradient(
        batch_of(samples, sampling, loss).minibatches[0], sampling
    )
    assert result.sums["loss"] == pytest.approx(value, rel=1e-5, abs=1e-6)
    assert 0 < result.sums["outside"] < 65
    assert result.sums["outside"] + result.sums["tokens"] == 65


def test_permuted_group_ids_change_the_gradient_as_the_oracle_says(models: dict[str, Any]) -> None:
    """A baseline from other groups learns almost as well on an easy task, and is wrong."""
    sampling, loss = Sampling(max_new_tokens=64), OracleLoss()
    samples = draw(models["qwen3"], (6, 9, 4, 8, 5, 7))
    groups = [("p", 0), ("p", 0), ("p", 1), ("p", 1), ("p", 0), ("p", 1)]
    assert groups != [sample.group for sample in samples]
    permuted = [dataclasses.replace(sample, group=group) for sample, group in zip(samples, groups, strict=True)]
    _, right = oracle_gradient(models["qwen3"], samples, sampling, loss)
    _, wrong = oracle_gradient(models["qwen3"], permuted, sampling, loss)
    assert distance(wrong, right) > 0.1
    assert distance(gradient(models["qwen3"], samples, sampling, loss), right) < 5e-6
    assert distance(gradient(models["qwen3"], permuted, sampling, loss), wrong) < 5e-6


def test_the_stop_token_is_trained_and_padding_is_not_B025_B084_B132(models: dict[str, Any]) -> None:
    """Pad id = stop id. Taking the stop token out of the mask changes the gradient; the content of padding does not."""
    sampling, loss = Sampling(max_new_tokens=64, stop_token_ids=(EOS, 6)), OracleLoss()
    samples = draw(models["gpt2"], (4, 12, 3, 5), noise=0.0)
    batch = batch_of(samples, sampling, loss).minibatches[0]
    assert batch.denominator == 4 + 12 + 3 + 5
    full = gradient(models["gpt2"], samples, sampling, loss)
    without = [dataclasses.replace(s, mask=[True] * (len(s.tokens) - 1) + [False]) for s in samples]
    assert distance(gradient(models["gpt2"], without, sampling, loss), full) > 1e-2
    only = [dataclasses.replace(s, mask=[False] * (len(s.tokens) - 1) + [True]) for s in samples]
    _, wanted = oracle_gradient(models["gpt2"], only, sampling, loss)
    assert distance(gradient(models["gpt2"], only, sampling, loss), wanted) < 5e-6


@pytest.mark.parametrize("name", ["gpt2", "qwen3"])
def test_the_content_of_padding_changes_no_bit_of_the_gradient_B065(
    models: dict[str, Any], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from offbeat.trainer import batching

    sampling, loss = Sampling(max_new_tokens=64), OracleLoss()
    samples = draw(models[name], (4, 12, 3, 5))
    grads: list[dict[str, np.ndarray]] = []
    for pad_id in (0, EOS, 17):
        monkeypatch.setattr(batching, "PAD_ID", pad_id)
        grads.append(gradient(models[name], samples, sampling, loss))
    for other in grads[1:]:
        for parameter, value in grads[0].items():
            assert np.array_equal(value, other[parameter]), parameter


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.5])
@pytest.mark.parametrize("name", ["gpt2", "qwen3", "untied"])
def test_logprobs_agree_with_the_oracle_alone_and_in_company_B006_B065(
    models: dict[str, Any], name: str, temperature: float
) -> None:
    sampling = Sampling(max_new_tokens=64, temperature=temperature)
    samples = draw(models[name], (1, 17, 60, 5))
    sequences = [
        SupervisedSample(prompt_token_ids=np.asarray(s.prompt, np.int32), token_ids=np.asarray(s.tokens, np.int32))
        for s in samples
    ]
    learner = learner_of(models[name], OracleLoss())
    together = learner.logprobs(sequences, sampling)
    for sequence, sample, found in zip(sequences, samples, together, strict=True):
        wanted = oracle_logprobs(double(models[name]), sample.prompt, sample.tokens, sampling).detach().numpy()
        assert np.abs(found - wanted).max() < 1e-4
        assert np.abs(learner.logprobs([sequence], sampling)[0] - wanted).max() < 1e-4


def test_a_head_chunked_for_memory_gives_the_same_gradient_and_facts(
    models: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    sampling, loss = Sampling(max_new_tokens=64, temperature=0.7, top_k=20), OracleLoss()
    samples = draw(models["qwen3"], (15, 18, 13, 19), sampling=sampling)
    batch = batch_of(samples, sampling, loss).minibatches[0]
    learner = learner_of(models["qwen3"], loss)
    whole, facts = gradients_of(learner, batch, sampling), learner.gradient(batch, sampling)
    monkeypatch.setattr("offbeat.algorithms.logprobs.CHUNK_ELEMENTS", 7 * VOCAB)
    chunked, chunked_facts = gradients_of(learner, batch, sampling), learner.gradient(batch, sampling)
    assert distance(chunked, whole) < 2e-6
    assert chunked_facts.sums == pytest.approx(facts.sums, rel=1e-5)


def test_activation_checkpointing_changes_no_gradient(models: dict[str, Any]) -> None:
    import copy

    sampling, loss = Sampling(max_new_tokens=64), OracleLoss()
    for name in ("gpt2", "qwen3"):
        samples = draw(models[name], (5, 8, 3, 9))
        wanted = gradient(models[name], samples, sampling, loss)
        model = copy.deepcopy(models[name])
        learner = learner_of(model, loss, gradient_checkpointing=True)
        assert any(module.training for module in model.modules())
        batch = batch_of(samples, sampling, loss).minibatches[0]
        assert distance(gradients_of(learner, batch, sampling), wanted) < 1e-6


def test_unchanged_weights_give_ratio_one_B040(models: dict[str, Any]) -> None:
    for temperature in (0.6, 1.5):
        sampling, loss = Sampling(max_new_tokens=64, temperature=temperature), OracleLoss()
        samples = draw(models["gpt2"], (5, 8, 3, 9), sampling=sampling, noise=0.0)
        facts = learner_of(models["gpt2"], loss).gradient(batch_of(samples, sampling, loss).minibatches[0], sampling)
        assert facts.sums["ratio"] / facts.sums["tokens"] == pytest.approx(1.0, abs=2e-6)
        assert facts.ratio_max == pytest.approx(1.0, abs=1e-5)
