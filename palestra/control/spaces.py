"""Spaces of every sort as one array: parts of observations side by side, actions as one vector of one kind.

Memories, collectors and normalization then know arrays alone. What the parts are is in the space itself, and from
there in the policy: networks tell images from numbers, and `Policy.act` takes and gives what the environment does.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from palestra.errors import UsageError

Path = tuple[str | int, ...]


def leaves(space: gym.Space, path: Path = ()) -> Iterator[tuple[Path, gym.Space]]:
    """The parts of a Dict or Tuple, nested ones too, in the order of the space, each with its keys; else the space."""
    if isinstance(space, spaces.Dict | spaces.Tuple):
        inner = space.spaces.items() if isinstance(space, spaces.Dict) else enumerate(space.spaces)
        for key, part in inner:
            yield from leaves(part, (*path, key))
    else:
        yield path, space


def _at(tree: Any, path: Sequence[str | int]) -> Any:
    for key in path:
        tree = tree[key]
    return tree


# ---- observations


@dataclass(frozen=True)
class Part:
    """A part of an observation, plain data: `start` to `stop` of the last dimension of the array."""

    path: list[str | int]
    """Its keys in the environment's observation; none where that has no parts."""
    shape: list[int]
    """Of a Box's array, else of the numbers that stand for it."""
    start: int
    stop: int
    pixels: bool
    """Whether it is of bytes, which networks divide by 255 and `normalize_obs` leaves as they are."""
    sizes: list[int] | None
    """The number of choices of each of its integers, stored as one-hot vectors; None: stored as it is."""
    firsts: list[int]
    """The smallest of each of these integers."""
    dims: int
    """Dimensions of the environment's own array: those in front of them are of a batch."""

    @classmethod
    def of(cls, path: Path, space: gym.Space, start: int) -> "Part":
        """The part for one space, whose numbers begin at `start`."""
        sizes, firsts, shape, dims = None, [], list(space.shape or ()), len(space.shape or ())
        match space:
            case spaces.Box():
                pass
            case spaces.MultiBinary():
                pass
            case spaces.Discrete():
                sizes, firsts = [int(space.n)], [int(space.start)]
            case spaces.MultiDiscrete():
                sizes, firsts = space.nvec.reshape(-1).tolist(), space.start.reshape(-1).tolist()
            case _:
                where = f" at {'.'.join(map(str, path))}" if path else ""
                raise UsageError(
                    f"the observation space {space}{where} is not supported: wrap the environment so that it gives "
                    "Box, Discrete, MultiDiscrete, MultiBinary, or a Dict or Tuple of them"
                )
        shape = shape if sizes is None else [sum(sizes)]
        pixels = isinstance(space, spaces.Box) and space.dtype == np.uint8
        return cls(list(path), shape, start, start + math.prod(shape), pixels, sizes, firsts, dims)

    def flat(self, leaf: Any) -> np.ndarray:
        """The part of an observation, or of a batch of them, as the array has it: (..., stop - start)."""
        array = np.asarray(leaf)
        flat = array.reshape((*array.shape[: array.ndim - self.dims], -1))
        if self.sizes is None:
            return flat if self.pixels else flat.astype(np.float32)
        integers = flat - np.array(self.firsts)
        pieces = [np.eye(n, dtype=np.float32)[integers[..., i]] for i, n in enumerate(self.sizes)]
        return np.concatenate(pieces, axis=-1)


class PackedBox(spaces.Box):
    """The space of observations packed into one array, which knows their parts; with `stack` that many of them."""

    def __init__(self, parts: list[Part], stack: int | None = None):
        pixels = all(part.pixels for part in parts)
        shape = (parts[-1].stop,) if stack is None else (stack, parts[-1].stop)
        low, high = (0, 255) if pixels else (-np.inf, np.inf)
        super().__init__(low, high, shape, np.uint8 if pixels else np.float32)
        self.parts = parts


class ObsShape(tuple[int, ...]):
    """The shape of one observation as it is stored, and its parts where it is packed."""

    parts: list[Part] | None = None

    @classmethod
    def of(cls, shape: Sequence[int], parts: Sequence[Part | Mapping[str, Any]] | None) -> "ObsShape":
        """A shape with parts, which may be plain data as `plain_parts` gives it."""
        made = cls(shape)
        if parts is not None:
            made.parts = [part if isinstance(part, Part) else Part(**part) for part in parts]
        return made

    @property
    def plain_parts(self) -> list[dict[str, Any]] | None:
        """The parts as plain data, for a checkpoint."""
        return None if self.parts is None else [asdict(part) for part in self.parts]


def observation_shape(space: gym.Space) -> ObsShape:
    """The shape of one observation of a space that policies can see."""
    if not isinstance(space, spaces.Box):
        raise UsageError(
            f"the observation space {space} of a vectorized environment is not supported: use `vectorize: sync` or "
            "`async`, or wrap the environment so that it gives a Box"
        )
    return ObsShape.of(space.shape, space.parts if isinstance(space, PackedBox) else None)


