"""Shuffling without state: a permutation of [0, length) that is computed for any index, in either direction.

A Feistel network over pairs (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002, their generalised
Feistel): an index is split into x = right · width + left, and the rounds add a hash of one part to the other. Pairs
reach a little past the length; an index that lands there is sent through again until it is inside (cycle walking).
All arithmetic is modulo 2⁶⁴ on arrays, and the same on every machine and numpy version.
"""

import hashlib
import math
from dataclasses import dataclass, field
from typing import Any, overload

import numpy as np

Indices = np.ndarray[Any, np.dtype[np.int64]]
Keys = np.ndarray[Any, np.dtype[np.uint64]]

# Four rounds make a pseudorandom permutation of a large domain (Luby and Rackoff, 1988). Small ones need more: measured
# over 4·10⁵ keys, pairs of 64 items are uniform from 8 rounds on, whole orders of 6 items from about 20 on.
ROUNDS, ROUNDS_SMALL, SMALL = 8, 24, 128
GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2⁶⁴ / φ, odd: steps through all 64-bit numbers


def stream_key(seed: int, *names: str | int) -> int:
    """A 64-bit key for the stream `names` of `seed`; neighbouring seeds and other names give unrelated keys."""
    text = "\0".join(map(str, (seed, *names)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def fold(key: int, numbers: Indices) -> Keys:
    """A key for each number (epoch, block) under one key; different numbers get different keys."""
    return _mix(np.uint64(key) ^ _mix(np.atleast_1d(numbers).astype(np.uint64) + GOLDEN))


def permute(indices: Indices, length: int, keys: Keys, inverse: bool = False) -> Indices:
    """Send each index of [0, length) to its place in the permutation that its key names; `keys` broadcasts.

    With `inverse`, back again.
    """
    if indices.size and (indices.min() < 0 or indices.max() >= length):
        raise IndexError(f"an index of [{indices.min()}, {indices.max()}] is outside [0, {length})")
    network = _backward if inverse else _forward
    width = math.isqrt(length - 1) + 1
    sides = np.uint64(width), np.uint64(-(-length // width))
    rounds = np.arange(ROUNDS_SMALL if length < SMALL else ROUNDS, dtype=np.uint64)
    keys = keys.reshape(1) if keys.size == 1 else np.broadcast_to(keys, indices.shape).ravel()
    round_keys = _mix(keys + (rounds * GOLDEN)[:, None])  # (rounds, 1 or indices)
    values = network(indices.ravel().astype(np.uint64), round_keys, *sides)
    while (outside := np.flatnonzero(values >= np.uint64(length))).size:
        theirs = round_keys if keys.size == 1 else round_keys[:, outside]
        values[outside] = network(values[outside], theirs, *sides)
    return values.astype(np.int64).reshape(indices.shape)


@dataclass(frozen=True)
class Permutation:
    """A pseudorandom bijection of [0, length), given by a seed alone."""

    length: int
    seed: int

    def __post_init__(self) -> None:
        if self.length < 1:
            raise ValueError(f"cannot permute {self.length} items")

    @overload
    def __call__(self, index: int) -> int: ...
    @overload
    def __call__(self, index: Indices) -> Indices: ...
    def __call__(self, index: int | Indices) -> int | Indices:
        """Where the index goes."""
        return self._apply(index, inverse=False)

    @overload
    def inverse(self, index: int) -> int: ...
    @overload
    def inverse(self, index: Indices) -> Indices: ...
    def inverse(self, index: int | Indices) -> int | Indices:
        """What goes to the index."""
        return self._apply(index, inverse=True)

    def _apply(self, index: int | Indices, inverse: bool) -> int | Indices:
        key = np.array(stream_key(self.seed, "permutation"), np.uint64)
        moved = permute(np.asarray(index, np.int64), self.length, key, inverse)
        return int(moved) if isinstance(index, int) else moved


@dataclass(frozen=True)
class Epochs:
    """Pass after pass over a dataset, each in an order of its own: position n of them all is epoch n // length."""

    length: int
    seed: int
    shuffle: bool = True
    _key: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.length < 1:
            raise ValueError(f"a dataset of {self.length} examples has no epochs")
        object.__setattr__(self, "_key", stream_key(self.seed, "epochs"))

    @overload
    def __call__(self, position: int) -> int: ...
    @overload
    def __call__(self, position: Indices) -> Indices: ...
    def __call__(self, position: int | Indices) -> int | Indices:
        """The example at a position."""
        epochs, indices = np.divmod(np.asarray(position, np.int64), np.int64(self.length))
        if np.any(epochs < 0):
            raise IndexError(f"a position before the first epoch: {np.min(position)}")
        if self.shuffle:
            indices = permute(indices, self.length, fold(self._key, epochs))
        return int(indices) if isinstance(position, int) else indices


def _forward(values: Keys, round_keys: Keys, width: np.uint64, height: np.uint64) -> Keys:
    right, left = np.divmod(values, width)
    for even, odd in zip(round_keys[::2], round_keys[1::2], strict=True):
        left = (left + _mix(right + even) % width) % width
        right = (right + _mix(left + odd) % height) % height
    return right * width + left


def _backward(values: Keys, round_keys: Keys, width: np.uint64, height: np.uint64) -> Keys:
    right, left = np.divmod(values, width)
    for even, odd in zip(round_keys[-2::-2], round_keys[::-2], strict=True):
        right = (right + height - _mix(left + odd) % height) % height
        left = (left + width - _mix(right + even) % width) % width
    return right * width + left


def _mix(values: Keys) -> Keys:
    """A bijection of 64-bit numbers in which each bit of the input flips each bit of the output half the time.

    Of arrays only: numpy warns of the wanted overflow where it works on a single number.
    The finaliser of SplitMix64 (Steele, Lea and Flood, 2014; constants by Stafford).
    """
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
