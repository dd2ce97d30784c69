"""A process that has imported what is slow to import and forks instead of starting Python anew.

A new `palestra train` spends three seconds of a core on imports, each worker of its pool as many. `Popen` is that of
subprocess but for how the process comes about: the zygote forks twice, and its grandchild becomes a child of the caller
(a subreaper meanwhile) with the file descriptors, environment, folder and arguments asked for. It runs and ends like
any Python: exit codes, signals and parent-death signals are real; only what it imported is not taken apart object by
object. Each forked process has a zygote of its own for the workers it starts. Linux alone has subreapers; elsewhere
processes are started anew.
"""

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
import types
from pathlib import Path
from typing import Any

HERE = str(Path(__file__).parent)
COMMAND = str(Path(sys.executable).with_name("palestra"))
# Bytecode is kept: compiling torch's modules anew takes as long as importing them, at each of many starts.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"} | {
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": HERE,
}
RUN_COMMAND = f"import sys\nsys.path[0] = {os.path.dirname(COMMAND)!r}\nfrom palestra.cli import main\nsys.exit(main())"
# What a run draws at its end takes as long as a short run: only where this variable is set.
PICTURES = "TEST_PICTURES"
# Names a module that the zygote imports too, once, before it forks a process with this variable.
ALSO = "TEST_IMPORTS"
IMPORTED = ("torch", "gymnasium", "palestra.cli", "palestra.kinds.control", "palestra.kinds.distill")
PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
_lock = threading.Lock()
_zygote: socket.socket | None = None
_owner = os.getpid()  # a process that this one forked by itself has no zygote


class Popen(subprocess.Popen):
    """`subprocess.Popen` that forks `palestra …` and `python -c …`, in sessions of their own, from the zygote."""

    def _execute_child(self, args: Any, *rest: Any) -> None:
        command, (pass_fds, cwd, env), fds = list(map(str, args)), rest[3:6], rest[9:15]
        environment = dict(os.environ if env is None else env)
        if command[0] == COMMAND and environment.get("PYTHONPATH") == HERE:
            code, argv = RUN_COMMAND, command
        elif command[0] == sys.executable and "-c" in command[1:3]:
            argv = command[command.index("-c") :]
            code = argv.pop(1)
        else:
            return super()._execute_child(args, *rest)
        if sys.platform != "linux" or os.getpid() != _owner:
            return super()._execute_child(args, *rest)
        numbers = [0, 1, 2, *pass_fds]
        given = [number if fd == -1 else fd for number, fd in zip(numbers, (fds[0], fds[3], fds[5]), strict=False)]
        request = {"code": code, "argv": argv, "env": environment, "cwd": os.fspath(cwd or os.getcwd())}
        data = json.dumps(request | {"numbers": numbers}).encode()
        with _lock:
            asked = _started()
            ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
            socket.send_fds(asked, [data], [*given, *pass_fds])
            self.pid = int(asked.recv(64))
            ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 0)
        self._child_created = True
        self._close_pipe_fds(*fds)
        return None


def _started() -> socket.socket:
    """Where to ask the zygote of this process, which is started when first needed."""
    global _zygote
    if _zygote is None:
        _zygote, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        number, null = theirs.fileno(), subprocess.DEVNULL
        command = [sys.executable, "-c", f"import zygote; zygote.main({number})"]
        with theirs:
            subprocess.Popen(
                command, pass_fds=[number], env=ENVIRONMENT, stdin=null, stdout=null, start_new_session=True
            )
    return _zygote


def install() -> None:
    """Let the pool of this process start its workers so, and runs draw only where asked."""
    process = importlib.import_module("palestra.work.process")
    process.subprocess = types.SimpleNamespace(**{**vars(subprocess), "Popen": Popen})
    plot = importlib.import_module("palestra.runs.plot")
    draw = plot.trial_plots
    plot.trial_plots = lambda run: draw(run) if PICTURES in os.environ else []


def main(number: int) -> None:
    """Import, serve, and in a forked process run what was asked for."""
    before = set(os.environ)
    install()
    for name in IMPORTED:
        with contextlib.suppress(ModuleNotFoundError):  # in the base install there is no torch
            importlib.import_module(name)
    added = {name: value for name, value in os.environ.items() if name not in before}  # by what was imported
    gc.freeze()  # not looked at, and so not copied, by the collector of a forked process
    request = serve(socket.socket(fileno=number))
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(added | request["env"])
    sys.argv[:] = request["argv"]
    if (
        "torch" in sys.modules and (threads := os.environ.get("OMP_NUM_THREADS", "1")) != "1"
    ):  # which torch reads at import
        sys.modules["torch"].set_num_threads(int(threads))
    code: Any = 0
    try:
        exec(request["code"], vars(sys.modules["__main__"]))
    except SystemExit as end:
        code = 0 if end.code is None else end.code
    finish(code)


def finish(code: Any) -> None:
    """End as Python does, but for what takes a third of a second: freeing all that was imported."""
    if not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:  # nobody reads them: Python has a message and a code for that
        sys.exit(code)
    os._exit(code)


def serve(asked: socket.socket) -> dict[str, Any]:
    """Fork whenever asked, until nobody can ask any more; returns, in a forked process alone, what it is to run."""
    global _zygote, _owner
    while True:
        data, fds, *_ = socket.recv_fds(asked, 1 << 20, 64)
        if not data:
            os._exit(0)
        request = json.loads(data)
        if name := request["env"].get(ALSO):
            importlib.import_module(name)
        if child := os.fork():
            os.waitpid(child, 0)
            for fd in fds:
                os.close(fd)
            continue
        middle = os.getpid()
        if os.fork():
            os._exit(0)
        break
    os.setsid()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if not os.fork():
        for fd in (*fds, asked.detach(), ours.detach()):
            os.close(fd)
        os.setsid()
        return serve(theirs)
    theirs.close()
    above = max(request["numbers"]) + 1
    *moved, mine, reply = (fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, above) for fd in (*fds, ours, asked))
    for fd in (*fds, ours.detach(), asked.detach()):
        os.close(fd)
    for number, fd in zip(request["numbers"], moved, strict=True):
        os.dup2(fd, number)
        os.close(fd)
    _zygote, _owner = socket.socket(fileno=mine), os.getpid()
    while os.getppid() == middle:
        time.sleep(0.001)
    with socket.socket(fileno=reply) as asked:
        asked.send(str(os.getpid()).encode())
    return request
