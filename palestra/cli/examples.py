"""The shipped examples: what `palestra new` lists and writes."""

import itertools
import json
import re
from pathlib import Path

import palestra
from palestra.cli.show import console, table
from palestra.errors import UsageError, did_you_mean

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
"""The example to start from, by kind."""
SCHEMA = "palestra.schema.json"
_MODELINE = re.compile(r"# yaml-language-server: .*\n")


def folder() -> Path:
    """The folder of examples: inside the installed package, or next to it in a checkout."""
    package = Path(palestra.__file__).parent
    return next(path for path in (package / "examples", package.parent / "examples") if path.is_dir())


def examples() -> list[str]:
    """The names of all example specs: paths below `examples/`, without the ending."""
    return sorted(str(path.relative_to(folder()).with_suffix("")) for path in folder().rglob("*.yaml"))


def summary(name: str) -> str:
    """The first sentence of the comment at the top of an example."""
    lines = _MODELINE.sub("", _text(folder() / f"{name}.yaml")).splitlines()
    comment = itertools.takewhile(lambda line: line.startswith("# "), lines)
    text = " ".join(line[2:] for line in comment)
    return re.split(r"(?<=[a-z])[.:]\s", f"{text} ")[0].strip(" .:")


def show_examples() -> None:
    """The starter of each kind, then all examples with a line about each."""
    rows = [(name, f"the same as {starter}") for name, starter in STARTERS.items()]
    rows += [(name, summary(name)) for name in examples()]
    console().print(table(("palestra new …", "what it is"), rows))


def show_new(name: str, to: Path, schema: bool) -> None:
    """Write an example, then print the files and the commands that its comments name."""
    written = write_example(name, to, schema=schema)
    for path in written:
        print(f"wrote {path}")
    commands = [line[1:].strip() for line in written[0].read_text().splitlines() if line.startswith("#   ")]
    for command in commands or [f"palestra train {written[0]}"]:
        print(f"  {command}")


def write_example(name: str, to: Path, *, schema: bool = False) -> list[Path]:
    """Write an example, or the starter of a kind, and the files it needs into a folder; returns the spec first."""
    known = examples()
    name = STARTERS.get(name, name.removeprefix("examples/").removesuffix(".yaml"))
    if name not in known:
        hint = did_you_mean(name, [*STARTERS, *known, *(Path(path).name for path in known)])
        raise UsageError(f"no kind or example {name!r}. {hint} `palestra new --list` shows all".replace("  ", " "))
    sources = _with_needed(folder() / f"{name}.yaml")
    texts = {to / path.name: _relocated(_text(path), to) for path in sources}
    if schema:
        from palestra.spec.schema import json_schema

        spec = to / sources[0].name
        texts[spec] = f"# yaml-language-server: $schema={SCHEMA}\n{texts[spec]}"
        texts[to / SCHEMA] = json.dumps(json_schema(), indent=2, ensure_ascii=False) + "\n"
    for path, text in texts.items():
        if path.exists() and path.name != SCHEMA and _text(path) != text:
            raise UsageError(f"{path} exists and differs from the example; choose another folder with --to")
    to.mkdir(parents=True, exist_ok=True)
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8")
    return list(texts)


def _with_needed(first: Path) -> list[Path]:
    """A file, the example files it names by path or as neighbors, and those that these name in turn."""
    files = [first]
    for path in files:
        text = _text(path)
        named = [folder().parent / name for name in re.findall(r"\bexamples/[\w/]+\.(?:yaml|py)", text)]
        neighbors = [other for other in sorted(path.parent.iterdir()) if other.is_file() and _names(text, other)]
        files += [other for other in dict.fromkeys((*named, *neighbors)) if other not in files and other.is_file()]
    return files


def _names(text: str, other: Path) -> bool:
    """Whether a text names a neighboring file: as a file, as an import, or as `module:function`."""
    forms = [rf"(?<![\w/]){re.escape(other.name)}"]
    if other.suffix == ".py":
        forms += [rf"^(?:from|import) (?:examples\.(?:\w+\.)+)?{other.stem}\b", rf"[\".]{other.stem}:\w"]
    return any(re.search(form, text, re.MULTILINE) for form in forms)


def _relocated(text: str, to: Path) -> str:
    """A text of the examples with its paths and modules pointing into another folder."""
    prefix = "" if to == Path() else f"{to.as_posix()}/"
    text = re.sub(r"\bexamples/(?:\w+/)+(?=\w+\.(?:yaml|py))", lambda _: prefix, _MODELINE.sub("", text))
    modules = "" if to.is_absolute() else prefix.replace("/", ".")
    return re.sub(r"\bexamples\.(?:\w+\.)+(?=\w+(?::\w| import ))", lambda _: modules, text)


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")
