"""The sampler against a separate full forward of each sequence, on several architectures and batch layouts."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    PreTrainedModel,
    Qwen3Config,
)

from offbeat.errors import ConfigError, ModelError, RunError
from offbeat.layer_progress import tell_of_layers
from offbeat.rollout.hf import HfSampler
from offbeat.types import GenerateRequest, Rollout, Sampling, sample_seed

VOCABULARY = 61
ROTARY: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.4,
    "tie_word_embeddings": True,
}
CONFIGS: dict[str, Callable[[], Any]] = {
    "qwen3": lambda: Qwen3Config(**ROTARY, num_key_value_heads=2),
    "llama": lambda: LlamaConfig(**ROTARY, num_key_value_heads=4),
    "gpt2": lambda: GPT2Config(
        vocab_size=VOCABULARY, n_positions=128, n_embd=32, n_layer=2, n_head=4, initializer_range=0.4
    ),
    "sliding": lambda: MistralConfig(**ROTARY, num_key_value_heads=2, sliding_window=6),
    "alibi": lambda: BloomConfig(vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=4, initializer_range=0.4),
}
ALL = list(CONFIGS)


@functools.cache
def model_of(kind: str, attention: str = "sdpa") -> PreTrainedModel:
    state = torch.get_rng_state()
    torch.manual_seed(0)
    attention = "eager" if kind == "alibi" else attention
    model: Any = AutoModelForCausalLM.from_config(CONFIGS[kind](), attn_implementation=attention)
    for name, parameter in model.named_parameters():
        if name.endswith("bias") or "wpe" in name:
            torch.nn.init.normal_(parameter, std=0.3)  # such that wrong positions show
    torch.set_rng_state(state)
    return model.eval()


def requests_of(lengths: Sequence[int], samples: int | Sequence[int], seed: int = 0) -> list[GenerateRequest]:
    rng = np.random.default_rng(seed)
    counts = [samples] * len(lengths) if isinstance(samples, int) else samples
    return [
        GenerateRequest(
            prompt_id=f"data/{i}",
            epoch=0,
            token_ids=rng.integers(0, VOCABULARY, length).astype(np.int32),
            seeds=tuple(sample_seed(seed, f"data/{i}", j, 0) for j in range(count)),
        )
        for i, (length, count) in enumerate(zip(lengths, counts, strict=True))
    ]


def full_forward(model: Any, rollout: Rollout, sampling: Sampling) -> np.ndarray:
    """Logprobs of the sampled tokens from one forward without cache, padding or batch, truncated by hand."""
    ids = torch.tensor([[*rollout.prompt_token_ids.tolist(), *rollout.token_ids.tolist()]])
    with torch.no_grad():
        logits = model(ids, use_cache=False).logits[0].double()
    logits = logits[len(rollout.prompt_token_ids) - 1 : -1] / (sampling.temperature or 1.0)
    probabilities = logits.softmax(-1).numpy()
    result: list[float] = []
    for row, token in zip(probabilities, rollout.token_ids, strict=True):
        order = np.argsort(-row)
        if sampling.min_p:
            order = order[row[order] >= sampling.min_p * row.max()]
        if sampling.top_k:
            order = order[: sampling.top_k]
        if sampling.top_p < 1:
            mass = np.cumsum(row[order] / row[order].sum())
            order = order[: int((mass < sampling.top_p).sum()) + 1]
        result.append(float(np.log(row[token] / row[order].sum())) if token in order else -np.inf)
    return np.array(result)


def assert_same_numbers(model: PreTrainedModel, rollouts: Sequence[Rollout], sampling: Sampling) -> None:
    for rollout in rollouts:
        gap = np.abs(full_forward(model, rollout, sampling) - rollout.logprobs)
        assert gap.max(initial=0.0) <= 1e-4, (rollout.prompt_id, rollout.sample_index, gap)


def same_tokens(first: Sequence[Rollout], second: Sequence[Rollout]) -> bool:
    return all(a.token_ids.tolist() == b.token_ids.tolist() for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(max_new_tokens=12, temperature=0.7, stop_token_ids=(1, 2, 3, 4, 5, 6)),
        Sampling(max_new_tokens=12, temperature=1.3, top_k=9, top_p=0.9, min_p=0.02, stop_token_ids=tuple(range(9))),
    ],
    ids=["plain", "truncated"],
)
def test_logprobs_equal_a_full_forward_at_a_temperature_B006_B021_B049(kind: str, sampling: Sampling) -> None:
    """Unequal prompts, rows that leave and join: 23 samples through 8 rows."""
    model = model_of(kind)
    requests = requests_of([1, 7, 3, 20, 7, 2], [4, 3, 5, 1, 8, 2])
    rollouts = HfSampler(model, max_rows=8).generate(requests, sampling, 3)
    assert [(r.prompt_id, r.sample_index) for r in rollouts] == [
        (request.prompt_id, index) for request in requests for index in range(len(request.seeds))
    ]
    assert len({len(rollout.token_ids) for rollout in rollouts}) > 3
    assert_same_numbers(model, rollouts, sampling)


@pytest.mark.parametrize("kind", ["qwen3", "gpt2"])
def test_eager_attention_gives_the_same_tokens(kind: str) -> None:
    requests, sampling = requests_of([5, 1, 9], 4), Sampling(max_new_tokens=10, temperature=0.8)
    first = HfSampler(model_of(kind)).generate(requests, sampling, 0)
    second = HfSampler(model_of(kind, "eager")).generate(requests, sampling, 0)
    assert same_tokens(first, second)


@pytest.mark.parametrize("padding", [0, 7, 90])
def test_left_padding_moves_no_position_B021(padding: int) -> None:
    """A longer neighbour pads the prompt on the left; the model's positions are learned and absolute."""
    model, sampling = model_of("gpt2"), Sampling(max_new_tokens=6)
    alone = requests_of([4], 3)
    neighbour = requests_of([4 + padding], 2, seed=1)
    padded = HfSampler(model).generate([*alone, *neighbour], sampling, 0)[:3]
    assert same_tokens(padded, HfSampler(model).generate(alone, sampling, 0))
    assert_same_numbers(model, padded, sampling)


