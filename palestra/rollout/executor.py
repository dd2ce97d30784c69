"""The asynchronous executor: admission by staleness, groups in flight, filters, batches.

Prompts are numbered at admission. The trainer's thread calls everything here; workflows run on another thread's event
loop and only hand in their results. With `staleness: 0` a batch is the first groups by number that pass the filter,
trained in that order, so timing cannot change numbers.
"""

import asyncio
import contextlib
import logging
import math
import queue
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from palestra.errors import PalestraError
from palestra.generate.types import GROUP
from palestra.rollout.event_loop import LoopThread
from palestra.rollout.records import group_state, load_group
from palestra.rollout.types import Group, Trajectory
from palestra.spec.algorithm import FiltersSpec
from palestra.spec.imports import load_named
from palestra.spec.kinds.posttrain import RolloutSpec
from palestra.tasks.stream import Prompts
from palestra.tasks.task import Problem, Status

log = logging.getLogger("palestra.rollout")

WAIT_SECONDS = 0.05  # for verifiers and workflows, when there is nothing to generate
Fate = Literal["trained", "filtered", "stale", "failed", "too_long", "timeout"]
LONG_IN_A_ROW = 1000  # consecutive over-long prompts after which the run fails
FILTERED_BATCHES = 8  # log a warning each time this many batches were filtered with none to train on
SAME = 1e-6  # rewards closer than this are equal: dense scores carry rounding


class RolloutTimeout(PalestraError):
    """A workflow exceeded its timeout."""


@dataclass
class InFlight:
    """A numbered prompt whose workflow runs or is to be started again."""

    number: int
    problem: Problem
    version: int = 0
    """Of the weights at admission."""
    since: float = 0.0


Ended = asyncio.Task[list[Trajectory]]
"""A workflow that has ended."""
Start = Callable[[Problem, int, int], Awaitable[list[Trajectory]] | None]
"""Starts the workflow of a problem, given its number and attempt; None where its prompt is too long."""
Filter = Callable[[Group], str | None]
"""Why a group is not trained on, in a word that names its metric; None where it is."""


