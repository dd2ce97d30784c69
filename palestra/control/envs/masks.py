"""Which actions an environment allows: `info["action_mask"]` of its resets and steps, as one array for all copies.

An environment with Discrete or MultiDiscrete actions may give one, 1 or True for what is allowed: an array with an
entry for each choice, for MultiDiscrete all parts end to end, or a tuple with an array for each. It must give one with
its first reset; a later step without one allows everything.
"""

from itertools import accumulate
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from palestra.errors import UsageError

KEY = "action_mask"


def read_masks(infos: dict[str, Any], now: np.ndarray, space: gym.Space, name: str) -> np.ndarray:
    """`now`, (N, choices) bool, with the rows replaced that `infos` speaks of."""
    given = infos[KEY]
    said = infos.get(f"_{KEY}", np.ones(len(now), bool))
    masks = now.copy()
    for i in np.flatnonzero(said):
        row = given[i]
        flat = np.concatenate([np.asarray(part).ravel() for part in row]) if isinstance(row, tuple) else np.ravel(row)
        if flat.shape != masks[i].shape:
            raise UsageError(
                f"{name} gave an info['{KEY}'] with {len(flat)} entries; {space} has {masks.shape[1]} choices"
            )
        masks[i] = flat.astype(bool)
    return masks


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


def check_masks(masks: np.ndarray, sizes: list[int], name: str) -> None:
    """Every part of every action must have something allowed."""
    starts = [0, *accumulate(sizes[:-1])]
    some = np.logical_or.reduceat(masks, starts, axis=1)
    if not some.all():
        env, part = np.argwhere(~some)[0]
        raise UsageError(
            f"{name} allows no action at all in environment {env}"
            + (f", part {part}" if len(sizes) > 1 else "")
            + f": end the episode there, or allow one in info['{KEY}']"
        )


def random_allowed(masks: np.ndarray, space: gym.Space, random: np.random.Generator) -> np.ndarray:
    """For each row one of the actions that `masks` allow, every one as likely, as the environment takes it."""
    sizes = choices(space, "the environment")
    # The largest of as many uniform numbers as there are choices, the forbidden ones out of the race.
    numbers = np.where(masks, random.random(masks.shape), -1.0)
    parts = np.split(numbers, list(accumulate(sizes[:-1])), axis=1)
    actions = np.stack([part.argmax(axis=1) for part in parts], axis=1)
    if isinstance(space, spaces.Discrete):
        return actions[:, 0] + int(space.start)
    assert isinstance(space, spaces.MultiDiscrete)
    return actions + space.start