@pytest.mark.parametrize("kind", ALL)
def test_a_sample_is_the_same_whatever_else_is_computed_with_it(kind: str) -> None:
    requests = requests_of([3, 6, 1, 4], [5, 2, 3, 4])
    sampling = Sampling(max_new_tokens=8, stop_token_ids=(1, 2, 3, 4))
    together = HfSampler(model_of(kind), max_rows=64).generate(requests, sampling, 0)
    for max_rows in (1, 3, 16):
        assert same_tokens(HfSampler(model_of(kind), max_rows=max_rows).generate(requests, sampling, 0), together)


def test_a_longer_prompt_that_joins_late_is_placed_left_of_the_others() -> None:
    model, sampling = model_of("qwen3"), Sampling(max_new_tokens=5, temperature=0.9, stop_token_ids=tuple(range(20)))
    requests = requests_of([2, 2, 2, 2, 30, 2, 60, 3], [3, 3, 2, 2, 2, 3, 2, 3])
    rollouts = HfSampler(model, max_rows=8).generate(requests, sampling, 0)
    assert_same_numbers(model, rollouts, sampling)


def test_one_call_gives_identical_bits_every_time() -> None:
    requests = requests_of([3, 6, 1, 4], [5, 2, 3, 4])
    sampling = Sampling(max_new_tokens=20, stop_token_ids=(1, 2, 3, 4))
    first, second = (HfSampler(model_of("qwen3"), max_rows=6).generate(requests, sampling, 0) for _ in range(2))
    assert same_tokens(first, second)
    assert [r.logprobs.tobytes() for r in first] == [r.logprobs.tobytes() for r in second]


def test_each_prompt_is_prefilled_once_for_all_its_samples() -> None:
    model, seen = model_of("qwen3"), list[tuple[int, ...]]()
    handle = model.register_forward_pre_hook(
        lambda _module, _arguments, keywords: seen.append(tuple(keywords["input_ids"].shape)), with_kwargs=True
    )
    try:
        requests = requests_of([5, 5, 5], 4)
        twin = GenerateRequest(prompt_id="twin", epoch=0, token_ids=requests[0].token_ids, seeds=(1, 2))
        HfSampler(model).generate([*requests, twin], Sampling(max_new_tokens=3), 0)
    finally:
        handle.remove()
    assert seen == [(3, 5), (14, 1), (14, 1)]


