"""Commands in namespaces of their own: one address is reachable, and nothing can be changed."""

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from palestra.errors import UsageError
from palestra.tasks.sandbox import confined

try:
    OWN_USERS = confined.possible()
except UsageError as error:
    pytest.skip(str(error), allow_module_level=True)

ATTEMPTS = """
import json, os, socket, subprocess, sys
done = {}
def attempt(name, act):
    try:
        done[name] = act() or "done"
    except OSError as error:
        done[name] = type(error).__name__
def connect(address, family=socket.AF_INET):
    with socket.socket(family) as one:
        one.settimeout(5)
        one.connect(address)
        return one.recv(100).decode()
host, port, here, other, secret = sys.argv[1:]
attempt("gateway", lambda: connect((host, int(port))))
attempt("other", lambda: connect((host, int(other))))
attempt("outside", lambda: connect(("192.0.2.1", 80)))
attempt("unix", lambda: connect(os.path.join(here, "service"), socket.AF_UNIX))
attempt("write", lambda: open(os.path.join(here, "file"), "w").close())
attempt("remove", lambda: os.remove(os.path.join(here, "kept")))
attempt("sysctl", lambda: open("/proc/sys/kernel/core_pattern", "w").close())
attempt("device", lambda: os.mknod("/dev/shm/disk", 0o60600, os.makedev(1, 0)))
attempt("kill", lambda: os.kill(int(secret), 9))
attempt("scratch", lambda: open(os.environ["TMPDIR"] + "/file", "w").close())
attempt("program", lambda: subprocess.run(["true"], check=True).returncode or "done")
attempt("null", lambda: open("/dev/null", "w").close())
remount = ["mount", "-o", "remount,rw", "/"]
attempt("remount", lambda: "refused" if subprocess.run(remount, stderr=-3).returncode else "done")
done["processes"] = sum(name.isdigit() for name in os.listdir("/proc"))
done["devices"] = sorted(os.listdir("/dev"))
done["secret"] = os.environ.get("SECRET_KEY")
print(json.dumps(done))
"""


ROOT = Path(confined.__file__).parents[3]
NOBODY: dict[str, Any] = {"user": 65534, "group": 65534, "extra_groups": []}


def nobodys_python() -> tuple[str, list[str]] | None:
    """An interpreter that a user without rights can run, and where it finds modules."""
    script = f"import json, sys; sys.path.append({str(ROOT)!r}); import palestra.tasks.sandbox.confined; "
    for python in (sys.executable, "/usr/bin/python3"):
        with suppress(OSError, subprocess.CalledProcessError):
            told = [python, "-P", "-c", script + "print(json.dumps(sys.path))"]
            found = subprocess.run(told, **NOBODY, check=True, capture_output=True, cwd="/").stdout
            return python, [path for path in json.loads(found) if path]
    return None


@dataclass
class User:
    """Who runs confined commands, and with what."""

    python: str = sys.executable
    modules: list[str] | None = None

    def run(
        self, command: list[str], port: int, limits: confined.Limits | None = None, **settings: Any
    ) -> tuple[subprocess.Popen[str], socket.socket]:
        ours, theirs = socket.socketpair()
        with theirs:
            given: dict[str, Any] = {"own_users": OWN_USERS, "limits": limits or confined.Limits()}
            line = confined.wrapped(command, theirs.fileno(), port, **given)
            if self.modules is not None:
                _, descriptor, port, _, *rest = json.loads(line[-1])
                line = [self.python, *line[1:-1], json.dumps([self.modules, descriptor, port, True, *rest])]
                settings |= NOBODY
            told: dict[str, Any] = {"env": confined.environment(), "stdout": -1, "text": True, **settings}
            process = subprocess.Popen(line, pass_fds=[theirs.fileno()], **told)
        return process, confined.received(ours)


run = User().run


