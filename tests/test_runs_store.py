import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import psutil
import pytest

from palestra.errors import PalestraError
from palestra.runs.lease import Lease, LeaseLost, Owner, RunBusy
from palestra.runs.store import LocalStore, read_json, write_json

SPAWN = multiprocessing.get_context("spawn")


def test_store_get_put_round_trip(tmp_path):
    store = LocalStore(tmp_path)
    assert store.get("a/b.json") is None
    store.put("a/b.json", b"1")
    store.put("a/c.json", b"2")
    store.put("d", b"3")
    store.swap("d", b"3", b"4")
    assert store.get("a/b.json") == b"1"


@pytest.mark.parametrize("key", ["", "/etc/x", "../x", "a/../../x", ".hidden"])
def test_store_key_outside_the_root_is_refused(tmp_path, key):
    with pytest.raises(ValueError, match="not a store key"):
        LocalStore(tmp_path).put(key, b"")


def test_swap_replaces_only_the_expected_value(tmp_path):
    store = LocalStore(tmp_path)
    assert not store.swap("k", b"x", b"y")
    assert store.swap("k", None, b"1")
    assert not store.swap("k", None, b"2")
    assert not store.swap("k", b"other", b"2")
    assert store.swap("k", b"1", b"2")
    assert store.get("k") == b"2"
    assert not store.swap("k", b"1", None)
    assert store.swap("k", b"2", None)
    assert store.get("k") is None


def count_up(root, times):
    store = LocalStore(root)
    for _ in range(times):
        while True:
            current = store.get("n")
            if store.swap("n", current, str(int(current or b"0") + 1).encode()):
                break


