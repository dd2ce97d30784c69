"""Random access into files of lines that only grow: from an offset, from the end, and by a key that never falls."""

import os
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple

BLOCK = 1 << 16
LONGEST = 32 << 20  # bytes of a line; a longer one is not read into memory
HEAD = 4096  # bytes of a line in which its key is looked for

Key = Callable[[bytes], float | None]
"""The sort key in the head of a line; None where there is none."""

_STEP = re.compile(rb'"step": ?(\d{1,15})\b')


def step_of(head: bytes) -> float | None:
    """The step of a row."""
    match = _STEP.search(head)
    return None if match is None else int(match[1])


class Line(NamedTuple):
    """A line and its place."""

    start: int
    data: bytes | None
    """Without the line break; None where it is too long to be read."""
    end: int
    """The first byte of the next line."""


class LineFile(AbstractContextManager["LineFile"]):
    """An open file of lines, as long as it was when it was opened; a line that is still being written is not part."""

    def __init__(self, path: Path):
        self.path, self._file = path, os.open(path, os.O_RDONLY)
        about = os.fstat(self._file)
        self.identity, self.end = f"{about.st_dev}-{about.st_ino}", self._start_of_line(about.st_size)

    def __exit__(self, *raised: object) -> None:
        os.close(self._file)

    def read(self, start: int, count: int) -> bytes:
        """At most `count` bytes."""
        return os.pread(self._file, max(0, count), start)

    def head(self, start: int) -> bytes:
        """The beginning of a line."""
        return self.read(start, HEAD).partition(b"\n")[0]

    def before(self, cursor: int) -> str:
        """The bytes before a place: what a reader remembers to know that the file still is what it read."""
        return self.read(max(0, cursor - 48), min(cursor, 48)).hex()

    def lines(self, start: int = 0, end: int | None = None, longest: int = LONGEST) -> Iterator[Line]:
        """The lines from the line start `start` on that start before `end`."""
        end = self.end if end is None else min(end, self.end)
        rest, at, position = b"", start, start
        while at < end:
            block = self.read(position, min(self.end - position, BLOCK if position == start else 1 << 20))
            if not block:  # truncated meanwhile
                return
            position += len(block)
            *parts, rest = (rest + block).split(b"\n")
            for part in parts:
                yield Line(at, part if len(part) <= longest else None, at + len(part) + 1)
                at += len(part) + 1
                if at >= end:
                    return
            if len(rest) > longest:
                rest, position = b"", self._after_break(position)
                yield Line(at, None, position)
                at = position

    def line_at(self, start: int) -> Line | None:
        """The line that starts at a byte; None if none does."""
        starts = 0 <= start < self.end and self.line_after(start) == start
        return next(self.lines(start), None) if starts else None

    def line_after(self, position: int) -> int:
        """The first start of a line at or after a byte."""
        return self._after_break(position - 1) if position > 0 else 0

    def search(self, key: Key, value: float) -> int:
        """The start of the first line whose key is at least `value`; lines without a key are passed over."""
        low, high = 0, self.end
        while high - low > BLOCK:
            middle = (low + high) // 2
            start, found = self._keyed(key, middle, high)
            low, high = (low, middle) if found is None or found >= value else (start + 1, high)
        lines = ((line.start, key((line.data or b"")[:HEAD])) for line in self.lines(self.line_after(low)))
        return next((start for start, found in lines if found is not None and found >= value), self.end)

    def last_key(self, key: Key, before: int | None = None) -> float | None:
        """The key of the last line that has one, of those that end at or before a byte; the last 100 are looked at."""
        start = self.end if before is None else before
        for _ in range(100):
            if start == 0:
                break
            start = self._start_of_line(start - 1)
            if (found := key(self.head(start))) is not None:
                return found
        return None

    def next_key(self, key: Key, start: int) -> float | None:
        """The key of the first line from `start` on that has one."""
        return self._keyed(key, start, self.end)[1]

    def spread(self, count: int) -> Iterator[Line]:
        """About `count` lines at even distances, the last among them."""
        starts = {self.line_after(number * self.end // count) for number in range(count)}
        for start in sorted(starts | {self._start_of_line(self.end - 1)} - {self.end}):
            yield from self.lines(start, start + 1)

    def _keyed(self, key: Key, position: int, limit: int) -> tuple[int, float | None]:
        """The first line with a key that starts at or after a byte and before `limit`, and its key."""
        start = self.line_after(position)
        while start < limit:
            if (found := key(self.head(start))) is not None:
                return start, found
            start = self._after_break(start)
        return start, None

    def _after_break(self, position: int) -> int:
        """The byte after the first line break at or after a byte; the end if there is none."""
        while position < self.end and (block := self.read(position, BLOCK)):
            if (place := block.find(b"\n")) >= 0:
                return position + place + 1
            position += len(block)
        return self.end

    def _start_of_line(self, position: int) -> int:
        """The start of the line that the byte before `position` belongs to; a line break belongs to the line after."""
        while position > 0:
            start = max(0, position - BLOCK)
            if (place := self.read(start, position - start).rfind(b"\n")) >= 0:
                return start + place + 1
            position = start
        return 0
