"""Options and arguments that several commands share."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

GROUPS = EXPERIMENTS, RESULTS, MODELS, DATA, SHARING = (
    "Experiments",
    "Results",
    "Models",
    "Data and pipelines",
    "Benchmarks, sharing, migration",
)
"""Of `palestra --help`, in this order."""

RUNS = Path("runs")
Spec = Annotated[str, typer.Argument(help="FILE.yaml, or FILE.yaml:NAME for one of several specs.", metavar="SPEC")]
SpecToRun = Annotated[
    str | None, typer.Argument(help="FILE.yaml or FILE.yaml:NAME; not needed with --resume.", metavar="SPEC")
]
Overrides = Annotated[
    list[str] | None, typer.Argument(help="Override fields of the spec, such as optim.lr=3e-4.", metavar="KEY=VALUE")
]
Set = Annotated[
    list[str] | None, typer.Option("--set", "-s", metavar="VAR=VALUE", help="Set a ${VAR} of the spec; repeatable.")
]
RunName = Annotated[str, typer.Argument(help="A run: its path, name, name/id or id.", metavar="RUN")]
Root = Annotated[Path, typer.Option("--runs", metavar="FOLDER", help="The folder that holds all runs.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Do not show progress.")]


def announce(what: str) -> None:
    """Print what is loading before anything heavy is imported: torch alone takes seconds."""
    if is_first_rank():
        typer.echo(f"loading torch and {what} …", err=True)


def is_first_rank() -> bool:
    """Whether this process prints for all of those that `torchrun` started."""
    return os.environ.get("RANK", "0") == "0"


def parse_set(pairs: Sequence[str] | None) -> dict[str, str]:
    """The values of `-s VAR=VALUE`."""
    values = {}
    for pair in pairs or ():
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise typer.BadParameter(f"{pair!r} is not VAR=VALUE", param_hint="--set")
        values[name] = value
    return values


def resumed(spec: str | None, overrides: list[str] | None, resume: str | None) -> tuple[str | None, list[str]]:
    """The spec and the overrides; in `train --resume RUN key=value` the first override stands where a spec would."""
    if resume is not None and spec is not None and "=" in spec:
        return None, [spec, *(overrides or [])]
    return spec, overrides or []
