"""Verification on an asyncio loop: cheap verifiers in place, those that can hang or crash in other processes.

A worker makes a task again from its name and args, once, before the first answer and outside its time. An answer that
takes too long costs its worker, which is killed and replaced, and nobody else's time.
"""

import asyncio
import inspect
import json
import logging
import os
import pickle
import threading
import time
import traceback
from collections.abc import Awaitable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Self

from palestra.errors import PalestraError, UsageError
from palestra.runs.run import ROOT
from palestra.spec.imports import known_objects, objects_in
from palestra.spec.tasks import RewardSpec, TaskUse
from palestra.tasks.task import Answer, Problem, Status, Task, Verdict, make_task
from palestra.work.pool import Pool, TaskFailed, TaskTimeout, WorkerDied
from palestra.work.worker import pack

log = logging.getLogger("palestra.tasks")

MOST_WORKERS = 16  # unless asked for: each that knows sympy holds 100 MB


class TaskRecipe:
    """What a worker makes a judge from. It is made as the recipe is unpickled, which the pool does before the clock."""

    def __init__(self, use: TaskUse, root: Path):
        reward = None if use.reward is None else use.reward.model_dump(mode="json")
        known = {"task": use.task, "args": use.args, "name": use.label} if use.reward is None else {"reward": reward}
        self.text = json.dumps({**known, "root": str(root)}, sort_keys=True)
        self.objects = pack(objects_in(self.text))

    def __reduce__(self) -> tuple[Any, tuple[str, bytes]]:
        return _made, (self.text, self.objects)


class Judges:
    """Judges answers to the problems of some tasks. Close it, or use it in a `with` block: it may have processes."""

    def __init__(
        self,
        uses: Sequence[TaskUse],
        *,
        workers: int | None = None,
        timeout: float = 10.0,
        root: Path = Path(ROOT),
    ):
        """`timeout` is in seconds; `workers` null means one a core, up to 16; `root` is the folder of runs."""
        self.tasks: dict[str, Task] = {}
        self._uses: dict[str, TaskUse] = {}
        self._judges: dict[str, Any] = {}
        self._recipes: dict[str, TaskRecipe] = {}
        self._timeout, self._workers = timeout, workers or min(MOST_WORKERS, os.cpu_count() or 1)
        self._pool: Pool | None = None
        self._closed = False
        self._lock = threading.Lock()
        self._told: set[str] = set()
        for use in uses:
            self._add(use, root)

    async def judge(self, problem: Problem, answer: Answer) -> Verdict:
        """Whether an answer is right. A judge that fails gives `error` and one that hangs `timeout`, never a raise.

        What cannot be done as the spec has it (UsageError) does raise: no answer could ever be judged.
        """
        begun = self.begin(problem, answer)
        return begun if isinstance(begun, Verdict) else await begun

    def begin(self, problem: Problem, answer: Answer) -> Verdict | Awaitable[Verdict]:
        """The same, or what to await for it: a judge that only computes has judged when this returns."""
        judge = self._judges.get(problem.task)
        if judge is None:
            raise UsageError(
                f"{problem.id} is of no task that is judged here: {', '.join(self.tasks) or 'there is none'}"
            )
        pool = self._processes() if judge.isolated else None
        started = time.perf_counter()
        try:
            if pool is not None:
                task = pool.submit(_judged, self._recipes[problem.task], problem, answer, timeout=self._timeout)
                return self._ended(problem, asyncio.wrap_future(task), started)
            verdict = judge.judge(problem, answer)
        except Exception as error:
            return self._excused(problem, error, started)
        return _timed(verdict, started) if isinstance(verdict, Verdict) else self._ended(problem, verdict, started)

    async def _ended(self, problem: Problem, verdict: Awaitable[Verdict], started: float) -> Verdict:
        try:
            return _timed(await verdict, started)
        except Exception as error:
            return self._excused(problem, error, started)

    def _excused(self, problem: Problem, error: Exception, started: float) -> Verdict:
        """The verdict where judging failed."""
        match error:
            case UsageError():
                raise error
            case TaskTimeout():
                note = f"judging took longer than {self._timeout:g} s and was ended"
                return Verdict(0.0, Status.TIMEOUT, seconds=self._timeout, note=note)
            case TaskFailed() if error.exit_code == UsageError.exit_code:
                raise UsageError(error.message) from error
            case TaskFailed():
                return self._failed(problem, f"{error.type_name}: {error.message}", error.traceback, started)
            case WorkerDied():
                return self._failed(problem, str(error), str(error), started)
        trace = "".join(traceback.format_exception(error))
        return self._failed(problem, f"{type(error).__name__}: {error}", trace, started)

    def close(self) -> None:
        """End the processes, whatever they are at; what waits for a verdict is cancelled."""
        with self._lock:
            self._closed, pool, self._pool = True, self._pool, None
        if pool is not None:
            pool.stop(grace=0.0)  # judging has nothing to save
        for label, judge in self._judges.items():
            if self._uses[label].reward is not None:
                judge.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _add(self, use: TaskUse, root: Path) -> None:
        label, same = use.label, ("task", "args", "reward")
        if label in self._uses:
            if any(getattr(use, name) != getattr(self._uses[label], name) for name in same):
                raise UsageError(f"two tasks are called {label!r} and differ: give one of them another `name`")
            return
        self._uses[label] = use
        self.tasks[label] = make_task(use.task, use.args, label)
        self._judges[label] = self.tasks[label] if use.reward is None else _reward(use.reward, root)
        if self._judges[label].isolated:
            self._recipes[label] = TaskRecipe(use, root)

    def _processes(self) -> Pool:
        with self._lock:
            if self._closed:
                raise PalestraError("these judges are closed: answers that come later are not judged")
            if self._pool is None:
                self._pool = Pool(self._workers, name="judge")
            return self._pool

    def _failed(self, problem: Problem, note: str, trace: str, started: float) -> Verdict:
        """An `error`; the first of each task is told at length, the others are counted by whoever reads verdicts."""
        if problem.task not in self._told:
            self._told.add(problem.task)
            log.error(
                "judging an answer to %s failed; further failures of this task are only counted\n%s", problem.id, trace
            )
        return Verdict(0.0, Status.ERROR, seconds=time.perf_counter() - started, note=note)


def _judged(judge: Any, problem: Problem, answer: Answer) -> Verdict:
    """In a worker."""
    started = time.perf_counter()
    verdict = judge.judge(problem, answer)
    return _timed(asyncio.run(_awaited(verdict)) if inspect.isawaitable(verdict) else verdict, started)


async def _awaited(verdict: Awaitable[Verdict]) -> Verdict:
    return await verdict


def _timed(verdict: Verdict, started: float) -> Verdict:
    return verdict if verdict.seconds else replace(verdict, seconds=time.perf_counter() - started)


@cache
def _made(text: str, objects: bytes) -> Any:
    """A judge from its recipe, once a process; what a task does only once it does in `warm_up`, if it has that."""
    known = json.loads(text)
    with known_objects(pickle.loads(objects)):
        if "reward" in known:
            judge = _reward(RewardSpec.model_validate(known["reward"]), Path(known["root"]))
        else:
            judge = make_task(known["task"], known["args"], known["name"])
    if (warm_up := getattr(judge, "warm_up", None)) is not None:
        warm_up()
    return judge


def _reward(spec: RewardSpec, root: Path) -> Any:
    from palestra.tasks.rewards.rewards import (
        make_reward,  # here, because it may need extras that tasks themselves do not
    )

    return make_reward(spec, root)
