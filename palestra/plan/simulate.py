"""The asynchronous loop as events: generators, verifiers, buffer, staleness, trainer, publications, failures.

Between two events a generator decodes all its rows at `base + rows · each` seconds a step. Admission, order and the
bound on staleness are those of `rollout/executor.py`. The same seed gives each group the same lengths in every layout.
"""

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import count, groupby
from math import ceil, exp, inf, log, sqrt
from random import Random
from statistics import NormalDist
from typing import NamedTuple

TRAINER = -1
"""Who fails, if no generator does."""


@dataclass(frozen=True)
class Loop:
    """What is simulated; times in seconds."""

    prompts: int  # groups of a step
    group: int
    staleness: int
    train: float  # of a step, publication not included
    publish: float  # in which the trainer waits; generators wait for `fetch` of it
    fetch: float
    generators: int
    slots: int
    base: float
    each: float
    start: float  # of a prompt, in which its generator decodes nothing
    mean: float  # tokens of a completion; log-normal, with this ratio of deviation and mean, and at most `longest`
    spread: float
    longest: int
    burst: int = 1  # decode steps between which rows may end
    verify: float = 0.0
    verifiers: int = 1
    complete: float = 0.0  # of the first trainer's processor for each completion
    devices: float = inf  # that generators share
    trainers: float = 0.0  # how many of them training takes away; if it takes all, nothing is decoded meanwhile
    running: int | None = None  # most groups in flight
    unevenness: float = 0.0  # standard deviation of the logarithm of the generators' speeds
    restart: float = 0.0  # from a failure to work; a trainer also repeats what was done since a checkpoint
    repeat: float = 0.0
    seed: int = 0

    @property
    def together(self) -> bool:
        """Whether generators and trainer take turns."""
        return self.devices <= self.trainers


class Outcome(NamedTuple):
    """Of the steps after the first ones."""

    step: float  # seconds a step, mean
    trainer: float  # share of the time in which the trainer trains
    generator: float  # share of the generators' time in which they decode
    tail: float
    """Share of the generators' time in which they decode less than half of the rows that they may have, or nothing."""
    verifiers: float  # share of the time in which they verify
    age: float  # versions between sampling and training, mean


def lengths(loop: Loop, number: int) -> list[int]:
    """Tokens of the completions of a group."""
    random, (middle, sigma) = Random(f"{loop.seed} {number}"), _log_normal(loop.mean, loop.spread, loop.longest)
    return [max(1, min(loop.longest, round(exp(random.gauss(middle, sigma))))) for _ in range(loop.group)]


@cache
def _log_normal(mean: float, spread: float, longest: int) -> tuple[float, float]:
    """Mean and deviation of the logarithm, such that what is cut at `longest` has the mean; by bisection."""
    sigma, low, high = sqrt(log(1 + spread**2)), log(mean) - 2 * spread, log(mean) + 3 * spread
    if sigma == 0 or mean >= longest:
        return log(min(mean, longest)), 0.0
    for _ in range(50):
        middle, normal = (low + high) / 2, NormalDist()
        below = exp(middle + sigma**2 / 2) * normal.cdf((log(longest) - middle - sigma**2) / sigma)
        cut = below + longest * (1 - normal.cdf((log(longest) - middle) / sigma))
        low, high = (middle, high) if cut < mean else (low, middle)
    return middle, sigma


def simulate(loop: Loop, steps: int = 8, failures: Sequence[tuple[float, int]] = ()) -> Outcome:
    """So many steps after those in which the pipeline fills; `failures`: times in them, and who (TRAINER or which)."""
    simulation = _Simulation(loop)
    simulation.run(loop.staleness + 2)
    begin, busy = simulation.now, simulation.busy()
    for when, who in failures:
        simulation.at(begin + when, simulation.failed, who)
    simulation.run(loop.staleness + 2 + steps)
    seconds, ages = simulation.now - begin, simulation.ages[-steps * loop.prompts :]
    trained, verified, decoded, thin = (b - a for a, b in zip(busy, simulation.busy(), strict=True))
    each = seconds * loop.generators
    shares = trained / seconds, decoded / each, thin / each, verified / seconds / loop.verifiers
    return Outcome(seconds / steps, *shares, sum(ages) / len(ages))


class _Row(NamedTuple):
    end: float  # in decode steps of its generator
    number: int  # of its group
    length: int


@dataclass
class _Generator:
    slowness: float
    rows: list[_Row] = field(default_factory=list)  # A heap: the first to end comes first
    waiting: deque[tuple[int, int]] = field(default_factory=deque)  # numbers of groups and lengths
    clock: float = 0.0  # until when its decode steps are counted
    decoded: float = 0.0  # decode steps
    frozen: float = 0.0  # until when it decodes nothing
    alarm: int = -1  # the event at which its first row ends; earlier ones are void
    load: int = 0  # completions that it has
    busy: float = 0.0
    thin: float = 0.0


