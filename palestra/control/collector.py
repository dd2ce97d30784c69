"""Collects rollouts: T steps of N environments into preallocated (T, N) arrays, with little Python per step."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch

from palestra.control.envs.snapshot import restore_vector, vector_state
from palestra.control.envs.stepping import Stepper
from palestra.errors import PalestraError

EPISODE_WINDOW = 100  # finished episodes that the running return is averaged over


class NotFinite(PalestraError):
    """A number that must be finite is not; training on would only spread it."""


@dataclass
class Rollout:
    """(T, N) arrays of transitions. The arrays are reused by the next `collect`: copy what must outlive it."""

    obs: torch.Tensor  # (T, N, ...)
    actions: torch.Tensor  # (T, N, ...)
    rewards: torch.Tensor
    terminated: torch.Tensor
    truncated: torch.Tensor
    valid: torch.Tensor  # False: a dummy autoreset step, not to be learned from
    last_obs: torch.Tensor  # (N, ...) what follows the last row
    ends: torch.Tensor  # (K,) flat indices t·N + n of the rows that ended an episode
    final_obs: torch.Tensor  # (K, ...) the true successors of those rows

    def to(self, device: torch.device) -> "Rollout":
        """The rollout on a device; itself where it is there already."""
        if self.obs.device == device:
            return self
        return Rollout(**{field.name: getattr(self, field.name).to(device) for field in fields(self)})

    def next_values(self, value: Callable[[torch.Tensor], torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """V of each row's observation and of its true successor, both (T, N), in one call of `value`."""
        steps, envs = self.rewards.shape
        rows = steps * envs
        everything = torch.cat([self.obs.flatten(0, 1), self.last_obs, self.final_obs])
        out = value(everything)
        values = out[:rows].view(steps, envs)
        # The successor of row t is row t+1 of the same environment, except where an episode ended: there row t+1
        # already belongs to the next episode, and the final observation stands in.
        successors = out[envs : rows + envs].clone()
        successors[self.ends] = out[rows + envs :]
        return values, successors.view(steps, envs)


