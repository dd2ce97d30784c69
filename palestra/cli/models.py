"""`palestra model`: download models, and convert them."""

from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

app = typer.Typer(help="Download models and convert them to the Hugging Face format.", no_args_is_help=True)


@app.command()
def fetch(
    name: Annotated[str, Argument(help="smollm2-135m")],
    to: Annotated[Path | None, Option(help="The folder to write; by default models/NAME.")] = None,
) -> None:
    """Download a small pretrained model and convert it."""
    from palestra.api import fetch_model

    typer.echo(fetch_model(name, to or Path("models") / name))


@app.command()
def convert(
    source: Annotated[Path, Argument(help="A GGUF file, a llama2.c .bin file, or a Hugging Face folder.")],
    target: Annotated[Path, Argument(help="The folder to write.")],
    dtype: Annotated[str | None, Option(help="fp32, bf16 or fp16; by default that of the source.")] = None,
) -> None:
    """Convert a model to a Hugging Face folder."""
    from palestra.api import convert_model

    convert_model(source, target, dtype=dtype)
    typer.echo(target)
