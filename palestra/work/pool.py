"""The process pool: fresh interpreters that run tasks, can be killed at any time, and never outlive the pool.

Workers are started as `python -c`, not through multiprocessing, so a script or notebook needs no
`if __name__ == "__main__"`. Each worker has its own process session: killing one ends its children too, and Ctrl-C at
a terminal reaches only the main process. Each is served by one thread here.
"""

import os
import pickle
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, as_completed
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

from palestra.errors import PalestraError
from palestra.work.groups import Guarded
from palestra.work.process import DiedIdle, Process, TaskFailed, TaskTimeout, WorkerDied
from palestra.work.worker import pack

__all__ = ["Pool", "PoolTask", "TaskFailed", "TaskTimeout", "WorkerDied", "as_completed"]

LIBRARIES = ("OMP_NUM", "MKL_NUM", "OPENBLAS_NUM", "NUMEXPR_NUM", "VECLIB_MAXIMUM")  # <library>_THREADS caps each


def name_of(fn: Callable[..., Any] | str) -> str:
    """A function's name in messages."""
    return fn if isinstance(fn, str) else getattr(fn, "__qualname__", repr(fn))


class PoolTask(Future):
    """A `concurrent.futures.Future` whose `cancel` also ends a running task, by killing its worker."""

    def __init__(
        self, name: str, payload: bytes, timeout: float | None, log: Path | None, loads: Callable[[bytes], Any]
    ) -> None:
        super().__init__()
        self.name, self._loads = name, loads
        self._order = (payload, None if log is None else str(log), timeout)
        self._lock = threading.RLock()  # a worker is signaled only while it runs this task
        self._process: Process | None = None
        self._asked = self._unwanted = False

    def cancel(self) -> bool:
        """End the task, waiting or running; its result is then a CancelledError. False if it is already done."""
        with self._lock:
            if self.cancelled():
                return True
            if super().cancel():
                self.set_running_or_notify_cancel()  # wakes as_completed now, not when a worker is free
                return True
            if self.done():
                return False
            self._unwanted = True
            if self._process is not None:
                self._process.kill()
            return True

    def ask_to_end(self) -> None:
        """Send SIGTERM, once, to the worker that runs the task."""
        with self._lock:
            if self._process is not None and not self._asked:
                self._asked = True
                self._process.terminate()

    def begin(self) -> bool:
        """Take the task from waiting to running; False if it was cancelled."""
        with self._lock:
            return not self.cancelled() and self.set_running_or_notify_cancel()

    def run_in(self, process: Process, silence: float | None) -> bool:
        """Run in that worker and set the outcome; a worker in an unknown state is killed.

        False if the worker was dead before the task started: the task still needs one.
        """
        with self._lock:
            self._process = process
            if self._unwanted:
                process.kill()
        try:
            value = self._loads(process.run(self.name, *self._order, silence))
        except DiedIdle:
            process.kill()
            return False
        except BaseException as error:
            if isinstance(error, (TaskTimeout, WorkerDied)):
                process.kill()
            self.finish(error=error)
        else:
            self.finish(value)
        return True

    def finish(self, value: Any = None, error: BaseException | None = None) -> None:
        """Set the outcome and wake its waiters."""
        with self._lock:
            self._process = None
            self._order = (b"", None, None)  # free a large payload before the task itself
            if self._unwanted:
                error = CancelledError()
            self.set_result(value) if error is None else self.set_exception(error)


