import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ENVIRONMENT
from pipeline_runs import address, end_well, files, lines_in, start, take_over
from pipeline_steps import filling, lingering, noted, number, twenty, value

from palestra.pipeline.graph import Graph
from palestra.pipeline.outputs import Outputs
from palestra.pipeline.runner import PipelineFailed, run
from palestra.runs.lease import LeaseLost
from palestra.runs.store import read_json

RUNNERS = 4
DEADLOCK_SECONDS = 240.0


def kill_at_random(prefix: Path, journal: Path, chance: random.Random) -> int:
    """Four runners on one graph; again and again one is killed and another started, until one came to the end."""
    kills, next_at, until = 0, chance.randint(1, 6), time.monotonic() + DEADLOCK_SECONDS
    running: list[subprocess.Popen] = []
    while True:
        assert time.monotonic() < until, f"no runner came to an end:\n{journal.read_text()}"
        running += [start(prefix, "twenty", journal) for _ in range(RUNNERS - len(running))]
        if ended := [process for process in running if process.poll() is not None]:
            assert ended[0].returncode == 0, ended[0].communicate()[1]
            break
        if len(noted(journal)) >= next_at:
            time.sleep(chance.uniform(0.0, 0.08))
            victim = _at_work(running, journal) if chance.random() < 0.75 else chance.choice(running)
            victim.send_signal(signal.SIGKILL)
            victim.communicate()
            running.remove(victim)
            kills += 1
            next_at = len(noted(journal)) + chance.randint(2, 8)
        time.sleep(0.005)
    for process in running:  # the others must find it all done, too
        _, said = process.communicate(timeout=DEADLOCK_SECONDS)
        assert process.returncode == 0, said
    return kills


def _at_work(running: list[subprocess.Popen], journal: Path) -> subprocess.Popen:
    """The runner that began a step last, of those that still run."""
    began = [int(line[3]) for line in noted(journal) if line[0] == "begin"]
    return max(running, key=lambda process: max((at for at, pid in enumerate(began) if pid == process.pid), default=-1))


def kill_rounds(folder: Path, chance: random.Random, times: int) -> int:
    """Graph after graph, until so many runners were killed; how many attempts the kills cut short."""
    kills, rounds, cut = 0, 0, 0
    while kills < times:
        prefix, journal = folder / f"prefix-{rounds}", folder / f"journal-{rounds}.txt"
        kills += kill_at_random(prefix, journal, chance)
        check_exactly_once(prefix, journal)
        rounds += 1
        cut += sum(line[0] == "begin" for line in noted(journal)) - 20
    print(f"{kills} kills in {rounds} graphs of 20 steps, {cut} attempts cut short")
    return cut


def check_exactly_once(prefix: Path, journal: Path) -> None:
    """Each step has one output, whole, of one attempt that ran to its end, and all who read it read that one."""
    outputs, graph = Outputs(prefix), Graph(twenty(str(journal), 0.0))
    lines = noted(journal)
    ended = {line[2]: int(line[1]) for line in lines if line[0] == "end"}
    committed = {}
    for name, node in graph.nodes.items():
        status = outputs.done(name)
        assert status is not None
        assert sorted(files(outputs.path(name))) == ["first.json", "second.json", "status.json"]
        first, second = (read_json(outputs.path(name) / f"{which}.json") for which in ("first", "second"))
        assert first == second
        committed[name] = first["token"]
        assert ended[first["token"]] == node.step.config["index"]
        assert first["read"] == {needed: committed[needed] for needed in node.inputs}
    assert len(set(committed.values())) == 20
    assert not [path for path in prefix.iterdir() if ".partial" in path.name]
    _check_one_at_a_time(lines)
    # Whoever began after a step was committed would have been one too many: the committed attempt is the last.
    last = {line[1]: line[2] for line in lines if line[0] == "begin"}
    assert sorted(last.values()) == sorted(committed.values())


def _check_one_at_a_time(lines: list[list[str]]) -> None:
    """Between the begin and the end of an attempt no other attempt at the same step begins."""
    at_work: dict[str, str] = {}
    for what, index, token, _ in lines:
        if what == "begin":
            at_work[index] = token
        else:
            assert at_work[index] == token, f"two attempts at step {index} at once"


def test_twenty_steps_and_four_runners_killed_at_random_commit_each_once(tmp_path):
    kill_rounds(tmp_path, random.Random(6), 3)


@pytest.mark.slow
def test_twenty_steps_and_four_runners_killed_at_random_fifty_times_commit_each_once(tmp_path):
    assert kill_rounds(tmp_path, random.Random(0), 50) > 10


