"""The loss conformance suite against offbeat's loss, and losses that break one promise each."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
from torch import Tensor

from offbeat.algorithms.losses import PolicyLoss, clipped_policy_loss
from offbeat.testing.conformance import CheckResult
from offbeat.testing.loss_conformance import LOSS_CHECKS, Loss, check_loss

CLIPPED = partial(clipped_policy_loss, clip_low=0.2, clip_high=0.28, dual_clip=3.0)


def failed(results: Sequence[CheckResult]) -> dict[str, str]:
    return {result.name: result.problem for result in results if result.problem}


def clipped_oracle(logprob: float, behaviour: float, advantage: float) -> float:
    ratio = math.exp(logprob - behaviour)
    objective = min(ratio * advantage, min(max(ratio, 0.8), 1.28) * advantage)
    return -(max(objective, 3.0 * advantage) if advantage < 0 else objective)


@pytest.mark.parametrize("dual_clip", [None, 3.0])
def test_the_clipped_loss_keeps_every_promise(dual_clip: float | None) -> None:
    results = check_loss(partial(clipped_policy_loss, clip_low=0.2, clip_high=0.28, dual_clip=dual_clip))
    assert failed(results) == {}
    assert len(results) == len(LOSS_CHECKS) - 1  # without an oracle nothing is said of it
    assert "the values are those of the oracle" not in [result.name for result in results]


def test_the_clipped_loss_has_the_values_of_its_definition() -> None:
    assert failed(check_loss(CLIPPED, oracle=clipped_oracle)) == {}
    assert "the values are those of the oracle" in failed(
        check_loss(CLIPPED, oracle=lambda logprob, behaviour, advantage: 0.0)
    )


def facts(loss: Loss, **changes: Callable[[PolicyLoss], Tensor]) -> Loss:
    """`loss` with some of its values computed from the others."""

    def changed(logprobs_N: Tensor, behaviour_N: Tensor, advantages_N: Tensor) -> PolicyLoss:
        found = loss(logprobs_N, behaviour_N, advantages_N)
        return found._replace(**{name: change(found) for name, change in changes.items()})

    return changed


def plain(logprobs_N: Tensor, behaviour_N: Tensor, advantages_N: Tensor) -> PolicyLoss:
    """Neither clipped nor clamped."""
    ratio_N = (logprobs_N - behaviour_N).exp()
    found = CLIPPED(logprobs_N, behaviour_N, advantages_N)
    off_N = torch.zeros_like(found.clipped_low_N)
    return found._replace(
        loss_N=-ratio_N * advantages_N,
        ratio_N=ratio_N.detach(),
        clipped_low_N=off_N,
        clipped_high_N=off_N,
        clipped_dual_N=off_N,
    )


def ratio_forgotten(logprobs_N: Tensor, behaviour_N: Tensor, advantages_N: Tensor) -> PolicyLoss:
    found = CLIPPED(logprobs_N, behaviour_N, advantages_N)
    return found._replace(loss_N=-logprobs_N * advantages_N)


def sign_turned(logprobs_N: Tensor, behaviour_N: Tensor, advantages_N: Tensor) -> PolicyLoss:
    return CLIPPED(logprobs_N, behaviour_N, -advantages_N)


def unclipped(logprobs_N: Tensor, behaviour_N: Tensor, advantages_N: Tensor) -> PolicyLoss:
    return plain(logprobs_N, behaviour_N, advantages_N)._replace(clipped_high_N=advantages_N > 0)


def half_where_single(logprobs_N: Tensor, behaviour_N: Tensor, advantages_N: Tensor) -> PolicyLoss:
    found = CLIPPED(logprobs_N, behaviour_N, advantages_N)
    single = logprobs_N.dtype == torch.float32
    return found._replace(loss_N=found.loss_N.bfloat16().float()) if single else found


BREAKS: dict[str, tuple[Loss, str]] = {
    "averaged": (facts(CLIPPED, loss_N=lambda f: f.loss_N.mean()), "one finite loss a token"),
    "detached": (facts(CLIPPED, loss_N=lambda f: f.loss_N.detach()), "one finite loss a token"),
    "centred": (facts(CLIPPED, loss_N=lambda f: f.loss_N - f.loss_N.mean()), "a token does not depend on its company"),
    "divided by N": (
        facts(CLIPPED, loss_N=lambda f: f.loss_N / len(f.loss_N)),
        "a token does not depend on its company",
    ),
    "ratio with gradient": (
        facts(CLIPPED, ratio_N=lambda f: f.loss_N * 2),
        "the facts are detached and of the same tokens",
    ),
    "clipping unclipped": (
        unclipped,
        "the facts are detached and of the same tokens",
    ),
    "slope cut": (
        facts(CLIPPED, loss_N=lambda f: f.loss_N.detach() + 0.5 * (f.loss_N - f.loss_N.detach())),
        "the gradient is the slope",
    ),
    "sign turned": (sign_turned, "at unchanged weights it is the policy gradient"),
    "no clamp": (plain, "extreme ratios overflow nothing"),
    "half precision": (half_where_single, "float32 is enough"),
}


@pytest.mark.parametrize("error", [AttributeError("no"), OverflowError("no"), KeyError("no"), SystemExit("no")])
def test_whatever_a_loss_raises_is_a_failed_check(error: BaseException) -> None:
    def raising(logprobs_N: Tensor, behaviour_N: Tensor, advantages_N: Tensor) -> PolicyLoss:
        raise error

    results = check_loss(raising, oracle=clipped_oracle)
    assert [result.problem for result in results] == [f"{type(error).__name__}: {error}"] * len(LOSS_CHECKS)


@pytest.mark.parametrize("name", BREAKS)
def test_a_loss_that_breaks_a_promise_is_named(name: str) -> None:
    loss, check = BREAKS[name]
    assert check in failed(check_loss(loss))


def test_a_forgotten_ratio_is_found_by_the_oracle_only() -> None:
    assert failed(check_loss(ratio_forgotten)).keys() <= {"the facts are detached and of the same tokens"}
    assert "the values are those of the oracle" in failed(check_loss(ratio_forgotten, oracle=clipped_oracle))
