"""Post-training with generators, verifiers and trainers in processes of their own, on good days and bad ones."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from conftest import last_step, wait_until
from posttrain_lab import TASK, Lab, rollouts_of, rows_of

import palestra
from palestra.cluster.placement import command, members_of
from palestra.errors import PalestraError, UsageError
from palestra.runs.run import Run, open_run
from palestra.tasks.task import Status
from palestra.track.trace import FILES, read_traces, trace_file

BATCH = 4
APART: dict[str, Any] = {"generators": 2, "verifiers": 1, "silence_seconds": 4}


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return Lab(tmp_path_factory.mktemp("cluster"))


def without_fleet(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in row.items() if not name.startswith("fleet/")} for row in rows]


def test_generator_of_its_own_gives_the_run_of_one_process_bit_for_bit(lab: Lab) -> None:
    alone = lab.run(name="alone", tasks__eval=[{"task": TASK}])
    apart = lab.run(name="apart", tasks__eval=[{"task": TASK}], cluster={"generators": 1})
    assert [json.dumps(row) for row in without_fleet(rows_of(apart))] == [json.dumps(row) for row in rows_of(alone)]
    session = apart.sessions[0].path
    assert not (session / "cluster.json").exists()
    assert not [p for p in psutil.process_iter(["cmdline"]) if str(session) in " ".join(p.info["cmdline"] or ())]


def test_each_process_has_a_trace_of_its_role_and_together_they_show_who_did_what(lab: Lab) -> None:
    cluster = {"trainers": 2, "generators": 2, "verifiers": 1}
    session = lab.run(name="traced", train__steps=3, rollout__staleness=1, cluster=cluster).sessions[0].path
    roles = ["generator/0", "generator/1", "trainer/1", "verifier/0"]
    files = {path.name: path for path in session.glob(FILES)}
    assert files.keys() == {*map(trace_file, roles), "trace.json"}
    for role in roles:
        assert {event.track for event in read_traces(files[trace_file(role)])} - {"sync"} == {role}
    events = read_traces(*files.values())
    samples = [event for event in events if event.name == "sample"]
    trained = {event.args["group"] for event in samples} - {None}  # None: the self-test
    assert trained >= set(range(3 * BATCH))
    assert all(event.args["tokens"] > 0 for event in samples)
    for name in ("fetch", "install"):
        loaded = {(event.args["by"], event.args["version"]) for event in events if event.name == name}
        assert loaded == {(role, version) for role in roles[:2] for version in range(4)}
        assert {event.track for event in events if event.name == name} == {"sync"}
    verdicts = [event for event in events if event.name == "verify"]
    assert {event.track for event in verdicts} == {"verifier/0"}
    assert {event.args["status"] for event in verdicts} <= set(Status)
    assert len(verdicts) == len([event for event in samples if event.args["group"] is not None]) * 4
    ranks = [[e.args["step"] for e in events if (e.name, e.track) == ("train", f"trainer/{rank}")] for rank in range(2)]
    assert ranks == [[1, 2, 3], [1, 2, 3]]


def test_one_process_has_tracks_of_its_generator_and_of_verifiers_that_take_time(lab: Lab) -> None:
    session = lab.run(name="own", train__steps=2, tasks__train=[{"task": TASK, "args": {"pause": 0.01}}]).sessions[0]
    events = read_traces(*session.path.glob(FILES))
    samples = [event for event in events if event.name == "sample" and event.args["group"] is not None]
    assert {event.track for event in samples} == {"generator/0"}
    assert [(e.args["group"], e.args["version"]) for e in samples] == [(n, n // BATCH) for n in range(2 * BATCH)]
    assert {event.track for event in events if event.name == "verify"} == {"verifier/0"}


@pytest.mark.slow
@pytest.mark.parametrize("address", ["local", "auto"])
def test_two_of_everything_learn_what_one_process_learns(lab: Lab, address: str) -> None:
    alone = lab.run(name="one", tasks__eval=[{"task": TASK}])
    cluster = {"trainers": 2, "generators": 2, "verifiers": 2, "address": address}
    apart = lab.run(name="two", tasks__eval=[{"task": TASK}], cluster=cluster)
    for mine, theirs in zip(rows_of(apart), rows_of(alone), strict=True):
        names = ("step", "tokens", "reward", "eval/accuracy", "loss")
        assert {n: mine[n] for n in names if n in mine} == pytest.approx(
            {n: theirs[n] for n in names if n in theirs}, rel=1e-4, abs=1e-6
        )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cluster": {"trainers": 2}, "devices": 3}, r"cluster\.trainers: expected `devices` = 3, or null"),
        ({"cluster": {"generators": -1}}, r"cluster\.generators"),
        ({"cluster": {"temp_dir": "/tmp"}}, r"cluster\.temp_dir: expected null, because `address: local`"),
    ],
)
def test_clusters_that_cannot_be_are_refused_by_name(lab: Lab, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(PalestraError, match=message):
        palestra.check(lab.spec(**changes))


def test_run_without_a_cluster_takes_no_commands(lab: Lab) -> None:
    session = lab.run(name="plain", train__steps=1).sessions[0].path
    with pytest.raises(UsageError, match="has no cluster"):
        command(session, do="add", role="generator")


class Running:
    """A run in a process of its own."""

    def __init__(self, lab: Lab, name: str, restarts: int = 0, resume: bool = False, **changes: Any):
        self.lab, self.name = lab, name
        spec = lab.path / f"{name}.json"
        spec.write_text(json.dumps(lab.spec(name=name, **changes)))
        what = ["--resume", name] if resume else [str(spec)]
        order = [sys.executable, "-m", "palestra", "train", *what, "--runs", str(lab.root), "-q"]
        order += ["--restarts", str(restarts)] if restarts else []
        self.mark = uuid.uuid4().hex  # in the environment of all its processes, wherever they are
        env = {**os.environ, "PYTHONPATH": str(Path(__file__).parent), "OMP_NUM_THREADS": "1", "TEST_MARK": self.mark}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        self.process = subprocess.Popen(order, env=env, text=True, start_new_session=True, **pipes)

    @property
    def session(self) -> Path:
        return next((self.lab.root / self.name).glob("*/sessions/0"))

    def wait(self, condition: Callable[[], Any], seconds: float = 120) -> Any:
        def guarded() -> Any:
            try:
                return condition()
            except (OSError, StopIteration, ValueError, PalestraError):
                return None

        return wait_until(guarded, self.process, seconds, 0.02)

    def reach(self, step: int) -> int:
        return self.wait(lambda: last_step(self.session) >= step and last_step(self.session))

    def members(self, role: str = "generator", state: str = "ready") -> dict[str, int]:
        return {one["name"]: one["pid"] for one in members_of(self.session)[role] if one["state"] == state}

    def ended(self) -> Run:
        out, err = self.process.communicate(timeout=280)
        assert self.process.returncode == 0, out + err
        return open_run(self.name, self.lab.root)


def assert_every_group_once(run: Run, steps: int, staleness: int) -> None:
    records = [record for record in rollouts_of(run) if record.fate == "trained"]
    assert [record.step for record in records] == [step for step in range(1, steps + 1) for _ in range(BATCH)]
    numbers = [record.group.number for record in records]
    assert len(set(numbers)) == len(numbers), "a group was trained twice"
    last = rows_of(run)[-1]
    lost = set(range(max(numbers) + 1)) - set(numbers)
    assert len(lost) <= (staleness + 1) * BATCH, f"groups were lost: {sorted(lost)}"
    assert last["fate/failed"] == last["fate/timeout"] == 0
    assert max(row.get("staleness_max", 0) for row in rows_of(run)) <= staleness


BACKENDS = pytest.mark.parametrize("address", ["local", "auto"])


@pytest.mark.slow
@BACKENDS
def test_generators_and_verifiers_that_die_stop_join_and_leave_cost_nothing(lab: Lab, address: str) -> None:
    steps, cluster = 150, {**APART, "address": address}
    run = Running(
        lab, f"bad_{address}", train__steps=steps, rollout__staleness=2, rollout__max_new_tokens=24, cluster=cluster,
        tasks__train=[{"task": TASK, "args": {"pause": 0.05}}],
    )  # fmt: skip
    run.reach(3)
    log = run.session / "log.txt"
    first = run.wait(lambda: len(run.members()) == 2 and run.members())

    os.kill(first["generator/0"], signal.SIGKILL)
    began, at = time.monotonic(), last_step(run.session)
    run.wait(lambda: "generator/0 ended" in log.read_text())
    run.reach(at + 3)  # the other one goes on
    assert time.monotonic() - began < 10
    second = run.wait(lambda: len(run.members()) == 2 and run.members())
    assert second["generator/0"] != first["generator/0"]

    os.kill(second["generator/1"], signal.SIGSTOP)
    began = time.monotonic()
    run.wait(lambda: "has not answered for 4 s" in log.read_text())
    assert time.monotonic() - began < 15
    if psutil.pid_exists(second["generator/1"]):  # by now it is killed, so nothing of it comes late
        os.kill(second["generator/1"], signal.SIGCONT)
    run.wait(lambda: len(run.members()) == 2)

    (verifier,) = run.members("verifier").values()
    os.kill(verifier, signal.SIGKILL)
    run.wait(lambda: run.members("verifier") and run.members("verifier")["verifier/0"] != verifier)

    assert command(run.session, do="add", role="generator") == ["generator/2"]
    run.wait(lambda: "generator/2" in run.members())
    assert command(run.session, do="remove", role="generator", name="generator/0") == ["generator/0"]
    run.wait(lambda: "generator/0 has left" in log.read_text())
    run.wait(lambda: sorted(run.members()) == ["generator/1", "generator/2"])
    assert last_step(run.session) < steps, "it ended before it could be hurt: more steps are needed"

    done = run.ended()
    assert_every_group_once(done, steps, staleness=2)
    last = rows_of(done)[-1]
    assert (last["fleet/generators"], last["fleet/lost"]) == (2, 2)


@pytest.mark.slow
@BACKENDS
def test_driver_that_is_killed_leaves_no_process_and_resumes(lab: Lab, address: str) -> None:
    cluster = {**APART, "address": address}
    changes: dict[str, Any] = {"train__steps": 30, "cluster": cluster, "every__checkpoint": "4 steps"}
    whole = lab.run(name="unhurt", **(changes | {"cluster": {}}))
    run = Running(lab, f"driver_{address}", **changes)
    run.reach(9)
    assert len(processes(run.mark)) > 3
    run.process.kill()
    run.process.wait()
    assert_none_left(run)
    resumed = Running(lab, f"driver_{address}", resume=True).ended()
    assert [json.dumps(row) for row in without_fleet(rows_of(resumed))] == [json.dumps(row) for row in rows_of(whole)]


@pytest.mark.slow
@BACKENDS
def test_trainer_rank_that_dies_ends_the_attempt_and_the_next_one_goes_on(lab: Lab, address: str) -> None:
    steps, cluster = 40, {"trainers": 2, "generators": 1, "silence_seconds": 4, "address": address}
    run = Running(lab, f"rank_{address}", restarts=2, train__steps=steps, every__checkpoint="4 steps", cluster=cluster)
    run.reach(9)
    ranks = ranks_of(run.mark)
    assert len(ranks) == 2
    os.kill(ranks[-1], signal.SIGKILL)
    run.wait(lambda: ranks_of(run.mark) and not set(ranks) & set(ranks_of(run.mark)))
    done = run.ended()
    assert_every_group_once(done, steps, staleness=0)


@pytest.mark.slow
@BACKENDS
def test_ctrl_c_saves_ends_all_processes_and_the_resumed_run_is_the_uninterrupted_one(lab: Lab, address: str) -> None:
    changes: dict[str, Any] = {"train__steps": 30, "every__checkpoint": "10 steps"}
    whole = lab.run(name="whole", **changes)
    run = Running(lab, f"ctrl_c_{address}", **changes, cluster={**APART, "address": address})
    run.reach(5)
    os.killpg(run.process.pid, signal.SIGINT)  # as a terminal does
    _, err = run.process.communicate(timeout=120)
    assert run.process.returncode == 130, err
    assert "with everything saved" in err
    assert "Traceback" not in err
    assert_none_left(run)
    resumed = Running(lab, f"ctrl_c_{address}", resume=True).ended()
    assert [json.dumps(row) for row in without_fleet(rows_of(resumed))] == [json.dumps(row) for row in rows_of(whole)]


def assert_none_left(run: Running) -> None:
    deadline = time.monotonic() + 15
    while left := processes(run.mark):
        assert time.monotonic() < deadline, f"processes have outlived the run: {sorted(left)}"
        time.sleep(0.1)


def processes(mark: str) -> dict[int, dict[str, str]]:
    """The environments of the processes of a run."""
    found = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("TEST_MARK") == mark and process.status() != psutil.STATUS_ZOMBIE:
                found[process.pid] = process.environ()
    return found


def ranks_of(mark: str) -> list[int]:
    """The processes that train: what they start has their number in its environment from the start."""
    environments = processes(mark).items()
    return sorted(pid for pid, env in environments if env.get("WORLD_SIZE") == "2" and "RANK" not in env)