def test_commit_by_one_who_has_lost_the_lease_is_refused_and_leaves_nothing(tmp_path):
    outputs, name = Outputs(tmp_path), address(number(value=1))
    lease = outputs.lease(name)
    lease.acquire()
    outputs.begin(name, lease.token, resumes=False)
    found = json.loads(outputs.steps.get(f"{name}/lease.json"))
    outputs.steps.put(f"{name}/lease.json", json.dumps(found | {"token": "another"}).encode())
    with pytest.raises(LeaseLost), lease.fenced():
        outputs.commit(name, lease.token, {"address": name})
    assert outputs.done(name) is None
    assert not outputs.half_done(name)


@pytest.mark.parametrize(
    ("what", "ends"),
    [("lingering", "before the other"), ("lingering", "after the other"), ("resuming", "before the other")],
)
def test_zombie_worker_of_a_stopped_runner_changes_nothing_of_a_later_attempt(tmp_path, what, ends):
    outputs, name = Outputs(tmp_path / "prefix"), address(lingering(folder=""))
    stopped = start(outputs.prefix, what, tmp_path)
    lines_in(tmp_path / "begun.txt", 1)
    take_over(stopped, outputs, name)
    (outputs.prefix / ".steps" / name / ".body.lock").unlink()  # that of another machine is another lock
    other = start(outputs.prefix, what, tmp_path)
    lines_in(tmp_path / "begun.txt", 2)
    for ended, turn in enumerate((0, 1) if ends == "before the other" else (1, 0)):
        (tmp_path / f"go-{turn}").touch()
        lines_in(tmp_path / "ended.txt", ended + 1)
        if turn == 1:
            end_well(other)
    end_well(stopped)
    left = {"early-0.txt"} if what == "resuming" else set()
    assert set(files(outputs.path(name))) == {"early-1.txt", "late-1.txt", "value.txt", "status.json"} | left
    assert (outputs.path(name) / "value.txt").read_text() == "1"
    assert [path.name for path in outputs.prefix.iterdir() if path.name.startswith("lingering")] == [name]
    assert outputs.attempt(name)["state"] == "running"  # the other's note, not one of a failure


# ---- a full disk


@pytest.fixture
def small_disk(tmp_path):
    mount = tmp_path / "small"
    mount.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", mount], capture_output=True, check=False)
    if made.returncode:
        pytest.skip("no right to mount a small disk")
    yield mount
    subprocess.run(["umount", "-l", mount], check=True)


def test_full_disk_fails_the_step_with_a_clear_error_and_nothing_half_written(small_disk):
    outputs = Outputs(small_disk)
    large, small = filling(megabytes=4), number(value=1)
    with pytest.raises(PipelineFailed, match=r"1 step failed.*\n.*filling.*No space left on device"):
        run([small, large], outputs, max_parallel=1)
    assert outputs.done(address(large)) is None
    assert value(outputs, small) == 1
    assert not list(small_disk.rglob(".*.tmp"))
    for status in small_disk.rglob("status.json"):
        assert read_json(status)["address"] == status.parent.name
    (outputs.partials(address(large))[0] / "large.bin").unlink()
    fitting = filling(megabytes=1)
    run([fitting], outputs)
    assert (outputs.path(address(fitting)) / "large.bin").stat().st_size == 1 << 20


def test_disk_that_is_full_from_the_start_is_a_clear_error_for_each_step(small_disk):
    outputs = Outputs(small_disk)
    run([number(value=1)], outputs)
    with (small_disk / "rest.bin").open("wb", buffering=0) as file:
        room = os.statvfs(small_disk)
        assert file.write(b"x" * (room.f_bavail * room.f_frsize)) == room.f_bavail * room.f_frsize
    assert run([number(value=1)], outputs).ran == []
    with pytest.raises(PipelineFailed, match=r"2 steps failed:\n.*No space left on device.*\n.*No space left"):
        run([number(value=2), number(value=3)], outputs)
    (small_disk / "rest.bin").unlink()
    run([number(value=2), number(value=3)], outputs)
    assert value(outputs, number(value=3)) == 3


def test_runner_whose_files_may_not_grow_commits_nothing_half(tmp_path):
    """Not root everywhere: a limit on the size of files does what a full disk does, at a byte of our choosing."""
    code = """
import resource, signal, sys
from pipeline_steps import filling, number
from palestra.pipeline.outputs import Outputs
from palestra.pipeline.runner import run
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
run([filling(megabytes=1), number(value=1)], Outputs(sys.argv[1]))
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], env=ENVIRONMENT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 1
    assert "File too large" in done.stderr
    outputs = Outputs(tmp_path)
    assert outputs.done(address(filling(megabytes=1))) is None
    assert value(outputs, number(value=1)) == 1
