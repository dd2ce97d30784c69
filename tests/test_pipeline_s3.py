import json
import threading
import time

import pytest
from conftest import SHORT
from pipeline_runs import address, end_well, files, lines_in, start, take_over
from pipeline_steps import counting, faulty, lingering, noted, number, telling, total, value
from s3_server import s3_server

from palestra.errors import PalestraError, UsageError
from palestra.pipeline.data import filter as filter_step
from palestra.pipeline.form import spec_step
from palestra.pipeline.graph import Graph, plan
from palestra.pipeline.outputs import open_outputs
from palestra.pipeline.report import write_report
from palestra.pipeline.runner import PipelineFailed, run
from palestra.runs import store as remote_store
from palestra.runs.lease import Lease, RunBusy
from palestra.runs.store import FsspecStore

s3fs = pytest.importorskip("s3fs", reason="the extra s3 is not installed")


@pytest.fixture(scope="module")
def server():
    with s3_server() as server:
        yield server


@pytest.fixture
def s3(server, monkeypatch, tmp_path):
    for name, setting in server.environment.items():
        monkeypatch.setenv(name, setting)
    monkeypatch.setenv("PALESTRA_CACHE", str(tmp_path / "cache"))
    server.fail_every = 0
    bucket = f"bucket-{time.time_ns()}"
    files = s3fs.S3FileSystem(skip_instance_cache=True, use_listings_cache=False)
    files.mkdir(bucket)
    server.bucket, server.files = bucket, files
    yield server
    server.fail_every = 0


def store_of(s3) -> FsspecStore:
    return FsspecStore(f"s3://{s3.bucket}/store")


# ---- the store


def test_store_get_put_swap_as_the_local_one(s3):
    store = store_of(s3)
    assert store.get("a/b.json") is None
    store.put("a/b.json", b"1")
    store.put("a/c.json", b"2")
    store.put("d", b"3")
    assert store.get("a/b.json") == b"1"
    assert not store.swap("k", b"x", b"y")
    assert store.swap("k", None, b"1")
    assert not store.swap("k", None, b"2")
    assert not store.swap("k", b"other", b"2")
    assert store.swap("k", b"1", b"2")
    assert not store.swap("k", b"1", None)
    assert store.swap("k", b"2", None)
    assert store.get("k") is None
    assert store.swap("k", None, b"3")
    assert store.get("k") == b"3"
    assert store.swap("never", None, None)
    with pytest.raises(ValueError, match="not a store key"):
        store.put("../x", b"")


def count_up(store: FsspecStore, name: int, times: int) -> None:
    for index in range(times):
        while True:
            current = store.get("n")
            count = 0 if current is None else json.loads(current)[0]
            if store.swap("n", current, json.dumps([count + 1, name, index]).encode()):
                break


