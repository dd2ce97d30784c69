"""Writes what is generated in docs/: reference/, architecture.md, diagrams, and tables between marks in other pages.

`python docs/generate.py` writes them; with `--check` it writes nothing and exits with 1 naming those out of date. A
table stands between `<!-- generated: NAME -->` and `<!-- end -->`; the names are those of `TABLES`.
"""

import argparse
import inspect
import json
import re
import sys
import types
from pathlib import Path
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import mdformat
import typer
from api_reference import api_page
from catalog import advice_table, architecture_page, broken_table, commands_table, extras_table, kinds_table, names_page
from diagrams import DIAGRAMS
from spec_reference import reference_markdown
from typer.main import get_command

from palestra.cli.main import app
from palestra.spec.schema import json_schema
from palestra.spec.words import words

FOLDER = Path(__file__).parent
TABLES = {"kinds": kinds_table, "extras": extras_table, "advice": advice_table, "broken": broken_table}
_MARKED = re.compile(r"(<!-- generated: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)

_INTRODUCTION = """\
A `SPEC` is `file.yaml` or `file.yaml:name`. A `RUN` is a path, a name (its latest run), `name/id`, or the beginning of
an id. A `MODEL` is a run, a checkpoint, a Hugging Face folder, a URL or a name on the Hub.

Exit codes: 0 done, 1 failed, 2 bad usage or spec, 130 interrupted.

`palestra --install-completion` makes the Tab key complete commands and options in bash, zsh, fish and PowerShell;
`palestra --show-completion` prints the script instead.
"""


def spec_pages() -> dict[str, str]:
    """The pages made from the types of the specs, by file name."""
    return {
        "reference/spec.md": _formatted(reference_markdown()),
        "reference/palestra.schema.json": json.dumps(json_schema(), indent=2, ensure_ascii=False) + "\n",
    }


def cli_page(app: typer.Typer, name: str = "palestra") -> str:
    """The page of all commands of an app, in the order of its help."""
    root = get_command(app)
    parts = ["# Commands", "Generated from the commands by `docs/generate.py`; do not edit.", _INTRODUCTION]
    parts += [commands_table(app), *_command(root, name, 1)]
    return _formatted("\n\n".join(parts) + "\n")


def marked_pages(folder: Path = FOLDER) -> dict[str, str]:
    """The pages that have generated tables in them, by file name, with the tables of today."""
    found = {}
    for path in sorted((*folder.glob("*.md"), folder.parent / "README.md")):
        text = path.read_text(encoding="utf-8")
        filled = _MARKED.sub(lambda match: f"{match[1]}\n{_formatted(TABLES[match[2]]())}\n{match[3]}", text)
        if _MARKED.search(text):
            found[path.name if path.parent == folder else f"../{path.name}"] = filled
    return found


def pages() -> dict[str, str]:
    """All generated pages, by file name."""
    made = {"names": names_page(), "python": api_page()}
    reference = {f"reference/{name}.md": _formatted(text) for name, text in made.items()}
    other = {"reference/cli.md": cli_page(app), "architecture.md": _formatted(architecture_page())}
    pictures = {f"images/{name}.svg": drawn() for name, drawn in DIAGRAMS.items()}
    return spec_pages() | reference | other | pictures | marked_pages()


def main(arguments: list[str] | None = None, folder: Path = FOLDER, wanted: dict[str, str] | None = None) -> int:
    """Write the pages, or with --check say which are out of date; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a page is out of date")
    check = parser.parse_args(arguments).check
    texts = pages() if wanted is None else wanted
    stale = [name for name, text in texts.items() if not _is(folder / name, text)]
    if check:
        for name in stale:
            print(f"{folder / name} is out of date; run python docs/generate.py", file=sys.stderr)
        return 1 if stale else 0
    for name in stale:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(texts[name], encoding="utf-8")
    return 0


def _is(path: Path, text: str) -> bool:
    return path.exists() and path.read_text(encoding="utf-8") == text


def _formatted(markdown: str) -> str:
    """Markdown as the formatter of the repository leaves it."""
    return mdformat.text(markdown, extensions={"gfm"})


def _command(command: Any, path: str, depth: int) -> list[str]:
    """The section of a command, then those of its subcommands."""
    context = command.make_context(path, [], resilient_parsing=True)
    usage = " ".join([path, *command.collect_usage_pieces(context)])
    # A \f ends what help shows, a \b stops it from re-wrapping a paragraph.
    text = (command.help or "").split("\f")[0].replace("\b\n", "").strip()
    parts = [f"{'#' * min(depth + 1, 6)} {path}", text, f"```text\n{usage}\n```"]
    hints = get_type_hints(inspect.unwrap(command.callback), include_extras=True) if command.callback else {}
    parts += [_table(command.get_params(context), hints)]
    for name in command.list_commands(context) if hasattr(command, "list_commands") else ():
        child = command.get_command(context, name)
        if child is not None and not child.hidden:
            parts += _command(child, f"{path} {name}", depth + 1)
    return [part for part in parts if part]


def _table(parameters: list[Any], hints: dict[str, Any]) -> str:
    shown = [p for p in parameters if not getattr(p, "hidden", False) and p.name != "help"]
    if not shown:
        return ""
    rows = ["| argument | takes | default | meaning |", "| --- | --- | --- | --- |"]
    for parameter in shown:
        cells = [_name(parameter), _takes(parameter, hints), _default(parameter), getattr(parameter, "help", "") or ""]
        rows.append("| " + " | ".join(" ".join(cell.replace("|", r"\|").split()) for cell in cells) + " |")
    return "\n".join(rows)


def _name(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return f"`{parameter.metavar or parameter.name.upper()}`"
    return ", ".join(f"`{option}`" for option in (*parameter.opts, *parameter.secondary_opts))


def _takes(parameter: Any, hints: dict[str, Any]) -> str:
    if getattr(parameter, "is_flag", False):
        return "flag"
    text = words(_single(hints[parameter.name]))
    return f"{text}, repeatable" if getattr(parameter, "multiple", False) or parameter.nargs == -1 else text


def _single(annotation: Any) -> Any:
    """The type of one value: without null, which a command line cannot say, and without the list around it."""
    if get_origin(annotation) is Annotated or get_origin(annotation) is list:
        return _single(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return _single(next(member for member in get_args(annotation) if member is not type(None)))
    return annotation


def _default(parameter: Any) -> str:
    if parameter.required:
        return "required"
    default = parameter.default
    if default is None or default is False or callable(default) or default in ([], ()):
        return ""
    return f"`{getattr(default, 'value', default)}`"


if __name__ == "__main__":
    sys.exit(main())
