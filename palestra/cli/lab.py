"""The commands around a lab's work: new specs, smoke tests, benchmarks, imports, sharing runs."""

import json
import os
import re
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated

import typer

import palestra
from palestra.errors import UsageError

RUNS = Path("runs")
Root = Annotated[Path, typer.Option("--runs", metavar="FOLDER", help="The folder of all runs.")]
Set = Annotated[list[str] | None, typer.Option("--set", "-s", metavar="VAR=VALUE", help="Fill a ${VAR} of the spec.")]

# The groups of `palestra --help`.
EXPERIMENTS, RESULTS, MODELS, DATA, SHARING = (
    "Experiments",
    "Results",
    "Models",
    "Data and pipelines",
    "Benchmarks, sharing, migration",
)

app = typer.Typer()


@app.command(rich_help_panel=EXPERIMENTS)
def dev(
    spec: Annotated[str, typer.Argument(help="FILE.yaml or FILE.yaml:NAME")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Overrides of the spec: algorithm.lr=3e-4", metavar="KEY=VALUE")
    ] = None,
    set_: Set = None,
    render: Annotated[
        bool, typer.Option("--render", help="Show an episode: in a window, or as dev.gif where there is no display.")
    ] = False,
) -> None:
    """Try a control spec out in seconds: a tiny run whose gradients, updates and losses are checked part by part."""
    announce(spec)
    from palestra.api import check
    from palestra.errors import MissingExtra

    loaded = check(spec, variables=variables(set_), overrides=overrides or [])
    try:
        from palestra.control.smoke_test import try_out
    except ModuleNotFoundError as error:
        raise MissingExtra("palestra dev", "train") from error
    try_out(loaded.spec, typer.echo, video=Path("dev.gif") if render else None)


@app.command(rich_help_panel=SHARING)
def bench(
    suite: Annotated[str | None, typer.Argument(help="classic, box2d, mujoco or atari.", metavar="SUITE")] = None,
    seeds: Annotated[
        str | None, typer.Option(metavar="1000-1003", help="The seeds to run and to show; by default the table's own.")
    ] = None,
    only: Annotated[str | None, typer.Option(metavar="REGEX", help="Only specs whose name it finds.")] = None,
    parallel: Annotated[int | None, typer.Option(min=1, help="Runs at a time; by default one a core.")] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="The page to write, results and plots/ beside it; in a checkout docs/benchmarks.md."),
    ] = None,
    table: Annotated[bool, typer.Option("--table", help="Run nothing: enter what the run folders hold.")] = False,
    specs: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="The suite's specs; by default examples/control.")
    ] = None,
    runs: Annotated[Path, typer.Option("--runs", metavar="FOLDER", help="The folder of benchmark runs.")] = Path(
        "runs/bench"
    ),
) -> None:
    """Run the shipped specs of a suite over seeds and show the table; finished seeds are kept, others continued."""
    from palestra.bench.run import bench as run_suite

    run_suite(
        suite,
        seeds=seeds,
        only=only,
        parallel=parallel or os.cpu_count() or 1,
        out=out,
        run_nothing=table,
        specs=specs,
        root=runs,
        tell=typer.echo,
    )


imports = typer.Typer(help="Bring specs of other frameworks over.", no_args_is_help=True)
app.add_typer(imports, name="import", rich_help_panel=SHARING)


@imports.callback()
def _imports() -> None:
    """Bring specs of other frameworks over."""


@imports.command(name="slm-lab")
def slm_lab(
    spec: Annotated[Path, typer.Argument(help="A JSON or YAML file of SLM-Lab's specs.", metavar="FILE")],
    name: Annotated[str, typer.Argument(help="The spec in it.")],
    set_: Set = None,
    out: Annotated[Path | None, typer.Option(help="The file to write; by default NAME.yaml here.")] = None,
) -> None:
    """Turn a spec of SLM-Lab into one of Palestra, and say which of its keys did not come along, and why."""
    from palestra.errors import UsageError
    from palestra.migrate.slm_lab import import_spec
    from palestra.runs.store import write_bytes

    found = import_spec(spec, name, variables(set_))
    target = out or Path(f"{found.name}.yaml")
    if out is None and target.exists():
        raise UsageError(f"{target} exists: name another file with --out, or the same one to replace it")
    write_bytes(target, found.to_yaml(f"{spec.name}, {name}").encode())
    for note in found.notes:
        typer.echo(f"note: {note}", err=True)
    typer.echo(f"{target}: palestra check {target}")


@app.command(rich_help_panel=SHARING)
def push(
    run: Annotated[str, typer.Argument(help="A run: its path, name, name/id or id.")],
    to: Annotated[
        str,
        typer.Option(help="dev or published (PALESTRA_DEV, PALESTRA_PUBLISHED), a folder, s3://… or hf://datasets/…"),
    ] = "dev",
    runs: Root = RUNS,
) -> None:
    """Copy a run to where it is shared; only what is not there yet travels. `published` takes finished runs alone."""
    from palestra.data.remote import open_filesystem
    from palestra.runs.run import open_run
    from palestra.runs.share import place, push_run

    found = open_run(run, runs)
    url, graduated = place(to)
    sent, kept = push_run(found, *open_filesystem(url), published=graduated)
    typer.echo(f"{found.name}/{found.id} is at {url}: {sent} files sent, {kept} were there")


