"""A ring of transitions of vector environments, sampled uniformly or by priority, with n-step returns.

Each observation is stored once: the successor of a row is the next row of the same environment, except where an episode
ended, whose true final observation is stored separately. Of stacked frames only the newest is stored. The row after the
newest one holds the current observations, so that the newest transition can be sampled as well.
"""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from palestra.control.envs.stepping import Transition
from palestra.control.memory.storage import LIMIT, Sparse, SumTree, drop_shards, read_shard, write_shard
from palestra.spec.off_policy import PrioritizedSpec

ENDED, TERMINATED, DUMMY = 1, 2, 4  # flags of a row


class ReplayBatch(NamedTuple):
    """Transitions to learn from, one per row, on the device."""

    obs: Tensor
    actions: Tensor
    rewards: Tensor  # discounted sums of k raw rewards: n_step, or fewer up to an end or to the newest row
    next_obs: Tensor  # after the k-th step
    discounts: Tensor  # γ^k · (1 − terminated at the k-th): the factor of the value of next_obs
    weights: Tensor | None  # importance weights, where sampled by priority
    rows: Tensor  # for `update_priorities`
    masks: Tensor | None = None  # actions allowed in obs; None: all always are
    next_masks: Tensor | None = None  # and in next_obs
    began: Tensor | None = None  # sequences (B, L, ...): first steps of episodes
    states: Tensor | None = None  # sequences: the recurrent state before the first step, (B, width)
    valid: Tensor | None = None  # sequences: which steps are not dummies, (B, L)


class Masks(NamedTuple):
    """Allowed actions around a vector step, as `Stepper` gives them."""

    now: np.ndarray  # (N, choices) where actions were chosen
    after: np.ndarray  # (N, choices) in what is acted on next
    final: np.ndarray | None  # (K, choices) of the episodes that ended


class ReplayColumn:
    """One array of the ring, (rows, N, ...), on the device: written by NumPy on a CPU, gathered by torch."""

    def __init__(self, rows: int, envs: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device):
        whole = (rows, envs, *shape)
        if device.type == "cpu":
            # Pages of zeros cost nothing until they are written.
            self.array: np.ndarray | None = np.zeros(whole, torch.zeros(0, dtype=dtype).numpy().dtype)
            self.tensor = torch.from_numpy(self.array)
        else:
            self.array, self.tensor = None, torch.zeros(whole, dtype=dtype, device=device)
        self.flat = self.tensor.flatten(0, 1)

    def __setitem__(self, row: Any, values: Any) -> None:
        if self.array is not None:
            self.array[row] = values
        else:
            self.tensor[row] = torch.as_tensor(values).to(self.tensor)

    def __getitem__(self, row: Any) -> np.ndarray:
        return self.array[row] if self.array is not None else self.tensor[row].numpy(force=True)

    def take(self, flat: Tensor) -> Tensor:
        """The rows at flat indices."""
        return self.flat.index_select(0, flat)


