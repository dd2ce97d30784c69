"""Distributions against torch.distributions, enumeration and sampling frequencies."""

import itertools
import math

import pytest
import torch
from torch import Tensor

from palestra.rl.distributions import Bernoulli, Categorical, DiagonalGaussian, MultiCategorical

SIZES = (2, 3, 4)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_categorical_equals_torch():
    logits, actions = 3.0 * randn(7, 2, 5), torch.arange(14).reshape(7, 2) % 5
    ours, theirs = Categorical(logits), torch.distributions.Categorical(logits=logits)
    torch.testing.assert_close(ours.log_prob(actions), theirs.log_prob(actions))
    torch.testing.assert_close(ours.entropy(), theirs.entropy())
    assert torch.equal(ours.mode(), theirs.mode)


def test_diagonal_gaussian_equals_torch():
    mean, log_std, actions = randn(7, 3), randn(3, seed=1), randn(7, 3, seed=2)
    ours = DiagonalGaussian(mean, log_std)
    theirs = torch.distributions.Independent(torch.distributions.Normal(mean, log_std.exp()), 1)
    torch.testing.assert_close(ours.log_prob(actions), theirs.log_prob(actions))
    torch.testing.assert_close(ours.entropy(), theirs.entropy())
    assert ours.log_prob(actions).shape == ours.entropy().shape == (7,)
    assert torch.equal(ours.mode(), mean)


def test_bernoulli_equals_torch():
    logits = 4.0 * randn(7, 3)
    actions = (randn(7, 3, seed=1) > 0).long()
    ours = Bernoulli(logits)
    theirs = torch.distributions.Independent(torch.distributions.Bernoulli(logits=logits), 1)
    torch.testing.assert_close(ours.log_prob(actions), theirs.log_prob(actions.double()))
    torch.testing.assert_close(ours.entropy(), theirs.entropy())
    assert Bernoulli(torch.tensor([-0.01, 0.01])).mode().tolist() == [0, 1]


def test_bernoulli_extreme_logits_are_finite():
    distribution = Bernoulli(torch.tensor([[200.0, -200.0]]))
    assert distribution.entropy().item() == 0.0
    assert distribution.log_prob(torch.tensor([[1, 0]])).item() == 0.0
    assert distribution.log_prob(torch.tensor([[0, 1]])).item() == -400.0


def test_multi_categorical_enumerated_joint_sums_to_one_and_has_its_entropy():
    logits = randn(4, sum(SIZES))
    distribution = MultiCategorical(logits, SIZES)
    joint = torch.tensor(list(itertools.product(*(range(size) for size in SIZES))))
    logprobs = torch.stack([distribution.log_prob(action.expand(4, -1)) for action in joint])
    assert logprobs.shape == (math.prod(SIZES), 4)
    torch.testing.assert_close(logprobs.exp().sum(0), torch.ones(4, dtype=torch.float64))
    torch.testing.assert_close(distribution.entropy(), -(logprobs.exp() * logprobs).sum(0))
    assert torch.equal(distribution.mode(), joint[logprobs.argmax(0)])


