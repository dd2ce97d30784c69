"""Levels of isolation of the sandbox: its file system, its resource limits, and how a process is isolated."""

import contextlib
import math
import os
import resource
import select
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from palestra.tasks.sandbox import filter, kernel

LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/usr/share/zoneinfo", "/etc/ld.so.cache")
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
INODES = 1000  # files in the /tmp of a program


def import_path() -> list[str]:
    """Where a program finds modules: the standard library and installed packages, not the user's own folders."""
    import sysconfig

    places = sysconfig.get_paths()
    allowed = [os.path.realpath(places[name]) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    return list(dict.fromkeys(path for path in sys.path if path and _inside(os.path.realpath(path), allowed)))


def readable(modules: Sequence[str]) -> list[str]:
    """The files and folders that a program may read, none of them inside another."""
    libraries = [os.path.join(prefix, "lib") for prefix in (sys.base_prefix, sys.base_exec_prefix)]
    wanted = [path for path in dict.fromkeys([*LIBRARIES, *libraries, *modules]) if os.path.exists(path)]
    return [path for path in wanted if not any(path != other and _inside(path, [other]) for other in wanted)]


def enter_root(folder: str, paths: Sequence[str]) -> str:
    """Make a file system in memory the root, with `paths`, read-only, and a folder to mount a `/tmp` at; return that.

    It is mounted at `folder`, which is then removed, so that a kill leaves nothing behind.
    """
    scratch = "/scratch" if any(_inside(path, ["/tmp"]) for path in paths) else "/tmp"  # Python itself may be in /tmp
    outside = os.open(os.path.dirname(folder), os.O_PATH)
    kernel.mount("none", "/", None, kernel.REC | kernel.PRIVATE)
    kernel.mount("tmpfs", folder, "tmpfs", kernel.NOSUID | kernel.NODEV, "size=1m,mode=755")
    for path in [*paths, *(device for device in DEVICES if os.path.exists(device))]:
        _show(path, folder, paths)
    os.mkdir(folder + scratch)
    kernel.pivot_root(folder)
    kernel.mount("none", "/", None, kernel.REMOUNT | kernel.BIND | kernel.RDONLY | kernel.NOSUID | kernel.NODEV)
    os.rmdir(os.path.basename(folder), dir_fd=outside)
    os.close(outside)
    return scratch


def _show(path: str, root: str, others: Sequence[str]) -> None:
    """Show a path under a new root at its own place; a link stays one where its target is there too."""
    target = root + path
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if os.path.islink(path) and _inside(os.path.realpath(path), others):
        os.symlink(os.readlink(path), target)
    elif os.path.isdir(path):
        os.mkdir(target)
        kernel.bind_read_only(path, target)
    else:
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
        kernel.bind_read_only(path, target, device=path in DEVICES)


def _inside(path: str, folders: Sequence[str]) -> bool:
    return any(path == folder or path.startswith(folder.rstrip("/") + "/") for folder in folders)


MIB = 1 << 20
Level = Literal["namespaces", "uid", "weak"]
LEVELS: tuple[Level, ...] = get_args(Level)
"""From the strongest to the weakest."""

OF_THE_SERVER = kernel.NEWNS | kernel.NEWNET | kernel.NEWIPC | kernel.NEWUTS
# By role: each has its own process ids, and the candidate a /tmp; tests write no files. The filter refuses what could
# remain in the server's namespace of shared memory.
CANDIDATE, TESTS = 0, 1
OF_A_PROCESS = (kernel.NEWPID | kernel.NEWNS, kernel.NEWPID)
FIRST_UID = 0x70000000  # no system gives these to people, services or containers
FEW_UIDS = 40000  # where a container has 65,536 of them: above those of people, below `nobody`


@dataclass(frozen=True)
class Limits:
    """The resources of one program. The kernel refuses more; the program gets an error, or is killed."""

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


@dataclass(frozen=True)
class Isolation:
    """What processes are isolated with."""

    level: Level
    namespaces: tuple[int, int]
    """Flags of the namespaces of the candidate and of its tests."""
    uids: tuple[int, int] | None
    """Dedicated, otherwise unused UIDs: for the candidate, and for its tests."""
    paths: tuple[str, ...]
    """What may be read."""
    scratch: str | None = None
    """A folder where each candidate mounts its own; null where a folder has to be made for each."""


class Way(NamedTuple):
    """A way to a level."""

    level: Level
    own_users: bool = False
    """Whether it uses a user namespace, which needs no rights."""

    def __str__(self) -> str:
        return f"{self.level} as an ordinary user" if self.own_users else self.level


def ways(strongest: Level, weakest: Level) -> list[Way]:
    """The ways to try, the best first."""
    root = [Way("namespaces"), Way("namespaces", True), Way("uid")]
    possible = [] if not filter.available() else root if os.geteuid() == 0 else root[1:2]
    chosen = LEVELS[LEVELS.index(strongest) : LEVELS.index(weakest) + 1]
    return [way for way in [*possible, Way("weak")] if way.level in chosen]


def prepare(way: Way, folder: str, paths: Sequence[str]) -> Isolation:
    """Bring the server to a level; `folder` is empty and its own."""
    uids = None if way.own_users or way.level == "weak" else unused_uids()
    if way.level != "namespaces":
        if uids is not None:  # root of a container may have neither the right nor these users
            os.chown(folder, uids[CANDIDATE], -1)
            os.chown(folder, os.geteuid(), -1)
        return Isolation(way.level, (0, 0), uids, tuple(paths))
    user, group = os.geteuid(), os.getegid()
    kernel.unshare(OF_THE_SERVER | (kernel.NEWUSER if way.own_users else 0))
    if way.own_users:
        maps = {"setgroups": "deny", "uid_map": f"{user} {user} 1", "gid_map": f"{group} {group} 1"}
        for name, text in maps.items():
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    return Isolation(way.level, OF_A_PROCESS, uids, tuple(paths), enter_root(folder, paths))


def isolate(level: Isolation, limits: Limits, seconds: float, *, role: int, scratch: str, server: int | None) -> None:
    """Take every right from this process, for good. `server` is a pidfd of the process whose death ends this one."""
    if level.level == "namespaces" and role == CANDIDATE:  # a folder in memory, of this process alone
        options = f"size={limits.files}m,nr_inodes={INODES},mode=1777"
        kernel.mount("tmpfs", scratch, "tmpfs", kernel.NOSUID | kernel.NODEV | kernel.NOEXEC, options)
    os.chdir(scratch)
    os.setpgid(0, 0)
    os.umask(0o077)
    set_limits(limits, seconds, count_threads=level.level != "weak" or not filter.available())
    if level.uids is not None:
        user = level.uids[role]
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    for path in level.paths:  # else a module would be missing later
        if not os.access(path, os.R_OK):
            raise OSError(f"user {os.getuid()} cannot read {path}, which Python needs: make it accessible (chmod o+x)")
    if sys.platform != "linux":
        return
    kernel.call(kernel.CAPSET, kernel.THIS_PROCESS, kernel.NO_CAPABILITIES, what="capset")
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)  # after the change of user, which undoes it
    if server is not None:
        if select.select([server], [], [], 0)[0]:
            raise OSError("the server is gone")
        os.close(server)
    if level.level != "namespaces":
        kernel.prctl(kernel.PR_SET_DUMPABLE, 0)  # no other process may read its memory
        if filter.landlock_version():
            devices = [device for device in DEVICES if os.path.exists(device)]
            filter.restrict_files([*level.paths, *devices], [scratch, "/dev/null"])
    if filter.available():
        filter.install(filter.program(os.getpid()))


