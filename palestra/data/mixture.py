"""Mixtures and shuffles without state: the example at a position is computed from the position alone.

A Feistel network over pairs (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002, their generalized
Feistel): an index is split into x = right · width + left, and the rounds add a hash of one part to the other. Pairs
reach a little past the length; an index that lands there is sent through again until it is inside (cycle walking).
All arithmetic is modulo 2⁶⁴ on arrays, and the same on every machine and numpy version.

Positions come in blocks. In each block a dataset has the same number of examples, int(weight · block size), and what
rounding leaves over goes to the largest; only their order differs, a permutation keyed by seed and block. So the number
of examples before a block is a product, not a history: any batch costs the same to find, and a run that resumes needs
nothing but its step.
"""

import functools
import hashlib
import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, Protocol, TypeVar

import numpy as np

from palestra.errors import UsageError

Indices = np.ndarray[Any, np.dtype[np.int64]]
Keys = np.ndarray[Any, np.dtype[np.uint64]]

# Four rounds make a pseudorandom permutation of a large domain (Luby and Rackoff, 1988). Small ones need more: measured
# over 4·10⁵ keys, pairs of 64 items are uniform from 8 rounds on, whole orders of 6 items from about 20 on.
ROUNDS, ROUNDS_SMALL, SMALL = 8, 24, 128
GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2⁶⁴ / φ, odd: steps through all 64-bit numbers


def stream_key(seed: int, *names: str | int) -> int:
    """A 64-bit key for the stream `names` of `seed`; neighboring seeds and other names give unrelated keys."""
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


def permutation(length: int, seed: int, count: int | None = None) -> Indices:
    """The first `count` (all, where None) places of a pseudorandom permutation of [0, length)."""
    key = np.array(stream_key(seed, "permutation"), np.uint64)
    return permute(np.arange(length if count is None else count), length, key)


@dataclass(frozen=True)
class Epochs:
    """Pass after pass over a dataset, each in an order of its own: position n of them all is epoch n // length."""

    length: int
    seed: int
    shuffle: bool = True

    def __call__(self, positions: Indices) -> Indices:
        """The examples at some positions."""
        epochs, indices = np.divmod(positions, np.int64(self.length))
        if not self.shuffle:
            return indices
        return permute(indices, self.length, fold(stream_key(self.seed, "epochs"), epochs))


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
    The finalizer of SplitMix64 (Steele, Lea and Flood, 2014; constants by Stafford).
    """
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


Item = TypeVar("Item", covariant=True)
Stop = Literal["restart", "first_exhausted", "all_exhausted"]
Weights = Mapping[str, float]
Stages = Sequence[tuple[int, Weights]]  # from which sequence (or step) on, which weights


class Dataset(Protocol[Item]):
    """Examples by index."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: Any, /) -> Item: ...


@dataclass(frozen=True)
class _Stage:
    """A stretch of blocks with the same weights."""

    first_block: int
    counts: Indices
    """Examples of each dataset in a block."""
    before: Indices
    """Examples of each dataset in all the blocks before this stage."""


