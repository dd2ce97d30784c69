"""Mixtures: which example of which dataset stands at a position, computed from the position alone.

Positions come in blocks. In each block a dataset has the same number of examples, int(weight · block size), and what
rounding leaves over goes to the largest; only their order differs, a permutation keyed by seed and block. So what was
drawn before a block is a product, not a history: any batch costs the same to find, and a run that resumes needs
nothing but its step.
"""

import functools
import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Generic, Literal, Protocol, TypeVar, get_args

import numpy as np

from palestra.data.shuffle import Epochs, Indices, fold, permute, stream_key
from palestra.errors import UsageError

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
    """Datasets drawn from by weight, with random access.

    `weights` are relative, one mapping or `[(first sequence, mapping), …]` with each start a multiple of the block
    size. A dataset without weight in any stage is for validation only. Within a dataset examples are drawn pass after
    pass, reshuffled each time unless `shuffle` is off. It ends when the first dataset
    (`first_exhausted`) or the last one (`all_exhausted`) has been drawn whole, or never (`restart`).
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
        if stop not in get_args(Stop):
            raise UsageError(f"mixture: stop is {stop!r}; it can be {', '.join(get_args(Stop))}")
        stages = [(0, weights)] if isinstance(weights, Mapping) else list(weights)
        _check_starts(stages, block_size)
        shares = [_shares(given, datasets, f"the weights from sequence {start}") for start, given in stages]
        self.datasets = dict(datasets)
        self.names = tuple(name for name in datasets if any(share.get(name, 0) > 0 for share in shares))
        for name in self.names:
            if len(datasets[name]) == 0:
                raise UsageError(f"mixture: dataset {name!r} has a weight but no examples; give it weight 0 or data")
        self.block_size, self.stop, self.shuffle_blocks = block_size, stop, shuffle_blocks
        self._block_key = stream_key(seed, "blocks")
        self._stages = _plan([start for start, _ in stages], shares, self.names, block_size)
        self._epochs = [Epochs(len(datasets[name]), stream_key(seed, "dataset", name), shuffle) for name in self.names]
        self._block = functools.lru_cache(maxsize=4)(self._draw_block)  # one batch after the other is of one block
        self._length = self._end()

    @property
    def endless(self) -> bool:
        """Whether there is an example at every position."""
        return self._length is None

    def __len__(self) -> int:
        if self._length is None:
            raise TypeError(f"a mixture with stop={self.stop!r} goes on for ever here and has no length")
        return self._length

    def __getitem__(self, position: int) -> tuple[str, int]:
        """The dataset at a position and the index of its example."""
        components, indices = self.lookup(np.array([position]))
        return self.names[components[0]], int(indices[0])

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
        components, drawn = np.empty_like(positions), np.empty_like(positions)
        blocks, places = np.divmod(positions, np.int64(self.block_size))
        by_block = np.argsort(blocks, kind="stable")
        for chosen in np.split(by_block, np.flatnonzero(np.diff(blocks[by_block])) + 1) if positions.size else []:
            of_block, drawn_of_block = self._block(int(blocks[chosen[0]]))
            components[chosen], drawn[chosen] = of_block[places[chosen]], drawn_of_block[places[chosen]]
        indices = np.empty_like(positions)
        for number in np.unique(components):
            theirs = components == number
            indices[theirs] = self._epochs[number](drawn[theirs])
        return components, indices

    def _draw_block(self, block: int) -> tuple[Indices, Indices]:
        """The dataset at each place of a block, and how many examples of it stand before that place in the mixture."""
        stage = self._stages[bisect_right(self._stages, block, key=lambda stage: stage.first_block) - 1]
        components = np.repeat(np.arange(len(self.names)), stage.counts)
        if self.shuffle_blocks:
            order = permute(np.arange(self.block_size), self.block_size, fold(self._block_key, np.array([block])))
            components = components[order]
        # Counted in order of appearance, so that an unshuffled dataset is read in order and ends at its last example.
        starts = np.cumsum(stage.counts) - stage.counts
        drawn = np.empty_like(components)
        drawn[np.argsort(components, kind="stable")] = np.arange(self.block_size) - np.repeat(starts, stage.counts)
        before = stage.before + (block - stage.first_block) * stage.counts
        return components, drawn + before[components]

    def _end(self) -> int | None:
        if self.stop == "restart":
            return None
        ends = [self._drawn_whole_at(number) for number in range(len(self.names))]
        reached = [end for end in ends if end is not None]
        if self.stop == "first_exhausted":
            return min(reached, default=None)
        return max(reached) if len(reached) == len(ends) else None

    def _drawn_whole_at(self, number: int) -> int | None:
        """The position after the last example of a dataset's first pass, None where no stage gets there."""
        length = self._epochs[number].length
        for stage, following in zip(self._stages, [*self._stages[1:], None], strict=True):
            count, missing = int(stage.counts[number]), length - int(stage.before[number])
            blocks = math.inf if following is None else following.first_block - stage.first_block
            if count > 0 and missing <= count * blocks:
                block = stage.first_block + (missing - 1) // count
                components, drawn = self._block(block)
                place = int(np.flatnonzero((components == number) & (drawn == length - 1))[0])
                return block * self.block_size + place + 1
        return None


