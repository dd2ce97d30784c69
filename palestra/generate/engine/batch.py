"""The running batch: the waiting queue, which prompts a burst computes, and the state of every row."""

from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from palestra.generate.engine.request import MOST_ENDS, Alternatives, EngineJob, Sample
from palestra.generate.engine.sampler import Needs, Settings, sample

APART = 0x9E3779B97F4A7C15
"""The distance between the seeds of a request's samples, modulo 2⁶⁴."""
ALL = 2**62
"""A top_k that keeps every token."""


class BatchRows:
    """State of the rows, as views of three tensors: a device gets all of it in three copies."""

    def __init__(self, integers: Tensor, floats: Tensor, ends: Tensor):
        """`integers` (8, rows) int64, `floats` (3, rows) FP32.

        `ends` (rows, MOST_ENDS) int64 are the tokens that end the sequence, the first one repeated; −1 where there are
        none.
        """
        self.integers, self.floats, self.ends = integers, floats, ends
        # The last token of the sequence, not yet in the cache; how many tokens are in the cache, which is also the
        # position of `token`; 1 where tokens are sampled (the output of other rows is ignored); how many tokens may
        # still be sampled.
        self.token, self.length, self.active, self.remaining = integers[:4]

    @classmethod
    def empty(cls, rows: int, device: torch.device) -> "BatchRows":
        """Rows in which nothing runs."""
        return cls(
            torch.zeros(8, rows, dtype=torch.int64, device=device),
            torch.zeros(3, rows, dtype=torch.float32, device=device),
            torch.full((rows, MOST_ENDS), -1, dtype=torch.int64, device=device),
        )

    def settings(self, batch: int) -> Settings:
        """How the first rows are sampled."""
        sampled, minimum, seed, top_k = self.integers[4:, :batch]
        temperature, top_p, min_p = self.floats[:, :batch]
        return Settings(temperature, top_k, top_p, min_p, seed, sampled, minimum, self.ends[:batch])

    def start(self, samples: Sequence[Sample]) -> None:
        """Write the rows of samples whose tokens but the last are cached: they are sampled from now on."""
        rows = torch.tensor([sample.row for sample in samples])
        # In the order of `token`, `length`, `active`, `remaining` and `settings`.
        self.integers[:, rows] = torch.tensor([_integers(sample) for sample in samples]).T
        settings = [sample.job.sampling for sample in samples]
        self.floats[:, rows] = torch.tensor([(s.temperature, s.top_p, s.min_p) for s in settings]).T
        ends = (sample.job.ends for sample in samples)
        self.ends[rows] = torch.tensor([(tokens + (tokens[:1] or (-1,)) * MOST_ENDS)[:MOST_ENDS] for tokens in ends])

    def stop(self, row: int) -> None:
        """Stop sampling in a row, on the host: there NumPy takes a tenth of torch's time for one number."""
        self.integers.numpy()[2, row] = 0

    def move(self, source: int, target: int) -> None:
        """Move a row to the place of another, on the host. Its own place is then idle."""
        integers, floats, ends = self.integers.numpy(), self.floats.numpy(), self.ends.numpy()
        integers[:, target], floats[:, target], ends[target] = integers[:, source], floats[:, source], ends[source]
        self.stop(source)

    def copy_(self, other: "BatchRows") -> None:
        """Take over all rows of another; from pinned memory without waiting."""
        rows = other.integers.shape[1]
        self.integers[:, :rows].copy_(other.integers, non_blocking=True)
        self.floats[:, :rows].copy_(other.floats, non_blocking=True)
        self.ends[:rows].copy_(other.ends, non_blocking=True)


class DecodeStep(NamedTuple):
    """The output of a step (B), or of several stacked (steps, B), for each row."""

    tokens: Tensor
    logprobs: Tensor
    counted: Tensor
    """Whether the row was active, so that the token belongs to its sequence."""
    top_tokens: Tensor
    """(…, B, top)."""
    top_logprobs: Tensor


class BurstOutput:
    """What a burst sampled, for the host."""

    def __init__(self, steps: DecodeStep):
        self._steps = steps
        self.finite = bool(steps.logprobs.isfinite().all())
        """Whether all log-probabilities are finite, those of idle rows included."""
        self._counts = steps.counted.sum(0).tolist()
        self._tokens, self._logprobs = steps.tokens.T.tolist(), steps.logprobs.T.tolist()

    def in_row(self, row: int, alternatives: int) -> tuple[list[int], list[float], list[Alternatives]]:
        """Tokens of the row's sequence, their log-probabilities, and the alternatives to each."""
        count, top = self._counts[row], []
        if alternatives:
            tokens = self._steps.top_tokens[:count, row].tolist()
            logprobs = self._steps.top_logprobs[:count, row].tolist()
            for pairs in map(zip, tokens, logprobs):
                # What the filters took away has −inf.
                top.append(tuple(pair for pair in pairs if pair[1] > float("-inf"))[:alternatives])
        return self._tokens[row][:count], self._logprobs[row][:count], top


