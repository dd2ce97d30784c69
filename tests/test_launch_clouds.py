"""Tasks of SkyPilot and dstack by their own parsers, where they are installed; the RayJob by what KubeRay requires."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import yaml
from conftest import SHORT

from palestra.errors import PalestraError
from palestra.launch import node
from palestra.launch.clusters import open_cluster
from palestra.launch.job import plan
from palestra.launch.log import JobLog

SPECS = {
    "one": {"gpus": "8xH100"},
    "several": {"nodes": 4, "gpus": "8xH100", "image": "registry/image:1"},
}
PARSERS = {
    "skypilot": "import sky\nprint(sky.Task.from_yaml_config(data).num_nodes)",
    "dstack": "from dstack._internal.core.models.configurations import parse_apply_configuration as parse\n"
    "print(parse(data).nodes)",
}
READ = "import sys, yaml\ndata = yaml.safe_load(sys.stdin)\n"
# The Python of a venv with their client, which does not fit beside ours.
PYTHON = {on: os.environ.get(f"PALESTRA_TEST_{on.upper()}") for on in PARSERS}


@pytest.fixture
def project(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("small.yaml").write_text(json.dumps({**SHORT, "max_session": 4}))
    Path(".env").write_text("WANDB_API_KEY=very-secret-1\n")
    Path(".gitignore").write_text(".env\n")
    subprocess.run(["git", "init", "-q"], check=True)
    return tmp_path


def request(on: str, **settings) -> str:
    job, _, _ = plan("small.yaml", open_cluster(on, None, {"sync": "s3://lab/runs", **settings}), name="one-job")
    return job.cluster.request(job)


@pytest.mark.parametrize("settings", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("on", PARSERS)
def test_task_is_accepted_by_the_parser_of_the_client(project, on, settings):
    if PYTHON[on] is None:
        pytest.skip(f"PALESTRA_TEST_{on.upper()} does not name a Python with the client of {on}")
    more = {"spot": True, **({"infra": "aws", "disk_gb": 200} if on == "skypilot" else {"hours": 4, "price": 2.5})}
    text = request(on, **settings, **more)
    env = {**os.environ, "PYTHONPATH": ""}
    parsed = subprocess.run([PYTHON[on], "-c", READ + PARSERS[on]], input=text, capture_output=True, text=True, env=env)
    assert parsed.returncode == 0, parsed.stderr
    assert parsed.stdout.split()[-1] == str(settings.get("nodes", 1))


@pytest.mark.parametrize("on", PARSERS)
def test_task_of_several_machines_joins_them_and_has_no_secret(project, on):
    task = yaml.safe_load(request(on, **SPECS["several"]))
    command = task["run"] if on == "skypilot" else task["commands"][-1]
    assert command.startswith("python -m palestra.launch.node python -m palestra train small.yaml --id ")
    assert command.endswith("--on ray")
    assert "very-secret" not in json.dumps(task)
    assert "WANDB_API_KEY" in json.dumps(task)


def test_rayjob_has_what_kuberay_requires(project):
    secret, job = yaml.safe_load_all(request("kubernetes", nodes=3, gpus="8", image="registry/image:1"))
    assert secret["stringData"] == {"WANDB_API_KEY": "(redacted)"}
    assert (job["apiVersion"], job["kind"], job["metadata"]["name"]) == ("ray.io/v1", "RayJob", "one-job")
    cluster = job["spec"]["rayClusterSpec"]
    (workers,) = cluster["workerGroupSpecs"]
    assert [workers[key] for key in ("replicas", "minReplicas", "maxReplicas")] == [2, 2, 2]
    for group in (cluster["headGroupSpec"], workers):
        assert group["rayStartParams"] == {}
        (container,) = group["template"]["spec"]["containers"]
        assert container["resources"]["limits"]["nvidia.com/gpu"] == 8
        assert container["envFrom"] == [{"secretRef": {"name": "one-job"}}]


def record(required: str = "", **properties):
    """An object of these fields and no others."""
    return {"type": "object", "properties": properties, "required": required.split(), "additionalProperties": False}


def rayjob_schema():
    """Of the fields that a manifest of ours has: names, types and what is required, as KubeRay's CRD says (ray.io/v1).

    Reduced by hand from KubeRay's CRD (helm-chart/kuberay-operator/crds/ray.io_rayjobs.yaml); not the published file.
    """
    text, count = {"type": "string"}, {"type": "integer", "minimum": -(2**31), "maximum": 2**31 - 1}
    texts = {"type": "object", "additionalProperties": text}
    quantity = r"^(\+|-)?([0-9]+(\.[0-9]*)?|\.[0-9]+)([KMGTPE]i|[numkMGTPE]|[eE](\+|-)?[0-9]+)?$"
    amounts = {"type": "object", "additionalProperties": {"type": ["integer", "string"], "pattern": quantity}}
    container = record(
        "name",
        name=text,
        image=text,
        env={"type": "array", "items": record("name", name=text, value=text)},
        envFrom={"type": "array", "items": record(secretRef=record(name=text))},
        resources=record(limits=amounts, requests=amounts),
    )
    pod = record("containers", containers={"type": "array", "items": container}, serviceAccountName=text)
    group = {"rayStartParams": texts, "template": record(spec=pod)}
    sizes = dict.fromkeys(("replicas", "minReplicas", "maxReplicas"), count)
    workers = record("groupName maxReplicas minReplicas template", groupName=text, **sizes, **group)
    cluster = record(
        "headGroupSpec",
        headGroupSpec=record("template", **group),
        workerGroupSpecs={"type": "array", "items": workers},
    )
    flag = {"type": "boolean"}
    spec = record(entrypoint=text, shutdownAfterJobFinishes=flag, backoffLimit=count, rayClusterSpec=cluster)
    return record("spec", apiVersion=text, kind=text, metadata={"type": "object"}, spec=spec)


@pytest.mark.parametrize("given", [{}, {"nodes": 3, "gpus": "8xH100", "service_account": "train"}])
def test_rayjob_validates_against_the_schema_of_kuberay(project, given):
    *_, job = yaml.safe_load_all(request("kubernetes", image="registry/image:1", **given))
    jsonschema.validate(job, rayjob_schema())
    job["spec"]["rayClusterSpec"]["headGroupSpec"]["replicas"] = 1  # which a head does not have
    with pytest.raises(jsonschema.ValidationError, match="replicas"):
        jsonschema.validate(job, rayjob_schema())


def test_client_that_refuses_is_quoted(project, monkeypatch, tmp_path):
    program = tmp_path / "bin/dstack"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\necho first >&2\necho 'No project is configured' >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    job, record, diff = plan("small.yaml", open_cluster("dstack", None, {"sync": "s3://lab/runs"}), name="one-job")
    log = JobLog(str(tmp_path / "log"))
    with pytest.raises(PalestraError, match="dstack apply failed: No project is configured"):
        log.launch(job, record, diff)
    assert log.get("one-job")["reason"] == "dstack apply failed: No project is configured"


def test_rayjob_is_followed_until_it_was_stopped_which_deletes_it(project, monkeypatch, tmp_path):
    program, status = tmp_path / "bin/kubectl", tmp_path / "status"
    program.parent.mkdir()
    program.write_text(
        f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\ncase $2 in get) cat {status};; delete) : > {status};; esac\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    given = {"sync": "s3://lab/runs", "image": "registry/image:1", "namespace": "rl"}
    job, record, diff = plan("small.yaml", open_cluster("kubernetes", None, given), name="one-job")
    log = JobLog(str(tmp_path / "log"))
    log.launch(job, record, diff)
    for status_now, state in (({}, "pending"), ({"jobStatus": "RUNNING"}, "running")):
        status.write_text(json.dumps({"status": status_now}))
        assert log.refreshed(log.get("one-job"))["state"] == state
    log.stop("one-job")
    assert log.refreshed(log.get("one-job"))["state"] == "stopped"
    assert "--namespace=rl delete rayjob,secret one-job --ignore-not-found" in (tmp_path / "calls").read_text()


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"SLURM_NODEID": "1", "SLURM_NNODES": "2", "PALESTRA_HEAD": "10.0.0.1"}, (1, 2, "10.0.0.1")),
        ({"SKYPILOT_NODE_RANK": "0", "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2"}, (0, 2, "10.0.0.1")),
        ({"DSTACK_NODE_RANK": "2", "DSTACK_NODES_NUM": "3", "DSTACK_MASTER_NODE_IP": "10.0.0.9"}, (2, 3, "10.0.0.9")),
        ({}, (0, 1, "127.0.0.1")),
    ],
)
def test_machine_knows_its_rank_from_whoever_started_it(monkeypatch, environment, expected):
    for name in list(os.environ):
        if name.startswith(("SLURM", "SKYPILOT", "DSTACK")):
            monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert node.machines() == expected


def test_hosts_of_sagemaker_are_ranked_by_name(monkeypatch, tmp_path):
    config = tmp_path / "resourceconfig.json"
    config.write_text(json.dumps({"current_host": "localhost", "hosts": ["z-2", "localhost"]}))
    monkeypatch.setattr(node, "SAGEMAKER", config)
    assert node.machines() == (0, 2, "127.0.0.1")


def test_one_machine_runs_the_command_itself(monkeypatch):
    assert node.main([sys.executable, "-c", "raise SystemExit(7)"]) == 7