def test_categorical_masked_actions_have_no_probability_and_no_gradient():
    logits = randn(3, 4).requires_grad_()
    mask = torch.tensor([[True, False, True, True], [False, True, False, True], [True, True, True, True]])
    distribution = Categorical(logits, mask)
    kept = torch.distributions.Categorical(logits=logits[0, mask[0]])
    torch.testing.assert_close(distribution.log_prob(torch.tensor([2, 1, 0]))[0], kept.log_prob(torch.tensor(1)))
    torch.testing.assert_close(distribution.entropy()[0], kept.entropy())
    assert torch.equal(distribution.logprobs.exp()[~mask], torch.zeros(3, dtype=torch.float64))
    (distribution.log_prob(torch.tensor([2, 1, 0])).sum() + distribution.entropy().sum()).backward()
    assert torch.equal(logits.grad[~mask], torch.zeros(3, dtype=torch.float64))
    assert (logits.grad[mask] != 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_categorical_single_allowed_action_is_certain(dtype: torch.dtype):
    logits = torch.tensor([[50.0, -50.0, 3.0]], dtype=dtype, requires_grad=True)
    distribution = Categorical(logits, torch.tensor([[False, True, False]]))
    assert distribution.entropy().item() == 0.0
    assert distribution.log_prob(torch.tensor([1])).item() == 0.0
    (distribution.entropy() + distribution.log_prob(torch.tensor([1]))).sum().backward()
    assert torch.equal(logits.grad, torch.zeros_like(logits))


def test_categorical_mask_outweighs_any_logit():
    distribution = Categorical(torch.tensor([-1e30, 1e30]), torch.tensor([True, False]))
    assert distribution.logprobs.exp().tolist() == [1.0, 0.0]


def test_categorical_masked_action_is_never_sampled_and_ratio_of_impossible_is_one():
    mask = torch.tensor([True, False, True]).expand(20_000, -1)
    distribution = Categorical(torch.tensor([0.0, 100.0, 0.0]).expand(20_000, -1), mask)
    actions = distribution.sample(Categorical.noise(generator(), (20_000, 3)))
    assert (actions != 1).all()
    impossible = distribution.log_prob(torch.ones(20_000, dtype=torch.long))
    assert torch.equal((impossible - impossible.clone()).exp(), torch.ones(20_000))


def test_multi_categorical_mask_is_split_among_the_parts():
    mask = torch.tensor([[True, False, False, True, True, True, True, False, True]])
    distribution = MultiCategorical(randn(1, sum(SIZES)), SIZES, mask)
    expected = sum(
        Categorical(logits, part).entropy()
        for logits, part in zip(randn(1, sum(SIZES)).split(SIZES, -1), mask.split(SIZES, -1), strict=True)
    )
    torch.testing.assert_close(distribution.entropy(), expected)
    noise = Categorical.noise(generator(), (500, 1, sum(SIZES)))
    actions = torch.cat([distribution.sample(n) for n in noise])
    assert actions.shape == (500, 3)
    assert (actions[:, 0] == 0).all()
    assert (actions[:, 1] != 0).all()
    assert (actions[:, 2] != 2).all()


# The 99.9 % quantiles of chi-square by degrees of freedom.
CHI_SQUARE_999 = {1: 10.83, 4: 18.47, 23: 49.73}


def chi_square(counts: Tensor, probabilities: Tensor) -> float:
    expected = probabilities * counts.sum()
    return ((counts - expected).square() / expected).sum().item()


def test_categorical_sample_frequencies_follow_probabilities():
    logits = torch.tensor([0.0, 1.0, -1.0, 2.0, 0.5])
    actions = Categorical(logits.expand(50_000, -1)).sample(Categorical.noise(generator(), (50_000, 5)))
    assert chi_square(torch.bincount(actions, minlength=5), logits.softmax(-1)) < CHI_SQUARE_999[4]


def test_multi_categorical_sample_frequencies_follow_joint_probabilities():
    distribution = MultiCategorical(0.5 * randn(sum(SIZES)).expand(50_000, -1), SIZES)
    actions = distribution.sample(Categorical.noise(generator(), (50_000, sum(SIZES))))
    joint = torch.tensor(list(itertools.product(*(range(size) for size in SIZES))))
    probabilities = MultiCategorical(0.5 * randn(sum(SIZES)).expand(24, -1), SIZES).log_prob(joint).exp()
    cells = (actions * torch.tensor([12, 4, 1])).sum(-1)
    assert chi_square(torch.bincount(cells, minlength=24), probabilities) < CHI_SQUARE_999[23]


@pytest.mark.parametrize("logit", [-3.0, 0.0, 1.0])
def test_bernoulli_sample_frequencies_follow_probabilities(logit: float):
    actions = Bernoulli(torch.full((50_000, 1), logit)).sample(Bernoulli.noise(generator(), (50_000, 1)))
    p = torch.tensor(logit).sigmoid()
    assert chi_square(torch.bincount(actions.flatten(), minlength=2), torch.stack((1 - p, p))) < CHI_SQUARE_999[1]


def test_diagonal_gaussian_samples_have_the_moments_and_are_differentiable():
    mean, log_std = torch.tensor([1.0, -2.0]), torch.tensor([0.0, -1.0], requires_grad=True)
    distribution = DiagonalGaussian(mean.expand(100_000, -1), log_std)
    samples = distribution.sample(DiagonalGaussian.noise(generator(), (100_000, 2)))
    # Six standard errors.
    torch.testing.assert_close(samples.mean(0), mean, atol=6 / math.sqrt(100_000), rtol=0)
    torch.testing.assert_close(samples.std(0), log_std.exp(), atol=6 / math.sqrt(200_000), rtol=0)
    samples.mean().backward()
    assert log_std.grad.abs().sum() > 0


@pytest.mark.parametrize("family", [Categorical, Bernoulli, DiagonalGaussian])
def test_noise_same_seed_one_block_is_reproducible_and_finite(family):
    first, second = (family.noise(generator(7), (16, 4, 9)) for _ in range(2))
    assert torch.equal(first, second)
    assert first.isfinite().all()
    assert not torch.equal(first, family.noise(generator(8), (16, 4, 9)))


@pytest.mark.parametrize(
    ("distribution", "action_shape"),
    [
        (Categorical(randn(6, 2, 9)), (6, 2)),
        (MultiCategorical(randn(6, 2, 9), SIZES), (6, 2, 3)),
        (Bernoulli(randn(6, 2, 9)), (6, 2, 9)),
        (DiagonalGaussian(randn(6, 2, 9), randn(9)), (6, 2, 9)),
    ],
)
def test_distribution_batch_shapes_agree(distribution, action_shape: tuple[int, ...]):
    family = Categorical if isinstance(distribution, MultiCategorical) else distribution
    action = distribution.sample(family.noise(generator(), (6, 2, 9)))
    assert action.shape == distribution.mode().shape == action_shape
    assert distribution.log_prob(action).shape == distribution.entropy().shape == (6, 2)
