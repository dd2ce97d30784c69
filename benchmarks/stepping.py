"""How fast environments step: one of Gymnasium's in one process, and N as the trainer steps them.

    python benchmarks/stepping.py --envs CartPole-v1 ALE/Pong-v5 --seconds 5

JSON lines, frames/s with random actions; of Atari games frames of the emulator, four a step. `raw` is one environment
of `gymnasium.make`, stepped and reset in a loop. The others are `make_vector` through `Episodes`, as collecting does;
`ratio` is to cores × raw; `cpu_ratio` is that of frames per second of CPU time, of all threads and processes, which
other work on the machine changes less. Runs of an environment alternate, because machines are shared; each is the best.
"""

import argparse
import importlib
import json
import os
import time
from collections.abc import Callable
from contextlib import closing
from importlib.util import find_spec
from typing import Any, NamedTuple

# What training steps with: the cores of this process, whatever a shell has set for torch.
os.environ["OMP_NUM_THREADS"] = str(len(os.sched_getaffinity(0)))

import gymnasium as gym
import psutil

from palestra.control.envs.make import make_vector
from palestra.control.envs.stepping import Stepper
from palestra.control.episodes import Episodes
from palestra.spec.kinds.control import EnvSpec

CORES = len(os.sched_getaffinity(0))
ENVS = {"CartPole-v1": 64, "LunarLander-v3": 16, "HalfCheetah-v5": 16, "Ant-v5": 16, "ALE/Pong-v5": 16}
"""Each environment, and how many copies are stepped together."""
FRAME_SKIP = 4


class Rate(NamedTuple):
    """Steps in a second, and in a second of CPU time."""

    wall: float
    cpu: float


def cpu_seconds() -> float:
    """CPU time of this process, its threads and its workers."""
    us = psutil.Process()
    return sum(one.cpu_times().user + one.cpu_times().system for one in (us, *us.children(recursive=True)))


def rate(steps: Callable[[], int], seconds: float) -> Rate:
    """Of `steps`, which steps for a while and says how many."""
    total, began, used = 0, time.perf_counter(), cpu_seconds()
    while (wall := time.perf_counter() - began) < seconds:
        total += steps()
    return Rate(total / wall, total / (cpu_seconds() - used))


def raw(id: str, seconds: float) -> Rate:
    """Of one environment, resets included."""
    with closing(gym.make(id)) as env:
        env.reset(seed=0)
        env.action_space.seed(0)
        actions = [env.action_space.sample() for _ in range(256)]

        def steps() -> int:
            for action in actions:
                _, _, terminated, truncated, _ = env.step(action)
                if terminated or truncated:
                    env.reset()
            return len(actions)

        return rate(steps, seconds)


def vector(id: str, num_envs: int, vectorize: Any, seconds: float) -> tuple[Rate, str]:
    """Of N environments as collecting steps them, dummy steps not counted; and what stepped them."""
    name = id.removeprefix("ALE/") if vectorize == "envpool" else id
    with closing(make_vector(EnvSpec(id=name, num_envs=num_envs, vectorize=vectorize), num_envs)) as env:
        episodes = Episodes(Stepper(env, id))
        episodes.reset(0)
        env.action_space.seed(0)
        actions = [env.action_space.sample() for _ in range(16)]
        episodes.step(actions[0])

        def steps() -> int:
            before = episodes.frame
            for action in actions:
                episodes.step(action)
            return episodes.frame - before

        how = f"{type(env).__name__}, {processes} processes" if (processes := getattr(env, "processes", 0)) else ""
        return rate(steps, seconds), how or type(env).__name__


def measured(id: str, num_envs: int, rounds: int, seconds: float) -> dict[str, Any]:
    """The best rates of several rounds, and their ratios to cores × raw."""
    ways: dict[str, Callable[[], tuple[Rate, str]]] = {
        "raw": lambda: (raw(id, seconds), ""),
        "auto": lambda: vector(id, num_envs, "auto", seconds),
    }
    if not id.startswith("ALE/") and id != "CartPole-v1":
        ways["async"] = lambda: vector(id, num_envs, "async", seconds)
    if find_spec("envpool") is not None:
        ways["envpool"] = lambda: vector(id, num_envs, "envpool", seconds)
    frames = FRAME_SKIP if id.startswith("ALE/") else 1
    best, how = dict.fromkeys(ways, Rate(0.0, 0.0)), {}
    for _ in range(rounds):
        for way, measure in ways.items():
            seen, how[way] = measure()
            best[way] = Rate(max(best[way].wall, seen.wall), max(best[way].cpu, seen.cpu))
    row: dict[str, Any] = {"env": id, "num_envs": num_envs, "cores": CORES, "auto": how["auto"]}
    row["frames_per_second"] = {way: round(frames * one.wall) for way, one in best.items()}
    others = {way: one for way, one in best.items() if way != "raw"}
    row["ratio"] = {way: round(one.wall / (CORES * best["raw"].wall), 2) for way, one in others.items()}
    row["cpu_ratio"] = {way: round(one.cpu / best["raw"].cpu, 2) for way, one in others.items()}
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--envs", nargs="+", default=list(ENVS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3.0)
    given = parser.parse_args()
    if any(id.startswith("ALE/") for id in given.envs):
        gym.register_envs(importlib.import_module("ale_py"))
    for id in given.envs:
        print(json.dumps(measured(id, ENVS.get(id, 64), given.rounds, given.seconds)), flush=True)


if __name__ == "__main__":
    main()
