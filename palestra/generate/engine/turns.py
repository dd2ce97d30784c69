"""A FIFO lock: a busy thread cannot starve the others."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Turns:
    """Threads wait for their turn in the order of their calls."""

    def __init__(self) -> None:
        self._next, self._work = threading.Lock(), threading.Lock()

    @contextmanager
    def taken(self) -> Iterator[None]:
        """The turn of this thread."""
        with self._next:
            self._work.acquire()
        try:
            yield
        finally:
            self._work.release()
