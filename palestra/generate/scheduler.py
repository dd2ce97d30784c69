"""Who runs next: the waiting queue, the rows of the batch, and which prompts a burst computes."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from palestra.generate.jobs import Job, Sample

TURN = 16
"""Samples of a request that start before the next request has its turn. A group of usual size starts together; a
request for a thousand samples does not keep others waiting."""


@dataclass(frozen=True)
class Move:
    """A sample has changed its row; what is cached there must follow."""

    source: int
    target: int
    length: int


class Scheduler:
    """Jobs wait in a queue for rows; running samples fill the first rows without gaps.

    First come, first served, except that a request goes to the end of the queue after each `TURN` samples.
    """

    def __init__(self, rows: int, block: int):
        self.most, self.block = rows, block
        self.waiting: deque[Job] = deque()
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

    def withdraw(self, job: Job) -> None:
        """Start no more samples of a job."""
        if job in self.waiting:
            if self.waiting[0] is job:
                self._turn = 0
            self.waiting.remove(job)

    def pieces(self, budget: int) -> Iterator[tuple[Sample, int]]:
        """Samples, and up to where to compute their tokens now: `budget` tokens or a block more, oldest first.

        A piece that does not reach the end ends at a multiple of a block.
        """
        for sample in sorted(self._computing(), key=lambda sample: sample.age):
            if budget <= 0:
                return
            blocks = -(-budget // self.block)
            end = min(sample.due, sample.cached + blocks * self.block)
            budget -= end - sample.cached
            yield sample, end

    def release(self, sample: Sample) -> Move | None:
        """Take a sample out; the one in the last row moves into its row."""
        last = self.rows.pop()
        if last is sample:
            return None
        move = Move(last.row, sample.row, last.cached)
        last.row = sample.row
        self.rows[last.row] = last
        return move

    def _computing(self) -> Iterator[Sample]:
        return (sample for sample in self.rows if sample.source is None and sample.cached < sample.due)
