"""Small environments whose right answers are known, and a PPO learner on any environment."""

from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv, VectorWrapper

from palestra.control.algorithms import algorithm_of
from palestra.control.algorithms.base import Algorithm, AlgorithmParts
from palestra.control.algorithms.ppo import PPO
from palestra.control.envs.stepping import Stepper
from palestra.control.nets.actor_critic import ActorCritic
from palestra.control.nets.heads import ActionHead
from palestra.control.policy import Policy
from palestra.control.spaces import observation_shape
from palestra.spec.kinds.control import ControlSpec
from palestra.spec.shape import NetSpec


class Scripted(gym.Env):
    """Episodes of lengths and kinds of end drawn once from the seed; observations say where one is.

    An observation is (seed, episode, step, flag), the flag being 1 in reset observations only, so that a reset
    observation taken for a successor is seen. Rewards are multiples of 1/8: sums of them are exact.
    """

    palestra_state = ("number", "episode", "at", "length", "end")

    def __init__(self, longest: int = 6):
        self.observation_space = spaces.Box(-np.inf, np.inf, (4,), np.float32)
        self.action_space = spaces.Discrete(3)
        self.longest = longest
        self.number = self.episode = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        if seed is not None:
            self.number, self.episode = seed % 1000, 0
        self.episode, self.at = self.episode + 1, 0
        self.length = int(self.np_random.integers(1, self.longest + 1))
        self.end = int(self.np_random.integers(3))  # terminated, truncated, both at once
        return np.array([self.number, self.episode, 0, 1], np.float32), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        self.at += 1
        over = self.at == self.length
        assert self.at <= self.length, "stepped past the end of an episode"
        reward = ((self.number * 31 + self.episode * 17 + self.at * 7 + int(action) * 3) % 16 - 8) / 8
        obs = np.array([self.number, self.episode, self.at, 0], np.float32)
        return obs, reward, over and self.end != 1, over and self.end != 0, {}


def scripted_action(obs: torch.Tensor) -> torch.Tensor:
    """Actions of 0, 1 and 2 that depend on nothing but the observations `(B, D)`."""
    return obs.long().sum(dim=1) % 3


def place(obs: torch.Tensor) -> torch.Tensor:
    """One number for each observation of `Scripted`, different for different ones, as a value function would give."""
    return obs.double() @ torch.tensor([1e6, 1e3, 10.0, 1.0], dtype=torch.float64)


class DenseFinalObs(VectorWrapper):
    """Gives `infos["final_obs"]` as ALE's vector environment does: one array with a row for every environment."""

    def step(self, actions: Any) -> tuple:
        obs, rewards, terminated, truncated, infos = self.env.step(actions)
        if "final_obs" in infos:
            dense = np.zeros_like(obs)
            for i in np.flatnonzero(infos["_final_obs"]):
                dense[i] = infos["final_obs"][i]
            infos = {**infos, "final_obs": dense}
        return obs, rewards, terminated, truncated, infos


class OneStep(gym.Env):
    """Shows -1 or 1 and ends at once, with the reward `pays(shown, action)`."""

    def __init__(self, pays: Callable[[float, int], float]):
        self.observation_space = spaces.Box(-1, 1, (1,), np.float32)
        self.action_space = spaces.Discrete(2)
        self.pays = pays

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.shown = float(self.np_random.choice([-1.0, 1.0]))
        return np.array([self.shown], np.float32), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        return np.zeros(1, np.float32), self.pays(self.shown, int(action)), True, False, {}


class Walk(gym.Env):
    """Goes through `rewards` whatever is done, showing how far it is, then terminates or is truncated.

    With `loop` it shows the same all the time: without the time limit it would be one state with an infinite future.
    """

    def __init__(self, rewards: list[float], *, truncates: bool = False, loop: bool = False):
        self.observation_space = spaces.Box(0, np.inf, (1,), np.float32)
        self.action_space = spaces.Discrete(2)
        self.rewards, self.truncates, self.loop = rewards, truncates, loop

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.at = 0
        return self._show(), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        reward = self.rewards[self.at]
        self.at += 1
        over = self.at == len(self.rewards)
        return self._show(), reward, over and not self.truncates, over and self.truncates, {}

    def _show(self) -> np.ndarray:
        return np.array([0 if self.loop else self.at], np.float32)


def sync(factory: Callable[[], gym.Env], num_envs: int, mode: AutoresetMode = AutoresetMode.SAME_STEP) -> VectorEnv:
    """Copies of an environment, stepped one after the other."""
    return SyncVectorEnv([factory] * num_envs, autoreset_mode=mode)


def learner_on(
    env: VectorEnv,
    name: str,
    *,
    seed: int = 0,
    compile: bool = False,
    net: dict[str, Any] | None = None,
    given: dict[str, Any] | None = None,
    frames: int = 10_000,
    **algorithm: Any,
) -> Algorithm:
    """The algorithm `name` on `env`, reset and ready for its first step; `given` are fields of `env:`."""
    torch.manual_seed(seed)
    spec = ControlSpec.model_validate(
        {
            "kind": "control",
            "name": "probe",
            "env": {"id": "probe", "num_envs": env.num_envs, **(given or {})},
            "algorithm": {"name": name, **algorithm},
            "net": net or {},
            "train": {"frames": frames, "compile": "on" if compile else "off"},
        }
    )
    made = algorithm_of(spec)(AlgorithmParts.of(spec, Stepper(env), seed, torch.device("cpu"), compile=compile))
    made.episodes.reset(seed)
    return made


def policy_for(obs: gym.Space, actions: gym.Space, seed: int = 0, **net: Any) -> Policy:
    """A new policy of PPO for these spaces."""
    torch.manual_seed(seed)
    shape = observation_shape(obs)
    return Policy(shape, ActorCritic(shape, ActionHead.of(actions), NetSpec(**net)))


def ppo_on(env: VectorEnv, **given: Any) -> PPO:
    """PPO on `env`."""
    made = learner_on(env, "ppo", **given)
    assert isinstance(made, PPO)
    return made
