"""Running episodes of the vector environment: observations, lengths, returns; whole episodes of REINFORCE."""

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from palestra.control.envs.snapshot import restore_vector, vector_state
from palestra.control.envs.stepping import Stepper, Transition
from palestra.errors import PalestraError
from palestra.rl.returns import discounted_returns

EPISODE_WINDOW = 100  # finished episodes that the running return is averaged over


def stored_dtype(dtype: np.dtype) -> np.dtype:
    """The type that observations are stored in: torch hardly computes with unsigned integers of over a byte."""
    wide = {np.dtype(np.uint16): np.dtype(np.int32), np.dtype(np.uint32): np.dtype(np.int64)}
    return np.dtype(np.float32) if dtype.kind == "f" else wide.get(dtype, dtype)


class NotFinite(PalestraError):
    """A reward, observation or loss is not finite."""


class Episodes:
    """Steps the environments and tracks observations, returns and lengths of episodes. Returns are of raw rewards."""

    def __init__(self, stepper: Stepper):
        n = stepper.num_envs
        space = stepper.env.single_observation_space
        assert space.shape is not None
        assert space.dtype is not None
        self.obs_dtype = stored_dtype(space.dtype)
        """Of observations as they are stored and as networks take them."""
        self.stepper, self.num_envs = stepper, n
        self.now = np.zeros((n, *space.shape), self.obs_dtype)
        """What the policy acts on next, (N, ...)."""
        self.began = np.ones(n, bool)
        """Where `now` is the first observation of an episode, or only precedes a reset."""
        self.frame = 0
        """Environment transitions so far, without the dummy steps of an autoreset."""
        self.episode_return = np.zeros(n)
        self.episode_length = np.zeros(n, np.int64)
        self.recent: deque[tuple[float, int]] = deque(maxlen=EPISODE_WINDOW)  # (return, length)
        self.finished = 0
        self.just_finished: list[tuple[int, float, int]] = []
        """Environment, return and length of the episodes that ended in the last step."""
        self.components_of: dict[int, dict[str, float]] = {}
        """The sums of `env.components` of those episodes, by environment."""
        self.recent_components: deque[dict[str, float]] = deque(maxlen=EPISODE_WINDOW)
        self.listener: Callable[[Episodes, np.ndarray, Transition], None] | None = None
        """Called after every step."""

    def reset(self, seed: int) -> None:
        """Reset every environment, each with its own seed."""
        self.now = self.stepper.reset(seed).astype(self.obs_dtype, copy=False)
        self.began = np.ones(self.num_envs, bool)

    @property
    def mask(self) -> np.ndarray | None:
        """Which actions are allowed in `now`, bool (N, choices); None in an environment without action masks."""
        return self.stepper.mask

    def step(self, actions: np.ndarray) -> Transition:
        """One vector step with actions as the environments take them; `now` is then the next observation.

        Callers that keep observations copy them: environments may write into the same arrays again.
        """
        transition = self.stepper.step(actions)
        obs, rewards, terminated, truncated, valid, _, _ = transition
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
        self.just_finished = []
        over = self.stepper.over  # not `ended`: the score of a game continues after a lost life
        if over is not None:
            returns, lengths = self.episode_return[over].tolist(), self.episode_length[over].tolist()
            self.just_finished = list(zip(over.tolist(), returns, lengths, strict=True))
            self.recent.extend(zip(returns, lengths, strict=True))
            self.finished += len(over)
            self.episode_return[over] = self.episode_length[over] = 0
            self.components_of = self.stepper.components
            self.recent_components.extend(self.components_of.values())
        if self.listener is not None:
            self.listener(self, actions, transition)
        return transition

    def add(
        self,
        frames: int,
        finished: int,
        recent: Sequence[tuple[float, int]],
        components: Sequence[dict[str, float]],
    ) -> None:
        """Count what was collected elsewhere: transitions, episodes; (return, length) and components of the last."""
        self.frame, self.finished = self.frame + frames, self.finished + finished
        self.recent.extend(recent)
        self.recent_components.extend(components)

    def check(self, what: str, numbers: np.ndarray, positions: Sequence[int] | np.ndarray, steps: int = 0) -> None:
        """Raise if a number is not finite.

        `positions` has for each row (vector steps after `steps` ago)·N + environment.
        """
        # Sums are checked first: one number instead of all of them.
        if numbers.dtype.kind != "f" or math.isfinite(numbers.sum()) or np.isfinite(numbers).all():
            return
        first = tuple(np.argwhere(~np.isfinite(numbers))[0])
        after, env = divmod(int(positions[first[0]]), self.num_envs)
        step, frame = self.stepper.steps - steps + after, self.frame - (steps - after) * self.num_envs
        raise NotFinite(
            f"{self.stepper.name} returned a {what} of {numbers[first]:g} in environment {env} at vector step {step} "
            f"(about frame {frame}). It was not learned from, and the last checkpoint is intact. Fix it and resume."
        )

    def metrics(self) -> dict[str, float]:
        """Raw returns and lengths of the sampling policy's last finished episodes."""
        if not self.recent:
            return {"episodes": self.finished}
        returns, lengths = zip(*self.recent, strict=True)
        means = {"return": float(np.mean(returns)), "length": float(np.mean(lengths)), "episodes": self.finished}
        names = dict.fromkeys(name for row in self.recent_components for name in row)
        known = {name: [row[name] for row in self.recent_components if name in row] for name in names}
        return means | {f"component/{name}": float(np.mean(values)) for name, values in known.items()}

    def state(self) -> dict[str, Any]:
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
            "components": [dict(row) for row in self.recent_components],
        }

    def load_state(self, state: dict[str, Any]) -> np.ndarray | None:
        """Continue from `state()`; which environments could not be restored and restarted, bool (N,), or None."""
        self.stepper.load_state(state["stepper"])
        self.now, self.began = state["now"].copy(), state["began"].copy()
        self.frame, self.finished = state["frame"], state["episodes"]
        self.episode_return, self.episode_length = state["episode_return"].copy(), state["episode_length"].copy()
        self.recent = deque((tuple(pair) for pair in state["recent"]), maxlen=EPISODE_WINDOW)
        self.recent_components = deque(map(dict, state.get("components", ())), maxlen=EPISODE_WINDOW)
        restarted = restore_vector(self.stepper.env, state["env"])
        if restarted is None:
            return None
        rows, observations = restarted.which, restarted.observations
        if self.mask is not None:  # only a reset gives the masks of the new episodes: all of them restart
            rows, observations = np.ones_like(rows), self.stepper.reset()
        self.now[rows] = observations[rows]
        self.began[rows] = True
        self.episode_return[rows] = self.episode_length[rows] = 0
        self.stepper.forget(rows)
        return rows


