"""Running episodes of the vector environment: observations, lengths, returns; whole episodes of REINFORCE."""

from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from palestra.control.envs.snapshot import restore_vector, vector_state
from palestra.control.envs.stepping import Stepper, Transition
from palestra.errors import PalestraError
from palestra.rl.returns import discounted_returns

EPISODE_WINDOW = 100  # finished episodes that the running return is averaged over


class NotFinite(PalestraError):
    """A number that must be finite is not; training on would only spread it."""


class Episodes:
    """Steps the environments and remembers where each episode stands. Returns are of raw rewards."""

    def __init__(self, stepper: Stepper):
        n = stepper.num_envs
        space = stepper.env.single_observation_space
        assert space.shape is not None
        assert space.dtype is not None
        self.obs_dtype = np.dtype(np.float32) if space.dtype.kind == "f" else space.dtype
        """Of observations as they are stored and as networks take them."""
        self.stepper, self.num_envs = stepper, n
        self.now = np.zeros((n, *space.shape), self.obs_dtype)
        """What the policy acts on next, (N, ...)."""
        self.began = np.ones(n, bool)
        """Where that is the first observation of an episode, or is only there to be reset: nothing came before it."""
        self.frame = 0
        """Environment transitions so far; the dummy steps of an autoreset are none."""
        self.episode_return = np.zeros(n)
        self.episode_length = np.zeros(n, np.int64)
        self.recent: deque[tuple[float, int]] = deque(maxlen=EPISODE_WINDOW)  # (return, length)
        self.finished = 0

    def reset(self, seed: int) -> None:
        """Begin: every environment gets its own seed."""
        self.now = self.stepper.reset(seed).astype(self.obs_dtype, copy=False)
        self.began = np.ones(self.num_envs, bool)

    @property
    def mask(self) -> np.ndarray | None:
        """Which choices are allowed in `now`, bool (N, choices); None where the environment never forbids any."""
        return self.stepper.mask

    def step(self, actions: np.ndarray) -> Transition:
        """One vector step with actions as the environments take them; `now` is then what follows.

        Who keeps observations copies them: environments may write into the same arrays again.
        """
        moved = self.stepper.step(actions)
        obs, rewards, terminated, truncated, valid, _, _ = moved
        self.now = obs if obs.dtype == self.obs_dtype else obs.astype(self.obs_dtype)
        # The step after a dummy one is an episode's first, the dummy one itself follows an end.
        self.began = terminated | truncated if valid is None else terminated | truncated | ~valid
        self.episode_return += rewards
        if valid is None:
            self.episode_length += 1
            self.frame += self.num_envs
        else:
            self.episode_length += valid
            self.frame += int(valid.sum())
        over = self.stepper.over  # not `ended`: the score of a game goes on after a lost life
        if over is not None:
            returns, lengths = self.episode_return[over].tolist(), self.episode_length[over].tolist()
            self.recent.extend(zip(returns, lengths, strict=True))
            self.finished += len(over)
            self.episode_return[over] = self.episode_length[over] = 0
        return moved

    def check(self, what: str, numbers: np.ndarray | torch.Tensor) -> None:
        """Stop with a clear error if what the last vector step gave, N rows of it, is not finite."""
        finite = np.isfinite(np.asarray(numbers))
        if finite.all():
            return
        first = tuple(np.argwhere(~finite)[0])
        raise self.not_finite(what, float(np.asarray(numbers)[first]), int(first[0]), self.stepper.steps, self.frame)

    def not_finite(self, what: str, number: float, env: int, step: int, frame: int) -> NotFinite:
        """The error that says which environment gave what and when."""
        return NotFinite(
            f"{self.stepper.name} gave a {what} of {number:g} in environment {env} at vector step "
            f"{step} (about frame {frame}). Nothing was "
            "learned from it and the last checkpoint is intact: fix the environment, then resume."
        )

    def metrics(self) -> dict[str, float]:
        """How the policy that collects is doing: raw returns of its last finished episodes."""
        if not self.recent:
            return {"episodes": self.finished}
        returns, lengths = zip(*self.recent, strict=True)
        return {"return": float(np.mean(returns)), "length": float(np.mean(lengths)), "episodes": self.finished}

    def state(self) -> dict[str, Any]:
        """Where each environment and its episode stand."""
        return {
            "stepper": self.stepper.state(),
            "env": vector_state(self.stepper.env),
            "now": self.now.copy(),
            "began": self.began.copy(),
            "frame": self.frame,
            "episodes": self.finished,
            "episode_return": self.episode_return.copy(),
            "episode_length": self.episode_length.copy(),
            "recent": [list(pair) for pair in self.recent],
        }

    def load_state(self, state: dict[str, Any]) -> np.ndarray | None:
        """Continue from `state()`. Environments that cannot be restored begin anew: which, bool (N,), else None."""
        self.stepper.load_state(state["stepper"])
        self.now, self.began = state["now"].copy(), state["began"].copy()
        self.frame, self.finished = state["frame"], state["episodes"]
        self.episode_return, self.episode_length = state["episode_return"].copy(), state["episode_length"].copy()
        self.recent = deque((tuple(pair) for pair in state["recent"]), maxlen=EPISODE_WINDOW)
        restarted = restore_vector(self.stepper.env, state["env"])
        if restarted is None:
            return None
        rows, observations = restarted.which, restarted.observations
        if self.mask is not None:  # what the new episodes forbid is known only to a reset: all of them begin again
            rows, observations = np.ones_like(rows), self.stepper.reset()
        self.now[rows] = observations[rows]
        self.began[rows] = True
        self.episode_return[rows] = self.episode_length[rows] = 0
        self.stepper.forget(rows)
        return rows


