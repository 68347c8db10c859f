"""What a run needs in memory, from shapes alone, and what is said where the machine has less."""

from __future__ import annotations

from typing import Any

import pytest

from offbeat.config import Config
from offbeat.host import machine_memory, memory_problem
from offbeat.memory import Lengths, ModelShape, SetSize, engine_batches, estimate_memory, micro_batch_tokens

SMOLLM2 = ModelShape(parameters=134_515_008, hidden=576, layers=30, kv_heads=3, head_dim=64, vocab=49152)
GIB = 2**30


def config_of(**fields: Any) -> Config:
    return Config.model_validate(
        {
            "model": "m",
            "steps": 1,
            "prompts_per_step": 8,
            "samples_per_prompt": 4,
            "data": ({"name": "d", "source": "d.jsonl", "rewards": {"r.py:f": 1.0}},),
            "sampling": {"max_new_tokens": 24},
            **fields,
            "trainer": {"dtype": "float32", "device": "cpu", **fields.get("trainer", {})},
            "rollout": {"device": "cpu", **fields.get("rollout", {})},
        }
    )


@pytest.mark.parametrize(
    ("fields", "prompt", "tokens"),
    [
        ({}, 16, 32 * 40),  # the whole batch is less than the budget of 16,384
        ({"updates_per_step": 3}, 16, 3 * 4 * 40),  # the largest of three mini-batches has three prompts
        ({"trainer": {"micro_batch_tokens": 512}}, 16, 12 * 40),  # whole rows only
        ({"trainer": {"micro_batch_tokens": 32}}, 16, 40),  # at least one row
        ({}, 1000, 16 * 1024),  # the budget
    ],
)
def test_a_micro_batch_holds_no_more_than_its_mini_batch_has(fields: Any, prompt: int, tokens: int) -> None:
    assert micro_batch_tokens(config_of(**fields), Lengths(prompt=prompt)) == tokens


def test_a_warm_up_with_longer_samples_counts() -> None:
    config = config_of(warmup={"source": "w.jsonl", "steps": 1, "samples_per_step": 10})
    assert micro_batch_tokens(config, Lengths(prompt=16, warmup=20)) == 32 * 40
    assert micro_batch_tokens(config, Lengths(prompt=16, warmup=900)) == 10 * 900


def test_a_small_batch_of_a_real_model_is_estimated_at_what_it_takes() -> None:
    """3.8 GiB were measured with at most 880 tokens, where a full micro-batch would take 29 GiB."""
    small = config_of(prompts_per_step=5, samples_per_prompt=4)
    assert 3.0 * GIB < estimate_memory(small, SMOLLM2, Lengths(prompt=20)).trainer < 4.6 * GIB
    assert estimate_memory(config_of(), SMOLLM2, Lengths(prompt=1000)).trainer > 25 * GIB


def test_an_engine_holds_its_share_of_a_step_or_of_a_held_out_set_whichever_is_more() -> None:
    sets = (
        {"name": "long", "source": "e.jsonl", "max_new_tokens": 400},
        {"name": "many", "source": "e.jsonl", "samples_per_prompt": 5},
    )
    lengths = Lengths(prompt=16, sets=(SetSize(prompts=6, longest=30), SetSize(prompts=200, longest=10)))
    config = config_of(eval=sets, rollout={"replicas": 2, "max_rows": 100})
    assert engine_batches(config, lengths) == [(16, 16 + 24), (3, 30 + 400), (100, 10 + 24)]
    odd = config_of(prompts_per_step=3, samples_per_prompt=8, rollout={"replicas": 2})
    assert engine_batches(odd, Lengths(prompt=16)) == [(16, 40)]  # two whole prompts, not 12 samples
    token = 30 * 2 * 3 * 64 * 4  # keys and values of all layers, float32
    alone = estimate_memory(config, SMOLLM2, Lengths(prompt=16)).engine
    both = estimate_memory(config, SMOLLM2, lengths)
    assert both.engine - alone == 100 * (34 * token + 49152 * 8) - 16 * (40 * token + 49152 * 8)
    assert both.trainer == estimate_memory(config, SMOLLM2, Lengths(prompt=16)).trainer


def test_too_little_memory_is_told_with_the_key_that_helps() -> None:
    config, long = config_of(), Lengths(prompt=1000)
    assert memory_problem(config, SMOLLM2, long, 64 * GIB) is None
    told = memory_problem(config, SMOLLM2, long, 16 * GIB)
    assert told is not None
    assert "and this machine has 16.0 GiB: lower trainer.micro_batch_tokens (now 16,384)" in told
    told = memory_problem(config, SMOLLM2, long, 1 * GIB)
    assert told is not None
    assert "with the lowest trainer.micro_batch_tokens still about" in told
    assert "use a smaller model" in told
    there = machine_memory()
    assert there is not None
    assert there > GIB // 4
