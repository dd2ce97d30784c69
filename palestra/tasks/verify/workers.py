"""Verification on an event loop: cheap verifiers in place, those that can hang or crash in worker processes.

A worker constructs a task from its name and args, once, before the first completion and outside its timeout. A
completion that takes too long costs its worker, which is killed and replaced; no other completion waits for it.
"""

import asyncio
import inspect
import json
import logging
import math
import os
import pickle
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Self

from palestra.errors import PalestraError, UsageError
from palestra.runs.run import ROOT
from palestra.spec.imports import known_objects, objects_in
from palestra.spec.tasks import RewardSpec, TaskUse
from palestra.tasks.task import Completion, Problem, Status, Task, Verdict, make_task
from palestra.track.trace import span
from palestra.work.pool import Pool, TaskFailed, TaskTimeout, WorkerDied
from palestra.work.worker import pack

log = logging.getLogger("palestra.tasks")

Verify = Callable[[Problem, Completion], Awaitable[Verdict]]
MOST_WORKERS = 16  # unless set otherwise: each that has imported sympy takes 100 MB


class VerifierRecipe:
    """How a worker constructs a verifier. Unpickling does so, which the pool does before it starts the clock."""

    def __init__(self, use: TaskUse, root: Path):
        task = {"task": use.task, "args": use.args, "name": use.label}
        known = task if use.reward is None else {"reward": use.reward.model_dump(mode="json")}
        self.text = json.dumps({**known, "root": str(root)}, sort_keys=True)
        self.objects = pack(objects_in(self.text))

    def __reduce__(self) -> tuple[Any, tuple[str, bytes]]:
        return _constructed, (self.text, self.objects)


class Verifiers:
    """Verifies completions of the problems of some tasks. A context manager: it may start processes."""

    def __init__(
        self,
        uses: Sequence[TaskUse],
        *,
        workers: int | None = None,
        timeout: float = 10.0,
        root: Path = Path(ROOT),
        traced: bool = True,
    ):
        """`timeout` is in seconds; `workers` null means one a core, up to 16; `root` is the folder of runs.

        With `traced` the verdicts that are waited for are spans of this process's trace.
        """
        self.tasks: dict[str, Task] = {}
        self._uses: dict[str, TaskUse] = {}
        self._verifiers: dict[str, Any] = {}
        self._recipes: dict[str, VerifierRecipe] = {}
        self._timeout, self._workers = timeout, workers or min(MOST_WORKERS, os.cpu_count() or 1)
        self._pool: Pool | None = None
        self._closed, self._traced = False, traced
        self._lock = threading.Lock()
        self._logged: set[str] = set()
        for use in uses:
            self._add(use, root)

    async def verify(self, problem: Problem, completion: Completion) -> Verdict:
        """Whether a completion is correct. A verifier that fails gives `error` and one that hangs `timeout`.

        A UsageError does raise: nothing could be verified with this spec.
        """
        begun = self.begin(problem, completion)
        return begun if isinstance(begun, Verdict) else await begun

    def begin(self, problem: Problem, completion: Completion) -> Verdict | Awaitable[Verdict]:
        """`verify` without a wait: the verdict where the verifier only computes, else an awaitable of it."""
        self._check_known(problem)
        recipe = self._recipes.get(problem.task)
        pool = None if recipe is None else self._processes()
        started = time.perf_counter()
        try:
            if pool is not None:
                task = pool.submit(_verified, recipe, problem, completion, timeout=self._timeout)
                return self._ended(problem, asyncio.wrap_future(task), started)
            verdict = self._verifiers[problem.task].verify(problem, completion)
            if isinstance(verdict, Verdict):
                return _plain(verdict, started)
        except Exception as error:
            return self._failed(problem, error, started)
        return self._ended(problem, verdict, started)

    def close(self) -> None:
        """End the processes; pending verdicts are cancelled."""
        with self._lock:
            self._closed, pool, self._pool = True, self._pool, None
        if pool is not None:
            pool.stop(grace=0.0)  # verification has nothing to save
        for label, verifier in self._verifiers.items():
            if self._uses[label].reward is not None:
                verifier.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_known(self, problem: Problem) -> None:
        if problem.task not in self._verifiers:
            raise UsageError(
                f"{problem.id} belongs to none of the tasks that are verified here: {', '.join(self.tasks) or 'none'}"
            )

    def _add(self, use: TaskUse, root: Path) -> None:
        label, same = use.label, ("task", "args", "reward")
        if label in self._uses:
            if any(getattr(use, name) != getattr(self._uses[label], name) for name in same):
                raise UsageError(f"two tasks are called {label!r} and differ: give one of them another `name`")
            return
        self._uses[label] = use
        self.tasks[label] = make_task(use.task, use.args, label)
        self._verifiers[label] = self.tasks[label] if use.reward is None else _reward(use.reward, root)
        if self._verifiers[label].isolated:
            self._recipes[label] = VerifierRecipe(use, root)

    def _processes(self) -> Pool:
        with self._lock:
            if self._closed:
                raise PalestraError("these verifiers are closed: later completions are not verified")
            if self._pool is None:
                self._pool = Pool(self._workers, name="verifier")
            return self._pool

    async def _ended(self, problem: Problem, verdict: Awaitable[Verdict], started: float) -> Verdict:
        with span("verify", role="verifier") if self._traced else nullcontext({}) as about:
            try:
                ended = _plain(await verdict, started)
            except Exception as error:
                ended = self._failed(problem, error, started)
            about["status"] = ended.status
        return ended

    def _failed(self, problem: Problem, error: Exception, started: float) -> Verdict:
        """The verdict where verification failed; the first failure of each task is logged with its traceback."""
        match error:
            case UsageError():
                raise error
            case TaskTimeout():
                note = f"verification took longer than {self._timeout:g} s and was ended"
                return Verdict(0.0, Status.TIMEOUT, seconds=self._timeout, note=note)
            case TaskFailed() if error.exit_code == UsageError.exit_code:
                raise UsageError(error.message) from error
            case TaskFailed():
                note, trace = f"{error.type_name}: {error.message}", error.traceback
            case WorkerDied():
                note = trace = str(error)
            case _:
                note, trace = f"{type(error).__name__}: {error}", "".join(traceback.format_exception(error))
        if problem.task not in self._logged:
            self._logged.add(problem.task)
            log.error("verifying a completion of %s failed; further failures are only counted\n%s", problem.id, trace)
        return Verdict(0.0, Status.ERROR, seconds=time.perf_counter() - started, note=note)


