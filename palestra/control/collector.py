"""Collects rollouts: T steps of N environments into preallocated (T, N) arrays, with little Python per step."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from palestra.control.episodes import Episodes

Act = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass
class Rollout:
    """(T, N) arrays of transitions. The arrays are reused by the next `collect`: copy what must outlive it."""

    obs: torch.Tensor  # (T, N, ...)
    actions: torch.Tensor  # (T, N, ...)
    rewards: torch.Tensor
    terminated: torch.Tensor
    truncated: torch.Tensor
    valid: torch.Tensor  # False: a dummy autoreset step, not to be learned from
    last_obs: torch.Tensor  # (N, ...) the observations after the last row
    ends: torch.Tensor  # (K,) flat indices t·N + n of the rows that ended an episode
    final_obs: torch.Tensor  # (K, ...) the true successors of those rows
    began: torch.Tensor  # (T, N) whether the row is the first of an episode
    masks: torch.Tensor | None  # (T, N, choices) allowed actions; None in an environment without action masks
    logprobs: torch.Tensor | None = None  # (T, N) that the actions were sampled with; None: those of the policy now

    def to(self, device: torch.device) -> "Rollout":
        """The rollout on a device; itself where it is there already."""
        if self.obs.device == device:
            return self
        columns: dict[str, Any] = {k: v if v is None else v.to(device) for k, v in vars(self).items()}
        return Rollout(**columns)

    def next_values(self, value: Callable[[torch.Tensor], torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """V of each row's observation and of its true successor, both (T, N), in one call of `value`."""
        steps, envs = self.rewards.shape
        rows = steps * envs
        out = value(torch.cat([self.obs.flatten(0, 1), self.last_obs, self.final_obs]))
        values = out[:rows].view(steps, envs)
        # The successor of row t is row t+1 of the same environment, except where an episode ended: there row t+1
        # already belongs to the next episode, and the final observation stands in.
        successors = out[envs : rows + envs].clone()
        successors[self.ends] = out[rows + envs :]
        return values, successors.view(steps, envs)


class Collector:
    """Runs a policy in the environments for a whole rollout at a time."""

    def __init__(self, episodes: Episodes, horizon: int, action_shape: tuple[int, ...], action_dtype: torch.dtype):
        n, shape = episodes.num_envs, episodes.now.shape[1:]
        self.episodes, self.horizon = episodes, horizon
        self.obs = np.zeros((horizon, n, *shape), episodes.obs_dtype)
        self.rewards = np.zeros((horizon, n), np.float32)
        self.terminated, self.truncated, self.valid, self.began = np.zeros((4, horizon, n), bool)
        self.masks: np.ndarray | None = None  # made when the environment has given its first
        self.actions = torch.zeros((horizon, n, *action_shape), dtype=action_dtype)
        self._obs_rows = torch.from_numpy(self.obs).unbind(0)  # made once: a view a step costs more than the copy
        self._action_rows = self.actions.unbind(0)

    @torch.no_grad()
    def collect(self, act: Act, noise: torch.Tensor, to_env: Callable) -> Rollout:
        """`horizon` steps of `act(obs, noise[t])`; `to_env` converts sampled actions to the environment's.

        `act` reads what else it needs, such as the mask, from `episodes`.
        """
        ends: list[int] = []
        finals: list[np.ndarray] = []
        episodes, n = self.episodes, self.episodes.num_envs
        self.valid[:] = True
        if episodes.mask is not None and self.masks is None:
            self.masks = np.ones((self.horizon, *episodes.mask.shape), bool)
        for t, noise_t in enumerate(noise.unbind(0)):
            self.obs[t] = episodes.now
            self.began[t] = episodes.began
            if self.masks is not None:
                self.masks[t] = episodes.mask
            action = act(self._obs_rows[t], noise_t)
            self._action_rows[t].copy_(action)
            _, rewards, terminated, truncated, valid, ended, final_obs = episodes.step(to_env(action))
            self.rewards[t] = rewards
            self.terminated[t] = terminated
            self.truncated[t] = truncated
            if valid is not None:
                self.valid[t] = valid
            if ended is not None and final_obs is not None:
                ends.extend((t * n + ended).tolist())
                finals.append(final_obs)
        final_obs = np.concatenate(finals).astype(self.obs.dtype) if finals else self.obs[:0, 0]
        rollout = Rollout(
            obs=torch.from_numpy(self.obs),
            actions=self.actions,
            rewards=torch.from_numpy(self.rewards),
            terminated=torch.from_numpy(self.terminated),
            truncated=torch.from_numpy(self.truncated),
            valid=torch.from_numpy(self.valid),
            last_obs=torch.from_numpy(episodes.now.astype(self.obs.dtype)),
            ends=torch.tensor(ends, dtype=torch.long),
            final_obs=torch.from_numpy(final_obs),
            began=torch.from_numpy(self.began),
            masks=None if self.masks is None else torch.from_numpy(self.masks),
        )
        rows = self.horizon * n
        # Each array, and for every row of it (vector steps of this rollout before it)·N + environment.
        for what, array, positions in (
            ("reward", rollout.rewards.flatten(0, 1), range(n, n + rows)),
            ("observation", rollout.obs.flatten(0, 1), range(rows)),
            ("final observation", rollout.final_obs, rollout.ends.numpy() + n),
            ("observation", rollout.last_obs, range(rows, rows + n)),
        ):
            episodes.check(what, array.numpy(), positions, self.horizon)
        return rollout
