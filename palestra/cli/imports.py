"""`palestra import`: specs and models of other frameworks as specs of ours."""

from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from palestra.cli import options
from palestra.errors import UsageError

app = typer.Typer(help="Convert specs and models of other frameworks.", no_args_is_help=True)


@app.command(name="slm-lab")
def slm_lab(
    spec: Annotated[Path, Argument(help="A JSON or YAML file of SLM-Lab specs.", metavar="FILE")],
    name: Annotated[str, Argument(help="The name of a spec in that file.")],
    variables: options.Set = None,
    out: Annotated[Path | None, Option(help="The file to write; by default NAME.yaml here.")] = None,
) -> None:
    """Convert an SLM-Lab spec, and print a note for every key that was not converted."""
    from palestra.migrate.slm_lab import import_spec
    from palestra.runs.store import write_bytes

    converted = import_spec(spec, name, options.parse_set(variables))
    target = out or Path(f"{converted.name}.yaml")
    if out is None and target.exists():
        raise UsageError(f"{target} exists: choose another file with --out, or the same one to replace it")
    write_bytes(target, converted.to_yaml(f"{spec.name}, {name}").encode())
    for note in converted.notes:
        typer.echo(f"note: {note}", err=True)
    typer.echo(f"{target}: palestra check {target}")


@app.command(name="sb3")
def sb3(
    model: Annotated[Path, Argument(help="A zip that Stable-Baselines3 saved.", metavar="FILE")],
    env: Annotated[str, Option(help="The environment to continue in; a zip does not name it.")],
    out: Annotated[Path | None, Option(help="The file to write; by default FILE's name with .yaml here.")] = None,
) -> None:
    """Write a spec that continues a model of Stable-Baselines3 (PPO, A2C, DQN, SAC, TD3) from its weights."""
    from palestra.migrate.sb3 import import_model, spec_text
    from palestra.runs.store import write_bytes

    spec, notes = import_model(model, env)
    target = out or Path(f"{model.stem}.yaml")
    if out is None and target.exists():
        raise UsageError(f"{target} exists: choose another file with --out, or the same one to replace it")
    write_bytes(target, spec_text(model, spec, notes).encode())
    for note in notes:
        typer.echo(f"note: {note}", err=True)
    typer.echo(f"{target}: palestra train {target}")
