"""Probe environments with continuous actions, and SAC, TQC, TD3 and CrossQ on them."""

from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from probe_envs import learner_on, sync
from torch import Tensor

from palestra.control.algorithms.crossq import CrossQ
from palestra.control.algorithms.tqc import TQC

CONTINUOUS, DISCRETE = ("sac", "tqc", "td3", "crossq"), ("sac", "crossq")
NET = {"hidden": [32, 32], "activation": "relu"}


class Aim(gym.Env):
    """Shows -1 or 1 for `steps` steps with actions from -2 to 2; the last pays `pays(shown, first action)`."""

    def __init__(self, pays: Callable[[float, float], float], steps: int = 1):
        self.observation_space = spaces.Box(-1, 1, (3,), np.float32)
        self.action_space = spaces.Box(-2, 2, (1,), np.float32)
        self.pays, self.steps = pays, steps
        self.taken: list[float] = []

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.shown, self.at = float(self.np_random.choice([-1.0, 1.0])), 0
        return np.array([self.shown, 0, 0], np.float32), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        self.taken.append(float(action[0]))
        if self.at == 0:
            self.first = float(action[0])
        self.at += 1
        over = self.at == self.steps
        # After the first step it shows what was done, so that every second state has a value of its own.
        obs = np.array([self.shown, 1, self.first / 2], np.float32)
        return obs, self.pays(self.shown, self.first) if over else 0.0, over, False, {}


def made(name: str, factory: Callable[[], gym.Env], num_envs: int = 4, **given: Any) -> Any:
    defaults: dict[str, Any] = {"net": NET, "batch": 64, "start": 128, "horizon": 32, "buffer": 5000, "lr": rate(3e-3)}
    if name != "td3":
        defaults["alpha"] = 0.01
    if name == "crossq":
        defaults |= {"renorm_warmup": 100, "policy_delay": 1, "renorm_momentum": 0.1}
    return learner_on(sync(factory, num_envs), name, **(defaults | given))


def rate(value: float) -> dict[str, Any]:
    return {"shape": "constant", "start": value}


def trained(name: str, factory: Callable[[], gym.Env], updates: int, **given: Any) -> Any:
    algorithm = made(name, factory, **given)
    while algorithm.updates < updates:
        algorithm.step(0.0)
    return algorithm


def q(algorithm: Any, obs: list[list[float]], actions: list[list[float]] | None = None) -> Tensor:
    """What both critics say, as the policy's step sees them."""
    critics = algorithm.critics(algorithm.learned.critics.vector)
    given = (torch.tensor(obs), None if actions is None else torch.tensor(actions))
    with torch.no_grad():
        values = critics(*given, algorithm.learned.running)[0] if isinstance(algorithm, CrossQ) else critics(*given)
    return values.mean(dim=2) if isinstance(algorithm, TQC) else values
