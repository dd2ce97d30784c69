"""`palestra launch` and `palestra jobs`: runs started elsewhere, or here in the background, and followed."""

import json
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from palestra.cli import options
from palestra.cli.options import Texts

app = typer.Typer()
jobs = typer.Typer(help="List and follow launched jobs, stop and retry them, get their results.", no_args_is_help=True)
app.add_typer(jobs, name="jobs", rich_help_panel=options.EXPERIMENTS)
Name = Annotated[str, Argument(help="A job: its name, or the beginning of it.", metavar="JOB")]
Log = Annotated[
    str | None,
    Option("--log", envvar="PALESTRA_JOBS", metavar="PLACE", help="The job log: a folder or s3://…, shared by a team."),
]
KINDS = "local, ray, slurm, sagemaker, skypilot, dstack or kubernetes."
FOLLOW_SECONDS = 2.0


@app.command(rich_help_panel=options.EXPERIMENTS)
def launch(
    spec: options.Spec,
    overrides: options.Overrides = None,
    variables: options.Set = None,
    on: Annotated[str | None, Option(metavar="KIND", help=KINDS)] = None,
    cluster: Annotated[str | None, Option(help="A named cluster: clusters/NAME.yaml.", metavar="NAME")] = None,
    name: Annotated[str | None, Option(help="Name of the job; by default the spec's and the time.")] = None,
    gpus: Annotated[str | None, Option(metavar="8xH100", help="GPUs of each machine.")] = None,
    device_ids: Annotated[str | None, Option(metavar="0,1", help="local: the GPUs of this machine to use.")] = None,
    nodes: Annotated[int | None, Option(min=1, help="Machines.")] = None,
    instance_type: Annotated[str | None, Option(metavar="TYPE", help="The machine, as the cloud names it.")] = None,
    image: Annotated[str | None, Option(help="The container image.")] = None,
    build: Annotated[bool, Option("--build", help="Build the image from the project's Dockerfile first.")] = False,
    push: Annotated[bool, Option("--push", help="Push the image first; its ECR repository is made.")] = False,
    local: Annotated[bool, Option("--local", help="SageMaker: run the same container on this machine.")] = False,
    env: Annotated[Texts, Option(metavar="K=V", help="A variable of the job; K alone: as here. Repeatable.")] = None,
    extra: Annotated[Texts, Option(help="An extra of Palestra to install there; repeatable.")] = None,
    array: Annotated[int, Option(min=0, metavar="N", help="Slurm: N tasks, for seeds or the spec's sweep.")] = 0,
    sync: Annotated[str | None, Option(metavar="PLACE", help="Copy the run there while it trains: s3://…")] = None,
    wait: Annotated[bool, Option("--wait/--no-wait", help="Follow the job's output; Ctrl-C leaves it running.")] = True,
    dry_run: Annotated[bool, Option("--dry-run", help="Print what would be submitted; submit nothing.")] = False,
    log: Log = None,
    runs: options.Root = options.RUNS,
) -> None:
    """Start a run elsewhere, or here in the background; the same command continues it after an interruption."""
    from palestra.errors import UsageError
    from palestra.launch.clusters import open_cluster
    from palestra.launch.job import plan

    given = {"gpus": gpus, "nodes": nodes, "instance_type": instance_type, "image": image, "sync": sync}
    given |= {"device_ids": device_ids}
    opened = open_cluster(on, cluster, {key: value for key, value in given.items() if value is not None})
    if (build or push or local) and opened.on not in (("sagemaker",) if local else ("sagemaker", "kubernetes")):
        raise UsageError("--build and --push are for images of sagemaker and kubernetes, --local for sagemaker alone")
    settings = options.parsed({"spec": spec, "overrides": overrides, "variables": variables})
    settings |= {"name": name, "env": env or (), "extras": extra or (), "array": array, "root": runs}
    job, record, diff = plan(**settings, cluster=opened, cluster_name=cluster)
    if dry_run:
        typer.echo(opened.request(job), nl=False)
        return
    if record["dirty"]:
        typer.echo("the tree has changes that are not committed: they are recorded with the job", err=True)
    if build or push or local:
        from palestra.launch.sagemaker import prepare, run_locally

        prepare(job, build=build, push=push)
        if local:
            run_locally(job)
            return
    jobs = _log(log)
    jobs.launch(job, record, diff)
    typer.echo(f"{job.name} is submitted: palestra jobs logs -f {job.name}; results in {record['results']}", err=True)
    if wait:
        _follow(jobs, job.name)


def _log(where: str | None) -> Any:
    from palestra.launch.log import JobLog  # here, because the help needs no log

    return JobLog(where)


