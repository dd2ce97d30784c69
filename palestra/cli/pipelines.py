"""`palestra pipeline`: run a pipeline, explain the address of a step, list and remove outputs."""

import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from palestra.cli.options import On, Set, Texts, parse_set
from palestra.errors import PalestraError

if TYPE_CHECKING:
    from palestra.pipeline.runner import PipelineRun

app = typer.Typer(help="Run pipelines: steps from data to trained models, each run once.", no_args_is_help=True)

File = Annotated[str, Argument(help="FILE.yaml, FILE.yaml:NAME, FILE.py or FILE.py:NAME", metavar="PIPELINE")]
Overrides = Annotated[
    Texts, Argument(help="Override fields, such as steps.sft.spec.optim.lr=1e-3.", metavar="KEY=VALUE")
]
Prefix = Annotated[str | None, Option(metavar="PREFIX", help="Folder or URL of outputs; by default the pipeline's.")]
COLORS = {"ran": "green", "done": "green", "running": "cyan", "elsewhere": "cyan", "failed": "red", "blocked": "yellow"}
WORDS = {"done": "done before", "elsewhere": "running elsewhere", "blocked": "not run"}


@app.command()
def run(
    pipeline: File,
    overrides: Overrides = None,
    variables: Set = None,
    prefix: Prefix = None,
    dry_run: Annotated[bool, Option("--dry-run", help="Print what would run, and why; write nothing.")] = False,
    only: Annotated[Texts, Option(metavar="REGEX", help="Only steps whose name matches, and their inputs.")] = None,
    force_failed: Annotated[bool, Option("--force-failed", help="Retry steps that failed before.")] = False,
    max_parallel: Annotated[int, Option(metavar="N", help="Maximum number of parallel steps.", min=1)] = 2,
    on: On = None,
) -> None:
    """Run the steps of a pipeline that are not done yet, and write an HTML report of all of them."""
    from palestra.cli.show import console, table
    from palestra.pipeline.form import load_pipeline
    from palestra.pipeline.graph import Graph, plan
    from palestra.pipeline.outputs import open_outputs
    from palestra.pipeline.report import write_report
    from palestra.pipeline.runner import run as run_steps

    loaded = load_pipeline(pipeline, variables=parse_set(variables), overrides=overrides or [])
    outputs = open_outputs(prefix or loaded.prefix)
    graph, choice = Graph(loaded.steps), {"only": only or (), "force_failed": force_failed}
    how = {"max_parallel": max_parallel, "on": on}
    if dry_run:
        planned = plan(graph, outputs, **choice)
        rows = [(step.action, step.reason, outputs.place(step.address)) for step in planned]
        console().print(table(("", "why", "output"), rows))
        return
    progress = _Progress()
    try:
        with progress.live or nullcontext():
            progress.watch(run_steps(loaded.steps, outputs, **choice, **how, watch=progress.watch))
    finally:
        if progress.run is not None:
            _show_table(progress.run)
        try:
            report = write_report(loaded.name, graph, outputs, progress.states)
            here = Path.cwd()
            typer.echo(f"report  {Path(report).relative_to(here) if Path(report).is_relative_to(here) else report}")
        except (OSError, PalestraError) as error:  # must not hide how the steps ended
            typer.echo(f"the report could not be written: {error}", err=True)


@app.command()
def explain(
    pipeline: File,
    step: Annotated[str, Argument(help="The name of a step, or its address.", metavar="STEP")],
    overrides: Overrides = None,
    variables: Set = None,
    prefix: Prefix = None,
) -> None:
    """Show what the address of a step is a hash of, what is excluded, and what changed since it was last done."""
    from palestra.cli.show import console, table
    from palestra.pipeline.form import load_pipeline
    from palestra.pipeline.graph import Graph
    from palestra.pipeline.graph import explain as explained
    from palestra.pipeline.outputs import open_outputs

    loaded = load_pipeline(pipeline, variables=parse_set(variables), overrides=overrides or [])
    about = explained(Graph(loaded.steps), open_outputs(prefix or loaded.prefix), step)
    print(f"{about.address}\n{about.place} ({'done' if about.done else 'not done'})")
    for title, values in (("made of", about.made_of), ("not part of it: execution only", about.left_out)):
        if values:
            print(f"\n{title}")
            width = max(map(len, values)) + 2
            for path, value in values.items():
                print(f"  {path:<{width}}{value}")
    if about.other is None:
        print("\nno other step of this name is done")
    else:
        print(f"\ndiffers from {about.other}, the newest other one that is done, in")
        console().print(table(("", "there", "here"), about.differences))


