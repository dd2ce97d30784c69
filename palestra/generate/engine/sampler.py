"""Samples the next token, with its log-probability under the distribution it was sampled from."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from palestra.generate.types import Sampling
from palestra.lm import native

NEGATIVE = float("-inf")
BLOCK = 64
"""Inverse-CDF sampling first finds the block of the vocabulary, then the token in it."""


@dataclass(frozen=True)
class Needs:
    """What some row of the batch needs: the rest is not computed. Decided before the step runs."""

    stochastic: bool = True
    """A temperature above 0."""
    greedy: bool = True
    """A temperature of 0."""
    tempered: bool = True
    """A temperature other than 0 and 1."""
    filtered: bool = True
    """top_k, top_p or min_p."""
    min_tokens: bool = True
    """End tokens that may not come yet."""
    top: int = 0
    """How many alternatives to each token."""

    @property
    def plain(self) -> bool:
        """Whether every row samples from the whole distribution, and nothing else is asked for."""
        return not (self.min_tokens or self.filtered or self.top)

    @classmethod
    def of(cls, samplings: Sequence[Sampling]) -> "Needs":
        """What at least one of them asks for."""
        return cls(
            stochastic=any(s.temperature > 0 for s in samplings),
            greedy=any(s.temperature == 0 for s in samplings),
            tempered=any(s.temperature not in (0, 1) for s in samplings),
            filtered=any(s.top_k is not None or s.top_p < 1 or s.min_p > 0 for s in samplings),
            min_tokens=any(s.min_new_tokens > 0 for s in samplings),
            top=max(s.logprobs for s in samplings),
        )


@dataclass(frozen=True)
class Settings:
    """How each row (B) is sampled, as tensors."""

    temperature: Tensor
    """FP32; 0 takes the most likely token."""
    top_k: Tensor
    """int64; at least V for all."""
    top_p: Tensor
    """FP32; 1 for all."""
    min_p: Tensor
    """FP32; 0 for all."""
    seed: Tensor
    """int64."""
    sampled: Tensor
    """int64: how many tokens the row has sampled before."""
    minimum: Tensor
    """int64: end tokens cannot be sampled before this many tokens."""
    ends: Tensor
    """(B, E) int64: end tokens, the first one repeated to the width; −1 throughout where there are none."""

    def plain(self, vocab: int) -> Tensor:
        """(B): which rows sample from the whole distribution."""
        return (self.top_k >= vocab) & (self.top_p >= 1) & (self.min_p <= 0) & (self.sampled >= self.minimum)


class Choice(NamedTuple):
    """One token a row."""

    tokens: Tensor
    """(B) int64."""
    logprobs: Tensor
    """(B) FP32. At temperature 0 of the distribution at temperature 1: that of the argmax itself is always 0."""
    top_tokens: Tensor
    """(B, top) the most likely tokens."""
    top_logprobs: Tensor
    """(B, top); −inf for tokens that the filters took away."""


def sample(scores: Tensor, settings: Settings, needs: Needs) -> Choice:
    """Sample from softmax of `scores` (B, V, FP32) after minimum length, temperature, top_k, top_p and min_p.

    The order of transformers' processors. Each row is a function of its own scores and settings alone.
    """
    if scores.dtype != torch.float32 or not native.available(scores):
        return _sampled(scores, settings, needs)
    tokens, logprobs = native.sample_tokens(scores, settings.temperature, settings.seed, settings.sampled)
    if needs.plain:
        return _without_others(tokens, logprobs)
    # A plain row has the same bits whatever the other rows need.
    choice, alone = _sampled(scores, settings, needs), settings.plain(scores.shape[1])
    tokens = torch.where(alone, tokens, choice.tokens)
    return choice._replace(tokens=tokens, logprobs=torch.where(alone, logprobs, choice.logprobs))


def _without_others(tokens: Tensor, logprobs: Tensor) -> Choice:
    return Choice(tokens, logprobs, tokens[:, None][:, :0], logprobs[:, None][:, :0])


def _sampled(scores: Tensor, settings: Settings, needs: Needs) -> Choice:
    """The same by torch's operations."""
    heat = settings.temperature
    if needs.min_tokens:
        scores = _without_ends(scores, settings)
    if needs.tempered:
        scores = scores / torch.where(heat > 0, heat, 1.0)[:, None]
    probabilities = scores.softmax(-1)
    # log Σ exp, rounded as the trainer's: it subtracts this from a score too, and most of the rounding cancels.
    normalizer = scores.amax(-1) - probabilities.amax(-1).log()
    if needs.filtered:
        lowest = _threshold(probabilities, settings)
        probabilities = torch.where(probabilities < lowest[:, None], 0.0, probabilities)
        normalizer = normalizer + torch.where(lowest > 0, probabilities.sum(-1), 1.0).log()
    tokens = _inverse_cdf(probabilities, uniform(settings.seed, settings.sampled)) if needs.stochastic else None
    if tokens is None or needs.greedy:
        likeliest = scores.argmax(-1)
        tokens = likeliest if tokens is None else torch.where(heat > 0, tokens, likeliest)
    logprobs = scores.gather(1, tokens[:, None])[:, 0] - normalizer
    if not needs.top:
        return _without_others(tokens, logprobs)
    top = probabilities.topk(min(needs.top, probabilities.shape[1]), dim=-1)
    values = scores.gather(1, top.indices) - normalizer[:, None]
    return Choice(tokens, logprobs, top.indices, values.masked_fill(top.values == 0, NEGATIVE))


