"""The far side of a worker that Ray has placed: an actor around our own pool of one process.

Ray only finds the machine. Log, heartbeat, timeout, thread caps, redaction, SIGTERM and the kill of the whole group are
those of `palestra.work`, as on one machine. The pool's guard kills the worker's group if the actor itself is killed.
"""

import os
import pickle
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from palestra.cluster.versions import refuse_other, versions
from palestra.errors import PalestraError, UsageError
from palestra.work.pool import LIBRARIES, Pool, PoolTask

OF_THE_MACHINE = {"PATH", "HOME", "USER", "TMPDIR", "PWD", "HOSTNAME", "VIRTUAL_ENV", "PYTHONPATH", "LD_LIBRARY_PATH"}
"""Variables that a worker keeps from its own machine, with those of Ray and the GPUs; the others are the driver's."""
THREADS = {f"{library}_THREADS" for library in LIBRARIES}  # as many as the item has cores


def environment() -> dict[str, str]:
    """The driver's variables that its workers get, wherever they run."""
    left_out = OF_THE_MACHINE | THREADS
    return {k: v for k, v in os.environ.items() if k not in left_out and not k.startswith(("RAY_", "CUDA_", "NVIDIA_"))}


class Host:
    """Runs one call after another in a worker process of its machine; `pool` are the settings of that `Pool`.

    It starts in the driver's folder, which is on storage that all machines share, and with the driver's versions.
    """

    def __init__(
        self, folder: str, driver: Mapping[str, str], spec: Mapping[str, Any] | None, pool: Mapping[str, Any]
    ) -> None:
        self._number, self._here = 0, socket.gethostname()
        self._task: PoolTask | None = None
        self._pool: Pool | None = None
        self._refusal: PalestraError | None = None
        try:
            refuse_other(driver, versions(spec), self._here)
            os.chdir(folder)
            self._pool = Pool(1, **pool)
        except PalestraError as error:
            self._refusal = error
        except OSError as error:
            problem = f"the driver's folder {folder} cannot be entered on {self._here} ({error.strerror})"
            self._refusal = UsageError(f"{problem}: start from storage that all machines share")

    def here(self) -> str:
        """The machine, as a sign of life."""
        return self._here

    def run(
        self, number: int, name: str, payload: bytes, timeout: float | None, log: Path | None
    ) -> tuple[bool, bytes]:
        """Run a pickled call; returns whether it succeeded, and its pickled value or error."""
        try:
            if self._pool is None:
                raise self._refusal or PalestraError("the host has no pool")
            self._task = self._pool.submit_packed(name, payload, timeout=timeout, log=log, loads=bytes)
            self._number = number
            return True, self._task.result()
        except Exception as error:
            return False, pickle.dumps(error)

    def ask_to_end(self, number: int) -> None:
        """Send SIGTERM, once, to the worker if it runs this call."""
        if self._task is not None and self._number == number:
            self._task.ask_to_end()

    def cancel(self, number: int) -> None:
        """Kill the worker if it runs this call."""
        if self._task is not None and self._number == number:
            self._task.cancel()

    def close(self) -> None:
        """Kill what runs, and end the worker."""
        if self._task is not None:
            self._task.cancel()
        if self._pool is not None:
            self._pool.close()
            self._pool.join()
