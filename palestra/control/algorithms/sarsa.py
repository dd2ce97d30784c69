"""SARSA (Rummery & Niranjan 1994) with a network: learns the values of the policy that explores.

What it stores: one rollout of T steps in N environments, thrown away after it was learned from.
How it acts: ε-greedily, each environment for itself, or by a softmax of the values.
How it learns: Q(s, a) towards r + γ · Q(s', a'), a' being the action that was taken next, or with λ above 0 towards
r + γ · ((1 − λ) · Q(s', a') + λ · what s' is itself learned towards); one gradient step a rollout.
Where an episode was truncated nothing was taken next: there a' is drawn as the policy draws.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from palestra.control.algorithms.base import Algorithm, AlgorithmParts
from palestra.control.algorithms.off_policy import refuse_masks
from palestra.control.collector import Collector, Rollout
from palestra.control.episodes import Episodes
from palestra.control.nets.actor_critic import Flat
from palestra.control.nets.heads import ActionHead
from palestra.control.nets.values import QNet, draws, explored
from palestra.control.optim import Adam, adam_step, clip_norm, compiled, scheduled
from palestra.control.policy import Policy
from palestra.control.scaling import ObsScale, Rewards, obs_scale
from palestra.rl.losses import masked_mean
from palestra.rl.returns import lambda_returns
from palestra.spec.kinds.control import ControlSpec, SARSASpec

METRICS = ("loss", "q", "grad_norm")


class SarsaBatch(NamedTuple):
    """Transitions to learn from, one a row."""

    obs: Tensor
    actions: Tensor
    targets: Tensor
    valid: Tensor | None  # None: every row is a real transition


class SARSA(Algorithm):
    """The learner."""

    supports = ("discrete",)

    def __init__(self, parts: AlgorithmParts):
        super().__init__(parts)
        assert isinstance(parts.spec.algorithm, SARSASpec)
        self.spec, self.frames = parts.spec.algorithm, parts.spec.train.frames
        self.net = self.actor(parts.spec, parts.obs_shape, parts.head)
        self.policy = Policy(parts.obs_shape, self.net, parts.device)
        self.episodes = Episodes(parts.stepper)
        self.collector = Collector(self.episodes, self.spec.horizon, parts.head.shape, parts.head.dtype)
        self.rewards = Rewards(parts.spec.env, self.episodes.num_envs, self.spec.gamma, parts.device)
        self.scale = next((module for module in self.net.modules() if isinstance(module, ObsScale)), None)
        self.flat = Flat(self.net)
        self.adam = Adam.zeros(self.flat.vector)
        self.chosen: Tensor | None = None
        """The actions that the next rollout begins with: those that the last row of the one before was valued by."""
        self._update = compiled(self.update) if parts.compile else self.update

    @classmethod
    def actor(cls, spec: ControlSpec, obs_shape: tuple[int, ...], head: ActionHead) -> QNet:
        """The values of all actions."""
        return QNet(obs_shape, head, spec.net, obs_scale(spec.env, obs_shape))

    def step(self, progress: float) -> dict[str, float]:
        """Collect one rollout and learn from it."""
        refuse_masks(self.episodes, self.spec.name)
        with self.span("collect"):
            rollout = self.collect(progress).to(self.policy.device)
        with self.span("learn"):
            lr = scheduled(self.spec.lr, progress).to(self.policy.device)
            vector, self.adam, metrics = self._update(self.adam, self.prepare(rollout, progress), lr)
            self.flat.vector.copy_(vector)
            if self.scale is not None:
                self.scale.update(rollout.obs, rollout.valid)
        self.updates += 1
        return dict(zip(METRICS, metrics.tolist(), strict=True)) | {"updates": self.updates}

    def collect(self, progress: float) -> Rollout:
        """T steps of the exploring policy in all environments, and what it does after the last one."""
        steps, envs = self.spec.horizon, self.episodes.num_envs
        softmax = self.spec.temperature is not None
        noise = draws(self.net, self.generator, steps + 1, envs, softmax=softmax)
        began = self.episodes.frame

        def act(obs: Tensor, number: Tensor) -> Tensor:
            t = int(number)
            if t == 0 and self.chosen is not None:
                return self.chosen
            now = progress + (self.episodes.frame - began) / self.frames
            obs = obs.to(self.policy.device)
            return explored(self.net, obs, noise, t, now, self.spec.epsilon, self.spec.temperature)

        rollout = self.collector.collect(act, torch.arange(steps), self.policy.head.to_env)
        with torch.no_grad():
            self.chosen = None
            self.chosen = act(rollout.last_obs, torch.tensor(steps)).cpu()
        return rollout

    @torch.no_grad()
    def prepare(self, rollout: Rollout, progress: float) -> SarsaBatch:
        """The targets of a rollout: its λ-returns over Q(s', a'), under the weights that collected it."""
        assert self.chosen is not None
        # By the kind of environment, not by what this rollout holds: see `compiled`.
        valid = rollout.valid if self.episodes.stepper.has_dummy_steps else None
        following = self.following(rollout, self.chosen.to(rollout.rewards.device), progress)
        ended = rollout.terminated | rollout.truncated
        rewards = self.rewards.learned(rollout.rewards, ended, valid)
        targets = lambda_returns(
            rewards,
            following,
            terminated=rollout.terminated,
            truncated=rollout.truncated,
            valid=valid,
            gamma=self.spec.gamma,
            lam=self.spec.lam,
        )
        return SarsaBatch(
            rollout.obs.flatten(0, 1),
            rollout.actions.flatten(0, 1),
            targets.flatten(0, 1),
            None if valid is None else valid.flatten(0, 1),
        )

    def following(self, rollout: Rollout, chosen: Tensor, progress: float) -> Tensor:
        """Q(s', a') of each row, (T, N)."""
        steps, envs = rollout.rewards.shape
        actions = torch.cat([rollout.actions.flatten(0, 1)[envs:], chosen])
        q = self.net.q(torch.cat([rollout.obs.flatten(0, 1)[envs:], rollout.last_obs]))
        values = q.gather(1, actions[:, None]).squeeze(1)
        if len(rollout.ends):
            finals = len(rollout.ends)
            softmax = self.spec.temperature is not None
            noise = draws(self.net, self.generator, 1, finals, softmax=softmax)
            spec = self.spec
            drawn = explored(self.net, rollout.final_obs, noise, 0, progress, spec.epsilon, spec.temperature)
            q = self.net.q(rollout.final_obs)
            values[rollout.ends] = q.gather(1, drawn.to(q.device)[:, None]).squeeze(1)
        return values.view(steps, envs)

    def update(self, adam: Adam, batch: SarsaBatch, lr: Tensor) -> tuple[Tensor, Adam, Tensor]:
        """One gradient step: new parameters, new optimizer memory, metrics. A pure function, eager or one graph."""
        gradient, metrics = self.flat.gradient(lambda net: self.loss(net, batch))
        gradient, norm = clip_norm(gradient, self.spec.max_grad_norm)
        vector, adam = adam_step(self.flat.vector, gradient, adam, lr, self.spec.adam_eps)
        return vector, adam, torch.cat([metrics, norm.detach().reshape(1)])

    def loss(self, net: Any, batch: SarsaBatch) -> tuple[Tensor, Tensor]:
        """The mean of (Q(s, a) - target)²."""
        values = net(batch.obs).squeeze(2).gather(1, batch.actions[:, None]).squeeze(1)
        loss = masked_mean((values - batch.targets).square(), batch.valid)
        return loss, torch.stack([loss.detach(), masked_mean(values.detach(), batch.valid)])

    def state(self) -> dict[str, Any]:
        """Everything that the next step depends on, besides the generator's state."""
        return {
            "policy": self.policy.state(),
            "adam": dict(self.adam._asdict()),
            "updates": self.updates,
            "episodes": self.episodes.state(),
            "rewards": self.rewards.state(),
            "chosen": None if self.chosen is None else self.chosen.clone(),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from `state()`."""
        self.policy.load_state(state["policy"])
        self.updates, self.chosen = state["updates"], state["chosen"]
        self.adam = Adam(**{name: value.to(self.policy.device) for name, value in state["adam"].items()})
        self.rewards.load_state(state["rewards"])
        restarted = self.episodes.load_state(state["episodes"])
        if restarted is not None:  # what was chosen was for what they showed before
            self.chosen = None
            self.rewards.cut(restarted)
