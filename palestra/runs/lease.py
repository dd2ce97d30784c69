"""The lease: exactly one process owns a folder, and a dead owner's lease is taken over."""

import functools
import json
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from palestra.errors import LeaseLost, RunBusy
from palestra.runs.store import FsspecStore, LocalStore, clear_write_errors

log = logging.getLogger("palestra.runs")

TTL_SECONDS = 30.0
# Of start times that were computed from a boot time in whole seconds.
BORN_TOLERANCE_SECONDS = 2.0


@dataclass(frozen=True)
class Owner:
    """A process, distinct from any other on any machine and from a later one with the same pid."""

    host: str
    machine: str
    """Boot and process namespace: pids can be looked up only if both are the same."""
    pid: int
    born: float
    """Start of the process in seconds since the machine's: a clock that is set does not move it."""

    @classmethod
    def here(cls, pid: int | None = None) -> "Owner":
        """This process, or another one of this machine."""
        pid = os.getpid() if pid is None else pid
        return cls(socket.gethostname(), _machine(), pid, _born(pid))

    @classmethod
    def read(cls, data: dict[str, Any]) -> "Owner":
        """The owner in a lease or status file."""
        return cls(data["host"], data["machine"], data["pid"], data["born"])

    def alive(self, heartbeat: float, ttl: float = TTL_SECONDS) -> bool:
        """Whether it still owns its lease: its process exists or, on another machine, its heartbeat is fresh.

        A process of this machine that exists but is silent (stopped, asleep) would continue writing when it wakes.
        """
        if self.machine != _machine():
            return time.time() - heartbeat < ttl
        try:
            process = psutil.Process(self.pid)
            reused = abs(_born(self.pid) - self.born) > BORN_TOLERANCE_SECONDS
            # A killed process whose parent has not yet reaped it still has its pid.
            return not reused and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False


class Lease:
    """Ownership of a store's folder by this process; renew it well within `ttl` seconds.

    Machines that share a folder need clocks that agree to within `ttl`.
    """

    def __init__(self, store: LocalStore | FsspecStore, key: str = "lease.json", ttl: float = TTL_SECONDS):
        self.store = store
        self.key = key
        self.ttl = ttl
        self.token = uuid.uuid4().hex
        """Identifies this holder; also the id of an attempt at a pipeline step, which its worker gets."""
        self._held: bytes | None = None
        self._beating = threading.RLock()  # two threads of the owner do not lose it to each other

    def acquire(self) -> None:
        """Take the lease, also from a dead owner; raises `RunBusy` if the owner is alive."""
        while True:
            current = self.store.get(self.key)
            data = _parse(current)
            if data is not None and Owner.read(data).alive(data["heartbeat"], self.ttl):
                age = max(0.0, time.time() - data["heartbeat"])
                raise RunBusy(
                    f"{self.store.root} is in use by {_describe(data)}, last heartbeat {age:.0f} s ago. "
                    f"Wait for it to end or stop it (kill {data['pid']} on {data['host']}); the lease of a process "
                    f"that is gone is taken over automatically, within {self.ttl:g} s from another machine."
                )
            mine = self._content()
            if self.store.swap(self.key, current, mine):
                self._held = mine
                return

    def holder(self) -> Owner | None:
        """The live process that holds the lease, if any."""
        data = _parse(self.store.get(self.key))
        if data is not None and (owner := Owner.read(data)).alive(data["heartbeat"], self.ttl):
            return owner
        return None

    def renew(self) -> None:
        """Write a heartbeat; raises `LeaseLost` if another process has taken the lease over."""
        with self._beating:
            if self._held is None:
                raise RuntimeError(f"the lease on {self.store.root} is not held: acquire it (enter the session) first")
            mine, stored = self._content(), self.store.get(self.key)
            current = _parse(stored)
            # By its token: a renewal whose last fsync failed may still be on disk.
            ours = current is not None and current["token"] == self.token
            if not ours or not self.store.swap(self.key, stored, mine):
                raise LeaseLost(
                    f"lost the lease on {self.store.root}: it now belongs to {_describe(current)}. This process was "
                    f"silent for over {self.ttl:g} s (stopped, suspended or cut off from the disk) and must not write "
                    "there again."
                )
            self._held = mine

    @contextmanager
    def fenced(self) -> Iterator[None]:
        """A block in which the lease cannot be taken over: for writes that a former owner must not make.

        Raises `LeaseLost` at its start if another process has the lease. A store without locks (a bucket) promises only
        that the lease was held at the start.
        """
        with self._beating:
            self.renew()
            with self.held_by(self.token):
                yield

    @contextmanager
    def held_by(self, token: str) -> Iterator[None]:
        """The same for a worker of the holder, which knows the token and does not renew the lease."""
        with self.store.unchanged(self.key):
            current = _parse(self.store.get(self.key))
            if current is None or current["token"] != token:
                raise LeaseLost(f"lost the lease on {self.store.root} to {_describe(current)}")
            yield

    def release(self) -> None:
        """Release the lease; one that was lost is left to its new owner."""
        with self._beating:
            if self._held is not None:
                stored = self.store.get(self.key)
                current = _parse(stored)
                if current is not None and current["token"] == self.token:
                    self.store.swap(self.key, stored, None)
                self._held = None

    def _content(self) -> bytes:
        return json.dumps({**asdict(Owner.here()), "token": self.token, "heartbeat": time.time()}).encode()


@contextmanager
def kept(lease: Lease, seconds: float = 2.0) -> Iterator[None]:
    """Hold the lease during a block; a thread renews it."""
    with clear_write_errors(lease.store.root):
        lease.acquire()

    def renew() -> None:
        try:
            lease.renew()
        except (LeaseLost, OSError) as error:
            log.warning("the lease on %s could not be renewed: %s", lease.store.root, error)

    try:
        with repeating(renew, seconds):
            yield
    finally:
        lease.release()


@contextmanager
def repeating(action: Callable[[], None], seconds: float) -> Iterator[None]:
    """Call `action` every so many seconds during a block, in a thread that ends with it."""
    stop = threading.Event()

    def repeat() -> None:
        while not stop.wait(seconds):
            action()

    thread = threading.Thread(target=repeat, name="palestra-heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _parse(lease: bytes | None) -> dict[str, Any] | None:
    """The lease, or None if there is none or it is unreadable: nobody can then renew it."""
    try:
        return None if lease is None else json.loads(lease)
    except ValueError:
        return None


def _describe(lease: dict[str, Any] | None) -> str:
    return "no process" if lease is None else f"process {lease['pid']} on {lease['host']}"


def _born(pid: int) -> float:
    # psutil adds the boot time, which moves with the clock, and older versions keep what they added: read it first.
    boot = psutil.boot_time()
    return psutil.Process(pid).create_time() - boot


@functools.cache
def _machine() -> str:
    parts = [socket.gethostname()]
    if Path("/proc/self/ns/pid").exists():
        parts += [Path("/proc/sys/kernel/random/boot_id").read_text().strip(), os.readlink("/proc/self/ns/pid")]
    return " ".join(parts)
