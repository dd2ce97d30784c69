"""A coroutine on a loop in a second thread while this thread, which owns torch, generates for it."""

from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from palestra.generate.local import LocalGenerator
from palestra.rollout.loop import LoopThread

IDLE_SECONDS = 0.05  # between two looks while there is nothing to generate, as when all answers are being judged

Result = TypeVar("Result")


def pumped(
    generator: LocalGenerator, work: Coroutine[Any, Any, Result], look: Callable[[], None] = lambda: None
) -> Result:
    """Run `work` to its end; the generator is one with `drive="caller"`.

    `look` is called between two bursts and may raise to end it all: the coroutine is then cancelled, and has ended
    when this raises.
    """
    with LoopThread("evaluate") as loop:
        future = loop.start(work)
        future.add_done_callback(lambda _: generator.wake())
        while not future.done():
            look()
            generator.work(IDLE_SECONDS)
        return future.result()
