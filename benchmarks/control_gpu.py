"""Gradient steps a second of SAC, and of PPO with a CNN, beside Stable-Baselines3's on the same card, in turns.

    python benchmarks/control_gpu.py [--rounds 3] [--device cuda]

Environments that show noise, of HalfCheetah's sizes and of Atari's (84 × 84 × 4): only updates are timed, those of a
filled memory (SAC, batches of 256) or of one rollout (PPO, minibatches of 256, four epochs). One JSON line a run.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from palestra.control.algorithms import ALGORITHMS
from palestra.control.algorithms.base import AlgorithmParts
from palestra.control.envs.stepping import Stepper
from palestra.spec.kinds.control import ControlSpec

UPDATES = 500
"""Of SAC, in one call."""
ENVS, HORIZON, EPOCHS, MINIBATCH = 8, 128, 4, 256
"""Of PPO."""


class Noise(gym.Env):
    """Shows noise and rewards it."""

    def __init__(self, images: bool):
        self.draws = np.random.default_rng(0)
        if images:
            self.observation_space = gym.spaces.Box(0, 255, (4, 84, 84), np.uint8)
            self.action_space = gym.spaces.Discrete(6)
        else:
            self.observation_space = gym.spaces.Box(-np.inf, np.inf, (17,), np.float32)
            self.action_space = gym.spaces.Box(-1, 1, (6,), np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        return self._shown(), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        return self._shown(), float(self.draws.random()), bool(self.draws.random() < 0.01), False, {}

    def _shown(self) -> np.ndarray:
        space = self.observation_space
        if space.dtype == np.uint8:
            return self.draws.integers(0, 256, space.shape, np.uint8)
        return self.draws.standard_normal(space.shape).astype(np.float32)


def ours(name: str, device: str, compile: str) -> Callable[[], int]:
    """What makes updates and says how many."""
    images, envs = name == "ppo", ENVS if name == "ppo" else 1
    algorithm = {"name": "ppo", "horizon": HORIZON, "minibatch": MINIBATCH, "epochs": EPOCHS}
    net = {"trunk": "nature", "hidden": [512], "activation": "relu", "shared": True}
    if name == "sac":
        algorithm = {"name": "sac", "horizon": 4000, "start": 8000, "batch": 256, "buffer": 10_000}
        net = {"hidden": [256, 256], "activation": "relu"}
    spec = ControlSpec.model_validate(
        {"kind": "control", "name": name, "env": {"id": "noise", "num_envs": envs}, "algorithm": algorithm, "net": net,
         "train": {"frames": 10**7, "compile": compile}, "device": device}
    )  # fmt: skip
    env = SyncVectorEnv([partial(Noise, images)] * envs, autoreset_mode=AutoresetMode.SAME_STEP)
    parts = AlgorithmParts.of(spec, Stepper(env, "noise"), 0, torch.device(device), compile=False)
    learner: Any = ALGORITHMS[name](parts)
    learner.episodes.reset(0)
    if name == "sac":
        learner.step(0.0)  # fills the memory, and learns nothing yet
        return lambda: (learner.learn(UPDATES, 0.5), UPDATES)[1]
    rollout = learner.collect().to(learner.device)

    def learn() -> int:
        before = learner.updates
        learner.learn(learner.prepare(rollout), 0.5)
        return learner.updates - before

    return learn


def theirs(name: str, device: str) -> Callable[[], int]:
    """The same of Stable-Baselines3."""
    from stable_baselines3 import PPO, SAC
    from stable_baselines3.common.vec_env import DummyVecEnv

    if name == "sac":
        model: Any = SAC(
            "MlpPolicy", Noise(False), batch_size=256, learning_starts=4000, device=device, buffer_size=10**4
        )
        model.learn(4000)
        return lambda: (model.train(UPDATES, 256), UPDATES)[1]
    env = DummyVecEnv([partial(Noise, True)] * ENVS)
    sizes: dict[str, Any] = {"n_steps": HORIZON, "batch_size": MINIBATCH, "n_epochs": EPOCHS}
    model = PPO("CnnPolicy", env, device=device, **sizes)
    model.learn(ENVS * HORIZON)  # fills the rollout; `train` may be called again

    def learn() -> int:
        model.train()
        return EPOCHS * ENVS * HORIZON // MINIBATCH

    return learn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--names", nargs="+", default=["sac", "ppo"])
    given = parser.parse_args()
    card = torch.cuda.get_device_name() if given.device == "cuda" else "none"
    for name in given.names:
        makers = {
            "graphs": partial(ours, name, given.device, "on"),
            "without": partial(ours, name, given.device, "off"),
            "stable_baselines3": partial(theirs, name, given.device),
        }
        learners = {who: make() for who, make in makers.items()}
        speeds: dict[str, list[float]] = {who: [] for who in makers}
        for number in range(given.rounds + 1):
            for who, learn in learners.items():
                began = time.perf_counter()
                updates = learn()
                if given.device == "cuda":
                    torch.cuda.synchronize()
                if number:  # the first one warms up
                    speeds[who].append(updates / (time.perf_counter() - began))
        best = {who: round(statistics.median(values), 1) for who, values in speeds.items()}
        ratio = round(best["graphs"] / best["stable_baselines3"], 2)
        print(json.dumps({"bench": "control_gpu", "gpu": card, "algorithm": name, **best, "ratio": ratio}), flush=True)


if __name__ == "__main__":
    main()
