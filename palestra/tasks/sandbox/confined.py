"""A command in namespaces of its own: it reads everything, writes nowhere but in memory, and reaches one address.

That address is a listening socket, made inside its network namespace and handed out: who gets it serves the command,
and nobody else can be reached.
"""

import contextlib
import fcntl
import json
import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from palestra.errors import UsageError
from palestra.tasks.sandbox import filter, kernel
from palestra.tasks.sandbox.levels import DEVICES, ways
from palestra.tasks.sandbox.watch import Limits, exit_code, watched

BOOT = """
import json, sys
sys.path[:], *arguments = json.loads(sys.argv.pop())
from palestra.tasks.sandbox.confined import main
main(*arguments)
"""
SCRATCH = "/dev/shm"
"""Its only folder to write in: of memory, its own, gone with it."""
SIZE = "size=256m,mode=1777"
PASSED = ("PATH", "LANG", "LC_ALL", "PYTHONPATH", "VIRTUAL_ENV")
"""Of the environment: no keys."""
SIOCSIFFLAGS, UP = 0x8914, 1
SECONDS = 60.0
"""For the namespaces to be made, on a busy machine."""


def environment() -> dict[str, str]:
    """What a command gets of this process's environment."""
    return {name: os.environ[name] for name in PASSED if name in os.environ} | {"HOME": SCRATCH, "TMPDIR": SCRATCH}


def wrapped(command: Sequence[str], descriptor: int, port: int, *, own_users: bool, limits: Limits) -> list[str]:
    """The command line that runs a command confined; the listening socket comes back over `descriptor`."""
    settings = json.dumps([[path for path in sys.path if path], descriptor, port, own_users, list(command), *limits])
    return [sys.executable, "-s", "-S", "-P", "-B", "-c", BOOT, settings]


def received(ours: socket.socket) -> socket.socket:
    """The listening socket of a command that has started; OSError with the reason where it could not be confined."""
    ours.settimeout(SECONDS)
    with ours:
        data, files, _, _ = socket.recv_fds(ours, 4096, 1)
    if not files:
        raise OSError(data.decode(errors="replace") or "it ended before it was confined")
    return socket.socket(fileno=files[0])


@cache
def possible() -> bool:
    """Whether commands are confined in a user namespace of their own; UsageError where they cannot be at all."""
    problems = []
    for way in ways("namespaces", "namespaces"):
        ours, theirs = socket.socketpair()
        with theirs:
            line = wrapped(["true"], theirs.fileno(), 1, own_users=way.own_users, limits=Limits())
            process = subprocess.Popen(line, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        try:
            received(ours).close()
            return way.own_users
        except OSError as error:
            problems.append(str(error))
        finally:
            process.kill()
            process.wait()
    why = "; ".join(problems) or "it is no Linux on x86-64 or 64-bit ARM"
    raise UsageError(
        f"rollout.workflow.sandbox: this machine cannot confine a command ({why}): it needs root or user namespaces, "
        "which many containers refuse. Allow them, or leave `sandbox` out: the command is then run as you are"
    )


def main(descriptor: int, port: int, own_users: bool, command: list[str], *limits: float) -> None:
    """Make the namespaces, hand the socket out, become the command."""
    with socket.socket(fileno=descriptor) as theirs:
        try:
            child = _confined(own_users)
            if child == 0:
                listening = _enter(port)
                socket.send_fds(theirs, [b"+"], [listening.fileno()])
        except OSError as error:
            with contextlib.suppress(OSError):
                theirs.sendall(str(error).encode())
            sys.exit(1)
    if child:
        sys.exit(exit_code(os.waitpid(child, 0)[1]))
    ours, theirs = socket.socketpair()
    if command_process := os.fork():  # the first process of a namespace ignores signals, and adopts the others
        theirs.close()
        _, files, _, _ = socket.recv_fds(ours, 1, 1)
        os._exit(watched(command_process, files[0], Limits(*limits)) if files else 1)  # type: ignore[arg-type]
    ours.close()
    socket.send_fds(theirs, [b"+"], [filter.asking_for_processes()])
    theirs.close()
    try:
        os.execvpe(command[0], command, dict(os.environ))
    except OSError as error:
        sys.exit(f"cannot start {command[0]}: {error.strerror}")


def _confined(own_users: bool) -> int:
    """Fork into new namespaces: the first process of its own process namespace, which ends with it."""
    user, group = os.geteuid(), os.getegid()
    everything = kernel.NEWNS | kernel.NEWNET | kernel.NEWIPC | kernel.NEWUTS | kernel.NEWPID
    kernel.unshare(everything | (kernel.NEWUSER if own_users else 0))
    if own_users:
        for name, text in {"setgroups": "deny", "uid_map": f"{user} {user} 1", "gid_map": f"{group} {group} 1"}.items():
            Path(f"/proc/self/{name}").write_text(text)
    return os.fork()


def _enter(port: int) -> socket.socket:
    """In the new process: its file systems, its network with one address, and no way back."""
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    _hide_files()
    listening = socket.socket()
    fcntl.ioctl(listening, SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", UP))
    listening.bind(("127.0.0.1", port))
    listening.listen(128)
    kernel.call(kernel.CAPSET, kernel.THIS_PROCESS, kernel.NO_CAPABILITIES, what="capset")
    filter.install(filter.of_commands())
    return listening


def _hide_files() -> None:
    """All files read-only, no devices but harmless ones, and a folder in memory."""
    devices = {path: os.open(path, os.O_PATH) for path in DEVICES if os.path.exists(path)}
    kernel.mount("none", "/", None, kernel.REC | kernel.PRIVATE)
    kernel.read_only("/", kernel.ATTR_NODEV)
    # Without rights, root still owns what is in /proc/sys.
    kernel.mount("proc", "/proc", "proc", kernel.RDONLY | kernel.NOSUID | kernel.NODEV | kernel.NOEXEC)
    kernel.mount("tmpfs", "/dev", "tmpfs", kernel.NOSUID | kernel.NOEXEC, "size=1m,mode=755")
    for path, file in devices.items():
        Path(path).touch()
        kernel.mount(f"/proc/self/fd/{file}", path, None, kernel.BIND)
        kernel.read_only(path, without=kernel.ATTR_NODEV)
        os.close(file)
    os.symlink("/proc/self/fd", "/dev/fd")
    os.mkdir(SCRATCH)
    kernel.mount("tmpfs", SCRATCH, "tmpfs", kernel.NOSUID | kernel.NODEV, SIZE)