class Executor:
    """Admits prompts while running + accepted < (staleness + version + 1) · batch; batches are always full."""

    def __init__(
        self,
        prompts: Prompts,
        start: Start,
        spec: RolloutSpec,
        *,
        loop: LoopThread,
        batch: int,
        total: int | None = None,
        filter: Filter = lambda group: None,
    ):
        """`total` is how many groups the run trains on, beyond which no prompt is started."""
        self.prompts, self.spec, self.batch = prompts, spec, batch
        self.version = 0
        """Of the weights that generate; the trainer sets it when it publishes."""
        self.totals: Counter[Fate] = Counter()
        """Prompts by fate."""
        self.settled = 0
        """How many workflows have ended, which shows progress."""
        self.reasons: Counter[str] = Counter()
        """Filtered groups by reason."""
        self._start, self._loop, self._total, self._filter = start, loop, total, filter
        self._next = self._long = 0
        self._unused: Counter[str] = Counter()  # why groups since the last batch are not trained on
        self._again: deque[InFlight] = deque()
        self._attempts: Counter[int] = Counter()  # of numbers whose completions were too stale
        self._running: dict[int, InFlight] = {}
        self._ready: dict[int, Group] = {}
        self._settled: list[Group] = []  # filtered since the last batch, to be observed with the next one
        self._finished: queue.SimpleQueue[tuple[InFlight, Ended]] = queue.SimpleQueue()
        self.wake: Callable[[], None] = lambda: None
        """Called, from any thread, when a workflow has ended."""

    def take(self, work: Callable[[float], bool]) -> tuple[list[Group], list[Group]]:
        """The groups of the next batch, and those filtered since the last one; both by number.

        Meanwhile `work(seconds)` generates, or waits at most that long where there is nothing to generate.
        """
        while True:
            self.collect()
            self.admit()
            if (chosen := self._choose()) is not None:
                break
            work(WAIT_SECONDS)
        taken, filtered = [self._ready.pop(number) for number in chosen], self._settled
        self._settled, self._unused = [], Counter()
        for group in taken:
            self._attempts.pop(group.number, None)
        self.totals["trained"] += len(taken)
        for group in sorted([*taken, *filtered], key=lambda group: group.number):
            self.prompts.observe(group.problem, [t.verdict.score for t in group.episodes])
        return taken, sorted(filtered, key=lambda group: group.number)

    def admit(self) -> None:
        """Start as many prompts as the bound allows; all send their requests before the first token is sampled."""
        started: list[InFlight] = []
        workflows = []

        def hand_in(place: int, task: Ended) -> None:
            self._finished.put((started[place], task))
            self.wake()

        try:
            while self._room() > 0:
                if self._again:
                    order = self._again.popleft()
                else:
                    order = InFlight(self._next, self.prompts.sample(self._next))
                    self._next += 1
                workflow = self._start(order.problem, order.number, self._attempts[order.number])
                if workflow is None:
                    self._too_long()
                    continue
                self._long = 0
                order.version, order.since = self.version, time.monotonic()
                self._running[order.number] = order
                started.append(order)
                workflows.append(_limited(workflow, self.spec.timeout_seconds, order.number))
        finally:
            if started:
                self._loop.start_all(workflows, hand_in)

    def collect(self) -> None:
        """Take in the results of finished workflows."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._settle(*self._finished.get_nowait())

    def publish(self, version: int) -> None:
        """New weights generate from now on."""
        self.version = version

    def metrics(self) -> dict[str, float]:
        metrics = {"rollout/running": float(len(self._running)), "rollout/ready": float(len(self._ready))}
        metrics |= {f"fate/{fate}": float(self.totals[fate]) for fate in get_args(Fate)}
        metrics |= {f"filtered/{reason}": float(n) for reason, n in self.reasons.items()}
        return metrics | self.prompts.metrics()

    def describe(self) -> str:
        """The groups in flight, for the watchdog's log."""
        now = time.monotonic()
        lines = [
            f"version {self.version}: {len(self._ready)} of {self.batch} groups are ready, {len(self._running)} "
            f"in flight, {len(self._again)} to be started again, room for {self._room()} more"
        ]
        for order in sorted(self._running.copy().values(), key=lambda order: order.since)[:8]:
            lines.append(f"  number {order.number} ({order.problem.id}) has run for {now - order.since:.1f} s")
        return "\n".join(lines)

    def state(self) -> dict[str, Any]:
        """Finished groups whole; unfinished ones as numbered prompts, to be started again.

        What `collect` has not taken in counts as unfinished.
        """
        unfinished = sorted([*self._again, *self._running.values()], key=lambda order: order.number)
        return {
            "next": self._next,
            "version": self.version,
            "unfinished": [[order.number, order.problem.id] for order in unfinished],
            "attempts": [[number, count] for number, count in sorted(self._attempts.items())],
            "ready": [group_state(group) for group in self._ready.values()],
            "settled": [group_state(group) for group in self._settled],
            "unused": dict(sorted(self._unused.items())),
            "totals": dict(sorted(self.totals.items())),
            "reasons": dict(sorted(self.reasons.items())),
            "prompts": self.prompts.state(),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        self.prompts.load_state(state["prompts"])
        self._next, self.version = state["next"], state["version"]
        find = self.prompts.find
        self._again = deque(InFlight(number, find(id)) for number, id in state["unfinished"])
        self._attempts = Counter(dict(state["attempts"]))
        self._ready = {group.number: group for group in (load_group(row, find) for row in state["ready"])}
        self._settled = [load_group(row, find) for row in state["settled"]]
        self._unused = Counter(state.get("unused", {}))  # earlier versions did not count them
        self.totals, self.reasons = Counter(state["totals"]), Counter(state["reasons"])

    def _room(self) -> int:
        bound = (self.spec.staleness + self.version + 1) * self.batch
        bound = bound if self._total is None else min(bound, self._total)
        room = bound - self.totals["trained"] - len(self._ready) - len(self._running)
        running = self.spec.running
        return room if running is None else min(room, running - len(self._running))

    def _too_long(self) -> None:
        self.totals["too_long"] += 1
        self._long += 1
        if self._long >= LONG_IN_A_ROW:
            raise PalestraError(
                f"{self._long} prompts in a row are too long: raise rollout.max_prompt_tokens, lower "
                "rollout.max_new_tokens, or use a model with a longer context"
            )

    def _settle(self, order: InFlight, ended: Ended) -> None:
        """Decide the fate of a finished prompt."""
        del self._running[order.number]
        self.settled += 1
        error = asyncio.CancelledError() if ended.cancelled() else ended.exception()
        if isinstance(error, RolloutTimeout):
            log.warning("the rollout of %s %s and was cancelled", order.problem.id, error)
            self._unusable("timeout", "timeout")
            return
        if error is not None:
            self._fail(order, error)
            return
        completed = [_finite(t, order.problem.id) for t in ended.result()]
        left_out = {Status.ERROR, Status.TIMEOUT} if self.spec.on_timeout == "exclude" else {Status.ERROR}
        verified = tuple(t for t in completed if t.verdict.status not in left_out)
        if not verified and any(t.verdict.status == Status.TIMEOUT for t in completed):
            log.warning("%s: none of %d completions was verified in time", order.problem.id, len(completed))
            self._unusable("timeout", "timeout")
            return
        if not verified:
            why = completed[0].verdict.note if completed else "its workflow returned none"
            self._fail(order, PalestraError(f"no completion of {order.problem.id} could be verified: {why}"))
            return
        if len(verified) < len(completed):
            notes = "; ".join(sorted({t.verdict.note for t in completed if t.verdict.status in left_out}))[:500]
            failed = len(completed) - len(verified)
            log.warning("%s: %d of %d completions not verified: %s", order.problem.id, failed, len(completed), notes)
        seconds = time.monotonic() - order.since
        group = Group(order.number, order.problem, order.version, verified, self.spec.group, seconds)
        reason = self._filter(group)
        if reason is None:
            self._ready[group.number] = group
            return
        self._settled.append(group)
        self.reasons[reason] += 1
        self._unusable("filtered", reason)
        if len(self._settled) % (FILTERED_BATCHES * self.batch) == 0:
            log.warning(
                "%d groups in a row were filtered out (%s), and %d of %d are ready to be trained on; their rewards: %s",
                len(self._settled), ", ".join(f"{why} {n}" for why, n in self.reasons.most_common()),
                len(self._ready), self.batch, self._rewards(),
            )  # fmt: skip

    def _rewards(self) -> str:
        """Some rewards of the groups filtered since the last batch, for messages."""
        rewards = sorted({round(reward, 6) for group in self._settled for reward in group.rewards})
        return ", ".join(f"{reward:g}" for reward in rewards[:5]) or "none"

    def _unusable(self, fate: Fate, reason: str) -> None:
        """Count a group that is not trained on; too many since the last batch end the run."""
        self.totals[fate] += 1
        self._unused[reason] += 1
        groups, most = self._unused.total(), self.spec.max_filtered_batches
        if most is not None and groups >= most * self.batch:
            reasons = ", ".join(f"{why} {n}" for why, n in self._unused.most_common())
            raise PalestraError(
                f"{groups} groups since the last batch are not trained on ({reasons}), and {len(self._ready)} of "
                f"{self.batch} are ready; their rewards: {self._rewards()}. "
                "Take easier or harder prompts, raise rollout.group, or raise rollout.max_filtered_batches = "
                f"{most} (null sets no limit)"
            )

    def _fail(self, order: InFlight, error: BaseException) -> None:
        self.totals["failed"] += 1
        failed = self.totals["failed"]
        if failed > self.spec.failures:
            raise PalestraError(
                f"the rollout of {order.problem.id} (number {order.number}) failed: {type(error).__name__}: {error}"
            ) from error
        log.warning("prompt %s failed (%d of at most %d): %s", order.problem.id, failed, self.spec.failures, error)

    def _choose(self) -> list[int] | None:
        """The numbers of the next batch, the lowest that are ready; None while it has to wait."""
        self._drop_stale()
        if len(self._ready) < self.batch or (self.spec.on_stale == "wait" and self._too_early()):
            return None
        return sorted(self._ready)[: self.batch]

    def _too_early(self) -> bool:
        """Whether a batch without those in flight would leave more old groups than later batches can take.

        A group of version s is trained at version s + staleness at the latest: after this batch, at version v, at most
        (s + staleness - v) · batch groups of version s or older may be left, for every s.
        """
        ready = Counter(group.version for group in self._ready.values())
        all_ = ready + Counter(order.version for order in self._running.values())
        done = left = 0
        for version in sorted(all_):
            done, left = done + ready[version], left + all_[version]
            later = (version + self.spec.staleness - self.version) * self.batch
            if left - later > min(done, self.batch) and left > done:  # and some in flight would help
                return True
        return False

    def _drop_stale(self) -> None:
        """Start groups again whose tokens are older than the bound."""
        bound = self.version - self.spec.staleness
        late = [group for group in self._ready.values() if group.oldest < bound]
        for group in sorted(late, key=lambda group: group.number):
            del self._ready[group.number]
            self.totals["stale"] += 1
            self._attempts[group.number] += 1
            self._again.append(InFlight(group.number, group.problem))


def _finite(trajectory: Trajectory, id: str) -> Trajectory:
    """A non-finite reward counts as a verifier error."""
    reward, verdict = trajectory.reward, trajectory.verdict
    if math.isfinite(reward) and math.isfinite(verdict.score):
        return trajectory
    note = f"the reward of a completion of {id} is {reward}, and its score {verdict.score}"
    return replace(trajectory, verdict=replace(verdict, status=Status.ERROR, note=note))


async def _limited(coroutine: Awaitable[list[Trajectory]], seconds: float, number: int) -> list[Trajectory]:
    GROUP.set(number)
    limit = asyncio.timeout(seconds)
    try:
        async with limit:
            return await coroutine
    except TimeoutError as error:
        if not limit.expired():  # the workflow's own
            raise
        raise RolloutTimeout(f"took longer than {seconds:g} s") from error


class FilterFailed(PalestraError):
    """The user's filter raised or did not return a bool; its exception is the cause."""


def make_filter(spec: FiltersSpec) -> Filter:
    """The filter of a spec. Reasons: zero_variance, too_short, too_long, and the name of the user's function."""
    keep = None if spec.function is None else load_named(spec.function, "algorithm.filters.function")

    def reason(group: Group) -> str | None:
        if spec.zero_variance and max(group.rewards) - min(group.rewards) <= SAME:
            return "zero_variance"
        lengths = [trajectory.sampled for trajectory in group.trajectories]
        if spec.min_tokens is not None and min(lengths) < spec.min_tokens:
            return "too_short"
        if spec.max_tokens is not None and max(lengths) > spec.max_tokens:
            return "too_long"
        if keep is not None and spec.function is not None and not _kept(keep, spec.function, group):
            return spec.function.rpartition(":")[2]
        return None

    return reason


def _kept(keep: Callable[[Group], object], name: str, group: Group) -> bool:
    where = f"the filter {name}, called with {group.problem.id} (number {group.number}),"
    try:
        kept = keep(group)
    except Exception as error:
        raise FilterFailed(f"{where} raised {type(error).__name__}: {error}") from error
    if not isinstance(kept, bool):
        raise FilterFailed(f"{where} returned {kept!r}: expected True to train on the group, or False to leave it out")
    return kept
