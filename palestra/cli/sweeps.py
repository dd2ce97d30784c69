"""The commands `palestra sweep` and `palestra speedrun`, and what they print."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from palestra.cli.lab import EXPERIMENTS, RUNS, Root, Set, variables

app = typer.Typer()
Overrides = Annotated[
    list[str] | None, typer.Argument(help="Overrides of the spec: optim.lr=3e-4", metavar="KEY=VALUE")
]
Spec = Annotated[str, typer.Argument(help="FILE.yaml or FILE.yaml:NAME")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")]


@app.command(rich_help_panel=EXPERIMENTS)
def sweep(
    spec: Spec,
    overrides: Overrides = None,
    set_: Set = None,
    plan: Annotated[bool, typer.Option("--plan", help="Print the runs and their sizes; write nothing.")] = False,
    only: Annotated[
        list[str] | None, typer.Option(metavar="AXIS=SETTING", help="Only these settings: size=s,m; may be repeated.")
    ] = None,
    group: Annotated[
        str | None, typer.Option(help="The folder that the runs share; by default NAME_COMMIT.", metavar="NAME")
    ] = None,
    parallel: Annotated[int, typer.Option(min=1, help="Worker processes here; more may run elsewhere.")] = 1,
    runs: Root = RUNS,
    quiet: Quiet = False,
) -> None:
    """Run the cross product of a spec's `sweep:` block; what is done is kept, and any number of processes share it."""
    from palestra.sweep.run import plan as planned
    from palestra.sweep.run import sweep as start

    found = planned(spec, only=only or [], group=group, variables=variables(set_), root=runs, overrides=overrides or [])
    if plan:
        show_plan(found)
        return
    show_sweep(start(found, parallel=parallel, quiet=quiet), found.folder)


def show_plan(planned: Any) -> None:
    """Every run with its sizes and its state, then how many are left."""
    from rich.table import Table

    from palestra.cli.show import console
    from palestra.sweep.results import sizes

    told = {point.name: sizes(point.spec) for point in planned.points}
    states = {point.name: planned.state(point.name) for point in planned.points}
    columns = list(dict.fromkeys(column for sizes_of in told.values() for column in sizes_of))
    table = Table(box=None, header_style="bold")
    for column in ("run", *columns, "state"):
        table.add_column(column, justify="left" if column in ("run", "state") else "right")
    for name, sizes_of in told.items():
        table.add_row(name, *(_number(sizes_of.get(column), column) for column in columns), states[name])
    console().print(table)
    left = sum(state != "done" for state in states.values())
    total = sum(float(sizes_of.get("training FLOPs", 0)) for sizes_of in told.values())
    cost = f", {total:.3e} FLOPs in all" if total else ""
    print(f"{len(told)} runs in {planned.folder}, {left} to run{cost}")


def show_sweep(summary: dict[str, Any], folder: Path) -> None:
    """Every run of the group with its score, the best one and where all is."""
    from rich.table import Table

    from palestra.cli.show import console

    table = Table(box=None, header_style="bold")
    for column in ("run", "state", summary["metric"] or "score"):
        table.add_column(column)
    for row in summary["runs"]:
        mark = "*" if row["run"] == summary["best"] else ""
        table.add_row(f"{mark}{row['run']}", row["state"], "–" if row["score"] is None else f"{row['score']:.6g}")
    console().print(table)
    print(f"{'folder':<15}{folder}")
    for path in sorted((folder / "plots").glob("*.png")):
        print(f"{'plot':<15}{path}")


speedruns = typer.Typer(help="Speedruns: submissions, leaderboard, Pareto frontier.", no_args_is_help=True)
app.add_typer(speedruns, name="speedrun", rich_help_panel=EXPERIMENTS)
Submissions = Annotated[Path, typer.Argument(help="A folder of submissions: every speedrun.json in it counts.")]


@speedruns.command()
def info(spec: Spec, overrides: Overrides = None, set_: Set = None) -> None:
    """What a run would cost, before it: its size, its tokens, its FLOPs, and hardware FLOPs and hours at a guess."""
    from palestra.speedrun.submission import about

    for name, value in about(spec, variables=variables(set_), overrides=overrides or []).items():
        typer.echo(f"{name:<28}{value}")


@speedruns.command()
def run(
    spec: Annotated[str | None, typer.Argument(help="FILE.yaml or FILE.yaml:NAME; not needed with --resume.")] = None,
    overrides: Overrides = None,
    author: Annotated[str | None, typer.Option(help="Who submits it; by default git's user.name.")] = None,
    affiliation: Annotated[str, typer.Option(help="The author's.")] = "",
    url: Annotated[str, typer.Option(help="Where to find the author.")] = "",
    description: Annotated[str, typer.Option(help="What is new about it, in a sentence.")] = "",
    peak: Annotated[
        float | None, typer.Option(help="FLOPs a second of one device, where it is not known.", metavar="FLOPS")
    ] = None,
    resume: Annotated[str | None, typer.Option(metavar="RUN", help="Go on with a run that was stopped.")] = None,
    set_: Set = None,
    runs: Root = RUNS,
    quiet: Quiet = False,
) -> None:
    """Train a spec and write speedrun.json into its run folder: the spec, and all that was measured."""
    from palestra.speedrun.submission import Author, submit

    path = submit(
        spec,
        author=Author.found(author, affiliation, url),
        description=description,
        peak=peak,
        resume=resume,
        variables=variables(set_),
        root=runs,
        quiet=quiet,
        overrides=overrides or [],
    )
    typer.echo(path)


@speedruns.command()
def leaderboard(
    folder: Submissions,
    to: Annotated[Path | None, typer.Option("--json", help="Write the rows there too.", metavar="FILE")] = None,
) -> None:
    """The submissions of a folder, best bits per byte first."""
    from rich.table import Table

    from palestra.cli.show import console
    from palestra.runs.store import write_bytes
    from palestra.speedrun.leaderboard import read_rows

    rows = read_rows(folder)
    table = Table(box=None, header_style="bold")
    shown = {
        "": lambda row: "*" if row["pareto"] else "",
        "run": lambda row: row["run_name"],
        "author": lambda row: row["author"],
        "bits/byte": lambda row: f"{row['eval_bits_per_byte']:.4f}",
        "parameters": lambda row: f"{row['model_size']:,}",
        "tokens": lambda row: f"{row['total_tokens']:.3g}",
        "model FLOPs": lambda row: f"{row['model_flops']:.3g}",
        "hardware FLOPs": lambda row: f"{row['training_hardware_flops']:.3g}",
        "MFU": lambda row: f"{row['mfu']:.1%}",
        "minutes": lambda row: f"{row['training_time'] / 60:.1f}",
        "device": lambda row: row["device"],
    }
    for column in shown:
        table.add_column(column, justify="left" if column in ("", "run", "author", "device") else "right")
    for row in rows:
        table.add_row(*(cell(row) for cell in shown.values()))
    console().print(table)
    typer.echo("* nothing is better for fewer hardware FLOPs")
    if to is not None:
        write_bytes(to, (json.dumps(rows, indent=1) + "\n").encode())


@speedruns.command()
def pareto(
    folder: Submissions,
    out: Annotated[Path, typer.Option(help="The PNG to write.")] = Path("pareto.png"),
) -> None:
    """Draw bits per byte over hardware FLOPs, and the frontier that nobody has beaten."""
    from palestra.speedrun.leaderboard import draw, read_rows

    typer.echo(draw(read_rows(folder), out))


def _number(value: float | None, column: str) -> str:
    if value is None:
        return "–"
    return f"{value:.3e}" if column == "training FLOPs" else f"{value:,}"
