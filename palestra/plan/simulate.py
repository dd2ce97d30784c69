"""The asynchronous loop as events: generators, verifiers, buffer, staleness, trainer, publications, failures.

Between two events a generator decodes all its rows at `base + rows · each` seconds a step. Admission, order and the
bound on staleness are those of `rollout/executor.py`. The same seed gives each group the same lengths in every layout.
"""

import heapq
from collections import deque
from dataclasses import dataclass, field
from itertools import count, groupby
from math import exp, log, sqrt
from random import Random
from typing import NamedTuple


@dataclass(frozen=True)
class Loop:
    """What is simulated; times in seconds."""

    prompts: int
    """Groups of a step."""
    group: int
    staleness: int
    train: float
    """Of a step, publication not included."""
    publish: float
    """In which the trainer waits; generators wait for `fetch` of it."""
    fetch: float
    generators: int
    slots: int
    base: float
    each: float
    start: float
    """Of a prompt, in which its generator decodes nothing."""
    mean: float
    """Tokens of a completion; log-normal, with this ratio of deviation and mean, and at most `longest`."""
    spread: float
    longest: int
    verify: float = 0.0
    verifiers: int = 1
    complete: float = 0.0
    """Of the first trainer's processor for each completion."""
    together: bool = False
    """Generators and trainer share one device: nothing is decoded while it trains."""
    running: int | None = None
    """Most groups in flight."""
    unevenness: float = 0.0
    """Standard deviation of the logarithm of the generators' speeds."""
    generator_mtbf: float = float("inf")
    """Mean time between the failures of one generator: what it has begins again elsewhere."""
    trainer_mtbf: float = float("inf")
    """Of the trainer as a whole: steps since the checkpoint are repeated."""
    restart: float = 120.0
    checkpoint: float = 600.0
    """Between checkpoints."""
    seed: int = 0


class Outcome(NamedTuple):
    """Of the steps after the first ones."""

    step: float
    """Seconds a step, mean."""
    trainer: float
    """Share of the time in which the trainer trains."""
    generator: float
    """Share of the generators' time in which they decode."""
    rows: float
    """Rows of a decode step, mean."""
    tail: float
    """Share of the generators' time in which they decode less than half of the rows that they may have, or nothing."""
    verifiers: float
    """Share of the time in which they verify."""
    age: float
    """Versions between sampling and training, mean."""
    lost: float
    """Share of the time that failures of the trainer cost."""


def lengths(loop: Loop, number: int) -> list[int]:
    """Tokens of the completions of a group."""
    random = Random(f"{loop.seed} {number}")
    if loop.spread == 0:
        return [max(1, min(loop.longest, round(loop.mean)))] * loop.group
    sigma = sqrt(log(1 + loop.spread**2))
    middle = log(loop.mean) - sigma**2 / 2
    return [max(1, min(loop.longest, round(exp(random.gauss(middle, sigma))))) for _ in range(loop.group)]


def simulate(loop: Loop, steps: int = 8) -> Outcome:
    """So many steps after those in which the pipeline fills."""
    simulation = _Simulation(loop)
    simulation.run(loop.staleness + 2)
    begin, busy = simulation.now, simulation.busy()
    simulation.run(loop.staleness + 2 + steps)
    seconds = simulation.now - begin
    trained, verified, lost, decoded, thin, weighted = (b - a for a, b in zip(busy, simulation.busy(), strict=True))
    ages = simulation.ages[-steps * loop.prompts :]
    return Outcome(
        step=seconds / steps,
        trainer=trained / seconds,
        generator=decoded / seconds / loop.generators,
        rows=weighted / max(decoded, 1e-12),
        tail=thin / seconds / loop.generators,
        verifiers=verified / seconds / loop.verifiers,
        age=sum(ages) / len(ages),
        lost=lost / seconds,
    )


class _Row(NamedTuple):
    end: float
    """In decode steps of its generator."""
    number: int
    """Of its group."""
    length: int