def test_swap_from_four_processes_loses_no_update(tmp_path):
    processes = [SPAWN.Process(target=count_up, args=(tmp_path, 25)) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert LocalStore(tmp_path).get("n") == b"100"


def test_write_json_that_fails_leaves_the_old_file_and_no_rest(tmp_path):
    path = tmp_path / "x.json"
    write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    assert read_json(path) == {"a": 1}
    assert os.listdir(tmp_path) == ["x.json"]


def test_read_json_of_a_broken_file_names_it(tmp_path):
    (tmp_path / "x.json").write_text("{")
    with pytest.raises(PalestraError, match=r"x\.json is not valid JSON"):
        read_json(tmp_path / "x.json")


# ---- the lease


def dead_owner() -> Owner:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    owner = Owner.here(process.pid)
    process.communicate(b"\n")
    return owner


def put_lease(store: LocalStore, owner: Owner, heartbeat: float) -> None:
    store.put("lease.json", json.dumps({**asdict(owner), "token": "t", "heartbeat": heartbeat}).encode())


def taken(folder: Path) -> bool:
    """Whether a lease is taken, and written as its taker's."""
    lease = Lease(LocalStore(folder))
    lease.acquire()
    return json.loads((folder / "lease.json").read_bytes())["token"] == lease.token


def test_lease_held_by_a_living_process_refuses_naming_it(tmp_path):
    first = Lease(LocalStore(tmp_path))
    first.acquire()
    with pytest.raises(RunBusy, match=rf"process {os.getpid()} on .*kill {os.getpid()}") as caught:
        Lease(LocalStore(tmp_path)).acquire()
    assert caught.value.exit_code == 2
    first.release()
    Lease(LocalStore(tmp_path)).acquire()


def test_lease_of_a_dead_process_here_is_taken_at_once(tmp_path):
    put_lease(LocalStore(tmp_path), dead_owner(), time.time())
    assert taken(tmp_path)


def test_lease_of_a_reused_pid_is_taken_at_once(tmp_path):
    put_lease(LocalStore(tmp_path), replace(Owner.here(), born=1e9), time.time())
    assert taken(tmp_path)


def test_lease_outlives_a_clock_that_is_set(tmp_path, monkeypatch):
    first = Lease(LocalStore(tmp_path))
    first.acquire()
    boot = psutil.boot_time()
    create_time = psutil.Process.create_time
    monkeypatch.setattr(psutil, "boot_time", lambda: boot + 3600)
    monkeypatch.setattr(psutil.Process, "create_time", lambda self: create_time(self) + 3600)
    with pytest.raises(RunBusy):
        Lease(LocalStore(tmp_path)).acquire()


def test_lease_of_a_zombie_is_taken_at_once(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    owner = Owner.here(process.pid)
    process.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # dead, but not reaped
    try:
        put_lease(LocalStore(tmp_path), owner, time.time())
        assert taken(tmp_path)
    finally:
        process.communicate()


def test_lease_of_another_machine_is_taken_only_when_its_heartbeat_is_old(tmp_path):
    other = replace(dead_owner(), host="elsewhere", machine="elsewhere")
    put_lease(LocalStore(tmp_path), other, time.time() - 5)
    with pytest.raises(RunBusy, match=f"process {other.pid} on elsewhere, last heartbeat 5 s ago"):
        Lease(LocalStore(tmp_path), ttl=30).acquire()
    Lease(LocalStore(tmp_path), ttl=4).acquire()


def test_lease_file_that_cannot_be_read_is_taken(tmp_path):
    LocalStore(tmp_path).put("lease.json", b"")
    assert taken(tmp_path)


def test_renew_after_a_takeover_raises_lease_lost_and_release_leaves_it(tmp_path):
    first = Lease(LocalStore(tmp_path))
    first.acquire()
    first.renew()
    other = replace(Owner.here(), host="elsewhere", machine="elsewhere")
    put_lease(LocalStore(tmp_path), other, time.time())  # a machine that had heard nothing of us for too long
    with pytest.raises(LeaseLost, match=f"belongs to process {other.pid} on elsewhere"):
        first.renew()
    first.release()
    assert json.loads(LocalStore(tmp_path).get("lease.json"))["host"] == "elsewhere"


def test_lease_of_a_silent_process_of_this_machine_is_not_taken(tmp_path):
    put_lease(LocalStore(tmp_path), Owner.here(), time.time() - 3600)
    with pytest.raises(RunBusy):
        Lease(LocalStore(tmp_path)).acquire()


def test_renew_after_one_whose_last_fsync_failed_goes_on(tmp_path, monkeypatch):
    lease = Lease(LocalStore(tmp_path))
    lease.acquire()
    with monkeypatch.context() as broken:
        broken.setattr("palestra.runs.store.sync_folder", lambda path: (_ for _ in ()).throw(OSError(5, "I/O error")))
        with pytest.raises(OSError, match="I/O"):
            lease.renew()
    lease.renew()


def test_swap_while_a_forked_child_lives_does_not_wait_for_it(tmp_path):
    store = LocalStore(tmp_path)
    with store._locked("a"):
        child = os.fork()
        if child == 0:
            signal.pause()
            os._exit(0)
    try:
        assert store.swap("a", None, b"1")
        assert os.waitpid(child, os.WNOHANG) == (0, 0)  # it lives on
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def race(root, barrier, results):
    lease = Lease(LocalStore(root))
    barrier.wait()
    try:
        lease.acquire()
        results.put("won")
        time.sleep(0.5)  # alive until all others have been refused
    except RunBusy:
        results.put("refused")


def test_eight_processes_racing_for_a_dead_owners_lease_have_one_winner(tmp_path):
    put_lease(LocalStore(tmp_path), dead_owner(), time.time())
    barrier, results = SPAWN.Barrier(8), SPAWN.Queue()
    processes = [SPAWN.Process(target=race, args=(tmp_path, barrier, results)) for _ in range(8)]
    for process in processes:
        process.start()
    outcomes = sorted(results.get(timeout=60) for _ in processes)
    for process in processes:
        process.join()
    assert outcomes == ["refused"] * 7 + ["won"]
