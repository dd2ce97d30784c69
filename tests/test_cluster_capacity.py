"""What is asked against what there is, versions against versions, and from `--on` to a backend."""

import pickle
import socket
import sys

import pytest
from conftest import SHORT
from fanout_tasks import fail, value
from test_work_tasks import fail_awkwardly

import palestra
from palestra.cluster.capacity import Ask, NotEnough, local_resources, require
from palestra.cluster.host import Host, environment
from palestra.cluster.versions import OtherVersion, refuse_other, versions
from palestra.cluster.where import open_backend, refuse_more
from palestra.errors import MissingExtra, PalestraError, UsageError
from palestra.spec.load import load
from palestra.spec.model import plain
from palestra.work.fanout import Processes, Resources
from palestra.work.pool import Pool, TaskFailed, WorkerDied
from palestra.work.worker import pack

ASKED = [Ask("trainers", 2), Ask("generators", 4)]


def test_more_cores_than_there_are_is_refused_with_the_arithmetic():
    with pytest.raises(NotEnough) as refused:
        require(ASKED, Resources(2), Resources(2), "the cluster")
    assert str(refused.value).startswith(
        "needs 6 cores for 2 trainers × 1 + 4 generators × 1, the cluster has 2 (2 free)"
    )


@pytest.mark.parametrize(
    ("asked", "available", "said"),
    [
        ([Ask("trainers", 2, gpu=1)], Resources(8, ["0"]), "needs 2 GPUs for 2 trainers × 1, this machine has 1:"),
        (
            [Ask("a", 3, memory=2**31)],
            Resources(8, memory=2**32),
            "needs 6 GiB of memory for 3 a × 2, this",
        ),
        ([Ask("a", 4, gpu=0.5), Ask("b", 1, gpu=1)], Resources(8, ["0", "1"]), "needs 3 GPUs for 4 a × 0.5 + 1 b × 1"),
    ],
)
def test_what_is_short_is_named(asked, available, said):
    with pytest.raises(NotEnough) as refused:
        require(asked, available)
    assert str(refused.value).startswith(said)


def test_what_is_short_is_named_though_others_use_more_of_something_else():
    with pytest.raises(NotEnough, match="needs 9 cores"):
        require([Ask("a", 9, memory=1)], Resources(8, memory=100.0), Resources(8, memory=0.001))


def test_as_much_as_there_is_is_allowed():
    require(ASKED, Resources(6))
    require([Ask("a", 3, gpu=1 / 3)], Resources(3, ["0"]))
    with pytest.raises(NotEnough):  # and no more
        require([*ASKED, Ask("more", 1)], Resources(6))


def test_other_version_is_refused_in_one_sentence_that_names_both(monkeypatch):
    worker = versions()
    monkeypatch.setattr(palestra, "__version__", "9.9.9")
    with pytest.raises(OtherVersion, match=f"the worker on far has palestra {worker['palestra']}, the driver 9.9.9"):
        refuse_other(versions(), worker, "far")


def test_spec_that_the_worker_reads_differently_is_refused():
    data = plain(load(SHORT).spec)
    refuse_other(versions(data), versions(data), "far")
    with pytest.raises(OtherVersion, match="the spec's hash"):
        refuse_other(versions(data), versions({**data, "seed": 7}), "far")


def test_without_on_items_run_in_processes_of_this_machine():
    backend, available = open_backend(None, "test")
    assert isinstance(backend, Processes)
    assert available == local_resources()
    refuse_more(None, available, 10_000, 1)  # they share the cores


@pytest.mark.parametrize("on", ["rey", "ray://", "host", "http://host:1", ""])
def test_on_that_is_no_address_is_refused(on):
    with pytest.raises(UsageError, match="expected ray, HOST:PORT or ray://HOST:PORT"):
        open_backend(on, "test")


def test_ray_that_is_not_installed_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtra, match=r"palestra\[ray\]"):
        open_backend("ray", "test")


def test_cluster_that_does_not_answer_is_named(monkeypatch):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{closed.getsockname()[1]}"
        with pytest.raises(PalestraError, match=f"no Ray cluster answers at {address}"):
            open_backend(address, "test")


def test_errors_of_tasks_travel_whole():
    with Pool(1) as pool:
        raised = [pool.submit(fail, "no good").exception(), pool.submit(fail_awkwardly).exception()]
    failed, awkward = pickle.loads(pickle.dumps(raised))
    assert isinstance(failed, TaskFailed)
    assert str(failed) == str(raised[0])
    assert repr(failed.__cause__) == "ValueError('no good')"
    assert awkward.type_name == "Awkward"
    died = pickle.loads(pickle.dumps(WorkerDied("f", "is gone", -9)))
    assert (str(died), died.returncode) == ("The worker running f is gone.", -9)


# ---- the far side, without Ray


@pytest.fixture
def host(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # it changes the folder of its process
    made = Host(str(tmp_path), versions(), None, {"name": "test", "env": environment()})
    yield made
    made.close()


def test_host_returns_values_and_errors_pickled(host):
    succeeded, data = host.run(1, "value", pack((value, (4,), {})), None, None)
    assert (succeeded, pickle.loads(data)) == (True, 8)
    succeeded, data = host.run(2, "fail", pack((fail, ("no good",), {})), None, None)
    assert not succeeded
    assert "in fail" in str(pickle.loads(data))


@pytest.mark.parametrize("wrong", ["versions", "folder"])
def test_host_with_another_version_or_without_the_folder_runs_nothing(wrong, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder, ours = str(tmp_path / "gone") if wrong == "folder" else str(tmp_path), versions()
    refusing = Host(folder, ours | ({"torch": "9"} if wrong == "versions" else {}), None, {})
    succeeded, data = refusing.run(1, "value", pack((value, (4,), {})), None, None)
    assert not succeeded
    assert {"versions": "the driver 9", "folder": "storage that all machines share"}[wrong] in str(pickle.loads(data))
    refusing.close()


def test_workers_get_the_drivers_variables_but_those_of_the_machine(monkeypatch):
    for name in ("PALESTRA_DATA", "RAY_X", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "x")
    assert {"PATH", "RAY_X", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "PALESTRA_DATA"} & set(environment()) == {
        "PALESTRA_DATA"
    }
