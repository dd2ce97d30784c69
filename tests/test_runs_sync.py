"""Run folders copied to a bucket while they train: complete, resumable from there alone, and never in the run's way."""

import shutil
import signal
import time
from functools import partial
from pathlib import Path

import pytest
from conftest import SHORT, last_step, numbers, wait_until
from s3_server import s3_server

import palestra
from palestra.data.remote import open_filesystem
from palestra.errors import RunBusy, UsageError
from palestra.runs import sync as syncing
from palestra.runs.run import Run, new_trial
from palestra.runs.share import LISTING, pull_run
from palestra.runs.sync import PART, Sync, fetch_run

s3fs = pytest.importorskip("s3fs", reason="the extra s3 is not installed")
SPEC = {**SHORT, "train": {"frames": 14 * 128}, "every": {"checkpoint": ["4 steps"], "eval": "7 steps"}}


@pytest.fixture(scope="module")
def server():
    with s3_server() as server:
        yield server


@pytest.fixture
def s3(server, monkeypatch):
    for name, setting in server.environment.items():
        monkeypatch.setenv(name, setting)
    server.fail_every, server.deny = 0, None
    server.bucket = f"bucket-{time.time_ns()}"
    server.files = s3fs.S3FileSystem(skip_instance_cache=True, use_listings_cache=False)
    server.files.mkdir(server.bucket)
    server.place = f"s3://{server.bucket}/runs"
    yield server
    server.fail_every, server.deny = 0, None


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> list[dict]:
    """The rows of a run that nothing disturbs."""
    return numbers(palestra.run(SPEC, root=tmp_path_factory.mktemp("whole"), quiet=True).session(0))


def opened(url: str):
    return partial(open_filesystem, url)


def made(tmp_path: Path) -> Run:
    return new_trial(tmp_path / "runs", "short", seeds=[0], command=["x"], spec={"kind": "control"})


def there(s3, run: Run) -> set[str]:
    prefix = f"{s3.bucket}/runs/{run.name}/{run.id}/"
    return {path.removeprefix(prefix) for path in s3.files.find(prefix)} - {"lease.json"}


def content(folder: Path) -> dict[str, bytes]:
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != "lease.json"]
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in files if not p.name.startswith(".")}


def test_run_at_its_end_is_whole_in_the_bucket_and_can_be_pulled(s3, tmp_path, whole):
    run = palestra.run(SPEC, root=tmp_path / "runs", quiet=True, sync=s3.place)
    assert there(s3, run) == set(content(run.path)) | {LISTING}
    for name, data in content(run.path).items():
        assert s3.files.cat_file(f"{s3.bucket}/runs/{run.name}/{run.id}/{name}") == data
    folder = pull_run(run.name, *open_filesystem(s3.place), root=tmp_path / "other")
    assert Run(folder).state == "done"
    assert numbers(run.session(0)) == whole


@pytest.mark.parametrize("fail_every", [pytest.param(0, marks=pytest.mark.slow), 10])
def test_killed_run_continues_from_the_bucket_alone_to_the_same_rows(s3, scratch, whole, fail_every):
    s3.fail_every = fail_every
    environment = {**s3.environment, "PALESTRA_SYNC_SECONDS": "0.2"}
    process = scratch.start(
        "train", scratch.spec(base=SPEC), "--quiet", "--sync", s3.place, "--id", "one", **environment
    )
    folder = f"{s3.bucket}/runs/short/one/sessions/0/checkpoints/step_000000004/meta.json"
    wait_until(lambda: s3.files.exists(folder), process)
    process.kill()
    process.communicate()
    shutil.rmtree(scratch.path / "runs")  # another machine
    process = scratch.start("train", "--quiet", "--resume", f"{s3.place}/short", **environment)
    said = process.communicate(timeout=240)
    assert process.returncode == 0, said
    run = Run(scratch.path / "runs/short/one")
    assert numbers(run.session(0)) == whole
    remote = s3.files.cat_file(f"{s3.bucket}/runs/short/one/sessions/0/metrics.jsonl")
    assert remote == (run.session(0) / "metrics.jsonl").read_bytes()
    assert there(s3, run) == set(content(run.path)) | {LISTING}
    assert fail_every == 0 or s3.failed > 3


def test_run_told_to_stop_sends_the_rest_before_it_ends(s3, scratch, whole):
    spec, environment = scratch.spec(base=SPEC), {**s3.environment, "PALESTRA_SYNC_SECONDS": "1000"}
    process = scratch.start("train", spec, "--quiet", "--sync", s3.place, "--id", "one", **environment)
    session = scratch.path / "runs/short/one/sessions/0"
    wait_until(lambda: session.exists() and last_step(session) >= 5, process)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=240)
    assert process.returncode == 130
    run = Run(scratch.path / "runs/short/one")
    assert there(s3, run) == set(content(run.path)) | {LISTING}
    shutil.rmtree(scratch.path / "runs")
    process = scratch.start("train", spec, "--quiet", "--sync", s3.place, "--id", "one", **environment)
    assert process.wait(240) == 0
    assert numbers(run.session(0)) == whole


def test_checkpoint_is_there_only_with_the_rows_it_counts(s3, tmp_path):
    run = palestra.run(SPEC, root=tmp_path / "runs", quiet=True)
    sync = Sync(run, s3.place, opened(s3.place))
    s3.uploads.clear()
    sync.round()
    metas = [index for index, name in enumerate(s3.uploads) if name == "meta.json"]
    rest = [index for index, name in enumerate(s3.uploads) if name != "meta.json"]
    assert metas
    assert min(metas) > max(rest)


