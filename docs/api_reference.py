"""The reference page of the Python API, made from signatures and docstrings: what users call and what they extend."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
SECTIONS: dict[str, dict[str, tuple[str, ...]]] = {
    "Calls": {
        "palestra.api": (
            "run", "check", "load", "evaluate", "enjoy", "evaluate_policy", "export", "chat", "serve",
            "fetch_model", "convert_model",
        ),
        "palestra.runs.run": ("open_run", "list_runs", "Run"),
    },
    "Tasks and rewards": {
        "palestra.tasks.task": ("Task", "TaskArgs", "Problem", "Completion", "Verdict", "Status", "make_task"),
        "palestra.tasks.rewards.rewards": ("reward",),
    },
    "Workflows": {
        "palestra.rollout.episode": ("Episode", "Transcript", "trajectory"),
        "palestra.rollout.types": ("Trajectory", "Group"),
    },
    "Hooks": {"palestra.runs.recorder": ("HookContext",)},
    "Generation": {
        "palestra.generate.types": ("Generator", "Request", "Sampling", "Generation", "Result", "Chunk", "StopReason"),
    },
    "Pipelines": {"palestra.pipeline": ("step", "Step", "Output")},
    "Errors": {
        "palestra.errors": ("PalestraError", "UsageError", "MissingExtra", "Interrupted", "RunBusy", "LeaseLost"),
    },
}  # fmt: skip
"""The public API: modules and names by section. The names of `palestra` itself are imported from there."""

_INTRODUCTION = """\
# Python API reference

Generated from signatures and docstrings by `docs/generate.py`; do not edit.

[Python](../python.md) shows how the calls are used. What is not on this page may change without notice.
"""

_WIDTH = 100


def api_page() -> str:
    """The page, as Markdown."""
    parts = [_INTRODUCTION]
    for title, modules in SECTIONS.items():
        parts.append(f"## {title}")
        for module, names in modules.items():
            top = "palestra" if module in ("palestra.api", "palestra.runs.run") else module
            for name in names:
                parts += _entry(_find(module, name), f"{top}.{name}")
    return "\n\n".join(parts) + "\n"


def _find(module: str, name: str) -> ast.ClassDef | ast.FunctionDef:
    """The definition of a public name; of an overloaded function the one with the docstring."""
    home = "palestra.pipeline.step" if module == "palestra.pipeline" else module
    tree = ast.parse((ROOT / f"{home.replace('.', '/')}.py").read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name and ast.get_docstring(node):
            return node
    raise SystemExit(f"docs/api_reference.py: {module} has no documented {name}")


def _entry(node: ast.ClassDef | ast.FunctionDef, dotted: str) -> Iterator[str]:
    yield f"### `{dotted}`"
    if isinstance(node, ast.FunctionDef):
        yield f"```python\n{_signature(node)}: ...\n```"
        yield _prose(node)
        return
    plain = ("ABC", "Protocol", "Generic[GivenArgs]")
    bases = [name for name in map(ast.unparse, node.bases) if name not in plain]
    yield _prose(node) + (f" Derives from `{'`, `'.join(bases)}`." if bases else "")
    rows = list(_members(node))
    if rows:
        yield "\n".join(["| member | meaning |", "| --- | --- |", *rows])


def _members(node: ast.ClassDef) -> Iterator[str]:
    """Rows of a class's public fields, properties and methods, in their order."""
    for place, member in enumerate(node.body):
        if isinstance(member, ast.AnnAssign | ast.Assign):
            target = member.target if isinstance(member, ast.AnnAssign) else member.targets[0]
            if not ast.unparse(target).startswith("_"):
                yield _row(ast.unparse(member), _string(node.body[place + 1 : place + 2]))
        elif isinstance(member, ast.FunctionDef | ast.AsyncFunctionDef) and not member.name.startswith("_"):
            decorators = [ast.unparse(decorator) for decorator in member.decorator_list]
            returns = f" -> {ast.unparse(member.returns)}" if member.returns else ""
            shown = f"{member.name}{returns.replace(' ->', ':')}" if "property" in decorators else _signature(member)
            yield _row(" ".join(shown.split()), ast.get_docstring(member) or "")


def _row(code: str, meaning: str) -> str:
    code, meaning = code.replace("|", r"\|"), _plain(meaning).replace("|", r"\|")
    return f"| `{code}` | {meaning} |"


def _signature(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """The call as one writes it, without self, one argument a line where it is long."""
    arguments = re.sub(r"^(self|cls)(, )?", "", ast.unparse(node.args)).replace("=", " = ").replace("'", '"')
    kind = "async def " if isinstance(node, ast.AsyncFunctionDef) else "def "
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    line = f"{kind}{node.name}({arguments}){returns}"
    if len(line) <= _WIDTH or not node.args.kwonlyargs:
        return line
    split = re.sub(r", (?=\*|\w+: )", ",\n    ", arguments)
    return f"{kind}{node.name}(\n    {split},\n){returns}"


def _prose(node: ast.ClassDef | ast.FunctionDef) -> str:
    """A docstring as Markdown: its `Args:` become a list."""
    text, _, arguments = (ast.get_docstring(node) or "").partition("\nArgs:\n")
    items = re.findall(r"^    (\w+): (.*(?:\n {5,}.*)*)", arguments, re.MULTILINE)
    listed = "\n".join(f"- `{name}`: {' '.join(about.split())}" for name, about in items)
    return text.strip() + (f"\n\n{listed}" if listed else "")


def _plain(text: str) -> str:
    return " ".join(text.split())


def _string(nodes: list[ast.stmt]) -> str:
    """The text of a string that stands below a field."""
    match nodes:
        case [ast.Expr(value=ast.Constant(value=str(text)))]:
            return text
    return ""
