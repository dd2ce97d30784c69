"""`palestra plan`: what a spec takes on devices that need not be here, and `--calibrate` on those that are."""

import json
from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from palestra.cli import options

app = typer.Typer()
GOALS = ("tokens/s", "wall", "cost")


@app.command(rich_help_panel=options.EXPERIMENTS)
def plan(
    spec: options.SpecToRun = None,
    overrides: options.Overrides = None,
    variables: options.Set = None,
    devices: Annotated[str, Option(metavar="8xH200", help="Devices of each machine, or cpu.")] = "cpu",
    nodes: Annotated[int, Option(min=1, help="Machines.")] = 1,
    goal: Annotated[str, Option(metavar="|".join(GOALS), help="What the best plan is best at.")] = GOALS[0],
    price: Annotated[Path | None, Option(metavar="FILE", help="Dollars an hour of devices: {H200: 3.5}.")] = None,
    shape: Annotated[str | None, Option(metavar="FILE", help="The model's config.json or `model.shape`.")] = None,
    prompt_tokens: Annotated[float | None, Option(min=0, help="Tokens of a prompt, mean.")] = None,
    new_tokens: Annotated[float | None, Option(min=1, help="Tokens of a completion or example, mean.")] = None,
    spread: Annotated[float | None, Option(min=0, help="Deviation of a completion's tokens over their mean.")] = None,
    verify_seconds: Annotated[float | None, Option(min=0, help="Seconds of a verifier for a completion.")] = None,
    mtbf: Annotated[float | None, Option(min=1, help="Hours between two failures of one device, mean.")] = None,
    as_json: Annotated[bool, Option("--json", help="Print JSON.")] = False,
    calibrate: Annotated[bool, Option("--calibrate", help="Measure this machine first, and store it.")] = False,
    runs: options.Root = options.RUNS,
) -> None:
    """Predict memory, speed, hours and cost of a spec on devices, and find the layout and split that is best."""
    from palestra.errors import UsageError

    if calibrate:
        from palestra.plan.calibrate import calibrated
        from palestra.plan.devices import store_calibration

        options.announce("the kernels to measure")
        typer.echo(f"stored in {store_calibration(calibrated(lambda line: typer.echo(line, err=True)))}", err=True)
        if spec is None:
            return
    if spec is None:
        raise UsageError("which spec? palestra plan SPEC --devices 8xH200, or --calibrate")
    if goal not in GOALS:
        raise UsageError(f"--goal {goal}: expected one of {', '.join(GOALS)}")
    if goal == "cost" and price is None:
        raise UsageError("--goal cost: prices differ by a factor of five; give them with --price FILE")
    from palestra.api import check
    from palestra.plan.devices import parse_pool, read_price
    from palestra.plan.job import open_job
    from palestra.plan.report import as_json as as_row
    from palestra.plan.report import lines
    from palestra.plan.search import Search

    settings = options.parsed({"spec": spec, "overrides": overrides, "variables": variables})
    pool = parse_pool(devices, nodes)
    dollars = None if price is None else read_price(price, pool.device.name)
    known = {"prompt": prompt_tokens, "new": new_tokens, "spread": spread, "verify": verify_seconds, "mtbf": mtbf}
    search = Search(open_job(check(**settings).spec, shape, root=runs, known=known), pool)
    best, written = search.best(goal), search.written()
    if as_json:
        rows = {"best": as_row(best, dollars), "written": None if written is None else as_row(written, dollars)}
        typer.echo(json.dumps(rows, indent=1))
        return
    for line in lines(best, written, dollars, spec):
        typer.echo(line)
