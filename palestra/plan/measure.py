"""A spec run in processes of its own: seconds of its steps by the clock and by the processor, and peak memory."""

import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from palestra.errors import PalestraError
from palestra.spec.source import write_text

WARM_UP = 2
"""Steps that do not count."""
POLL = 0.1


class Measured(NamedTuple):
    """Of a run."""

    wall: float
    """Seconds of a step, median."""
    processor: float
    """Seconds of all its processes' cores in a step, median: what one free core would take."""
    peak: int
    """Bytes of the largest process, at most."""
    length: float
    """Tokens of a completion, mean."""


def digits(prompt: str, completion: str, **row: Any) -> float:
    """A reward that differs within every group: what has no advantage is not trained on."""
    return sum(map(str.isdigit, completion)) / max(1, len(completion))


def measured(spec: dict[str, Any], folder: Path) -> Measured:
    """Train a spec that writes a row each step."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "spec.yaml").write_text(write_text(spec))
    command = [
        sys.executable,
        "-m",
        "palestra",
        "train",
        str(folder / "spec.yaml"),
        "--runs",
        str(folder / "runs"),
        "-q",
    ]
    seconds: dict[int, float] = {}
    most: dict[int, int] = {}
    marks: list[tuple[float, float]] = []
    with (folder / "output.txt").open("wb") as output, subprocess.Popen(command, stdout=output, stderr=output) as child:
        try:
            tree = psutil.Process(child.pid)
            while child.poll() is None:
                for process in _alive(tree):
                    seconds[process.pid] = max(seconds.get(process.pid, 0.0), _processor(process))
                    most[process.pid] = max(most.get(process.pid, 0), _resident(process))
                if (rows := _rows(folder)) > len(marks):
                    marks += [(time.perf_counter(), sum(seconds.values()))] * (rows - len(marks))
                time.sleep(POLL)
        finally:
            child.kill()
    if child.returncode:
        last = (folder / "output.txt").read_text(errors="replace").strip().splitlines()[-3:]
        raise PalestraError(f"a run to measure ended with {child.returncode}: {' '.join(last)}")
    steps = list(zip(marks[WARM_UP:], marks[WARM_UP + 1 :], strict=False))
    wall, processor = (statistics.median(b[i] - a[i] for a, b in steps) for i in (0, 1))
    written = [json.loads(line) for path in _files(folder) for line in path.read_text().splitlines()]
    told = [row["length"] for row in written if "length" in row]
    return Measured(wall, processor, max(most.values()), statistics.fmean(told) if told else 0.0)


def _alive(tree: psutil.Process) -> list[psutil.Process]:
    try:
        return [tree, *tree.children(recursive=True)]
    except psutil.Error:
        return []


def _processor(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.Error:
        return 0.0
    return times.user + times.system


def _resident(process: psutil.Process) -> int:
    try:
        return process.memory_info().rss
    except psutil.Error:
        return 0


def _files(folder: Path) -> list[Path]:
    return list((folder / "runs").glob("*/*/sessions/*/metrics.jsonl"))


def _rows(folder: Path) -> int:
    return sum(path.read_bytes().count(b"\n") for path in _files(folder))
