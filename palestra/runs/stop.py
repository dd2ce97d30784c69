"""Stopping politely: the first signal asks a session to save and end, a second Ctrl-C ends it at once."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def stop_signals(request_stop: Callable[[], None]) -> Iterator[None]:
    """Call `request_stop` on SIGTERM and SIGINT; a second SIGINT raises KeyboardInterrupt. Other threads: no effect."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    interrupts = 0

    def on_signal(number: int, frame: FrameType | None) -> None:
        nonlocal interrupts
        request_stop()
        interrupts += number == signal.SIGINT
        if interrupts > 1:
            raise KeyboardInterrupt

    previous = {number: signal.signal(number, on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            # None stands for a handler that was not installed from Python and cannot be put back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
