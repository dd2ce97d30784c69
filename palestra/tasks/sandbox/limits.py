"""How much a program in the sandbox may use, and the kernel's limits for it."""

import contextlib
import math
import resource
import sys
from dataclasses import dataclass

MIB = 1 << 20


@dataclass(frozen=True)
class Limits:
    """What one program may use. The kernel refuses more; the program sees an error, or is killed."""

    memory: int = 512
    """MiB of address space."""
    threads: int = 16
    """Threads at a time. There is one process: on Linux it cannot start others."""
    files: int = 16
    """MiB of files: of all together where `/tmp` is in memory, else of each."""
    open_files: int = 64
    """Files open at a time."""
    output: int = 64
    """KiB of stdout, and as many of stderr; what writes more is killed."""
    stack: int = 8
    """MiB of stack."""


def set_limits(limits: Limits, seconds: float, *, count_threads: bool) -> None:
    """Bind this process, for good: soft and hard limits are one.

    Threads are counted over all processes of a user, so that `count_threads` suits only a user nobody else is.
    """
    # A second more than the wall clock, which decides what is too long; this is for a supervisor that is gone.
    processor = math.ceil(seconds) + 1
    wanted = {
        "RLIMIT_AS": limits.memory * MIB,
        "RLIMIT_CPU": processor,
        "RLIMIT_FSIZE": limits.files * MIB,
        "RLIMIT_NOFILE": limits.open_files,
        "RLIMIT_STACK": limits.stack * MIB,
        "RLIMIT_CORE": 0,
        "RLIMIT_MEMLOCK": 0,
        "RLIMIT_MSGQUEUE": 0,
    }
    if count_threads:
        wanted["RLIMIT_NPROC"] = limits.threads
    for name, value in wanted.items():
        if (kind := getattr(resource, name, None)) is None:
            continue
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        # macOS refuses a limit of addresses below what Python has mapped already: the others still hold.
        with contextlib.suppress(*([] if sys.platform == "linux" else [ValueError, OSError])):
            resource.setrlimit(kind, (value, value))