def test_finished_samples_are_no_longer_computed() -> None:
    model, rows, ended = model_of("qwen3"), list[int](), list[int]()
    sampler = HfSampler(model, on_tokens=rows.append, on_finished=ended.append)
    rollouts = sampler.generate(
        requests_of([3, 8], 20), Sampling(max_new_tokens=30, stop_token_ids=tuple(range(12))), 0
    )
    lengths = np.array([len(rollout.token_ids) for rollout in rollouts])
    assert rows == [int((lengths > step).sum()) for step in range(lengths.max())]
    assert len(rows) > 3
    assert ended == [int((lengths == step).sum()) for step in sorted(set(lengths.tolist()))]


def test_any_of_several_stop_ids_ends_a_sample_and_stays_in_it_B084_B025() -> None:
    """Prompts may hold stop ids, and lengths come from counts: no id is ever taken for padding."""
    requests = [
        GenerateRequest(prompt_id=str(i), epoch=0, token_ids=np.array([5, 6, 0, i], np.int32), seeds=(i, i + 100))
        for i in range(20)
    ]
    rollouts = HfSampler(model_of("qwen3")).generate(requests, Sampling(max_new_tokens=25, stop_token_ids=(5, 6)), 0)
    assert {int(r.token_ids[-1]) for r in rollouts if r.finish_reason == "stop"} == {5, 6}
    for rollout in rollouts:
        stops = np.isin(rollout.token_ids, (5, 6))
        assert stops.any() == (rollout.finish_reason == "stop")
        assert not stops[:-1].any()
        assert len(rollout.token_ids) == len(rollout.logprobs)
        assert rollout.finish_reason == "stop" or len(rollout.token_ids) == 25


def test_lengths_are_those_of_the_samples_not_of_the_batch_B132() -> None:
    sampling = Sampling(max_new_tokens=40, stop_token_ids=tuple(range(15)))
    rollouts = HfSampler(model_of("gpt2")).generate(requests_of([3], 30), sampling, 0)
    lengths = [len(rollout.token_ids) for rollout in rollouts]
    assert len(set(lengths)) > 3
    assert np.mean(lengths) < max(lengths)
    assert all(rollout.versions == ((0, len(rollout.token_ids)),) for rollout in rollouts)


def test_greedy_follows_the_largest_logit_of_a_full_forward() -> None:
    model: Any = model_of("llama")
    rollouts = HfSampler(model).generate(requests_of([4, 2], 1), Sampling(max_new_tokens=8, temperature=0.0), 0)
    for rollout in rollouts:
        ids = torch.tensor([[*rollout.prompt_token_ids.tolist(), *rollout.token_ids.tolist()]])
        with torch.no_grad():
            best = model(ids).logits[0, len(rollout.prompt_token_ids) - 1 : -1].argmax(-1)
        assert best.tolist() == rollout.token_ids.tolist()
    assert_same_numbers(model, rollouts, Sampling(max_new_tokens=8, temperature=0.0))


def test_one_new_token_one_prompt_token_one_sample() -> None:
    [rollout] = HfSampler(model_of("qwen3"), max_rows=1).generate(requests_of([1], 1), Sampling(max_new_tokens=1), 7)
    assert (len(rollout.token_ids), rollout.finish_reason, rollout.versions) == (1, "length", ((7, 1),))
    assert rollout.token_ids.dtype == np.int32
    assert rollout.logprobs.dtype == np.float32


def test_no_requests_give_no_rollouts() -> None:
    assert HfSampler(model_of("qwen3")).generate([], Sampling(max_new_tokens=4), 0) == []


def test_more_positions_than_the_model_has_are_refused_and_all_of_them_can_be_used() -> None:
    sampler = HfSampler(model_of("gpt2"))
    [rollout] = sampler.generate(requests_of([100], 1), Sampling(max_new_tokens=28), 0)
    assert len(rollout.token_ids) == 28
    with pytest.raises(ConfigError, match=r"'data/0' has 100 tokens and max_new_tokens = 29.*128 positions"):
        sampler.generate(requests_of([100], 1), Sampling(max_new_tokens=29), 0)


