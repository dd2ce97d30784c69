"""The asynchronous executor: admission by staleness, groups in flight, filters, batches.

Prompts are numbered when they are admitted. The trainer's thread calls everything here; workflows run on the loop of
another thread and only hand in what they have finished. With `staleness: 0` a batch is the first groups by number that
no filter takes out, trained in that order, so timing cannot change numbers.
"""

import asyncio
import logging
import math
import queue
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from palestra.errors import PalestraError
from palestra.rollout.event_loop import LoopThread
from palestra.rollout.records import group_state, load_group
from palestra.rollout.types import Group, Trajectory
from palestra.spec.algorithm import FiltersSpec
from palestra.spec.imports import load_function
from palestra.tasks.stream import Prompts
from palestra.tasks.task import Problem, Status

log = logging.getLogger("palestra.rollout")

WAIT_SECONDS = 0.05  # for judges and workflows, when there is nothing to generate
Fate = Literal["trained", "filtered", "stale", "failed", "too_long", "timeout"]
LONG_IN_A_ROW = 1000
"""So many prompts that are too long, one after the other, and there are no others."""
FILTERED_BATCHES = 8
"""After so many batches of groups that filters took out, with none to train on, the log says so."""
VERSIONS = 64
"""Fates are told apart by version for so many versions back."""


class RolloutTimeout(PalestraError):
    """A workflow took longer than it may."""


@dataclass
class Order:
    """A numbered prompt at work or waiting to be."""

    number: int
    problem: Problem
    version: int = 0
    """Of the weights when it was admitted."""
    since: float = 0.0
    ended: "asyncio.Task[list[Trajectory]] | None" = None
    """The workflow, once it has ended."""


Start = Callable[[Problem, int, int], Awaitable[list[Trajectory]] | None]
"""Begins the workflow of a problem, given its number and attempt; None where its prompt is too long."""
Filter = Callable[[Group], str | None]
"""Why a group is not trained on; None where it is."""


