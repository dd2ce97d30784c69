"""`palestra cluster`: the processes of a running post-training run, how many there are, and Ray's token."""

from typing import Annotated, Any

import typer
from typer import Argument, Option

from palestra.cli import options

app = typer.Typer(
    help="Show, add and remove the generators and verifiers of a running run; the token of Ray.", no_args_is_help=True
)

Role = Annotated[str, Option(help="generator or verifier.")]
Seed = Annotated[int | None, Option(help="Which seed of the run; by default its only one.")]


def _folder(run: str, runs: Any, seed: int | None) -> Any:
    from palestra.errors import UsageError
    from palestra.runs.run import open_run

    sessions = [session for session in open_run(run, runs).sessions if seed in (None, session.seed)]
    if len(sessions) != 1:
        known = ", ".join(str(session.seed) for session in open_run(run, runs).sessions)
        raise UsageError(f"{run}: which seed? Give --seed; there are {known or 'none'}")
    return sessions[0].path


@app.command()
def show(run: options.RunName, seed: Seed = None, runs: options.Root = options.RUNS) -> None:
    """List the processes of a run apart from its trainers, with their state, load and weight version."""
    from palestra.cli.show import console, table
    from palestra.cluster.placement import members_of

    columns = ("name", "state", "machine", "pid", "load", "version", "generated")
    members = [member for crew in members_of(_folder(run, runs, seed)).values() for member in crew]
    rows = [[str(member.get(column, "–")) for column in columns] for member in members]
    console().print(table(columns, rows, right=columns[3:]))


@app.command()
def auth(
    generate: Annotated[bool, Option("--generate", help="Make a token first, if there is none.")] = False,
) -> None:
    """Print the token that the Ray dashboard of this machine's clusters asks for, and say where it is from."""
    from palestra.launch.ray import auth_token

    token, source = auth_token(generate=generate)
    typer.echo(f"the token of {source}; a cluster that starts with RAY_AUTH_MODE=token asks for it", err=True)
    typer.echo(token)


@app.command()
def add(
    run: options.RunName,
    count: Annotated[int, Argument(min=1, help="How many.")] = 1,
    role: Role = "generator",
    seed: Seed = None,
    runs: options.Root = options.RUNS,
) -> None:
    """Start more generators (or verifiers) for a running run; they take work once they have the newest weights."""
    from palestra.cluster.placement import command

    for name in command(_folder(run, runs, seed), do="add", role=role, count=count):
        typer.echo(f"{name} is starting")


@app.command()
def remove(
    run: options.RunName,
    name: Annotated[str | None, Argument(help="As `palestra cluster show` names it; by default the last.")] = None,
    role: Role = "generator",
    seed: Seed = None,
    runs: options.Root = options.RUNS,
) -> None:
    """Let a generator (or verifier) finish what it has, and end it."""
    from palestra.cluster.placement import command

    role = role if name is None else name.partition("/")[0]
    for gone in command(_folder(run, runs, seed), do="remove", role=role, name=name):
        typer.echo(f"{gone} is leaving")
