"""Action distributions: a few tensor operations each, sampled from noise that was generated beforehand.

`sample(noise)` is a deterministic function of the parameters and of noise shaped like them, so a collector generates
the noise of a whole rollout with one call of `noise` and spends no generator call per step. `log_prob` and `entropy`
have the batch's shape: joint actions are summed over their parts.
"""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

HALF_LOG_TWO_PI = 0.5 * math.log(2.0 * math.pi)


def _log_exponential(generator: torch.Generator, shape: Sequence[int]) -> Tensor:
    # torch's exponential_ never returns 0 (its documented support is open), so the logarithm is finite.
    return torch.empty(tuple(shape), device=generator.device).exponential_(generator=generator).log_()


class Categorical:
    """One of K actions by their logits, `(..., K)`; sampled by the Gumbel-max trick.

    `mask` (True = allowed) gives the others probability exactly 0 and gradient exactly 0. The same mask must be passed
    when acting and when learning. A row that allows nothing is uniform, so that unused rows stay finite.
    """

    __slots__ = ("logprobs",)

    def __init__(self, logits: Tensor, mask: Tensor | None = None):
        if mask is not None:
            # Finite, unlike -inf, so that 0·log 0 and the difference of two such log-probabilities are 0 and not NaN.
            logits = logits.masked_fill(~mask, 0.5 * torch.finfo(logits.dtype).min)
        self.logprobs = torch.log_softmax(logits, dim=-1)

    @staticmethod
    def noise(generator: torch.Generator, shape: Sequence[int]) -> Tensor:
        """Standard Gumbel noise on the generator's device."""
        return _log_exponential(generator, shape).neg_()

    def sample(self, noise: Tensor) -> Tensor:
        """Actions `(...)`, int64."""
        return (self.logprobs + noise).argmax(dim=-1)

    def mode(self) -> Tensor:
        """The most probable actions `(...)`, int64; the first of equals."""
        return self.logprobs.argmax(dim=-1)

    def log_prob(self, action: Tensor) -> Tensor:
        """Log-probability of integer actions `(...)`."""
        return self.logprobs.gather(-1, action.long().unsqueeze(-1)).squeeze(-1)

    def entropy(self) -> Tensor:
        """Entropy in nats, `(...)`."""
        return -(self.logprobs.exp() * self.logprobs).sum(dim=-1)


class MultiCategorical:
    """Independent categoricals of the given sizes, from logits `(..., sum(sizes))` laid end to end."""

    __slots__ = ("parts", "sizes")

    def __init__(self, logits: Tensor, sizes: Sequence[int], mask: Tensor | None = None):
        self.sizes = list(sizes)
        masks = [None] * len(self.sizes) if mask is None else mask.split(self.sizes, dim=-1)
        self.parts = [Categorical(part, m) for part, m in zip(logits.split(self.sizes, dim=-1), masks, strict=True)]

    def sample(self, noise: Tensor) -> Tensor:
        """Actions `(..., len(sizes))`, int64."""
        noises = noise.split(self.sizes, dim=-1)
        return torch.stack([part.sample(n) for part, n in zip(self.parts, noises, strict=True)], dim=-1)

    def mode(self) -> Tensor:
        """The most probable actions `(..., len(sizes))`, int64."""
        return torch.stack([part.mode() for part in self.parts], dim=-1)

    def log_prob(self, action: Tensor) -> Tensor:
        """Log-probability of the joint actions `(..., len(sizes))`, summed over the parts to `(...)`."""
        logprobs = [part.log_prob(a) for part, a in zip(self.parts, action.unbind(-1), strict=True)]
        return torch.stack(logprobs).sum(dim=0)

    def entropy(self) -> Tensor:
        """Entropy of the joint distribution in nats, `(...)`."""
        return torch.stack([part.entropy() for part in self.parts]).sum(dim=0)


