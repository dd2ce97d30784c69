"""Steps for the tests of pipelines, in a module that workers can import, and a runner as a process of its own."""

import json
import os
import random
import sys
import time
import uuid
from dataclasses import replace
from pathlib import Path

from palestra.pipeline import Execution, Step, step
from palestra.pipeline.outputs import open_outputs
from palestra.pipeline.runner import run


def note(journal: Path | str, *words: object) -> None:
    """Append a line to a file outside of all outputs; a line is written at once or not at all."""
    handle = os.open(journal, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    try:
        os.write(handle, (" ".join(map(str, words)) + "\n").encode())
    finally:
        os.close(handle)


def noted(journal: Path) -> list[list[str]]:
    """The lines of a journal."""
    return [line.split() for line in journal.read_text().splitlines()] if journal.exists() else []


@step
def number(out: Path, *, value: int, journal: Execution[str] = "", seconds: Execution[float] = 0.0) -> None:
    """Write a number."""
    if journal:
        note(journal, "number", value)
    time.sleep(seconds)
    (out / "value.txt").write_text(str(value))


@step
def total(out: Path, *, parts: object, journal: Execution[str] = "") -> None:
    """Write the sum of the numbers under some folders, wherever in lists, dicts and tuples they stand."""
    if journal:
        note(journal, "total")
    (out / "value.txt").write_text(str(sum(_values(parts))))


def _values(parts: object) -> list[int]:
    if isinstance(parts, Path):
        return [int((parts / "value.txt").read_text())]
    items = parts.values() if isinstance(parts, dict) else parts
    return [value for item in items for value in _values(item)]  # type: ignore[union-attr]


def value(outputs: object, target: Step) -> int:
    """What a step wrote."""
    from palestra.pipeline.graph import Graph

    return int((outputs.path(Graph([target]).targets[0]) / "value.txt").read_text())  # type: ignore[attr-defined]


@step
def copied(out: Path, *, source: list[str | Path], version: str = "1.0", journal: Execution[str] = "") -> None:
    """Copy files, and those of folders."""
    note(journal, "copied")
    for name in source:
        found = sorted(Path().glob(str(name))) if "*" in str(name) else [Path(name)]
        for path in [inner for one in found for inner in (one.rglob("*.txt") if one.is_dir() else [one])]:
            (out / path.name).write_bytes(path.read_bytes())


@step
def noop(out: Path, *, index: int) -> None:
    """Nothing."""


@step
def faulty(out: Path, *, until: Execution[Path], journal: Execution[str] = "") -> None:
    """Fail as long as a file is not there."""
    if journal:
        note(journal, "faulty")
    (out / "half.txt").write_text("half")
    if not until.exists():
        raise RuntimeError(f"{until.name} is not there")
    (out / "value.txt").write_text("1")


@step(retries=2)
def third_time(out: Path, *, journal: Execution[str]) -> None:
    """Succeed at the third try."""
    note(journal, time.monotonic())
    if len(noted(Path(journal))) < 3:
        raise RuntimeError("not yet")


@step(resumes=True)
def counting(out: Path, *, upto: int, journal: Execution[str], seconds: Execution[float] = 0.05) -> None:
    """Count in files, going on from where a killed attempt was."""
    for index in range(upto):
        if not (out / f"{index}.txt").exists():
            note(journal, index)
            time.sleep(seconds)
            (out / f"{index}.txt").write_text(str(index))


@step
def linked(
    out: Path, *, index: int, inputs: list[Path], journal: Execution[str] = "", seconds: Execution[float] = 0.0
) -> None:
    """Write a token of this very attempt and the tokens of the inputs as they were read; note begin and end."""
    token = uuid.uuid4().hex
    note(journal, "begin", index, token, os.getppid())  # the parent is the runner
    read = {}
    for folder in inputs:
        assert (folder / "status.json").exists(), f"{folder} is half an output"
        first, second = (json.loads((folder / name).read_text()) for name in ("first.json", "second.json"))
        assert first == second, f"{folder} is of two attempts"
        read[folder.name] = first["token"]
    assert not any(out.iterdir()), f"{out} holds another attempt's files"
    (out / "first.json").write_text(json.dumps({"token": token, "read": read}))
    time.sleep(random.uniform(0, 2 * seconds))
    (out / "second.json").write_text(json.dumps({"token": token, "read": read}))
    note(journal, "end", index, token, os.getppid())


def twenty(journal: str, seconds: float) -> list[Step]:
    """A graph of 20 steps, four wide; each needs the one above it and the one beside that."""
    rows: list[list[Step]] = []
    for row in range(5):
        above = rows[-1] if rows else None
        rows.append(
            [
                linked(
                    index=4 * row + column,
                    inputs=[] if above is None else [above[column], above[(column + 1) % 4]],
                    journal=journal,
                    seconds=seconds,
                )
                for column in range(4)
            ]
        )
    return rows[-1]


@step
def slow(out: Path, *, started: Execution[str], seconds: float = 60.0) -> None:
    """Say that it has begun, then sleep."""
    (out / "half.txt").write_text("half")
    note(started, os.getpid())
    time.sleep(seconds)


@step
def lingering(out: Path, *, folder: Execution[str]) -> None:
    """Write a file, wait for leave to end, write more; attempts are numbered as they begin."""
    journal = Path(folder) / "begun.txt"
    turn = len(noted(journal))
    (out / f"early-{turn}.txt").write_text("early")
    note(journal, turn)
    while not (Path(folder) / f"go-{turn}").exists():
        time.sleep(0.02)
    try:
        (out / f"late-{turn}.txt").write_text("late")
        (out / "value.txt").write_text(str(turn))
    finally:
        note(Path(folder) / "ended.txt", turn)


@step
def telling(out: Path, *, variable: str, fails: bool = False) -> None:
    """Print the value of a variable in every way; `fails`: raise with it."""
    secret = os.environ[variable]
    print("python:", secret)
    print(json.dumps({"json": secret}), repr(secret))
    sys.stdout.flush()
    os.write(2, f"pieces: {secret[:5]}".encode())
    time.sleep(0.05)
    os.write(2, f"{secret[5:]}\n".encode())
    os.system(f'printf "child: %s\\n" "${variable}"')
    (out / "value.txt").write_text("1")
    if fails:
        raise RuntimeError(f"the key {secret} is not good")


@step
def filling(out: Path, *, megabytes: int) -> None:
    """Write more than there is room for."""
    with (out / "large.bin").open("wb") as file:
        for _ in range(megabytes):
            file.write(b"x" * (1 << 20))
            file.flush()


def main(prefix: str, what: str, argument: str) -> None:
    """Run as `python -c "import pipeline_steps; pipeline_steps.main(…)"`."""
    targets = {
        "twenty": lambda: twenty(argument, 0.04),
        "slow": lambda: [slow(started=argument), number(value=1)],
        "counting": lambda: [counting(upto=60, journal=argument)],
        "number": lambda: [number(value=7, journal=argument, seconds=0.5)],
        "lingering": lambda: [lingering(folder=argument)],
        "resuming": lambda: [replace(lingering(folder=argument), resumes=True)],
    }[what]()
    run(targets, open_outputs(prefix), max_parallel=2)