def _follow(log: Any, name: str) -> None:
    from palestra.errors import PalestraError
    from palestra.launch.log import followed

    try:
        for part in followed(log, name, lambda: time.sleep(FOLLOW_SECONDS)):
            sys.stdout.write(part.decode(errors="replace"))
            sys.stdout.flush()
    except KeyboardInterrupt:
        typer.echo(f"\n{name} goes on: palestra jobs logs -f {name}", err=True)
        return
    state = log.get(name)["state"]
    typer.echo(f"{name} is {state}", err=True)
    if state != "done":
        raise PalestraError(f"{name} is {state}: palestra jobs retry {name} continues it")


@jobs.command(name="list")
def list_(
    as_json: Annotated[bool, Option("--json", help="Print JSON.")] = False,
    limit: Annotated[int, Option(min=1, help="Maximum number of jobs; the newest are shown.")] = 30,
    log: Log = None,
) -> None:
    """List jobs with their state, newest last."""
    opened = _log(log)
    records = sorted((opened.get(name) for name in opened.names()), key=lambda record: record["created"])[-limit:]
    records = [opened.refreshed(record) for record in records]
    if as_json:
        typer.echo(json.dumps(records, indent=1))
        return
    columns = ("name", "on", "state", "run", "by", "created")
    rows = [columns, *([str(record.get(column) or "–") for column in columns] for record in records)]
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    for row in rows:  # plain: what draws tables elsewhere takes a second to import
        typer.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


@jobs.command()
def show(name: Name, log: Log = None) -> None:
    """Show the record of a job: spec, commit, difference, command, what was submitted, state, results."""
    opened = _log(log)
    record = opened.refreshed(opened.get(name))
    for key, value in record.items():
        if key not in ("request", "revisions", "claim") and value not in (None, [], {}, ""):
            typer.echo(f"{key:<12}{value if isinstance(value, str) else json.dumps(value)}")
    typer.echo(f"\n{record.get('request', '')}")
    if diff := opened.diff(record["name"]):
        typer.echo(diff)


@jobs.command()
def logs(
    name: Name,
    follow: Annotated[bool, Option("--follow", "-f", help="Follow until the job ends; Ctrl-C leaves it.")] = False,
    log: Log = None,
) -> None:
    """Print the output of a job."""
    from palestra.launch.clusters import cluster_of

    opened = _log(log)
    record = opened.get(name)
    if follow:
        _follow(opened, record["name"])
    else:
        typer.echo(cluster_of(record).logs(record).decode(errors="replace"), nl=False)


@jobs.command()
def stop(name: Name, log: Log = None) -> None:
    """Ask a job to save and end."""
    name = _log(log).stop(name)["name"]
    typer.echo(f"{name} is asked to save and end; palestra jobs retry {name} continues it")


@jobs.command()
def retry(name: Name, log: Log = None) -> None:
    """Submit a job again that has ended: the same run continues."""
    record = _log(log).retry(name)
    typer.echo(f"{record['name']} is submitted again, attempt {record['attempts']}")


@jobs.command()
def pull(name: Name, log: Log = None, runs: options.Root = options.RUNS) -> None:
    """Copy the run of a job, finished or not, into the folder of runs."""
    typer.echo(_run_of(name, log, runs).path)


@jobs.command()
def metrics(name: Name, log: Log = None, runs: options.Root = options.RUNS) -> None:
    """Show the last row of metrics of a job's run, of each seed."""
    from palestra.cli.show import print_pairs

    run = _run_of(name, log, runs)
    for seed in run.seeds:
        print_pairs([*(run.metrics(seed) or [{"seed": seed}])[-1].items()])


@jobs.command()
def publish(name: Name, log: Log = None, runs: options.Root = options.RUNS) -> None:
    """Copy the finished run of a job to the place `published`."""
    from palestra.data.remote import open_filesystem
    from palestra.runs.share import place, push_run

    run, (url, only_done) = _run_of(name, log, runs), place("published")
    sent, present = push_run(run, *open_filesystem(url), published=only_done)
    typer.echo(f"{run.name}/{run.id} is at {url}: {sent} files sent, {present} already there")


def _run_of(name: str, log: str | None, runs: Path) -> Any:
    from functools import partial

    from palestra.data.remote import open_filesystem
    from palestra.errors import UsageError
    from palestra.runs.run import Run
    from palestra.runs.sync import fetch_run

    record = _log(log).get(name)
    where = record["results"]
    if record["run"] is None or record["array"]:
        raise UsageError(f"{record['name']} has several runs: they are in {where}")
    run = fetch_run(where, partial(open_filesystem, where), runs) if "://" in where else None
    if run is None and not (Path(where) / "trial.json").is_file():
        raise UsageError(f"{record['name']} has no run yet: it would be at {where}")
    return run or Run(where)
