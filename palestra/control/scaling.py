"""Normalization and clipping of observations and rewards; what is stored and logged stays raw.

Observations and rewards are stored as the environment gave them and scaled where they are used. So a replay memory
never has numbers of old statistics, final observations are scaled as all others, and logged returns are raw.
"""

from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from palestra.rl.normalize import Moments, RewardScale
from palestra.spec.kinds.control import EnvSpec

Numbers = TypeVar("Numbers", Tensor, np.ndarray)


class ObsScale(nn.Module):
    """Brings observations to mean 0 and standard deviation 1: the first layer of a network, saved with its weights.

    Only `update` changes the statistics; acting and evaluating never do. An algorithm calls it after learning from a
    rollout, so that a rollout is acted on and learned from under the same statistics.
    """

    mean: Tensor
    var: Tensor
    count: Tensor
    pixels: Tensor | None

    def __init__(self, obs_shape: Sequence[int], clip: float):
        super().__init__()
        self.clip = clip
        self.register_buffer("mean", torch.zeros(tuple(obs_shape), dtype=torch.float64))
        self.register_buffer("var", torch.ones(tuple(obs_shape), dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        parts = getattr(obs_shape, "parts", None) or []
        pixels = torch.zeros(tuple(obs_shape), dtype=torch.bool)
        for part in parts:
            pixels[..., part.start : part.stop] = part.pixels
        # Of an observation with images in it these stay as they are: networks divide them by 255.
        self.register_buffer("pixels", pixels if pixels.any() else None, persistent=False)

    def forward(self, obs: Tensor) -> Tensor:
        """(obs - mean) / √(var + 1e-8) within ±clip, in single precision; subtracted in double, where 1e4 ± 1 stays."""
        scaled = (obs.to(torch.float64) - self.mean) * torch.rsqrt(self.var + 1e-8)
        scaled = scaled.clamp(-self.clip, self.clip).to(torch.float32)
        return scaled if self.pixels is None else torch.where(self.pixels, obs.to(torch.float32), scaled)

    @torch.no_grad()
    def update(self, obs: Tensor, valid: Tensor | None = None) -> None:
        """Add raw observations `(..., *obs_shape)` to the statistics; rows where `valid` `(...)` is False are left out.

        The buffers are written in place: a compiled graph that reads them sees the new values.
        """
        device = self.mean.device
        moments = Moments(self.mean, self.var, self.count)
        merged = moments.merged(obs.to(device), None if valid is None else valid.to(device))
        for buffer, new in zip(moments, merged, strict=True):
            buffer.copy_(new)


def obs_scale(spec: EnvSpec, obs_shape: Sequence[int]) -> ObsScale | None:
    """The scale that a spec asks for, or None."""
    return ObsScale(obs_shape, spec.clip_obs) if spec.normalize_obs else None


class Rewards:
    """Reward normalization (division by the running standard deviation of the return) and clipping.

    On-policy: `learned(rewards, ended, valid)` of each rollout. Off-policy: store `storable(rewards)`, call `update`
    with the raw ones as they come, and `scaled` on sampled batches.
    """

    def __init__(self, spec: EnvSpec, num_envs: int, gamma: float, device: torch.device | str = "cpu"):
        self.clip = spec.clip_reward
        self.scale = RewardScale(num_envs, gamma, device) if spec.normalize_reward else None

    def learned(self, rewards: Tensor, ended: Tensor, valid: Tensor | None = None) -> Tensor:
        """A rollout's rewards `(T, N)` as they are learned from, themselves in the statistics already."""
        self.update(rewards, ended, valid)
        return self.scaled(self.storable(rewards))

    def update(self, rewards: Tensor, ended: Tensor, valid: Tensor | None = None) -> None:
        """Add a block of raw rewards `(T, N)` and its ends of episodes to the statistics."""
        if self.scale is not None:
            self.scale.update(rewards, ended, valid)

    def storable(self, rewards: Numbers) -> Numbers:
        """What a memory stores: clipped where that is all that is asked for, raw where they will be normalized.

        Clipping alone never changes with time, and the sum of clipped rewards over n steps is not the clipped sum.
        """
        if self.clip is None or self.scale is not None:
            return rewards
        return rewards.clip(-self.clip, self.clip)

    def scaled(self, rewards: Tensor) -> Tensor:
        """What `storable` gave, normalized by the statistics of now and clipped after that.

        A normalized sum over n steps is clipped as a whole.
        """
        return rewards if self.scale is None else self.scale.scale(rewards, self.clip)

    def cut(self, rows: np.ndarray) -> None:
        """The environments of these rows, bool (N,), began new episodes outside of a step: their returns begin at 0."""
        if self.scale is not None:
            began = torch.from_numpy(rows).to(self.scale.running.device)
            self.scale.running = torch.where(began, 0.0, self.scale.running)

    def state(self) -> dict[str, Any]:
        """The statistics, empty where there are none."""
        if self.scale is None:
            return {}
        return {name: value.to("cpu", copy=True) for name, value in self.scale.state_dict().items()}

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from `state()`."""
        if self.scale is not None:
            self.scale.load_state_dict(state)
