"""The worker's side: receives tasks from the pool's socket, runs each in its main thread, sends the outcome.

Messages are pickled pairs. To the worker: (payload, log file or None), or an empty message to end. From the worker:
("beat", None) every second of a task, ("running", None) once function and arguments are loaded, then
("result", pickled value) or ("failed", Failure).
"""

import contextlib
import ctypes
import importlib
import io
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from palestra.errors import PalestraError
from palestra.work import redact

BEAT_SECONDS = 1.0
DRAIN_SECONDS = 5.0  # for the log of a task to be written to its end
PR_SET_PDEATHSIG = 1  # linux/prctl.h


@dataclass(frozen=True)
class Failure:
    """An exception as it crosses processes: as text, and pickled if possible."""

    module: str
    type_name: str
    message: str
    traceback: str
    exit_code: int
    pickled: bytes | None


def pack(value: Any) -> bytes:
    """Pickle, with cloudpickle for what pickle cannot: lambdas, local classes, and what a script itself defines.

    The standard pickle names a script's own functions by `__main__`, which in a worker is another module.
    """
    data, problem = None, None
    try:
        data = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
        if b"__main__" not in data:
            return data
    except Exception as error:  # pickle raises whatever an object's own __reduce__ raises
        problem = error
    try:
        return importlib.import_module("cloudpickle").dumps(value)
    except ModuleNotFoundError:
        if data is not None:
            return data
        advice = "Define it in a module that can be imported, or pip install cloudpickle."
    except Exception as error:
        problem, advice = error, "Pass what it is made from instead, and make it in the task."
    raise PalestraError(f"Cannot send {value!r:.200} to another process: {problem}. {advice}") from problem


def main(socket: int, parent: int) -> None:
    """Serve tasks until the pool ends it; if the pool's process is gone, kill the whole process group."""
    _die_with(parent)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)  # the output of a killed task is not lost
    os.set_inheritable(socket, False)
    connection = Connection(socket)
    sending, busy = threading.Lock(), threading.Event()

    def send(kind: str, data: Any = None) -> None:
        try:
            connection.send_bytes(pickle.dumps((kind, data), pickle.HIGHEST_PROTOCOL))
        except OSError:  # the pool is gone
            os.killpg(0, signal.SIGKILL)

    def beat() -> None:
        while busy.wait():
            with sending:
                if busy.is_set():
                    send("beat")
            time.sleep(BEAT_SECONDS)

    def running() -> None:
        with sending:
            send("running")

    threading.Thread(target=beat, name="heartbeat", daemon=True).start()
    while True:
        try:
            message = connection.recv_bytes()
        except (EOFError, OSError):
            os.killpg(0, signal.SIGKILL)
            raise
        if not message:
            return
        payload, log = pickle.loads(message)
        busy.set()
        answer = _answer(payload, log, running)
        with sending:
            busy.clear()
            send(*answer)
        del payload, message, answer  # not kept in memory until the next task


def _answer(payload: bytes, log: str | None, running: Callable[[], None]) -> tuple[str, Any]:
    try:
        with output_to(log):
            function, args, kwargs = pickle.loads(payload)
            if isinstance(function, str):
                module, name = function.split(":")
                function = getattr(importlib.import_module(module), name)
            running()
            return "result", pack(function(*args, **kwargs))
    except BaseException as error:  # SystemExit and KeyboardInterrupt too: they end the task, not the worker
        return "failed", _failure(error)


def _failure(error: BaseException) -> Failure:
    try:
        pickled = pickle.dumps(error)
        pickle.loads(pickled)  # exceptions with arguments of their own often pickle and do not come back
    except Exception:
        pickled = None
    kind = type(error)
    text = "".join(traceback.format_exception(error)).rstrip()
    safe, message = redact.redact(text), redact.redact(str(error))
    if safe != text or message != str(error):
        pickled = None  # the exception itself would carry the secret on
    return Failure(kind.__module__, kind.__qualname__, message, safe, getattr(error, "exit_code", 1), pickled)


@contextlib.contextmanager
def output_to(log: str | None) -> Iterator[None]:
    """Append everything written to stdout and stderr, also by C code and children, to a file."""
    if log is None:
        yield
        return
    originals = [os.dup(1), os.dup(2)]
    os.close(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644))  # an unusable path fails the task
    redacting, file = _redacting(log)
    try:
        for number in (1, 2):
            os.dup2(file, number)
        os.close(file)
        yield
    finally:
        for number, original, stream in zip((1, 2), originals, (sys.stdout, sys.stderr), strict=True):
            stream.flush()
            os.dup2(original, number)
            os.close(original)
        with contextlib.suppress(subprocess.TimeoutExpired):  # a child of the task may still print
            redacting.wait(DRAIN_SECONDS)


_spare: list[tuple["subprocess.Popen[bytes]", int]] = []
"""A filter process for the next task's log, started ahead: starting one takes longer than many tasks."""


def _redacting(log: str) -> tuple["subprocess.Popen[bytes]", int]:
    """A filter process that keeps secrets out of the log, and the pipe to write to."""
    process, write = _spare.pop() if _spare else _filter()
    _spare.append(_filter())
    os.write(write, os.fsencode(log) + b"\0")
    return process, write


def _filter() -> tuple["subprocess.Popen[bytes]", int]:
    """Outside the worker's group, so that the last output of a killed task is still read from the pipe."""
    read, write = os.pipe()
    try:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", redact.__file__],
            stdin=read,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    finally:
        os.close(read)
    return process, write


def _die_with(parent: int) -> None:
    """Let the kernel kill this process when the pool's thread that started it ends, however stuck it may be."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
