"""A policy as an object: what a checkpoint holds and `palestra.load` gives back."""

from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor

from palestra.control.actions import ActionHead
from palestra.control.nets import ActorCritic
from palestra.errors import UsageError
from palestra.spec.kinds.control import NetSpec


def as_input(obs: np.ndarray) -> np.ndarray:
    """An observation as networks take it: floats in single precision, integers (images) as they are."""
    return obs.astype(np.float32, copy=False) if obs.dtype.kind == "f" else obs


class Policy:
    """Acts on observations: `act` for people, `sample` for the collector's loop."""

    def __init__(self, obs_shape: tuple[int, ...], head: ActionHead, spec: NetSpec, device: torch.device):
        self.obs_shape, self.head, self.device = obs_shape, head, device
        self.net = ActorCritic(obs_shape, head, spec).to(device)

    @classmethod
    def of(cls, obs_space: gym.Space, action_space: gym.Space, spec: NetSpec, device: torch.device) -> "Policy":
        """A fresh policy for an environment's spaces."""
        if not isinstance(obs_space, gym.spaces.Box):
            raise UsageError(
                f"the observation space {obs_space} is not supported: wrap the environment so that it gives a Box"
            )
        return cls(obs_space.shape, ActionHead.of(action_space), spec, device)

    @classmethod
    def restored(cls, state: dict[str, Any], spec: NetSpec) -> "Policy":
        """The policy that `state()` describes."""
        policy = cls(tuple(state["obs_shape"]), ActionHead(state["actions"]), spec, torch.device("cpu"))
        policy.load_state(state)
        return policy

    def act(self, obs: Any, *, deterministic: bool = True) -> np.ndarray:
        """The action for one observation, or the actions for a batch of them (one more dimension in front)."""
        array = as_input(np.asarray(obs))
        single = array.shape == self.obs_shape
        if not single and array.shape[1:] != self.obs_shape:
            raise UsageError(f"expected an observation of shape {self.obs_shape} or a batch of them, got {array.shape}")
        batch = torch.from_numpy(array[None] if single else array)
        actions = self.greedy(batch) if deterministic else self._sampled(batch)
        return self.head.to_env(actions)[0] if single else self.head.to_env(actions)

    def sample(self, obs: Tensor, noise: Tensor) -> Tensor:
        """Sampled actions for a batch of observations, by noise drawn before."""
        return self.net.policy(obs.to(self.device)).sample(noise)

    @torch.no_grad()
    def greedy(self, obs: Tensor) -> Tensor:
        """The most likely actions for a batch of observations."""
        return self.net.policy(obs.to(self.device)).mode()

    @torch.no_grad()
    def _sampled(self, obs: Tensor) -> Tensor:
        return self.sample(obs, self.head.noise(torch.default_generator, len(obs)).to(self.device))

    def state(self) -> dict[str, Any]:
        """Weights and spaces as plain data and tensors, copied: later updates do not change them."""
        weights = {name: value.detach().to("cpu", copy=True) for name, value in self.net.state_dict().items()}
        return {"obs_shape": list(self.obs_shape), "actions": self.head.description, "weights": weights}

    def load_state(self, state: dict[str, Any]) -> None:
        """Take the weights of `state()`; they are copied into the parameters, so views of them stay views."""
        self.net.load_state_dict(state["weights"])