Columns = dict[str, Tensor]


class WholeEpisodes:
    """Takes rollouts and gives back the rows of the episodes that ended in them, from their first step on."""

    def __init__(self, num_envs: int, gamma: float):
        self.gamma = gamma
        self.waiting: list[Columns | None] = [None] * num_envs  # of each environment's running episode

    def add(self, columns: Mapping[str, Tensor | None], ended: Tensor, valid: Tensor | None = None) -> Columns | None:
        """The rows `(R, ...)` of all episodes that `ended` (T, N) says are over, or None where none is.

        `columns` are (T, N, ...), with `rewards` among them; columns that are None are left out. To what comes back
        `returns` are added: the discounted sums of the rewards to the episode's end.
        """
        given = {name: column for name, column in columns.items() if column is not None}
        finished = []
        for env, waited in enumerate(self.waiting):
            ends, rows = ended[:, env], {name: column[:, env] for name, column in given.items()}
            if valid is not None:
                ends, rows = ends[valid[:, env]], {name: column[valid[:, env]] for name, column in rows.items()}
            last = int(ends.nonzero()[-1]) + 1 if ends.any() else 0
            # Cloned: a rollout's arrays are written again by the next one.
            done = {name: column[:last] for name, column in rows.items()}
            rest = {name: column[last:].clone() for name, column in rows.items()}
            if last == 0:
                self.waiting[env] = _joined(waited, rest)
                continue
            self.waiting[env] = rest
            done = _joined(waited, done)
            over = torch.cat((ends.new_zeros(len(done["rewards"]) - last), ends[:last]))
            done["returns"] = _returns(done["rewards"], over, self.gamma)
            finished.append(done)
        if not finished:
            return None
        return {name: torch.cat([rows[name] for rows in finished]) for name in finished[0]}

    def cut(self, rows: np.ndarray) -> None:
        """The environments of these rows, bool (N,), began new episodes outside of a step: what waits is dropped."""
        self.waiting = [None if gone else waited for gone, waited in zip(rows, self.waiting, strict=True)]

    def state(self) -> list[Any]:
        """What waits, copied."""
        copied = [w and {name: column.to("cpu", copy=True) for name, column in w.items()} for w in self.waiting]
        return list(copied)

    def load_state(self, state: list[Any], device: torch.device) -> None:
        """Continue from `state()`."""
        self.waiting = [w and {name: column.to(device, copy=True) for name, column in w.items()} for w in state]


def _joined(first: Columns | None, then: Columns) -> Columns:
    return then if first is None else {name: torch.cat((first[name], column)) for name, column in then.items()}


def _returns(rewards: Tensor, over: Tensor, gamma: float) -> Tensor:
    over = over.unsqueeze(1)
    never = torch.zeros_like(over)
    return discounted_returns(rewards.unsqueeze(1), terminated=over, truncated=never, gamma=gamma).squeeze(1)
