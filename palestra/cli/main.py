"""`palestra`: the command line, and how errors become one paragraph and an exit code.

The parameters of a command have the names of the API function that it calls, so that `locals()` can be handed on.
"""

import logging
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option
from typer.core import TyperGroup

from palestra import __version__
from palestra.cli import options
from palestra.cli.cluster import app as cluster
from palestra.cli.data import app as data
from palestra.cli.imports import app as imports
from palestra.cli.launch import app as launches
from palestra.cli.models import app as models
from palestra.cli.options import Texts
from palestra.cli.pipelines import app as pipelines
from palestra.cli.plan import app as plans
from palestra.cli.policies import app as policies
from palestra.cli.policies import show_policy
from palestra.cli.sweeps import app as sweeps
from palestra.cli.sweeps import show_search
from palestra.cli.tasks import app as tasks
from palestra.errors import MissingExtra, PalestraError
from palestra.work.redact import Terminal


class Grouped(TyperGroup):
    """Shows the commands in the groups that `rich_help_panel` names."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        groups: dict[str, list[tuple[str, str]]] = {title: [] for title in options.GROUPS}
        for name in self.list_commands(ctx):
            command: Any = self.get_command(ctx, name)
            if not command.hidden:
                groups[command.rich_help_panel].append((name, command.get_short_help_str(300)))
        for title, rows in groups.items():
            with formatter.section(title):
                formatter.write_dl(rows)


app = typer.Typer(
    name="palestra",
    cls=Grouped,
    help="Train policies with verifiable rewards, from CartPole to language models.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain text: Rich would take three times as long to print the help
    context_settings={"help_option_names": ["-h", "--help"]},
)

Model = Annotated[str, Argument(help="A run, checkpoint, Hugging Face folder, s3://… or Hub id.", metavar="MODEL")]
Dtype = Annotated[str, Option(help="fp32, bf16 or fp16; auto picks the fastest on the device.")]
Device = Annotated[str, Option(help="cpu or cuda; auto uses a GPU if there is one.")]


@app.callback(invoke_without_command=True)
def _options(
    version: Annotated[bool, Option("--version", help="Print the version and exit.")] = False,
    debug: Annotated[bool, Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    if version:
        typer.echo(__version__)
        raise typer.Exit


@app.command(rich_help_panel=options.EXPERIMENTS)
def new(
    example: Annotated[str | None, Argument(help="A kind (sft) or an example (control/ppo_cartpole).")] = None,
    to: Annotated[Path, Option(metavar="FOLDER", help="The folder to write into.")] = Path(),
    schema: Annotated[bool, Option("--schema", help="Also write palestra.schema.json for editors.")] = False,
    list_all: Annotated[bool, Option("--list", help="List kinds and examples; write nothing.")] = False,
) -> None:
    """Write a commented spec to start from: the starter of a kind, or any example with the files it needs."""
    from palestra.cli.examples import show_examples, show_new

    if list_all or example is None:
        show_examples()
    else:
        show_new(example, to, schema)


@app.command(rich_help_panel=options.EXPERIMENTS)
def check(spec: options.Spec, overrides: options.Overrides = None, variables: options.Set = None) -> None:
    """Validate a spec: print every value with its origin and the derived quantities, or every error at once."""
    settings = options.parsed(locals())
    from palestra.cli.show import show_check

    show_check(**settings)


@app.command(rich_help_panel=options.EXPERIMENTS)
def train(
    spec: options.SpecToRun = None,
    overrides: options.Overrides = None,
    variables: options.Set = None,
    resume: Annotated[
        str | None, Option(metavar="RUN", help="Run to continue: path, name, name/id, id, or its URL.")
    ] = None,
    allow: Annotated[
        Texts, Option(metavar="FIELD", help="A field that may differ from the run's spec; repeatable.")
    ] = None,
    restarts: Annotated[
        int, Option(metavar="N", min=0, help="Continue a failed seed from its checkpoint, N times.")
    ] = 0,
    on: options.On = None,
    id: Annotated[str | None, Option("--id", metavar="ID", help="Id of the run; one that exists is continued.")] = None,
    sync: Annotated[
        str | None,
        Option(envvar="PALESTRA_SYNC", metavar="PLACE", help="Copy the run there meanwhile: s3://…, a folder, dev."),
    ] = None,
    root: options.Root = options.RUNS,
    quiet: options.Quiet = False,
) -> None:
    """Run a spec: train every seed, then write a summary and plots."""
    settings = options.parsed(locals()) | {"allow": allow or ()}
    if not quiet:
        options.announce(resume or spec or "the spec")
    from palestra.api import run
    from palestra.cli.show import show_result

    result = run(**settings)
    if options.is_first_rank():
        show_result(result)


@app.command(rich_help_panel=options.EXPERIMENTS)
def search(
    spec: options.SpecToRun = None,
    overrides: options.Overrides = None,
    variables: options.Set = None,
    resume: Annotated[str | None, Option(metavar="FOLDER", help="Search to continue: folder, name or name/id.")] = None,
    keep: Annotated[int | None, Option(metavar="N", help="Keep only checkpoints of the best N trials.", min=1)] = None,
    on: options.On = None,
    root: options.Root = options.RUNS,
    quiet: options.Quiet = False,
) -> None:
    """Search hyperparameters over the `search:` block of a spec: parallel trials, early stopping of bad ones."""
    settings = options.parsed(locals())
    from palestra.search.experiment import search as start

    show_search(start(**settings))


@app.command(rich_help_panel=options.EXPERIMENTS)
def dev(
    spec: options.Spec,
    overrides: options.Overrides = None,
    variables: options.Set = None,
    render: Annotated[bool, Option("--render", help="Show an episode: in a window, else as dev.gif.")] = False,
) -> None:
    """Smoke-test a control spec in seconds: a tiny run that checks gradients, updates and losses."""
    settings = options.parsed({"spec": spec, "overrides": overrides, "variables": variables})
    options.announce(spec)
    from palestra.api import check

    loaded = check(**settings)
    try:
        from palestra.control.smoke_test import try_out
    except ModuleNotFoundError as error:
        raise MissingExtra("palestra dev", "train") from error
    try_out(loaded.spec, typer.echo, video=Path("dev.gif") if render else None)


@app.command(name="runs", rich_help_panel=options.RESULTS)
def list_(
    name: Annotated[str | None, Argument(help="Only runs of this name or pattern, such as 'ppo_*'.")] = None,
    runs: options.Root = options.RUNS,
    limit: Annotated[int, Option(help="Maximum number of runs.", min=1)] = 30,
    state: Annotated[Texts, Option(help="Only running, done, failed, killed, interrupted, …; repeatable.")] = None,
    sort: Annotated[str, Option(help="age (newest first), name, state, step or a metric.")] = "age",
    as_json: Annotated[bool, Option("--json", help="Print JSON.")] = False,
    watch: Annotated[float | None, Option(metavar="SECONDS", min=0.1, help="Refresh this often until Ctrl-C.")] = None,
) -> None:
    """List runs with state, step, headline metric and age."""
    from palestra.cli.show import show_runs

    show_runs(runs, name=name, states=state or (), sort=sort, limit=limit, as_json=as_json, watch=watch)


@app.command(rich_help_panel=options.RESULTS)
def rollouts(
    run: options.RunName,
    status: Annotated[str | None, Option(help="Only verdict correct, wrong, unparsable, timeout or error.")] = None,
    task: Annotated[str | None, Option(help="Only completions of this task.")] = None,
    step: Annotated[int | None, Option(help="Only completions of this training step.", min=0)] = None,
    limit: Annotated[int, Option(help="Maximum number of completions; the newest are shown.", min=1)] = 20,
    runs: options.Root = options.RUNS,
) -> None:
    """Read the completions of a post-training run, with verdicts, rewards and advantages."""
    from palestra.cli.rollouts import show_rollouts

    show_rollouts(run, runs, status=status, task=task, step=step, limit=limit)


@app.command(rich_help_panel=options.RESULTS)
def doctor(
    run: options.RunName,
    as_json: Annotated[bool, Option("--json", help="Print JSON.")] = False,
    runs: options.Root = options.RUNS,
) -> None:
    """Say what is wrong with a run, running or ended, and what to do; if nothing is, what could be tuned."""
    from palestra.cli.show import show_advice

    show_advice(run, runs, as_json=as_json)


@app.command(rich_help_panel=options.RESULTS)
def report(
    run: Annotated[list[str], Argument(help="One run, or several to compare.", metavar="RUN...")],
    out: Annotated[Path, Option("--out", "-o", help="The file to write.")] = Path("report.html"),
    runs: options.Root = options.RUNS,
) -> None:
    """Write a report on runs as one HTML file: results, curves, advice, specs, completions, environment."""
    from palestra.runs.run import open_run
    from palestra.runs.store import clear_write_errors, write_bytes
    from palestra.view.report import report as page

    content = page([open_run(name, runs) for name in run]).encode()
    with clear_write_errors(out):
        write_bytes(out, content)
    typer.echo(out)


@app.command(rich_help_panel=options.RESULTS)
def query(
    sql: Annotated[str, Argument(help="A SELECT over runs, metrics, rollouts, evaluations and events.")],
    run: Annotated[Texts, Argument(help="The runs; by default all.", metavar="[RUN]...")] = None,
    as_json: Annotated[bool, Option("--json", help="Print JSON, one row a line.")] = False,
    as_csv: Annotated[bool, Option("--csv", help="Print CSV.")] = False,
    runs: options.Root = options.RUNS,
) -> None:
    """Query the files of runs with SQL (DuckDB), read-only."""
    from palestra.cli.show import show_query

    show_query(sql, run or (), runs, form="json" if as_json else "csv" if as_csv else "table")


@app.command(rich_help_panel=options.RESULTS)
def diff(a: options.RunName, b: options.RunName, runs: options.Root = options.RUNS) -> None:
    """Compare two runs: the spec fields and the results that differ."""
    from palestra.cli.show import show_diff

    show_diff(a, b, runs)


@app.command(rich_help_panel=options.RESULTS)
def plot(
    run: Annotated[list[str], Argument(help="One run, or several to compare.", metavar="RUN")],
    metric: Annotated[str | None, Option(help="The metric; by default the run's headline metric.")] = None,
    x: Annotated[str | None, Option(help="frame, tokens or step; by default what the run counts.")] = None,
    out: Annotated[Path | None, Option(help="Output path without the suffix.")] = None,
    runs: options.Root = options.RUNS,
) -> None:
    """Plot learning curves, mean ± standard deviation over seeds, as PNG and SVG."""
    from palestra.runs.plot import curves, headline
    from palestra.runs.run import open_run

    opened = [open_run(name, runs) for name in run]
    metric = metric or headline(opened[0])
    file = metric.replace("/", "_")
    if len(opened) == 1:
        default = opened[0].path / "plots" / file
    else:
        default = Path("_".join([*dict.fromkeys(run.name for run in opened), file]))
    for path in curves(opened, metric=metric, x=x, out=out or default):
        typer.echo(path)


@app.command(rich_help_panel=options.RESULTS)
def view(
    folders: Annotated[
        Texts, Argument(help="Folders of runs, runs, or s3://bucket/prefix; by default runs.", metavar="RUNS")
    ] = None,
    host: Annotated[str, Option(help="Address to listen on; by default only this machine.")] = "127.0.0.1",
    port: Annotated[int, Option(min=0, max=65535, help="Port to listen on; 0 picks a free one.")] = 8765,
    key: Annotated[
        str | None, Option(envvar="PALESTRA_VIEW_KEY", help="The key that browsers need; made beyond this machine.")
    ] = None,
    open_: Annotated[bool, Option("--open", help="Open the page in a browser.")] = False,
    demo: Annotated[bool, Option("--demo", help="Make a folder of small runs to look at, and show it.")] = False,
) -> None:
    """Look at runs in a browser, live: curves, rollouts, comparisons, timelines."""
    settings = {"host": host, "port": port, "key": key, "open_page": open_}
    from palestra.view.server import start

    start(folders or ([] if demo else ["runs"]), demo=demo, **settings)


@app.command(rich_help_panel=options.MODELS)
def chat(
    model: Model,
    system: Annotated[str | None, Option(help="The system prompt.")] = None,
    temperature: Annotated[float, Option(min=0, help="Sampling temperature; 0 is greedy.")] = 0.7,
    max_new_tokens: Annotated[int, Option(min=1, help="Maximum tokens of a completion.")] = 512,
    dtype: Dtype = "auto",
    device: Device = "auto",
    root: options.Root = options.RUNS,
) -> None:
    """Chat with a model in the terminal."""
    settings = locals()
    options.announce(model)
    from palestra.api import chat as talk

    talk(**settings)


@app.command(rich_help_panel=options.MODELS)
def serve(
    model: Model,
    host: Annotated[str, Option(help="Address to listen on; by default only this machine.")] = "127.0.0.1",
    port: Annotated[int, Option(min=0, max=65535, help="Port to listen on; 0 picks a free one.")] = 8000,
    api_key: Annotated[str | None, Option(envvar="PALESTRA_API_KEY", help="The bearer key of all requests.")] = None,
    name: Annotated[str | None, Option(help="The model's name for clients; by default its folder.")] = None,
    context: Annotated[int | None, Option(min=1, help="Maximum sequence length; by default the model's.")] = None,
    max_concurrent: Annotated[int, Option(min=1, help="Requests in flight; more are rejected with 429.")] = 1024,
    max_body: Annotated[
        int | None, Option(min=1, metavar="BYTES", help="Maximum size of a request; 4 MiB, with images 32 MiB.")
    ] = None,
    image_urls: Annotated[bool, Option("--image-urls", help="Fetch images that requests name by http.")] = False,
    allowed_hosts: Annotated[
        Texts,
        Option(
            "--allowed-host",
            help="A Host header to accept; repeatable. By default the loopback names on loopback, otherwise any.",
        ),
    ] = None,
    sessions: Annotated[
        Path | None, Option(metavar="DIR", help="Serve agents, and record the session of every API key in this folder.")
    ] = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    root: options.Root = options.RUNS,
) -> None:
    """Serve a model over HTTP: OpenAI's API (/v1/chat/completions, /v1/completions) and tokens (/generate)."""
    settings = locals() | {"allowed_hosts": allowed_hosts or ()}
    options.announce(model)
    from palestra.api import serve as start

    start(**settings)