def test_second_round_sends_what_changed_and_removes_what_is_gone(s3, tmp_path):
    run = made(tmp_path)
    (run.path / "a.txt").write_text("a")
    (run.path / "b.txt").write_text("b")
    sync = Sync(run, s3.place, opened(s3.place))
    sync.round()
    s3.uploads.clear()
    (run.path / "a.txt").write_text("aa")
    (run.path / "b.txt").unlink()
    sync.round()
    assert s3.uploads == ["a.txt"]
    assert there(s3, run) == {"a.txt", "trial.json"}


def test_large_file_that_grows_is_continued_and_one_that_was_truncated_is_sent_anew(s3, tmp_path, monkeypatch):
    run = made(tmp_path)
    rows, target = run.path / "rollouts.jsonl", f"{s3.bucket}/runs/{run.name}/{run.id}/rollouts.jsonl"
    line = b'{"row": 1, "text": "' + b"x" * 1000 + b'"}\n'
    rows.write_bytes(line * (PART // len(line) + 100))
    sync = Sync(run, s3.place, opened(s3.place))
    sync.round()
    puts = []
    monkeypatch.setattr(s3fs.S3FileSystem, "put_file", lambda *given, **_: puts.append(given))
    with rows.open("ab") as file:
        file.write(b'{"row": 2}\n' * 100)
    sync.round()
    assert s3.files.cat_file(target) == rows.read_bytes()
    assert puts == []  # the new bytes alone
    monkeypatch.undo()
    for name, setting in s3.environment.items():
        monkeypatch.setenv(name, setting)
    data = rows.read_bytes()
    rows.write_bytes(data[: -2 * len(line)] + b'{"row": 3}\n' * 1000)
    sync.round()
    assert s3.files.cat_file(target) == rows.read_bytes()


def test_resumed_elsewhere_sends_only_what_is_not_there(s3, tmp_path):
    first = palestra.run(SPEC, root=tmp_path / "runs", quiet=True, sync=s3.place)
    url = f"{s3.place}/{first.name}/{first.id}"
    run = fetch_run(url, opened(url), tmp_path / "other")
    assert content(run.path) == content(first.path)
    s3.uploads.clear()
    Sync(run, s3.place, opened(s3.place)).round()
    assert set(s3.uploads) <= {"lease.json"}


def test_older_copy_here_is_put_aside_and_a_newer_one_is_kept(s3, tmp_path):
    run = palestra.run(SPEC, root=tmp_path / "runs", quiet=True, sync=s3.place)
    url = f"{s3.place}/{run.name}/{run.id}"
    (run.path / "notes.txt").write_text("mine")
    assert (fetch_run(url, opened(url), tmp_path / "runs").path / "notes.txt").exists()
    newest = max((run.path / "sessions/0/checkpoints").glob("step_*"))
    shutil.rmtree(newest)
    fetched = fetch_run(url, opened(url), tmp_path / "runs")
    assert newest.exists()
    assert not (fetched.path / "notes.txt").exists()
    assert [path.name for path in run.path.parent.glob(".*/notes.txt")] == ["notes.txt"]


def test_second_machine_that_continues_the_same_run_is_refused(s3, tmp_path):
    run = made(tmp_path)
    with Sync(run, s3.place, opened(s3.place)), pytest.raises(RunBusy, match="in use by process"):
        Sync(run, s3.place, opened(s3.place)).__enter__()


@pytest.mark.parametrize("deny", ["ExpiredToken", "AccessDenied", "SlowDown"])
def test_place_that_refuses_is_said_once_and_the_run_ends_as_without_it(s3, tmp_path, whole, caplog, monkeypatch, deny):
    monkeypatch.setattr(syncing, "EVERY", 0.1)
    monkeypatch.setattr(syncing, "WHOLE", 1.0)
    monkeypatch.setattr("palestra.runs.store.WAITS", (0.01,))
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    s3.deny = deny
    run = palestra.run(SPEC, root=tmp_path / "runs", quiet=True, sync=s3.place)
    assert numbers(run.session(0)) == whole
    said = [record.message for record in caplog.records if "sync to" in record.message]
    assert len(said) == 1
    assert "as asked" in said[0]  # what the service says
    assert any("does not have all of the run" in record.message for record in caplog.records)
    s3.deny = None
    caplog.clear()
    monkeypatch.setattr(syncing, "WHOLE", 60.0)
    palestra.run(resume=run, sync=s3.place, quiet=True, root=tmp_path / "runs")  # sends the rest
    assert LISTING in there(s3, run)


def test_place_that_recovers_gets_all_of_it(s3, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(syncing, "EVERY", 0.05)
    run = made(tmp_path)
    s3.deny = "AccessDenied"
    with Sync(run, s3.place, opened(s3.place)) as sync:
        while "tried again" not in caplog.text:
            time.sleep(0.01)
        s3.deny = None
        while "works again" not in caplog.text:
            time.sleep(0.01)
        (run.path / "late.txt").write_text("late")
    assert sync.complete
    assert "late.txt" in there(s3, run)


def test_resume_of_what_is_not_there_is_refused(s3, tmp_path):
    with pytest.raises(UsageError, match="there is no run at"):
        palestra.run(resume=f"{s3.place}/nobody", root=tmp_path / "runs")


def test_any_place_that_fsspec_writes_will_do(tmp_path, whole):
    run = palestra.run(SPEC, root=tmp_path / "runs", quiet=True, sync=str(tmp_path / "place"), id="one")
    shutil.rmtree(tmp_path / "runs")
    again = palestra.run(SPEC, root=tmp_path / "runs", quiet=True, sync=str(tmp_path / "place"), id="one")
    assert again.path == run.path
    assert numbers(again.session(0)) == whole
