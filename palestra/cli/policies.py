"""The commands for the policies of control runs: `palestra enjoy`, `export`, and what `eval` prints of one."""

from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from palestra.cli import options

app = typer.Typer()

Which = Annotated[str, Option(help="The checkpoint: best or last.")]


@app.command(rich_help_panel=options.RESULTS)
def enjoy(
    run: options.RunName,
    episodes: Annotated[int, Option(help="Number of episodes.", min=1)] = 1,
    out: Annotated[Path | None, Option(help="The .gif or .mp4 to write; by default in the run's plots folder.")] = None,
    which: Which = "best",
    seed: Annotated[int, Option(help="Seed of the first episode; the next ones have the next seeds.", min=0)] = 0,
    grid: Annotated[bool, Option("--grid", help="Show the episodes side by side, as one video.")] = False,
    root: options.Root = options.RUNS,
) -> None:
    """Watch a trained policy: in a window if there is a display, otherwise as a GIF or MP4."""
    settings = locals()
    from palestra.api import enjoy as play

    typer.echo(play(**settings))


@app.command(rich_help_panel=options.RESULTS)
def export(
    run: options.RunName,
    out: Annotated[Path, Option("--out", "-o", help="The file to write.")],
    to: Annotated[str | None, Option(help="onnx, torchscript or transitions; by default by the file's ending.")] = None,
    which: Which = "best",
    root: options.Root = options.RUNS,
) -> None:
    """Write the policy of a control run as a file that runs without Palestra, or the transitions it stored."""
    settings = locals()
    from palestra.api import export as write

    typer.echo(write(**settings))


def show_policy(model: str, root: Path, *, episodes: int, which: str, seed: int, as_json: bool) -> bool:
    """Evaluate and print the policy of a control run; False where the model is something else."""
    from palestra.runs.run import find_run

    run = find_run(model, root)
    if run is None or run.spec["kind"] != "control":
        return False
    from palestra.api import evaluate_policy
    from palestra.cli.show import console, table
    from palestra.spec.model import standard_json

    result = evaluate_policy(run, episodes=episodes, which=which, seed=seed)
    if as_json:
        print(standard_json(result, indent=2))
        return True
    columns = ("seed", "return", "± 95 %", "std", "min", "length")
    numbers = [
        (row["mean"], row["interval"], row["std"], min(row["returns"]), row["length"]) for row in result["seeds"]
    ]
    rows = [
        [str(row["seed"]), *(f"{number:.2f}" for number in of)]
        for row, of in zip(result["seeds"], numbers, strict=True)
    ]
    console().print(table(columns, rows, right=columns[1:]))
    score = f"{result['mean']:.2f} ± {result['interval']:.2f}"
    print(f"{result['env']}: {score} over {len(rows)} seed{'s' if len(rows) > 1 else ''} of {episodes} episodes")
    return True