@app.command(name="eval", rich_help_panel=options.MODELS)
def evaluate(
    model: Model,
    tasks: Annotated[Texts, Option("--task", "-t", help="A task: gsm8k, or lm_eval:arc_easy; repeatable.")] = None,
    split: Annotated[str | None, Option(help="The split of the tasks; by default test.")] = None,
    problems: Annotated[int | None, Option(min=1, help="Maximum problems per task; by default all.")] = None,
    samples: Annotated[int, Option(min=0, help="Completions sampled per problem, for pass@k.")] = 0,
    k: Annotated[str | None, Option(metavar="K,K", help="Which pass@k to report; by default 1 and --samples.")] = None,
    args: Annotated[
        Texts, Option("--arg", "-a", metavar="KEY=VALUE", help="Argument of the tasks; repeatable.")
    ] = None,
    likelihood: Annotated[
        Texts, Option(metavar="FILE", help="Rows of answers to score by likelihood; repeatable.")
    ] = None,
    greedy: Annotated[bool, Option(help="Score the greedy completion.")] = True,
    temperature: Annotated[float | None, Option(help="Temperature of the samples; by default 1.")] = None,
    max_new_tokens: Annotated[int | None, Option(min=1, help="Maximum tokens of a completion; by default 512.")] = None,
    seed: Annotated[int, Option(min=0, help="Seed of the samples.")] = 0,
    name: Annotated[str | None, Option(help="The folder under runs/; by default eval_MODEL.")] = None,
    server: Annotated[
        str | None, Option(metavar="URL", help="A server of OpenAI's protocol that completes the tasks.")
    ] = None,
    served_model: Annotated[str | None, Option(metavar="NAME", help="The server's model, if it has several.")] = None,
    api_key_env: Annotated[str | None, Option(metavar="NAME", help="Variable with the server's API key.")] = None,
    episodes: Annotated[int, Option(min=1, help="Of the policy of a control run: episodes per seed.")] = 100,
    which: Annotated[str, Option(help="Of the policy of a control run: the checkpoint, best or last.")] = "best",
    as_json: Annotated[bool, Option("--json", help="Of the policy of a control run: print JSON.")] = False,
    dtype: Dtype = "auto",
    device: Device = "auto",
    root: options.Root = options.RUNS,
    quiet: options.Quiet = False,
) -> None:
    """Evaluate a model on tasks (accuracy, pass@k, likelihoods) or a control run's policy, with intervals."""
    settings = {k: v for k, v in locals().items() if k not in ("episodes", "which", "as_json")}
    if not quiet:
        options.announce(model)
    if show_policy(model, root, episodes=episodes, which=which, seed=seed, as_json=as_json):
        return
    from palestra.api import evaluate as start
    from palestra.cli.show import show_evaluation

    settings |= {"tasks": tasks or (), "likelihood": likelihood or (), "args": options.parse_args(args or ())}
    show_evaluation(start(**settings | {"k": None if k is None else options.parse_numbers(k)}))


