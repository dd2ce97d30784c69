"""The running batch: the waiting queue, which prompts a burst computes, and the state of every row."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from palestra.generate.engine.pages import PAGE, SCRATCH, PagePool, pages_for
from palestra.generate.engine.request import MOST_ENDS, Alternatives, EngineJob, Sample
from palestra.generate.engine.sampler import Needs, Settings, sample
from palestra.generate.engine.score_edits import ScoreEdits
from palestra.lm.layers import TRITON

APART = 0x9E3779B97F4A7C15
"""The distance between the seeds of a request's samples, modulo 2⁶⁴."""
ALL = 2**62
"""A top_k that keeps every token."""
OWN = 5
"""The first of a row's integers, up to how many tokens it has sampled: steps change them, the others only the host."""


class BatchRows:
    """State of the rows, as views of four tensors: a device gets all of it in four copies."""

    def __init__(self, integers: Tensor, floats: Tensor, ends: Tensor, tables: Tensor):
        """`integers` (10, rows) int64, `floats` (3, rows) FP32.

        `ends` (rows, MOST_ENDS) int64 are the tokens that end the sequence, the first one repeated; −1 where there are
        none. `tables` (rows, n) int32 are the pages of the sequence in the cache, and scratch behind them; all scratch
        in a row that is not sampled.
        """
        self.integers, self.floats, self.ends, self.tables = integers, floats, ends, tables
        # The last token of the sequence, not yet in the cache; how many tokens are in the cache, which is also the
        # position of `token`; 1 where tokens are sampled (the output of other rows is ignored); how many tokens may
        # still be sampled.
        self.token, self.length, self.active, self.remaining = integers[:4]
        # What is added to a length to get the rotary position; not 0 after images.
        self.shift = integers[8]
        # The row of the last burst that this one goes on from; −1 where it begins with what the host has written.
        self.source = integers[-1]
        # The host writes a few numbers at a time, which takes NumPy a tenth of torch's time.
        self._arrays = [t.numpy() for t in self.parts] if integers.device.type == "cpu" else []

    @classmethod
    def empty(cls, rows: int, context: int, device: torch.device) -> "BatchRows":
        """Rows in which nothing runs, for sequences of up to `context` tokens."""
        return cls(
            torch.zeros(10, rows, dtype=torch.int64, device=device),
            torch.zeros(3, rows, dtype=torch.float32, device=device),
            torch.full((rows, MOST_ENDS), -1, dtype=torch.int64, device=device),
            torch.full((rows, pages_for(context)), SCRATCH, dtype=torch.int32, device=device),
        )

    @property
    def parts(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """All of it."""
        return self.integers, self.floats, self.ends, self.tables

    def settings(self, batch: int) -> Settings:
        """How the first rows are sampled."""
        sampled, minimum, seed, top_k = self.integers[4:8, :batch]
        temperature, top_p, min_p = self.floats[:, :batch]
        return Settings(temperature, top_k, top_p, min_p, seed, sampled, minimum, self.ends[:batch])

    def start(self, samples: Sequence[Sample]) -> None:
        """Write the rows of samples whose tokens but the last are cached: they are sampled from now on."""
        rows = torch.tensor([sample.row for sample in samples])
        # In the order of `token`, `length`, `active`, `remaining`, `settings`, `shift` and `source`.
        self.integers[:, rows] = torch.tensor([_integers(sample) for sample in samples]).T
        settings = [sample.job.sampling for sample in samples]
        self.floats[:, rows] = torch.tensor([(s.temperature, s.top_p, s.min_p) for s in settings]).T
        ends = (sample.job.ends for sample in samples)
        self.ends[rows] = torch.tensor([(tokens + (tokens[:1] or (-1,)) * MOST_ENDS)[:MOST_ENDS] for tokens in ends])
        for started in samples:
            self.add_pages(started.row, 0, started.pages)

    def add_pages(self, row: int, first: int, pages: Sequence[int]) -> None:
        """The pages of a sequence from number `first` on, on the host."""
        self._arrays[3][row, first : first + len(pages)] = pages

    def stop(self, first: int, end: int, moves: Sequence[tuple[int, int]]) -> None:
        """Move rows to the places of others, then stop sampling in those from `first` to `end`, on the host.

        What an idle row computes goes to scratch.
        """
        integers, floats, ends, tables = self._arrays
        if moves:
            sources, targets = map(list, zip(*moves, strict=True))
            integers[:, targets], floats[:, targets] = integers[:, sources], floats[:, sources]
            ends[targets], tables[targets] = ends[sources], tables[sources]
        integers[1:3, first:end], integers[-1, first:end] = 0, -1
        tables[first:end] = SCRATCH

    def stop_all(self) -> None:
        """Stop sampling in all rows, on the host."""
        self.integers[1:3].zero_()
        self.source.fill_(-1)
        self.tables.fill_(SCRATCH)

    def go_on(self) -> None:
        """From now on what the host writes is for the burst after one that was just started."""
        torch.arange(self.integers.shape[1], out=self.source)

    def follow(self, new: Tensor) -> None:
        """Take over the host's integers, but go on from what the last burst left where it did not begin a row anew."""
        source = new[-1]
        left = self.integers[:OWN].index_select(1, source.clamp(min=0))
        self.integers.copy_(new)
        self.integers[:OWN] = torch.where(source >= 0, left, new[:OWN])

    def copy_(self, other: "BatchRows") -> None:
        """Take over all rows of another."""
        for own, new in zip(self.parts, other.parts, strict=True):
            own.copy_(new)


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
            likeliest = self._steps.top_tokens[:count, row].tolist()
            for pairs in map(zip, likeliest, self._steps.top_logprobs[:count, row].tolist()):
                # What the filters took away has −inf.
                top.append(tuple(pair for pair in pairs if pair[1] > float("-inf"))[:alternatives])
        return self._tokens[row][:count], self._logprobs[row][:count], top


class Burst(NamedTuple):
    """A burst in flight."""

    running: list[tuple[Sample, int]]
    """The samples that it samples, and their rows."""
    steps: int
    version: int
    output: Callable[[], DecodeStep]
    """Waits for it."""


def advance(rows: BatchRows, scores: Tensor, needs: Needs, edits: ScoreEdits | None = None) -> DecodeStep:
    """Sample from scores (B, V), which `edits` change first, and advance the first B rows to their next token.

    The host waits for nothing.
    """
    batch = len(scores)
    if edits is not None:
        edits.apply_(scores)
    if scores.is_cuda and needs.plain and TRITON:
        from palestra.generate.engine.decode_kernel import sample_and_advance

        tokens, logprobs, counted = sample_and_advance(scores, rows.integers, rows.floats[0], rows.ends)
        return DecodeStep(tokens, logprobs, counted, tokens[:, None][:, :0], logprobs[:, None][:, :0])
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
        job.shift,
        -1,
    )


