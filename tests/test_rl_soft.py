"""The squashed Gaussian and the maths of maximum-entropy RL against torch.distributions, grids and enumeration."""

import math

import torch
from torch import Tensor
from torch.distributions import Independent, Normal, TransformedDistribution
from torch.distributions.transforms import TanhTransform

from palestra.rl.distributions import SquashedGaussian, log_tanh_slope
from palestra.rl.losses import (
    alpha_slope,
    expected_soft_value,
    polyak,
    soft_value,
    target_entropy,
    td_target,
    twin_loss,
)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_squashed_gaussian_equals_transformed_distribution():  # checklist 51
    mean, log_std, noise = randn(7, 3), 0.3 * randn(7, 3, seed=1) - 0.5, randn(7, 3, seed=2)
    ours = SquashedGaussian(mean, log_std)
    theirs = Independent(TransformedDistribution(Normal(mean, log_std.exp()), TanhTransform(cache_size=1)), 1)
    actions, scored = ours.sample_scored(noise)
    assert torch.equal(actions, ours.sample(noise))
    torch.testing.assert_close(scored, theirs.log_prob(actions))
    assert torch.equal(ours.mode(), torch.tanh(mean))
    assert scored.shape == (7,)  # summed over the parts of an action


def test_squashed_gaussian_far_out_is_finite_and_exact():  # checklist 51
    far = torch.tensor([[20.0], [-20.0], [60.0]], requires_grad=True)
    # 1 - tanh(x)² = 4 e^(-2|x|) / (1 + e^(-2|x|))², whose logarithm is log 4 - 2|x| this far out
    torch.testing.assert_close(log_tanh_slope(far), math.log(4) - 2 * far.abs())
    actions, scored = SquashedGaussian(far, torch.zeros(1)).sample_scored(torch.zeros(3, 1))
    assert actions.abs().max() == 1.0  # rounded: the log-density does not come from the action
    assert scored.isfinite().all()
    scored.sum().backward()
    assert far.grad is not None
    assert far.grad.isfinite().all()


def test_squashed_gaussian_mean_surprise_is_the_entropy_of_the_grid():
    one = torch.ones(1, 1, dtype=torch.float64)
    _, scored = SquashedGaussian(0.3 * one, -0.2 * one).sample_scored(randn(200_000, 1))
    grid = torch.linspace(-1, 1, 100_001, dtype=torch.float64)[1:-1, None]
    logprobs = TransformedDistribution(Normal(0.3, math.exp(-0.2)), TanhTransform()).log_prob(grid)[:, 0]
    entropy = -torch.trapezoid(logprobs.exp() * logprobs, grid[:, 0])
    assert abs(-scored.mean().item() - entropy.item()) < 0.01


def test_target_entropy_of_a_box_is_minus_its_parts_and_of_two_actions_well_below_the_most():  # checklist 54
    assert target_entropy(6, discrete=False) == -6.0
    assert math.isclose(target_entropy(2, discrete=True), 0.6 * math.log(2))


def test_expected_soft_value_of_three_actions_equals_enumeration():  # checklist 55
    q = torch.tensor([[[1.0, 5.0, -2.0]], [[2.0, 3.0, -4.0]]])
    logprobs = torch.log(torch.tensor([[0.5, 0.3, 0.2]]))
    alpha = torch.tensor(0.7)
    smaller = [1.0, 3.0, -4.0]  # of the twins, action by action
    by_hand = sum(p * (v - 0.7 * math.log(p)) for p, v in zip([0.5, 0.3, 0.2], smaller, strict=True))
    assert math.isclose(expected_soft_value(q, logprobs, alpha).item(), by_hand, rel_tol=1e-6)
    # The expectation over what would be sampled is the same number.
    sampled = sum(p * soft_value(q[:, :, i], logprobs[:, i], alpha).item() for i, p in enumerate([0.5, 0.3, 0.2]))
    assert math.isclose(sampled, by_hand, rel_tol=1e-6)


def test_twin_loss_and_td_target_by_hand_without_gradient_into_the_target():  # checklist 42
    values = torch.tensor([10.0, 20.0], requires_grad=True)
    targets = td_target(torch.tensor([1.0, 2.0]), torch.tensor([0.9, 0.0]), values)
    assert targets.tolist() == [10.0, 2.0]  # terminated: nothing follows
    assert not targets.requires_grad
    q = torch.tensor([[9.0, 2.0], [10.0, 4.0]])
    assert twin_loss(q, targets).item() == 0.5 * (1 + 0) / 2 + 0.5 * (0 + 4) / 2


def test_alpha_slope_lets_alpha_fall_above_the_target_and_rise_below():  # checklist 53
    log_alpha = torch.tensor([-1.0], requires_grad=True)
    for entropy in (-3.0, 0.5):
        slope = alpha_slope(log_alpha.detach(), torch.tensor(entropy), -1.0)
        assert (slope > 0) == (entropy > -1.0)  # descent: a positive slope lowers log α
        loss = -log_alpha.exp() * (torch.tensor(-entropy) - 1.0)  # -α (log π + H̄)
        torch.testing.assert_close(slope, torch.autograd.grad(loss, log_alpha)[0])


def test_polyak_copies_at_one_and_moves_towards_what_was_learned():  # checklist 41
    target, learned = torch.tensor([0.0, 10.0]), torch.tensor([1.0, 20.0])
    assert torch.equal(polyak(target, learned, 1.0), learned)
    assert torch.equal(polyak(target, learned, 0.0), target)
    torch.testing.assert_close(polyak(target, learned, 0.1), torch.tensor([0.1, 11.0]))
