"""What every policy loss must do, as checks to run against one: offbeat's own, or yours.

    results = check_loss(partial(clipped_policy_loss, clip_low=0.2, clip_high=0.2, dual_clip=None))
    assert not [r for r in results if r.problem]

A policy loss takes three tensors of N tokens (logprobs of the current policy, with gradient; logprobs as sampled;
advantages) and returns a `PolicyLoss`: one number a token, whatever its company. Averages, masks and denominators are
those of `reduce`, which is why a loss that keeps these promises can be padded, reordered and split at will. The
reference here is float64, one token at a time, with Python loops.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias, get_args

import torch
from torch import Tensor

from offbeat.algorithms.losses import PolicyLoss
from offbeat.algorithms.reduce import aggregation_denominator, reduce_loss, token_weights
from offbeat.config import Aggregation
from offbeat.testing.conformance import CheckResult, checking

Loss: TypeAlias = Callable[[Tensor, Tensor, Tensor], PolicyLoss]
"""(logprobs_N, behaviour_N, advantages_N) → the loss of each token and what to watch of it."""
Oracle: TypeAlias = Callable[[float, float, float], float]
"""The same of one token, in Python floats, written from the definition."""

LENGTHS = (1, 5, 2, 8)
MAX_NEW_TOKENS = 9


def tokens(dtype: torch.dtype = torch.float64, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """N = 16 tokens of four samples; ratios from about 0.2 to 5, advantages of both signs."""
    dice = torch.Generator().manual_seed(seed)
    count = sum(LENGTHS)
    behaviour_N = -3 * torch.rand(count, generator=dice, dtype=torch.float64) - 0.1
    logprobs_N = (behaviour_N + 0.8 * torch.randn(count, generator=dice, dtype=torch.float64)).clamp(max=-1e-3)
    advantages_N = torch.randn(count, generator=dice, dtype=torch.float64)
    return logprobs_N.to(dtype).requires_grad_(), behaviour_N.to(dtype), advantages_N.to(dtype)


def _gradient(loss: Loss, logprobs_N: Tensor, behaviour_N: Tensor, advantages_N: Tensor) -> Tensor:
    leaf_N = logprobs_N.detach().clone().requires_grad_()
    (gradient_N,) = torch.autograd.grad(loss(leaf_N, behaviour_N, advantages_N).loss_N.sum(), leaf_N)
    return gradient_N


def _away(found: Tensor, wanted: Tensor) -> float:
    """Largest difference, relative to the largest wanted value; NaN counts as infinite."""
    gap = float((found.double() - wanted.double()).abs().max() / wanted.abs().max().double().clamp_min(1e-12))
    return math.inf if math.isnan(gap) else gap


def one_finite_loss_a_token(loss: Loss, oracle: Oracle | None) -> str | None:
    del oracle
    for dtype in (torch.float32, torch.float64):
        given = tokens(dtype)
        value_N = loss(*given).loss_N
        if value_N.shape != given[0].shape:
            return f"{len(given[0])} tokens gave a loss of shape {tuple(value_N.shape)}: return one number a token"
        if not bool(torch.isfinite(value_N).all()):
            return f"the loss is not finite: {value_N.tolist()}"
        if not value_N.requires_grad:
            return "the loss has no gradient: something detached the logprobs"
    return None


def the_facts_are_detached_and_of_the_same_tokens(loss: Loss, oracle: Oracle | None) -> str | None:
    del oracle
    given = tokens()
    found = loss(*given)
    for name, fact_N in zip(PolicyLoss._fields[1:], found[1:], strict=True):
        if fact_N.requires_grad or fact_N.shape != given[0].shape:
            return (
                f"{name} has shape {tuple(fact_N.shape)}, gradient {fact_N.requires_grad}: one detached value a token"
            )
    gradient_N = _gradient(loss, *given)
    clipped_N = found.clipped_low_N | found.clipped_high_N | found.clipped_dual_N
    if bool((gradient_N[clipped_N] != 0).any()):
        return f"tokens said to be clipped have the gradient {gradient_N[clipped_N].tolist()}"
    return None


def the_gradient_is_the_slope(loss: Loss, oracle: Oracle | None) -> str | None:
    """Against central differences in float64."""
    del oracle
    logprobs_N, behaviour_N, advantages_N = tokens()
    step = 1e-6
    with torch.no_grad():
        above_N = loss(logprobs_N + step, behaviour_N, advantages_N).loss_N
        below_N = loss(logprobs_N - step, behaviour_N, advantages_N).loss_N
    slope_N = (above_N - below_N) / (2 * step)
    gradient_N = _gradient(loss, logprobs_N, behaviour_N, advantages_N)
    if _away(gradient_N, slope_N) > 1e-6:
        return f"gradients {gradient_N.tolist()}, slopes {slope_N.tolist()}"
    return None


def at_unchanged_weights_it_is_the_policy_gradient(loss: Loss, oracle: Oracle | None) -> str | None:
    """-advantage for each token where the current policy is the one that sampled."""
    del oracle
    _, behaviour_N, advantages_N = tokens()
    gradient_N = _gradient(loss, behaviour_N, behaviour_N, advantages_N)
    if _away(gradient_N, -advantages_N) > 1e-9:
        return f"gradients {gradient_N.tolist()} for advantages {advantages_N.tolist()}"
    return None


def a_token_does_not_depend_on_its_company(loss: Loss, oracle: Oracle | None) -> str | None:
    """Alone, in reverse order and in parts, each token has the loss and the gradient that it has among all."""
    del oracle
    given = tokens()
    count = len(given[0])
    orders = {
        "alone": [torch.tensor([i]) for i in range(count)],
        "in reverse order": [torch.arange(count - 1, -1, -1)],
        "in two parts": [torch.arange(5), torch.arange(5, count)],
    }
    wanted_N = loss(*given).loss_N.detach()
    slopes_N = _gradient(loss, *given)
    for name, parts in orders.items():
        for places in parts:
            some = [part[places] for part in given]
            if _away(loss(*some).loss_N.detach(), wanted_N[places]) > 1e-12:
                return f"tokens {places.tolist()} {name} have another loss than among all"
            if _away(_gradient(loss, *some), slopes_N[places]) > 1e-12:
                return f"tokens {places.tolist()} {name} have another gradient than among all"
    return None


def float32_is_enough(loss: Loss, oracle: Oracle | None) -> str | None:
    del oracle
    narrow = tokens(torch.float32)
    wide = [part.double() for part in narrow]
    for name, gap in (
        ("losses", _away(loss(*narrow).loss_N.detach(), loss(wide[0], wide[1], wide[2]).loss_N.detach())),
        ("gradients", _away(_gradient(loss, *narrow), _gradient(loss, wide[0], wide[1], wide[2]))),
    ):
        if gap > 1e-5:
            return f"{name} in float32 are {gap:.1e} away from those in float64"
    return None


def extreme_ratios_overflow_nothing(loss: Loss, oracle: Oracle | None) -> str | None:
    """A token that became 10^43 times as probable, and one that became as much less, with advantages of both signs."""
    del oracle
    behaviour_N = torch.tensor([-100.0, -100.0, 0.0, 0.0, -1e4])
    logprobs_N = torch.tensor([0.0, 0.0, -100.0, -100.0, 0.0], requires_grad=True)
    advantages_N = torch.tensor([1.0, -1.0, 1.0, -1.0, 0.0])
    found = loss(logprobs_N, behaviour_N, advantages_N)
    gradient_N = _gradient(loss, logprobs_N, behaviour_N, advantages_N)
    for name, value_N in (("loss", found.loss_N), ("gradient", gradient_N), ("ratio", found.ratio_N)):
        if not bool(torch.isfinite(value_N).all()):
            return (
                f"{name} {value_N.tolist()} for log ratios {(logprobs_N - behaviour_N).tolist()}: clamp the log ratio"
            )
    return None


def masks_and_denominators_are_those_of_the_reference(loss: Loss, oracle: Oracle | None) -> str | None:
    """Reduced as the trainer does, in one piece and in micro-batches, against Python loops over single tokens."""
    given = tokens()
    sample_N = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    mask_N = torch.arange(len(sample_N)) % 3 != 0
    mask_N[sample_N == 2] = False  # a sample without trained tokens
    single = [_of_one_token(loss, oracle, given, place) for place in range(len(sample_N))]
    for aggregation in get_args(Aggregation):
        wanted = _reference(single, mask_N.tolist(), sample_N.tolist(), aggregation)
        trained = [int(mask_N[sample_N == row].sum()) for row in range(len(LENGTHS))]
        denominator = aggregation_denominator(trained, aggregation, max_new_tokens=MAX_NEW_TOKENS)
        for split in ([[0, 1, 2, 3]], [[3], [1, 0], [2]]):
            total = torch.zeros((), dtype=torch.float64)
            leaf_N = given[0].detach().clone().requires_grad_()
            for rows in split:
                places = torch.cat([torch.nonzero(sample_N == row).flatten() for row in rows])
                rows_N = torch.tensor([rows.index(int(row)) for row in sample_N[places]])
                weight_N = token_weights(mask_N[places], rows_N, aggregation)
                part_N = loss(leaf_N[places], given[1][places], given[2][places]).loss_N
                total = total + reduce_loss(part_N, weight_N, denominator)
            if abs(float(total.detach()) - wanted) > 1e-6 * max(1.0, abs(wanted)):
                return f"{aggregation}, micro-batches {split}: {float(total.detach())}, the reference has {wanted}"
            (gradient_N,) = torch.autograd.grad(total, leaf_N)
            if bool((gradient_N[~mask_N] != 0).any()):
                return f"{aggregation}: tokens that are not trained have the gradient {gradient_N[~mask_N].tolist()}"
    return None


def _of_one_token(loss: Loss, oracle: Oracle | None, given: tuple[Tensor, Tensor, Tensor], place: int) -> float:
    logprob, behaviour, advantage = (float(part[place].detach()) for part in given)
    if oracle is not None:
        return oracle(logprob, behaviour, advantage)
    return float(loss(*(part[place : place + 1] for part in given)).loss_N.detach())


def _reference(losses: list[float], mask: list[bool], sample: list[int], aggregation: Aggregation) -> float:
    rows = [
        [value for value, on, row in zip(losses, mask, sample, strict=True) if on and row == wanted]
        for wanted in range(len(LENGTHS))
    ]
    rows = [row for row in rows if row]
    match aggregation:
        case "token_mean":
            return math.fsum(map(math.fsum, rows)) / sum(map(len, rows))
        case "sequence_mean":
            return math.fsum(math.fsum(row) / len(row) for row in rows) / len(rows)
        case "constant":
            return math.fsum(map(math.fsum, rows)) / (len(rows) * MAX_NEW_TOKENS)


def the_values_are_those_of_the_oracle(loss: Loss, oracle: Oracle | None) -> str | None:
    """On 40 draws of 16 tokens."""
    assert oracle is not None, "without an oracle this check is left out"
    for seed in range(40):
        given = tokens(seed=seed)
        found = loss(*given).loss_N.tolist()
        for logprob, behaviour, advantage, value in zip(*(part.tolist() for part in given), found, strict=True):
            wanted = oracle(logprob, behaviour, advantage)
            if abs(value - wanted) > 1e-9 * max(1.0, abs(wanted)):
                return f"logprob {logprob}, as sampled {behaviour}, advantage {advantage}: {value}, not {wanted}"
    return None


LOSS_CHECKS: tuple[Callable[[Loss, Oracle | None], str | None], ...] = (
    one_finite_loss_a_token,
    the_facts_are_detached_and_of_the_same_tokens,
    the_gradient_is_the_slope,
    at_unchanged_weights_it_is_the_policy_gradient,
    a_token_does_not_depend_on_its_company,
    float32_is_enough,
    extreme_ratios_overflow_nothing,
    masks_and_denominators_are_those_of_the_reference,
    the_values_are_those_of_the_oracle,
)


def check_loss(loss: Loss, *, oracle: Oracle | None = None, stops_gradient: bool = False) -> list[CheckResult]:
    """Run every check that its arguments allow; an error that the loss raises is a failed check.

    Args:
        loss: with its settings bound, e.g. by `functools.partial`.
        oracle: the same loss of one token, in Python floats. Without it values are compared with the loss's own, one
            token at a time, and `the values are those of the oracle` is not among the results: a wrong formula that is
            smooth, per token and right at ratio 1 then passes.
        stops_gradient: the loss holds a part of itself constant on purpose, such as a truncated importance weight; its
            gradient is then not compared with its slope.
    """
    results: list[CheckResult] = []
    for check in LOSS_CHECKS:
        if check is the_gradient_is_the_slope and stops_gradient:
            continue
        if check is the_values_are_those_of_the_oracle and oracle is None:
            continue
        with checking(results, check) as found:
            found(check(loss, oracle))
    return results
