"""A policy as an object: what a checkpoint holds and `palestra.load` gives back."""

from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor

from palestra.control.actors import Actor
from palestra.errors import UsageError


def as_input(obs: np.ndarray) -> np.ndarray:
    """An observation as networks take it: floats in single precision, integers (images) as they are."""
    return obs.astype(np.float32, copy=False) if obs.dtype.kind == "f" else obs


def observation_shape(space: gym.Space) -> tuple[int, ...]:
    """The shape of one observation of a space that policies can see."""
    if not isinstance(space, gym.spaces.Box):
        raise UsageError(f"the observation space {space} is not supported: wrap the environment so that it gives a Box")
    return space.shape


class Policy:
    """Acts on observations: what a checkpoint holds of an algorithm, and `palestra.load` gives back."""

    def __init__(self, obs_shape: tuple[int, ...], net: Actor, device: torch.device | str = "cpu"):
        self.obs_shape, self.head, self.device = obs_shape, net.head, torch.device(device)
        self.net = net.to(self.device)

    def act(self, obs: Any, *, deterministic: bool = True) -> np.ndarray:
        """The action for one observation, or the actions for a batch of them (one more dimension in front)."""
        array = as_input(np.asarray(obs))
        single = array.shape == self.obs_shape
        if not single and array.shape[1:] != self.obs_shape:
            raise UsageError(f"expected an observation of shape {self.obs_shape} or a batch of them, got {array.shape}")
        batch = torch.from_numpy(array[None] if single else array)
        actions = self.greedy(batch) if deterministic else self._drawn(batch)
        return self.head.to_env(actions)[0] if single else self.head.to_env(actions)

    @torch.no_grad()
    def greedy(self, obs: Tensor) -> Tensor:
        """The best actions for a batch of observations."""
        return self.net.greedy(obs.to(self.device))

    @torch.no_grad()
    def _drawn(self, obs: Tensor) -> Tensor:
        return self.net.drawn(obs.to(self.device), torch.default_generator)

    def state(self) -> dict[str, Any]:
        """Weights and spaces as plain data and tensors, copied: later updates do not change them."""
        weights = {name: value.detach().to("cpu", copy=True) for name, value in self.net.state_dict().items()}
        return {"obs_shape": list(self.obs_shape), "actions": self.head.description, "weights": weights}

    def load_state(self, state: dict[str, Any]) -> None:
        """Take the weights of `state()`; they are copied into the parameters, so views of them stay views."""
        self.net.load_state_dict(state["weights"])