class BatchSchedule:
    """Batch sizes that change at given steps, and the position in the data at which each step begins."""

    def __init__(self, stages: Sequence[tuple[int, int]]) -> None:
        starts = [start for start, _ in stages]
        if not stages or starts[0] != 0 or any(b <= a for a, b in pairwise(starts)):
            raise UsageError(f"batch sizes {list(stages)}: give [(step, size), …], from step 0 on and in rising order")
        if any(size < 1 for _, size in stages):
            raise UsageError(f"batch sizes {list(stages)}: a batch has at least one sequence")
        self._starts, self._sizes, self._offsets = starts, [size for _, size in stages], [0]
        for steps, size in zip(np.diff(starts).tolist(), self._sizes, strict=False):
            self._offsets.append(self._offsets[-1] + steps * size)

    def size(self, step: int) -> int:
        """Sequences in the batch of a step."""
        return self._sizes[self._stage(step)]

    def offset(self, step: int) -> int:
        """Sequences in all the batches before a step."""
        stage = self._stage(step)
        return self._offsets[stage] + (step - self._starts[stage]) * self._sizes[stage]

    def positions(self, step: int) -> Indices:
        """The positions of the batch of a step."""
        return self.offset(step) + np.arange(self.size(step))

    def rescale(self, stages: Stages) -> list[tuple[int, Weights]]:
        """Stages of a mixture that start at steps, as stages that start at sequences."""
        return [(self.offset(step), weights) for step, weights in stages]

    def _stage(self, step: int) -> int:
        if step < 0:
            raise IndexError(f"step {step}: steps count from 0")
        return bisect_right(self._starts, step) - 1


def _check_starts(stages: Stages, block_size: int) -> None:
    if block_size < 1:
        raise UsageError(f"mixture: block_size is {block_size}; it must be at least 1")
    starts = [start for start, _ in stages]
    if not starts or starts[0] != 0:
        raise UsageError(f"mixture: the first stage must start at sequence 0; the stages start at {starts}")
    for before, start in pairwise(starts):
        if start <= before:
            raise UsageError(f"mixture: the stages must start one after the other; they start at {starts}")
    for start in starts:
        if start % block_size:
            below = start // block_size * block_size
            raise UsageError(
                f"mixture: a stage starts at sequence {start}, in the middle of a block of {block_size}; "
                f"start it at {below} or {below + block_size}, or choose a block size that divides {start}"
            )


def _shares(weights: Weights, datasets: Mapping[str, Any], what: str) -> dict[str, float]:
    """The positive weights, scaled to sum to 1."""
    unknown = sorted(set(weights) - set(datasets))
    if unknown:
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
            f"of {block_size}, and would never be drawn; set block_size to at least {enough}, or its weight to 0"
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
