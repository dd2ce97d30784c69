"""Options and arguments that several commands share."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from palestra.errors import UsageError

GROUPS = EXPERIMENTS, RESULTS, MODELS, DATA, SHARING = (
    "Experiments",
    "Results",
    "Models",
    "Data and pipelines",
    "Benchmarks, sharing, migration",
)
"""Of `palestra --help`, in this order."""

RUNS = Path("runs")
Texts = list[str] | None
"""An option that can be repeated."""
Spec = Annotated[str, Argument(help="FILE.yaml, or FILE.yaml:NAME for one of several specs.", metavar="SPEC")]
SpecToRun = Annotated[str | None, Argument(help="FILE.yaml or FILE.yaml:NAME; --resume needs none.", metavar="SPEC")]
Overrides = Annotated[Texts, Argument(help="Override fields of the spec, such as optim.lr=3e-4.", metavar="KEY=VALUE")]
Set = Annotated[Texts, Option("--set", "-s", metavar="VAR=VALUE", help="Set a ${VAR} of the spec; repeatable.")]
RunName = Annotated[str, Argument(help="A run: its path, name, name/id or id.", metavar="RUN")]
Root = Annotated[Path, Option("--runs", metavar="FOLDER", help="The folder that holds all runs.")]
On = Annotated[
    str | None,
    Option(metavar="ray|HOST:PORT", help="Run workers on Ray, here or on a cluster; by default processes here."),
]
Quiet = Annotated[bool, Option("--quiet", "-q", help="Do not show progress.")]


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


def parsed(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a command as those of the API function that it calls.

    In `train --resume RUN key=value` the first override stands where a spec would.
    """
    spec, overrides = arguments["spec"], arguments["overrides"] or []
    if arguments.get("resume") is not None and spec is not None and "=" in spec:
        spec, overrides = None, [spec, *overrides]
    return {**arguments, "spec": spec, "overrides": overrides, "variables": parse_set(arguments["variables"])}


def parse_numbers(text: str) -> list[int]:
    """Integers separated by commas, such as 1,8."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise UsageError(f"--k {text}: expected whole numbers separated by commas, such as 1,8") from error


def parse_args(texts: Sequence[str]) -> dict[str, Any]:
    """`KEY=VALUE` texts as a mapping, with YAML typing."""
    from palestra.spec.compose import parse  # here, because the help needs no YAML

    for text in texts:
        if "=" not in text:
            raise UsageError(f"--arg {text}: expected KEY=VALUE, such as digits=3")
    return dict(parse(texts))
