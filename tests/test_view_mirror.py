"""Runs in a bucket, seen through their copy in the cache folder."""

import json
import os
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from s3_server import CREDENTIALS, S3Server, s3_server
from view_runs import View, demo_folder  # noqa: F401

from palestra.data.remote import open_filesystem
from palestra.view.mirror import Mirror

pytest.importorskip("s3fs")


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[S3Server]:
    with s3_server() as server:
        for name, value in (CREDENTIALS | {"AWS_ENDPOINT_URL": server.url}).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("PALESTRA_CACHE", str(tmp_path / "cache"))
        open_filesystem("s3://runs")[0].mkdir("runs")
        yield server


def upload(folder: Path) -> Any:
    files, _ = open_filesystem("s3://runs/mine")
    for path in folder.rglob("*"):
        if path.is_file():
            files.put_file(str(path), f"runs/mine/{path.relative_to(folder).as_posix()}")
    return files


def test_runs_of_a_bucket_are_seen_and_grown_files_are_continued(demo_folder: Path, tmp_path: Path, bucket):  # noqa: F811
    local = tmp_path / "local"
    shutil.copytree(demo_folder, local)
    weights = next(local.glob("demo_sums/*/sessions/0/checkpoints/*/model")) / "model.safetensors"
    weights.write_bytes(b"x" * 1000)
    files = upload(local)
    mirror = Mirror("s3://runs/mine")
    mirror.update()
    assert not list(mirror.folder.rglob("*.safetensors"))
    view = View(mirror.folder)
    run = view.run("demo_sums")
    group = view.get("rollouts/group", run=run, at=0)
    assert group["trajectories"][0]["texts"] is not None  # its tokenizer came with it
    name = f"{run}/sessions/0/metrics.jsonl"
    with (local / name).open("a") as file:
        file.write('{"step": 41, "reward": 0.25}\n')
    files.put_file(str(local / name), f"runs/mine/{name}")
    bucket.downloads.clear()
    mirror.update()
    assert set(bucket.downloads) == {"metrics.jsonl"}
    assert (mirror.folder / name).read_bytes() == (local / name).read_bytes()
    chart = view.get("series", run=run, metric="reward")["runs"][run]["series"]["reward"]
    assert (chart["x"][-1], chart["mean"][-1]) == (41, 0.25)
    (local / name).write_text('{"step": 1, "reward": 7.0}\n' * 2000)  # a resume began anew, and went further
    files.put_file(str(local / name), f"runs/mine/{name}")
    mirror.update()
    assert (mirror.folder / name).read_bytes() == (local / name).read_bytes()
    bucket.downloads.clear()
    mirror.update()
    assert bucket.downloads == []
    files.rm(f"runs/mine/{run}", recursive=True)
    mirror.update()
    assert view.get("rollouts", 404, run=run)["detail"]
    assert view.get("run", run=view.run("demo_cartpole"))["state"] == "done"


def test_command_shows_a_bucket(demo_folder: Path, bucket):  # noqa: F811
    upload(demo_folder / "demo_cartpole")
    command = [sys.executable, "-m", "palestra", "view", "s3://runs/mine", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | bucket.environment) as process:
        try:
            with urllib.request.urlopen(f"{process.stdout.readline().strip()}api/runs") as answer:
                (row,) = json.load(answer)["runs"]
            assert (row["name"], row["state"], row["seeds"]) == ("demo_cartpole", "done", [0, 1, 2, 3])
        finally:
            process.terminate()
        process.wait()


def test_names_that_leave_the_copy_are_not_fetched(tmp_path: Path, bucket):
    files, _ = open_filesystem("s3://runs/mine")
    for key in ("runs/mine/../../outside.json", "runs/mine/a/.hidden", "runs/mine/a/trial.json"):
        files.call_s3("put_object", Bucket="runs", Key=key.removeprefix("runs/"), Body=b"{}")
    mirror = Mirror("s3://runs/mine")
    mirror.update()
    copied = [path.relative_to(tmp_path).as_posix() for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    assert [path.rpartition("/")[2] for path in copied] == ["trial.json"]
    assert not list(tmp_path.rglob("outside.json"))
