"""Ends a pool's workers and their children when the pool's process is gone, even by SIGKILL.

A pool starts one guard, as a separate script outside every group it may have to kill. Its stdin lists the process
groups: "+123" for one that started, "-123" for one that ended. A worker cannot do this for itself: the kernel's
parent-death signal kills it before it could kill its children, and a worker stuck in C runs no code at all.
"""

import os
import select
import signal
import sys


def main(parent: int) -> None:
    """Track the groups until stdin closes or the parent changes; then kill what is left."""
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    groups: set[int] = set()
    unfinished = b""
    # getppid: a process that the parent forked may hold the pipe open when the parent is gone
    while os.getppid() == parent:
        if not select.select([0], [], [], 1.0)[0]:
            continue
        data = os.read(0, 4096)
        if not data:
            break
        *lines, unfinished = (unfinished + data).split(b"\n")
        for line in lines:
            (groups.add if line[:1] == b"+" else groups.discard)(int(line[1:]))
    for group in groups:
        try:
            os.killpg(group, signal.SIGKILL)
        except OSError:  # gone already; on macOS a group that has ended gives PermissionError
            continue


if __name__ == "__main__":
    main(int(sys.argv[1]))
