"""The commands of pipelines: run one, and explain the address of a step."""

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from palestra.cli.lab import Set
from palestra.cli.lab import variables as _variables
from palestra.errors import PalestraError

if TYPE_CHECKING:
    from palestra.pipeline.graph import Graph
    from palestra.pipeline.outputs import Outputs
    from palestra.pipeline.runner import PipelineOutcome

app = typer.Typer(help="Steps from data to trained models, each run once.", no_args_is_help=True)

File = Annotated[str, typer.Argument(help="FILE.yaml, FILE.yaml:NAME, FILE.py or FILE.py:NAME", metavar="PIPELINE")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(help="Overrides of the pipeline: steps.sft.spec.optim.lr=1e-3", metavar="KEY=VALUE"),
]
Prefix = Annotated[
    str | None, typer.Option(metavar="P", help="Where outputs lie: a folder or a URL; by default the pipeline's own.")
]
COLOURS = {
    "ran": "green",
    "done": "green",
    "running": "cyan",
    "elsewhere": "cyan",
    "failed": "red",
    "blocked": "yellow",
}
WORDS = {"done": "done before", "elsewhere": "at work elsewhere", "blocked": "not run"}


@app.callback()
def _pipelines() -> None:
    """Steps from data to trained models, each run once."""


@app.command()
def run(
    pipeline: File,
    overrides: Overrides = None,
    set_: Set = None,
    prefix: Prefix = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would run, and why; write nothing.")] = False,
    only: Annotated[
        list[str] | None, typer.Option(metavar="REGEX", help="Only steps whose name it finds, and what they need.")
    ] = None,
    force_failed: Annotated[bool, typer.Option("--force-failed", help="Try steps again that failed before.")] = False,
    max_parallel: Annotated[int, typer.Option(metavar="N", help="Steps at a time.", min=1)] = 2,
) -> None:
    """Run the steps of a pipeline that are not done yet, and write a page of all of them."""
    from palestra.pipeline.form import load_pipeline
    from palestra.pipeline.graph import Graph, plan
    from palestra.pipeline.outputs import open_outputs
    from palestra.pipeline.report import write_report
    from palestra.pipeline.runner import run as run_steps

    found = load_pipeline(pipeline, variables=_variables(set_), overrides=overrides or [])
    outputs = open_outputs(prefix or found.prefix)
    graph = Graph(found.steps)
    if dry_run:
        rows = [
            (one.action, one.reason, outputs.place(one.address))
            for one in plan(graph, outputs, only=only or (), force_failed=force_failed)
        ]
        _show(("", "why", "output"), rows)
        return
    progress = _Progress(graph)
    try:
        with progress:
            outcome = run_steps(
                found.steps,
                outputs,
                only=only or (),
                force_failed=force_failed,
                max_parallel=max_parallel,
                watch=progress.watch,
            )
            progress.watch(outcome)
    finally:
        if progress.outcome is not None:
            progress.show_table(outputs)
        try:
            typer.echo(f"report  {_near(write_report(found.name, graph, outputs, progress.states))}")
        except (OSError, PalestraError) as error:  # the page must not hide what became of the steps
            typer.echo(f"the report could not be written: {error}", err=True)


@app.command()
def explain(
    pipeline: File,
    step: Annotated[str, typer.Argument(help="The name of a step, or its address.", metavar="STEP")],
    overrides: Overrides = None,
    set_: Set = None,
    prefix: Prefix = None,
) -> None:
    """Show what the address of a step is made of, what is no part of it, and what differs from the last one done."""
    from palestra.pipeline.form import load_pipeline
    from palestra.pipeline.graph import Graph
    from palestra.pipeline.graph import explain as explained
    from palestra.pipeline.outputs import open_outputs

    found = load_pipeline(pipeline, variables=_variables(set_), overrides=overrides or [])
    about = explained(Graph(found.steps), open_outputs(prefix or found.prefix), step)
    print(f"{about.address}\n{about.place} ({'done' if about.done else 'not done'})\n\nmade of")
    _show_pairs(about.made_of)
    if about.left_out:
        print("\nno part of it: how it is carried out")
        _show_pairs(about.left_out)
    if about.other is None:
        print("\nno other step of this name is done")
    else:
        print(f"\ndiffers from {about.other}, the last other one that is done, in")
        _show(("", "there", "here"), about.differences)


class _Progress:
    """What the steps are at, as it changes: a live table in a terminal, else a line for each change."""

    def __init__(self, graph: "Graph"):
        from rich.live import Live

        self.graph = graph
        self.outcome: PipelineOutcome | None = None
        self.states: dict[str, str] = {}
        self.began: dict[str, float] = {}
        self.live = Live(refresh_per_second=4, transient=True) if sys.stdout.isatty() else None

    def __enter__(self) -> "_Progress":
        if self.live is not None:
            self.live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self.live is not None:
            self.live.stop()

    def watch(self, outcome: "PipelineOutcome") -> None:
        self.outcome = outcome
        for address, state in outcome.states.items():
            if self.states.get(address) == state:
                continue
            self.states[address] = state
            if state == "running":
                self.began[address] = time.monotonic()
            if self.live is None and state not in ("waiting", "done"):
                print(f"{address}  {self._said(address, state)}", flush=True)
        if self.live is not None:
            from rich.text import Text

            shown = [Text(f"{self._said(a, s):<20} {a}", COLOURS.get(s, "dim")) for a, s in outcome.states.items()]
            self.live.update(Text("\n").join(shown))

    def _said(self, address: str, state: str) -> str:
        seconds = self.outcome.seconds.get(address) if self.outcome is not None else None
        if seconds is None and state == "running" and address in self.began:
            seconds = time.monotonic() - self.began[address]
        return WORDS.get(state, state) + ("" if seconds is None or state == "done" else f" {seconds:.1f} s")

    def show_table(self, outputs: "Outputs") -> None:
        """What became of each step, where its output is, and the errors of those that failed."""
        assert self.outcome is not None
        rows = []
        for address in [one for one in self.graph.nodes if one in self.outcome.states]:
            state, seconds = self.outcome.states[address], self.outcome.seconds.get(address)
            took = "" if seconds is None else f"{seconds:.1f} s"
            place = outputs.place(address) if state in ("done", "ran") else self.outcome.errors.get(address, "")
            rows.append((self.graph.nodes[address].step.name, WORDS.get(state, state), took, place))
        _show(("step", "", "took", "output"), rows)


def _show(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich.table import Table
    from rich.text import Text

    from palestra.cli.show import console

    table = Table(box=None, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    console().print(table)


def _show_pairs(values: dict[str, str]) -> None:
    width = max(map(len, values)) + 2
    for path, value in values.items():
        print(f"  {path:<{width}}{value}")


def _near(place: str) -> str:
    """A path as seen from here, where it is below."""
    here = Path.cwd()
    return str(Path(place).relative_to(here)) if Path(place).is_relative_to(here) else place
