"""What tasks of writing code share: their args, what tests need of the code, and the verdict of running them."""

import ast
import atexit
import builtins
import os
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from pydantic import Field

from palestra.tasks.code import syntax_tree, top_level_names
from palestra.tasks.sandbox import Sandbox
from palestra.tasks.task import TaskArgs
from palestra.tasks.types import Status, Verdict

STATUSES = {
    "passed": Status.CORRECT,
    "failed": Status.WRONG,
    "timeout": Status.TIMEOUT,
    "error": Status.ERROR,
}

BUILT_IN_FUNCTIONS = {name for name in dir(builtins) if callable(getattr(builtins, name))}


class CodeArgs(TaskArgs):
    """What every task of writing code can be told."""

    source: str | None = Field(default=None, min_length=1)
    """Where the rows are: a file or folder, a URL such as s3://…, or a name on the Hub; null takes the task's own."""
    format: Literal["plain", "chat"] = "plain"
    """Prompts as text to go on from, or as a question in a conversation."""
    timeout: float = Field(default=5.0, gt=0)
    """Seconds that a program and its tests may take."""
    sandbox: Literal["strict", "weak"] = "strict"
    """`weak` runs code also where this machine cannot lock it in well; else that is refused."""
    weak: bool = False
    """Train also on problems whose tests have to run in the code's own process, where code can cheat."""


@dataclass(frozen=True)
class Needs:
    """What tests need of the code that they test."""

    entry_points: tuple[str, ...]
    """The names that they use of it."""
    imports: str = ""
    """Import statements for the modules that they use and do not import."""
    weak: str = ""
    """Why they cannot run in another process than the code; empty where they can."""


def inspect_tests(tests: Sequence[str], setup: str = "", reference: str = "") -> Needs:
    """Find what tests need; `reference` is a right solution, which tells its own names from those of the language."""
    tree = syntax_tree("\n".join([setup, *tests]))
    solution = syntax_tree(reference)
    own = top_level_names(solution)
    imports = {name: source for node in ast.walk(solution) for name, source in _imported(node)}
    used = [node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)]
    free = [name for name in dict.fromkeys(used) if name not in _bound(tree)]
    free = [name for name in free if name in own or not hasattr(builtins, name)]
    modules = {name: f"import {name}" for name in free if name not in own and name in sys.stdlib_module_names}
    modules |= {name: imports[name] for name in free if name in imports}
    entry_points = tuple(sorted(name for name in free if name not in modules))
    classes = {node.name for node in solution.body if isinstance(node, ast.ClassDef)}
    if not solution.body:
        classes |= {name for name in entry_points if name[:1].isupper()}
    weak = next((f"the tests need the class {name} of the code" for name in entry_points if name in classes), "")
    return Needs(entry_points, "\n".join(modules.values()), weak or why_weak(tree, entry_points))


def judge_code(code: str | None, row: Mapping[str, Any], args: CodeArgs) -> Verdict:
    """The verdict on code by the tests of a row, in the sandbox of this process."""
    if code is None:
        return Verdict(0.0, Status.UNPARSABLE, {"tests": 0.0}, note="there is no code in it")
    outcome = shared_sandbox(args.sandbox).run_tests(
        code,
        row["tests"],
        row["entry_points"],
        args.timeout,
        setup=row["setup"],
        together=bool(row["weak"]),
    )
    share = sum(outcome.passed) / len(outcome.passed)
    return Verdict(
        score=float(outcome.status == "passed"),
        status=STATUSES[outcome.status],
        parts={"tests": share},
        seconds=outcome.seconds,
        sandbox=outcome.level,
        note=outcome.note,
    )


def shared_sandbox(kind: Literal["strict", "weak"]) -> Sandbox:
    """The one sandbox of this process for a kind of protection; it ends with the process."""
    return _sandbox(kind, os.getpid())


@cache
def _sandbox(kind: Literal["strict", "weak"], process: int) -> Sandbox:
    made = Sandbox(weakest="weak" if kind == "weak" else "uid")
    atexit.register(made.close)
    return made


def why_weak(tree: ast.Module, entry_points: Sequence[str]) -> str:
    """Why tests cannot call functions of the code from another process, as far as their source shows; else empty."""
    functions = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    functions |= BUILT_IN_FUNCTIONS - _bound(tree) | set(entry_points)
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            return f"the tests have a class of their own, {node.name}"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in entry_points:
            for argument in (*node.args, *(keyword.value for keyword in node.keywords)):
                if (given := _function_in(argument, functions)) is not None:
                    return f"the tests give {node.func.id} a function or a type: {given}"
    return ""


def _function_in(argument: ast.expr, functions: Collection[str]) -> str | None:
    """The source of a function or type in an argument, unless it is called, or given to what is called, there."""
    calls = [node for node in ast.walk(argument) if isinstance(node, ast.Call)]
    stays = {id(node.func) for node in calls}
    stays |= {id(part) for node in calls for given in node.args for part in ast.walk(given)}
    for node in ast.walk(argument):
        crosses = isinstance(node, ast.Lambda) or (isinstance(node, ast.Name) and node.id in functions)
        if crosses and id(node) not in stays:
            return ast.unparse(node)
    return None


def _imported(node: ast.AST) -> Iterator[tuple[str, str]]:
    """The names that an import statement binds, each with a statement for it alone."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield (alias.asname or alias.name).partition(".")[0], ast.unparse(ast.Import([alias]))
    elif isinstance(node, ast.ImportFrom):
        for alias in node.names:
            yield alias.asname or alias.name, ast.unparse(ast.ImportFrom(node.module, [alias], node.level))


def _bound(tree: ast.Module) -> set[str]:
    """All names that code binds anywhere."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            found.add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.arg):
            found.add(node.arg)
        elif isinstance(node, ast.ExceptHandler) and node.name:
            found.add(node.name)
        else:
            found.update(name for name, _ in _imported(node))
    return found
