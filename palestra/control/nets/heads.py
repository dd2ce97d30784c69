"""Action heads: from network outputs to actions, for each kind of Gymnasium action space."""

from dataclasses import dataclass, field
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


@dataclass(frozen=True)
class ActionHead:
    """The policy's end of one action space. `description` is plain data, so a checkpoint can hold it."""

    description: dict[str, Any]
    # Beside the description, whose arrays a compiled graph must not touch.
    outputs: int = field(init=False, repr=False, compare=False)
    """How many numbers the policy network puts out."""
    continuous: bool = field(init=False, repr=False, compare=False)
    """Whether actions are numbers within a Box."""
    _kind: str = field(init=False, repr=False, compare=False)
    _sizes: list[int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        kind = "beta" if self.family == "beta" else self.description["type"]
        object.__setattr__(self, "outputs", self._outputs())
        object.__setattr__(self, "continuous", self.description["type"] == "box")
        object.__setattr__(self, "_kind", kind)
        object.__setattr__(self, "_sizes", list(self.description.get("sizes", [])))

    @classmethod
    def of(cls, space: gym.Space) -> "ActionHead":
        """The head for `space`."""
        match space:
            case spaces.Discrete():
                return cls({"type": "discrete", "n": int(space.n), "start": int(space.start)})
            case spaces.MultiDiscrete() if space.nvec.ndim == 1:
                return cls({"type": "multi_discrete", "sizes": space.nvec.tolist(), "start": space.start.tolist()})
            case spaces.MultiBinary() if isinstance(space.n, int):
                return cls({"type": "multi_binary", "n": space.n})
            case spaces.Box() if len(space.shape) == 1 and space.dtype.kind == "f":
                return cls({"type": "box", "low": space.low, "high": space.high})
        raise UsageError(
            f"the action space {space} is not supported: "
            "use Discrete, MultiDiscrete, MultiBinary or a one-dimensional Box of floats"
        )

    def drawing(self, family: str) -> "ActionHead":
        """The head that draws continuous actions by `family`, gaussian or beta; itself for other actions."""
        if not self.continuous or family == self.family:
            return self
        if family == "beta" and not np.isfinite([self.description["low"], self.description["high"]]).all():
            raise UsageError(
                "algorithm.distribution: beta draws actions between bounds, and the action space "
                "has parts without: use gaussian"
            )
        return ActionHead({**self.description, "family": family})

    @property
    def family(self) -> str:
        """How continuous actions are drawn."""
        return self.description.get("family", "gaussian")

    def _outputs(self) -> int:
        match self.description:
            case {"type": "multi_discrete", "sizes": sizes}:
                return sum(sizes)
            case {"type": "box", "low": low}:
                return len(low) * (2 if self.family == "beta" else 1)
            case {"n": n}:
                return n
        raise AssertionError(self.description)

    @property
    def maskable(self) -> list[int] | None:
        """The numbers of choices of each part of an action, where an environment may forbid some; else None."""
        match self.description:
            case {"type": "discrete", "n": n}:
                return [n]
            case {"type": "multi_discrete", "sizes": sizes}:
                return sizes
        return None

    @property
    def has_log_std(self) -> bool:
        """Whether the policy has a log-std beside its outputs."""
        return self.continuous and self.family == "gaussian"

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one action."""
        match self.description:
            case {"type": "discrete"}:
                return ()
            case {"type": "multi_discrete", "sizes": sizes}:
                return (len(sizes),)
            case {"type": "box", "low": low}:
                return (len(low),)
        return (self.outputs,)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of a stored action."""
        return torch.float32 if self.continuous else torch.int64

    def distribution(self, outputs: Tensor, log_std: Tensor | None, mask: Tensor | None = None) -> Distribution:
        """The distribution over actions that the network's `outputs` stand for.

        `mask`, shaped like them, is True for what is allowed.
        """
        match self._kind:
            case "discrete":
                return Categorical(outputs, mask)
            case "multi_discrete":
                return MultiCategorical(outputs, self._sizes, mask)
            case "multi_binary":
                return Bernoulli(outputs)
            case "beta":
                return Beta.of(outputs)
        assert log_std is not None
        return DiagonalGaussian(outputs, log_std)

    def noise(self, generator: torch.Generator, *batch: int) -> Tensor:
        """Noise for `batch` samples, drawn in one go."""
        match self.description["type"], self.family:
            case "box", "beta":
                return Beta.draw(generator, (*batch, *self.shape, 2, Beta.ATTEMPTS, 2))
            case "box", _:
                return DiagonalGaussian.draw(generator, (*batch, self.outputs))
            case "multi_binary", _:
                return Bernoulli.draw(generator, (*batch, self.outputs))
        return Categorical.draw(generator, (*batch, self.outputs))

    def to_env(self, action: Tensor) -> np.ndarray:
        """What the environment is given for a stored action.

        Actions of a Box are stored in units of half its range, −1 to 1, where it has bounds, and are clipped here and
        nowhere else.
        """
        array = action.numpy(force=True)
        match self.description:
            case {"type": "discrete", "start": 0}:
                return array
            case {"type": "discrete", "start": start}:
                return array + start
            case {"type": "multi_discrete", "start": start}:
                return array + np.asarray(start)
            case {"type": "multi_binary"}:
                return array.astype(np.int8)
            case {"type": "box"}:
                middle, half, least, most = self._units
                return middle + half * np.clip(array, least, most)
        raise AssertionError(self.description)

    @cached_property
    def _units(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Middle and half of the range of each part, and the bounds in units of it; parts without both bounds stay."""
        low, high = self.description["low"], self.description["high"]
        bounded = np.isfinite(low) & np.isfinite(high)
        middle = np.where(bounded, (low.astype(np.float64) + high) / 2, 0)
        half = np.where(bounded, (high.astype(np.float64) - low) / 2, 1)
        units = (middle, half, np.where(bounded, -1, low), np.where(bounded, 1, high))
        return tuple(array.astype(low.dtype) for array in units)  # pyrefly: ignore
