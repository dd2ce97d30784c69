"""Launches on this machine, the job log that people share, and what is refused before anything is submitted."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path

import psutil
import pytest
from conftest import SHORT, last_step, numbers
from s3_server import s3_server
from zygote import COMMAND, ENVIRONMENT

import palestra
from palestra.errors import PalestraError, UsageError
from palestra.launch.clusters import open_cluster
from palestra.launch.job import bundle, plan
from palestra.launch.log import FINAL, JobLog, followed
from palestra.launch.scripts import Local
from palestra.runs.lease import Owner
from palestra.runs.run import Run
from palestra.spec.validate import SpecError

SMALL = {**SHORT, "train": {"frames": 4 * 128}}
LONG = {**SHORT, "train": {"frames": 2000 * 128}}
ROOT = Path(palestra.__file__).parents[1]
THIS = {**ENVIRONMENT, "PYTHONPATH": f"{ROOT}{os.pathsep}{ENVIRONMENT['PYTHONPATH']}"}
KINDS = ("local", "slurm", "ray", "sagemaker", "skypilot", "dstack", "kubernetes")


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A checkout with a spec, a named cluster and a .env."""
    folder = tmp_path / "project"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (folder / "small.yaml").write_text(json.dumps(SMALL))
    (folder / "long.yaml").write_text(json.dumps(LONG))
    (folder / ".gitignore").write_text("runs\n.env\n")
    (folder / ".env").write_text('# of mine\nexport WANDB_API_KEY="very-secret-1"\nPLAIN=hush-hush\n')
    (folder / "clusters").mkdir()
    (folder / "clusters/lab.yaml").write_text("on: slurm\npartition: gpu\nenv: {TEAM: rl}\n")
    git = ["git", "-c", "user.email=a@b", "-c", "user.name=a"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "x"]):
        subprocess.run([*git, *command], check=True)
    return folder


@pytest.fixture
def log(tmp_path):
    return JobLog(str(tmp_path / "log"))


def launched(log: JobLog, spec: str, name: str, *overrides: str, **settings) -> dict:
    job, record, diff = plan(spec, open_cluster("local", None, settings), name=name, overrides=overrides)
    return log.launch(job, record, diff)


def until(log: JobLog, name: str, *states: str) -> dict:
    end = time.monotonic() + 240
    while (record := log.refreshed(log.get(name)))["state"] not in states:
        assert time.monotonic() < end, record
        time.sleep(0.1)
    return record


def command(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**THIS, **environment, "HOME": os.environ["HOME"]}
    return subprocess.run([COMMAND, *arguments], capture_output=True, text=True, env=env, timeout=240)


# ---- on this machine


def test_cluster_auth_prints_the_token_and_makes_one_only_when_asked(tmp_path, monkeypatch):
    from typer.testing import CliRunner

    from palestra.cli.main import app

    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "ray/token"))
    asked = CliRunner().invoke(app, ["cluster", "auth"])
    assert "there is no token" in str(asked.exception)
    made = CliRunner().invoke(app, ["cluster", "auth", "--generate"])
    token = (tmp_path / "ray/token").read_text()
    assert len(token) == 64
    assert (tmp_path / "ray/token").stat().st_mode & 0o777 == 0o600
    assert made.stdout.splitlines()[-1] == token
    again = CliRunner().invoke(app, ["cluster", "auth", "--generate"])
    assert again.stdout.splitlines()[-1] == token
    monkeypatch.setenv("RAY_AUTH_TOKEN", "of-the-environment")
    assert CliRunner().invoke(app, ["cluster", "auth"]).stdout.splitlines()[-1] == "of-the-environment"


