"""The Beta distribution on ±1 against torch.distributions, and its samples against its own density."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from palestra.rl.distributions import Beta

torch.set_num_threads(1)

SHAPES = [(1.0, 1.0), (1.0, 3.0), (1.5, 1.2), (7.0, 2.0), (60.0, 40.0), (800.0, 5.0)]


def reference(alpha: torch.Tensor, beta: torch.Tensor) -> torch.distributions.Distribution:
    stretch = torch.distributions.AffineTransform(-1.0, 2.0)
    return torch.distributions.TransformedDistribution(torch.distributions.Beta(alpha, beta), [stretch])


@given(st.floats(1, 200), st.floats(1, 200), st.floats(-0.999, 0.999))
@settings(max_examples=100, deadline=None)
def test_log_prob_and_entropy_any_shape_equal_torch(alpha, beta, action):
    a, b, x = (torch.tensor([[value]], dtype=torch.float64) for value in (alpha, beta, action))
    ours = Beta(a, b)
    torch.testing.assert_close(ours.log_prob(x), reference(a, b).log_prob(x)[:, 0], rtol=1e-6, atol=1e-6)
    entropy = torch.distributions.Beta(a, b).entropy()[:, 0] + math.log(2)
    torch.testing.assert_close(ours.entropy(), entropy, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize(("alpha", "beta"), SHAPES)
def test_log_prob_integrates_to_one(alpha, beta):
    x = torch.linspace(-1, 1, 200_001, dtype=torch.float64)[:, None]
    ours = Beta(torch.full_like(x, alpha), torch.full_like(x, beta))
    assert float(torch.trapezoid(ours.log_prob(x).exp(), x[:, 0])) == pytest.approx(1.0, abs=1e-4)


@pytest.mark.parametrize(("alpha", "beta"), SHAPES)
def test_sample_of_many_has_the_distribution_of_the_density(alpha, beta):
    a, b = torch.full((100_000, 1), alpha), torch.full((100_000, 1), beta)
    ours = Beta(a, b)
    noise = Beta.noise(torch.Generator().manual_seed(0), (100_000, 1, 2, Beta.ATTEMPTS, 2))
    drawn = ours.sample(noise)
    assert torch.equal(ours.sample(noise), drawn)  # a function of the noise alone
    assert drawn.shape == (100_000, 1)
    assert drawn.abs().max() <= 1
    # Kolmogorov-Smirnov against torch's own sampler: 1.63 √(2/n) is the 1 % bound.
    torch.manual_seed(1)
    other = reference(a, b).sample()[:, 0].sort().values
    mine = drawn[:, 0].sort().values
    everything = torch.cat((mine, other))
    gap = torch.searchsorted(mine, everything, right=True) - torch.searchsorted(other, everything, right=True)
    assert gap.abs().max() / 100_000 < 1.63 * math.sqrt(2 / 100_000)


@pytest.mark.parametrize(("alpha", "beta"), SHAPES)
def test_mode_has_the_highest_density(alpha, beta):
    ours = Beta(torch.tensor([alpha]), torch.tensor([beta]))
    x = torch.linspace(-1, 1, 20_001)[:, None]
    best = Beta(torch.full_like(x, alpha), torch.full_like(x, beta)).log_prob(x).max()
    assert float(ours.log_prob(ours.mode())) >= float(best) - 1e-3


def test_mode_flat_density_is_the_middle():
    assert Beta(torch.ones(2), torch.ones(2)).mode().tolist() == [0.0, 0.0]


def test_log_prob_at_the_bounds_is_finite_and_so_is_its_gradient():
    outputs = torch.tensor([[-40.0, 3.0, 2.0, 50.0]], requires_grad=True)
    ours = Beta.of(outputs)
    value = ours.log_prob(torch.tensor([[-1.0, 1.0]])) + ours.entropy()
    assert torch.isfinite(value).all()
    (gradient,) = torch.autograd.grad(value.sum(), outputs)
    assert torch.isfinite(gradient).all()


def test_of_outputs_sums_over_the_parts_of_an_action():
    outputs = torch.randn(5, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    ours, action = Beta.of(outputs), torch.zeros(5, 3, dtype=torch.float64)
    a, b = (1 + torch.nn.functional.softplus(outputs)).chunk(2, dim=-1)
    torch.testing.assert_close(ours.log_prob(action), reference(a, b).log_prob(action).sum(-1))
    assert ours.entropy().shape == (5,)
    assert (ours.alpha > 1).all()
