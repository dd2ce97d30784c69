"""One way to step any Gymnasium vector environment, whatever its autoreset mode; action masks from `info`.

An environment with Discrete or MultiDiscrete actions may give `info["action_mask"]`, 1 or True for allowed actions: an
array with an entry for each choice, for MultiDiscrete all parts concatenated, or a tuple with an array for each. It
must give one with its first reset; a later step without one allows everything.

Gymnasium 1.x has three modes, and each hides the end of an episode somewhere else:

- SAME_STEP: the step that ends an episode returns the *reset* observation; the final one is in `infos["final_obs"]`.
- NEXT_STEP: it returns the final observation; the step after it ignores the action, resets, and returns reward 0.
- DISABLED: it returns the final observation and nothing resets until we ask.

`Stepper` turns all three into `Transition`: the observation to act on next, the true final observations, and `valid`,
which is False for the dummy steps of NEXT_STEP. Nothing above this file knows which mode an environment has.
"""

from collections.abc import Callable
from itertools import accumulate
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv

from palestra.control.envs.components import KEY as COMPONENTS
from palestra.errors import PalestraError, UsageError

KEY = "action_mask"


def choices(space: gym.Space, name: str) -> list[int]:
    """How many choices each part of an action has."""
    match space:
        case spaces.Discrete():
            return [int(space.n)]
        case spaces.MultiDiscrete() if space.nvec.ndim == 1:
            return space.nvec.tolist()
    raise UsageError(
        f"{name} gives info['{KEY}'], and its actions are {space}: masks are for Discrete and MultiDiscrete"
    )


def random_allowed(masks: np.ndarray, space: gym.Space, random: np.random.Generator) -> np.ndarray:
    """A uniformly random allowed action for each row, as the environment takes it."""
    sizes = choices(space, "the environment")
    # The choice with the largest of as many uniform numbers; masked ones get -1.
    numbers = np.where(masks, random.random(masks.shape), -1.0)
    parts = np.split(numbers, list(accumulate(sizes[:-1])), axis=1)
    actions = np.stack([part.argmax(axis=1) for part in parts], axis=1)
    if isinstance(space, spaces.Discrete):
        return actions[:, 0] + int(space.start)
    assert isinstance(space, spaces.MultiDiscrete)
    return actions + space.start


class EnvironmentFailed(PalestraError):
    """The environment raised an error, which is the cause of this one."""


class Transition(NamedTuple):
    """One vector step, each array with N rows."""

    obs: np.ndarray  # what the policy acts on next
    rewards: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    valid: np.ndarray | None  # None: all rows are real steps
    ended: np.ndarray | None  # indices of the episodes that ended here, None when none did
    final_obs: np.ndarray | None  # their last observations, (len(ended), ...)