def test_swap_from_three_threads_loses_no_update(s3):
    threads = [threading.Thread(target=count_up, args=(store_of(s3), name, 5)) for name in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert json.loads(store_of(s3).get("n"))[0] == 15


def test_swap_whose_answer_was_lost_knows_its_own_write(s3):
    store = store_of(s3)
    assert store.swap("k", None, b"1")
    s3.requests, s3.failed, s3.fail_every = 0, 0, 2  # the read, then the write, which is carried out and not answered
    assert store.swap("k", b"1", b"2")
    s3.fail_every = 0
    assert store.get("k") == b"2"


def test_lease_in_a_bucket_has_one_holder(s3):
    first = Lease(store_of(s3))
    first.acquire()
    first.renew()
    with first.fenced(), pytest.raises(RunBusy):
        Lease(store_of(s3)).acquire()
    first.release()
    Lease(store_of(s3)).acquire()


def test_file_system_without_writes_on_a_condition_is_refused():
    with pytest.raises(UsageError, match=r"memory:// has no conditional write"):
        open_outputs("memory://somewhere")


# ---- the pipeline


def test_run_on_a_bucket_uploads_fetches_once_and_skips(s3, tmp_path, monkeypatch):
    outputs = open_outputs(f"s3://{s3.bucket}/prefix")
    target = total(parts=(number(value=1), {"x": number(value=2)}))
    assert [each.action for each in plan(Graph([target]), outputs)] == ["run"] * 3
    assert s3.files.find(s3.bucket) == []
    assert len(run([target], outputs).ran) == 3
    keys = {key.removeprefix(f"{s3.bucket}/prefix/") for key in s3.files.find(f"{s3.bucket}/prefix")}
    output = f"{address(target)}/{outputs.done(address(target))['upload']}"
    assert {f"{address(target)}/status.json", f"{output}/value.txt"} <= keys
    assert f".steps/{address(target)}/log.txt" in keys
    assert not any(".partial" in key for key in keys)
    assert s3.files.cat_file(f"{s3.bucket}/prefix/{output}/value.txt") == b"3"
    assert run([target], outputs).ran == []
    assert [each["name"] for each in outputs.earlier("total")] == ["total"]
    # another machine: what it needs it downloads, once
    monkeypatch.setenv("PALESTRA_CACHE", str(tmp_path / "other"))
    elsewhere = open_outputs(f"s3://{s3.bucket}/prefix")
    s3.downloads.clear()
    more = [total(parts=[target, number(value=index)]) for index in (5, 6)]
    run(more, elsewhere, max_parallel=1)
    assert [value(elsewhere, each) for each in more] == [8, 9]
    assert s3.downloads.count("value.txt") == 1


def test_output_in_a_bucket_without_status_or_with_other_bytes_is_refused(s3, tmp_path, monkeypatch):
    outputs = open_outputs(f"s3://{s3.bucket}/prefix")
    source = number(value=1)
    run([source], outputs)
    upload = outputs.done(address(source))["upload"]
    s3.files.pipe_file(f"{s3.bucket}/prefix/{address(source)}/{upload}/value.txt", b"9")
    s3.files.pipe_file(f"{s3.bucket}/prefix/{address(number(value=2))}/value.txt", b"2")  # half an upload
    monkeypatch.setenv("PALESTRA_CACHE", str(tmp_path / "other"))
    elsewhere = open_outputs(f"s3://{s3.bucket}/prefix")
    with pytest.raises(PalestraError, match=r"value.txt is damaged"):
        elsewhere.fetch(address(source))
    assert elsewhere.done(address(number(value=2))) is None
    with pytest.raises(PalestraError, match=r"is missing or incomplete"):
        elsewhere.fetch(address(number(value=2)))


def test_every_tenth_call_that_fails_is_tried_again(s3, monkeypatch):
    outputs = open_outputs(f"s3://{s3.bucket}/prefix")
    s3.fail_every, s3.failed = 10, 0
    targets = [total(parts=[number(value=index), number(value=index + 1)]) for index in range(2)]
    run(targets, outputs)
    assert s3.failed > 0
    s3.fail_every = 0
    assert [value(outputs, each) for each in targets] == [1, 3]


def test_service_that_fails_for_good_is_a_clear_failure_and_nothing_is_done(s3, monkeypatch):
    monkeypatch.setattr(remote_store, "WAITS", (0.01, 0.01))
    outputs = open_outputs(f"s3://{s3.bucket}/prefix")
    s3.fail_every = 1
    with pytest.raises(PalestraError, match=r"reading s3://.* failed 3 times, last with .*Check the network"):
        run([number(value=1)], outputs)
    s3.fail_every = 0
    assert outputs.done(address(number(value=1))) is None
    run([number(value=1)], outputs)
    assert value(outputs, number(value=1)) == 1


def test_failed_step_of_a_bucket_is_refused_elsewhere_too(s3, tmp_path, monkeypatch):
    bad = faulty(until=tmp_path / "no")
    with pytest.raises(PipelineFailed, match="no is not there"):
        run([bad], open_outputs(f"s3://{s3.bucket}/prefix"))
    assert not s3.files.exists(f"{s3.bucket}/prefix/{address(bad)}")
    monkeypatch.setenv("PALESTRA_CACHE", str(tmp_path / "other"))
    with pytest.raises(PipelineFailed, match="failed before"):
        run([bad], open_outputs(f"s3://{s3.bucket}/prefix"))


@pytest.mark.slow
def test_report_of_a_bucket_tells_elsewhere_what_it_tells_where_the_steps_ran(s3, tmp_path, monkeypatch, pictures):
    (tmp_path / "books.jsonl").write_text('{"text": "' + "word " * 30 + '"}\n{"text": "short"}\n')
    small = {**SHORT, "train": {"frames": 3 * 128}}
    clean, bad = filter_step(source=str(tmp_path / "books.jsonl"), min_words=5), faulty(until=tmp_path / "no")
    steps = [clean, spec_step("train", small, None), bad, telling(variable="AWS_DEFAULT_REGION")]
    graph, prefix = Graph(steps), f"s3://{s3.bucket}/prefix"
    with pytest.raises(PipelineFailed):
        run(steps, open_outputs(prefix))
    here = write_report("x", graph, open_outputs(prefix))
    assert here == f"{prefix}/report-x.html"
    page = s3.files.cat_file(here).decode()
    monkeypatch.setenv("PALESTRA_CACHE", str(tmp_path / "other"))
    s3.downloads.clear()
    for _ in range(2):  # the second time from what was downloaded the first
        write_report("x", graph, open_outputs(prefix))
    assert s3.downloads.count("metrics.jsonl") == s3.downloads.count("counts.json") == 1
    assert not any(name.endswith((".safetensors", "docs-00000.jsonl")) for name in s3.downloads)
    again = s3.files.cat_file(here).decode()
    for said in (
        "fewer than 5 words",
        "no is not there",
        "<td>return</td>",
        "data:image/png",
        f"<code>{prefix}</code>",
    ):
        assert page.count(said) == again.count(said) > 0, said
    assert page.count("python: us-east-1") == again.count("python: us-east-1") == 1
    assert "1 failed" in again


def test_two_processes_on_a_bucket_run_a_step_once(s3, tmp_path):
    journal = tmp_path / "journal.txt"
    caches = {name: {"PALESTRA_CACHE": str(tmp_path / name)} for name in ("one", "two")}
    processes = [
        start(f"s3://{s3.bucket}/prefix", "number", journal, **s3.environment, **cache) for cache in caches.values()
    ]
    for process in processes:
        _, said = process.communicate(timeout=120)
        assert process.returncode == 0, said
    assert noted(journal) == [["number", "7"]]


def test_zombie_worker_that_uploads_after_another_has_committed_changes_nothing(s3, tmp_path):
    prefix, name = f"s3://{s3.bucket}/prefix", address(lingering(folder=""))
    outputs = open_outputs(prefix)
    stopped = start(prefix, "lingering", tmp_path, **s3.environment, PALESTRA_CACHE=str(tmp_path / "stopped"))
    lines_in(tmp_path / "begun.txt", 1)
    take_over(stopped, outputs, name)
    other = start(prefix, "lingering", tmp_path, **s3.environment, PALESTRA_CACHE=str(tmp_path / "other"))
    lines_in(tmp_path / "begun.txt", 2)
    (tmp_path / "go-1").touch()
    end_well(other)
    committed = outputs.done(name)
    s3.uploads.clear()
    (tmp_path / "go-0").touch()
    until = time.monotonic() + 60
    while "value.txt" not in s3.uploads:  # the last of the three, by a worker whose runner is stopped
        assert time.monotonic() < until
        time.sleep(0.02)
    end_well(stopped)
    assert outputs.done(name) == committed
    assert (outputs.fetch(name) / "value.txt").read_text() == "1"
    assert set(files(outputs.path(name))) == {"early-1.txt", "late-1.txt", "value.txt", "status.json"}


def test_killed_step_of_a_bucket_goes_on_where_it_was(s3, tmp_path):
    journal = tmp_path / "journal.txt"
    prefix = f"s3://{s3.bucket}/prefix"
    first = start(prefix, "counting", journal, **s3.environment, PALESTRA_CACHE=str(tmp_path / "cache"))
    until = time.monotonic() + 60
    while len(noted(journal)) < 5 and time.monotonic() < until:
        time.sleep(0.02)
    first.kill()
    first.communicate()
    target = counting(upto=60, journal=str(journal), seconds=0.0)
    assert open_outputs(prefix).done(address(target)) is None
    run([target], open_outputs(prefix))
    counted = [int(line[0]) for line in noted(journal)]
    assert sorted(set(counted)) == list(range(60))
    assert len(counted) <= 61
