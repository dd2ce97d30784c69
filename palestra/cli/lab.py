"""The commands around a lab's work: try a spec out, run benchmarks, bring specs over, share runs."""

import os
from pathlib import Path
from typing import Annotated

import typer

RUNS = Path("runs")
Root = Annotated[Path, typer.Option("--runs", metavar="FOLDER", help="The folder of all runs.")]
Set = Annotated[list[str] | None, typer.Option("--set", "-s", metavar="VAR=VALUE", help="Fill a ${VAR} of the spec.")]

# The groups of `palestra --help`.
EXPERIMENTS, RESULTS, MODELS, DATA, SHARING = (
    "Experiments",
    "Results",
    "Models",
    "Data and pipelines",
    "Benchmarks, sharing, migration",
)

app = typer.Typer()


@app.command(rich_help_panel=EXPERIMENTS)
def dev(
    spec: Annotated[str, typer.Argument(help="FILE.yaml or FILE.yaml:NAME")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Overrides of the spec: algorithm.lr=3e-4", metavar="KEY=VALUE")
    ] = None,
    set_: Set = None,
    render: Annotated[
        bool, typer.Option("--render", help="Show an episode: in a window, or as dev.gif where there is no display.")
    ] = False,
) -> None:
    """Try a control spec out in seconds: a tiny run whose gradients, updates and losses are checked part by part."""
    announce(spec)
    from palestra.api import check
    from palestra.errors import MissingExtra

    loaded = check(spec, variables=variables(set_), overrides=overrides or [])
    try:
        from palestra.control.sanity import try_out
    except ModuleNotFoundError as error:
        raise MissingExtra("palestra dev", "train") from error
    try_out(loaded.spec, typer.echo, video=Path("dev.gif") if render else None)


@app.command(rich_help_panel=SHARING)
def bench(
    suite: Annotated[str | None, typer.Argument(help="classic, box2d, mujoco or atari.", metavar="SUITE")] = None,
    seeds: Annotated[
        str | None, typer.Option(metavar="1000-1003", help="The seeds to run and to show; by default the table's own.")
    ] = None,
    only: Annotated[str | None, typer.Option(metavar="REGEX", help="Only specs whose name it finds.")] = None,
    parallel: Annotated[int | None, typer.Option(min=1, help="Runs at a time; by default one a core.")] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="The page to write, results and plots/ beside it; in a checkout docs/benchmarks.md."),
    ] = None,
    table: Annotated[bool, typer.Option("--table", help="Run nothing: enter what the run folders hold.")] = False,
    specs: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="The suite's specs; by default examples/control.")
    ] = None,
    runs: Annotated[Path, typer.Option("--runs", metavar="FOLDER", help="The folder of benchmark runs.")] = Path(
        "runs/bench"
    ),
) -> None:
    """Run the shipped specs of a suite over seeds and show the table; finished seeds are kept, others continued."""
    from palestra.bench.run import bench as run_suite

    run_suite(
        suite,
        seeds=seeds,
        only=only,
        parallel=parallel or os.cpu_count() or 1,
        out=out,
        run_nothing=table,
        specs=specs,
        root=runs,
        tell=typer.echo,
    )


imports = typer.Typer(help="Bring specs of other frameworks over.", no_args_is_help=True)
app.add_typer(imports, name="import", rich_help_panel=SHARING)


@imports.callback()
def _imports() -> None:
    """Bring specs of other frameworks over."""


@imports.command(name="slm-lab")
def slm_lab(
    spec: Annotated[Path, typer.Argument(help="A JSON or YAML file of SLM-Lab's specs.", metavar="FILE")],
    name: Annotated[str, typer.Argument(help="The spec in it.")],
    set_: Set = None,
    out: Annotated[Path | None, typer.Option(help="The file to write; by default NAME.yaml here.")] = None,
) -> None:
    """Turn a spec of SLM-Lab into one of Palestra, and say which of its keys did not come along, and why."""
    from palestra.errors import UsageError
    from palestra.migrate.slm_lab import import_spec
    from palestra.runs.store import write_bytes

    found = import_spec(spec, name, variables(set_))
    target = out or Path(f"{found.name}.yaml")
    if out is None and target.exists():
        raise UsageError(f"{target} exists: name another file with --out, or the same one to replace it")
    write_bytes(target, found.to_yaml(f"{spec.name}, {name}").encode())
    for note in found.notes:
        typer.echo(f"note: {note}", err=True)
    typer.echo(f"{target}: palestra check {target}")


@app.command(rich_help_panel=SHARING)
def push(
    run: Annotated[str, typer.Argument(help="A run: its path, name, name/id or id.")],
    to: Annotated[
        str,
        typer.Option(help="dev or published (PALESTRA_DEV, PALESTRA_PUBLISHED), a folder, s3://… or hf://datasets/…"),
    ] = "dev",
    runs: Root = RUNS,
) -> None:
    """Copy a run to where it is shared; only what is not there yet travels. `published` takes finished runs alone."""
    from palestra.data.remote import open_filesystem
    from palestra.runs.run import open_run
    from palestra.runs.share import place, push_run

    found = open_run(run, runs)
    url, graduated = place(to)
    sent, kept = push_run(found, *open_filesystem(url), published=graduated)
    typer.echo(f"{found.name}/{found.id} is at {url}: {sent} files sent, {kept} were there")


@app.command(rich_help_panel=SHARING)
def pull(
    name: Annotated[str, typer.Argument(help="NAME/ID of a shared run, or NAME for the newest of that name.")],
    from_: Annotated[
        str, typer.Option("--from", help="dev or published, a folder, s3://… or hf://datasets/…")
    ] = "published",
    runs: Root = RUNS,
) -> None:
    """Copy a shared run into the folder of runs; every file is checked against its checksum."""
    from palestra.data.remote import open_filesystem
    from palestra.runs.share import place, pull_run

    typer.echo(pull_run(name, *open_filesystem(place(from_)[0]), root=runs))


def announce(what: str) -> None:
    """Say what is loaded before anything heavy is: importing torch alone takes seconds."""
    if os.environ.get("RANK", "0") == "0":  # one of the processes that `torchrun` started speaks for all
        typer.echo(f"loading torch and {what} …", err=True)


def variables(given: list[str] | None) -> dict[str, str]:
    """The pairs of `-s VAR=VALUE`."""
    pairs = {}
    for text in given or []:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise typer.BadParameter(f"{text!r} is not VAR=VALUE", param_hint="--set")
        pairs[name] = value
    return pairs
