"""How value-based algorithms explore: ε-greedily or by a softmax of the values, every environment for itself."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from palestra.control.q_nets import QNet
from palestra.rl.schedules import value
from palestra.spec.schedule import Schedule


class Draws(NamedTuple):
    """The noise of a whole step, drawn at once."""

    chance: np.ndarray  # (T, N) uniform: below ε the action is random
    random: Tensor  # (T, N) uniform actions
    gumbel: Tensor | None  # (T, N, A), where actions are drawn by a softmax


def draws(net: QNet, generator: torch.Generator, steps: int, envs: int, *, softmax: bool) -> Draws:
    """What `explored` needs for `steps` vector steps."""
    actions = net.head.outputs
    chance = torch.rand(steps, envs, generator=generator).numpy()
    random = torch.randint(actions, (steps, envs), generator=generator)
    # argmax(x + Gumbel noise) is a draw from softmax(x).
    uniform = torch.rand(steps, envs, actions, generator=generator) if softmax else None
    return Draws(chance, random, None if uniform is None else -torch.log(-torch.log(uniform.clamp(1e-10, 1 - 1e-7))))


def explored(
    net: QNet, obs: Tensor, noise: Draws, t: int, progress: float, epsilon: Schedule, temperature: Schedule | None
) -> Tensor:
    """Actions of the exploring policy for `obs`, (N, ...)."""
    if temperature is not None:
        assert noise.gumbel is not None
        degree = max(value(progress=progress, **temperature.arguments()), 1e-8)  # 0 is greedy
        return (net.q(obs) / degree + noise.gumbel[t].to(obs.device)).argmax(dim=1)
    random = noise.chance[t] < value(progress=progress, **epsilon.arguments())
    if random.all():
        return noise.random[t]
    best = net.greedy(obs)
    return best if not random.any() else torch.where(torch.from_numpy(random), noise.random[t], best.cpu())
