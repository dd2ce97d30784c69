"""What the tests of the pool run in workers; apart from them so that a worker imports little."""

import ctypes
import os
import re
import signal
import subprocess
import threading
import time
from pathlib import Path

from palestra.errors import Interrupted, UsageError
from palestra.work.pool import Pool


def pids_from(path: Path, count: int, within: float = 20.0) -> list[int]:
    """The process numbers that tasks have written to a file, once all are there."""
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        found = path.read_text().split() if path.exists() else []
        if len(found) >= count:
            return [int(pid) for pid in found]
        time.sleep(0.02)
    raise AssertionError(f"{path} never held {count} process numbers")


def note(path: Path, *pids: int) -> None:
    with open(path, "a") as file:
        file.write("".join(f"{pid}\n" for pid in pids))


def add(a: int, b: int = 0) -> int:
    return a + b


def fail(message: str) -> None:
    raise ValueError(message)


def fail_usage() -> None:
    raise UsageError("no such environment")


class Awkward(Exception):
    """Pickles, but does not come back."""

    def __init__(self, a: int, b: int) -> None:
        super().__init__(f"{a} and {b}")


def fail_awkwardly() -> None:
    raise Awkward(1, 2)


def hang_with_child(path: Path) -> None:
    child = subprocess.Popen(["sleep", "1000"])
    note(path, os.getpid(), child.pid)
    time.sleep(1000)


def stuck_with_child(path: Path) -> None:
    child = subprocess.Popen(["sleep", "1000"])
    note(path, os.getpid(), child.pid)
    ctypes.PyDLL(None).sleep(1000)  # holds the interpreter lock: no other thread of the process runs


def stuck_in_regex() -> None:
    re.match(r"(a+)+$", "a" * 60 + "b")


def maybe_crash(i: int) -> int:
    if i % 20 == 7:
        os.kill(os.getpid(), (signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT)[i % 3])
    return i * i


def die_leaving_child_with_the_socket(path: Path) -> None:
    if os.fork() == 0:  # shares every descriptor, unlike a subprocess
        note(path, os.getpid())
        time.sleep(1000)
    pids_from(path, 1)
    os._exit(7)


def save_on_sigterm(path: Path) -> None:
    asked = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: asked.set())
    note(path, os.getpid())
    while not asked.is_set():
        time.sleep(0.01)
    time.sleep(0.2)
    path.with_suffix(".saved").write_text("saved")
    raise Interrupted("stopped and saved")


def ignore_sigterm(path: Path) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    note(path, os.getpid())
    time.sleep(1000)


def nested(n: int) -> list[int]:
    with Pool(2) as pool:
        return [task.result(20) for task in [pool.submit(add, i, b=i) for i in range(n)]]


def nested_hang(path: Path) -> None:
    with Pool(1) as pool:
        note(path, os.getpid())
        pool.submit(hang_with_child, path).result()


def talk() -> None:
    print("from python")
    os.write(2, b"from C\n")
    subprocess.run(["echo", "from a child"], check=True)
