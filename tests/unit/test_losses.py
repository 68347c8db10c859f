from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from offbeat.algorithms.logprobs import token_logprobs
from offbeat.algorithms.losses import PolicyLoss, clipped_policy_loss, effective_sample_share
from offbeat.types import Sampling


def at_ratio(ratios: list[float], advantages: list[float], dual_clip: float | None = 3.0) -> tuple[PolicyLoss, Tensor]:
    """The loss where current / behaviour has these values, and the gradient by the current logprob of each token."""
    logprobs = torch.tensor(ratios, dtype=torch.float64).log().requires_grad_()
    policy = clipped_policy_loss(
        logprobs,
        torch.zeros(len(ratios), dtype=torch.float64),
        torch.tensor(advantages, dtype=torch.float64),
        clip_low=0.2,
        clip_high=0.28,
        dual_clip=dual_clip,
    )
    policy.loss_N.sum().backward()
    assert logprobs.grad is not None
    return policy, logprobs.grad


def test_clip_shares_have_the_right_side_B133() -> None:
    """Ratios 0.5, 1, 2 and 4 with both signs of the advantage."""
    policy, grad = at_ratio([0.5, 1.0, 2.0, 4.0] * 2, [1.0] * 4 + [-1.0] * 4)
    assert policy.clipped_high_N.tolist() == [False, False, True, True] + [False] * 4
    assert policy.clipped_low_N.tolist() == [False] * 4 + [True, False, False, False]
    assert policy.clipped_dual_N.tolist() == [False] * 7 + [True]
    assert policy.loss_N.tolist() == pytest.approx([-0.5, -1.0, -1.28, -1.28, 0.8, 1.0, 2.0, 3.0])
    assert grad.tolist() == pytest.approx([-0.5, -1.0, 0.0, 0.0, 0.0, 1.0, 2.0, 0.0])
    stopped = policy.clipped_low_N | policy.clipped_high_N | policy.clipped_dual_N
    assert (grad == 0).tolist() == stopped.tolist()


def test_without_dual_clip_a_negative_advantage_has_no_bound() -> None:
    policy, grad = at_ratio([4.0], [-1.0], dual_clip=None)
    assert policy.loss_N.tolist() == pytest.approx([4.0])
    assert grad.tolist() == pytest.approx([4.0])
    assert not policy.clipped_dual_N.any()


@pytest.mark.parametrize("advantage", [1.0, -1.0, 0.0])
@pytest.mark.parametrize("gap", [-1e4, -100.0, 100.0, 1e4])
def test_a_huge_gap_gives_a_finite_loss_and_gradient_B170(gap: float, advantage: float) -> None:
    logprobs = torch.tensor([gap], requires_grad=True)
    policy = clipped_policy_loss(
        logprobs, torch.zeros(1), torch.tensor([advantage]), clip_low=0.2, clip_high=0.28, dual_clip=None
    )
    policy.loss_N.sum().backward()
    assert logprobs.grad is not None
    for values in (policy.loss_N.detach(), logprobs.grad, policy.kl_k3_N, policy.ratio_N):
        assert torch.isfinite(values).all()


def test_kl_estimates_are_unbiased_on_an_enumerated_distribution() -> None:
    behaviour = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    current = torch.tensor([0.4, 0.4, 0.2], dtype=torch.float64)
    policy = clipped_policy_loss(
        current.log(), behaviour.log(), torch.zeros(3), clip_low=0.2, clip_high=0.28, dual_clip=None
    )
    exact = float((behaviour * (behaviour / current).log()).sum())
    assert float((behaviour * policy.kl_k1_N).sum()) == pytest.approx(exact)
    assert float((behaviour * policy.kl_k3_N).sum()) == pytest.approx(exact)
    assert (policy.kl_k3_N >= 0).all()


