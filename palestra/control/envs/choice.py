"""Whether copies of an environment run in this process or in others: as told, or as a measurement says."""

import logging
import os
import time
from collections.abc import Sequence
from contextlib import closing

from palestra.control.envs.copies import Copies, Make, copies_here
from palestra.control.envs.workers import copies_in_processes
from palestra.control.seeding import load_random_state, random_state
from palestra.spec.kinds.control import EnvSpec

log = logging.getLogger("palestra.control")

MEASURED_SECONDS = 0.1
WORTH = 0.8  # processes must take less than this share of the time, for what they cost in memory and in starting
_chosen: dict[str, int] = {}  # measured once in this process: training and evaluation then run alike


def processes_for(spec: EnvSpec, num_envs: int, make: Make) -> int:
    """In how many processes to step `num_envs` copies; 0: in this one. Numbers are the same either way.

    `auto` steps throw-away copies both ways and takes the faster; logged, and overridden by `sync` and `async`. An
    environment given as an object is not stepped for that: who made it may count its steps.
    """
    count = min(cores(), num_envs)
    if spec.vectorize == "async":
        # One core still steps one process at a time, and what was asked for also keeps a crash out of this process.
        return max(count, min(2, num_envs))
    if spec.vectorize == "sync" or count < 2 or spec.id.startswith("object:"):
        return 0
    key = f"{spec.id} {spec.kwargs} {spec.frame_stack} {num_envs}"
    if key not in _chosen:
        before = random_state()
        try:
            here, there = (_step_seconds(spec, [make] * num_envs, processes) for processes in (0, count))
        except (Exception, SystemExit):  # it will fail again where it is stepped for good, and say so there
            return 0
        finally:
            load_random_state(before)
        _chosen[key] = count if there < WORTH * here else 0
        log.info(
            "%s: a step of %d takes %.0f µs in this process and %.0f µs in %d: %s (env.vectorize overrides)",
            *(spec.id, num_envs, 1e6 * here, 1e6 * there, count, "processes" if _chosen[key] else "this process"),
        )
    return _chosen[key]


def cores() -> int:
    """The cores of this process: as many as OMP_NUM_THREADS says where several runs share the machine, else all."""
    told = os.environ.get("OMP_NUM_THREADS", "")
    return int(told) if told.isdecimal() and int(told) > 0 else len(os.sched_getaffinity(0))


def _step_seconds(spec: EnvSpec, makers: Sequence[Make], processes: int) -> float:
    """Seconds of a vector step with random actions, resets included."""
    with closing(copies(spec, makers, processes)) as env:
        env.action_space.seed(0)
        actions = [env.action_space.sample() for _ in range(8)]
        env.reset(seed=0)
        env.step(actions[0])
        began, steps = time.perf_counter(), 0
        while steps < 1000 and (steps < 2 or time.perf_counter() - began < MEASURED_SECONDS):
            env.step(actions[steps % len(actions)])
            steps += 1
        return (time.perf_counter() - began) / steps


def copies(spec: EnvSpec, makers: Sequence[Make], processes: int) -> Copies:
    """Copies in so many processes; 0: in this one."""
    if processes == 0:
        return copies_here(spec.id, makers, spec.reset_timeout)
    return copies_in_processes(spec.id, makers, processes, spec.reset_timeout)
