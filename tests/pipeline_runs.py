"""Runners of pipelines as processes of their own, and what the tests ask of a prefix."""

import subprocess
import sys
import time
from pathlib import Path

from conftest import ENVIRONMENT
from pipeline_steps import noted

from palestra.pipeline import Step
from palestra.pipeline.graph import Graph


def address(target: Step) -> str:
    """The address of a step."""
    return Graph([target]).targets[0]


def files(folder: Path) -> dict[str, bytes]:
    """All files under a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def start(prefix: Path | str, what: str, argument: Path | str, **environment: str) -> subprocess.Popen:
    """A runner as a process of its own."""
    code = "import sys, pipeline_steps; pipeline_steps.main(*sys.argv[1:])"
    return subprocess.Popen(
        [sys.executable, "-c", code, str(prefix), what, str(argument)],
        env={**ENVIRONMENT, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def lines_in(path: Path, count: int, seconds: float = 60.0) -> None:
    """Wait until a journal has so many lines."""
    until = time.monotonic() + seconds
    while len(noted(path)) < count:
        assert time.monotonic() < until, f"{path} has fewer than {count} lines"
        time.sleep(0.02)
