"""Commands in namespaces of their own: one address is reachable, and nothing can be changed."""

import json
import os
import socket
import subprocess
import sys
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


def run(command: list[str], port: int, **settings: Any) -> tuple[subprocess.Popen[str], socket.socket]:
    ours, theirs = socket.socketpair()
    with theirs:
        line = confined.wrapped(command, theirs.fileno(), port, own_users=OWN_USERS)
        process = subprocess.Popen(
            line, pass_fds=[theirs.fileno()], env=confined.environment(), stdout=-1, text=True, **settings
        )
    return process, confined.received(ours)


def test_command_reaches_one_address_and_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SECRET_KEY", "hush")
    (tmp_path / "kept").write_text("kept")
    with socket.socket(socket.AF_UNIX) as service, socket.create_server(("127.0.0.1", 0)) as other:
        service.bind(str(tmp_path / "service"))
        service.listen()
        elsewhere = str(other.getsockname()[1])
        arguments = ["127.0.0.1", "4455", str(tmp_path), elsewhere, str(os.getpid())]
        process, listening = run([sys.executable, "-c", ATTEMPTS, *arguments], 4455)
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
    assert (tmp_path / "kept").read_text() == "kept"


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
