"""What all processes of a process namespace use together: its first process watches, and beyond a limit they end.

New processes and threads are counted before they begin: the kernel asks for each one here (seccomp's notifications).
So there are never more than allowed, whoever runs them; memory and CPU time are looked at every now and then.
"""

import fcntl
import os
import resource
import select
import signal
import struct
import time
from pathlib import Path
from typing import NamedTuple

RECEIVE, SEND = 0xC0502100, 0xC0182101  # SECCOMP_IOCTL_NOTIF_*, linux/seccomp.h
NOTIFICATION, RESPONSE, CONTINUE = 80, "QqiI", 1
LOOK_SECONDS = 0.1
"""Between two looks: for a moment memory and CPU time may be more than is allowed."""


class Limits(NamedTuple):
    """Of all processes of a command together."""

    memory: int = 8192
    """MiB, beside the files that it writes."""
    cpu_seconds: float = 1800.0
    tasks: int = 1024
    """Processes and threads at a time."""


def watched(child: int, listener: int, limits: Limits) -> int:
    """The exit code of a process when it has ended, as shells give it; beyond a limit all are killed before.

    `listener` is where the kernel asks for new processes. Whatever else ends meanwhile is forgotten.
    """
    pidfd, look, most = os.pidfd_open(child), 0.0, 1  # `most`: tasks there may be by now
    while True:
        ready, _, _ = select.select([pidfd, listener], [], [], LOOK_SECONDS)
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == child:
                return exit_code(ended[1])
        excess = None
        if listener in ready:
            most = most + 1 if most < limits.tasks else 1 + sum(int(row[17]) for row in _stats().values())
            if most <= limits.tasks:
                _allow(listener)
            else:
                excess = f"and threads became {most}, and limits.tasks is {limits.tasks}"
        if time.monotonic() >= look:
            excess = excess or _excess(limits)
            look = time.monotonic() + LOOK_SECONDS
        if excess:
            os.kill(-1, signal.SIGKILL)
            os.write(2, f"\nended: its processes {excess}\n".encode())
            return 128 + signal.SIGKILL


def exit_code(status: int) -> int:
    """Of a process that was waited for, as shells give it."""
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def _allow(listener: int) -> None:
    asked = bytearray(NOTIFICATION)
    try:
        fcntl.ioctl(listener, RECEIVE, asked)
        fcntl.ioctl(listener, SEND, struct.pack(RESPONSE, *struct.unpack_from("Q", asked), 0, 0, CONTINUE))
    except OSError:  # who asked was killed meanwhile
        return


def _stats() -> dict[str, list[str]]:
    """The fields of /proc/N/stat from the state on, of all processes but this one."""
    names = [name for name in os.listdir("/proc") if name.isdigit() and name != "1"]
    return {name: row for name in names if (row := _read(f"/proc/{name}/stat").rpartition(")")[2].split())}


def _excess(limits: Limits) -> str | None:
    stats, ended = _stats(), resource.getrusage(resource.RUSAGE_CHILDREN)
    ticks = sum(int(number) for row in stats.values() for number in row[11:15])  # with children that it waited for
    seconds = ended.ru_utime + ended.ru_stime + ticks / os.sysconf("SC_CLK_TCK")
    if seconds > limits.cpu_seconds:
        return f"took {seconds:.1f} s of CPU time, and limits.cpu_seconds is {limits.cpu_seconds:g}"
    kib = {name: int(row[21]) * resource.getpagesize() >> 10 for name, row in stats.items()}
    if sum(kib.values()) >> 10 > limits.memory:  # what several share is in each: now only their parts of it
        for name in kib:
            for line in _read(f"/proc/{name}/smaps_rollup").splitlines()[2:3]:
                kib[name] = int(line.split()[1])
    memory = sum(kib.values()) >> 10
    return f"had {memory} MiB of memory, and limits.memory is {limits.memory}" if memory > limits.memory else None


def _read(path: str) -> str:
    """A file of a process; nothing once it has ended."""
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""
