"""The distributions policies act by: a few tensor operations each, sampled from noise drawn beforehand.

`sample(noise)` is a deterministic function of the parameters and of noise shaped like them (`noise_shape`), so a
collector draws one block `(T, *noise_shape)` for a whole rollout with `draw` and spends no generator call per step.
`log_prob` and `entropy` have the batch's shape: joint actions are summed over their parts.
"""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

HALF_LOG_TWO_PI = 0.5 * math.log(2.0 * math.pi)


def _log_exponential(generator: torch.Generator, shape: Sequence[int]) -> Tensor:
    # torch's exponential_ never draws 0 (its documented support is open), so the logarithm is finite.
    return torch.empty(tuple(shape), device=generator.device).exponential_(generator=generator).log_()


class Categorical:
    """One of K actions by its logit, `(..., K)`; sampled by the Gumbel-max trick.

    `mask` (True = allowed) gives the others probability exactly 0 and gradient exactly 0. The same mask must be passed
    when acting and when learning. A row with nothing allowed comes out uniform: it stays finite in rows not used.
    """

    __slots__ = ("logprobs",)

    def __init__(self, logits: Tensor, mask: Tensor | None = None):
        if mask is not None:
            # Finite, unlike -inf, so that 0·log 0 and the difference of two such log-probabilities are 0 and not NaN.
            logits = logits.masked_fill(~mask, 0.5 * torch.finfo(logits.dtype).min)
        self.logprobs = torch.log_softmax(logits, dim=-1)

    @property
    def noise_shape(self) -> torch.Size:
        """The shape of the noise of one `sample`."""
        return self.logprobs.shape

    @staticmethod
    def draw(generator: torch.Generator, shape: Sequence[int]) -> Tensor:
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

    __slots__ = ("noise_shape", "parts", "sizes")

    def __init__(self, logits: Tensor, sizes: Sequence[int], mask: Tensor | None = None):
        self.sizes = list(sizes)
        self.noise_shape = logits.shape
        masks = [None] * len(self.sizes) if mask is None else mask.split(self.sizes, dim=-1)
        self.parts = [Categorical(part, m) for part, m in zip(logits.split(self.sizes, dim=-1), masks, strict=True)]

    @staticmethod
    def draw(generator: torch.Generator, shape: Sequence[int]) -> Tensor:
        """Standard Gumbel noise on the generator's device."""
        return Categorical.draw(generator, shape)

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

    @property
    def noise_shape(self) -> torch.Size:
        """The shape of the noise of one `sample`."""
        return self.logits.shape

    @staticmethod
    def draw(generator: torch.Generator, shape: Sequence[int]) -> Tensor:
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
        return -F.binary_cross_entropy_with_logits(self.logits, action.to(self.logits.dtype), reduction="none").sum(
            dim=-1
        )

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

    @property
    def noise_shape(self) -> torch.Size:
        """The shape of the noise of one `sample`."""
        return self.mean.shape

    @staticmethod
    def draw(generator: torch.Generator, shape: Sequence[int]) -> Tensor:
        """Standard normal noise on the generator's device."""
        return torch.randn(tuple(shape), generator=generator, device=generator.device)

    def sample(self, noise: Tensor) -> Tensor:
        """Actions `(..., D)`, differentiable in mean and log_std (reparametrised)."""
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