@app.command(rich_help_panel=SHARING)
def pull(
    name: Annotated[str, typer.Argument(help="NAME/ID of a shared run, or NAME for the newest of that name.")],
    from_: Annotated[
        str, typer.Option("--from", help="dev or published, a folder, s3://… or hf://datasets/…")
    ] = "published",
    runs: Root = RUNS,
) -> None:
    """Copy a shared run into the folder of runs; every file is checked against its checksum."""
    from palestra.data.remote import open_filesystem
    from palestra.runs.share import place, pull_run

    typer.echo(pull_run(name, *open_filesystem(place(from_)[0]), root=runs))


def announce(what: str) -> None:
    """Say what is loaded before anything heavy is: importing torch alone takes seconds."""
    if os.environ.get("RANK", "0") == "0":  # one of the processes that `torchrun` started speaks for all
        typer.echo(f"loading torch and {what} …", err=True)


def variables(given: list[str] | None) -> dict[str, str]:
    """The pairs of `-s VAR=VALUE`."""
    pairs = {}
    for text in given or []:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise typer.BadParameter(f"{text!r} is not VAR=VALUE", param_hint="--set")
        pairs[name] = value
    return pairs


STARTERS = {
    "control": "control/ppo_cartpole_fast",
    "pretrain": "lm/shakespeare",
    "sft": "lm/sft",
    "dpo": "lm/dpo",
    "reward_model": "lm/reward_model",
    "posttrain": "quickstart/grpo",
    "evaluate": "evaluate/tasks",
    "distill": "posttrain/distill",
    "pipeline": "pipelines/corpus",
}
"""The example to begin with, by kind."""
SCHEMA = "palestra.schema.json"
_MODELINE = re.compile(r"# yaml-language-server: .*\n")


def folder() -> Path:
    """The shipped examples: inside the installed package, or beside it in a checkout."""
    package = Path(palestra.__file__).parent
    return next(path for path in (package / "examples", package.parent / "examples") if path.is_dir())


def examples() -> list[str]:
    """The names of all example specs: paths below `examples/`, without the ending."""
    return sorted(str(path.relative_to(folder()).with_suffix("")) for path in folder().rglob("*.yaml"))


def summary(name: str) -> str:
    """The first sentence of the comment that an example begins with."""
    lines = _MODELINE.sub("", _text(folder() / f"{name}.yaml")).splitlines()
    first = next((number for number, line in enumerate(lines) if line[:2] != "# "), 0)
    text = " ".join(line[2:] for line in lines[:first])
    return re.split(r"(?<=[a-z])[.:]\s", f"{text} ")[0].strip(" .:")


def write_example(name: str, to: Path, *, schema: bool = False) -> list[Path]:
    """Write an example, or the starter of a kind, with the files it needs into a folder; the spec comes first."""
    known = examples()
    name = STARTERS.get(name, name.removeprefix("examples/").removesuffix(".yaml"))
    if name not in known:
        near = get_close_matches(name, [*STARTERS, *known, *(Path(one).name for one in known)], n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise UsageError(f"no kind or example {name!r}.{hint} `palestra new --list` shows all")
    found = _with_needed(folder() / f"{name}.yaml")
    texts = {to / path.name: _moved(_text(path), to) for path in found}
    if schema:
        from palestra.spec.schema import json_schema

        spec = to / found[0].name
        texts[spec] = f"# yaml-language-server: $schema={SCHEMA}\n{texts[spec]}"
        texts[to / SCHEMA] = json.dumps(json_schema(), indent=2, ensure_ascii=False) + "\n"
    for path, text in texts.items():
        if path.exists() and path.name != SCHEMA and _text(path) != text:
            raise UsageError(f"{path} exists and differs from the example; name another folder with --to")
    to.mkdir(parents=True, exist_ok=True)
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8")
    return list(texts)


def _with_needed(first: Path) -> list[Path]:
    """A file and those of the examples that it names, and that these name: by path, or by name beside it."""
    found = [first]
    for path in found:
        text = _text(path)
        named = [folder().parent / one for one in re.findall(r"\bexamples/[\w/]+\.(?:yaml|py)", text)]
        beside = [other for other in sorted(path.parent.iterdir()) if other.is_file() and _names(text, other)]
        found += [other for other in dict.fromkeys((*named, *beside)) if other not in found and other.is_file()]
    return found


def _names(text: str, other: Path) -> bool:
    """Whether a text names a file beside it: as a file, as an import, or as `module:function`."""
    forms = [rf"(?<![\w/]){re.escape(other.name)}"]
    if other.suffix == ".py":
        forms += [rf"^(?:from|import) {other.stem}\b", rf"[\".]{other.stem}:\w"]
    return any(re.search(form, text, re.MULTILINE) for form in forms)


def _moved(text: str, to: Path) -> str:
    """A text of the examples as it reads in another folder: the paths and modules in it lead there."""
    prefix = "" if to == Path() else f"{to.as_posix()}/"
    text = re.sub(r"\bexamples/(?:\w+/)+(?=\w+\.(?:yaml|py))", lambda _: prefix, _MODELINE.sub("", text))
    modules = "" if to.is_absolute() else prefix.replace("/", ".")
    return re.sub(r"\bexamples\.(?:\w+\.)+(?=\w+:\w)", lambda _: modules, text)


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")
