"""Programs that a process starts: their log, and their end with all that they started."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from palestra.errors import UsageError
from palestra.work.child import Child

SLEEPS = """
import subprocess, time
print(subprocess.Popen(["sleep", "600"]).pid, flush=True)
time.sleep(600)
"""
"""A program that starts another, and prints its process id."""


def until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def gone(pid: int) -> bool:
    """Whether a process has ended; one that nobody has waited for yet has too."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def grandchild(log: Path) -> int:
    until(lambda: log.exists() and log.read_text().endswith("\n"))
    return int(log.read_text().splitlines()[-1])


def test_leaving_the_context_ends_the_program_and_what_it_started(tmp_path: Path) -> None:
    with Child([sys.executable, "-c", SLEEPS], tmp_path / "log") as child:
        started = grandchild(child.log)
        assert child.exit_code() is None
    until(lambda: gone(child.pid) and gone(started))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_kill_of_its_parent_ends_the_program_and_what_it_started(tmp_path: Path) -> None:
    code = (
        f"import sys, time; from pathlib import Path; from palestra.work.child import Child\n"
        f"child = Child([sys.executable, '-c', {SLEEPS!r}], Path('log')); print(child.pid, flush=True); time.sleep(600)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid, started = int(parent.stdout.readline()), grandchild(tmp_path / "log")
    parent.kill()
    parent.wait()
    until(lambda: gone(pid) and gone(started))


def test_output_is_in_the_log_without_secrets(tmp_path: Path) -> None:
    env = {"SOME_API_KEY": "very-secret-value"}
    code = "import os, sys; print('key', os.environ['SOME_API_KEY']); sys.exit(3)"
    with Child([sys.executable, "-c", code], tmp_path / "log", env) as child:
        until(lambda: child.exit_code() == 3)
    assert child.tail() == "key (redacted)"
    assert not os.environ.get("SOME_API_KEY")


def test_program_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot start /no/such/python"):
        Child(["/no/such/python"], tmp_path / "log")
