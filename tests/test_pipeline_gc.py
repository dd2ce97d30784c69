"""What lies under a prefix: listed with sizes, and removed only when asked, never while it is being made."""

import time
from pathlib import Path

import pytest
import yaml
from pipeline_runs import address
from pipeline_steps import number, total
from s3_server import s3_server
from test_pipeline_cli import GRAPH, STEPS

from palestra.errors import UsageError
from palestra.pipeline.outputs import open_outputs
from palestra.pipeline.runner import run
from palestra.runs.lease import kept


@pytest.fixture(params=["folder", "s3"])
def outputs(request, tmp_path, monkeypatch):
    if request.param == "folder":
        yield open_outputs(str(tmp_path / "out"))
        return
    s3fs = pytest.importorskip("s3fs")
    with s3_server() as s3:
        for name, value in s3.environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("PALESTRA_CACHE", str(tmp_path / "cache"))
        s3fs.S3FileSystem(skip_instance_cache=True).mkdir(bucket := f"bucket-{time.time_ns()}")
        yield open_outputs(f"s3://{bucket}/out")


def test_outputs_are_listed_removed_and_made_again(outputs):
    one, two = number(value=1), number(value=2)
    both = total(parts=[one, two])
    run([both], outputs)
    stored = {entry.address: entry for entry in outputs.stored()}
    assert set(stored) == {address(one), address(two), address(both)}
    assert all(entry.size > 0 and entry.finished for entry in stored.values())
    outputs.remove(address(one))
    assert {entry.address for entry in outputs.stored()} == {address(two), address(both)}
    assert outputs.done(address(one)) is None
    run([one], outputs)
    assert address(one) in {entry.address for entry in outputs.stored()}


def test_status_that_does_not_parse_hides_no_other_output(tmp_path, caplog):
    outputs = open_outputs(str(tmp_path))
    one = number(value=1)
    run([one], outputs)
    torn = outputs.path(address(one)) / "mine" / "status.json"
    torn.parent.mkdir()
    torn.write_text('{"half')
    assert [entry.address for entry in outputs.stored()] == [address(one)]
    assert str(torn) in caplog.text


def test_output_whose_removal_was_killed_is_made_again(outputs, monkeypatch):
    one = number(value=1)
    run([one], outputs)

    def killed(*arguments, **options):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("shutil.rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            outputs.remove(address(one))
    assert outputs.done(address(one)) is None
    run([one], outputs)
    assert outputs.done(address(one)) is not None
    assert not list(outputs.prefix.rglob(".removed-*"))


def test_step_that_is_running_is_not_removed(outputs):
    one = number(value=1)
    run([one], outputs)
    with kept(outputs.lease(address(one))), pytest.raises(UsageError, match="is being made"):
        outputs.remove(address(one))
    assert outputs.done(address(one)) is not None


def test_gc_removes_what_no_pipeline_refers_to_and_only_when_asked(scratch):
    (scratch.path / "own_steps.py").write_text(STEPS)
    (scratch.path / "graph.yaml").write_text(yaml.safe_dump(GRAPH))
    assert scratch("pipeline", "run", "graph.yaml").returncode == 0
    changed = {**GRAPH, "steps": {**GRAPH["steps"], "beside": {"use": "own_steps:note", "with": {"text": "y"}}}}
    (scratch.path / "graph.yaml").write_text(yaml.safe_dump(changed))
    left = scratch.path / "out" / "left-0123456789.partial-abc"
    left.mkdir()
    (left / "half.txt").write_text("half")
    (old,) = scratch.path.glob("out/beside-*")
    said = scratch("pipeline", "gc", "graph.yaml")
    assert said.returncode == 0, said.stderr
    assert "2 outputs" in said.stdout
    assert "nothing is removed without --delete" in said.stdout
    assert old.exists()
    assert scratch("pipeline", "gc", "graph.yaml", "--delete").returncode == 0
    assert not old.exists()
    assert not left.exists()
    kept_steps = sorted(path.parent.name.partition("-")[0] for path in scratch.path.glob("out/*-*/status.json"))
    assert kept_steps == ["both", "left", "right"]
    name = next(scratch.path.glob("out/both-*")).name
    assert scratch("pipeline", "rm", name, "--prefix", "out", "--delete").returncode == 0
    assert name not in scratch("pipeline", "list", "--prefix", "out").stdout
    wrong = scratch("pipeline", "rm", "nothing-1", "--prefix", "out")
    assert (wrong.returncode, "there is no output 'nothing-1'" in wrong.stderr) == (2, True)
    assert Path(scratch.path / "out").is_dir()