@pytest.fixture
def folder() -> Iterator[Path]:
    """One that every user may write in; those of pytest are of one user alone."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o777)
        yield Path(name)


@pytest.fixture(params=["as we are", "as nobody"])
def user(request: pytest.FixtureRequest) -> User:
    """With rights, and in a user namespace without any, where we can become another user."""
    if request.param == "as we are":
        return User()
    if os.geteuid() != 0:
        pytest.skip("only root can become another user; as we are is the same here")
    if subprocess.run(["unshare", "-U", "true"], **NOBODY, stderr=-3).returncode:
        pytest.skip("this machine has no user namespaces for users without rights")
    if (found := nobodys_python()) is None:
        pytest.skip("other users cannot run Python 3.11 with this installation")
    return User(*found)


def test_command_reaches_one_address_and_changes_nothing(folder: Path, user: User, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SECRET_KEY", "hush")
    (folder / "kept").write_text("kept")
    with socket.socket(socket.AF_UNIX) as service, socket.create_server(("127.0.0.1", 0)) as other:
        service.bind(str(folder / "service"))
        service.listen()
        elsewhere = str(other.getsockname()[1])
        arguments = ["127.0.0.1", "4455", str(folder), elsewhere, str(os.getpid())]
        process, listening = user.run([user.python, "-c", ATTEMPTS, *arguments], 4455)
        with listening:
            connection, _ = listening.accept()
            with connection:
                connection.sendall(b"hello")
        done = json.loads(process.communicate(timeout=120)[0])
    assert {name: done.pop(name) for name in ("gateway", "scratch", "program", "null")} == {
        "gateway": "hello", "scratch": "done", "program": "done", "null": "done"
    }  # fmt: skip
    assert done.pop("processes") == 2  # the first of the namespace, and it
    assert set(done.pop("devices")) <= {"null", "zero", "full", "random", "urandom", "fd", "shm"}
    assert done.pop("secret") is None
    assert "done" not in done.values(), done
    assert (folder / "kept").read_text() == "kept"


@pytest.mark.parametrize(("command", "code"), [("exit 3", 3), ("kill -9 $$", 128 + 9), ("sleep 600 & exit 0", 0)])
def test_code_of_a_command_is_that_of_its_process_and_what_it_left_ends_with_it(command, code):
    process, listening = run(["sh", "-c", command], 4456)
    listening.close()
    process.communicate(timeout=120)  # at the end of all that could write to its output
    assert process.returncode == code


def test_command_that_does_not_exist_is_named():
    process, listening = run(["no-such-program"], 4457, stderr=subprocess.PIPE)
    listening.close()
    assert "cannot start no-such-program" in process.communicate(timeout=120)[1]
    assert process.returncode == 1


FORKS = "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass"
BRIEF = "import os\nwhile True:\n    if not os.fork() and os.fork():\n        os._exit(0)"  # orphans that fork on
THREADS = "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(600,)).start()"
HOG = "kept = []\nwhile True: kept.append(bytearray(b'x') * (1 << 20))"
HIDDEN_HOG = f"import ctypes\nctypes.CDLL(None).prctl(4, 0, 0, 0, 0)\n{HOG}"  # not dumpable: who asks is told less
HOGS = "import os, time\nos.fork(); os.fork()\nkept = bytearray(b'x') * (60 << 20)\ntime.sleep(600)"
LOOP = "while True: pass"
LOOPS = f"import os\nos.fork()\n{LOOP}"
PASSING = (
    "import subprocess, sys\nwhile True: subprocess.run([sys.executable, '-S', '-c', 'for _ in range(10**6): pass'])"
)


def assert_ended(user: User, program: str, **limits: float) -> None:
    """It ends for its limit, with all that it has started; another one beside it does not."""
    other, socket_of_other = run(["sleep", "600"], 4458)
    ours: Any = confined.Limits()._replace(**limits)  # type: ignore[arg-type]
    process, listening = user.run([user.python, "-S", "-c", program], 4459, ours, stderr=subprocess.PIPE)
    with listening, socket_of_other:
        _, said = process.communicate(timeout=120)  # ends when no process is left that could write
    assert process.returncode == 128 + 9
    ((name, number),) = limits.items()
    assert f"limits.{name} is {number}" in said.splitlines()[-1]
    assert other.poll() is None
    other.kill()
    other.communicate(timeout=120)


def test_fork_bomb_ends_with_all_its_processes_and_others_do_not(user):
    assert_ended(user, FORKS, tasks=100)


def test_memory_hog_ends_and_others_do_not(user):
    assert_ended(user, HOG, memory=200)


def test_busy_loop_ends_and_others_do_not(user):
    assert_ended(user, LOOP, cpu_seconds=0.5)


@pytest.mark.parametrize(
    ("program", "limits"),
    [
        (BRIEF, {"tasks": 100}),
        (THREADS, {"tasks": 100}),
        (HIDDEN_HOG, {"memory": 200}),
        (HOGS, {"memory": 200}),
        (LOOPS, {"cpu_seconds": 0.5}),
        (PASSING, {"cpu_seconds": 0.5}),
    ],
    ids=["orphans", "threads", "not dumpable", "together", "two loops", "one after another"],
)
def test_command_beyond_a_limit_by_other_ways_ends(program, limits):
    assert_ended(User(), program, **limits)


def test_command_that_shares_memory_with_its_children_is_not_counted_for_each():
    program = "import os, time\nkept = bytearray(b'x') * (60 << 20)\nos.fork(); os.fork(); time.sleep(1)"
    process, listening = run([sys.executable, "-S", "-c", program], 4460, confined.Limits(memory=150))
    listening.close()
    process.communicate(timeout=120)
    assert process.returncode == 0


def test_memory_that_no_process_has_mapped_is_refused():
    program = "import os\ntry:\n    os.memfd_create('x')\nexcept PermissionError:\n    print('refused')"
    process, listening = run([sys.executable, "-c", program], 4461)
    listening.close()
    assert process.communicate(timeout=120)[0].strip() == "refused"
