"""Numbers between two log rows: the latest value of a key, and seconds, which add up."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Stats:
    """Collects numbers by key and exports them as one flat row of floats. One thread owns it."""

    def __init__(self) -> None:
        self._row: dict[str, float] = {}

    def last(self, key: str, value: float) -> None:
        """Record a number; the latest is exported."""
        self._row[key] = float(value)

    @contextmanager
    def timer(self, key: str) -> Iterator[None]:
        """Add the seconds spent inside to `time/<key>`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            key = f"time/{key}"
            self._row[key] = self._row.get(key, 0.0) + time.perf_counter() - start

    def export(self) -> dict[str, float]:
        """Return everything recorded since the last export, and forget it."""
        row, self._row = self._row, {}
        return row
