"""Action heads: from network outputs to actions, for each kind of Gymnasium action space."""

from functools import cached_property
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from palestra.errors import UsageError
from palestra.rl.distributions import Bernoulli, Beta, Categorical, DiagonalGaussian, MultiCategorical

Distribution = Categorical | MultiCategorical | Bernoulli | DiagonalGaussian | Beta


class ActionHead:
    """The policy's end of one action space. `description` is plain data, so a checkpoint can hold it."""

    maskable: list[int] | None = None
    """The number of choices of each part of an action, where an environment may mask some; else None."""

    def __init__(self, description: dict[str, Any]):
        self.description = description
        # Beside the description, whose arrays a compiled graph must not touch.
        self.kind: str = description["type"]
        self.continuous = self.kind == "box"
        self.family: str = description.get("family", "gaussian")
        """The distribution of continuous actions."""
        self.dtype = torch.float32 if self.continuous else torch.int64
        """The dtype of a stored action."""
        match description:
            case {"type": "discrete", "n": n}:
                self.shape, self.outputs, self.maskable = (), n, [n]
            case {"type": "multi_discrete", "sizes": sizes}:
                self.shape, self.outputs, self.maskable = (len(sizes),), sum(sizes), list(sizes)
            case {"type": "multi_binary", "n": n}:
                self.shape, self.outputs = (n,), n
            case {"type": "box", "low": low}:
                self.shape, self.outputs = (len(low),), len(low) * (2 if self.family == "beta" else 1)

    @classmethod
    def of(cls, space: gym.Space) -> "ActionHead":
        """The head for `space`; one of `spaces.flat_actions` also knows the environment's own form."""
        form = getattr(space, "form", None)
        more = {} if form is None else {"form": form}
        match space:
            case spaces.Discrete():
                return cls({"type": "discrete", "n": int(space.n), "start": int(space.start)})
            case spaces.MultiDiscrete() if space.nvec.ndim == 1:
                sizes, start = space.nvec.tolist(), space.start.tolist()
                return cls({"type": "multi_discrete", "sizes": sizes, "start": start, **more})
            case spaces.MultiBinary() if isinstance(space.n, int):
                return cls({"type": "multi_binary", "n": space.n, **more})
            case spaces.Box() if len(space.shape) == 1 and space.dtype.kind == "f":
                return cls({"type": "box", "low": space.low, "high": space.high, **more})
        raise UsageError(
            f"the action space {space} is not supported: use Discrete, MultiDiscrete, MultiBinary, a Box of floats, or "
            "a Dict or Tuple of them"
        )

    def with_family(self, family: str) -> "ActionHead":
        """The head that samples continuous actions from `family`, gaussian or beta; itself for other actions."""
        if not self.continuous or family == self.family:
            return self
        if family == "beta" and not np.isfinite([self.description["low"], self.description["high"]]).all():
            raise UsageError(
                "algorithm.distribution: beta needs an action space with finite bounds, and this one has parts "
                "without: use gaussian"
            )
        return ActionHead({**self.description, "family": family})

    def distribution(self, outputs: Tensor, log_std: Tensor | None, mask: Tensor | None = None) -> Distribution:
        """The distribution over actions that the network's `outputs` parametrize.

        `mask`, shaped like them, is True for allowed actions.
        """
        match self.kind:
            case "discrete":
                return Categorical(outputs, mask)
            case "multi_discrete":
                assert self.maskable is not None
                return MultiCategorical(outputs, self.maskable, mask)
            case "multi_binary":
                return Bernoulli(outputs)
        if self.family == "beta":
            return Beta.of(outputs)
        assert log_std is not None
        return DiagonalGaussian(outputs, log_std)

    def noise(self, generator: torch.Generator, *batch: int) -> Tensor:
        """Noise for `batch` samples, generated in one call."""
        if self.continuous and self.family == "beta":
            return Beta.noise(generator, (*batch, *self.shape, 2, Beta.ATTEMPTS, 2))
        family = {"box": DiagonalGaussian, "multi_binary": Bernoulli}.get(self.kind, Categorical)
        return family.noise(generator, (*batch, self.outputs))

    def to_env(self, action: Tensor) -> np.ndarray:
        """What the environment is given for a stored action.

        Actions of a Box are stored in units of half its range, −1 to 1, where it has bounds, and are clipped here and
        nowhere else.
        """
        array = action.numpy(force=True)
        if self.continuous:
            middle, half, low, high = self._units
            return middle + half * np.clip(array, low, high)
        if self.kind == "multi_binary":
            return array.astype(np.int8)
        start = self.description["start"]
        return array if start == 0 else array + np.asarray(start)

    @cached_property
    def _units(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Center and half width of each part's range, and the bounds in these units; 0 and 1 where it has no bounds."""
        low, high = self.description["low"], self.description["high"]
        bounded = np.isfinite(low) & np.isfinite(high)
        middle = np.where(bounded, (low.astype(np.float64) + high) / 2, 0)
        half = np.where(bounded, (high.astype(np.float64) - low) / 2, 1)
        units = (middle, half, np.where(bounded, -1, low), np.where(bounded, 1, high))
        return tuple(array.astype(low.dtype) for array in units)  # pyrefly: ignore
