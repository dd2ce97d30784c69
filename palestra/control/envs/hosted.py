"""Copies of an environment in hosted processes, on this machine or others; the numbers are those of one process."""

import pickle
import sys
import threading
import traceback
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from itertools import count
from typing import Any

from gymnasium import spaces

from palestra.cluster.actor import Actor, ActorLost
from palestra.control.envs.make import Factory, make_single
from palestra.control.envs.snapshot import Snapshot
from palestra.control.envs.stepping import EnvironmentFailed
from palestra.control.envs.vector import Copies, shares
from palestra.control.envs.watchdog import Patience, hung
from palestra.control.envs.workers import Arrays, EnvBlock, portable
from palestra.spec.kinds.control import EnvSpec
from palestra.work.worker import pack

WRITTEN = {
    "reset": ("obs",),
    "set_states": ("obs",),
    "step": ("obs", "rewards", "terminated", "truncated", "final_obs"),
}
"""The arrays that a command writes."""
CLOSE_SECONDS = 5.0
_blocks = count()


class HostedEnvs:
    """In its own process: blocks of copies, all made and stepped by one thread."""

    def __init__(self) -> None:
        self._blocks: dict[int, EnvBlock] = {}
        self._thread = ThreadPoolExecutor(1)
        self._ident = self._thread.submit(threading.get_ident).result()

    def make(self, number: int, spec: EnvSpec, factory: bytes, copies: int) -> None:
        """Make a block."""

        def single() -> Snapshot:
            return Snapshot(make_single(spec, pickle.loads(factory)))

        def work() -> None:
            probe = single()
            assert isinstance(probe.observation_space, spaces.Box)
            arrays = Arrays.of(copies, probe.observation_space, probe.action_space, shared=False)
            probe.close()
            self._blocks[number] = EnvBlock([], arrays)
            self._blocks[number].make([single] * copies)

        self._called(work)

    def run(self, number: int, command: str, actions: Any, arguments: tuple[Any, ...]) -> tuple[Any, dict[str, Any]]:
        """The result of a block's command, and the arrays that it has written."""
        block = self._blocks[number]

        def work() -> Any:
            if actions is not None:
                block.arrays.actions[...] = actions
            return getattr(block, command)(*arguments)

        return self._called(work), {name: getattr(block.arrays, name) for name in WRITTEN.get(command, ())}

    def look(self, number: int) -> tuple[tuple[int, int, str], str]:
        """What a block is doing, and where."""
        frame, block = sys._current_frames().get(self._ident), self._blocks.get(number)
        doing = (0, 0, "being made") if block is None else block.arrays.progress()
        return doing, "".join(traceback.format_stack(frame))

    def close(self) -> None:
        """Close all copies."""
        for block in self._blocks.values():
            self._called(block.close)

    def _called(self, work: Any) -> Any:
        try:
            return self._thread.submit(work).result()
        except (Exception, SystemExit) as error:
            raised = portable(error)
            raised.add_note(f"in a hosted process:\n{traceback.format_exc()}")
            raise raised from None


class HostedWorker:
    """A block in a hosted process."""

    def __init__(self, spec: EnvSpec, factory: bytes, actor: Actor, rows: slice, arrays: Arrays):
        self.rows, self._spec, self._actor, self._number = rows, spec, actor, next(_blocks)
        self._arrays, self._doing, self._hangs = arrays.rows(rows), "make", False
        self._call = actor.call("make", self._number, spec, factory, rows.stop - rows.start)

    def start(self, command: str, *arguments: Any) -> None:
        """Send the command."""
        self._doing, actions = command, self._arrays.actions if command == "step" else None
        self._call = self._actor.call("run", self._number, command, actions, arguments)

    def finish(self) -> Any:
        """The command's result, or raise its error; a process that hangs, stops or dies is named."""
        try:
            self._actor.ready.result()
            self._wait()
            value, written = self._call.result() or (None, {})
        except ActorLost as error:
            last = self.rows.stop - 1
            which = f"environment {last}" if last == self.rows.start else f"environments {self.rows.start} to {last}"
            problem = f"{error}: it had {which} of {self._spec.id}, during {self._doing}"
            raise EnvironmentFailed(problem) from error
        for name, rows in written.items():
            getattr(self._arrays, name)[...] = rows
        return value

    def close(self) -> None:
        """Close the copies, unless one hangs."""
        if self._actor.lost is None and not self._hangs:
            with suppress(ActorLost, TimeoutError):
                self._actor.call("run", self._number, "close", None, ()).result(CLOSE_SECONDS)

    def _wait(self) -> None:
        patience, seconds = Patience(self._spec.reset_timeout), self._spec.reset_timeout
        doing, stack = (0, 0, "being made"), ""
        while not wait([self._call], patience.interval).done:
            with suppress(TimeoutError):  # a process that answers nothing is noticed by its hub
                doing, stack = self._actor.call("look", self._number).result(patience.interval)
            if patience.over(doing):
                self._hangs = True
                raise hung(self._spec.id, self.rows.start + doing[1], doing[2], seconds, stack)


def hosted_copies(spec: EnvSpec, num_envs: int, factory: Factory | None, actors: Sequence[Actor]) -> Copies:
    """Copies spread evenly over processes that host `HostedEnvs`."""
    probe = Snapshot(make_single(spec, factory))
    assert isinstance(probe.observation_space, spaces.Box)
    probe.close()
    arrays = Arrays.of(num_envs, probe.observation_space, probe.action_space, shared=False)
    packed = pack(factory)
    parts = zip(shares(num_envs, len(actors)), actors, strict=False)
    workers = [HostedWorker(spec, packed, actor, rows, arrays) for rows, actor in parts]
    for worker in workers:
        worker.finish()
    return Copies(spec.id, workers, arrays, probe)