class Mixture(Generic[Item]):
    """Datasets sampled by weight, with random access.

    `weights` are relative, one mapping or `[(first sequence, mapping), …]` with each start a multiple of the block
    size. A dataset without weight in any stage is for validation only. Within a dataset epochs follow one another,
    each reshuffled unless `shuffle` is off. It ends when the first dataset (`first_exhausted`) or the last one
    (`all_exhausted`) has completed an epoch, or never (`restart`).
    """

    def __init__(
        self,
        datasets: Mapping[str, Dataset[Item]],
        weights: Weights | Stages,
        *,
        seed: int,
        block_size: int = 2048,
        stop: Stop = "restart",
        shuffle: bool = True,
        shuffle_blocks: bool = True,
    ) -> None:
        stages = [(0, weights)] if isinstance(weights, Mapping) else list(weights)
        starts = [start for start, _ in stages]
        if starts[:1] != [0] or starts != sorted(set(starts)) or any(start % block_size for start in starts):
            raise UsageError(
                f"mixture: the stages start at sequences {starts}; expected 0 first, then rising multiples of the "
                f"block size {block_size}"
            )
        shares = [_shares(of_stage, datasets, f"the weights from sequence {start}") for start, of_stage in stages]
        self.datasets = dict(datasets)
        self.names = tuple(name for name in datasets if any(share.get(name, 0) > 0 for share in shares))
        for name in self.names:
            if len(datasets[name]) == 0:
                raise UsageError(f"mixture: dataset {name!r} has a weight but no examples; give it weight 0 or data")
        self.block_size, self.stop, self.shuffle_blocks = block_size, stop, shuffle_blocks
        self._block_key = stream_key(seed, "blocks")
        self._stages = _plan(starts, shares, self.names, block_size)
        self._epochs = [Epochs(len(datasets[name]), stream_key(seed, "dataset", name), shuffle) for name in self.names]
        self._block = functools.lru_cache(maxsize=4)(self._sample_block)  # consecutive batches are in one block
        self._length = self._end()

    @property
    def endless(self) -> bool:
        """Whether there is an example at every position."""
        return self._length is None

    def __len__(self) -> int:
        if self._length is None:
            raise TypeError(f"a mixture with stop={self.stop!r} never ends here and has no length")
        return self._length

    def examples(self, positions: Indices) -> list[Item]:
        """The examples at many positions."""
        components, indices = self.lookup(positions)
        return [self.datasets[self.names[c]][int(i)] for c, i in zip(components, indices, strict=True)]

    def lookup(self, positions: Indices) -> tuple[Indices, Indices]:
        """For each position: the number in `names` of its dataset, and the index of its example there."""
        positions = np.asarray(positions, np.int64)
        end = math.inf if self._length is None else self._length
        if positions.size and (positions.min() < 0 or positions.max() >= end):
            raise IndexError(f"positions {positions.min()} to {positions.max()} of a mixture with {end} examples")
        components, ranks = np.empty_like(positions), np.empty_like(positions)
        blocks, places = np.divmod(positions, np.int64(self.block_size))
        by_block = np.argsort(blocks, kind="stable")
        for chosen in np.split(by_block, np.flatnonzero(np.diff(blocks[by_block])) + 1) if positions.size else []:
            of_block, ranks_of_block = self._block(int(blocks[chosen[0]]))
            components[chosen], ranks[chosen] = of_block[places[chosen]], ranks_of_block[places[chosen]]
        indices = np.empty_like(positions)
        for number in np.unique(components):
            theirs = components == number
            indices[theirs] = self._epochs[number](ranks[theirs])
        return components, indices

    def _sample_block(self, block: int) -> tuple[Indices, Indices]:
        """The dataset at each place of a block, and how many examples of it stand before that place in the mixture."""
        stage = self._stages[bisect_right(self._stages, block, key=lambda stage: stage.first_block) - 1]
        components = np.repeat(np.arange(len(self.names)), stage.counts)
        if self.shuffle_blocks:
            order = permute(np.arange(self.block_size), self.block_size, fold(self._block_key, np.array([block])))
            components = components[order]
        # Counted in order of appearance, so that an unshuffled dataset is read in order and ends at its last example.
        starts = np.cumsum(stage.counts) - stage.counts
        ranks = np.empty_like(components)
        ranks[np.argsort(components, kind="stable")] = np.arange(self.block_size) - np.repeat(starts, stage.counts)
        before = stage.before + (block - stage.first_block) * stage.counts
        return components, ranks + before[components]

    def _end(self) -> int | None:
        if self.stop == "restart":
            return None
        ends = [self._exhausted_at(number) for number in range(len(self.names))]
        reached = [end for end in ends if end is not None]
        if self.stop == "first_exhausted":
            return min(reached, default=None)
        return max(reached) if len(reached) == len(ends) else None

    def _exhausted_at(self, number: int) -> int | None:
        """The position after the last example of a dataset's first pass, None where no stage gets there."""
        length = self._epochs[number].length
        for stage, following in zip(self._stages, [*self._stages[1:], None], strict=True):
            count, missing = int(stage.counts[number]), length - int(stage.before[number])
            blocks = math.inf if following is None else following.first_block - stage.first_block
            if count > 0 and missing <= count * blocks:
                block = stage.first_block + (missing - 1) // count
                components, ranks = self._block(block)
                place = int(np.flatnonzero((components == number) & (ranks == length - 1))[0])
                return block * self.block_size + place + 1
        return None


def _shares(weights: Weights, datasets: Mapping[str, Any], what: str) -> dict[str, float]:
    """The positive weights, scaled to sum to 1."""
    if unknown := sorted(set(weights) - set(datasets)):
        raise UsageError(f"mixture: {what} name {', '.join(unknown)}; the datasets are {', '.join(datasets)}")
    for name, weight in weights.items():
        if not (math.isfinite(weight) and weight >= 0):
            raise UsageError(f"mixture: {what} give {name!r} {weight}; a weight is a finite number, 0 or more")
    total = sum(weights.values())
    if total == 0:
        raise UsageError(f"mixture: {what} are all 0; give at least one dataset a positive weight")
    return {name: weight / total for name, weight in weights.items() if weight > 0}


def _plan(starts: list[int], shares: list[dict[str, float]], names: tuple[str, ...], block_size: int) -> list[_Stage]:
    smallest = min((weight, name) for share in shares for name, weight in share.items())
    if int(smallest[0] * block_size) == 0:
        enough = math.ceil(1 / smallest[0])
        while int(smallest[0] * enough) == 0:  # 1 / weight was rounded down
            enough += 1
        raise UsageError(
            f"mixture: dataset {smallest[1]!r} has {smallest[0]:.3g} of the weight, less than one example in a block "
            f"of {block_size}, and would never be sampled; set block_size to at least {enough}, or its weight to 0"
        )
    stages: list[_Stage] = []
    for start, share in zip(starts, shares, strict=True):
        counts = np.array([int(share.get(name, 0) * block_size) for name in names], np.int64)
        counts[np.argmax(counts)] += block_size - counts.sum()
        block, before = start // block_size, np.zeros(len(names), np.int64)
        if stages:
            before = stages[-1].before + (block - stages[-1].first_block) * stages[-1].counts
        stages.append(_Stage(block, counts, before))
    return stages
