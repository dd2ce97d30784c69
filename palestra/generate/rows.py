"""What a decode step knows of each row of the batch, and how a draw changes it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from palestra.generate.jobs import MOST_ENDS, Alternatives, Sample
from palestra.generate.sampler import Needs, Settings, sample

APART = 0x9E3779B97F4A7C15
"""What the seeds of a request's samples lie apart, modulo 2⁶⁴."""
ALL = 2**62
"""A top_k that keeps every token."""


@dataclass(frozen=True)
class Rows:
    """State of the rows, as views of three tensors: a device gets all of it in three copies."""

    integers: Tensor
    """(8, rows) int64."""
    floats: Tensor
    """(3, rows) FP32."""
    ends: Tensor
    """(rows, MOST_ENDS) int64: tokens that end the sequence, the first one repeated; −1 where there are none."""

    @classmethod
    def empty(cls, rows: int, device: torch.device) -> "Rows":
        """Rows in which nothing runs."""
        return cls(
            torch.zeros(8, rows, dtype=torch.int64, device=device),
            torch.zeros(3, rows, dtype=torch.float32, device=device),
            torch.full((rows, MOST_ENDS), -1, dtype=torch.int64, device=device),
        )

    @property
    def token(self) -> Tensor:
        """The last token of the sequence, not yet in the cache."""
        return self.integers[0]

    @property
    def length(self) -> Tensor:
        """How many tokens are in the cache, which is also the position of `token`."""
        return self.integers[1]

    @property
    def active(self) -> Tensor:
        """1 where tokens are drawn; what the other rows compute counts for nothing."""
        return self.integers[2]

    @property
    def remaining(self) -> Tensor:
        """How many tokens may still be drawn."""
        return self.integers[3]

    def settings(self, batch: int) -> Settings:
        """How the first rows are sampled."""
        draws, minimum, seed, top_k = self.integers[4:, :batch]
        temperature, top_p, min_p = self.floats[:, :batch]
        return Settings(temperature, top_k, top_p, min_p, seed, draws, minimum, self.ends[:batch])

    def start(self, samples: Sequence[Sample]) -> None:
        """Write the rows of samples whose tokens but the last are cached: they draw from now on."""
        rows = torch.tensor([sample.row for sample in samples])
        # In the order of `token`, `length`, `active`, `remaining` and `settings`.
        self.integers[:, rows] = torch.tensor([_integers(sample) for sample in samples]).T
        drawn = [sample.job.sampling for sample in samples]
        self.floats[:, rows] = torch.tensor([(s.temperature, s.top_p, s.min_p) for s in drawn]).T
        ends = (sample.job.ends for sample in samples)
        self.ends[rows] = torch.tensor([(tokens + (tokens[:1] or (-1,)) * MOST_ENDS)[:MOST_ENDS] for tokens in ends])

    def stop(self, row: int) -> None:
        """Draw no more in a row, on the host: there NumPy takes a tenth of torch's time for one number."""
        self.integers.numpy()[2, row] = 0

    def move(self, source: int, target: int) -> None:
        """Let a row take the place of another, on the host. Its own place is then idle."""
        integers, floats, ends = self.integers.numpy(), self.floats.numpy(), self.ends.numpy()
        integers[:, target], floats[:, target], ends[target] = integers[:, source], floats[:, source], ends[source]
        self.stop(source)

    def copy_(self, other: "Rows") -> None:
        """Take over all rows of another; from pinned memory without waiting."""
        rows = other.integers.shape[1]
        self.integers[:, :rows].copy_(other.integers, non_blocking=True)
        self.floats[:, :rows].copy_(other.floats, non_blocking=True)
        self.ends[:rows].copy_(other.ends, non_blocking=True)


class Step(NamedTuple):
    """What a step (B), or several stacked (steps, B), gave for each row."""

    tokens: Tensor
    logprobs: Tensor
    counted: Tensor
    """Whether the row was active, so that the token belongs to its sequence."""
    top_tokens: Tensor
    """(…, B, top)."""
    top_logprobs: Tensor


class Drawn:
    """What a burst drew, for the host."""

    def __init__(self, found: Step):
        self._found = found
        self.finite = bool(found.logprobs.isfinite().all())
        """Whether all log-probabilities are numbers, of rows that draw nothing too."""
        self._counts = found.counted.sum(0).tolist()
        self._tokens, self._logprobs = found.tokens.T.tolist(), found.logprobs.T.tolist()

    def in_row(self, row: int, alternatives: int) -> tuple[list[int], list[float], list[Alternatives]]:
        """Tokens of the row's sequence, their log-probabilities, and alternatives that could have been drawn."""
        count = self._counts[row]
        return self._tokens[row][:count], self._logprobs[row][:count], self._top(row, count, alternatives)

    def _top(self, row: int, count: int, alternatives: int) -> list[Alternatives]:
        if not alternatives:
            return []
        tokens, logprobs = self._found.top_tokens, self._found.top_logprobs
        pairs = (
            zip(*both, strict=True)
            for both in zip(tokens[:count, row].tolist(), logprobs[:count, row].tolist(), strict=True)
        )
        return [
            tuple((token, value) for token, value in step if value > float("-inf"))[:alternatives] for step in pairs
        ]


def advance(rows: Rows, scores: Tensor, needs: Needs) -> Step:
    """Draw from scores (B, V) and bring the first B rows to their next token. The host waits for nothing."""
    batch = len(scores)
    settings, active = rows.settings(batch), rows.active[:batch]
    new, counted = sample(scores, settings, needs), active.bool()
    rows.token[:batch] = torch.where(counted, new.tokens, rows.token[:batch])
    rows.length[:batch] += active
    settings.draws.add_(active)
    rows.remaining[:batch] -= active
    ended = (new.tokens[:, None] == settings.ends).any(-1) | (rows.remaining[:batch] <= 0)
    active.mul_(~ended)
    return Step(new.tokens, new.logprobs, counted, new.top_tokens, new.top_logprobs)


def _integers(sample: Sample) -> tuple[int, ...]:
    job, sampling = sample.job, sample.job.sampling
    return (
        sample.tokens[-1] if sample.tokens else job.request.prompt[-1],
        sample.due,
        1,
        sample.remaining,
        len(sample.tokens),
        sampling.min_new_tokens,
        _signed(job.seed + APART * sample.index),
        min(sampling.top_k or ALL, ALL),
    )


def _signed(number: int) -> int:
    """Modulo 2⁶⁴, as an int64."""
    return (number + 2**63) % 2**64 - 2**63
