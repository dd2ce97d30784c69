"""`palestra`: the command line, and how errors become one paragraph and an exit code."""

import logging
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from palestra import __version__
from palestra.cli.lab import DATA, EXPERIMENTS, MODELS, RESULTS, announce
from palestra.cli.lab import app as lab
from palestra.cli.lab import variables as _variables
from palestra.cli.pipelines import app as pipelines
from palestra.cli.sweeps import app as sweeps
from palestra.errors import PalestraError
from palestra.work.redact import Terminal


class Grouped(TyperGroup):
    """Shows the commands in the groups that `rich_help_panel` names."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write a section for each group, in the order in which the groups first appear."""
        groups: dict[str, list[tuple[str, str]]] = {}
        for name in self.list_commands(ctx):
            command: Any = self.get_command(ctx, name)
            if not command.hidden:
                about = command.get_short_help_str(300)
                groups.setdefault(command.rich_help_panel, []).append((name, about))
        for title, rows in groups.items():
            with formatter.section(title):
                formatter.write_dl(rows)


app = typer.Typer(
    name="palestra",
    cls=Grouped,
    help="Train policies, from CartPole to language models, against rewards that can be checked.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain text: Rich would take three times as long to print the help
    context_settings={"help_option_names": ["-h", "--help"]},
)

Overrides = Annotated[
    list[str] | None, typer.Argument(help="Overrides of the spec: algorithm.lr=3e-4", metavar="KEY=VALUE")
]
Set = Annotated[list[str] | None, typer.Option("--set", "-s", metavar="VAR=VALUE", help="Fill a ${VAR} of the spec.")]
Root = Annotated[Path, typer.Option("--runs", metavar="FOLDER", help="The folder of all runs.")]
RUNS = Path("runs")
Model = Annotated[
    str, typer.Argument(help="A run, a checkpoint, a Hugging Face folder, s3://… or a Hub id.", metavar="MODEL")
]
Dtype = Annotated[str, typer.Option(help="fp32, bf16 or fp16; auto is what the device computes fast.")]
Device = Annotated[str, typer.Option(help="cpu or cuda; auto takes the GPU where there is one.")]


@app.callback(invoke_without_command=True)
def _options(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.")] = False,
) -> None:
    if version:
        typer.echo(__version__)
        raise typer.Exit


@app.command(rich_help_panel=EXPERIMENTS)
def new(
    example: Annotated[
        str | None, typer.Argument(help="A kind, such as sft, or an example, such as control/ppo_cartpole.")
    ] = None,
    to: Annotated[Path, typer.Option(metavar="FOLDER", help="Where to write.")] = Path(),
    schema: Annotated[
        bool, typer.Option("--schema", help="Also write palestra.schema.json, for completion in editors.")
    ] = False,
    list_all: Annotated[bool, typer.Option("--list", help="List kinds and examples; write nothing.")] = False,
) -> None:
    """Write a commented spec to start from: the starter of a kind, or any shipped example with the files it needs."""
    from palestra.cli.show import show_examples, show_new

    if list_all or example is None:
        show_examples()
    else:
        show_new(example, to, schema)


@app.command(rich_help_panel=EXPERIMENTS)
def check(
    spec: Annotated[str, typer.Argument(help="FILE.yaml or FILE.yaml:NAME")],
    overrides: Overrides = None,
    set_: Set = None,
) -> None:
    """Print the resolved spec, where each value came from, and what follows from it; or every problem at once."""
    from palestra.cli.show import show_check

    show_check(spec, _variables(set_), overrides or [])


@app.command(rich_help_panel=EXPERIMENTS)
def train(
    spec: Annotated[str | None, typer.Argument(help="FILE.yaml or FILE.yaml:NAME; not needed with --resume.")] = None,
    overrides: Overrides = None,
    set_: Set = None,
    resume: Annotated[
        str | None, typer.Option(metavar="RUN", help="Continue a run: its path, name, name/id or id.")
    ] = None,
    allow: Annotated[
        list[str] | None, typer.Option(metavar="FIELD", help="A field that may differ from the resumed run's spec.")
    ] = None,
    runs: Root = RUNS,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")] = False,
) -> None:
    """Run a spec: train every seed, summarize, plot."""
    if not quiet:
        announce(resume or spec or "the spec")
    from palestra.api import run
    from palestra.cli.show import show_result

    given = overrides or []
    if resume is not None and spec is not None and "=" in spec:  # `train --resume RUN key=value`: no spec was given
        spec, given = None, [spec, *given]
    result = run(
        spec, resume=resume, allow=allow or (), variables=_variables(set_), root=runs, quiet=quiet, overrides=given
    )
    if os.environ.get("RANK", "0") == "0":  # one of the processes that `torchrun` started speaks for all
        show_result(result)