app.add_typer(cluster, name="cluster", rich_help_panel=options.EXPERIMENTS)
app.add_typer(models, name="model", rich_help_panel=options.MODELS)
app.add_typer(data, name="data", rich_help_panel=options.DATA)
app.add_typer(pipelines, name="pipeline", rich_help_panel=options.DATA)
app.add_typer(policies)
app.add_typer(sweeps)
app.add_typer(tasks)
app.add_typer(launches)
app.add_typer(plans)
app.add_typer(imports, name="import", rich_help_panel=options.SHARING)


@app.command(rich_help_panel=options.SHARING)
def push(
    run: options.RunName,
    to: Annotated[
        str, Option(help="dev or published (PALESTRA_DEV, PALESTRA_PUBLISHED), a folder, s3://… or hf://datasets/…")
    ] = "dev",
    runs: options.Root = options.RUNS,
) -> None:
    """Upload a run to share it; only new and changed files are sent. `published` accepts only finished runs."""
    from palestra.data.remote import open_filesystem
    from palestra.runs.run import open_run
    from palestra.runs.share import place, push_run

    opened = open_run(run, runs)
    url, graduated = place(to)
    sent, present = push_run(opened, *open_filesystem(url), published=graduated)
    typer.echo(f"{opened.name}/{opened.id} is at {url}: {sent} files sent, {present} already there")


