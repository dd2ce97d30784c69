"""Q-networks and twin critics, the squashed policies that go with them, batch renormalization, exploration."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from palestra.control.nets.actor_critic import Actor
from palestra.control.nets.heads import ActionHead
from palestra.control.nets.trunks import ACTIVATIONS, Mlp, NoisyLinear, Trunk, affine, begin, linear, product
from palestra.errors import UsageError
from palestra.rl.distributions import Categorical, SquashedGaussian
from palestra.rl.schedules import value
from palestra.spec.off_policy import AtomsSpec, DQNSpec
from palestra.spec.schedule import Schedule
from palestra.spec.shape import NetSpec


class ActionValues(Actor):
    """The end of a Q-network: features to the return of every action as its mean, quantiles or logits of atoms."""

    support: Tensor | None
    """The returns of the atoms, (outputs,), where there are any."""

    def make_heads(self, inputs: int, own: list[int], spec: NetSpec, options: DQNSpec | None) -> None:
        """The layers after `inputs` features, of dueling streams each after its `own` hidden ones."""
        form, noisy = (None, None) if options is None else (options.distributional, options.noisy)
        self.outputs = 1 if form is None else form.atoms if isinstance(form, AtomsSpec) else form.quantiles
        gain, sizes = 1.0 if spec.orthogonal else None, [inputs, *own]
        self.advantage_stream = Mlp(sizes, spec, noisy) if own else None
        self.advantage_head = linear(sizes[-1], self.head.outputs * self.outputs, gain, noisy)
        self.value_stream = Mlp(sizes, spec, noisy) if own else None
        dueling = options is not None and options.dueling
        self.value_head = linear(sizes[-1], self.outputs, gain, noisy) if dueling else None
        atoms = torch.linspace(form.low, form.high, form.atoms) if isinstance(form, AtomsSpec) else None
        self.register_buffer("support", atoms, persistent=False)
        noised = [layer for layer in self.modules() if isinstance(layer, NoisyLinear)]
        self.noise_sizes = [layer.in_features + layer.out_features for layer in noised]
        """Of the noise of each noisy layer: those of the advantage stream, its head, then the same of the value."""

    def action_values(self, hidden: Tensor, noise: Tensor | None = None) -> Tensor:
        """(..., inputs) to (..., A, outputs); `noise`, (..., sum of noise_sizes): one for all rows, or one a row."""
        parts = None if noise is None else noise.split(self.noise_sizes, dim=-1)
        number = 1 if self.advantage_stream is None else 1 + len(self.advantage_stream.layers)
        first, second = (None, None) if parts is None else (parts[:number], parts[number:])
        values = _branch(hidden, self.advantage_stream, self.advantage_head, first)
        values = values.unsqueeze(-1) if self.outputs == 1 else values.unflatten(-1, (self.head.outputs, self.outputs))
        if self.value_head is None:
            return values
        # Without the mean taken out, a constant could move between the two (Wang et al. 2016, eq. 9).
        value = _branch(hidden, self.value_stream, self.value_head, second).unsqueeze(-2)
        return value + values - values.mean(dim=-2, keepdim=True)

    def expected(self, outputs: Tensor) -> Tensor:
        """The mean return of what `action_values` gives, (..., A)."""
        if self.support is not None:
            return outputs.softmax(dim=-1) @ self.support
        return outputs.squeeze(-1) if self.outputs == 1 else outputs.mean(dim=-1)


def _branch(hidden: Tensor, stream: Mlp | None, last: nn.Linear, noise: Sequence[Tensor] | None) -> Tensor:
    own = hidden if stream is None else stream.forward(hidden, noise)
    return affine(own, last, None if noise is None else noise[-1])


class QNet(ActionValues):
    """Q of every action of a Discrete space; acts greedily."""

    def __init__(
        self,
        obs_shape: Sequence[int],
        head: ActionHead,
        spec: NetSpec,
        obs_scale: nn.Module | None = None,
        options: DQNSpec | None = None,
    ):
        super().__init__(head)
        # Of dueling streams the last hidden layer is each one's own.
        own = spec.hidden[-1:] if options is not None and options.dueling else []
        self.trunk = Trunk(obs_shape, spec, spec.hidden[: len(spec.hidden) - len(own)], obs_scale)
        self.make_heads(self.trunk.size, own, spec, options)

    def forward(self, obs: Tensor, noise: Tensor | None = None) -> Tensor:
        """What is predicted of the return of every action, (B, A, outputs)."""
        return self.action_values(self.trunk.forward(obs), noise)

    def q(self, obs: Tensor, noise: Tensor | None = None) -> Tensor:
        """Q of every action, (B, A)."""
        return self.expected(self.forward(obs, noise))

    def actions(self, obs: Tensor, mask: Tensor | None = None, generator: torch.Generator | None = None) -> Tensor:
        """The actions of the highest Q, without noise."""
        return forbid(self.q(obs), mask).argmax(dim=1)


def forbid(q: Tensor, mask: Tensor | None) -> Tensor:
    """Values (..., A) with −∞ where `mask` is False."""
    return q if mask is None else q.masked_fill(~mask, float("-inf"))


LOG_STD_BOUNDS = (-20.0, 2.0)  # of Haarnoja's code: beyond them log-densities overflow or nothing is learned


def check_bounds(head: ActionHead, algorithm: str) -> None:
    """Refuse a Box without bounds: actions within −1..1 are units of half of its range."""
    if not head.continuous:
        return
    low, high = head.description["low"], head.description["high"]
    if not (np.isfinite(low) & np.isfinite(high)).all():
        raise UsageError(
            f"{algorithm} needs an action space with finite bounds, got {low} to {high}: "
            "wrap the environment in gymnasium.wrappers.ClipAction or RescaleAction with finite bounds, or use ppo"
        )


class SoftActor(Actor):
    """A stochastic policy: a squashed Gaussian for a Box, a softmax for Discrete actions."""

    def __init__(self, obs_shape: Sequence[int], head: ActionHead, spec: NetSpec, obs_scale: nn.Module | None = None):
        super().__init__(head)
        self.trunk = Trunk(obs_shape, spec, obs_scale=obs_scale)
        outputs = head.outputs
        gain = 0.01 if spec.orthogonal else None  # the first policy is almost the same whatever the observation
        self.policy_head = linear(self.trunk.size, 2 * outputs if head.continuous else outputs, gain)
        if head.continuous:
            with torch.no_grad():
                self.policy_head.bias[outputs:] = spec.log_std

    def forward(self, obs: Tensor, mask: Tensor | None = None) -> SquashedGaussian | Categorical:
        """The distribution over actions in `obs`, (B, ...); `mask`, (B, A), is True for Discrete ones allowed."""
        outputs = affine(self.trunk.forward(obs), self.policy_head)
        if not self.head.continuous:
            return Categorical(outputs, mask)
        mean, log_std = outputs.chunk(2, dim=-1)
        return SquashedGaussian(mean, log_std.clamp(*LOG_STD_BOUNDS))

    policy = forward


class DeterministicActor(Actor):
    """One action of a Box for each observation: the policy of TD3."""

    def __init__(self, obs_shape: Sequence[int], head: ActionHead, spec: NetSpec, obs_scale: nn.Module | None = None):
        super().__init__(head)
        self.trunk = Trunk(obs_shape, spec, obs_scale=obs_scale)
        self.policy_head = linear(self.trunk.size, head.outputs, 0.01 if spec.orthogonal else None)

    def forward(self, obs: Tensor) -> Tensor:
        """Actions within −1..1, (B, D)."""
        return torch.tanh(affine(self.trunk.forward(obs), self.policy_head))

    def actions(self, obs: Tensor, mask: Tensor | None = None, generator: torch.Generator | None = None) -> Tensor:
        return self.forward(obs)


MOST_SCALE, MOST_SHIFT = 3.0, 5.0  # r_max and d_max after the warm-up (Ioffe 2017, §4)
EPS = 1e-3


class Running(NamedTuple):
    """The running mean and variance of one layer for each of the twins, `(2, 1, D)`."""

    mean: Tensor
    var: Tensor


def warmth_after(updates: int, warmup: int) -> list[float]:
    """r_max and d_max of batch renormalization after `updates`: from 1 and 0, plain batch normalization, linearly."""
    share = 1.0 if warmup == 0 else min(1.0, updates / warmup)
    return [1.0 + share * (MOST_SCALE - 1.0), share * MOST_SHIFT]


def normalized(x: Tensor, running: Running) -> Tensor:
    """`x` (2, B, D) by the running statistics: how a network that is not learning sees it."""
    return (x - running.mean) * torch.rsqrt(running.var + EPS)


def renormalized(x: Tensor, running: Running, warmth: Tensor, momentum: float) -> tuple[Tensor, Running]:
    """`x` (2, B, D) by the batch's statistics, corrected towards the running ones, and these after the batch.

    `warmth` (2,) is what `warmth_after` says. The correction has no gradient; within its bounds the result equals
    `normalized`, so that what is learned is what the policy's step then sees.
    """
    var, mean = torch.var_mean(x, dim=1, keepdim=True, correction=0)
    std, running_std = (var + EPS).sqrt(), (running.var + EPS).sqrt()
    ratio, offset = std.detach() / running_std, (mean.detach() - running.mean) / running_std
    scale = torch.minimum(torch.maximum(ratio, 1.0 / warmth[0]), warmth[0])
    shift = torch.minimum(torch.maximum(offset, -warmth[1]), warmth[1])
    after = Running(torch.lerp(running.mean, mean.detach(), momentum), torch.lerp(running.var, var.detach(), momentum))
    return (x - mean) / std * scale + shift, after


class TwinLayers(nn.Module):
    """The layers of both critics: one shared encoder of images or graph of the spec, and hidden layers for each."""

    def __init__(
        self,
        obs_shape: Sequence[int],
        head: ActionHead,
        spec: NetSpec,
        obs_scale: nn.Module | None = None,
        quantiles: int = 1,
    ):
        super().__init__()
        self.encoder = Trunk(obs_shape, spec, hidden=[], obs_scale=obs_scale)
        self.continuous = head.continuous
        hidden = spec.hidden if spec.critic_hidden is None else spec.critic_hidden
        self.sizes = [self.encoder.size + (head.outputs if self.continuous else 0), *hidden]
        outputs = quantiles if self.continuous else head.outputs
        self.activation = ACTIVATIONS[spec.activation]
        layers = [*pairwise(self.sizes), (self.sizes[-1], outputs)]
        gains = [math.sqrt(2)] * len(hidden) + [1.0] if spec.orthogonal else [None] * len(layers)
        begun = [_twin_layer(*sides, gain) for sides, gain in zip(layers, gains, strict=True)]
        self.weights = nn.ParameterList([weight for weight, _ in begun])  # (2, inputs, outputs)
        self.biases = nn.ParameterList([bias for _, bias in begun])  # (2, 1, outputs)
        normed = hidden if spec.layer_norm else []
        self.norm_weights = nn.ParameterList([torch.ones(2, 1, size) for size in normed])
        self.norm_biases = nn.ParameterList([torch.zeros(2, 1, size) for size in normed])
        self.layer_norm = spec.layer_norm

    def inputs(self, obs: Tensor, actions: Tensor | None, twins: int = 2) -> Tensor:
        """What the hidden layers of both take, (2, B, inputs), or of the first alone, (1, B, inputs)."""
        features = self.encoder.forward(obs)
        if self.continuous:
            assert actions is not None
            features = torch.cat([features, actions], dim=1)
        return features.expand(twins, *features.shape)

    def hidden(self, x: Tensor, layer: int) -> Tensor:
        """One hidden layer of those that `x` is for."""
        n = len(x)
        x = product(x, self.weights[layer][:n]) + self.biases[layer][:n]  # not baddbmm: that copies the biases first
        if self.layer_norm:
            x = F.layer_norm(x, x.shape[-1:]) * self.norm_weights[layer][:n] + self.norm_biases[layer][:n]
        return self.activation(x)

    def outputs(self, x: Tensor) -> Tensor:
        """From the last hidden layer to values."""
        q = product(x, self.weights[-1][: len(x)]) + self.biases[-1][: len(x)]
        return q.squeeze(-1) if self.continuous else q


class Critics(TwinLayers):
    """Q of observations and actions for a Box, (2, B), or its quantiles, (2, B, N); of all Discrete ones (2, B, A)."""

    def forward(self, obs: Tensor, actions: Tensor | None = None, twins: int = 2) -> Tensor:
        """Values of both, or of the first alone; `actions` are looked at where they are a Box's."""
        x = self.inputs(obs, actions, twins)
        for layer in range(len(self.sizes) - 1):
            x = self.hidden(x, layer)
        return self.outputs(x)


