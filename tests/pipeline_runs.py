"""Runners of pipelines as processes of their own, and what the tests ask of a prefix."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import zygote
from conftest import ENVIRONMENT
from pipeline_steps import noted

from palestra.pipeline import Step
from palestra.pipeline.graph import Graph
from palestra.pipeline.outputs import Outputs


def address(target: Step) -> str:
    """The address of a step."""
    return Graph([target]).targets[0]


def files(folder: Path) -> dict[str, bytes]:
    """All files under a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def start(prefix: Path | str, what: str, argument: Path | str, **environment: str) -> subprocess.Popen:
    """A runner as a process of its own."""
    code = "import sys, pipeline_steps; pipeline_steps.main(*sys.argv[1:])"
    return zygote.Popen(
        [sys.executable, "-c", code, str(prefix), what, str(argument)],
        env={**ENVIRONMENT, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def take_over(process: subprocess.Popen, outputs: Outputs, name: str) -> None:
    """Stop a runner but not its worker, and let its lease look like one of another machine, silent for long."""
    process.send_signal(signal.SIGSTOP)
    lease = outputs.lease(name)
    about = json.loads(lease.store.get(lease.key))
    lease.store.put(lease.key, json.dumps(about | {"machine": "elsewhere", "heartbeat": 0.0}).encode())


def end_well(process: subprocess.Popen) -> None:
    """Let a runner, which may be stopped, come to its end."""
    process.send_signal(signal.SIGCONT)
    _, said = process.communicate(timeout=240)
    assert process.returncode == 0, said


def lines_in(path: Path, count: int, seconds: float = 240.0) -> None:
    """Wait until a journal has so many lines."""
    until = time.monotonic() + seconds
    while len(noted(path)) < count:
        assert time.monotonic() < until, f"{path} has fewer than {count} lines"
        time.sleep(0.02)
