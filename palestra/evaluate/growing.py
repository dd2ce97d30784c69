"""A file of lines that grows as an evaluation goes on: killed at any instant, all but a torn last line is there."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from palestra.runs.store import written


@contextmanager
def growing(path: Path, kept: Iterable[str]) -> Iterator[Callable[[str], None]]:
    """What appends a line that is on the disk's way when it returns; the file begins anew with the lines in `kept`.

    Those are what an earlier process left, without its torn last line and what has to be done again.
    """
    with written(path) as file:
        file.writelines(line.encode() for line in kept)
    with path.open("a", encoding="utf-8") as file:

        def append(line: str) -> None:
            file.write(line)
            file.flush()

        yield append