def test_job_outlives_the_command_that_launched_it_and_ends_as_a_run_here(project, tmp_path):
    where = str(tmp_path / "log")
    done = command("launch", "--on", "local", "small.yaml", "--name", "one", "--no-wait", PALESTRA_JOBS=where)
    assert done.returncode == 0, done.stderr
    log = JobLog(where)
    record = until(log, "one", *FINAL)
    assert record["state"] == "done", log.get("one")
    here = palestra.run(SMALL, root=tmp_path / "here", quiet=True)
    assert numbers(Run(record["results"]).session(0)) == numbers(here.session(0))
    listed = json.loads(command("jobs", "list", "--json", PALESTRA_JOBS=where).stdout)
    assert [(row["name"], row["state"], row["run"]) for row in listed] == [("one", "done", record["run"])]
    assert "run folder" in command("jobs", "logs", "one", PALESTRA_JOBS=where).stdout
    assert "step" in command("jobs", "metrics", "one", PALESTRA_JOBS=where).stdout


def test_record_says_what_ran_and_has_no_secret(project, log):
    (project / "small.yaml").write_text(json.dumps(SMALL | {"seed": 3}))
    (project / "notes.py").write_text("WANDB_API_KEY='very-secret-1'")
    subprocess.run(["git", "add", "-N", "notes.py"], check=True)
    job, record, diff = plan("small.yaml", open_cluster("local", None, {}), name="one", overrides=["algorithm.lr=1e-3"])
    log.add({**record, "request": job.cluster.request(job)}, diff)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    assert (record["commit"], record["dirty"], record["hidden"]) == (commit, True, ["PLAIN", "WANDB_API_KEY"])
    assert "algorithm.lr=1e-3" in record["command"]
    assert '+{"kind"' in log.diff("one")
    assert job.hidden == {"PLAIN": "hush-hush", "WANDB_API_KEY": "very-secret-1"}
    stored = b"".join(path.read_bytes() for path in log.store.root.rglob("*") if path.is_file())
    assert b"very-secret" not in stored
    assert b"hush-hush" not in stored


def test_stopped_job_has_saved_and_continues_on_retry(project, log):
    launched(log, "long.yaml", "one")
    session = Path(log.get("one")["results"]) / "sessions/0"
    while last_step(session) < 5:
        time.sleep(0.05)
    with pytest.raises(UsageError, match="stop it first"):
        log.retry("one")
    log.stop("one")
    assert until(log, "one", *FINAL)["state"] == "stopped"
    before = last_step(session)
    with pytest.raises(UsageError, match="is stopped already"):
        log.stop("one")
    assert log.retry("one")["attempts"] == 2
    while last_step(session) < before + 3:
        time.sleep(0.05)
    resumed = re.search(r"resumed at step (\d+)", (session / "log.txt").read_text())
    assert resumed is not None
    assert int(resumed[1]) >= before  # the checkpoint of a stop may be later than the last row
    log.stop("one")
    until(log, "one", *FINAL)


def test_job_that_is_killed_says_so_and_one_that_fails_too(project, log):
    record = launched(log, "long.yaml", "one")
    family = [psutil.Process(record["handle"]["pid"])]
    family += family[0].children(recursive=True)
    os.killpg(record["handle"]["pid"], signal.SIGKILL)
    psutil.wait_procs(family, timeout=10)
    assert until(log, "one", *FINAL)["state"] == "killed"
    launched(log, "small.yaml", "two", "env.id=Nothing-v0")
    assert until(log, "two", *FINAL)["state"] == "failed"
    assert b"Nothing-v0" in b"".join(followed(log, "two", lambda: None))


def test_states_survive_the_machine_and_are_not_guessed_from_another(project, log):
    _, record, _ = plan("small.yaml", open_cluster("local", None, {}), name="one")
    log.add({**record, "state": "running", "handle": asdict(Owner.here())}, "")
    assert log.refreshed(log.get("one"))["state"] == "running"
    other = {**log.get("one")["handle"], "machine": "before the restart"}
    log.change("one", lambda _: {"handle": other})
    assert log.refreshed(log.get("one"))["state"] == "killed"
    log.change("one", lambda _: {"state": "running", "handle": {**other, "host": "elsewhere"}})
    seen = log.refreshed(log.get("one"))
    assert (seen["state"], seen["reason"]) == ("running", "it runs on elsewhere: ask there")


