"""A FIFO lock: a busy thread cannot starve the others. And what the garbage collector may not interrupt."""

import gc
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


class Uncollected:
    """No collection: each would walk again through all tokens of all results that were made just before.

    A class, since the end of a generator makes an object, with which a collection would begin at once.
    """

    def __enter__(self) -> None:
        self._was = gc.isenabled()
        gc.disable()

    def __exit__(self, *_: object) -> None:
        if self._was:
            gc.enable()