class Collector:
    """Runs a policy in the environments and remembers where each episode stands."""

    def __init__(self, stepper: Stepper, horizon: int, action_shape: tuple[int, ...], action_dtype: torch.dtype):
        n = stepper.num_envs
        space = stepper.env.single_observation_space
        assert space.shape is not None
        assert space.dtype is not None
        obs_dtype = np.dtype(np.float32) if space.dtype.kind == "f" else space.dtype
        self.stepper, self.horizon = stepper, horizon
        self.obs = np.zeros((horizon, n, *space.shape), obs_dtype)
        self.rewards = np.zeros((horizon, n), np.float32)
        self.terminated = np.zeros((horizon, n), bool)
        self.truncated = np.zeros((horizon, n), bool)
        self.valid = np.ones((horizon, n), bool)
        self.actions = torch.zeros((horizon, n, *action_shape), dtype=action_dtype)
        self._obs_rows = torch.from_numpy(self.obs).unbind(0)  # made once: a view a step costs more than the copy
        self._action_rows = self.actions.unbind(0)

        self.now = np.zeros((n, *space.shape), obs_dtype)
        self.frame = 0  # environment transitions so far
        self.episode_return = np.zeros(n)
        self.episode_length = np.zeros(n, np.int64)
        self.recent: deque[tuple[float, int]] = deque(maxlen=EPISODE_WINDOW)  # (return, length), raw rewards
        self.episodes = 0

    def reset(self, seed: int) -> None:
        """Begin: every environment gets its own seed."""
        self.now = self.stepper.reset(seed).astype(self.obs.dtype, copy=False)

    @torch.no_grad()
    def collect(
        self, act: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], noise: torch.Tensor, to_env: Callable
    ) -> Rollout:
        """`horizon` steps of `act(obs, noise[t])`; `to_env` makes of the sampled action what the environment takes."""
        ends: list[int] = []
        finals: list[np.ndarray] = []
        step, n = self.stepper.step, self.stepper.num_envs
        self.valid[:] = True
        for t, noise_t in enumerate(noise.unbind(0)):
            self.obs[t] = self.now
            action = act(self._obs_rows[t], noise_t)
            self._action_rows[t].copy_(action)
            obs, rewards, terminated, truncated, valid, ended, final_obs = step(to_env(action))
            self.rewards[t] = rewards
            self.terminated[t] = terminated
            self.truncated[t] = truncated
            self.now = obs
            self.episode_return += rewards
            if valid is None:
                self.episode_length += 1
            else:
                self.valid[t] = valid
                self.episode_length += valid
            if ended is not None and final_obs is not None:
                ends.extend((t * n + ended).tolist())
                finals.append(final_obs)
                self.recent.extend(
                    zip(self.episode_return[ended].tolist(), self.episode_length[ended].tolist(), strict=True)
                )
                self.episodes += len(ended)
                self.episode_return[ended] = self.episode_length[ended] = 0
        space = self.obs.shape[2:]
        rollout = Rollout(
            obs=torch.from_numpy(self.obs),
            actions=self.actions,
            rewards=torch.from_numpy(self.rewards),
            terminated=torch.from_numpy(self.terminated),
            truncated=torch.from_numpy(self.truncated),
            valid=torch.from_numpy(self.valid),
            last_obs=torch.from_numpy(self.now.astype(self.obs.dtype)),
            ends=torch.tensor(ends, dtype=torch.long),
            final_obs=torch.from_numpy(
                np.concatenate(finals).astype(self.obs.dtype) if finals else self.obs[:0, 0].reshape(0, *space)
            ),
        )
        self._check_finite(rollout)
        self.frame += int(self.valid.sum())
        return rollout

    def metrics(self) -> dict[str, float]:
        """How the policy that collects is doing: raw returns of its last finished episodes."""
        if not self.recent:
            return {"episodes": self.episodes}
        returns, lengths = zip(*self.recent, strict=True)
        return {"return": float(np.mean(returns)), "length": float(np.mean(lengths)), "episodes": self.episodes}

    def state(self) -> dict[str, Any]:
        """Where each environment and its episode stand."""
        return {
            "stepper": self.stepper.state(),
            "env": vector_state(self.stepper.env),
            "now": self.now.copy(),
            "frame": self.frame,
            "episodes": self.episodes,
            "episode_return": self.episode_return.copy(),
            "episode_length": self.episode_length.copy(),
            "recent": [list(pair) for pair in self.recent],
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from `state()`; environments that cannot be restored begin new episodes."""
        self.stepper.load_state(state["stepper"])
        self.now = state["now"].copy()
        self.frame, self.episodes = state["frame"], state["episodes"]
        self.episode_return, self.episode_length = state["episode_return"].copy(), state["episode_length"].copy()
        restarted = restore_vector(self.stepper.env, state["env"])
        if restarted is not None:
            rows = restarted.which
            self.now[rows] = restarted.observations[rows]
            self.episode_return[rows] = self.episode_length[rows] = 0
            self.stepper.forget(rows)
        self.recent = deque((tuple(pair) for pair in state["recent"]), maxlen=EPISODE_WINDOW)

    def _check_finite(self, rollout: Rollout) -> None:
        n = self.stepper.num_envs
        rows = self.horizon * n
        # Each array with, for every row of it, (vector steps of this rollout before it came)·N + environment.
        for what, array, came in (
            ("reward", rollout.rewards.flatten(0, 1), range(n, n + rows)),
            ("observation", rollout.obs.flatten(0, 1), range(rows)),
            ("final observation", rollout.final_obs, rollout.ends + n),
            ("observation", rollout.last_obs, range(rows, rows + n)),
        ):
            finite = torch.isfinite(array)
            if finite.all():
                continue
            first = (~finite).nonzero()[0]
            steps, env = divmod(int(came[first[0]]), n)
            raise NotFinite(
                f"{self.stepper.name} gave a {what} of {array[tuple(first)]:g} in environment {env} at vector step "
                f"{self.stepper.steps - self.horizon + steps} (about frame {self.frame + steps * n}). Nothing was "
                "learned from it and the last checkpoint is intact: fix the environment, then resume."
            )
