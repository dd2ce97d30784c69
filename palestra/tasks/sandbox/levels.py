"""The levels of the sandbox: how each is prepared, once, and how a process is then locked in."""

import contextlib
import os
import select
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from palestra.tasks.sandbox import filter, kernel, landlock
from palestra.tasks.sandbox.filesystem import DEVICES, enter_root, mount_scratch
from palestra.tasks.sandbox.limits import Limits, set_limits

Level = Literal["namespaces", "uid", "weak"]
LEVELS: tuple[Level, ...] = get_args(Level)
"""From the strongest to the weakest."""

OF_THE_SERVER = kernel.NEWNS | kernel.NEWNET | kernel.NEWIPC | kernel.NEWUTS
# By role: each is alone with its process ids, and the candidate has a /tmp; tests write no files. What processes could
# leave behind in the server's namespace of shared memory, the filter refuses.
CANDIDATE, TESTS = 0, 1
OF_A_PROCESS = (kernel.NEWPID | kernel.NEWNS, kernel.NEWPID)
FIRST_UID = 0x70000000  # no system gives these to people, services or containers
FEW_UIDS = 40000  # where a container has 65,536 of them: above those of people, below `nobody`


@dataclass(frozen=True)
class Ground:
    """What processes are locked in with."""

    level: Level
    namespaces: tuple[int, int]
    """Flags of what the candidate and its tests get for themselves."""
    uids: tuple[int, int] | None
    """Users that nobody else is: for the candidate, and for its tests."""
    paths: tuple[str, ...]
    """What may be read."""
    scratch: str | None = None
    """A folder that is each candidate's own; null where it has to be made one for each."""


@dataclass(frozen=True)
class Attempt:
    """A way to a level."""

    level: Level
    own_users: bool = False
    """Whether it takes a namespace of users, which needs no rights."""

    def prepare(self, folder: str, paths: Sequence[str]) -> Ground:
        """Bring the server to this level; `folder` is empty and its own."""
        uids = unused_uids() if os.geteuid() == 0 and self.level != "weak" and not self.own_users else None
        if self.level != "namespaces":
            return Ground(self.level, (0, 0), uids, tuple(paths))
        user, group = os.geteuid(), os.getegid()
        kernel.unshare(OF_THE_SERVER | (kernel.NEWUSER if self.own_users else 0))
        if self.own_users:
            maps = {"setgroups": "deny", "uid_map": f"{user} {user} 1", "gid_map": f"{group} {group} 1"}
            for name, text in maps.items():
                with open(f"/proc/self/{name}", "w") as file:
                    file.write(text)
        scratch = enter_root(folder, paths)
        return Ground(self.level, OF_A_PROCESS, uids, tuple(paths), scratch)


def attempts(strongest: Level, weakest: Level) -> list[Attempt]:
    """The ways to try, the best first."""
    root, filtered = os.geteuid() == 0, filter.available()
    ways = [Attempt("namespaces")] if filtered and root else []
    ways += [Attempt("namespaces", own_users=True)] if filtered else []
    ways += [Attempt("uid")] if filtered and root else []
    chosen = LEVELS[LEVELS.index(strongest) : LEVELS.index(weakest) + 1]
    return [way for way in [*ways, Attempt("weak")] if way.level in chosen]


def lock_in(ground: Ground, limits: Limits, seconds: float, *, role: int, scratch: str, server: int | None) -> None:
    """Take every right from this process, for good. `server` is a file of the process whose death ends this one."""
    if ground.level == "namespaces" and role == CANDIDATE:
        mount_scratch(scratch, limits)
    os.chdir(scratch)
    os.setpgid(0, 0)
    os.umask(0o077)
    set_limits(limits, seconds, count_threads=ground.level != "weak" or not filter.available())
    if ground.uids is not None:
        user = ground.uids[role]
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    for path in ground.paths:  # told at the start, not as a module that is missing
        if not os.access(path, os.R_OK):
            raise OSError(f"user {os.getuid()} cannot read {path}, which Python needs: let everyone pass (chmod o+x)")
    if sys.platform != "linux":
        return
    kernel.drop_capabilities()
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)  # after the change of user, which undoes it
    if server is not None:
        if select.select([server], [], [], 0)[0]:
            raise OSError("the server is gone")
        os.close(server)
    if ground.level != "namespaces":
        kernel.prctl(kernel.PR_SET_DUMPABLE, 0)  # nobody reads its memory
        if landlock.version():
            devices = [device for device in DEVICES if os.path.exists(device)]
            landlock.restrict([*ground.paths, *devices], [scratch, "/dev/null"])
    if filter.available():
        filter.install(filter.program(os.getpid()))


def unused_uids() -> tuple[int, int]:
    """Two users that own no process and have no name."""
    with open("/proc/self/uid_map") as file:
        ranges = [tuple(map(int, line.split())) for line in file]
    many = any(first <= FIRST_UID and first + count > FIRST_UID + (1 << 24) for first, _, count in ranges)
    first, span = (FIRST_UID, 1 << 23) if many else (FEW_UIDS, 12000)
    taken = set(_owners())
    for step in range(span):
        user = first + 2 * ((os.getpid() + step) % span)
        if user not in taken and user + 1 not in taken:
            return user, user + 1
    raise OSError("every user id is taken")


def _owners() -> list[int]:
    import pwd

    owners = [entry.pw_uid for entry in pwd.getpwall()]
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):
                owners.append(os.stat(f"/proc/{name}").st_uid)
    return owners