class RenormCritics(TwinLayers):
    """The same with batch renormalization of what each layer takes (Bhatt et al. 2024, fig. 2)."""

    def __init__(
        self, obs_shape: Sequence[int], head: ActionHead, spec: NetSpec, obs_scale: nn.Module | None, momentum: float
    ):
        super().__init__(obs_shape, head, spec, obs_scale)
        self.momentum = momentum
        self.scales = nn.ParameterList([torch.ones(2, 1, size) for size in self.sizes])
        self.shifts = nn.ParameterList([torch.zeros(2, 1, size) for size in self.sizes])

    def start(self) -> list[Running]:
        """The statistics before the first batch."""
        return [Running(torch.zeros(2, 1, size), torch.ones(2, 1, size)) for size in self.sizes]

    def forward(
        self, obs: Tensor, actions: Tensor | None, running: list[Running], warmth: Tensor | None = None
    ) -> tuple[Tensor, list[Running]]:
        """Values of both and the new running statistics; without `warmth` by the running ones, which then stay."""
        x, after = self.inputs(obs, actions), []
        for layer, (statistics, scale, shift) in enumerate(zip(running, self.scales, self.shifts, strict=True)):
            if layer > 0:
                x = self.hidden(x, layer - 1)
            if warmth is None:
                x, now = normalized(x, statistics), statistics
            else:
                x, now = renormalized(x, statistics, warmth, self.momentum)
            x = x * scale + shift
            after.append(now)
        return self.outputs(x), after


