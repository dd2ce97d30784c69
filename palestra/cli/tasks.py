"""`palestra tasks`: what can be trained on here."""

import json
from typing import Annotated

import typer
from typer import Option

from palestra.cli import options

app = typer.Typer()


@app.command(rich_help_panel=options.DATA)
def tasks(
    search: Annotated[str, Option(metavar="WORD", help="Only those with this word in name, source or needs.")] = "",
    as_json: Annotated[bool, Option("--json", help="Print JSON, one task a line.")] = False,
) -> None:
    """List tasks to train on, with their source, what they need, and a line for a spec."""
    from palestra.cli.show import console, table
    from palestra.errors import UsageError
    from palestra.tasks.catalog import search as find

    entries = find(search)
    if not entries:
        raise UsageError(f"no task has {search!r} in its name, source or needs: `palestra tasks` lists all")
    if as_json:
        for entry in entries:
            print(json.dumps(vars(entry), ensure_ascii=False))
        return
    rows = [(one.example, one.source, one.workflow, one.extra, one.needs) for one in entries]
    console().print(table(("tasks.train", "source", "workflow", "extra", "needs besides"), rows))
    typer.echo(f"{len(entries)} tasks")