class _Simulation:
    def __init__(self, loop: Loop):
        self.loop, self.now, self.version, self.admitted = loop, 0.0, 0, 0
        random = Random(f"{loop.seed} speeds")
        self.generators = [_Generator(exp(random.gauss(0, loop.unevenness))) for _ in range(loop.generators)]
        self.full = min(loop.slots, loop.prompts * loop.group * (loop.staleness + 1) / loop.generators)
        self.events: list[tuple] = []  # when, number, what to call and with what
        self.order = count()
        self.left: dict[int, int] = {}
        """Completions of a group in flight that are not verified."""
        self.born: dict[int, int] = {}
        """The version at which a group was admitted, until it is trained on."""
        self.ready: list[int] = []
        self.unverified: deque[int] = deque()
        self.verifying, self.training = 0, False
        self.trained_for = self.verified_for = self.penalty = 0.0
        self.ages: list[int] = []
        self.admit()

    def run(self, version: int) -> None:
        while self.version < version:
            self.now, self.event, call, given = heapq.heappop(self.events)
            call(*given)

    def at(self, when: float, call: object, *given: object) -> int:
        number = next(self.order)
        heapq.heappush(self.events, (when, number, call, given))
        return number

    def busy(self) -> tuple[float, ...]:
        """Seconds of all that work, so far."""
        for generator in self.generators:
            self.advance(generator)
        sums = (sum(getattr(each, name) for each in self.generators) for name in ("busy", "thin"))
        return (self.trained_for, self.verified_for, *sums)

    # ---- generators

    def admit(self) -> None:
        loop = self.loop
        most = (loop.staleness + self.version + 1) * loop.prompts
        while self.admitted < most and (loop.running is None or len(self.left) < loop.running):
            number, self.admitted = self.admitted, self.admitted + 1
            self.born[number], self.left[number] = self.version, loop.group
            self.place([(number, loop.burst * ceil(length / loop.burst)) for length in lengths(loop, number)])

    def place(self, completions: list[tuple[int, int]]) -> None:
        """Give completions of one group to the least busy generator, which decodes nothing during the prompt."""
        generator = min(self.generators, key=lambda each: each.load)
        generator.load += len(completions)
        generator.waiting.extend(completions)
        self.freeze(generator, self.loop.start)

    def freeze(self, generator: _Generator, seconds: float = 0.0) -> None:
        """Decode nothing for so long; start what there is room for, and set the alarm for the row that ends first."""
        self.advance(generator)
        generator.frozen = max(generator.frozen, self.now) + seconds
        while generator.waiting and len(generator.rows) < self.loop.slots:
            number, length = generator.waiting.popleft()
            heapq.heappush(generator.rows, _Row(generator.decoded + length, number, length))
        if generator.rows:
            left = (generator.rows[0].end - generator.decoded) * self.pace(generator)
            generator.alarm = self.at(generator.frozen + left, self.ended, generator)

    def pace(self, generator: _Generator) -> float:
        """Seconds of a decode step; while both take turns, generators have all devices whenever they decode."""
        loop = self.loop
        crowd = loop.generators / (loop.devices - self.training * loop.trainers * (not loop.together))
        return (loop.base + len(generator.rows) * loop.each) * generator.slowness * max(1.0, crowd)

    def advance(self, generator: _Generator) -> None:
        """Count what was decoded since the last time."""
        elapsed = self.now - max(generator.clock, min(generator.frozen, self.now))
        if generator.rows and elapsed > 0:
            generator.decoded += elapsed / self.pace(generator)
            generator.busy += elapsed
        generator.thin += (self.now - generator.clock) * (2 * len(generator.rows) < self.full)
        generator.clock = self.now

    def ended(self, generator: _Generator) -> None:
        if generator.alarm != self.event:
            return
        self.advance(generator)
        generator.decoded = max(generator.decoded, generator.rows[0].end)
        while generator.rows and generator.rows[0].end <= generator.decoded + 1e-9:
            self.unverified.append(heapq.heappop(generator.rows).number)
            generator.load -= 1
        self.freeze(generator)
        self.verify()

    # ---- verifiers and trainer

    def verify(self) -> None:
        while self.unverified and self.verifying < self.loop.verifiers:
            self.verifying += 1
            self.at(self.now + self.loop.verify, self.verified, self.unverified.popleft())

    def verified(self, group: int) -> None:
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
        oldest = self.version - loop.staleness
        due = sum(born <= oldest for born in self.born.values())
        if due <= loop.prompts and any(self.born[number] <= oldest for number in self.left):
            return
        self.ages += [self.version - self.born.pop(heapq.heappop(self.ready)) for _ in range(loop.prompts)]
        seconds = loop.train + loop.complete * loop.prompts * loop.group
        self.switch(True, seconds if loop.together else 0.0)
        self.at(self.now + seconds, self.trained)

    def switch(self, training: bool, frozen: float = 0.0) -> None:
        """Training begins, publishes or ends, which changes what generators have."""
        for generator in self.generators:
            self.advance(generator)
        self.training = training
        for generator in self.generators:
            self.freeze(generator, frozen)

    def trained(self) -> None:
        if self.penalty:
            self.at(self.now + self.penalty, self.trained)
            self.penalty = 0.0
            return
        self.trained_for += self.loop.train
        self.switch(True, self.loop.publish if self.loop.together else self.loop.fetch)
        self.at(self.now + self.loop.publish, self.published)

    def published(self) -> None:
        self.version += 1
        self.switch(False)
        self.admit()
        self.step()

    def failed(self, who: int) -> None:
        """The trainer comes late; what a generator has begins again, elsewhere if others have less to do."""
        if who == TRAINER:
            self.penalty += self.loop.restart + self.loop.repeat
            return
        generator = self.generators[who]
        self.advance(generator)
        again = [(row.number, row.length) for row in generator.rows] + list(generator.waiting)
        generator.rows, generator.waiting, generator.alarm = [], deque(), -1
        generator.frozen = self.now + self.loop.restart
        for _, completions in groupby(sorted(again), key=lambda pair: pair[0]):
            self.place(list(completions))
        generator.load -= len(again)
