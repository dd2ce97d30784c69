"""Ray's bad days, for real: processes killed and stopped, a full object store, other versions, too little room."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import fanout_tasks
import psutil
import pytest
import yaml
from conftest import Scratch, last_step, wait_until
from posttrain_lab import Lab, session_of
from search_specs import BASE, SEARCH
from test_bench_table import write_spec
from test_pipeline_cli import GRAPH, STEPS
from test_work_fanout import by_name, of
from test_work_pool import LINUX, gone
from test_work_tasks import hang_with_child, pids_from

from palestra.cluster.capacity import Ask, NotEnough
from palestra.cluster.ray import RayBackend, placed, resources_of
from palestra.cluster.versions import OtherVersion
from palestra.work import fanout
from palestra.work.fanout import Resources, WorkOutcome, run
from palestra.work.pool import WorkerDied

pytestmark = [pytest.mark.slow, LINUX]


@pytest.fixture(autouse=True)
def _ray(one_ray: str) -> None: ...


def hang_first(pids: Path) -> str:
    """Hang with a child the first time; the second time, return."""
    if pids.exists():
        return "again"
    hang_with_child(pids)
    return "never"


def both(source: Path, kill: Callable[[list[int]], Any], **how: Any) -> WorkOutcome:
    """The outcome of `hang_first`, once `kill` was called with the worker, its child and its host."""

    def progress(states: object) -> None:
        if source.exists() and len(pids := source.read_text().split()) == 2 and not killed:
            killed.append(True)
            kill([*map(int, pids), psutil.Process(int(pids[0])).ppid()])

    killed: list[bool] = []
    backend = RayBackend("test", heartbeat_timeout=how.pop("silence", 60))
    (outcome,) = run([of("a", hang_first, source, **how)], Resources(1), backend, progress=progress)
    return outcome


def test_host_that_is_killed_takes_its_worker_along_and_the_item_is_tried_again(tmp_path, monkeypatch):
    monkeypatch.setattr(fanout, "RETRY_SECONDS", 0.01)
    outcome = both(tmp_path / "pids", lambda pids: os.kill(pids[2], signal.SIGKILL), retries=1)
    assert (outcome.value, outcome.attempts) == ("again", 2)
    assert all(gone(pid) for pid in pids_from(tmp_path / "pids", 2))


def test_host_that_is_killed_is_named_in_one_paragraph(tmp_path):
    outcome = both(tmp_path / "pids", lambda pids: os.kill(pids[2], signal.SIGKILL))
    assert isinstance(outcome.error, WorkerDied)
    assert "The worker running hang_first was lost with its host" in str(outcome.error)
    assert "\n" not in str(outcome.error)


@pytest.mark.parametrize("which", [0, 2], ids=["worker", "host"])
def test_worker_or_host_that_is_stopped_is_killed_for_want_of_a_sign_of_life(which, tmp_path, monkeypatch):
    monkeypatch.setattr("palestra.cluster.ray.BEAT_SECONDS", 0.5)
    outcome = both(tmp_path / "pids", lambda pids: os.kill(pids[which], signal.SIGSTOP), silence=3)
    assert isinstance(outcome.error, WorkerDied)
    assert "gave no sign of life for 3 s and was killed" in str(outcome.error)
    assert all(gone(pid, within=20) for pid in pids_from(tmp_path / "pids", 2))  # Ray gives a host 5 s to end itself


def test_worker_of_another_version_is_refused(monkeypatch):
    monkeypatch.setattr(metadata, "version", lambda name: "9.9.9")
    (outcome,) = run([of("a", fanout_tasks.value, 1)], Resources(1), RayBackend("test"))
    assert isinstance(outcome.error, OtherVersion)
    assert re.search(r"has (palestra|torch) \S+, the driver 9\.9\.9: install the same on both", str(outcome.error))


def test_workers_are_reused_by_items_with_the_same_needs():
    items = [of(str(index), os.getpid, cores=cores) for index, cores in enumerate([1, 1, 2, 2, 1])]
    outcomes = by_name(run(items, Resources(1), RayBackend("test")))
    pids = [outcomes[str(index)].value for index in range(5)]
    assert pids[0] == pids[1] != pids[2] == pids[3] != pids[4]


def test_results_larger_than_the_object_store_all_arrive(one_ray):
    items = [of(str(index), bytes, 60 * 2**20) for index in range(4)]  # of 100 MiB
    outcomes = by_name(run(items, Resources(4), RayBackend("test")))
    assert {outcome.error for outcome in outcomes.values()} == {None}
    assert {len(outcome.value) for outcome in outcomes.values()} == {60 * 2**20}


# ---- placement


def test_placement_group_that_fits_has_a_bundle_for_each():
    import ray

    group = placed([Ask("trainers", 1, cores=2), Ask("generators", 2, gpu=0.5)])
    assert group.bundle_specs == [{"CPU": 2.0}, {"CPU": 1.0, "GPU": 0.5}, {"CPU": 1.0, "GPU": 0.5}]
    ray.util.remove_placement_group(group)


def test_placement_group_that_asks_for_more_than_there_is_is_refused_at_once():
    began = time.monotonic()
    with pytest.raises(NotEnough, match=r"needs 9 cores for 1 trainers × 1 \+ 8 generators × 1, the cluster has 8 \("):
        placed([Ask("trainers", 1), Ask("generators", 8)])
    assert time.monotonic() - began < 10


def test_placement_group_that_others_leave_no_room_for_is_refused_in_time():
    import ray

    others = placed([Ask("others", 1, cores=6)])
    began = time.monotonic()
    with pytest.raises(NotEnough, match=r"needs 4 cores for 2 generators × 2, the cluster has 8 \(2 free\)"):
        placed([Ask("generators", 2, cores=2)], seconds=2)
    assert time.monotonic() - began < 10
    ray.util.remove_placement_group(others)
    ray.util.remove_placement_group(placed([Ask("generators", 2, cores=2)]))  # nothing was left behind


def test_resources_are_those_of_the_cluster():
    assert (resources_of().cores, list(resources_of().gpus)) == (8, ["0", "1"])
    assert resources_of().memory > 0


# ---- a process that starts Ray for itself

SCRIPT = """
import sys
from pathlib import Path
from palestra.cluster.ray import RayBackend, connect
from palestra.work.fanout import Resources, WorkItem, run
from test_work_tasks import hang_with_child
connect("local", temp_dir="/tmp/palestra-ray-kill")
items = [WorkItem(str(index), hang_with_child, (Path(sys.argv[1]),)) for index in range(2)]
list(run(items, Resources(2), RayBackend("test")))
"""


def started(pids: Path) -> tuple[subprocess.Popen, list[psutil.Process]]:
    """A driver with its own Ray and two items, and all processes below it."""
    driver = subprocess.Popen([sys.executable, "-c", SCRIPT, pids], cwd=Path(__file__).parent, start_new_session=True)
    pids_from(pids, 4, within=120)
    return driver, psutil.Process(driver.pid).children(recursive=True)


def test_driver_that_is_killed_leaves_nothing_of_ours_or_of_rays(tmp_path):
    driver, below = started(tmp_path / "pids")
    names = " ".join(process.name() for process in below)
    assert "raylet" in names
    assert "gcs_server" in names
    driver.kill()
    driver.wait()
    until = time.monotonic() + 10
    # Ray's own agents, which hold nothing, wait a minute for the cluster to come back.
    below = [process for process in below if "Agent" not in process.name()]
    left = [process for process in below if not gone(process.pid, max(0.1, until - time.monotonic()))]
    assert left == []


# ---- the commands


def test_seeds_of_a_trial_and_points_of_a_sweep_run_on_ray(scratch: Scratch, one_ray):
    token = {"RAY_AUTH_MODE": "token"}
    spec = scratch.spec(max_session=2, train={"frames": 512})
    assert (done := scratch("train", spec, "--on", one_ray, "--quiet", **token)).returncode == 0, done.stderr
    assert {scratch.status(seed=seed)["state"] for seed in (0, 1)} == {"done"}
    assert "ray" not in done.stderr.lower()
    grid = scratch.spec("grid", train={"frames": 512}, sweep={"axes": {"seed": [0, 1]}})
    done = scratch("sweep", grid, "--group", "g", "--parallel", "2", "--on", one_ray, **token)
    assert done.returncode == 0, done.stderr
    assert len(list(scratch.path.glob("runs/g/*/trial.json"))) == 2
    more = scratch("sweep", grid, "--group", "h", "--parallel", "99", "--on", one_ray, **token)
    assert more.returncode == 2
    assert "needs 99 cores for 99 runs at once × 1, the cluster has 8" in more.stderr


def test_ctrl_c_saves_on_ray_as_here(scratch: Scratch, one_ray):
    spec = scratch.spec(max_session=2, train={"frames": 10**7})
    process = scratch.start("train", spec, "--on", one_ray, "--quiet", RAY_AUTH_MODE="token")
    wait_until(lambda: len(list(scratch.path.glob("runs/short/*/sessions/*/metrics.jsonl"))) == 2, process)
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    assert "stopped with everything saved" in err
    assert {scratch.status(seed=seed)["state"] for seed in (0, 1)} == {"interrupted"}


def test_search_bench_and_pipeline_run_on_ray(scratch: Scratch, one_ray):
    def command(*arguments: str) -> str:
        done = scratch(*arguments, "--on", one_ray, RAY_AUTH_MODE="token")
        assert done.returncode == 0, done.stderr
        return done.stdout

    search = {**SEARCH, "trials": 2, "parallel": 2, "pruner": None}
    command("search", scratch.spec("found", BASE, train={"frames": 256}, search=search), "--quiet")
    assert len(list(scratch.path.glob("runs/found/*/trials/*/trial.json"))) == 2
    write_spec(scratch.path / "specs")
    bench = ("bench", "classic", "--only", "ppo_c", "--specs", "specs", "--seeds", "0,1", "--out", "page.md")
    assert command(*bench).count(": done (") == 2
    (scratch.path / "own_steps.py").write_text(STEPS)
    (scratch.path / "graph.yaml").write_text(yaml.safe_dump(GRAPH))
    command("pipeline", "run", "graph.yaml", "--max-parallel", "2")
    assert sorted((scratch.path / "journal.txt").read_text().split()) == ["beside", "both", "left", "right"]


# ---- a run whose processes Ray places


def test_run_reserves_its_places_together_and_puts_nothing_into_the_object_store(tmp_path, one_ray):
    import ray
    from ray._private import internal_api

    lab, groups = Lab(tmp_path), []
    stop = threading.Event()

    def watch() -> None:
        while not stop.wait(0.2):
            groups.extend(g["bundles"] for g in ray.util.placement_group_table().values() if g["state"] == "CREATED")

    thread = threading.Thread(target=watch)
    thread.start()
    run = lab.run(cluster={"generators": 2, "verifiers": 1, "address": one_ray})
    stop.set()
    thread.join()
    assert {0: {"CPU": 0.25}, 1: {"CPU": 0.25}, 2: {"CPU": 0.25}} in groups
    assert last_step(session_of(run)) == 5
    assert "Plasma memory usage 0 MiB, 0 objects" in internal_api.memory_summary(one_ray, stats_only=True)
    assert not [g for g in ray.util.placement_group_table().values() if g["state"] != "REMOVED"]


def test_backend_places_what_was_asked_for_in_its_group_and_more_beside_it():
    import ray

    def progress(states: object) -> None:
        free.append(ray.available_resources()["CPU"])

    free: list[float] = []
    backend = RayBackend("test", cores=0.25, asked=[Ask("workers", 1, cores=0.25)])
    (group,) = (name for name, about in ray.util.placement_group_table().items() if about["state"] == "CREATED")
    outcomes = by_name(run([of(name, time.sleep, 3) for name in "ab"], Resources(2), backend, progress=progress))
    assert {outcome.error for outcome in outcomes.values()} == {None}
    assert min(free) == 8 - 0.25 - 0.25  # the place of the group, in which one is, and the other's
    assert ray.util.placement_group_table()[group]["state"] == "REMOVED"


# ---- a cluster that others have started

TOKEN = "5d2d4f6c0a7b4f0e9c3a1b8e7f6d5c4b"


@contextlib.contextmanager
def another(folder: Path, **environment: str) -> Iterator[str]:
    """The address of another cluster."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [Path(sys.executable).with_name("ray"), "start", "--head", "--block", f"--port={port}", "--num-cpus=4"]
    command += ["--include-dashboard=false", "--temp-dir=/tmp/palestra-ray-guard"]
    env, log = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", **environment}, folder / "ray.txt"
    with log.open("w") as out:
        head = subprocess.Popen([*command, "--node-ip-address=127.0.0.1"], env=env, stdout=out, stderr=out)
    try:
        wait_until(lambda: "Ray runtime started" in log.read_text(), head, 120)
        yield f"127.0.0.1:{port}"
    finally:
        head.terminate()
        head.wait(60)


def test_token_of_a_cluster_is_read_from_the_variable_that_the_spec_names(scratch: Scratch):
    with another(scratch.path, RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=TOKEN) as address:
        cluster = {"environments": 2, "address": address, "token_env": "MY_TOKEN"}
        spec = scratch.spec(env={"vectorize": "async", "num_envs": 2}, train={"frames": 256}, cluster=cluster)
        assert "cluster.token_env: MY_TOKEN is not set" in scratch("train", spec, "--quiet").stderr
        wrong = scratch("train", spec, "--quiet", MY_TOKEN=TOKEN[::-1])
        assert wrong.returncode == 1
        assert "does not answer" in wrong.stderr
        assert TOKEN not in wrong.stderr
        done = scratch("train", spec, "--quiet", MY_TOKEN=TOKEN)
        assert done.returncode == 0, done.stderr
    assert scratch.status()["state"] == "done"