class Stepper:
    """Steps `env` and reports ends of episodes the same way for all three autoreset modes."""

    def __init__(self, env: VectorEnv, name: str = "environment"):
        mode = env.metadata.get("autoreset_mode")
        if not isinstance(mode, AutoresetMode):
            raise UsageError(
                f"{name}: its metadata has no autoreset mode, so the ends of its episodes cannot be recognized. "
                'Set metadata["autoreset_mode"] to a gymnasium.vector.AutoresetMode.'
            )
        self.env, self.name, self.mode = env, name, mode
        self.num_envs = env.num_envs
        self.steps = 0
        self.has_dummy_steps = mode is AutoresetMode.NEXT_STEP  # whether `valid` is ever anything but None
        self._dummy = np.zeros(env.num_envs, dtype=bool)  # NEXT_STEP: rows whose next step only resets
        self.mask: np.ndarray | None = None
        """Which actions are allowed in the next observation, bool (N, choices); None: no action masks.

        A new array every step. Known after the first reset."""
        self.final_mask: np.ndarray | None = None
        """Which actions are allowed in the final observations of the last step, bool (K, choices); all where not given.

        None where no episode ended, or without action masks."""
        self._sizes: list[int] = []  # of the parts of an action that has masks
        self.over: np.ndarray | None = None
        """Indices of the episodes that ended in the last step with a complete score; None when none did.

        All that ended, unless `info["game_over"]` is False: the game continues after a lost life."""
        self.components: dict[int, dict[str, float]] = {}
        """By environment, the sums of `env.components` over the episodes that ended in the last step."""

    def reset(self, seed: int | None = None) -> np.ndarray:
        """Reset every environment; environment i gets `seed + i`."""
        self._dummy[:] = False
        obs, infos = self._call(self.env.reset, seed=seed)
        self.mask = None
        if KEY in infos:
            self._sizes = choices(self.env.single_action_space, self.name)
            self.mask = np.ones((self.num_envs, sum(self._sizes)), bool)
            self._read_masks(infos)
        return obs

    def step(self, actions: np.ndarray) -> Transition:
        """Step all environments once."""
        obs, rewards, terminated, truncated, infos = self._call(self.env.step, actions)
        self.steps += 1
        ends = np.logical_or(terminated, truncated)
        ended = ends.nonzero()[0] if ends.any() else None
        self.over = None if ended is None else _over(ends, infos)
        self.components = _components(infos) if COMPONENTS in infos else {}
        same_step, valid, final_obs = self.mode is AutoresetMode.SAME_STEP, None, None
        if self.has_dummy_steps:
            valid = ~self._dummy if self._dummy.any() else None
            self._dummy = ends
        self.final_mask = None
        if self.mask is not None and ended is not None:
            final = self._masks(infos.get("final_info", {}) if same_step else infos)[ended]
            self.final_mask = final | ~final.any(axis=1, keepdims=True)  # after a termination often none is allowed
        # With SAME_STEP the infos are of the new episode already; else the next action, if any, only resets.
        self._read_masks(infos, any_choice=None if same_step else ends)
        if ended is not None:
            final_obs = _rows(infos, ended, self.name) if same_step else obs[ended]
            if self.mode is AutoresetMode.DISABLED:
                obs, infos = self._call(self.env.reset, options={"reset_mask": ends})
                self._read_masks(infos, keep=~ends)
        return Transition(obs, rewards, terminated, truncated, valid, ended, final_obs)

    def _read_masks(
        self, infos: dict[str, Any], any_choice: np.ndarray | None = None, keep: np.ndarray | None = None
    ) -> None:
        """Take the masks of `infos`; rows of `any_choice` allow everything, rows of `keep` do not change."""
        if self.mask is None:
            if KEY in infos:
                raise UsageError(f"{self.name} gives info['{KEY}'] after a step but not with its first reset")
            return
        masks = self._masks(infos)
        if any_choice is not None:
            masks[any_choice] = True
        if keep is not None:
            masks[keep] = self.mask[keep]
        some = np.logical_or.reduceat(masks, [0, *accumulate(self._sizes[:-1])], axis=1)  # of each part of an action
        if not some.all():
            env, part = np.argwhere(~some)[0]
            where = f"environment {env}" + (f", part {part}" if len(self._sizes) > 1 else "")
            raise UsageError(
                f"{self.name} allows no action at all in {where}: end the episode there, or allow one in info['{KEY}']"
            )
        self.mask = masks

    def _masks(self, infos: dict[str, Any]) -> np.ndarray:
        """The masks in `infos`, all True where there is none."""
        assert self.mask is not None
        masks = np.ones_like(self.mask)
        given = infos.get(f"_{KEY}", np.full(len(masks), KEY in infos))
        for i in np.flatnonzero(given):
            row = infos[KEY][i]
            flat = np.concatenate([np.ravel(part) for part in (row if isinstance(row, tuple) else [row])])
            if flat.shape != masks[i].shape:
                raise UsageError(
                    f"{self.name} gave an info['{KEY}'] with {len(flat)} entries; "
                    f"{self.env.single_action_space} has {masks.shape[1]} choices"
                )
            masks[i] = flat.astype(bool)
        return masks

    def _call(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Step or reset the environment; its errors name it."""
        try:
            return method(*args, **kwargs)
        except PalestraError:
            raise
        except (Exception, SystemExit) as error:
            after = f"vector step {self.steps + 1}" if args else f"a reset after vector step {self.steps}"
            raised = f"{self.name} raised {type(error).__name__} in {after} ({self.num_envs} environments): {error}"
            raise EnvironmentFailed(raised) from error

    def forget(self, rows: np.ndarray) -> None:
        """These environments restarted outside of `step`."""
        self._dummy[rows] = False

    def state(self) -> dict[str, Any]:
        """The stepper's own state; that of the environment is in `envs.snapshot`."""
        return {"dummy": self._dummy.copy(), "steps": self.steps, "mask": self.mask}

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from `state()`."""
        self._dummy, self.steps, self.mask = state["dummy"].copy(), state["steps"], state["mask"]


def _rows(infos: dict[str, Any], ended: np.ndarray, name: str) -> np.ndarray:
    """The final observations of the `ended` rows: Gymnasium keeps them as objects, ALE as one dense array."""
    if "final_obs" not in infos:
        raise UsageError(
            f"{name} resets in the same step but gives no infos['final_obs']: a truncated episode bootstraps from its "
            "final observation. Use another autoreset mode or add it."
        )
    return np.stack([np.asarray(infos["final_obs"][i]) for i in ended])


def _components(infos: dict[str, Any]) -> dict[int, dict[str, float]]:
    """By environment, from the arrays that Gymnasium makes of dicts; `_name` says where one was given."""
    columns, given = infos[COMPONENTS], infos[f"_{COMPONENTS}"]
    rows = np.flatnonzero(given).tolist()
    names = [name for name in columns if f"_{name}" in columns]
    return {i: {name: float(columns[name][i]) for name in names if columns[f"_{name}"][i]} for i in rows}


def _over(ends: np.ndarray, infos: dict[str, Any]) -> np.ndarray | None:
    if "game_over" in infos:
        given = infos.get("_game_over", True)
        ends = ends & np.where(given, np.asarray(infos["game_over"], bool), True)
    return ends.nonzero()[0] if ends.any() else None
