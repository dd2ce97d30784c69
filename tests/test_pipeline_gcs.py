"""Prefixes on gs://: writes on the condition of a generation, against a fake server of the JSON API."""

import json
import os
import threading

import pytest
from fsspec.config import conf, set_conf_env
from gcs_server import gcs_server
from pipeline_runs import address
from pipeline_steps import number, total, value

from palestra.pipeline.outputs import open_outputs
from palestra.pipeline.runner import run
from palestra.runs.lease import Lease, RunBusy
from palestra.runs.store import FsspecStore

os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")  # it would ask Google what kind of bucket it is
pytest.importorskip("gcsfs", reason="the extra gcs is not installed")


@pytest.fixture
def gcs(monkeypatch, tmp_path):
    with gcs_server() as server:
        monkeypatch.setenv("FSSPEC_GS_TOKEN", "anon")
        monkeypatch.setenv("FSSPEC_GS_ENDPOINT_URL", server.url)
        monkeypatch.setenv("PALESTRA_CACHE", str(tmp_path / "cache"))
        before = dict(conf)
        set_conf_env(conf)  # workers read the variables when they start
        yield server
        conf.clear()
        conf.update(before)


def test_store_swaps_on_the_generation(gcs):
    store = FsspecStore("gs://lab/store")
    assert store.get("a/b.json") is None
    assert store.swap("a/b.json", None, b"1")
    assert not store.swap("a/b.json", None, b"2")
    assert store.swap("a/b.json", b"1", b"2")
    assert not store.swap("a/b.json", b"1", b"3")
    assert store.get("a/b.json") == b"2"
    store.put("c", b"x")
    assert store.listed() == ["a/b.json", "c"]
    assert store.swap("a/b.json", b"2", None)
    assert store.get("a/b.json") is None


def test_swap_from_three_threads_loses_no_update(gcs):
    def count(name: int) -> None:
        store = FsspecStore("gs://lab/store")
        for index in range(4):
            while True:
                current = store.get("n")
                number = 0 if current is None else json.loads(current)[0]
                if store.swap("n", current, json.dumps([number + 1, name, index]).encode()):
                    break

    threads = [threading.Thread(target=count, args=(name,)) for name in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert json.loads(FsspecStore("gs://lab/store").get("n"))[0] == 12


def test_lease_has_one_holder(gcs):
    first = Lease(FsspecStore("gs://lab/store"))
    first.acquire()
    with pytest.raises(RunBusy):
        Lease(FsspecStore("gs://lab/store")).acquire()
    first.release()
    Lease(FsspecStore("gs://lab/store")).acquire()


def test_pipeline_runs_is_listed_and_skipped_also_when_calls_fail(gcs):
    gcs.fail_every = 10
    one, two = number(value=1), number(value=2)
    both = total(parts=[one, two])
    outputs = open_outputs("gs://lab/out")
    assert len(run([both], outputs).ran) == 3
    assert value(outputs, both) == 3
    assert {entry.address for entry in outputs.stored()} == {address(one), address(two), address(both)}
    assert run([both], open_outputs("gs://lab/out")).ran == []
