"""Alarms that need many steps: each speaks on the fault that it is for, and none on healthy runs with noise."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import msgspec
import pytest
from sample_values import scored

from offbeat.metrics.alarms import HISTORY, Watch
from offbeat.metrics.records import sample_statistics, seconds_per_token

pytestmark = pytest.mark.slow

Record = dict[str, Any]
GROUPS, SAMPLES = 8, 8


def told(history: Iterable[Record]) -> dict[str, tuple[int, str]]:
    """Kind of alarm → (step, text) at its first time, as a display tells them."""
    watch = Watch()
    return {alarm.kind: (record["step"], alarm.text) for record in history for alarm in watch.add(record)}


def ramp(start: float, end: float, scale: float, step: int) -> float:
    return end - (end - start) * math.exp(-step / scale)


def run(
    rng: random.Random, changes: Mapping[str, Any] | None = None, *, steps: int = 120, engines: int = 2
) -> Iterator[Record]:
    """A healthy run: correctness rises, the format soon is right, entropy falls with it; every figure has its noise.

    `changes`: a value, or a function of the step, in place of what is drawn here.
    """
    for step in range(steps):
        right = ramp(0.2, 0.92, 30, step)
        values = [float(rng.random() < min(0.99, max(0.01, rng.gauss(right, 0.2)))) for _ in range(GROUPS * SAMPLES)]
        shaped = [float(rng.random() < ramp(0.7, 0.99, 5, step)) for _ in range(GROUPS * SAMPLES)]
        record: Record = {
            "step": step,
            "reward/correct": statistics.fmean(values),
            "reward_std/correct": statistics.pstdev(values),
            "reward/boxed": statistics.fmean(shaped),
            "reward_std/boxed": statistics.pstdev(shaped),
            "groups_without_spread_fraction": min(0.69, max(0.0, rng.gauss(0.4, 0.15))),
            "truncated_fraction": max(0.0, rng.gauss(0.03, 0.02)),
            "entropy": ramp(1.2, 0.05, 40, step) * math.exp(rng.gauss(0, 0.15)),
            "kl_engine_trainer": 0.003 * math.exp(rng.gauss(0, 1.0)),
            "logprob_gap_mean": 4e-3 * math.exp(rng.gauss(0, 0.4)) if step % 5 == 0 else None,
            "response_length_mean": 100.0,
            "tokens_generated": 100.0 * len(values),
            "skipped_updates": 0,
            "reward_errors": 0,
            **{f"engine_seconds_per_token/engine-{e}": rng.uniform(0.8, 1.25) for e in range(engines)},
        }
        record |= {key: change(step) if callable(change) else change for key, change in (changes or {}).items()}
        record["reward_mean"] = record["reward/correct"] + 0.1 * record["reward/boxed"]
        record["reward_std"] = record["reward_std/correct"]
        yield record


@pytest.mark.parametrize("seed", range(6))
def test_a_healthy_run_with_noise_gives_no_alarm(seed: int) -> None:
    assert told(run(random.Random(seed), engines=2 + seed % 3)) == {}


@pytest.mark.parametrize("seed", range(2))
def test_a_run_that_does_not_move_is_no_collapse_and_no_fall(seed: int) -> None:
    rng = random.Random(seed)
    changes = {"entropy": lambda step: rng.gauss(0.6, 0.1), "reward/correct": lambda step: rng.gauss(0.4, 0.06)}
    assert told(run(rng, changes)) == {}


def test_entropy_that_collapses_while_the_reward_stands_is_told() -> None:
    rng = random.Random(1)
    found = told(
        run(
            rng,
            {
                "entropy": lambda step: ramp(1.2, 0.01, 8, step),
                "reward/correct": lambda step: min(0.35, 0.2 + step / 100) + rng.gauss(0, 0.02),
                "reward_std/correct": 0.46,
            },
        )
    )
    assert set(found) == {"entropy-collapsed"}
    step, text = found["entropy-collapsed"]
    assert 60 <= step < 100  # two windows of 30 steps without gain
    assert "nats a token" in text
    assert "the reward no longer rises" in text


def test_entropy_that_is_gone_because_the_task_is_learnt_is_no_alarm() -> None:
    rng = random.Random(2)
    learnt = {
        "entropy": lambda step: ramp(1.2, 0.01, 8, step),
        "reward/correct": lambda step: ramp(0.2, 0.97, 8, step) + rng.gauss(0, 0.01),
        "reward_std/correct": lambda step: math.sqrt(
            max(0.02, ramp(0.2, 0.97, 8, step) * (1 - ramp(0.2, 0.97, 8, step)))
        ),
    }
    assert told(run(rng, learnt)) == {}


def test_entropy_that_collapses_slowly_is_told_too() -> None:
    """From 1.2 to .01 in some 600 steps: never by a twentieth within the last 200."""
    rng = random.Random(9)
    slow = {
        "entropy": lambda step: max(0.01, 1.2 * 0.992**step),
        "reward/correct": lambda step: min(0.35, 0.2 + step / 1000) + rng.gauss(0, 0.02),
        "reward_std/correct": 0.46,
        "reward/boxed": 0.9,
    }
    found = told(run(rng, slow, steps=700))
    assert set(found) == {"entropy-collapsed"}
    assert found["entropy-collapsed"][0] >= 350


@pytest.mark.parametrize("seed", range(2))
def test_a_healthy_run_of_many_steps_gives_no_alarm(seed: int) -> None:
    """Its entropy is gone at the end, and the reward stands: it was spent on what is learnt."""
    assert told(run(random.Random(seed), steps=900)) == {}


def penalties(rng: random.Random, mean: Callable[[int], float], steps: int = 150) -> Iterator[Record]:
    """Rewards from -1 (wrong) to 0: their best mean is never above `NEAR_ZERO`."""
    for record in run(rng, {"entropy": 0.6}, steps=steps):
        value = min(0.0, max(-1.0, mean(record["step"]) + rng.gauss(0, 0.05)))
        kept = {key: one for key, one in record.items() if not key.startswith("reward")}
        yield {**kept, "reward_errors": 0, "reward_mean": value, "reward_std": math.sqrt(-value * (1 + value) + 1e-6)}


def test_a_fall_of_a_reward_that_is_a_penalty_is_told() -> None:
    found = told(penalties(random.Random(10), lambda step: ramp(-0.8, -0.2, 20, step) if step < 90 else -0.75))
    assert set(found) == {"reward-fell"}
    step, text = found["reward-fell"]
    assert 90 <= step <= 95
    assert "the reward has fallen, from -.1" in text


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "mean",
    [lambda step: ramp(-0.8, -0.05, 30, step), lambda step: -0.5, lambda step: -0.3 - step / 3000],
    ids=["rises", "stands", "falls a little"],
)
def test_a_penalty_that_does_not_fall_is_no_fall(mean: Callable[[int], float], seed: int) -> None:
    assert told(penalties(random.Random(seed), mean, steps=400)) == {}


def test_a_function_that_always_fails_hides_no_constant_one() -> None:
    failing = {
        "reward/correct": 0.0,
        "reward_std/correct": 0.0,
        "reward_errors": GROUPS * SAMPLES,
        "reward_errors/correct": GROUPS * SAMPLES,
        "reward/boxed": 1.0,
        "reward_std/boxed": 0.0,
    }
    kinds = set(told(run(random.Random(11), failing, steps=10)))
    assert kinds == {"reward-errors", "constant-reward/boxed"}
    some = scored(parts={"f": 0.0, "g": 1.0}, errors=("f: ValueError", "f: again"))
    statistics_of = sample_statistics([some, scored(parts={"f": 0.0, "g": 1.0})])
    assert (statistics_of["reward_errors"], statistics_of["reward_errors/f"]) == (2, 2)
    assert statistics_of["reward_error_first"] == "f: ValueError"
    assert "reward_errors/g" not in statistics_of


def gaps(*values: float) -> list[Record]:
    return [{"step": i, "reward_mean": 0.5, "logprob_gap_mean": value} for i, value in enumerate(values)]


def test_a_gap_that_grows_is_told_and_one_high_probe_is_not() -> None:
    assert set(told(gaps(1e-3, 1e-3, 1e-3, 2e-3, 4e-3, 5e-3, 6e-3))) == {"gap-grew"}
    (_, text) = told(gaps(1e-3, 1e-3, 1e-3, 4e-3, 5e-3, 6e-3))["gap-grew"]
    assert "rose from 1.0e-03 to 5.0e-03 (means of 3 parity probes)" in text
    assert told(gaps(1e-3, 1e-3, 1e-3, 1e-3, 5e-2, 1e-3, 1e-3)) == {}
    assert told(gaps(2e-7, 2e-7, 2e-7, 8e-7, 9e-7, 9e-7)) == {}  # the last bits of float32
    assert told(gaps(1e-3, 1e-3, 5e-3, 6e-3, 7e-3)) == {}  # too few to tell


def test_a_gap_that_grows_is_told_however_far_apart_the_probes_are() -> None:
    """`parity_every = 80`: the last 200 records hold two or three probes."""

    def probes(step: int) -> float | None:
        return 1e-3 * 2 ** (step / 160) if step % 80 == 0 else None

    found = told(run(random.Random(8), {"logprob_gap_mean": probes}, steps=800))
    assert set(found) == {"gap-grew"}
    step, text = found["gap-grew"]
    assert step >= 400 > HISTORY
    assert "rose from 1.5e-03 to" in text


def test_a_reward_that_never_varies_is_told_once_for_each_function() -> None:
    constant = {"reward/correct": 0.0, "reward_std/correct": 0.0}
    found = told(run(random.Random(3), constant, steps=10))
    assert set(found) == {"constant-reward/correct"}
    step, text = found["constant-reward/correct"]
    assert step == 4
    assert "reward function correct has returned .00 for every sample of all 5 steps" in text


def test_a_reward_that_was_called_in_some_steps_only_is_told_of_those() -> None:
    parts: dict[str, Any] = {
        key: lambda step: 0.0 if step % 4 == 3 else None for key in ("reward/rare", "reward_std/rare")
    }
    step, text = told(run(random.Random(3), parts, steps=40))["constant-reward/rare"]
    assert step == 19
    assert "has returned .00 for every sample of the 5 steps in which it was called" in text


@pytest.mark.parametrize(
    "changes",
    [
        {
            "reward/boxed": lambda step: 1.0 if step >= 3 else 0.9,
            "reward_std/boxed": lambda step: 0.0 if step >= 3 else 0.3,
        },
        {"reward/boxed": lambda step: 1.0 if step % 2 else 0.0, "reward_std/boxed": 0.0},
        {"reward/correct": 0.0, "reward_std/correct": 0.0, "reward_errors": GROUPS * SAMPLES},
    ],
    ids=["it varied at first", "it varies from step to step", "every call failed"],
)
def test_what_is_no_constant_reward(changes: dict[str, Any]) -> None:
    kinds = set(told(run(random.Random(4), changes, steps=20)))
    assert not {kind for kind in kinds if kind.startswith("constant-reward")}


def test_a_format_that_is_right_for_200_steps_after_it_was_learnt_is_no_constant() -> None:
    perfect = {
        "reward/boxed": lambda step: 1.0 if step > 9 else 0.5,
        "reward_std/boxed": lambda step: 0.0 if step > 9 else 0.5,
    }
    assert told(run(random.Random(5), perfect, steps=230)) == {}


def test_a_format_that_rises_while_correctness_stands_is_told() -> None:
    rng = random.Random(6)
    found = told(
        run(
            rng,
            {
                "reward/correct": lambda step: 0.1 + rng.gauss(0, 0.03),
                "reward/boxed": lambda step: ramp(0.1, 0.97, 15, step) + rng.gauss(0, 0.03),
                "entropy": 0.6,
            },
        )
    )
    assert set(found) == {"one-part-alone"}
    _, text = found["one-part-alone"]
    assert "reward/boxed rose from" in text
    assert "while reward/correct stays at .1" in text


@pytest.mark.parametrize(
    ("other", "start", "end"),
    [("slowly", 0.05, 0.35), ("a penalty", -0.1, -0.1), ("done before", 0.95, 0.95)],
)
def test_a_part_that_follows_slowly_or_has_no_room_is_not_left_behind(other: str, start: float, end: float) -> None:
    for seed in range(2):
        rng = random.Random(seed)
        changes = {
            "reward/correct": lambda step, rng=rng: ramp(0.1, 0.9, 20, step) + rng.gauss(0, 0.04),
            "reward/boxed": lambda step, rng=rng: ramp(start, end, 60, step) + rng.gauss(0, 0.02),
        }
        assert "one-part-alone" not in told(run(rng, changes)), other


def test_an_engine_half_as_fast_is_named_and_a_slow_step_is_not() -> None:
    key = "engine_seconds_per_token/engine-1"
    rng = random.Random(7)
    found = told(run(rng, {key: lambda step: 2.0 * rng.uniform(0.85, 1.15)}, engines=3))
    assert set(found) == {"slow-engine"}
    step, text = found["slow-engine"]
    assert step == 7
    assert "engine-1 takes" in text
    assert told(run(rng, {key: lambda step: 9.0 if step % 7 == 0 else 1.0}, engines=3)) == {}


def test_an_engines_seconds_are_for_a_token_of_its_longest_sample_and_need_a_second_engine() -> None:
    def sample(engine: str, start_s: float, end_s: float, tokens: int) -> Any:
        one = scored(tokens=tokens)
        rollout = msgspec.structs.replace(one.rollout, engine=engine, started_s=start_s, finished_s=end_s)
        return msgspec.structs.replace(one, rollout=rollout)

    first = [sample("engine-0", 1.0, 3.0, 4), sample("engine-0", 2.0, 9.0, 16)]
    assert seconds_per_token(first) == {}
    fewer = [*first, sample("engine-1", 1.0, 5.0, 2)]
    assert seconds_per_token(fewer) == {}, "engine-0 has a sample more, so it takes longer"
    assert seconds_per_token([*fewer, sample("engine-2", 1.0, 3.0, 2)]) == {"engine-1": 2.0, "engine-2": 1.0}
    both = [*fewer, sample("engine-1", 1.0, 2.0, 0)]
    assert seconds_per_token(both) == {"engine-0": 0.5, "engine-1": 2.0}
    assert sample_statistics(both)["engine_seconds_per_token/engine-1"] == 2.0


def test_the_spread_of_a_part_is_exactly_zero_where_all_its_values_are_equal() -> None:
    third = [scored(parts={"f": 1 / 3, "g": value}) for value in (0.0, 1.0, 1.0, 0.0, 0.5)]
    statistics_of = sample_statistics(third)
    assert statistics_of["reward_std/f"] == 0.0
    assert statistics_of["reward_std/g"] == pytest.approx(statistics.pstdev([0.0, 1.0, 1.0, 0.0, 0.5]))