def uniform(seed: Tensor, count: Tensor) -> Tensor:
    """A number in [0, 1) with 53 random bits (FP64) for each pair of int64s: SplitMix64 twice, the same everywhere."""
    return _shifted(_splitmix(_splitmix(seed) ^ count), 11).to(torch.float64) * 2.0**-53


def _splitmix(x: Tensor) -> Tensor:
    """Steele, Lea and Flood 2014; int64 products wrap, as those of the unsigned original do."""
    x = x + -0x61C8864680B583EB  # 0x9E3779B97F4A7C15
    x = (x ^ _shifted(x, 30)) * -0x40A7B892E31B1A47  # 0xBF58476D1CE4E5B9
    x = (x ^ _shifted(x, 27)) * -0x6B2FB644ECCEEE15  # 0x94D049BB133111EB
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, places: int) -> Tensor:
    """A right shift that fills with zeros; torch's fills with the sign."""
    return (x >> places) & ((1 << (64 - places)) - 1)


def _inverse_cdf(probabilities: Tensor, u: Tensor) -> Tensor:
    """The first token at which the running sum passes u times the whole; never one of probability 0."""
    short = -probabilities.shape[1] % BLOCK
    whole = F.pad(probabilities, (0, short)) if short else probabilities  # padding with nothing would copy it
    blocks = whole.unflatten(1, (-1, BLOCK))  # (B, V / 64, 64)
    sums = blocks.sum(-1)
    block, before = _first_beyond(sums, u * sums.sum(-1, dtype=torch.float64))
    chosen = blocks.gather(1, block[:, None, None].expand(-1, 1, BLOCK))[:, 0]
    place, _ = _first_beyond(chosen, before)
    return block * BLOCK + place


def _first_beyond(amounts: Tensor, goal: Tensor) -> tuple[Tensor, Tensor]:
    """The first of the positive amounts (B, n) at which their running sum passes `goal` (B), and what it lacked before.

    Where rounding leaves the goal beyond the sum it is the last positive one.
    """
    until = amounts.cumsum(-1, dtype=torch.float64)
    positive = amounts > 0
    passed = positive & (until > goal[:, None])
    index = torch.arange(amounts.shape[1], device=amounts.device)
    first = torch.where(passed, index, amounts.shape[1]).amin(-1)
    last = torch.where(positive, index, 0).amax(-1)
    place = torch.where(first < amounts.shape[1], first, last)
    before = until.gather(1, place[:, None])[:, 0] - amounts.gather(1, place[:, None])[:, 0]
    return place, goal - before


def _threshold(probabilities: Tensor, settings: Settings) -> Tensor:
    """The probability (B) below which a token cannot be sampled. Equally likely tokens are kept or dropped together."""
    size = probabilities.shape[1]
    by_count = _largest(probabilities, settings.top_k[:, None], count=True)
    lowest = torch.where(settings.top_k < size, by_count, 0.0)
    kept = torch.where(probabilities >= lowest[:, None], probabilities, 0.0)
    by_mass = _largest(kept, settings.top_p[:, None] * kept.sum(-1, keepdim=True), count=False)
    # At top_p = 1 rounding would drop tokens too small to change the sum.
    lowest = torch.maximum(lowest, torch.where(settings.top_p < 1, by_mass, 0.0))
    return torch.maximum(lowest, settings.min_p * probabilities.amax(-1))


def _largest(probabilities: Tensor, goal: Tensor, *, count: bool) -> Tensor:
    """The largest t (B) for which the probabilities ≥ t are `goal` many, or sum to `goal` (B, 1).

    Found by halving over the bit patterns of floats, which are in the order of their values: exact in 31 passes, and
    many times faster than sorting a vocabulary.
    """
    low = torch.zeros_like(goal, dtype=torch.int32)
    high = torch.full_like(low, 0x3F800001)  # just above 1.0
    for _ in range(31):
        middle = low + (high - low) // 2
        reached = probabilities >= middle.view(torch.float32)
        amount = reached.sum(-1, keepdim=True) if count else torch.where(reached, probabilities, 0.0).sum(-1, True)
        low, high = torch.where(amount >= goal, middle, low), torch.where(amount >= goal, high, middle)
    return low.view(torch.float32)[:, 0]


def _without_ends(scores: Tensor, settings: Settings) -> Tensor:
    """Scores in which end tokens are −inf while a row has sampled fewer tokens than its minimum."""
    ends = settings.ends.clamp(min=0)
    # Repeated ends get equal values, so the order of writing does not matter.
    early = (settings.sampled < settings.minimum)[:, None] & (settings.ends >= 0)
    return scores.scatter(1, ends, torch.where(early, NEGATIVE, scores.gather(1, ends)))