@app.command(rich_help_panel=EXPERIMENTS)
def search(
    spec: Annotated[str | None, typer.Argument(help="FILE.yaml or FILE.yaml:NAME; not needed with --resume.")] = None,
    overrides: Overrides = None,
    set_: Set = None,
    resume: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="Continue a search: its folder, name or name/id.")
    ] = None,
    keep: Annotated[
        int | None, typer.Option(metavar="N", help="Keep the checkpoints of the best N trials only.", min=1)
    ] = None,
    runs: Root = RUNS,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")] = False,
) -> None:
    """Search the space of a spec's `search:` block: trials side by side, bad ones given up early."""
    from palestra.cli.show import show_search
    from palestra.search.experiment import search as start

    given = overrides or []
    if resume is not None and spec is not None and "=" in spec:  # `search --resume FOLDER key=value`: no spec was given
        spec, given = None, [spec, *given]
    show_search(
        start(spec, resume=resume, keep=keep, variables=_variables(set_), root=runs, quiet=quiet, overrides=given)
    )


@app.command(rich_help_panel=RESULTS)
def enjoy(
    run: Annotated[str, typer.Argument(help="A run: its path, name, name/id or id.")],
    episodes: Annotated[int, typer.Option(help="Episodes to show.", min=1)] = 1,
    out: Annotated[Path | None, typer.Option(help="A .gif or .mp4 to write; default: the run's plots folder.")] = None,
    which: Annotated[str, typer.Option(help="The checkpoint: best or last.")] = "best",
    seed: Annotated[int, typer.Option(help="The seed of the episodes.", min=0)] = 0,
    runs: Root = RUNS,
) -> None:
    """Watch a trained policy: in a window where there is a display, else as a GIF or MP4."""
    from palestra.api import enjoy as show

    typer.echo(show(run, episodes=episodes, out=out, which=which, seed=seed, root=runs))


@app.command(name="runs", rich_help_panel=RESULTS)
def list_(
    name: Annotated[str | None, typer.Argument(help="Only runs of this name, or of a pattern such as 'ppo_*'.")] = None,
    runs: Root = RUNS,
    limit: Annotated[int, typer.Option(help="How many at most.", min=1)] = 30,
    state: Annotated[
        list[str] | None, typer.Option(help="Only running, done, failed, killed, interrupted, …; may be repeated.")
    ] = None,
    sort: Annotated[
        str, typer.Option(help="age (newest first), name, state; or step or a headline metric, highest first.")
    ] = "age",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    watch: Annotated[
        float | None, typer.Option(metavar="SECONDS", min=0.1, help="Show it again and again until Ctrl-C.")
    ] = None,
) -> None:
    """List runs: state, step, headline metric, age."""
    from palestra.cli.show import Wanted, show_runs

    show_runs(runs, Wanted(name, state or (), sort, limit), as_json=as_json, watch=watch)


@app.command(rich_help_panel=RESULTS)
def rollouts(
    run: Annotated[str, typer.Argument(help="A run: its path, name, name/id or id.")],
    status: Annotated[
        str | None, typer.Option(help="Only answers judged correct, wrong, unparsable, timeout or error.")
    ] = None,
    task: Annotated[str | None, typer.Option(help="Only answers to this task.")] = None,
    step: Annotated[int | None, typer.Option(help="Only answers of this step.", min=0)] = None,
    limit: Annotated[int, typer.Option(help="How many answers at most, the newest.", min=1)] = 20,
    runs: Root = RUNS,
) -> None:
    """Read what a model answered in post-training, with verdicts and advantages."""
    from palestra.cli.show import show_rollouts

    show_rollouts(run, runs, status=status, task=task, step=step, limit=limit)


@app.command(rich_help_panel=RESULTS)
def diff(a: str, b: str, runs: Root = RUNS) -> None:
    """Show what differs between the specs and the results of two runs."""
    from palestra.cli.show import show_diff

    show_diff(a, b, runs)


