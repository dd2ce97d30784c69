"""Pushing and pulling runs: whole, checked, resumable, and only finished ones published."""

import json
import os
import shutil
from contextlib import nullcontext
from pathlib import Path

import pytest
from conftest import SHORT
from hub_commits import writing_hub
from hub_server import Repository
from s3_server import s3_server

from palestra import api
from palestra.data.remote import open_filesystem
from palestra.errors import PalestraError, UsageError
from palestra.runs.manifest import manifest
from palestra.runs.run import Run, new_trial, open_run
from palestra.runs.session import Session
from palestra.runs.share import LISTING, place, pull_run, push_run


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A finished run of the real trainer."""
    root = tmp_path_factory.mktemp("runs")
    return api.run({**SHORT, "train": {"frames": 3 * 128}, "max_session": 1}, root=root, quiet=True)


@pytest.fixture
def run(trained, tmp_path):
    """A copy of it to push from."""
    shutil.copytree(trained.trial.path, tmp_path / "runs" / trained.name / trained.id)
    return Run(tmp_path / "runs" / trained.name / trained.id)


def content(folder: Path) -> dict[str, bytes]:
    """The files of a run that are shared."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    shared = [p for p in files if not any(part.startswith(".") for part in p.relative_to(folder).parts)]
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in shared if p.name not in ("trace.json", LISTING)}


def at(folder: Path):
    return open_filesystem(place(str(folder))[0])


def push(run: Run, folder: Path, published: bool = False) -> tuple[int, int]:
    return push_run(run, *at(folder), published=published)


def unfinished(root: Path) -> Run:
    trial = new_trial(root, "half", seeds=[0], command=["x"], spec={"kind": "control"})
    made = manifest(spec_hash="0", seed=0, command=["x"])
    Session.create(trial.session(0), spec_yaml="", spec_data={"kind": "control"}, manifest=made)
    return Run(trial.path)


def test_pushed_run_pulled_elsewhere_has_the_same_files_and_acts(run, tmp_path):
    sent, kept = push(run, tmp_path / "shared")
    assert (sent, kept) == (len(content(run.path)), 0)
    folder = pull_run(f"{run.name}/{run.id}", *at(tmp_path / "shared"), root=tmp_path / "other")
    assert content(folder) == content(run.path)
    pulled = open_run(run.name, tmp_path / "other")
    assert (pulled.path, pulled.state, pulled.summary()) == (folder, "done", run.summary())
    assert api.load(pulled).act([0.0, 0.0, 0.1, 0.0]) == api.load(run).act([0.0, 0.0, 0.1, 0.0])


def test_push_again_sends_only_what_changed(run, tmp_path):
    first, _ = push(run, tmp_path / "shared")
    assert push(run, tmp_path / "shared") == (0, first)
    (run.path / "notes.txt").write_text("new")
    assert push(run, tmp_path / "shared") == (1, first)
    (run.path / "notes.txt").write_text("newer")
    assert push(run, tmp_path / "shared") == (1, first)
    folder = pull_run(run.name, *at(tmp_path / "shared"), root=tmp_path / "other")
    assert (folder / "notes.txt").read_text() == "newer"


def test_push_leaves_out_links_to_nothing_and_pipes(run, tmp_path):
    first, _ = push(run, tmp_path / "shared")
    (run.path / "debug.log").symlink_to(tmp_path / "gone")
    os.mkfifo(run.path / "pipe")
    assert push(run, tmp_path / "shared") == (0, first)


def test_push_that_broke_off_is_no_run_and_the_next_one_goes_on(run, tmp_path, monkeypatch):
    files, path = at(tmp_path / "shared")
    original, sent = files.put_file, []

    def breaking(source: str, target: str, **options: object) -> None:
        if len(sent) == 3:
            raise OSError("the line is dead")
        sent.append(target)
        original(source, target, **options)

    monkeypatch.setattr(files, "put_file", breaking)
    with pytest.raises(PalestraError, match=r"failed.*the line is dead.*again"):
        push_run(run, files, path, published=False)
    with pytest.raises(UsageError, match="no run"):
        pull_run(run.name, *at(tmp_path / "shared"), root=tmp_path / "other")
    monkeypatch.setattr(files, "put_file", lambda s, t, **o: (sent.append(t), original(s, t, **o)))
    push_run(run, files, path, published=False)
    assert len(sent) == len(set(sent)) == len(content(run.path))  # nothing was sent twice
    pull_run(run.name, *at(tmp_path / "shared"), root=tmp_path / "other")


