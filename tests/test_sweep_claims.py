"""Claim and run by real processes: exactly once however many share the targets, whatever fails, whoever is killed."""

import json
import multiprocessing
import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest

from palestra.errors import Interrupted
from palestra.runs.store import write_bytes
from palestra.sweep.run import Claims, TargetsFailed
from palestra.work.fanout import Processes, WorkItem

# Forked from a process that has imported these already: a fresh interpreter takes a second to start.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["palestra.sweep.run", "pytest"])


def items(targets: list[str], work: Callable[[str], None]) -> list[WorkItem]:
    return [WorkItem(target, work, (target,)) for target in targets]


def note(folder: Path, text: str) -> None:
    """Append a line; one write of a short line is whole."""
    handle = os.open(folder / "ran.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(handle, f"{text}\n".encode())
    os.close(handle)


def noted(folder: Path) -> list[str]:
    path = folder / "ran.txt"
    return path.read_text().split() if path.exists() else []


def worker(folder: Path, targets: list[str], seconds: float) -> None:
    """Does each target slowly enough for others to come by; a target `bad…` fails where no peer has fixed it."""

    def work(target: str) -> None:
        note(folder, target)
        time.sleep(seconds)
        if target.startswith("bad") and not (folder / "fixed").exists():
            raise ValueError(f"{target} is bad")

    Claims(folder / "claims").run(items(targets, work), look=0.02)


def start(folder: Path, targets: list[str], seconds: float = 0.05) -> multiprocessing.process.BaseProcess:
    process = PROCESSES.Process(target=worker, args=(folder, targets, seconds))
    process.start()
    return process


def state(folder: Path, target: str) -> dict:
    return json.loads((folder / "claims" / f"{target}.json").read_text())


@pytest.mark.parametrize(("workers", "count"), [(1, 5), (2, 5), (3, 3), (5, 2)])
def test_targets_shared_by_workers_run_exactly_once(tmp_path, workers, count):
    targets = [f"t{index}" for index in range(count)]
    started = [start(tmp_path, targets) for _ in range(workers)]
    for process in started:
        process.join(60)

    assert [process.exitcode for process in started] == [0] * workers
    assert Counter(noted(tmp_path)) == dict.fromkeys(targets, 1)
    assert all(state(tmp_path, target)["state"] == "done" for target in targets)


def test_target_done_before_is_skipped(tmp_path):
    worker(tmp_path, ["a"], 0)
    worker(tmp_path, ["a", "b"], 0)

    assert noted(tmp_path) == ["a", "b"]


def test_target_that_a_peer_finishes_between_the_look_and_the_lease_is_not_run_again(tmp_path, monkeypatch):
    looked = Claims.done

    def look_then_let_the_peer_finish(claims: Claims, target: str) -> bool:
        found = looked(claims, target)
        monkeypatch.setattr(Claims, "done", looked)
        worker(tmp_path, ["a"], 0)
        return found

    monkeypatch.setattr(Claims, "done", look_then_let_the_peer_finish)
    ran = Claims(tmp_path / "claims").run(items(["a"], lambda target: note(tmp_path, "again")))

    assert ran == []
    assert noted(tmp_path) == ["a"]


def test_target_that_fails_is_marked_the_others_run_and_the_failure_is_raised(tmp_path):
    with pytest.raises(TargetsFailed, match=r"1 of 3 failed:\n  bad: bad is bad"):
        worker(tmp_path, ["a", "bad", "b"], 0)

    assert noted(tmp_path) == ["a", "bad", "b"]
    assert state(tmp_path, "bad")["state"] == "failed"
    assert Claims(tmp_path / "claims").state("bad") == "failed"  # and nobody holds it


def test_peer_retries_what_failed_and_nobody_after_it(tmp_path):
    with pytest.raises(TargetsFailed):
        worker(tmp_path, ["bad"], 0)
    write_bytes(tmp_path / "fixed", b"")
    worker(tmp_path, ["bad"], 0)
    worker(tmp_path, ["bad"], 0)

    assert noted(tmp_path) == ["bad", "bad"]
    assert (state(tmp_path, "bad")["state"], state(tmp_path, "bad")["tries"]) == ("done", 2)


def test_each_worker_tries_a_target_that_always_fails_once(tmp_path):
    started = [start(tmp_path, ["bad", "a"]) for _ in range(3)]
    for process in started:
        process.join(60)

    assert Counter(noted(tmp_path)) == {"bad": 3, "a": 1}
    assert [process.exitcode for process in started] == [1, 1, 1]


def test_target_of_a_killed_worker_is_taken_over_by_one_that_waits(tmp_path):
    first = start(tmp_path, ["slow"], 60)
    while noted(tmp_path) != ["slow"]:
        time.sleep(0.01)
    second = start(tmp_path, ["slow"], 0)
    second.join(0.5)
    assert second.is_alive()  # it waits for the first
    assert noted(tmp_path) == ["slow"]
    assert first.pid is not None
    os.kill(first.pid, signal.SIGKILL)
    second.join(30)
    first.join()

    assert second.exitcode == 0
    assert noted(tmp_path) == ["slow", "slow"]
    assert state(tmp_path, "slow")["state"] == "done"


def die_at_first(folder: Path, times: int, target: str) -> None:
    note(folder, target)
    if noted(folder).count(target) <= times:
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(("times", "said"), [(1, "done"), (9, "failed")])
def test_target_whose_worker_is_killed_is_tried_once_more(tmp_path, times, said):
    claims, work = Claims(tmp_path / "claims"), partial(die_at_first, tmp_path, times)
    with nullcontext() if said == "done" else pytest.raises(TargetsFailed, match="killed by SIGKILL"):
        claims.run(items(["a"], work), backend=Processes("test"))

    assert noted(tmp_path) == ["a", "a"]
    assert (state(tmp_path, "a")["state"], claims.state("a")) == (said, said)


def test_worker_asked_to_stop_gives_its_target_back(tmp_path):
    claims = Claims(tmp_path)

    def stopped(target: str) -> None:
        raise Interrupted("stop")

    with pytest.raises(Interrupted):
        claims.run(items(["a", "b"], stopped))

    assert claims.state("a") == "new"
    assert claims.run(items(["a"], lambda target: None)) == ["a"]