def _twin_layer(inputs: int, outputs: int, gain: float | None) -> tuple[nn.Parameter, nn.Parameter]:
    """Initial weights and biases of one layer of both critics."""
    first, second = nn.Linear(inputs, outputs), nn.Linear(inputs, outputs)
    layers = begin(first, gain), begin(second, gain)
    weight = torch.stack([layer.weight.detach().T for layer in layers])
    return nn.Parameter(weight), nn.Parameter(torch.stack([layer.bias.detach()[None] for layer in layers]))


class ExplorationNoise(NamedTuple):
    """The random numbers of a whole step, generated at once."""

    chance: np.ndarray  # (T, N) uniform: below ε the action is random
    random: Tensor  # (T, N) uniform actions
    gumbel: Tensor | None  # (T, N, A), where actions are sampled by a softmax
    layers: Tensor | None = None  # (T, N, ...), of noisy layers


@dataclass(frozen=True)
class Exploration:
    """ε-greedy actions of a Q-network, or with a temperature a softmax of its values."""

    net: QNet
    generator: torch.Generator
    epsilon: Schedule
    temperature: Schedule | None

    def noise(self, steps: int, envs: int) -> ExplorationNoise:
        """What `actions` needs for `steps` vector steps."""
        outputs = self.net.head.outputs
        chance = torch.rand(steps, envs, generator=self.generator).numpy()
        random = torch.randint(outputs, (steps, envs), generator=self.generator)
        if self.temperature is None:
            return ExplorationNoise(chance, random, None)
        # argmax(x + Gumbel noise) is a sample of softmax(x).
        uniform = torch.rand(steps, envs, outputs, generator=self.generator).clamp(1e-10, 1 - 1e-7)
        return ExplorationNoise(chance, random, -torch.log(-torch.log(uniform)))

    def actions(self, obs: Tensor, noise: ExplorationNoise, t: int, progress: float) -> Tensor:
        """Actions of the exploring policy for `obs`, (N, ...)."""
        return self.chosen(lambda: self.net.q(obs), noise, t, progress)

    def chosen(
        self, q: Callable[[], Tensor], noise: ExplorationNoise, t: int, progress: float, mask: np.ndarray | None = None
    ) -> Tensor:
        """Actions of the exploring policy by the values `q()`, (N, A), of those that `mask` allows."""

        def values() -> Tensor:
            scores = q()
            return scores if mask is None else forbid(scores, torch.from_numpy(mask).to(scores.device))

        if self.temperature is not None:
            assert noise.gumbel is not None
            degree = max(value(progress=progress, **self.temperature.arguments()), 1e-8)  # 0 is greedy
            scores = values() / degree
            return (scores + noise.gumbel[t].to(scores.device)).argmax(dim=1)
        epsilon = value(progress=progress, **self.epsilon.arguments())
        random = noise.chance[t] < epsilon
        if not random.any():
            return values().argmax(dim=1)
        others = noise.random[t] if mask is None else _allowed(noise.chance[t] / max(epsilon, 1e-12), mask)
        return others if random.all() else torch.where(torch.from_numpy(random), others, values().argmax(dim=1).cpu())


def _allowed(uniform: np.ndarray, mask: np.ndarray) -> Tensor:
    """The allowed action, (N,), that each of the numbers in [0, 1) falls on; the result for others is not used."""
    counts = mask.sum(axis=1)
    which = np.minimum((uniform * counts).astype(np.int64), counts - 1)
    return torch.from_numpy((mask.cumsum(axis=1) > which[:, None]).argmax(axis=1))