@pytest.mark.slow
def test_synced_job_is_pulled_and_published_elsewhere(project, tmp_path, monkeypatch):
    where, place = str(tmp_path / "log"), tmp_path / "place"
    log = JobLog(where)
    launched(log, "small.yaml", "one", sync=str(place))
    record = until(log, "one", *FINAL)
    assert record["results"] == f"file://{place}/{record['run']}"
    environment = {"PALESTRA_JOBS": where, "PALESTRA_PUBLISHED": str(tmp_path / "published")}
    done = command("jobs", "publish", "one", "--runs", str(tmp_path / "other"), **environment)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "published" / record["run"] / "palestra_run.json").exists()
    assert Run(tmp_path / "other" / record["run"]).state == "done"


# ---- the log


def test_two_people_who_launch_under_one_name_get_one_job(project, log):
    _, record, diff = plan("small.yaml", open_cluster("local", None, {}), name="one")
    outcomes = []

    def add() -> None:
        try:
            JobLog(str(log.store.root)).add(record | {"by": threading.current_thread().name}, diff)
            outcomes.append("added")
        except UsageError as error:
            outcomes.append(str(error))

    threads = [threading.Thread(target=add) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes)[0] == "added"
    assert sum("there is a job 'one'" in outcome for outcome in outcomes) == 3


def test_log_in_a_bucket_loses_no_change_also_when_calls_fail(project, monkeypatch):
    pytest.importorskip("s3fs")
    with s3_server() as s3:
        for name, value in s3.environment.items():
            monkeypatch.setenv(name, value)
        import boto3

        boto3.client("s3").create_bucket(Bucket="team")
        _, record, _ = plan("small.yaml", open_cluster("local", None, {}), name="one")
        JobLog("s3://team/jobs").add(record, "")
        s3.fail_every = 10

        def count() -> None:
            for _ in range(4):
                JobLog("s3://team/jobs").change("one", lambda old: {"attempts": old["attempts"] + 1})

        threads = [threading.Thread(target=count) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert JobLog("s3://team/jobs").get("one")["attempts"] == 8
        assert s3.failed > 2
        s3.fail_every = 0
        assert JobLog("s3://team/jobs").names() == ["one"]
        with pytest.raises(UsageError, match="there is a job 'one'"):
            JobLog("s3://team/jobs").add(record, "")


# ---- what is submitted, and what is refused


@pytest.mark.parametrize("on", KINDS)
def test_dry_run_needs_no_torch_no_credentials_and_shows_no_secret(project, on):
    code = (
        "import sys\nfrom palestra.cli import main\ntry:\n    main()\nfinally:\n    assert 'torch' not in sys.modules\n"
    )
    arguments = ["launch", "--on", on, "small.yaml", "--name", "one", "--dry-run", "--sync", "s3://b/runs"]
    bare = {name: value for name, value in THIS.items() if not name.startswith("AWS")}
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, env=bare)
    assert done.returncode == 0, done.stderr
    assert "train small.yaml --id" in done.stdout.replace("\n    ", " ")
    assert "very-secret" not in done.stdout
    assert "hush" not in done.stdout
    assert not (project / "runs").exists()