class Replay:
    """The memory. Rows are numbered by vector step since the start, so that a number is never reused."""

    def __init__(
        self,
        capacity: int,
        num_envs: int,
        obs_shape: tuple[int, ...],
        obs_dtype: np.dtype,
        action_shape: tuple[int, ...],
        action_dtype: torch.dtype,
        *,
        gamma: float,
        n_step: int = 1,
        prioritized: PrioritizedSpec | None = None,
        frame_stack: int | None = None,
        device: torch.device | str = "cpu",
    ):
        self.num_envs, self.n_step, self.stack = num_envs, n_step, frame_stack
        self.device = torch.device(device)
        self.rows = max(1, capacity // num_envs)
        """Vector steps that can be sampled from at most."""
        # One more for the current observations, and those that the stacks of the oldest row reach back to.
        self.ring = self.rows + (frame_stack or 1)
        self.added = 0
        """Vector steps stored so far, overwritten ones included."""
        self.dummies = 0
        """Dummy steps among the rows."""

        column = self._column
        obs_type = torch.from_numpy(np.zeros(0, obs_dtype)).dtype
        single = obs_shape if frame_stack is None else obs_shape[1:]
        self.columns = {
            "obs": column(single, obs_type),
            "actions": column(action_shape, action_dtype),
            "rewards": column((), torch.float32),
            "flags": column((), torch.uint8),
            "final": column((), torch.int32),  # slot of the final observation
        }
        self.finals = Sparse(single, obs_type, self.device)
        self.final_masks: Sparse | None = None  # with the column of masks, once there is one
        if frame_stack is not None:
            self.columns["age"] = column((), torch.uint8)  # steps since the episode began, frame_stack − 1 at most
            self.columns["start"] = column((), torch.int32)  # slot of the frames before an episode's first one
            self.starts = Sparse((frame_stack - 1, *single), obs_type, self.device)
        self.ages = np.zeros(num_envs, np.uint8)  # of the observations to come
        self.powers = torch.tensor([gamma**k for k in range(n_step + 1)], dtype=torch.float64).float().to(self.device)
        self.prioritized = prioritized
        self.tree = None if prioritized is None else SumTree(self.ring * num_envs)
        self.weighted = 0  # rows before this number have their priority
        self.top = 1.0  # the highest priority so far, to the power of alpha
        self.shard_rows = max(1, self.ring // 64)
        """Rows in one of the files that a large memory is saved in."""
        self.shards: dict[int, dict[str, Any]] = {}  # those written, by number
        self._needed = 0  # the first one that the newest checkpoint needs

    def __len__(self) -> int:
        return self._size * self.num_envs - self.dummies

    @property
    def _size(self) -> int:
        return min(self.added, self.rows)

    @property
    def row_bytes(self) -> int:
        """Bytes of one vector step, final observations aside."""
        return sum(column.tensor[0].nbytes for column in self.columns.values())

    def _column(self, shape: tuple[int, ...], dtype: torch.dtype) -> ReplayColumn:
        return ReplayColumn(self.ring, self.num_envs, shape, dtype, self.device)

    def _add_masks(self, choices: int) -> None:
        """Make the columns of masks: whether an environment has any is known after its first reset."""
        self.columns |= {"masks": self._column((choices,), torch.bool), "final_mask": self._column((), torch.int32)}
        self.final_masks = Sparse((choices,), torch.bool, self.device)

    # ---- writing

    def add(
        self,
        obs: np.ndarray,
        actions: Any,
        transition: Transition,
        masks: Masks | None = None,
        **more: np.ndarray,
    ) -> None:
        """Store one vector step: the observations acted on, the stored actions, the transition, and allowed actions.

        `more` are rows of the columns that a subclass has.
        """
        now, rewards, terminated, _, valid, ended, final_obs = transition
        at, columns = self.added % self.ring, self.columns
        following = (at + 1) % self.ring
        if self.added >= self.rows and self.dummies:
            leaving = columns["flags"][(self.added - self.rows) % self.ring]
            self.dummies -= int(np.count_nonzero(leaving & DUMMY))
        if self.added >= self.ring:
            self._clear(at)
        flags = terminated * np.uint8(TERMINATED)
        if ended is not None:
            flags[ended] |= ENDED
        if valid is not None:
            flags[~valid] = DUMMY
            self.dummies += self.num_envs - int(np.count_nonzero(valid))
        if self.stack is not None:
            self._start(at, obs)
            obs, now = obs[:, -1], now[:, -1]
            final_obs = None if final_obs is None else final_obs[:, -1]
        columns["obs"][at] = obs
        columns["obs"][following] = now
        columns["actions"][at] = actions
        columns["rewards"][at] = rewards
        columns["flags"][at] = flags
        for name, rows in more.items():
            columns[name][at] = rows
        if ended is not None:
            columns["final"][at, ended] = self.finals.put(torch.as_tensor(final_obs))
        if masks is not None:
            self._put_masks(at, masks, ended)
        if self.stack is not None:
            np.minimum(self.ages + 1, self.stack - 1, out=self.ages)
            if ended is not None:
                self.ages[ended] = 0
            if valid is not None:
                self.ages[~valid] = 0
        self.added += 1

    def _put_masks(self, at: int, masks: Masks, ended: np.ndarray | None) -> None:
        if self.final_masks is None:
            self._add_masks(masks.now.shape[1])
        assert self.final_masks is not None
        self.columns["masks"][at] = masks.now
        self.columns["masks"][(at + 1) % self.ring] = masks.after
        if ended is not None:
            assert masks.final is not None
            self.columns["final_mask"][at, ended] = self.final_masks.put(torch.from_numpy(masks.final))

    def cut(self, rows: np.ndarray) -> None:
        """These environments, bool (N,), restarted outside of a step: mark their last rows as ends of episodes."""
        if self.added:
            at = (self.added - 1) % self.ring
            flags = self.columns["flags"][at]
            open_ended = (rows & ((flags & (ENDED | DUMMY)) == 0)).nonzero()[0]
            shown = torch.as_tensor(self.columns["obs"][self.added % self.ring])[open_ended]
            self.columns["final"][at, open_ended] = self.finals.put(shown)
            self.columns["flags"][at, open_ended] = flags[open_ended] | ENDED
            if self.final_masks is not None:
                allowed = torch.as_tensor(self.columns["masks"][self.added % self.ring])[open_ended]
                self.columns["final_mask"][at, open_ended] = self.final_masks.put(allowed)
        self.ages[rows] = 0

    def _clear(self, at: int) -> None:
        """Free the slots of a row that is overwritten."""
        for name, sparse in self._sparse().items():
            slots = self.columns[name][at]
            if slots.any():
                sparse.drop(slots[slots > 0])
                self.columns[name][at] = 0

    def _start(self, at: int, obs: np.ndarray) -> None:
        """Store the ages of episodes, and for new ones the frames stacked before their first."""
        self.columns["age"][at] = self.ages
        new = (self.ages == 0).nonzero()[0]
        if len(new):
            self.columns["start"][at, new] = self.starts.put(torch.as_tensor(obs[new, :-1]))

    # ---- sampling

    def sample(self, size: int, generator: torch.Generator, beta: float | None = None, batches: int = 1) -> ReplayBatch:
        """`batches` batches of `size` transitions in one gather, (batches · size, ...).

        Sampled uniformly, or by the current priorities with importance weights of exponent `beta`.
        """
        if self.tree is None:
            return self._batch(self._uniform(batches * size, generator), None)
        return self._batch(*self._by_priority(batches, size, generator, beta))

    def newest(self, steps: int) -> tuple[Tensor, Tensor]:
        """The observations of the last vector steps, (steps · N, ...), and which of them are not of dummy steps."""
        end = self._size * self.num_envs
        flat = self._flat(torch.arange(end - min(steps, self._size) * self.num_envs, end).to(self.device))
        return self._stacked(flat), (self.columns["flags"].take(flat) & DUMMY) == 0

    def everything(self) -> ReplayBatch:
        """All transitions but dummy steps, the oldest first."""
        places = torch.arange(self._size * self.num_envs)
        real = (self.columns["flags"].take(self._flat(places.to(self.device))) & DUMMY) == 0
        return self._batch(places[real.cpu()], None)

    def update_priorities(self, rows: Tensor, errors: Tensor) -> None:
        """Set the priorities of sampled transitions by their TD `errors`; rows overwritten since are skipped."""
        assert self.tree is not None
        assert self.prioritized is not None
        numbers = rows.numpy(force=True)
        weights = (np.abs(errors.numpy(force=True).astype(np.float64)) + self.prioritized.eps) ** self.prioritized.alpha
        present = numbers >= (self.added - self._size) * self.num_envs
        self.top = max(self.top, float(weights.max()))
        self.tree.set(numbers[present] % (self.ring * self.num_envs), weights[present])

    def _weigh_new(self) -> None:
        """Give rows added since the last sample the highest priority so far, and overwritten ones none."""
        assert self.tree is not None
        if self.weighted == self.added:
            return
        n, oldest = self.num_envs, self.added - self._size
        left = np.arange(max(0, self.weighted - self.rows), max(0, oldest))[-self.ring :]
        came = np.arange(max(self.weighted, oldest), self.added)
        items = (np.concatenate([left, came]) % self.ring)[:, None] * n + np.arange(n)
        weights = np.zeros(items.shape)
        flags = self.columns["flags"][came % self.ring] if self.dummies else np.zeros((len(came), n), np.uint8)
        weights[len(left) :] = np.where(flags & DUMMY, 0.0, self.top)
        self.tree.set(items.reshape(-1), weights.reshape(-1))
        self.weighted = self.added

    def _by_priority(
        self, count: int, size: int, generator: torch.Generator, beta: float | None
    ) -> tuple[Tensor, Tensor]:
        """Positions of the rows of `count` batches, counted from the oldest one, and their importance weights."""
        assert self.tree is not None
        assert beta is not None
        self._weigh_new()
        total = self.tree.total
        # Stratified: one sample in each of `size` equal parts of the sum (Schaul et al. 2016, B.2.1).
        uniform = torch.rand(count, size, generator=generator, dtype=torch.float64).numpy()
        flat = self.tree.find(((np.arange(size) + uniform) * (total / size)).reshape(-1))
        weights = ((self.tree.weights(flat) * (len(self) / total)) ** -beta).reshape(count, size)
        weights /= weights.max(axis=1, keepdims=True)
        oldest = (self.added - self._size) % self.ring * self.num_envs
        places = torch.from_numpy((flat - oldest) % (self.ring * self.num_envs))
        return places, torch.from_numpy(weights.reshape(-1)).float().to(self.device)

    def _uniform(self, count: int, generator: torch.Generator) -> Tensor:
        """Positions of rows, counted from the oldest one: any but dummy steps."""
        rows = self._size * self.num_envs
        places = torch.randint(rows, (count,), generator=generator)
        while self.dummies:
            again = (self.columns["flags"].take(self._flat(places.to(self.device))) & DUMMY).nonzero().squeeze(1)
            if not len(again):
                break
            places[again.cpu()] = torch.randint(rows, (len(again),), generator=generator)
        return places

    def _flat(self, places: Tensor) -> Tensor:
        """Flat indices into the columns of places counted from the oldest row."""
        oldest = (self.added - self._size) % self.ring * self.num_envs
        return (places + oldest) % (self.ring * self.num_envs)

    def _batch(self, places: Tensor, weights: Tensor | None) -> ReplayBatch:
        columns, n = self.columns, self.num_envs
        places = places.to(self.device)
        flat = self._flat(places)
        rewards, flags, last, steps = columns["rewards"].take(flat), columns["flags"].take(flat), flat, None
        if self.n_step > 1:
            rewards, flags, last, steps = self._window(places, flat, rewards, flags)
        alive = (flags & TERMINATED) == 0
        discounts = (self.powers[1] if steps is None else self.powers[steps]) * alive
        obs = self._stacked(flat)
        next_obs = self._after(last, flags)
        if self.stack is not None:
            before = obs if steps is None else self._stacked(last)
            next_obs = torch.cat([before[:, 1:], next_obs[:, None]], dim=1)
        rows = places + (self.added - self._size) * n
        masks = next_masks = None
        if self.final_masks is not None:
            masks, next_masks = columns["masks"].take(flat), self._after(last, flags, "masks", "final_mask")
        actions = columns["actions"].take(flat)
        return ReplayBatch(obs, actions, rewards, next_obs, discounts, weights, rows, masks, next_masks)

    def _after(self, flat: Tensor, flags: Tensor, name: str = "obs", final: str = "final") -> Tensor:
        """What was observed after rows with these flags: the next row, or the final observation stored separately."""
        columns, n = self.columns, self.num_envs
        after = columns[name].take((flat + n) % (self.ring * n))
        ends = (flags & ENDED).nonzero().squeeze(1)
        if len(ends):
            after[ends] = self._sparse()[final].get(columns[final].take(flat[ends]))
        return after

    def _window(
        self, places: Tensor, flat: Tensor, rewards: Tensor, flags: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Discounted sums of up to n rewards, the flags and index of the last row of each, and their number."""
        columns, n = self.columns, self.num_envs
        behind = self._size - 1 - places // n  # rows that come after
        last, steps = flat, torch.ones_like(flat)
        for k in range(1, self.n_step):
            on = ((flags & ENDED) == 0) & (behind >= k)
            following = (last + n) % (self.ring * n)
            last = torch.where(on, following, last)
            rewards = rewards + torch.where(on, self.powers[k] * columns["rewards"].take(last), 0.0)
            flags = torch.where(on, columns["flags"].take(last), flags)
            steps = steps + on
            # A window that stopped stays so: its flags or `behind` do not change any more.
        return rewards, flags, last, steps

    def _stacked(self, flat: Tensor) -> Tensor:
        """Observations at flat indices, stacks of frames rebuilt."""
        columns, n, k = self.columns, self.num_envs, self.stack
        if k is None:
            return columns["obs"].take(flat)
        back = torch.arange(k - 1, -1, -1, device=self.device)  # how many steps back each frame of a stack lies
        places = (flat[:, None] - back * n) % (self.ring * n)
        stacks = columns["obs"].take(places.reshape(-1)).unflatten(0, (len(flat), k))
        ages = columns["age"].take(flat).long()
        young = (ages < k - 1).nonzero().squeeze(1)
        if len(young):
            ages = ages[young]
            began = (flat[young] - ages * n) % (self.ring * n)
            before = self.starts.get(columns["start"].take(began))  # (Y, k − 1, ...)
            # The frame `back` steps before one of age a is, where that is before the episode, number k − 1 − (back − a)
            # of the first stack.
            which = (k - 1 - (back - ages[:, None])).clamp(0, k - 2)
            outside = back > ages[:, None]
            picked = before[torch.arange(len(young), device=self.device)[:, None], which]
            mask = outside.reshape(*outside.shape, *[1] * (stacks.ndim - 2))
            stacks[young] = torch.where(mask, picked, stacks[young])
        return stacks

    # ---- state

    def state(self, folder: Path | None = None) -> dict[str, Any]:
        """All rows, copied; above a gigabyte they go into files in `folder`, if given."""
        first = max(0, self.added + 1 - self.ring)  # the oldest row that is still there
        numbers = range(0)  # of the files
        if folder is not None and self.row_bytes * (self.added + 1 - first) > LIMIT:
            # The newest row can still change (`cut`), and the one after it is not complete: they are in the checkpoint.
            numbers = range(-(-first // self.shard_rows), (self.added - 1) // self.shard_rows)
            for number in numbers:
                if number not in self.shards:
                    rows = self._rows(number * self.shard_rows, (number + 1) * self.shard_rows)
                    self.shards[number] = write_shard(folder, number, rows)
            # Those of the previous checkpoint stay, in case this one is not completed.
            drop_shards(folder, self._needed)
        filed = (first, first)  # the rows in files
        if numbers:
            self._needed, filed = numbers[0], (numbers[0] * self.shard_rows, (numbers[-1] + 1) * self.shard_rows)
        return {
            "added": self.added,
            "dummies": self.dummies,
            "ages": self.ages.copy(),
            "first": first,
            "head": self._rows(first, filed[0]),  # what lies before the first whole file
            "shards": [self.shards[number] for number in numbers],
            "tail": self._rows(filed[1], self.added + 1),
            "tree": None if self.tree is None else self.tree.state(),
            "weighted": self.weighted,
            "top": self.top,
        }

    def load_state(self, state: dict[str, Any], folder: Path | None = None) -> None:
        """Continue from `state()` of a memory made alike."""
        self.added, self.dummies, self.ages = state["added"], state["dummies"], state["ages"].copy()
        self.weighted, self.top = state["weighted"], state["top"]
        if "masks" in state["tail"] and self.final_masks is None:
            self._add_masks(state["tail"]["masks"].shape[2])
        self._put_rows(state["first"], state["head"])
        self.shards = {shard["number"]: shard for shard in state["shards"]}
        for number, shard in self.shards.items():
            assert folder is not None
            self._put_rows(number * self.shard_rows, read_shard(folder, shard))
        self._needed = min(self.shards, default=0)
        self._put_rows(self.added + 1 - len(state["tail"]["flags"]), state["tail"])
        if self.tree is not None:
            self.tree.load_state(state["tree"])

    def _rows(self, first: int, last: int) -> dict[str, Any]:
        """Rows `first` to `last` (exclusive), with their separately stored observations in order."""
        numbers = np.arange(first, last)
        rows = {name: column[numbers % self.ring].copy() for name, column in self.columns.items()}
        for name, sparse in self._sparse().items():
            slots = rows[name]
            slots[numbers >= self.added] = 0  # the current observations have none yet
            rows[f"{name}_rows"] = sparse.get(torch.from_numpy(slots[slots > 0]).to(self.device)).cpu().numpy()
        return rows

    def _put_rows(self, first: int, rows: dict[str, Any]) -> None:
        """Write what `_rows` returned as the rows from number `first` on."""
        at = np.arange(first, first + len(rows["flags"])) % self.ring
        for name, column in self.columns.items():
            values = rows[name].copy()
            if name in self._sparse():
                values[values > 0] = self._sparse()[name].put(torch.from_numpy(rows[f"{name}_rows"]))
            column[at] = values

    def _sparse(self) -> dict[str, Sparse]:
        """The separately stored observations, by the column that has their slots."""
        sparse = {"final": self.finals} | ({} if self.stack is None else {"start": self.starts})
        return sparse if self.final_masks is None else sparse | {"final_mask": self.final_masks}