TURN = 16
"""Samples of a request that start before the next request has its turn. A group of usual size starts together; a
request for a thousand samples does not starve the others."""
PATIENCE, FEW = 4, 4
"""Bursts for which samples wait that are fewer than a FEW-th of those that run."""


class Scheduler:
    """Jobs wait in a queue for rows and pages; running samples fill the first rows without gaps.

    First come, first served, except that a request goes to the end of the queue after each `TURN` samples, and that
    samples which had to give back their pages come before all others.
    """

    def __init__(self, rows: int, pool: PagePool, steps: int, exact: bool):
        """A burst has at most `steps` steps. With `exact` a sample gets the pages of all it may generate at once."""
        self.most, self.pool, self.steps, self.exact = rows, pool, steps, exact
        self.waiting: deque[EngineJob] = deque()
        """Jobs with samples that have not started."""
        self.preempted: list[Sample] = []
        """Samples that have started and wait for pages, the first to start first."""
        self.rows: list[Sample] = []
        self.sharing: list[Sample] = []
        """Those that wait for the last page of another one's prompt."""
        self._turn = self._started = self._admitted = self._waited = 0
        self._computing: set[int] = set()
        """Pages that can be matched, but are yet to be computed by the first sample that has them."""

    def patient(self) -> bool:
        """Whether those that wait, few beside those that run, wait for others, for `PATIENCE` bursts at most.

        To launch a prefill takes the host as long for few as for many.
        """
        waiting = sum(job.request.n - job.started for job in self.waiting) + len(self.preempted)
        running = sum(sample.ahead > 0 for sample in self.rows) if waiting else 0
        few = 0 < waiting * FEW < running and not any(job.sink.streams for job in self.waiting)
        self._waited = self._waited + 1 if few and self._waited < PATIENCE else 0
        return self._waited > 0

    def admit(self, budget: int) -> list[Sample]:
        """Give rows and pages to waiting samples, while there are any and less than `budget` tokens are to be computed.

        So `pieces` of the same budget complete the prompts whose pages others share.
        """
        if not self.waiting and not self.preempted:
            return []
        admitted = []
        pending = sum(sample.due - sample.cached for sample in self._incomplete())
        room = self.pool.available - sum(map(self.lacking, self.rows))
        sources: dict[int, Sample] = {}  # the first row with a prompt, by the prompt's hash
        for other in self.rows:
            if other.shareable:
                sources.setdefault(other.job.key, other)
        while len(self.rows) < self.most and pending < budget and (self.preempted or self.waiting):
            again = bool(self.preempted)
            sample = self.preempted[0] if again else Sample(self.waiting[0], self.waiting[0].started, self._started)
            spent, job = self._give_pages(sample, room), sample.job
            if spent is None:
                break
            room -= spent
            if not sample.tokens:
                source = sources.setdefault(job.key, sample)
                if not source.job.same_prompt(job):  # only the hash is the same
                    source = next((s for s in self.rows if s.shareable and s.job.same_prompt(job)), sample)
                if source is not sample:
                    sample.source = source
                    self.sharing.append(sample)
            sample.row, sample.age, sample.shareable = len(self.rows), self._admitted, True
            self._admitted += 1
            self.rows.append(sample)
            admitted.append(sample)
            if sample.source is None:
                pending += sample.due - sample.cached
            if again:
                self.preempted.pop(0)
            else:
                self._start_next(job)
        return admitted

    def _give_pages(self, sample: Sample, room: int) -> int | None:
        """Give a sample pages for what it has, those of its beginning that others have too; None where room lacks.

        Returns how many that took of the room.
        """
        tokens, due = sample.keys, sample.due
        shared = self.pool.match(tokens, due)
        needed = pages_for(sample.most if self.exact else due + 1)
        ahead = pages_for(min(due + self.steps, sample.most)) - needed
        spent = needed - len(shared) + self.pool.idle(shared) + max(0, ahead)
        if spent > room:
            return None
        self.pool.share(shared)
        own = self.pool.take(needed - len(shared))
        sample.pages, sample.cached = [*shared, *own], PAGE * len(shared)
        self.pool.remember(sample.pages, tokens, due)
        self._computing.update(own[: due // PAGE - len(shared)])
        return spent

    def lacking(self, sample: Sample) -> int:
        """How many more pages a sample needs for a burst, behind what is being sampled."""
        most, ahead = sample.job.limit, len(sample.tokens) - 1 + sample.ahead + self.steps
        return max(0, pages_for(len(sample.job.keys) + min(ahead, most)) - len(sample.pages))

    def _start_next(self, job: EngineJob) -> None:
        """Count a sample of the first job as started, and let the next job have its turn."""
        job.started += 1
        self._started += 1
        self._turn += 1
        if job.started == job.request.n:
            self.waiting.popleft()
            self._turn = 0
        elif self._turn == TURN:
            self.waiting.rotate(-1)
            self._turn = 0

    def withdraw(self, job: EngineJob) -> list[Sample]:
        """Start no more samples of a job, nor go on with preempted ones; returns all that have started."""
        if job in self.waiting:
            if self.waiting[0] is job:
                self._turn = 0
            self.waiting.remove(job)
        started = [sample for sample in (*self.rows, *self.preempted) if sample.job is job]
        self.preempted = [sample for sample in self.preempted if sample.job is not job]
        return started

    def pieces(self, budget: int) -> Iterator[tuple[Sample, int]]:
        """Samples, and up to where to compute their tokens now: `budget` tokens or a page more.

        In the order in which they were admitted: what one reads of another's pages has been computed before, or is in
        the same pass. A piece that does not reach the end ends with a page.
        """
        for running in sorted(self._incomplete(), key=lambda sample: sample.age):
            if budget <= 0:
                return
            end = min(running.due, running.cached + pages_for(budget) * PAGE)
            budget -= end - running.cached
            yield running, end

    def computed(self, sample: Sample, length: int) -> None:
        """Note that the first `length` tokens of a sample are cached."""
        self._computing.difference_update(sample.pages[sample.cached // PAGE : length // PAGE])
        sample.cached = length

    def ready(self) -> list[Sample]:
        """Samples that can be sampled from now on."""
        waiting = (s for s in self.rows if not s.active and s.source is None and s.cached == s.due)
        return [s for s in waiting if self._computing.isdisjoint(s.pages)]

    def remember(self, sample: Sample) -> None:
        """Let later prompts share a sample's full pages, those of generated tokens too; not where it must be exact."""
        if sample.shareable and not self.exact:
            self.pool.remember(sample.pages, sample.keys, min(sample.cached, sample.due))

    def release(self, samples: Sequence[Sample]) -> list[tuple[int, int]]:
        """Take samples out; those that stay and are in the last rows move into theirs: from where, and to where."""
        left, gone = len(self.rows) - len(samples), {ended.row for ended in samples}
        for ended in samples:
            self._give_back(ended)
        staying = [other for other in self.rows[left:] if other.row not in gone]
        moves = list(zip((other.row for other in staying), (row for row in gone if row < left), strict=True))
        for other, (_, row) in zip(staying, moves, strict=True):
            other.row, self.rows[row] = row, other
        del self.rows[left:]
        for ended in samples:
            ended.row, ended.active, ended.source = -1, False, None
        if self.sharing:
            self.sharing = [other for other in self.sharing if other.source is not None]
        return moves

    def _give_back(self, sample: Sample) -> None:
        """The pages of a sample; of those that it has not computed, the oldest other one that has them does."""
        lost = self._computing.intersection(sample.pages[sample.cached // PAGE :]) if self._computing else set()
        for other in self.sharing:
            if other.source is sample:
                other.source = None
        for other in sorted(self.rows, key=lambda other: other.age) if lost else ():
            if other is not sample and not lost.isdisjoint(other.pages):
                first = next(i for i, page in enumerate(other.pages) if page in lost)
                other.cached = min(other.cached, first * PAGE)
                lost.difference_update(other.pages)
        self._computing -= lost
        self.pool.forget(sorted(lost))
        self.remember(sample)
        self.pool.release(sample.pages)
        sample.pages = []

    def put_back(self, sample: Sample) -> None:
        """Let a sample that was released go on later: what it had cached is computed again."""
        sample.cached = 0
        self.preempted.append(sample)
        self.preempted.sort(key=lambda sample: sample.number)

    def _incomplete(self) -> Iterator[Sample]:
        return (sample for sample in self.rows if sample.source is None and sample.cached < sample.due)
