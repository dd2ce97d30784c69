"""The commands that compare many runs: `palestra sweep`, `speedrun` and `bench`, and what `search` prints."""

import json
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer import Argument, Option

from palestra.cli import options
from palestra.cli.options import Texts

app = typer.Typer()


@app.command(rich_help_panel=options.EXPERIMENTS)
def sweep(
    spec: options.Spec,
    overrides: options.Overrides = None,
    variables: options.Set = None,
    plan: Annotated[bool, Option("--plan", help="Print the runs and their sizes; write nothing.")] = False,
    only: Annotated[Texts, Option(metavar="AXIS=SETTING", help="Only these settings, as size=s,m; repeatable.")] = None,
    group: Annotated[str | None, Option(help="The folder of the runs; by default NAME_COMMIT.", metavar="NAME")] = None,
    parallel: Annotated[int, Option(min=1, help="Worker processes here; more may run elsewhere.")] = 1,
    on: options.On = None,
    root: options.Root = options.RUNS,
    quiet: options.Quiet = False,
) -> None:
    """Run the cross product of a spec's `sweep:` block, shared by several processes; finished runs are kept."""
    settings = options.parsed({"spec": spec, "overrides": overrides, "variables": variables})
    from palestra.sweep.run import plan as planned
    from palestra.sweep.run import sweep as start

    points = planned(**settings, only=only or [], group=group, root=root)
    if plan:
        show_plan(points)
    else:
        show_sweep(start(points, parallel=parallel, quiet=quiet, on=on), points.folder)


def show_plan(planned: Any) -> None:
    """Every run with its sizes and its state, then how many are left."""
    from palestra.cli.show import console, table
    from palestra.sweep.results import sizes
    from palestra.sweep.run import CLAIMS, Claims

    sizes_of = {point.name: sizes(point.spec) for point in planned.points}
    states = {name: Claims(planned.folder / CLAIMS).state(name) for name in sizes_of}
    columns = list(dict.fromkeys(column for row in sizes_of.values() for column in row))
    rows = [(name, *(_size(row, column) for column in columns), states[name]) for name, row in sizes_of.items()]
    console().print(table(("run", *columns, "state"), rows, right=columns))
    left = sum(state != "done" for state in states.values())
    total = sum(float(row.get("training FLOPs", 0)) for row in sizes_of.values())
    cost = f", {total:.3e} FLOPs in all" if total else ""
    print(f"{len(rows)} runs in {planned.folder}, {left} to run{cost}")


def _size(sizes: dict[str, float], column: str) -> str:
    if column not in sizes:
        return "–"
    return f"{sizes[column]:.3e}" if column == "training FLOPs" else f"{sizes[column]:,}"


def show_sweep(summary: dict[str, Any], folder: Path) -> None:
    """Every run of the group with its score, the best one marked, and where the results are."""
    from palestra.cli.show import console, print_pairs, table

    rows = []
    for row in summary["runs"]:
        mark = "*" if row["run"] == summary["best"] else ""
        rows.append((f"{mark}{row['run']}", row["state"], "–" if row["score"] is None else f"{row['score']:.6g}"))
    console().print(table(("run", "state", summary["metric"] or "score"), rows))
    print_pairs([("folder", folder), *(("plot", path) for path in sorted((folder / "plots").glob("*.png")))])


def show_search(experiment: Any) -> None:
    """Every trial of a search with its values, score and state, then the best one, the cost and the folder."""
    from palestra.cli.show import console, inline, number, print_pairs, table

    summary = experiment.summary()
    keys = list(summary["trials"][0]["values"])
    rows = []
    for trial in summary["trials"]:
        state = trial["state"] + ("" if trial["reason"] is None else f": {trial['reason'].strip().splitlines()[-1]}")
        mark = "*" if trial["trial"] == summary["best"] else ""
        values = [f"{v:.4g}" if isinstance(v, float) else inline(v) for v in (trial["values"][key] for key in keys)]
        rows.append((f"{mark}{trial['trial']}", *values, number(trial["score"]), f"{trial['counted']:,}", state))
    numbers = ("trial", *keys, summary["metric"], summary["by"])
    console().print(table((*numbers, "state"), rows, right=numbers))
    cost, whole = f"{summary['counted']:,} {summary['by']}", summary["counted_if_all_ran"]
    if whole:
        cost += f", {summary['counted'] / whole:.0%} of the {whole:,} of running every trial to its end"
    print_pairs(
        [
            ("best", f"trial {summary['best']}, {summary['metric']} {summary['score']:.6g}"),
            ("cost", cost),
            ("folder", experiment.path),
            *(("plot", path) for path in sorted((experiment.path / "plots").glob("*.png"))),
            ("train it", f"palestra train {experiment.best} seed={max(summary['seeds']) + 1} max_session=4"),
        ]
    )