def advance(rows: BatchRows, scores: Tensor, needs: Needs) -> DecodeStep:
    """Sample from scores (B, V) and advance the first B rows to their next token. The host waits for nothing."""
    batch = len(scores)
    settings, active = rows.settings(batch), rows.active[:batch]
    new, counted = sample(scores, settings, needs), active.bool()
    rows.token[:batch] = torch.where(counted, new.tokens, rows.token[:batch])
    rows.length[:batch] += active
    settings.sampled.add_(active)
    rows.remaining[:batch] -= active
    ended = (new.tokens[:, None] == settings.ends).any(-1) | (rows.remaining[:batch] <= 0)
    active.mul_(~ended)
    return DecodeStep(new.tokens, new.logprobs, counted, new.top_tokens, new.top_logprobs)


def _integers(sample: Sample) -> tuple[int, ...]:
    job, sampling = sample.job, sample.job.sampling
    return (
        sample.tokens[-1] if sample.tokens else job.request.prompt[-1],
        sample.due,
        1,
        sample.remaining,
        len(sample.tokens),
        sampling.min_new_tokens,
        (job.seed + APART * sample.index + 2**63) % 2**64 - 2**63,  # modulo 2⁶⁴, as an int64
        min(sampling.top_k or ALL, ALL),
    )


TURN = 16
"""Samples of a request that start before the next request has its turn. A group of usual size starts together; a
request for a thousand samples does not starve the others."""


class Scheduler:
    """Jobs wait in a queue for rows; running samples fill the first rows without gaps.

    First come, first served, except that a request goes to the end of the queue after each `TURN` samples.
    """

    def __init__(self, rows: int, block: int):
        self.most, self.block = rows, block
        self.waiting: deque[EngineJob] = deque()
        """Jobs with samples that have not started."""
        self.rows: list[Sample] = []
        self._turn = 0
        self._samples = 0

    def admit(self, budget: int) -> list[Sample]:
        """Give rows to waiting samples, while there are any and prompts worth less than `budget` tokens are pending.

        So `pieces` of the same budget complete the prompts that others are to copy.
        """
        if not self.waiting:
            return []
        admitted = []
        pending = sum(sample.due - sample.cached for sample in self._computing())
        sources: dict[int, Sample] = {}  # the first row with a prompt, by the prompt's hash
        for other in self.rows:
            if other.shareable:
                sources.setdefault(other.job.key, other)
        while self.waiting and len(self.rows) < self.most and pending < budget:
            job = self.waiting[0]
            source = sources.get(job.key)
            if source is not None and not source.job.same_prompt(job):  # another prompt with the same hash
                source = next((other for other in self.rows if other.shareable and other.job.same_prompt(job)), None)
            sample = Sample(job, job.started, len(self.rows), self._samples, source)
            sources.setdefault(job.key, sample)
            self.rows.append(sample)
            admitted.append(sample)
            self._samples += 1
            job.started += 1
            if source is None:
                pending += sample.due
            self._turn += 1
            if job.started == job.request.n:
                self.waiting.popleft()
                self._turn = 0
            elif self._turn == TURN:
                self.waiting.rotate(-1)
                self._turn = 0
        return admitted

    def withdraw(self, job: EngineJob) -> None:
        """Start no more samples of a job."""
        if job in self.waiting:
            if self.waiting[0] is job:
                self._turn = 0
            self.waiting.remove(job)

    def pieces(self, budget: int) -> Iterator[tuple[Sample, int]]:
        """Samples, and up to where to compute their tokens now: `budget` tokens or a block more, oldest first.

        A piece that does not reach the end ends at a multiple of a block.
        """
        for running in sorted(self._computing(), key=lambda sample: sample.age):
            if budget <= 0:
                return
            end = min(running.due, running.cached + -(-budget // self.block) * self.block)
            budget -= end - running.cached
            yield running, end

    def release(self, sample: Sample) -> tuple[int, int, int] | None:
        """Take a sample out; the one in the last row moves into its row: from, to, and how much it has cached."""
        last = self.rows.pop()
        if last is sample:
            return None
        move = (last.row, sample.row, last.cached)
        last.row = sample.row
        self.rows[last.row] = last
        return move

    def _computing(self) -> Iterator[Sample]:
        return (sample for sample in self.rows if sample.source is None and sample.cached < sample.due)
