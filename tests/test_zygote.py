"""A process forked from the zygote is what one started anew is: arguments, streams, parent, exit codes, signals."""

import json
import os
import signal
import subprocess
import sys
from typing import Any

import psutil
import pytest
import zygote

BOTH = pytest.mark.parametrize("popen", [subprocess.Popen, zygote.Popen], ids=["anew", "forked"])
TELL = """
import atexit, json, os, sys
told = {"argv": sys.argv, "cwd": os.getcwd(), "given": os.environ.get("GIVEN"), "parent": os.getppid(),
        "alone": os.getpgrp() == os.getsid(0) == os.getpid(), "read": sys.stdin.read(), "main": __name__}
print(json.dumps(told))
print("aside", file=sys.stderr)
atexit.register(print, "the end")
sys.exit(3)
"""


def started(popen: Any, code: str, *arguments: str, **options: Any) -> Any:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return popen([sys.executable, "-c", code, *arguments], start_new_session=True, **pipes, **options)


@BOTH
def test_process_has_its_arguments_folder_environment_streams_and_exit_code(popen, tmp_path):
    process = started(popen, TELL, "one", "two", cwd=tmp_path, env={**os.environ, "GIVEN": "this"})
    out, err = process.communicate("asked", timeout=60)
    first, last = out.splitlines()
    assert json.loads(first) == {
        "argv": ["-c", "one", "two"],
        "cwd": str(tmp_path),
        "given": "this",
        "parent": os.getpid(),
        "alone": True,
        "read": "asked",
        "main": "__main__",
    }
    assert (last, err, process.returncode) == ("the end", "aside\n", 3)
    assert not psutil.pid_exists(process.pid)


@BOTH
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_process_that_is_sent_a_signal_ends_by_it(popen, number):
    process = started(popen, "import time; print('ready', flush=True); time.sleep(100)")
    assert process.stdout.readline() == "ready\n"
    assert process.poll() is None
    family = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == -number
    assert ("KeyboardInterrupt" in err) == (number == signal.SIGINT)
    assert not psutil.wait_procs(family, timeout=10)[1]


@BOTH
def test_process_that_raises_shows_its_traceback(popen):
    _, err = started(popen, "raise ValueError('no')").communicate(timeout=60)
    assert err.startswith("Traceback")
    assert err.endswith("ValueError: no\n")


def test_environment_that_is_read_at_import_is_that_of_a_process_started_anew():
    code = "import torch; print(torch.get_num_threads())"
    out, _ = started(zygote.Popen, code, env={**os.environ, "OMP_NUM_THREADS": "2"}).communicate(timeout=60)
    assert out == f"{min(2, os.cpu_count() or 1)}\n"
