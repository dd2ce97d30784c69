"""All problems of a setting by number, split into training and held-out ones without listing them.

A setting is a few forms, such as sums of two numbers of two digits, and a problem of a form is a number in mixed radix.
Each form has a permutation of its own, of a fixed key: its first problems are held out, the rest are for training. A
form has the same key wherever it is used, so a problem held out in one setting is in the training split of none.
"""

import hashlib
import math
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import overload

import numpy as np

from palestra.data.shuffle import Indices, permute, stream_key
from palestra.errors import UsageError
from palestra.tasks.types import Problem

LARGEST = 2**44
"""Problems of a form at most: of a larger one, a part that is spread evenly over it."""
HELD_OUT = 500
"""Problems of a form that are held out at most, else one in `HELD_OUT_PART`."""
HELD_OUT_PART = 5
AT_ONCE = 1024
"""Problems made at once where all are asked for."""


@dataclass(frozen=True)
class Form:
    """Problems of one kind: every way to choose one of `radices[k]` things at each place k."""

    name: str
    """Says all that there is to it: its permutation is made of the name."""
    radices: tuple[int, ...]

    @property
    def size(self) -> int:
        """How many problems it has."""
        return min(self.all, LARGEST)

    @property
    def all(self) -> int:
        """How many there are before some are left out."""
        return math.prod(self.radices)

    @property
    def held_out(self) -> int:
        """How many of them are the test split."""
        return min(HELD_OUT, self.size // HELD_OUT_PART)

    def choices(self, places: Indices) -> list[tuple[int, ...]]:
        """The problems at places of its permutation: what is chosen for each of `radices`."""
        found = []
        for part in _moved(places, self.size, self.name).tolist():
            number, chosen = self._spread(part), []
            for radix in reversed(self.radices):
                number, choice = divmod(number, radix)
                chosen.append(choice)
            found.append(tuple(reversed(chosen)))
        return found

    def place(self, choices: Sequence[int]) -> int | None:
        """The place of a problem in its permutation; None where it is one of those left out."""
        number = 0
        for choice, radix in zip(choices, self.radices, strict=True):
            number = number * radix + choice
        part = number // (self.all // self.size)
        if part >= self.size or self._spread(part) != number:
            return None
        return int(_moved(np.array([part]), self.size, self.name, inverse=True)[0])

    def _spread(self, part: int) -> int:
        """One number of each of `size` equal parts of all numbers."""
        width = self.all // self.size
        if width == 1:
            return part
        digest = hashlib.blake2b(f"{self.name}\0{part}".encode(), digest_size=64).digest()
        return part * width + int.from_bytes(digest, "little") % width


class Enumerated(Sequence[Problem]):
    """One split of all problems of some forms, in an order that mixes them; a problem is made when it is asked for."""

    def __init__(self, forms: Sequence[Form], split: str):
        if split not in ("train", "test"):
            raise UsageError(f"there is no split {split!r}; there are 'train' and 'test'")
        self._forms = forms
        self._number = {form.name: number for number, form in enumerate(forms)}
        self._skipped = [form.held_out if split == "train" else 0 for form in forms]
        sizes = [form.size - form.held_out if split == "train" else form.held_out for form in forms]
        self._starts = [0, *accumulate(sizes)]
        self._order = "\0".join([split, *(form.name for form in forms)])
        if len(self) == 0:
            raise UsageError(
                f"with these args there are only {sum(form.size for form in forms)} problems, too few for a split "
                f"'{split}': make them longer or allow more"
            )

    def __len__(self) -> int:
        return self._starts[-1]

    @overload
    def __getitem__(self, index: int) -> Problem: ...
    @overload
    def __getitem__(self, index: slice) -> list[Problem]: ...
    def __getitem__(self, index: int | slice) -> Problem | list[Problem]:
        """The problem at an index, or those of a slice."""
        if isinstance(index, slice):
            return self.at(np.arange(*index.indices(len(self))))
        if not -len(self) <= index < len(self):
            raise IndexError(f"there are {len(self)} problems, none with index {index}")
        return self.at(np.array([index % len(self)]))[0]

    def __iter__(self) -> Iterator[Problem]:
        for start in range(0, len(self), AT_ONCE):
            yield from self[start : start + AT_ONCE]

    @abstractmethod
    def problem(self, form: Form, choices: tuple[int, ...]) -> Problem:
        """A problem of a form."""

    @abstractmethod
    def locate(self, row: str) -> int | None:
        """The index of a problem by the row of its id; None where there is none of it in this split."""

    def where(self, form: str, choices: Sequence[int]) -> int | None:
        """The index of a problem by the name of its form; None where it is not of this split."""
        number = self._number.get(form)
        place = None if number is None else self._forms[number].place(choices)
        if number is None or place is None:
            return None
        at = place - self._skipped[number] + self._starts[number]
        if not self._starts[number] <= at < self._starts[number + 1]:
            return None
        return int(_moved(np.array([at]), len(self), self._order, inverse=True)[0])

    def at(self, indices: Indices) -> list[Problem]:
        """The problems at indices; many at once take little longer than one."""
        at = _moved(indices, len(self), self._order)
        numbers = np.searchsorted(self._starts, at, side="right") - 1
        found: dict[int, Problem] = {}
        for number in np.unique(numbers).tolist():
            form, theirs = self._forms[number], np.flatnonzero(numbers == number)
            choices = form.choices(at[theirs] - self._starts[number] + self._skipped[number])
            found |= {slot: self.problem(form, one) for slot, one in zip(theirs.tolist(), choices, strict=True)}
        return [found[slot] for slot in range(len(indices))]


def _moved(indices: Indices, length: int, name: str, inverse: bool = False) -> Indices:
    return permute(indices, length, np.array(stream_key(0, "problems", name), np.uint64), inverse)