def test_file_damaged_at_the_place_is_not_pulled(run, tmp_path):
    push(run, tmp_path / "shared")
    victim = tmp_path / "shared" / run.name / run.id / "summary.json"
    good = victim.read_bytes()
    victim.write_bytes(bytes([good[0] ^ 1]) + good[1:])  # the size stays
    with pytest.raises(PalestraError, match=r"summary\.json is damaged"):
        pull_run(run.name, *at(tmp_path / "shared"), root=tmp_path / "other")
    with pytest.raises(UsageError, match="no run"):
        open_run(run.name, tmp_path / "other")  # nothing half pulled is taken for a run
    victim.write_bytes(good)
    folder = pull_run(run.name, *at(tmp_path / "shared"), root=tmp_path / "other")
    assert content(folder) == content(run.path)


@pytest.mark.parametrize("place_of", ["a folder", "s3"])
@pytest.mark.parametrize("damage", ["a byte", "shorter", "deleted"])
def test_push_after_damage_sends_that_file_again_and_no_other(run, tmp_path, monkeypatch, place_of, damage):
    with s3_server() if place_of == "s3" else nullcontext() as s3:
        url = str(tmp_path / "shared")
        if s3 is not None:
            for name, value in s3.environment.items():
                monkeypatch.setenv(name, value)
            open_filesystem("s3://lab/dev")[0].mkdir("lab")
            url = "s3://lab/dev"
        files, path = open_filesystem(place(url)[0])
        count, _ = push_run(run, files, path, published=False)
        victim = f"{path}/{run.name}/{run.id}/summary.json"
        good = files.cat_file(victim)
        if damage == "deleted":
            files.rm_file(victim)
        else:
            files.pipe_file(victim, good[:-1] if damage == "shorter" else bytes([good[0] ^ 1]) + good[1:])
        assert push_run(run, files, path, published=False) == (1, count - 1)
        assert content(pull_run(run.name, files, path, root=tmp_path / "other")) == content(run.path)
        assert push_run(run, files, path, published=False) == (0, count)


def test_pull_over_a_run_that_differs_is_refused_and_over_the_same_changes_nothing(run, tmp_path):
    push(run, tmp_path / "shared")
    folder = pull_run(run.name, *at(tmp_path / "shared"), root=tmp_path / "other")
    assert pull_run(run.name, *at(tmp_path / "shared"), root=tmp_path / "other") == folder
    (folder / "summary.json").write_text("{}")
    with pytest.raises(UsageError, match=r"another run.*summary\.json"):
        pull_run(run.name, *at(tmp_path / "shared"), root=tmp_path / "other")
    assert (folder / "summary.json").read_text() == "{}"


def test_published_takes_finished_runs_alone_and_dev_takes_all(run, tmp_path):
    half = unfinished(tmp_path / "runs")
    push(half, tmp_path / "dev")
    with pytest.raises(UsageError, match="only finished runs are published"):
        push(half, tmp_path / "published", published=True)
    assert not (tmp_path / "published").exists()
    push(run, tmp_path / "published", published=True)


def test_run_graduates_from_dev_to_published(run, tmp_path, monkeypatch):
    monkeypatch.setenv("PALESTRA_DEV", str(tmp_path / "dev"))
    monkeypatch.setenv("PALESTRA_PUBLISHED", f"file://{tmp_path}/published")
    assert (place("dev")[1], place("published")[1]) == (False, True)
    push_run(run, *open_filesystem(place("dev")[0]), published=False)
    pulled = Run(pull_run(run.name, *open_filesystem(place("dev")[0]), root=tmp_path / "other"))
    push_run(pulled, *open_filesystem(place("published")[0]), published=True)
    listings = [
        json.loads((tmp_path / name / run.name / run.id / LISTING).read_text()) for name in ("dev", "published")
    ]
    assert listings[0] == listings[1]