class Bernoulli:
    """D independent yes/no actions by their logits, `(..., D)`."""

    __slots__ = ("logits",)

    def __init__(self, logits: Tensor):
        self.logits = logits

    @staticmethod
    def noise(generator: torch.Generator, shape: Sequence[int]) -> Tensor:
        """Standard logistic noise (a difference of two Gumbels) on the generator's device."""
        return _log_exponential(generator, shape) - _log_exponential(generator, shape)

    def sample(self, noise: Tensor) -> Tensor:
        """Actions of 0 and 1, `(..., D)`, int64."""
        return (self.logits + noise > 0).long()

    def mode(self) -> Tensor:
        """The more probable of 0 and 1, `(..., D)`, int64."""
        return (self.logits > 0).long()

    def log_prob(self, action: Tensor) -> Tensor:
        """Log-probability of actions `(..., D)`, summed to `(...)`."""
        action = action.to(self.logits.dtype)
        return -F.binary_cross_entropy_with_logits(self.logits, action, reduction="none").sum(dim=-1)

    def entropy(self) -> Tensor:
        """Entropy of the joint distribution in nats, `(...)`."""
        return (F.softplus(self.logits) - self.logits * torch.sigmoid(self.logits)).sum(dim=-1)


class DiagonalGaussian:
    """Continuous actions `(..., D)` with independent parts; `log_std` may be `(D,)`, the same in every state.

    Actions are unbounded: store and score the sample itself, and clip to the environment's bounds only a copy.
    """

    __slots__ = ("log_std", "mean")

    def __init__(self, mean: Tensor, log_std: Tensor):
        self.mean = mean
        self.log_std = log_std.expand_as(mean)

    @staticmethod
    def noise(generator: torch.Generator, shape: Sequence[int]) -> Tensor:
        """Standard normal noise on the generator's device."""
        return torch.randn(tuple(shape), generator=generator, device=generator.device)

    def sample(self, noise: Tensor) -> Tensor:
        """Actions `(..., D)`, differentiable in mean and log_std (reparametrized)."""
        return self.mean + self.log_std.exp() * noise

    def mode(self) -> Tensor:
        """The mean."""
        return self.mean

    def log_prob(self, action: Tensor) -> Tensor:
        """Log-density of actions `(..., D)`, summed to `(...)`."""
        z = (action - self.mean) * torch.exp(-self.log_std)
        return (-0.5 * z * z - self.log_std - HALF_LOG_TWO_PI).sum(dim=-1)

    def entropy(self) -> Tensor:
        """Differential entropy in nats, `(...)`."""
        return (self.log_std + (0.5 + HALF_LOG_TWO_PI)).sum(dim=-1)


