"""What the tests of the fan-out run, in this process or in workers that import little."""

import os
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import CancelledError
from pathlib import Path

from palestra.work.fanout import Backend, Inline, Processes, Resources, Stop, WorkItem, run


def on_ray() -> Backend:
    """Ray's, on the cluster of the test or on one that is started for it."""
    from palestra.cluster.ray import RayBackend

    return RayBackend("test")


BACKENDS: dict[str, Callable[[], Backend]] = {
    "inline": Inline,
    "processes": lambda: Processes("test"),
    "ray": on_ray,
}
"""Every backend passes the whole contract of tests/test_work_fanout.py: another one is one more entry here."""
PARALLEL = [name for name in BACKENDS if name != "inline"]
"""Those whose items run while the fan-out does something else, and can be killed."""


def value(x: int) -> int:
    """Twice the number."""
    return 2 * x


def fail(message: str) -> None:
    """Fail."""
    raise ValueError(message)


def nth_time(path: Path, count: int) -> str:
    """Fail until called so often."""
    with path.open("a") as file:
        file.write("x")
    if path.stat().st_size < count:
        raise RuntimeError(f"attempt {path.stat().st_size}")
    return "at last"


def overlap(folder: Path, cores: int, index: int) -> list[int]:
    """The cores of all that run while this does."""
    mark = folder / f"{index}-{cores}"
    mark.touch()
    seen = []
    for _ in range(5):
        seen.append(sum(int(path.name.partition("-")[2]) for path in folder.iterdir()))
        time.sleep(0.01)
    mark.unlink()
    return seen


def visible(path: Path) -> str:
    """The GPUs that the process sees, once a file is there."""
    wait_for(path)
    return os.environ.get("CUDA_VISIBLE_DEVICES", "none")


def talk() -> None:
    """Print."""
    os.write(1, b"said\n")


def begun(path: Path) -> None:
    """Say so, with the number of the process."""
    with path.open("a") as file:
        file.write(f"{os.getpid()}\n")


def save_when_asked(path: Path) -> None:
    """Run until SIGTERM, then save."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("asked"))
    begun(path)
    try:
        time.sleep(1000)
    finally:
        path.with_suffix(".saved").touch()


def never_end(path: Path) -> None:
    """Run on when asked to end."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    begun(path)
    time.sleep(1000)


def wait_for(path: Path) -> None:
    """Run until a file is there."""
    while not path.exists():
        time.sleep(0.01)


def note(path: Path) -> None:
    """Leave a line."""
    with path.open("a") as file:
        file.write("ran\n")


def main(pids: str, backend: str) -> None:
    """A fan-out in a process of its own, to be killed."""
    items = [WorkItem(str(index), never_end, (Path(pids),)) for index in range(2)]
    list(run(items, Resources(2), BACKENDS[backend](), stop=Stop()))


def killed(error: BaseException | None) -> bool:
    """Whether an item was killed because it did not end."""
    return isinstance(error, CancelledError)