def test_pull_by_name_takes_the_newest_and_an_unknown_one_names_what_is_there(run, tmp_path):
    push(run, tmp_path / "shared")
    later = tmp_path / "runs" / run.name / "20991231T000000-abcd"
    shutil.copytree(run.path, later)
    info = json.loads((later / "trial.json").read_text()) | {"id": later.name}
    (later / "trial.json").write_text(json.dumps(info))
    push(Run(later), tmp_path / "shared")
    assert pull_run(run.name, *at(tmp_path / "shared"), root=tmp_path / "other").name == later.name
    assert (tmp_path / "other" / run.name / "latest").read_text().strip() == later.name
    pull_run(f"{run.name}/{run.id}", *at(tmp_path / "shared"), root=tmp_path / "other")
    assert (tmp_path / "other" / run.name / "latest").read_text().strip() == later.name
    for wrong in ("nobody", "short/1", "nobody/1"):
        with pytest.raises(UsageError, match="There are: short"):
            pull_run(wrong, *at(tmp_path / "shared"), root=tmp_path / "other")


def test_listing_that_names_files_outside_is_refused(run, tmp_path):
    push(run, tmp_path / "shared")
    listing = tmp_path / "shared" / run.name / run.id / LISTING
    record = json.loads(listing.read_text())
    record["files"]["../../escaped.txt"] = {"size": 0, "sha256": ""}
    listing.write_text(json.dumps(record))
    with pytest.raises(PalestraError, match="outside of itself"):
        pull_run(run.name, *at(tmp_path / "shared"), root=tmp_path / "other")


def test_place_that_nobody_named_says_how_to(tmp_path, monkeypatch):
    monkeypatch.delenv("PALESTRA_DEV", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(UsageError, match="PALESTRA_DEV"):
        place("dev")
    (tmp_path / ".config/palestra").mkdir(parents=True)
    (tmp_path / ".config/palestra/places.json").write_text(json.dumps({"dev": "s3://bucket/dev"}))
    assert place("dev") == ("s3://bucket/dev", False)


def test_push_and_pull_through_s3_send_each_file_once(run, tmp_path, monkeypatch):
    with s3_server() as s3:
        for name, value in s3.environment.items():
            monkeypatch.setenv(name, value)
        import boto3

        boto3.client("s3").create_bucket(Bucket="lab")
        files, path = open_filesystem(place("s3://lab/dev")[0])
        push_run(run, files, path, published=False)
        assert s3.uploads[-1] == LISTING  # a reader before that sees no run
        assert len(s3.uploads) == len(content(run.path)) + 1
        assert push_run(run, *open_filesystem("s3://lab/dev"), published=False)[0] == 0
        folder = pull_run(run.name, *open_filesystem("s3://lab/dev"), root=tmp_path / "other")
        assert content(folder) == content(run.path)
        with pytest.raises(UsageError, match="There are: short"):
            pull_run("nobody", *open_filesystem("s3://lab/dev"), root=tmp_path / "other")


def test_push_to_the_hub_is_one_commit_and_can_be_pulled(run, scratch):
    with writing_hub() as hub:
        hub.datasets["lab/runs"] = Repository({"README.md": b"runs"})
        place_of = {
            "HF_ENDPOINT": hub.url,
            "HF_TOKEN": "secret",
            "HF_HOME": str(scratch.path / "hf"),
            "HOME": str(scratch.path),
        }
        sent = scratch("push", str(run.path), "--to", "hf://datasets/lab/runs/dev", **place_of)
        assert sent.returncode == 0, sent.stderr
        commits = [path for method, path, _ in hub.requests if method == "COMMIT"]
        assert commits == [str(len(content(run.path)) + 1)]
        again = scratch("push", str(run.path), "--to", "hf://datasets/lab/runs/dev", **place_of)
        assert ": 0 files sent" in again.stdout, again.stderr
        got = scratch("pull", run.name, "--from", "hf://datasets/lab/runs/dev", **place_of)
        assert got.returncode == 0, got.stderr
        assert content(scratch.path / got.stdout.strip()) == content(run.path)


def test_push_and_pull_commands_share_a_run(run, scratch):
    shared = {"PALESTRA_DEV": str(scratch.path / "dev")}
    sent = scratch("push", str(run.path), "--to", "dev", **shared)
    assert sent.returncode == 0, sent.stderr
    assert "files sent, 0 already there" in sent.stdout
    got = scratch("pull", run.name, "--from", "dev", **shared)
    assert got.returncode == 0, got.stderr
    assert (scratch.path / got.stdout.strip() / "trial.json").is_file()
    refused = scratch("pull", run.name, "--from", "published", **shared)
    assert refused.returncode == 2
    assert "PALESTRA_PUBLISHED" in refused.stderr