@app.command(rich_help_panel=RESULTS)
def plot(
    run: Annotated[list[str], typer.Argument(help="Runs to draw together, or one.")],
    metric: Annotated[str | None, typer.Option(help="What to draw; by default the run's headline.")] = None,
    x: Annotated[
        str | None, typer.Option(help="Against what: frame, tokens or step; by default what the run counts.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Where to write, without ending.")] = None,
    runs: Root = RUNS,
) -> None:
    """Draw learning curves, mean ± standard deviation over seeds, as PNG and SVG."""
    from palestra.runs.plot import curves, headline
    from palestra.runs.run import open_run

    found = [open_run(one, runs) for one in run]
    metric = metric or headline(found[0])
    safe = metric.replace("/", "_")
    default = (
        found[0].path / "plots" / safe
        if len(found) == 1
        else Path(f"{'_'.join(dict.fromkeys(r.name for r in found))}_{safe}")
    )
    for path in curves(found, metric=metric, x=x, out=out or default):
        typer.echo(path)


@app.command(rich_help_panel=MODELS)
def chat(
    model: Model,
    system: Annotated[str | None, typer.Option(help="What the model is told before the conversation.")] = None,
    temperature: Annotated[float, typer.Option(min=0, help="0 takes the most likely token.")] = 0.7,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="The longest answer.")] = 512,
    dtype: Dtype = "auto",
    device: Device = "auto",
    runs: Root = RUNS,
) -> None:
    """Talk with a model in the terminal."""
    announce(model)
    from palestra.api import chat as talk

    talk(
        model,
        system=system,
        temperature=temperature,
        max_new_tokens=max_new_tokens,
        dtype=dtype,
        device=device,
        root=runs,
    )