@dataclass
class _Generator:
    slowness: float
    rows: list[_Row] = field(default_factory=list)
    """A heap: the first to end comes first."""
    waiting: deque[tuple[int, int]] = field(default_factory=deque)
    """Numbers of groups and lengths."""
    clock: float = 0.0
    """Until when its decode steps are counted."""
    decoded: float = 0.0
    """Decode steps."""
    frozen: float = 0.0
    """Until when it decodes nothing."""
    alarm: int = -1
    """The event at which its first row ends; earlier ones are void."""
    busy: float = 0.0
    thin: float = 0.0
    weighted: float = 0.0
    """Rows times seconds."""


class _Simulation:
    def __init__(self, loop: Loop):
        self.loop, self.now, self.version, self.admitted = loop, 0.0, 0, 0
        random = Random(f"{loop.seed} speeds")
        self.generators = [_Generator(exp(random.gauss(0, loop.unevenness))) for _ in range(loop.generators)]
        self.loads = [0] * loop.generators
        """Completions that each generator has."""
        self.full = min(loop.slots, loop.prompts * loop.group * (loop.staleness + 1) / loop.generators)
        self.events: list[tuple[float, int, str, int]] = []
        self.order = count()
        self.left: dict[int, int] = {}
        """Completions of a group in flight that are not verified."""
        self.born: dict[int, int] = {}
        """The version at which a group was admitted, until it is trained on."""
        self.ready: list[int] = []
        self.unverified: deque[int] = deque()
        self.verifying, self.training = 0, False
        self.trained_for = self.verified_for = self.lost = self.saved = self.penalty = 0.0
        self.ages: list[int] = []
        self.failures = Random(f"{loop.seed} failures")
        for index in range(loop.generators):
            self.fail_later(index, loop.generator_mtbf)
        self.fail_later(-1, loop.trainer_mtbf)
        self.admit()

    def run(self, version: int) -> None:
        while self.version < version:
            self.now, number, kind, what = heapq.heappop(self.events)
            getattr(self, f"on_{kind}")(what, number)

    def busy(self) -> tuple[float, ...]:
        """Seconds of all that work, so far."""
        for generator in self.generators:
            self.advance(generator)
        sums = (sum(getattr(each, name) for each in self.generators) for name in ("busy", "thin", "weighted"))
        return (self.trained_for, self.verified_for, self.lost, *sums)

    def at(self, when: float, kind: str, what: int = 0) -> int:
        number = next(self.order)
        heapq.heappush(self.events, (when, number, kind, what))
        return number

    # ---- generators

    def admit(self) -> None:
        loop = self.loop
        most = (loop.staleness + self.version + 1) * loop.prompts
        while self.admitted < most and (loop.running is None or len(self.left) < loop.running):
            number, self.admitted = self.admitted, self.admitted + 1
            self.born[number], self.left[number] = self.version, loop.group
            self.place([(number, length) for length in lengths(loop, number)], loop.start)

    def place(self, completions: list[tuple[int, int]], start: float) -> None:
        """Give completions of one group to the least busy generator, which decodes nothing during the prompt."""

        index = min(range(len(self.generators)), key=self.loads.__getitem__)
        generator = self.generators[index]
        self.loads[index] += len(completions)
        self.advance(generator)
        generator.waiting.extend(completions)
        generator.frozen = max(generator.frozen, self.now) + start
        self.fill(index)

    def fill(self, index: int) -> None:
        """Start what there is room for, and set the alarm for the row that ends first."""
        generator = self.generators[index]
        while generator.waiting and len(generator.rows) < self.loop.slots:
            number, length = generator.waiting.popleft()
            heapq.heappush(generator.rows, _Row(generator.decoded + length, number, length))
        if generator.rows:
            seconds = (generator.rows[0].end - generator.decoded) * self.pace(generator)
            generator.alarm = self.at(max(self.now, generator.frozen) + seconds, "end", index)

    def pace(self, generator: _Generator) -> float:
        """Seconds of a decode step."""
        return (self.loop.base + len(generator.rows) * self.loop.each) * generator.slowness

    def advance(self, generator: _Generator) -> None:
        """Count what was decoded since the last time."""
        rows, elapsed = len(generator.rows), self.now - max(generator.clock, min(generator.frozen, self.now))
        if rows and elapsed > 0:
            generator.decoded += elapsed / self.pace(generator)
            generator.busy += elapsed
            generator.weighted += rows * elapsed
        generator.thin += (self.now - generator.clock) * (2 * rows < self.full)
        generator.clock = self.now

    def freeze(self, seconds: float) -> None:
        """No generator decodes for so long."""
        for index, generator in enumerate(self.generators):
            self.advance(generator)
            generator.frozen = max(generator.frozen, self.now) + seconds
            self.fill(index)

    def on_end(self, index: int, number: int) -> None:
        generator = self.generators[index]
        if generator.alarm != number:
            return
        self.advance(generator)
        generator.decoded = max(generator.decoded, generator.rows[0].end)
        while generator.rows and generator.rows[0].end <= generator.decoded + 1e-9:
            self.unverified.append(heapq.heappop(generator.rows).number)
            self.loads[index] -= 1
        self.fill(index)
        self.verify()

    # ---- verifiers and trainer

    def verify(self) -> None:
        while self.unverified and self.verifying < self.loop.verifiers:
            self.verifying += 1
            self.at(self.now + self.loop.verify, "verdict", self.unverified.popleft())

    def on_verdict(self, group: int, _: int) -> None:
        self.verifying -= 1
        self.verified_for += self.loop.verify
        self.left[group] -= 1
        self.verify()
        if self.left[group] == 0:
            del self.left[group]
            heapq.heappush(self.ready, group)
            self.admit()
            self.step()

    def step(self) -> None:
        """Train, if a batch is ready and no group is missing that would be too old for the next."""
        loop = self.loop
        if self.training or len(self.ready) < loop.prompts:
            return
        if any(self.born[number] + loop.staleness <= self.version for number in self.left):
            due = sum(born + loop.staleness <= self.version for born in self.born.values())
            if due <= loop.prompts:
                return
        self.ages += [self.version - self.born.pop(heapq.heappop(self.ready)) for _ in range(loop.prompts)]
        self.training = True
        seconds = loop.train + loop.complete * loop.prompts * loop.group
        if loop.together:
            self.freeze(seconds)
        self.at(self.now + seconds, "trained")

    def on_trained(self, _: int, __: int) -> None:
        if self.penalty:
            self.at(self.now + self.penalty, "trained")
            self.penalty = 0.0
            return
        self.trained_for += self.loop.train
        self.freeze(self.loop.publish if self.loop.together else self.loop.fetch)
        self.at(self.now + self.loop.publish, "published")

    def on_published(self, _: int, __: int) -> None:
        self.version, self.training = self.version + 1, False
        if self.now - self.saved >= self.loop.checkpoint:
            self.saved = self.now
        self.admit()
        self.step()

    # ---- failures

    def fail_later(self, index: int, mean: float) -> None:
        if mean < float("inf"):
            self.at(self.now + self.failures.expovariate(1 / mean), "failed" if index >= 0 else "trainer_failed", index)

    def on_trainer_failed(self, index: int, _: int) -> None:
        cost = self.loop.restart + min(self.loop.checkpoint, max(0.0, self.now - self.saved))
        self.penalty, self.lost = self.penalty + cost, self.lost + cost
        self.saved += cost  # what is done again is no progress since the checkpoint
        self.fail_later(index, self.loop.trainer_mtbf)

    def on_failed(self, index: int, _: int) -> None:
        """What a generator has begins again, elsewhere if others have less to do."""
        generator = self.generators[index]
        self.advance(generator)
        again = [(row.number, row.length) for row in generator.rows] + list(generator.waiting)
        generator.rows, generator.waiting, generator.alarm = [], deque(), -1
        generator.frozen = self.now + self.loop.restart
        for _, completions in groupby(sorted(again), key=lambda pair: pair[0]):
            self.place(list(completions), self.loop.start)
        self.loads[index] -= len(again)
        self.fail_later(index, self.loop.generator_mtbf)