class Executor:
    """Admits while running + accepted < (staleness + version + 1) · batch; gives batches that are always full."""

    def __init__(
        self,
        prompts: Prompts,
        start: Start,
        *,
        loop: LoopThread,
        batch: int,
        samples: int,
        staleness: int = 0,
        on_stale: Literal["wait", "drop"] = "wait",
        running: int | None = None,
        failures: int = 0,
        total: int | None = None,
        timeout: float | None = None,
        on_timeout: Literal["zero", "exclude"] = "zero",
        max_filtered: int | None = None,
        filter: Filter = lambda group: None,
    ):
        """`total` is how many groups the run will train on: no prompt is started that it has no use for.

        `timeout` is in seconds, of a workflow; `max_filtered` is in batches.
        """
        self.prompts, self.batch, self.samples, self.staleness = prompts, batch, samples, staleness
        self.version = 0
        """Of the weights that generate; the trainer sets it when it publishes."""
        self.fates: Counter[tuple[Fate, int]] = Counter()
        """How many prompts met which fate, by the version they were admitted at, if it is one of the last."""
        self.totals: Counter[Fate] = Counter()
        """The same over all versions."""
        self.settled = 0
        """How many workflows have ended: it grows as long as rollouts get on."""
        self.reasons: Counter[str] = Counter()
        """Why filters took groups out."""
        self._start, self._loop, self._filter = start, loop, filter
        self._on_stale, self._most_running, self._failures, self._total = on_stale, running, failures, total
        self._timeout, self._on_timeout, self._max_filtered = timeout, on_timeout, max_filtered
        self._next = self._taken = self._long = 0
        self._unused: Counter[str] = Counter()  # why groups since the last batch are not trained on
        self._again: deque[Order] = deque()
        self._attempts: Counter[int] = Counter()  # of numbers whose answers were too old
        self._running: dict[int, Order] = {}
        self._ready: dict[int, Group] = {}
        self._settled: list[Group] = []  # filtered since the last batch: the next one tells the prompts of them
        self._finished: queue.SimpleQueue[Order] = queue.SimpleQueue()
        self.wake: Callable[[], None] = lambda: None
        """Called, from any thread, when a workflow has ended."""

    # ---- the trainer's side

    def take(self, work: Callable[[float], bool]) -> tuple[list[Group], list[Group]]:
        """The groups of the next batch, and those that filters took out since the last one; both by number.

        Meanwhile `work(seconds)` generates, or waits at most that long where there is nothing to generate.
        """
        while True:
            self.collect()
            self.admit()
            chosen = self._choose()
            if chosen is not None:
                break
            work(WAIT_SECONDS)
        taken, filtered = [self._ready.pop(number) for number in chosen], self._settled
        self._settled, self._unused = [], Counter()
        for group in taken:
            self._count("trained", group.version)
            self._attempts.pop(group.number, None)
        self._taken += len(taken)
        for group in sorted([*taken, *filtered], key=lambda group: group.number):
            self.prompts.observe(group.problem, [t.verdict.score for t in group.trajectories])
        return taken, sorted(filtered, key=lambda group: group.number)

    def admit(self) -> None:
        """Start as many prompts as the bound allows; all ask before the first token is drawn, so that none waits."""
        started: list[Order] = []
        workflows = []
        try:
            while self._room() > 0:
                order = self._again.popleft() if self._again else self._drawn()
                workflow = self._start(order.problem, order.number, self._attempts[order.number])
                if workflow is None:
                    self._too_long()
                    continue
                self._long = 0
                order.version, order.since = self.version, time.monotonic()
                self._running[order.number] = order
                started.append(order)
                workflows.append(_limited(workflow, self._timeout))
        finally:
            if started:
                self._loop.start_all(workflows, lambda place, task: self._hand_in(started[place], task))

    def collect(self) -> None:
        """Take in what workflows have finished."""
        while True:
            try:
                order = self._finished.get_nowait()
            except queue.Empty:
                return
            self._settle(order)

    def publish(self, version: int) -> None:
        """New weights generate from now on."""
        self.version = version
        self.fates = Counter({key: n for key, n in self.fates.items() if key[1] > version - VERSIONS})

    def metrics(self) -> dict[str, float]:
        """What is at work, and what became of prompts so far."""
        found = {"rollout/running": float(len(self._running)), "rollout/ready": float(len(self._ready))}
        found |= {f"fate/{fate}": float(self.totals[fate]) for fate in get_args(Fate)}
        found |= {f"filtered/{reason}": float(n) for reason, n in self.reasons.items()}
        return found | self.prompts.metrics()

    def describe(self) -> str:
        """Who waits for whom."""
        now = time.monotonic()
        lines = [
            f"version {self.version}: {len(self._ready)} of {self.batch} groups are ready, {len(self._running)} run, "
            f"{len(self._again)} wait to be asked again, room for {self._room()} more"
        ]
        for order in sorted(self._running.copy().values(), key=lambda order: order.since)[:8]:
            lines.append(f"  number {order.number} ({order.problem.id}) has run for {now - order.since:.1f} s")
        return "\n".join(lines)

    # ---- checkpoints

    def state(self) -> dict[str, Any]:
        """Finished groups whole; unfinished ones as numbered prompts, to be asked again from their beginning.

        What `collect` has not taken in counts as unfinished.
        """
        unfinished = sorted([*self._again, *self._running.values()], key=lambda order: order.number)
        return {
            "next": self._next,
            "version": self.version,
            "taken": self._taken,
            "unfinished": [[order.number, order.problem.id] for order in unfinished],
            "attempts": [[number, count] for number, count in sorted(self._attempts.items())],
            "ready": [group_state(group) for group in self._ready.values()],
            "settled": [group_state(group) for group in self._settled],
            "unused": dict(sorted(self._unused.items())),
            "fates": [[fate, version, count] for (fate, version), count in sorted(self.fates.items())],
            "totals": dict(sorted(self.totals.items())),
            "reasons": dict(sorted(self.reasons.items())),
            "prompts": self.prompts.state(),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from `state()`."""
        self.prompts.load_state(state["prompts"])
        self._next, self._taken, self.version = state["next"], state["taken"], state["version"]
        find = self.prompts.find
        self._again = deque(Order(number, find(id)) for number, id in state["unfinished"])
        self._attempts = Counter(dict(state["attempts"]))
        self._ready = {group.number: group for group in (load_group(one, find) for one in state["ready"])}
        self._settled = [load_group(one, find) for one in state["settled"]]
        self._unused = Counter(state.get("unused", {}))  # earlier versions did not count them
        self.fates = Counter({(fate, version): count for fate, version, count in state["fates"]})
        self.totals, self.reasons = Counter(state["totals"]), Counter(state["reasons"])

    # ---- inside

    def _room(self) -> int:
        bound = (self.staleness + self.version + 1) * self.batch
        bound = bound if self._total is None else min(bound, self._total)
        room = bound - self._taken - len(self._ready) - len(self._running)
        return room if self._most_running is None else min(room, self._most_running - len(self._running))

    def _drawn(self) -> Order:
        order = Order(self._next, self.prompts.draw(self._next))
        self._next += 1
        return order

    def _too_long(self) -> None:
        self._count("too_long", self.version)
        self._long += 1
        if self._long >= LONG_IN_A_ROW:
            raise PalestraError(
                f"{self._long} prompts in a row are too long: raise rollout.max_prompt_tokens, lower "
                "rollout.max_new_tokens, or take a model that reads more"
            )

    def _count(self, fate: Fate, version: int) -> None:
        self.fates[fate, version] += 1
        self.totals[fate] += 1

    def _hand_in(self, order: Order, task: asyncio.Task[list[Trajectory]]) -> None:
        order.ended = task
        self._finished.put(order)
        self.wake()

    def _settle(self, order: Order) -> None:
        """Decide the fate of a finished prompt."""
        del self._running[order.number]
        self.settled += 1
        assert order.ended is not None
        error = asyncio.CancelledError() if order.ended.cancelled() else order.ended.exception()
        if isinstance(error, RolloutTimeout):
            log.warning("the rollout of %s took longer than %g s and was cancelled", order.problem.id, self._timeout)
            self._unusable("timeout", order.version, "timeout")
            return
        if error is not None:
            self._fail(order, error)
            return
        answers = [_finite(t, order.problem.id) for t in order.ended.result()]
        left_out = {Status.ERROR, Status.TIMEOUT} if self._on_timeout == "exclude" else {Status.ERROR}
        kept = tuple(t for t in answers if t.verdict.status not in left_out)
        if not kept and any(t.verdict.status == Status.TIMEOUT for t in answers):
            log.warning("%s: the verifier judged none of %d completions in time", order.problem.id, len(answers))
            self._unusable("timeout", order.version, "timeout")
            return
        if not kept:
            why = answers[0].verdict.note if answers else "its workflow gave none"
            self._fail(order, PalestraError(f"no answer to {order.problem.id} could be judged: {why}"))
            return
        if len(kept) < len(answers):
            notes = {t.verdict.note for t in answers if t.verdict.status in left_out}
            log.warning("%s: %d of %d answers could not be judged: %s", order.problem.id, len(answers) - len(kept),
                        len(answers), "; ".join(sorted(notes))[:500])  # fmt: skip
        group = Group(order.number, order.problem, order.version, kept, self.samples, time.monotonic() - order.since)
        reason = self._filter(group)
        if reason is None:
            self._ready[group.number] = group
            return
        self._settled.append(group)
        self.reasons[reason] += 1
        self._unusable("filtered", group.version, reason)
        if len(self._settled) % (FILTERED_BATCHES * self.batch) == 0:
            log.warning(
                "%d groups in a row were filtered out (%s), and %d of %d are ready to be trained on; their rewards: %s",
                len(self._settled), ", ".join(f"{why} {n}" for why, n in self.reasons.most_common()),
                len(self._ready), self.batch, self._rewards(),
            )  # fmt: skip

    def _rewards(self) -> str:
        """Some rewards of the groups that were filtered since the last batch, for people."""
        rewards = sorted({round(reward, 6) for group in self._settled for reward in group.rewards})
        return ", ".join(f"{reward:g}" for reward in rewards[:5]) or "none"

    def _unusable(self, fate: Fate, version: int, reason: str) -> None:
        """Count a group that is not trained on; too many in a row end the run."""
        self._count(fate, version)
        self._unused[reason] += 1
        groups, most = self._unused.total(), self._max_filtered
        if most is not None and groups >= most * self.batch:
            reasons = ", ".join(f"{why} {n}" for why, n in self._unused.most_common())
            raise PalestraError(
                f"{groups} groups since the last batch are not trained on ({reasons}), and {len(self._ready)} of "
                f"{self.batch} are ready; their rewards: {self._rewards()}. "
                "Take easier or harder prompts, raise rollout.group, or raise rollout.max_filtered_batches = "
                f"{most} (null sets no limit)"
            )

    def _fail(self, order: Order, error: BaseException) -> None:
        self._count("failed", order.version)
        failed = self.totals["failed"]
        if failed > self._failures:
            raise PalestraError(
                f"the rollout of {order.problem.id} (number {order.number}) failed: {type(error).__name__}: {error}"
            ) from error
        log.warning("prompt %s failed (%d of at most %d): %s", order.problem.id, failed, self._failures, error)

    def _choose(self) -> list[int] | None:
        """The numbers of the next batch, the oldest that are ready; None while it has to wait."""
        self._drop_stale()
        if len(self._ready) < self.batch or (self._on_stale == "wait" and self._too_early()):
            return None
        return sorted(self._ready)[: self.batch]

    def _too_early(self) -> bool:
        """Whether a batch without those that still run would leave more old groups than later batches can take.

        A group of version s is trained at version s + staleness at the latest: after this batch, at version v, at most
        (s + staleness - v) · batch groups of version s or older may be left, for every s.
        """
        ready = Counter(group.version for group in self._ready.values())
        all_ = ready + Counter(order.version for order in self._running.values())
        done = left = 0
        for version in sorted(all_):
            done, left = done + ready[version], left + all_[version]
            later = (version + self.staleness - self.version) * self.batch
            if left - later > min(done, self.batch) and left > done:  # and some that run would help
                return True
        return False

    def _drop_stale(self) -> None:
        """Ask those again whose answers are older than the bound."""
        bound = self.version - self.staleness
        late = [group for group in self._ready.values() if group.oldest < bound]
        for group in sorted(late, key=lambda group: group.number):
            del self._ready[group.number]
            self._count("stale", group.version)
            self._attempts[group.number] += 1
            self._again.append(Order(group.number, group.problem))


def _finite(one: Trajectory, id: str) -> Trajectory:
    """A reward that is no number is the judge's mistake."""
    if math.isfinite(one.reward) and math.isfinite(one.verdict.score):
        return one
    note = f"the reward of an answer to {id} is {one.reward}, and its score {one.verdict.score}"
    return replace(one, verdict=replace(one.verdict, status=Status.ERROR, note=note))


async def _limited(coroutine: Awaitable[list[Trajectory]], seconds: float | None) -> list[Trajectory]:
    limit = asyncio.timeout(seconds)
    try:
        async with limit:
            return await coroutine
    except TimeoutError as error:
        if not limit.expired():  # the workflow's own
            raise
        raise RolloutTimeout(f"took longer than {seconds:g} s") from error


SAME = 1e-6
"""Rewards that differ by no more than this are the same: dense scores carry rounding."""


class FilterFailed(PalestraError):
    """A filter of the user raised; its traceback is the cause."""


def make_filter(spec: FiltersSpec) -> Callable[[Group], str | None]:
    """What says why a group is left out, in a word that metrics are named after; None where it is trained on.

    The words: zero_variance, too_short, too_long, and the name of the user's function.
    """
    keep = None if spec.function is None else load_function(spec.function, "algorithm.filters.function")

    def reason(group: Group) -> str | None:
        if spec.zero_variance and max(group.rewards) - min(group.rewards) <= SAME:
            return "zero_variance"
        lengths = [trajectory.drawn for trajectory in group.trajectories]
        if spec.min_tokens is not None and min(lengths) < spec.min_tokens:
            return "too_short"
        if spec.max_tokens is not None and max(lengths) > spec.max_tokens:
            return "too_long"
        if keep is not None and spec.function is not None and not _asked(keep, spec.function, group):
            return spec.function.rpartition(":")[2]
        return None

    return reason


def _asked(keep: Callable[[Group], object], name: str, group: Group) -> bool:
    where = f"the filter {name}, asked about {group.problem.id} (number {group.number}),"
    try:
        kept = keep(group)
    except Exception as error:
        raise FilterFailed(f"{where} raised {type(error).__name__}: {error}") from error
    if not isinstance(kept, bool):
        raise FilterFailed(f"{where} returned {kept!r}: expected True to train on the group, or False to leave it out")
    return kept
