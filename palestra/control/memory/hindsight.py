"""Hindsight experience replay (Andrychowicz et al. 2017): transitions relabeled with goals that were reached later."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from palestra.control.envs.goals import Goals
from palestra.control.envs.stepping import Transition
from palestra.control.memory.replay import DUMMY, ENDED, Masks, Replay, ReplayBatch
from palestra.control.spaces import Part
from palestra.errors import UsageError
from palestra.spec.off_policy import HerSpec

RUNNING = np.iinfo(np.int64).max  # of rows whose episode has not ended


class HindsightReplay(Replay):
    """A memory that gives `k` of `k + 1` sampled transitions a goal that their own episode reached."""

    def __init__(self, *shapes: Any, her: HerSpec, goals: Goals, storable: Callable, **options: Any):
        super().__init__(*shapes, **options)
        self.her, self.goals, self.storable = her, goals, storable
        # Both follow from the flags of the rows, and are not saved.
        self.until = np.full((self.ring, self.num_envs), RUNNING)
        """The number of the last row of each row's episode."""
        self.began = np.zeros(self.num_envs, np.int64)
        """The numbers of the first rows of the running episodes."""

    def add(
        self, obs: np.ndarray, actions: Any, transition: Transition, masks: Masks | None = None, **more: np.ndarray
    ) -> None:
        super().add(obs, actions, transition, masks, **more)
        last = self.added - 1
        self.until[last % self.ring] = RUNNING
        if transition.ended is not None:
            self._close(transition.ended, last)
        if transition.valid is not None:
            self.began[~transition.valid] = self.added

    def cut(self, rows: np.ndarray) -> None:
        super().cut(rows)
        self._close(rows.nonzero()[0], self.added - 1)

    def _close(self, envs: np.ndarray, last: int) -> None:
        for env in envs.tolist():
            first = max(int(self.began[env]), self.added - self.ring)
            self.until[np.arange(first, last + 1) % self.ring, env] = last
        self.began[envs] = last + 1

    def sample(self, size: int, generator: torch.Generator, beta: float | None = None, batches: int = 1) -> ReplayBatch:
        batch = super().sample(size, generator, beta, batches)
        chance, place = torch.rand(2, size * batches, generator=generator, dtype=torch.float64).numpy()
        which = (chance < self.her.k / (self.her.k + 1)).nonzero()[0]
        rows, envs = np.divmod(batch.rows.numpy(force=True)[which], self.num_envs)
        last = np.minimum(self.until[rows % self.ring, envs], self.added - 1)
        if self.her.strategy == "future":
            last = rows + (place[which] * (last - rows + 1)).astype(np.int64)
        flat = torch.from_numpy(last % self.ring * self.num_envs + envs).to(self.device)
        reached = self._after(flat, self.columns["flags"].take(flat))[:, self._place(self.goals.achieved)]
        return self._relabeled(batch, torch.from_numpy(which).to(self.device), reached)

    def _relabeled(self, batch: ReplayBatch, which: torch.Tensor, goals: torch.Tensor) -> ReplayBatch:
        """The batch with other goals in the rows `which`, and the rewards of these."""
        achieved, desired = self._place(self.goals.achieved), self._place(self.goals.desired)
        obs, next_obs, rewards, discounts = (
            column.clone() for column in (batch.obs, batch.next_obs, batch.rewards, batch.discounts)
        )
        obs[which, desired] = goals
        next_obs[which, desired] = goals
        shape = (len(which), *self.goals.achieved.shape)
        given = [array.numpy(force=True).reshape(shape) for array in (next_obs[which, achieved], goals)]
        reward = np.asarray(self.goals.reward(given[0], given[1], {}), np.float32)
        if reward.shape != (len(which),):
            raise UsageError(
                f"algorithm.her: compute_reward gave an array of shape {reward.shape} for {len(which)} goals: it must "
                "take batches and give one reward for each"
            )
        rewards[which] = torch.from_numpy(self.storable(reward)).to(rewards)
        if self.goals.terminated is not None:
            terminated = torch.from_numpy(
                np.broadcast_to(self.goals.terminated(given[0], given[1], {}), len(which)).copy()
            )
            discounts[which] = self.powers[1] * (~terminated.bool()).to(discounts)
        return batch._replace(obs=obs, next_obs=next_obs, rewards=rewards, discounts=discounts)

    @staticmethod
    def _place(part: Part) -> slice:
        return slice(part.start, part.stop)

    def load_state(self, state: dict[str, Any], folder: Any = None) -> None:
        super().load_state(state, folder)
        numbers = np.arange(max(0, self.added - self.ring + 1), self.added)
        flags = self.columns["flags"][numbers % self.ring]
        ends = np.where(flags & ENDED, numbers[:, None], RUNNING)
        self.until[numbers % self.ring] = np.minimum.accumulate(ends[::-1], axis=0)[::-1]
        after = np.where(flags & (ENDED | DUMMY), numbers[:, None] + 1, 0)
        self.began = after.max(axis=0, initial=numbers[0] if len(numbers) else 0)