def test_the_gradient_on_a_two_armed_bandit_is_importance_weighted_B054() -> None:
    """Old samples of a fixed behaviour policy, current weights elsewhere: the expected gradient is that of the return.

    With the ratio taken against recomputed (current) logprobs, that is forced to 1, it is another vector.
    """
    theta = torch.tensor([-0.4, 0.5], dtype=torch.float64, requires_grad=True)
    behaviour = torch.tensor([0.6, 0.4], dtype=torch.float64)
    advantages = torch.tensor([1.0, -0.5], dtype=torch.float64)

    def gradient(reference: Tensor) -> Tensor:
        logprobs = theta.log_softmax(0)
        policy = clipped_policy_loss(logprobs, reference, advantages, clip_low=0.9, clip_high=9.0, dual_clip=None)
        return torch.autograd.grad((behaviour * policy.loss_N).sum(), theta)[0]

    exact = torch.autograd.grad(-(theta.softmax(0) * advantages).sum(), theta)[0]
    assert torch.allclose(gradient(behaviour.log()), exact, atol=1e-12)
    assert not torch.allclose(gradient(theta.detach().log_softmax(0)), exact, atol=1e-2)


def test_effective_sample_share() -> None:
    assert effective_sample_share(4.0, 4.0, 4.0) == 1.0
    assert effective_sample_share(4.0, 16.0, 4.0) == 0.25  # one token has all the weight
    assert effective_sample_share(0.0, 0.0, 0.0) == 0.0


@given(
    st.lists(st.floats(-60, 60, width=32), min_size=2, max_size=9),
    st.sampled_from([0.0, 0.3, 0.6, 1.0, 1.5, 4.0]),
    st.data(),
)
def test_logprobs_and_entropy_against_a_plain_softmax_B007_B127(
    logits: list[float], temperature: float, data: st.DataObject
) -> None:
    target = data.draw(st.integers(0, len(logits) - 1))
    sampling = Sampling(max_new_tokens=1, temperature=temperature)
    found = token_logprobs(torch.tensor([logits]), torch.tensor([target]), sampling, entropy=True)
    scaled = [value / (temperature or 1.0) for value in logits]
    top = max(scaled)
    normaliser = top + math.log(math.fsum(math.exp(value - top) for value in scaled))
    logs = [value - normaliser for value in scaled]
    assert float(found.logprobs_N) == pytest.approx(logs[target], rel=1e-5, abs=1e-4)
    assert float(found.entropy_N) == pytest.approx(-math.fsum(math.exp(p) * p for p in logs), rel=1e-3, abs=1e-4)


def test_bfloat16_logits_are_normalised_in_float32_B007() -> None:
    """Logits up to 60 in bfloat16: the values are taken as they are, the softmax is exact."""
    torch.manual_seed(0)
    logits = (torch.rand(64, 100) * 120 - 60).bfloat16()
    targets = logits.argmax(-1)
    found = token_logprobs(logits, targets, Sampling(max_new_tokens=1), entropy=False)
    exact = logits.double().log_softmax(-1).gather(-1, targets[:, None])[:, 0]
    assert found.logprobs_N.dtype == torch.float32
    assert (found.logprobs_N - exact).abs().max() < 2e-5
    rounded = logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0]
    assert (rounded - exact).abs().max() > 1e-3


def test_top_k_two_of_eight_has_the_exact_ratio_B049() -> None:
    """Vocabulary 8, top_k 2: the two left are renormalised, and a token outside is no token of this policy."""
    logits = torch.tensor([[0.0, 3.0, 2.0, 1.0, -1.0, -2.0, 0.5, 0.1]] * 3, requires_grad=True)
    sampling = Sampling(max_new_tokens=1, top_k=2)
    found = token_logprobs(logits, torch.tensor([1, 2, 3]), sampling, entropy=True)
    share = 1 / (1 + math.exp(-1.0))
    assert found.logprobs_N[:2].tolist() == pytest.approx([math.log(share), math.log(1 - share)])
    assert found.inside_N.tolist() == [True, True, False]
    assert float(found.logprobs_N[2].detach()) == 0.0
    found.logprobs_N.sum().backward()
    assert logits.grad is not None
    assert torch.isfinite(logits.grad).all()
    assert (logits.grad[2] == 0).all()
    assert torch.isfinite(found.entropy_N).all()