speedruns = typer.Typer(help="Speedruns: submissions, leaderboard, Pareto frontier.", no_args_is_help=True)
app.add_typer(speedruns, name="speedrun", rich_help_panel=options.EXPERIMENTS)
BOARD = {
    "run": "{run_name}",
    "author": "{author}",
    "bits/byte": "{eval_bits_per_byte:.4f}",
    "parameters": "{model_size:,}",
    "tokens": "{total_tokens:.3g}",
    "model FLOPs": "{model_flops:.3g}",
    "hardware FLOPs": "{training_hardware_flops:.3g}",
    "MFU": "{mfu:.1%}",
    "minutes": "{minutes:.1f}",
    "device": "{device}",
}
"""The columns of the leaderboard."""
Submissions = Annotated[Path, Argument(help="A folder of submissions; every speedrun.json in it counts.")]


@speedruns.command()
def info(spec: options.Spec, overrides: options.Overrides = None, variables: options.Set = None) -> None:
    """Estimate the cost of a run: parameters, tokens, model FLOPs, hardware FLOPs and hours."""
    settings = options.parsed(locals())
    from palestra.speedrun.submission import about

    for name, value in about(**settings).items():
        typer.echo(f"{name:<28}{value}")


@speedruns.command()
def run(
    spec: options.SpecToRun = None,
    overrides: options.Overrides = None,
    author: Annotated[str | None, Option(help="The author's name; by default git's user.name.")] = None,
    affiliation: Annotated[str, Option(help="The author's affiliation.")] = "",
    url: Annotated[str, Option(help="The author's home page.")] = "",
    description: Annotated[str, Option(help="What is new about it, in one sentence.")] = "",
    peak: Annotated[float | None, Option(help="Peak FLOPs per second of an unknown device.", metavar="FLOPS")] = None,
    resume: Annotated[str | None, Option(metavar="RUN", help="Continue a run that was stopped.")] = None,
    variables: options.Set = None,
    root: options.Root = options.RUNS,
    quiet: options.Quiet = False,
) -> None:
    """Train a spec and write speedrun.json into its run folder: the spec and all measurements."""
    settings = options.parsed(locals())
    from palestra.speedrun.submission import submit

    typer.echo(submit(**settings))


@speedruns.command()
def leaderboard(
    folder: Submissions,
    to: Annotated[Path | None, Option("--json", help="Also write the rows to this file.", metavar="FILE")] = None,
) -> None:
    """List the submissions of a folder, lowest bits per byte first."""
    from palestra.cli.show import console, table
    from palestra.runs.store import write_bytes
    from palestra.speedrun.leaderboard import read_rows

    rows = read_rows(folder)
    cells = []
    for row in rows:
        texts = [text.format(**row, minutes=row["training_time"] / 60) for text in BOARD.values()]
        cells.append(["*" if row["pareto"] else "", *texts])
    console().print(table(("", *BOARD), cells, right=list(BOARD)[2:-1]))
    typer.echo("* on the Pareto frontier: no better score for as many or fewer hardware FLOPs")
    if to is not None:
        write_bytes(to, (json.dumps(rows, indent=1) + "\n").encode())


@speedruns.command()
def pareto(folder: Submissions, out: Annotated[Path, Option(help="The PNG to write.")] = Path("pareto.png")) -> None:
    """Plot bits per byte over hardware FLOPs, with the Pareto frontier."""
    from palestra.speedrun.leaderboard import draw, read_rows

    typer.echo(draw(read_rows(folder), out))


@app.command(rich_help_panel=options.SHARING)
def bench(
    suite: Annotated[str | None, Argument(help="classic, box2d, mujoco or atari.", metavar="SUITE")] = None,
    seeds: Annotated[
        str | None, Option(metavar="1000-1003", help="Seeds to run; by default those of the table.")
    ] = None,
    only: Annotated[str | None, Option(metavar="REGEX", help="Only specs whose name matches.")] = None,
    parallel: Annotated[int | None, Option(min=1, help="Parallel runs; by default one per core.")] = None,
    hours: Annotated[
        float | None, Option(min=0, metavar="H", help="Run for so many hours, the cheapest missing rows first.")
    ] = None,
    on: options.On = None,
    device: Annotated[
        Literal["cpu", "cuda"] | None, Option(help="Where to compute; by default as the specs say.")
    ] = None,
    out: Annotated[Path | None, Option(help="The page to write; in a checkout docs/benchmarks.md.")] = None,
    table_only: Annotated[bool, Option("--table", help="Run nothing: update the table from the run folders.")] = False,
    specs: Annotated[Path | None, Option(metavar="FOLDER", help="The specs; by default examples/control.")] = None,
    root: Annotated[Path, Option("--runs", metavar="FOLDER", help="The folder of runs.")] = Path("runs/bench"),
) -> None:
    """Run the shipped specs of a suite over seeds and update the table; finished seeds are kept, others resumed."""
    settings = locals()
    from palestra.bench.run import bench as run_suite

    run_suite(**settings, tell=typer.echo)