class Pool(AbstractContextManager["Pool"]):
    """Runs tasks in `workers` processes, each capped at `threads` compute threads, with `env` added to its environment.

    A worker without a heartbeat for `heartbeat_timeout` seconds of a task (stopped, or stuck in C with the interpreter
    lock) is killed. Leaving the `with` block waits for the tasks; leaving it by an exception stops them.
    """

    def __init__(
        self,
        workers: int,
        *,
        threads: int = 1,
        name: str = "work",
        env: dict[str, str] | None = None,
        heartbeat_timeout: float | None = None,
    ) -> None:
        self._env = {**os.environ, **{f"{name}_THREADS": str(threads) for name in LIBRARIES}, **(env or {})}
        self._silence = heartbeat_timeout
        self._waiting: queue.SimpleQueue[PoolTask | None] = queue.SimpleQueue()
        self._running: set[PoolTask] = set()
        self._closed = self._stopping = False
        self._groups = Guarded()
        # A worker's parent-death signal fires when the thread that started it ends: these live as long as the pool.
        self._threads = [threading.Thread(target=self._serve, name=f"{name}-{i}", daemon=True) for i in range(workers)]
        for thread in self._threads:
            thread.start()

    def submit(
        self,
        fn: Callable[..., Any] | str,
        *args: Any,
        timeout: float | None = None,
        log: Path | None = None,
        **kwargs: Any,
    ) -> PoolTask:
        """Queue `fn(*args, **kwargs)`; `fn` may be "module:function", which only the worker imports.

        `timeout` seconds count from when the worker has loaded the function. `log` is a file for everything that the
        task prints; without it, the output goes to the main process's.
        """
        return self.submit_packed(name_of(fn), pack((fn, args, kwargs)), timeout=timeout, log=log)

    def submit_packed(
        self,
        name: str,
        payload: bytes,
        *,
        timeout: float | None = None,
        log: Path | None = None,
        loads: Callable[[bytes], Any] = pickle.loads,
    ) -> PoolTask:
        """The same for a call that `pack` has pickled; `loads` unpickles its value."""
        if self._closed:
            raise RuntimeError("the pool is closed")
        task = PoolTask(name, payload, timeout, log, loads)
        self._waiting.put(task)
        return task

    def stop(self, grace: float = 10.0) -> None:
        """Cancel queued tasks, ask running ones to save and end (SIGTERM), kill what is left after `grace` seconds."""
        deadline = time.monotonic() + grace
        self._stopping = True
        with suppress(queue.Empty):
            while True:
                if (task := self._waiting.get_nowait()) is not None:
                    task.cancel()
        self.close()
        try:
            while time.monotonic() < deadline and any(thread.is_alive() for thread in self._threads):
                for task in self._running.copy():
                    task.ask_to_end()
                time.sleep(0.02)
        finally:  # a second Ctrl-C ends the grace
            for task in self._running.copy():
                task.cancel()
            self.join()

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if error is not None:
            self.stop()
            return
        self.close()
        try:
            self.join()
        except KeyboardInterrupt:
            self.stop()
            raise

    def close(self) -> None:
        """Accept no more tasks; queued and running ones continue."""
        self._closed = True
        for _ in self._threads:
            self._waiting.put(None)

    def join(self) -> None:
        """Wait until the workers of a closed pool have ended."""
        for thread in self._threads:
            thread.join()
        self._groups.close()

    def _serve(self) -> None:
        """Run one task after another in one worker, which is replaced when it is gone."""
        process: Process | None = None
        while True:
            if not self._closed:
                with suppress(OSError):  # the next task retries and reports the error
                    process = self._ready(process)
            task = self._waiting.get()
            if task is None:
                break
            self._running.add(task)
            if self._stopping:
                task.cancel()
            if task.begin():
                try:
                    process = self._ready(process)
                    while not task.run_in(process, self._silence):  # it had died since its last task
                        process = self._ready(process)
                except OSError as error:
                    task.finish(error=PalestraError(f"Cannot start a worker process: {error}"))
            self._running.discard(task)
            del task
        if process is not None:
            process.end(ask=True)

    def _ready(self, process: Process | None) -> Process:
        """The worker if it is alive, else a new one."""
        if process is not None and process.alive():
            return process
        if process is not None:
            process.end(ask=False)
        return Process(self._env, self._groups)
