"""The system calls of Linux that Python has no function for: namespaces, mounts, rights."""

import ctypes
import os
import platform
import signal

NEWNS, NEWUTS, NEWIPC, NEWUSER = 0x20000, 0x4000000, 0x8000000, 0x10000000  # linux/sched.h
NEWPID, NEWNET, THREAD = 0x20000000, 0x40000000, 0x10000
RDONLY, NOSUID, NODEV, NOEXEC, REMOUNT, BIND, REC, PRIVATE = 1, 2, 4, 8, 32, 4096, 16384, 1 << 18  # linux/mount.h
ATTR_RDONLY, ATTR_NOSUID, ATTR_NODEV = 1, 2, 4
AT_RECURSIVE, MNT_DETACH = 0x8000, 2
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38  # linux/prctl.h

# Numbers of calls on x86-64 and on 64-bit ARM.
MACHINE = {"x86_64": 0, "aarch64": 1, "arm64": 1}.get(platform.machine())
CLONE, CAPSET, PIVOT_ROOT, MOUNT_SETATTR = (56, 220), (126, 91), (155, 41), (442, 442)

# Calls that hold the interpreter lock: between a clone and what Python does after it, nothing else may run.
LIBC = ctypes.PyDLL(None, use_errno=True)
THIS_PROCESS = (ctypes.c_uint32 * 2)(0x20080522, 0)  # version 3 of the interface, linux/capability.h
NO_CAPABILITIES = (ctypes.c_uint32 * 6)()


class MountAttributes(ctypes.Structure):
    """`struct mount_attr`."""

    _fields_ = tuple((name, ctypes.c_uint64) for name in ("set", "clear", "propagation", "userns"))


def checked(result: int, what: str) -> int:
    """The result of a call, or its error with a name to it."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def call(numbers: tuple[int, int], *arguments: int | bytes | ctypes.Array | ctypes.Structure | None, what: str) -> int:
    """A system call by its numbers on the machines that are known."""
    if MACHINE is None:
        raise OSError(f"{what}: system calls of {platform.machine()} are not known")
    wide = [ctypes.c_long(value) if isinstance(value, int) else value for value in arguments]
    plain = [ctypes.byref(value) if isinstance(value, ctypes.Structure) else value for value in wide]
    return checked(LIBC.syscall(ctypes.c_long(numbers[MACHINE]), *plain), what)


def clone(namespaces: int) -> int:
    """Fork, with the child in new namespaces; as with `os.fork`, 0 in the child and its process id in the parent."""
    if not namespaces:
        return os.fork()
    api = ctypes.pythonapi
    api.PyOS_BeforeFork()
    try:
        child = call(CLONE, namespaces | signal.SIGCHLD, 0, 0, 0, 0, what="clone")
    except OSError:
        api.PyOS_AfterFork_Parent()
        raise
    (api.PyOS_AfterFork_Parent if child else api.PyOS_AfterFork_Child)()
    return child


def unshare(namespaces: int) -> None:
    """Move this process to new namespaces."""
    checked(LIBC.unshare(ctypes.c_int(namespaces)), "unshare")


def mount(source: str, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    """Mount; `kind` is that of the file system."""
    texts = [None if text is None else os.fsencode(text) for text in (source, target, kind, data)]
    result = LIBC.mount(texts[0], texts[1], texts[2], ctypes.c_ulong(flags), texts[3])
    checked(result, f"mount {target}")


def bind_read_only(source: str, target: str, *, device: bool = False) -> None:
    """Show a file or folder at another place too, where it cannot be changed."""
    mount(source, target, None, BIND | REC)
    read_only(target, 0 if device else ATTR_NODEV)


def read_only(target: str, more: int = 0, without: int = 0) -> None:
    """Let nothing be changed in a mount and those below it, and no program there give rights."""
    attributes = MountAttributes(set=ATTR_RDONLY | ATTR_NOSUID | more, clear=without)
    arguments = (-100, os.fsencode(target), AT_RECURSIVE, attributes, ctypes.sizeof(attributes))
    call(MOUNT_SETATTR, *arguments, what=f"mount_setattr {target}")


def pivot_root(new: str) -> None:
    """Make a mounted folder the root, and let go of the old one."""
    os.chdir(new)
    call(PIVOT_ROOT, b".", b".", what="pivot_root")  # the old root now lies over the new one
    checked(LIBC.umount2(b".", MNT_DETACH), "umount2")
    os.chdir("/")


def prctl(option: int, *values: int) -> None:
    """Set a property of this process."""
    wide = [ctypes.c_ulong(value) for value in (*values, 0, 0, 0, 0)[:4]]
    checked(LIBC.prctl(ctypes.c_int(option), *wide), f"prctl {option}")