@app.command(rich_help_panel=MODELS)
def serve(
    model: Model,
    host: Annotated[str, typer.Option(help="Where to listen; by default only this machine can connect.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535)] = 8000,
    api_key: Annotated[
        str | None, typer.Option(envvar="PALESTRA_API_KEY", help="The bearer key that requests must carry.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="What clients call the model; by default its folder.")] = None,
    context: Annotated[int | None, typer.Option(min=1, help="The longest sequence; by default the model's.")] = None,
    max_concurrent: Annotated[int, typer.Option(min=1, help="Requests at a time; more are told to wait.")] = 1024,
    max_body: Annotated[int, typer.Option(min=1, metavar="BYTES", help="The largest request.")] = 4 * 2**20,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(
            help="A name that requests may ask for; may be repeated. By default loopback's on loopback, else any."
        ),
    ] = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    runs: Root = RUNS,
) -> None:
    """Serve a model over HTTP: OpenAI's API (/v1/chat/completions, /v1/completions) and tokens (/generate)."""
    announce(model)
    from palestra.api import serve as start

    start(
        model,
        host=host,
        port=port,
        api_key=api_key,
        name=name,
        context=context,
        max_concurrent=max_concurrent,
        max_body=max_body,
        allowed_hosts=allowed_host or (),
        dtype=dtype,
        device=device,
        root=runs,
    )


@app.command(name="eval", rich_help_panel=MODELS)
def evaluate(
    model: Model,
    task: Annotated[
        list[str] | None, typer.Option("--task", "-t", help="A task to answer, such as gsm8k; may be repeated.")
    ] = None,
    split: Annotated[str | None, typer.Option(help="The split of the tasks; by default test.")] = None,
    problems: Annotated[int | None, typer.Option(min=1, help="Problems of each task at most; by default all.")] = None,
    samples: Annotated[int, typer.Option(min=0, help="Answers drawn for each problem, for pass@k.")] = 0,
    k: Annotated[
        str | None, typer.Option(metavar="K,K", help="Which pass@k to report; by default 1 and all of the samples.")
    ] = None,
    args: Annotated[
        list[str] | None, typer.Option("--arg", "-a", metavar="KEY=VALUE", help="What the tasks are told.")
    ] = None,
    likelihood: Annotated[
        list[str] | None, typer.Option(metavar="FILE", help="Rows with given answers to score; may be repeated.")
    ] = None,
    greedy: Annotated[bool, typer.Option(help="Score the most likely answer.")] = True,
    temperature: Annotated[float | None, typer.Option(help="Of the answers that are drawn; by default 1.")] = None,
    max_new_tokens: Annotated[int | None, typer.Option(min=1, help="The longest answer; by default 512.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the answers that are drawn.")] = 0,
    name: Annotated[str | None, typer.Option(help="The folder under runs/; by default eval_MODEL.")] = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    runs: Root = RUNS,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")] = False,
) -> None:
    """Evaluate a model on tasks: greedy accuracy and pass@k, with everything that the numbers depend on."""
    if not quiet:
        announce(model)
    from palestra.api import evaluate as start
    from palestra.cli.show import numbers, pairs, show_evaluation

    found = start(
        model,
        tasks=task or [],
        likelihood=likelihood or [],
        split=split,
        args=pairs(args or []),
        problems=problems,
        samples=samples,
        k=None if k is None else numbers(k),
        greedy=greedy,
        temperature=temperature,
        max_new_tokens=max_new_tokens,
        seed=seed,
        name=name,
        dtype=dtype,
        device=device,
        root=runs,
        quiet=quiet,
    )
    show_evaluation(found)


models = typer.Typer(help="Get models and bring them into the Hugging Face format.", no_args_is_help=True)
app.add_typer(models, name="model", rich_help_panel=MODELS)
data = typer.Typer(help="Datasets.", no_args_is_help=True)
app.add_typer(data, name="data", rich_help_panel=DATA)
app.add_typer(lab)
app.add_typer(pipelines, name="pipeline", rich_help_panel=DATA)
app.add_typer(sweeps)


@models.command()
def fetch(
    name: Annotated[str, typer.Argument(help="smollm2-135m")],
    to: Annotated[Path | None, typer.Option(help="The folder to write; by default models/NAME.")] = None,
) -> None:
    """Download a small real model and convert it."""
    from palestra.api import fetch_model

    typer.echo(fetch_model(name, to or Path("models") / name))


@models.command()
def convert(
    source: Annotated[Path, typer.Argument(help="A GGUF file, a llama2.c .bin file, or a Hugging Face folder.")],
    target: Annotated[Path, typer.Argument(help="The folder to write.")],
    dtype: Annotated[str | None, typer.Option(help="fp32, bf16 or fp16; by default what the source has.")] = None,
) -> None:
    """Write a model as a Hugging Face folder."""
    from palestra.api import convert_model

    convert_model(source, target, dtype=dtype)
    typer.echo(target)


@data.command(name="inspect")
def inspect_(
    path: Annotated[str, typer.Argument(help="A file, a folder, a pattern, s3://… or a token store.", metavar="PATH")],
    rows: Annotated[int, typer.Option(help="How many rows to read, over all files; 0 reads all.")] = 10_000,
    samples: Annotated[int, typer.Option(help="How many rows to show.")] = 3,
    split: Annotated[str | None, typer.Option(help="What separates the documents of text files.")] = None,
) -> None:
    """Show what is in a data set: columns, sizes, rows, lengths, samples."""
    from palestra.cli.show import show_inspection

    show_inspection(path, rows=rows, samples=samples, split=None if split is None else split.replace("\\n", "\n"))


@data.command(name="push")
def push(
    source: Annotated[str, typer.Argument(help="A file, a folder, or a dataset on the Hub.", metavar="SRC")],
    url: Annotated[str, typer.Argument(help="The folder to put it into, such as s3://bucket/folder.")],
) -> None:
    """Copy a dataset to a URL, from where tasks and specs can read it."""
    from palestra.data.sources import push as upload
    from palestra.data.sources import resolve

    record = upload(resolve(source, kind="dataset"), url)
    typer.echo(f"{len(record.files)} file{'' if len(record.files) == 1 else 's'} at {url}")


def main() -> None:
    """Run the command line; every error ends in one paragraph and its exit code."""
    debug = "--debug" in sys.argv
    sys.stdout, sys.stderr = Terminal(sys.stdout), Terminal(sys.stderr)  # pyrefly: ignore[bad-assignment]
    logging.basicConfig(format="%(levelname)s: %(message)s")
    logging.getLogger().handlers[0].setLevel(logging.WARNING)  # log.txt has the rest
    logging.captureWarnings(True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # like Ctrl-C, also where no session answers it
    try:
        code = app(standalone_mode=False)
        if code == 130:  # what Typer makes of a KeyboardInterrupt
            print("palestra: interrupted", file=sys.stderr)
    except PalestraError as error:
        code = _report(error, error.exit_code, debug)
    except Exception as error:
        if hasattr(error, "show") and hasattr(error, "exit_code"):  # click's usage errors show themselves
            error.show()
            code = error.exit_code
        else:
            code = _report(error, 1, debug)
    sys.exit(code if isinstance(code, int) else 0)


def _report(error: Exception, code: int, debug: bool) -> int:
    if debug:
        traceback.print_exception(error)
    elif isinstance(error, PalestraError):
        print(f"palestra: {error}", file=sys.stderr)
    else:
        print(f"palestra: {type(error).__name__}: {error}\n(palestra --debug … shows the traceback)", file=sys.stderr)
    return code
