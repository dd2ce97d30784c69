"""Where environments run: in worker processes that can be killed, and off the event loop in any case.

A game is its name, its seed and the actions so far. The worker that has it alive takes the next action; one that has
not, because a worker was killed, plays the actions again. Games of one worker do not share random numbers.
"""

import asyncio
import contextlib
import io
import itertools
import random
from collections.abc import Mapping
from typing import Any

import numpy as np

from palestra.errors import PalestraError, UsageError
from palestra.tasks.environments.environment import Busy, Environment, Turn, environment_maker
from palestra.tasks.task import Problem
from palestra.work.pool import Pool, TaskFailed, TaskTimeout

Action = str | int
"""Text, or the seed of a random legal action."""
THREADED = ("openenv",)
"""Sources that only wait for a server: threads serve them."""
BUSY_SECONDS = 0.2  # until an environment that cannot begin yet is asked again


class EnvironmentFailed(PalestraError):
    """An environment raised, hung or crashed: nothing is learned from its episode."""


class Host:
    """Runs environments, each call for at most `seconds`."""

    def __init__(self, workers: int, seconds: float):
        self._workers, self.seconds = workers, seconds
        self._pools: list[Pool] = []
        self._numbers = itertools.count()

    def open(self, name: str, config: Mapping[str, Any], seed: int, problem: Problem) -> "Game":
        """A game that has not begun."""
        recipe = Recipe(name, config, seed, problem)
        if name.partition(":")[0] in THREADED:
            return Game(self, None, 0, recipe)
        if not self._pools:  # one worker a pool: a game stays with the worker that has it alive
            env = {"PYTHONHASHSEED": "0"}  # some games iterate over sets of strings
            self._pools = [Pool(1, name="environment", env=env) for _ in range(self._workers)]
        number = next(self._numbers)
        return Game(self, self._pools[number % self._workers], number, recipe)

    def close(self) -> None:
        """End the processes."""
        pools, self._pools = self._pools, []
        for pool in pools:
            pool.stop(grace=0.0)


class Game:
    """One episode of an environment."""

    def __init__(self, host: Host, pool: Pool | None, number: int, recipe: "Recipe"):
        self._host, self._pool, self._number, self._recipe = host, pool, number, recipe
        self._actions: list[Action] = []
        self._live: Live | None = None if pool else Live(*recipe.parts)

    async def reset(self) -> Turn:
        """Begin."""
        return await self._advance()

    async def step(self, action: Action) -> Turn:
        """Act as the player whose turn it is."""
        self._actions.append(action)
        return await self._advance()

    async def close(self) -> None:
        """Forget it."""
        if self._live is not None:
            await asyncio.to_thread(self._live.close)
        elif self._pool is not None:
            with contextlib.suppress(RuntimeError):  # the host is closed
                self._pool.submit(forget, self._number)

    async def _advance(self) -> Turn:
        seconds, name = self._host.seconds, self._recipe.parts[0]
        try:
            while self._live is not None:
                try:
                    return await asyncio.wait_for(asyncio.to_thread(self._live.advance, self._actions), seconds)
                except Busy:
                    await asyncio.sleep(BUSY_SECONDS)  # not in the thread: those that play need it
            assert self._pool is not None
            task = self._pool.submit(advance, self._number, self._recipe, self._actions, timeout=seconds)
            return await asyncio.wrap_future(task)
        except UsageError:
            raise
        except Exception as error:
            if isinstance(error, TaskFailed) and error.exit_code == UsageError.exit_code:
                raise UsageError(error.message) from error
            if isinstance(error, (TaskTimeout, TimeoutError)):
                raise EnvironmentFailed(f"{name} took longer than {seconds:g} s for a turn and was ended") from error
            kind, why = type(error).__name__, str(error)
            if isinstance(error, TaskFailed):
                kind, why = error.type_name, error.message
            raise EnvironmentFailed(f"{name} failed: {kind}: {why}") from error


class Live:
    """A game in this process, with the state of its random numbers."""

    def __init__(self, name: str, config: Mapping[str, Any], seed: int, problem: Problem):
        self._name, self._config, self._seed, self._problem = name, config, seed, problem
        self._environment: Environment | None = None
        self.played = -1
        """Actions played; -1 before the reset."""
        self._random: Any = None

    def advance(self, actions: list[Action]) -> Turn:
        """The turn after these actions, of which all but the last may have been played before."""
        turn: Turn | None = None
        while self.played < len(actions):
            turn = self._reset() if self.played < 0 else self._step(actions[self.played])
            self.played += 1
        assert turn is not None
        return turn

    def close(self) -> None:
        if self._environment is not None:
            self._environment.close()

    def _reset(self) -> Turn:
        make = environment_maker(self._name)  # imports, which may sample, come before the seed
        random.seed(self._seed)
        np.random.seed(self._seed)  # noqa: NPY002  the environments' own
        self._environment = make(**self._config)
        turn = self._environment.reset(self._seed, self._problem)
        self._random = random.getstate(), np.random.get_state()  # noqa: NPY002
        return turn

    def _step(self, action: Action) -> Turn:
        assert self._environment is not None
        random.setstate(self._random[0])
        np.random.set_state(self._random[1])  # noqa: NPY002
        if isinstance(action, int):
            choose = getattr(self._environment, "sample", None)
            if choose is None:
                raise UsageError(f"{self._name} has no random actions: give the task another `opponent`")
            action = choose(random.Random(action))
        turn = self._environment.step(action)
        self._random = random.getstate(), np.random.get_state()  # noqa: NPY002
        return turn


_alive: dict[int, Live] = {}


class Recipe:
    """How a worker makes a game. Unpickling imports what that needs, which the pool does before it starts the clock."""

    def __init__(self, *parts: Any):
        self.parts = parts

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return _imported, self.parts


def _imported(name: str, *rest: Any) -> Recipe:
    environment_maker(name)
    return Recipe(name, *rest)


def advance(number: int, recipe: Recipe, actions: list[Action]) -> Turn:
    """In a worker: the turn of a game after these actions."""
    live = _alive.get(number)
    if live is None or live.played != len(actions) - 1:
        live = _alive[number] = Live(*recipe.parts)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        return live.advance(actions)


def forget(number: int) -> None:
    """In a worker: close a game."""
    if (live := _alive.pop(number, None)) is not None:
        live.close()
