"""`palestra data`: look into datasets, and upload them."""

from typing import Annotated

import typer
from typer import Argument, Option

app = typer.Typer(help="Inspect and upload datasets.", no_args_is_help=True)


@app.command(name="inspect")
def inspect_(
    path: Annotated[str, Argument(help="A file, a folder, a pattern, s3://… or a token store.", metavar="PATH")],
    rows: Annotated[int, Option(help="Rows to read, over all files; 0 reads all.")] = 10_000,
    samples: Annotated[int, Option(help="Rows to print.")] = 3,
    split: Annotated[str | None, Option(help="The separator between documents of text files.")] = None,
) -> None:
    """Describe a dataset: columns, types, sizes, lengths and sample rows."""
    from palestra.cli.show import show_inspection

    show_inspection(path, rows=rows, samples=samples, split=None if split is None else split.replace("\\n", "\n"))


@app.command(name="push")
def push_data(
    source: Annotated[str, Argument(help="A file, a folder, or a dataset on the Hub.", metavar="SRC")],
    url: Annotated[str, Argument(help="The destination folder, such as s3://bucket/folder.")],
) -> None:
    """Upload a dataset to a URL that tasks and specs can read."""
    from palestra.data.sources import push, resolve

    record = push(resolve(source, kind="dataset"), url)
    typer.echo(f"{len(record.files)} file{'' if len(record.files) == 1 else 's'} at {url}")