@app.command(rich_help_panel=options.SHARING)
def pull(
    name: Annotated[str, Argument(help="NAME/ID of a shared run, or NAME for the newest of that name.")],
    from_: Annotated[str, Option("--from", help="dev or published, a folder, s3://… or hf://datasets/…")] = "published",
    runs: options.Root = options.RUNS,
) -> None:
    """Download a shared run into the folder of runs and verify the checksum of every file."""
    from palestra.data.remote import open_filesystem
    from palestra.runs.share import place, pull_run

    typer.echo(pull_run(name, *open_filesystem(place(from_)[0]), root=runs))


def _open_streams() -> None:
    """Open what the parent has closed, as some daemons do, so that no file gets the number of a standard stream."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            stream = open(os.devnull, mode)  # noqa: SIM115  open until the process ends
            os.set_inheritable(stream.fileno(), True)  # workers print too
            setattr(sys, name, stream)


def main() -> None:
    """Run the command line; every error ends in one paragraph and its exit code."""
    debug = "--debug" in sys.argv
    _open_streams()
    sys.stdout, sys.stderr = Terminal(sys.stdout), Terminal(sys.stderr)  # pyrefly: ignore[bad-assignment]
    logging.basicConfig(format="%(levelname)s: %(message)s")
    logging.getLogger().handlers[0].setLevel(logging.WARNING)  # log.txt has the rest
    logging.captureWarnings(True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # like Ctrl-C, also where no session handles it
    try:
        code = app(standalone_mode=False)
        if code == 130:  # what Typer makes of a KeyboardInterrupt
            print("palestra: interrupted", file=sys.stderr)
    except Exception as error:
        show = getattr(error, "show", None)  # click's usage errors print themselves
        code = getattr(error, "exit_code", 1) if show or isinstance(error, PalestraError) else 1
        if show:
            show()
        elif debug:
            traceback.print_exception(error)
        elif isinstance(error, PalestraError):
            print(f"palestra: {error}", file=sys.stderr)
        else:
            print(f"palestra: {type(error).__name__}: {error}", file=sys.stderr)
            print("(palestra --debug … shows the traceback)", file=sys.stderr)
    sys.exit(code if isinstance(code, int) else 0)