Columns = dict[str, Tensor]


class WholeEpisodes:
    """Collects the rows of episodes over several rollouts, until they end."""

    def __init__(self, num_envs: int, gamma: float):
        self.gamma = gamma
        self.waiting: list[Columns | None] = [None] * num_envs  # the running episode of each environment

    def add(self, columns: Mapping[str, Tensor | None], ended: Tensor, valid: Tensor | None = None) -> Columns | None:
        """The rows `(R, ...)` of all episodes that ended, (T, N), in a rollout, or None.

        `columns` are (T, N, ...), `rewards` among them; columns that are None are left out. The result has a column
        more, `returns`: the discounted sums of the rewards to the episode's end.
        """
        finished = []
        for env, waiting in enumerate(self.waiting):
            real = slice(None) if valid is None else valid[:, env]
            ends = ended[:, env][real]
            rows = {name: column[:, env][real] for name, column in columns.items() if column is not None}
            last = int(ends.nonzero()[-1]) + 1 if ends.any() else 0
            done = {name: column[:last] for name, column in rows.items()}
            # Cloned: a rollout's arrays are written again by the next one.
            rest = {name: column[last:].clone() for name, column in rows.items()}
            if last == 0:
                self.waiting[env] = _joined(waiting, rest)
                continue
            self.waiting[env] = rest
            done = _joined(waiting, done)
            over = torch.cat((ends.new_zeros(len(done["rewards"]) - last), ends[:last])).unsqueeze(1)
            returns = discounted_returns(
                done["rewards"].unsqueeze(1), terminated=over, truncated=torch.zeros_like(over), gamma=self.gamma
            )
            finished.append(done | {"returns": returns.squeeze(1)})
        if not finished:
            return None
        return {name: torch.cat([rows[name] for rows in finished]) for name in finished[0]}

    def cut(self, rows: np.ndarray) -> None:
        """Drop the running episodes of these rows, bool (N,): they restarted outside of a step."""
        self.waiting = [None if gone else waiting for gone, waiting in zip(rows, self.waiting, strict=True)]

    def state(self) -> list[Any]:
        return [w and {name: column.to("cpu", copy=True) for name, column in w.items()} for w in self.waiting]

    def load_state(self, state: list[Any], device: torch.device) -> None:
        """Continue from `state()`."""
        self.waiting = [w and {name: column.to(device, copy=True) for name, column in w.items()} for w in state]


def _joined(first: Columns | None, then: Columns) -> Columns:
    return then if first is None else {name: torch.cat((first[name], column)) for name, column in then.items()}