class Beta:
    """Continuous actions `(..., D)` within ±1, by Beta(α, β) stretched to it (Chou et al. 2017), α and β at least 1.

    With both at least 1 the density has one peak. Unlike a clipped Gaussian it has no mass outside of the bounds.
    """

    __slots__ = ("alpha", "beta")

    ATTEMPTS = 8
    """Proposals generated for each gamma variable; each is accepted with probability above 0.95."""
    EDGE = 1e-6
    """Actions are scored at least this far from a bound, in units of the range: log 0 is never taken."""

    def __init__(self, alpha: Tensor, beta: Tensor):
        self.alpha, self.beta = alpha, beta

    @classmethod
    def of(cls, outputs: Tensor) -> "Beta":
        """From a network's outputs `(..., 2·D)`: 1 + softplus, α first."""
        alpha, beta = (1.0 + F.softplus(outputs)).chunk(2, dim=-1)
        return cls(alpha, beta)

    @staticmethod
    def noise(generator: torch.Generator, shape: Sequence[int]) -> Tensor:
        """Standard normal and log-uniform numbers, stacked on the last dimension.

        `shape` is `(..., D, 2, ATTEMPTS, 2)`: two gamma variables per action, each with its proposals of two numbers.
        """
        normal = torch.randn(tuple(shape[:-1]), generator=generator, device=generator.device)
        exponential = torch.empty(tuple(shape[:-1]), device=generator.device).exponential_(generator=generator)
        return torch.stack((normal, -exponential), dim=-1)

    def sample(self, noise: Tensor) -> Tensor:
        """Actions `(..., D)`; not differentiable: the gradient of an acceptance is not that of the distribution."""
        shapes = torch.stack((self.alpha, self.beta), dim=-1).detach()  # (..., D, 2)
        # Marsaglia & Tsang 2000: v is accepted if log u < x²/2 + d - d·v + d·log v, with v = (1 + x/√(9d))³ above 0.
        d = (shapes - 1.0 / 3.0).unsqueeze(-1)
        x, log_u = noise.unbind(-1)
        v = (1.0 + x * torch.rsqrt(9.0 * d)) ** 3
        log_v = v.clamp_min(torch.finfo(v.dtype).tiny).log()
        accepted = (v > 0) & (log_u < 0.5 * x * x + d - d * v + d * log_v)
        # The first that is accepted. Where none is, one time in 10^10, d itself: near the mean.
        first = accepted.int().argmax(dim=-1, keepdim=True)
        v = torch.where(accepted.any(dim=-1), v.gather(-1, first).squeeze(-1), 1.0)
        gamma = d.squeeze(-1) * v
        return 2.0 * gamma[..., 0] / gamma.sum(dim=-1) - 1.0

    def mode(self) -> Tensor:
        """The peak; 0 where the density is flat (α = β = 1)."""
        a, b = self.alpha - 1.0, self.beta - 1.0
        total = a + b
        return torch.where(total > 0, (a - b) / total.clamp_min(torch.finfo(total.dtype).tiny), 0.0)

    def log_prob(self, action: Tensor) -> Tensor:
        """Log-density of actions `(..., D)` within ±1, summed to `(...)`."""
        y = ((action + 1.0) / 2.0).clamp(self.EDGE, 1.0 - self.EDGE)
        density = (self.alpha - 1.0) * y.log() + (self.beta - 1.0) * torch.log1p(-y) - self._log_normalizer()
        return density.sum(dim=-1)

    def entropy(self) -> Tensor:
        """Differential entropy in nats, `(...)`."""
        a, b = self.alpha, self.beta
        parts = (a - 1.0) * torch.digamma(a) + (b - 1.0) * torch.digamma(b) - (a + b - 2.0) * torch.digamma(a + b)
        return (self._log_normalizer() - parts).sum(dim=-1)

    def _log_normalizer(self) -> Tensor:
        """log of the Beta function, and of the 2 by which ±1 is wider than 0 to 1."""
        a, b = self.alpha, self.beta
        return torch.lgamma(a) + torch.lgamma(b) - torch.lgamma(a + b) + math.log(2.0)


class SquashedGaussian:
    """Continuous actions `(..., D)` within (-1, 1): the tanh of a diagonal Gaussian (Haarnoja et al. 2018, appendix C).

    Its entropy has no closed form: the mean of `-log_prob` of its samples estimates it.
    """

    __slots__ = ("log_std", "mean")

    def __init__(self, mean: Tensor, log_std: Tensor):
        self.mean = mean
        self.log_std = log_std.expand_as(mean)

    def sample(self, noise: Tensor) -> Tensor:
        """Actions `(..., D)`, differentiable in mean and log_std (reparametrized)."""
        return torch.tanh(self.mean + self.log_std.exp() * noise)

    def sample_scored(self, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Actions and their log-densities `(...)`, exact also where tanh has rounded an action to 1."""
        before = self.mean + self.log_std.exp() * noise
        gaussian = -0.5 * noise * noise - self.log_std - HALF_LOG_TWO_PI
        return torch.tanh(before), (gaussian - log_tanh_slope(before)).sum(dim=-1)

    def mode(self) -> Tensor:
        """The tanh of the mean: the median of the distribution, and the action taken in evaluation."""
        return torch.tanh(self.mean)


def log_tanh_slope(x: Tensor) -> Tensor:
    """log(1 - tanh(x)²), finite for every finite x."""
    return 2.0 * (math.log(2.0) - x - F.softplus(-2.0 * x))