def test_named_cluster_is_used_and_options_change_it(project):
    cluster = open_cluster(None, "lab", {"nodes": 2, "gpus": "8xH100", "env": {"MORE": "1"}})
    assert (cluster.on, cluster.nodes, cluster.gpu_count, cluster.gpu_type) == ("slurm", 2, 8, "H100")
    assert cluster.env == {"TEAM": "rl", "MORE": "1"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("on: slurm\npartitoin: gpu\n", r"lab.yaml:2  partitoin: unknown key. Did you mean 'partition'"),
        ("on: slurm\nnodes: two\n", r"lab.yaml:2  nodes: expected"),
        ("on: slrum\n", r"lab.yaml:1  on: unknown kind of cluster: 'slrum'. Did you mean 'slurm'"),
        ("on: slurm\ntime: soon\n", r"lab.yaml:2  time: expected a time such as '1-00:00:00', got 'soon'"),
        ("on: sagemaker\ninstance_type: p4d\n", r"instance_type: expected a type such as ml.p4d.24xlarge, got 'p4d'"),
        ("on: local\nnodes: 2\n", r"nodes: expected 1"),
        ("- 1\n", r"is not a cluster"),
    ],
)
def test_cluster_that_is_wrong_is_refused_at_its_line(project, text, words):
    (project / "clusters/lab.yaml").write_text(text)
    with pytest.raises(UsageError, match=words):
        open_cluster(None, "lab", {})


def test_cluster_that_is_not_there_is_refused_with_the_nearest(project):
    with pytest.raises(
        UsageError, match=r"no cluster 'lap'. Did you mean 'lab'\? A cluster is a file: clusters/lap.yaml"
    ):
        open_cluster(None, "lap", {})
    with pytest.raises(UsageError, match=r"--on ray, but the cluster lab is of kind slurm"):
        open_cluster("ray", "lab", {})
    with pytest.raises(SpecError, match="Did you mean 'slurm'"):
        open_cluster("slrm", None, {})


def test_options_that_a_cluster_has_no_use_for_are_refused(project):
    with pytest.raises(UsageError, match="--instance-type: slurm has no such setting"):
        open_cluster("slurm", None, {"instance_type": "ml.p4d.24xlarge"})
    with pytest.raises(UsageError, match="--device-ids: slurm has no such setting; it has on, nodes, gpus"):
        open_cluster("slurm", None, {"device_ids": "0,1"})
    job, _, _ = plan("small.yaml", open_cluster("local", None, {"device_ids": "0,1"}))
    assert job.env["CUDA_VISIBLE_DEVICES"] == "0,1"
    with pytest.raises(UsageError, match="--array: local has no arrays"):
        plan("small.yaml", open_cluster("local", None, {}), array=2)
    with pytest.raises(UsageError, match="the spec uses one machine"):
        plan("small.yaml", open_cluster("slurm", None, {"nodes": 2}))
    with pytest.raises(UsageError, match="the run would be lost with its machine"):
        plan("small.yaml", open_cluster("ray", None, {}))
    with pytest.raises(UsageError, match=r"--name My Job: dstack does not accept"):
        plan("small.yaml", open_cluster("dstack", None, {"sync": "s3://b"}), name="My Job")
    with pytest.raises(UsageError, match="--env 1X: expected NAME=VALUE"):
        plan("small.yaml", open_cluster("local", None, {}), env=["1X"])


def test_pipeline_is_run_by_its_own_command_and_needs_a_place_for_its_outputs(project):
    steps = {"one": {"use": "pipeline_steps:noop", "with": {"index": 1}}}
    (project / "steps.yaml").write_text(json.dumps({"kind": "pipeline", "steps": steps}))
    job, record, _ = plan("steps.yaml", open_cluster("slurm", None, {}))
    assert job.command[2:] == ("palestra", "pipeline", "run", "steps.yaml")
    assert (record["run"], record["results"]) == (None, "outputs")
    with pytest.raises(UsageError, match="outputs in outputs would be lost with the machine: set prefix=s3://"):
        plan("steps.yaml", open_cluster("ray", None, {}))
    _, record, _ = plan("steps.yaml", open_cluster("ray", None, {"nodes": 2}), overrides=["prefix=s3://b/out"])
    assert (record["results"], record["command"][-2:]) == ("s3://b/out", ["--on", "ray"])


def test_env_file_that_would_be_sent_is_refused(project):
    (project / ".gitignore").write_text("runs\n")
    with pytest.raises(UsageError, match=r"\.env would be sent with the project"):
        plan("small.yaml", open_cluster("ray", None, {"sync": "s3://b"}))