class VerifiersElsewhere(Verifiers):
    """The same, with the verifiers in other processes; `ask` has one of them verify a completion."""

    def __init__(self, uses: Sequence[TaskUse], ask: Verify, *, root: Path = Path(ROOT)):
        super().__init__(uses, root=root, traced=False)
        self._ask = ask

    def begin(self, problem: Problem, completion: Completion) -> Verdict | Awaitable[Verdict]:
        self._check_known(problem)
        return self._ended(problem, self._ask(problem, completion), time.perf_counter())


def _verified(verifier: Any, problem: Problem, completion: Completion) -> Verdict:
    """In a worker."""
    started = time.perf_counter()
    verdict = verifier.verify(problem, completion)
    return _plain(asyncio.run(_awaited(verdict)) if inspect.isawaitable(verdict) else verdict, started)


async def _awaited(verdict: Awaitable[Verdict]) -> Verdict:
    return await verdict


def _plain(verdict: Verdict, started: float) -> Verdict:
    """The verdict in plain numbers, whatever NumPy's it was given, with its time; one without a finite score failed."""
    score, parts = float(verdict.score), {name: float(part) for name, part in verdict.parts.items()}
    seconds = verdict.seconds or time.perf_counter() - started
    if not math.isfinite(score):
        return Verdict(0.0, Status.ERROR, parts, seconds, verdict.sandbox, f"the verifier gave the score {score}")
    return replace(verdict, score=score, parts=parts, seconds=seconds)


@cache
def _constructed(text: str, objects: bytes) -> Any:
    """A verifier from its recipe, once per process, warmed up."""
    known = json.loads(text)
    with known_objects(pickle.loads(objects)):
        if "reward" in known:
            return _reward(RewardSpec.model_validate(known["reward"]), Path(known["root"]))
        task = make_task(known["task"], known["args"], known["name"])
    task.warm_up()
    return task


def _reward(spec: RewardSpec, root: Path) -> Any:
    from palestra.tasks.rewards.rewards import make_reward  # it may need extras that tasks themselves do not

    return make_reward(spec, root)