@pytest.mark.parametrize(("ids", "text"), [([], "is empty"), ([3, 61], "token id 61"), ([-1], "token id -1")])
def test_prompts_that_cannot_be_computed_are_named(ids: list[int], text: str) -> None:
    request = GenerateRequest(prompt_id="data/9", epoch=0, token_ids=np.array(ids, np.int32), seeds=(1,))
    with pytest.raises(ConfigError, match=f"'data/9'.*{text}"):
        HfSampler(model_of("qwen3")).generate([request], Sampling(max_new_tokens=2), 0)


def test_an_abort_cuts_running_samples_short_and_keeps_what_they_have() -> None:
    model, sampling = model_of("qwen3"), Sampling(max_new_tokens=20, stop_token_ids=(1, 2))
    steps: list[int] = []

    def on_tokens(count: int) -> None:
        steps.append(count)
        if len(steps) == 5:
            sampler.aborting.set()

    requests = requests_of([3, 4, 5], 4)
    sampler = HfSampler(model, max_rows=8, on_tokens=on_tokens)
    rollouts = sampler.generate(requests, sampling, 2)
    whole = HfSampler(model, max_rows=8).generate(requests, sampling, 2)
    reasons = {rollout.finish_reason for rollout in rollouts}
    assert "abort" in reasons
    assert [len(rollout.token_ids) for rollout in rollouts[-4:]] == [0, 0, 0, 0]  # never begun
    for cut, full in zip(rollouts, whole, strict=True):
        assert full.token_ids.tolist()[: len(cut.token_ids)] == cut.token_ids.tolist()
        assert cut.finish_reason in ("abort", full.finish_reason)
        assert cut.versions == ((2, len(cut.token_ids)),)
    sampler.aborting.clear()
    assert same_tokens(sampler.generate(requests, sampling, 2), whole)


def test_a_model_that_gives_nan_is_reported_with_sample_and_version() -> None:
    model: Any = AutoModelForCausalLM.from_config(CONFIGS["qwen3"]()).eval()
    with torch.no_grad():
        model.model.norm.weight[0] = torch.nan
    with pytest.raises(RunError, match=r"engine-1: .*'data/0', sample 0, token 0, with weights version 5.*NaN"):
        HfSampler(model, name="engine-1").generate(requests_of([3], 2), Sampling(max_new_tokens=2), 5)


def test_new_weights_are_used_from_the_first_token_of_the_next_call_B001() -> None:
    """The same prompt before and after an update: nothing of the old keys and values is left."""
    model: Any = AutoModelForCausalLM.from_config(CONFIGS["qwen3"]()).eval()
    sampler, sampling, requests = HfSampler(model), Sampling(max_new_tokens=6), requests_of([9], 4)
    sampler.generate(requests, sampling, 0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    rollouts = sampler.generate(requests, sampling, 1)
    assert {rollout.versions for rollout in rollouts} == {((1, 6),)}
    assert_same_numbers(model, rollouts, sampling)


def test_bfloat16_weights_give_float32_logprobs_of_their_own_distribution() -> None:
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(CONFIGS["qwen3"](), dtype=torch.bfloat16).eval()
    rollouts = HfSampler(model).generate(requests_of([3, 9], 3), Sampling(max_new_tokens=5, temperature=0.8), 0)
    for rollout in rollouts:
        gap = np.abs(full_forward(model, rollout, Sampling(max_new_tokens=5, temperature=0.8)) - rollout.logprobs)
        assert gap.max() < 0.3


def test_a_model_without_a_key_value_cache_is_refused() -> None:
    class Stateful(torch.nn.Module):
        def forward(self, input_ids: torch.Tensor, cache_params: object = None) -> None: ...

    with pytest.raises(ModelError, match="Stateful takes neither of cache, past_key_values"):
        HfSampler(Stateful())  # type: ignore[arg-type]  # that is the point


def test_a_prefill_tells_of_each_layer_before_its_first_token() -> None:
    model: Any = AutoModelForCausalLM.from_config(CONFIGS["qwen3"]()).eval()
    told: list[str] = []
    tell_of_layers(model, lambda: told.append("layer"))
    HfSampler(model, on_tokens=lambda count: told.append("token")).generate(
        requests_of([9], 2), Sampling(max_new_tokens=1), 0
    )
    assert told == ["layer"] * (model.config.num_hidden_layers + 1) + ["token"]