def packed(parts: Sequence[Part], obs: Any) -> np.ndarray:
    """An observation as the environment gives it, or a batch of them, as one array (..., size)."""
    return np.concatenate([part.flat(_at(obs, part.path)) for part in parts], axis=-1)


class PackedObservation(gym.ObservationWrapper):
    """Gives observations of any sort as one array."""

    def __init__(self, env: gym.Env):
        super().__init__(env)
        parts: list[Part] = []
        for path, space in leaves(env.observation_space):
            parts.append(Part.of(path, space, parts[-1].stop if parts else 0))
        if not parts:
            raise UsageError(f"the observation space {env.observation_space} has no parts to learn from")
        self.observation_space = PackedBox(parts)

    def observation(self, observation: Any) -> np.ndarray:
        """One array."""
        assert isinstance(self.observation_space, PackedBox)
        return packed(self.observation_space.parts, observation)


# ---- actions


def flat_actions(space: gym.Space) -> gym.Space:
    """The space of the same actions as one vector; the space itself where heads know it."""
    parts = [part for _, part in leaves(space)]
    # MultiBinary((3,)) has the shape of MultiBinary(3), but a tuple in place of its number.
    vector = len(space.shape or ()) == 1 and not isinstance(getattr(space, "n", None), tuple)
    if parts == [space] and (vector or not isinstance(space, _KNOWN)):
        return space
    boxes = [part for part in parts if isinstance(part, spaces.Box) and part.dtype.kind == "f"]
    if boxes and len(boxes) == len(parts):
        low, high = ([getattr(part, bound).reshape(-1) for part in boxes] for bound in ("low", "high"))
        flat = spaces.Box(np.concatenate(low, dtype=np.float32), np.concatenate(high, dtype=np.float32))
    elif parts and all(isinstance(part, spaces.MultiBinary) for part in parts):
        flat = spaces.MultiBinary(sum(math.prod(part.shape or ()) for part in parts))
    elif parts and all(isinstance(part, _CHOICES) for part in parts):
        sizes, firsts = zip(*(_choices(part) for part in parts), strict=True)
        flat = spaces.MultiDiscrete(np.concatenate(sizes), start=np.concatenate(firsts))
    else:
        kinds = ", ".join(sorted({type(part).__name__ for part in parts})) or "nothing"
        raise UsageError(
            f"the action space {space} is not supported: its parts are {kinds}; use parts that are all Box of floats, "
            "or all Discrete, MultiDiscrete and MultiBinary"
        )
    setattr(flat, "form", _form(space))  # noqa: B010  an attribute of our own on Gymnasium's class
    return flat


_CHOICES = (spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)
_KNOWN = (spaces.Box, spaces.MultiDiscrete, spaces.MultiBinary)


def _choices(space: gym.Space) -> tuple[np.ndarray, np.ndarray]:
    """The number of choices of each integer of an action, and its smallest."""
    match space:
        case spaces.Discrete():
            return np.array([space.n]), np.array([space.start])
        case spaces.MultiDiscrete():
            return space.nvec.reshape(-1), space.start.reshape(-1)
    count = math.prod(space.shape or ())
    return np.full(count, 2), np.zeros(count, np.int64)


def _form(space: gym.Space) -> dict[str, Any]:
    """How a vector becomes an action of the space, as plain data."""
    if isinstance(space, spaces.Dict):
        return {"keys": list(space.spaces), "parts": [_form(part) for part in space.spaces.values()]}
    if isinstance(space, spaces.Tuple):
        return {"keys": None, "parts": [_form(part) for part in space.spaces]}
    return {"shape": list(space.shape or ()), "dtype": np.dtype(space.dtype).name}


def structured(form: dict[str, Any], vectors: np.ndarray) -> Any:
    """Vectors of actions, (..., size), as an action of the environment's own form; a batch stays one in each part."""
    action, used = _structured(form, vectors, 0)
    assert used == vectors.shape[-1]
    return action


def _structured(form: dict[str, Any], vectors: np.ndarray, at: int) -> tuple[Any, int]:
    if "parts" not in form:
        end, batch = at + math.prod(form["shape"]), vectors.shape[:-1]
        array = vectors[..., at:end].reshape((*batch, *form["shape"])).astype(form["dtype"])
        return (array[()] if array.ndim == 0 and array.dtype.kind != "f" else array), end
    parts = []
    for inner in form["parts"]:
        part, at = _structured(inner, vectors, at)
        parts.append(part)
    return (tuple(parts) if form["keys"] is None else dict(zip(form["keys"], parts, strict=True))), at


class FlatAction(gym.ActionWrapper):
    """Takes actions as one vector, and also as the environment does."""

    def __init__(self, env: gym.Env):
        super().__init__(env)
        self.action_space = flat_actions(env.action_space)

    def action(self, action: Any) -> Any:
        """The environment's own form."""
        if isinstance(action, np.ndarray) and action.ndim == 1:
            return structured(getattr(self.action_space, "form"), action)  # noqa: B009
        return action