def test_command_with_a_secret_is_refused_and_a_variable_with_one_is_hidden(project):
    key = "hf_" + "a1" * 20
    with pytest.raises(UsageError, match=r"would show a secret \(name=\(redacted\)\)"):
        plan("small.yaml", open_cluster("local", None, {}), overrides=[f"name={key}"])
    job, record, _ = plan("small.yaml", open_cluster("local", None, {"env": {"PLACE": key}}), env=["MY_TOKEN=abcdefgh"])
    assert (job.hidden["PLACE"], job.hidden["MY_TOKEN"], job.env) == (key, "abcdefgh", {"PALESTRA_JOB": job.name})
    assert key not in json.dumps(record)
    assert "abcdefgh" not in json.dumps(record)


def test_common_word_of_the_env_file_does_not_spoil_the_record_and_a_key_in_the_command_is_refused(project):
    (project / ".env").write_text("WANDB_PROJECT=train\nWANDB_API_KEY=very-secret-1\n")
    job, record, _ = plan("small.yaml", open_cluster("local", None, {}), name="one")
    assert record["command"] == list(job.command)
    with pytest.raises(UsageError, match=r"would show a secret \(name=\(redacted\)\)"):
        plan("small.yaml", open_cluster("local", None, {}), overrides=["name=very-secret-1"])


def test_folder_without_git_is_said_before_anything_is_sent(project):
    job, _, _ = plan("small.yaml", open_cluster("ray", None, {"sync": "s3://b"}))
    shutil.rmtree(project / ".git")
    with pytest.raises(UsageError, match="is not in a git repository"):
        bundle(job, "zip")


def test_program_of_the_cluster_that_is_missing_is_said_and_recorded(project, log, monkeypatch):
    monkeypatch.setenv("PATH", str(project))
    monkeypatch.setattr("palestra.launch.job.git_state", lambda folder: (None, ""))
    job, record, diff = plan("small.yaml", open_cluster("slurm", None, {}), name="one")
    with pytest.raises(UsageError, match="there is no sbatch here"):
        log.launch(job, record, diff)
    assert log.get("one")["state"] == "failed"


def test_of_two_who_retry_a_job_one_is_refused(project, log, monkeypatch):
    launched(log, "small.yaml", "first-job", "env.id=Nothing-v0")
    until(log, "first-job", "failed")
    outcomes = []
    submit = Local.submit

    def meanwhile(cluster, job):
        with pytest.raises(UsageError, match="is new: stop it first"):
            log.retry("first-job")
        monkeypatch.setattr(JobLog, "refreshed", lambda self, record: {**record, "state": "failed"})  # read before
        with pytest.raises(UsageError, match="was retried by somebody else"):
            log.retry("first-job")
        monkeypatch.undo()
        outcomes.append(job.attempt)
        return submit(cluster, job)

    monkeypatch.setattr(Local, "submit", meanwhile)
    assert log.retry("first")["attempts"] == 2  # by the beginning of its name
    assert outcomes == [2]
    until(log, "first-job", "failed")


def test_launch_that_was_killed_before_it_was_submitted_is_stopped_and_retried(project, log):
    _, record, _ = plan("small.yaml", open_cluster("local", None, {}), name="one")
    log.add(record, "")
    with pytest.raises(UsageError, match="is new: stop it first"):
        log.retry("one")
    assert log.stop("one")["state"] == "killed"
    assert log.retry("one")["attempts"] == 1
    assert until(log, "one", *FINAL)["state"] == "done"


def test_name_of_a_job_may_be_shortened_and_an_unknown_one_is_refused(project, log):
    _, record, _ = plan("small.yaml", open_cluster("local", None, {}), name="first-job")
    log.add(record, "")
    assert log.get("first")["name"] == "first-job"
    with pytest.raises(UsageError, match=r"no job 'frist-job'.*Did you mean 'first-job'"):
        log.get("frist-job")
    with pytest.raises(PalestraError, match="there is no job"):
        log.change("other", lambda _: {})
