"""Ends a pool's workers and their children when the pool's process is gone, even by SIGKILL.

A pool starts one guard, as a script of its own outside every group it may have to end. On stdin it is told the process
groups: "+123" for one that started, "-123" for one that ended. A worker cannot do this for itself: the kernel's
parent-death signal ends it before it could end its children, and a worker stuck in C runs no code at all.
"""

import os
import select
import signal
import sys


def main(parent: int) -> None:
    """Keep the list of groups until stdin closes or the parent is another; then kill what is left."""
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