def set_limits(limits: Limits, seconds: float, *, count_threads: bool) -> None:
    """Limit this process for good: soft and hard limits are the same.

    Threads are counted over all processes of a user, so `count_threads` suits a dedicated user only.
    """
    wanted = {
        "RLIMIT_AS": limits.memory * MIB,
        # A second more than the wall clock, which is the actual limit; this is for a server that is gone.
        "RLIMIT_CPU": math.ceil(seconds) + 1,
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
        # macOS refuses an address limit below what Python has mapped already: the other limits still hold.
        with contextlib.suppress(*([] if sys.platform == "linux" else [ValueError, OSError])):
            resource.setrlimit(kind, (value, value))


def unused_uids() -> tuple[int, int]:
    """Two user ids that own no process and have no name."""
    import pwd

    taken = {entry.pw_uid for entry in pwd.getpwall()}
    for name in [name for name in os.listdir("/proc") if name.isdigit()]:
        with contextlib.suppress(OSError):
            taken.add(os.stat(f"/proc/{name}").st_uid)
    with open("/proc/self/uid_map") as file:
        ranges = [tuple(map(int, line.split())) for line in file]
    many = any(first <= FIRST_UID and first + count > FIRST_UID + (1 << 24) for first, _, count in ranges)
    first, span = (FIRST_UID, 1 << 23) if many else (FEW_UIDS, 12000)
    for step in range(span):
        user = first + 2 * ((os.getpid() + step) % span)
        if user not in taken and user + 1 not in taken:
            return user, user + 1
    raise OSError("every user id is taken")
