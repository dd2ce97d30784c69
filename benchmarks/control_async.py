"""PPO with V-trace over stale rollouts beside synchronous PPO, where environments take uneven times for their steps.

    python benchmarks/control_async.py --staleness 4 --seeds 100 101 102 103

CartPole with steps that wait for an exponentially distributed time, as a simulator on another machine would. Both have
a process for each environment; the synchronous one waits for the slowest in every step. JSON lines: frames/s of
training, evaluations left out, and the return of the last evaluation.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

import palestra

FOLDER = Path(__file__).parent
SPEC = FOLDER.parent / "examples" / "control" / "ppo_async_cartpole.yaml"


class Waiting(gym.Wrapper):
    """An environment whose steps take `mean` seconds on average, sometimes several times as long."""

    def __init__(self, id: str = "CartPole-v1", mean: float = 2e-3):
        super().__init__(gym.make(id))
        self.mean, self.random = mean, np.random.default_rng(os.getpid())

    def step(self, action: Any) -> Any:
        time.sleep(self.random.exponential(self.mean))
        return self.env.step(action)


def measured(staleness: int, seed: int, frames: int | None) -> dict[str, Any]:
    """One run with uneven steps; its evaluation has them too, and is not counted."""
    given = {} if frames is None else {"train.frames": frames}
    if staleness == 0:
        given |= {"env.vectorize": "async"}
    with tempfile.TemporaryDirectory() as root:
        settings = {"env.id": "control_async:Waiting", "algorithm.staleness": staleness, "cluster.environments": 8}
        run = palestra.run(str(SPEC), root=root, quiet=True, seed=seed, overrides=given | settings | {"max_session": 1})
        rows = run.metrics()
        rates = [row["time/fps"] for row in rows if "time/fps" in row][2:]
        return {
            "staleness": staleness,
            "seed": seed,
            "frames": rows[-1]["frame"],
            "frames_per_second": round(1 / float(np.mean(1 / np.array(rates))), 1),
            "return": [row["eval/return"] for row in rows if "eval/return" in row][-1],
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--staleness", type=int, default=4)
    parser.add_argument("--seeds", type=int, nargs="+", default=[100, 101, 102, 103])
    parser.add_argument("--frames", type=int)
    given = parser.parse_args()
    rows: dict[int, list[dict[str, Any]]] = {0: [], given.staleness: []}
    for seed in given.seeds:
        for staleness, of in rows.items():
            of.append(measured(staleness, seed, given.frames))
            print(json.dumps(of[-1]), flush=True)
    mean = {
        s: {k: float(np.mean([row[k] for row in of])) for k in ("frames_per_second", "return")}
        for s, of in rows.items()
    }
    ratio = mean[given.staleness]["frames_per_second"] / mean[0]["frames_per_second"]
    print(json.dumps({"speed_ratio": round(ratio, 2), "returns": {s: round(m["return"], 1) for s, m in mean.items()}}))


if __name__ == "__main__":
    sys.path.insert(0, str(FOLDER))
    os.environ["PYTHONPATH"] = os.pathsep.join([str(FOLDER), os.environ.get("PYTHONPATH", "")])
    main()