Place = Annotated[str, Option("--prefix", metavar="PREFIX", help="Folder or URL of outputs.")]
Delete = Annotated[bool, Option("--delete", help="Remove them; without it they are only listed.")]


@app.command(name="list")
def list_(prefix: Place = "outputs") -> None:
    """List what steps have made under a prefix, with sizes."""
    from palestra.pipeline.outputs import open_outputs

    _show_stored(open_outputs(prefix).stored())


@app.command()
def rm(
    address: Annotated[list[str], Argument(help="Outputs, by NAME-HASH as `palestra pipeline list` shows them.")],
    prefix: Place = "outputs",
    delete: Delete = False,
) -> None:
    """Remove outputs: their steps run again when a pipeline needs them."""
    from palestra.errors import UsageError, did_you_mean
    from palestra.pipeline.outputs import open_outputs

    outputs = open_outputs(prefix)
    stored = {one.address: one for one in outputs.stored()}
    for name in address:
        if name not in stored:
            raise UsageError(f"there is no output {name!r} under {prefix}. {did_you_mean(name, stored)}")
    _remove(outputs, [stored[name] for name in dict.fromkeys(address)], delete)


@app.command()
def gc(
    pipeline: Annotated[list[str], Argument(help="All pipelines that use the prefix.", metavar="PIPELINE...")],
    variables: Set = None,
    prefix: Prefix = None,
    delete: Delete = False,
) -> None:
    """List, and with --delete remove, what none of these pipelines refers to, and what its attempts left behind."""
    from palestra.pipeline.form import load_pipeline
    from palestra.pipeline.graph import Graph
    from palestra.pipeline.outputs import open_outputs

    loaded = [load_pipeline(file, variables=parse_set(variables), overrides=[]) for file in pipeline]
    prefixes = {prefix or one.prefix for one in loaded}
    if len(prefixes) > 1:
        raise PalestraError(f"the pipelines have the prefixes {', '.join(sorted(prefixes))}: give --prefix")
    outputs, used = open_outputs(prefixes.pop()), {address for one in loaded for address in Graph(one.steps).nodes}
    _remove(outputs, [one for one in outputs.stored() if one.address.partition(".partial-")[0] not in used], delete)


def _remove(outputs: Any, stored: list[Any], delete: bool) -> None:
    _show_stored(stored)
    for one in stored if delete else ():
        outputs.remove(one.address)
    if stored:
        typer.echo("removed" if delete else "nothing is removed without --delete")


def _show_stored(stored: list[Any]) -> None:
    from palestra.cli.show import console, table

    rows = [(one.address, f"{one.size / 1e6:,.2f}", one.finished or "left behind") for one in stored]
    console().print(table(("output", "MB", "finished"), rows, right=("MB",)))
    typer.echo(f"{len(stored)} outputs, {sum(one.size for one in stored) / 1e6:,.2f} MB")


class _Progress:
    """The state of the steps as it changes: a live table in a terminal, otherwise a line for each change."""

    def __init__(self) -> None:
        from rich.live import Live

        self.run: PipelineRun | None = None
        self.states: dict[str, str] = {}
        self.began: dict[str, float] = {}
        self.live = Live(refresh_per_second=4, transient=True) if sys.stdout.isatty() else None

    def watch(self, run: "PipelineRun") -> None:
        from rich.text import Text

        self.run = run
        lines = []
        for address, state in run.states.items():
            changed, self.states[address] = self.states.get(address) != state, state
            if changed and state == "running":
                self.began[address] = time.monotonic()
            seconds = run.seconds.get(address)
            if seconds is None and state == "running":
                seconds = time.monotonic() - self.began[address]
            about = WORDS.get(state, state) + ("" if seconds is None or state == "done" else f" {seconds:.1f} s")
            lines.append(Text(f"{about:<20} {address}", COLORS.get(state, "dim")))
            if self.live is None and changed and state not in ("waiting", "done"):
                print(f"{address}  {about}", flush=True)
        if self.live is not None:
            self.live.update(Text("\n").join(lines))


def _show_table(run: "PipelineRun") -> None:
    """How each step ended, where its output is, and the errors of those that failed."""
    from palestra.cli.show import console, table

    rows = []
    for address, node in run.graph.nodes.items():
        if (state := run.states.get(address)) is not None:
            took = f"{run.seconds[address]:.1f} s" if address in run.seconds else ""
            place = run.outputs.place(address) if state in ("done", "ran") else run.errors.get(address, "")
            rows.append((node.step.name, WORDS.get(state, state), took, place))
    console().print(table(("step", "", "took", "output"), rows))
