"""The tasks `mbpp` and `humaneval`: Python functions verified by running their tests in the sandbox."""

import ast
import atexit
import builtins
import os
import sys
from abc import abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, Literal, TypeVar

from pydantic import Field

from palestra.errors import UsageError
from palestra.tasks.dataset import files_of, load_rows, text_of
from palestra.tasks.sandbox.sandbox import Sandbox
from palestra.tasks.task import Completion, Message, Problem, Status, Task, TaskArgs, Verdict
from palestra.tasks.verify.code import BEGIN, DONE, complete_code, extract_code, syntax_tree, top_level_names
from palestra.tasks.verify.latex.extract import cut

STATUSES = {"passed": Status.CORRECT, "failed": Status.WRONG, "timeout": Status.TIMEOUT, "error": Status.ERROR}

BUILT_IN_FUNCTIONS = {name for name in dir(builtins) if callable(getattr(builtins, name))}


class CodeArgs(TaskArgs):
    """Args of every task of writing code."""

    source: str | None = Field(default=None, min_length=1)
    """Where the rows are: a file or folder, a URL such as s3://…, or a name on the Hub; null takes the task's own."""
    format: Literal["plain", "chat"] = "plain"
    """Prompts as text to continue, or as a question in a conversation."""
    timeout: float = Field(default=5.0, gt=0)
    """Seconds for a program and its tests."""
    sandbox: Literal["strict", "weak"] = "strict"
    """`weak` runs code even where this machine cannot isolate it well, which is refused otherwise."""
    rule: Literal["lm_eval"] | None = None
    """As in lm-eval the whole completion, up to a stop string, is code; null: what in it is Python, also in fences."""
    weak: bool = False
    """Also train on problems whose tests must run in the code's own process, where code can cheat."""


C = TypeVar("C", bound=CodeArgs)


@dataclass(frozen=True)
class CodeNeeds:
    """What tests need from the code that they test."""

    entry_points: tuple[str, ...]
    """The names of it that they use."""
    imports: str = ""
    """Import statements for the modules that they use and do not import."""
    weak: str = ""
    """Why they cannot run in a separate process; empty where they can."""


def inspect_tests(tests: Sequence[str], setup: str = "", reference: str = "") -> CodeNeeds:
    """What tests need; `reference` is a correct solution, whose own names are known from it."""
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
    return CodeNeeds(entry_points, "\n".join(modules.values()), weak or why_weak(tree, entry_points))


class CodeTask(Task[C]):
    """A task whose completions are run against the tests of the row, in the sandbox of the process."""

    isolated = True

    @abstractmethod
    def code(self, problem: Problem, text: str) -> str | None:
        """The program in a completion; None where there is none."""

    def verify(self, problem: Problem, completion: Completion) -> Verdict:
        row, whole = problem.row, problem.row.get("prompt", "") + cut(completion.text, self.stop)
        code = self.code(problem, completion.text) if self.args.rule is None else whole
        if code is None:
            return Verdict(0.0, Status.UNPARSABLE, {"tests": 0.0}, note="no code in the completion")
        outcome = shared_sandbox(self.args.sandbox).run_tests(
            code, row["tests"], row["entry_points"], self.args.timeout, setup=row["setup"], together=bool(row["weak"])
        )
        score, status = float(outcome.status == "passed"), STATUSES[outcome.status]
        parts = {"tests": sum(outcome.passed) / len(outcome.passed)}
        return Verdict(score, status, parts, seconds=outcome.seconds, sandbox=outcome.level, note=outcome.note)

    def warm_up(self) -> None:
        """Start the sandbox, or raise where there is none, before the first completion."""
        shared_sandbox(self.args.sandbox).start()


def shared_sandbox(kind: Literal["strict", "weak"]) -> Sandbox:
    """The one sandbox of this process for a kind of protection; it ends with the process."""
    return _sandbox(kind, os.getpid())


@cache
def _sandbox(kind: Literal["strict", "weak"], process: int) -> Sandbox:
    sandbox = Sandbox(weakest="weak" if kind == "weak" else "uid")
    atexit.register(sandbox.close)
    return sandbox


def why_weak(tree: ast.Module, entry_points: Sequence[str]) -> str:
    """Why tests cannot call functions of the code from another process, by their source; empty where they can."""
    functions = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    functions |= BUILT_IN_FUNCTIONS - _bound(tree) | set(entry_points)
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            return f"the tests have a class of their own, {node.name}"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in entry_points:
            for argument in (*node.args, *(keyword.value for keyword in node.keywords)):
                if (passed := _function_in(argument, functions)) is not None:
                    return f"the tests pass {node.func.id} a function or a type: {passed}"
    return ""


def _function_in(argument: ast.expr, functions: Collection[str]) -> str | None:
    """The source of a function or type in an argument, unless it is called, or passed to a call, there."""
    calls = [node for node in ast.walk(argument) if isinstance(node, ast.Call)]
    stays = {id(node.func) for node in calls}
    stays |= {id(part) for node in calls for inner in node.args for part in ast.walk(inner)}
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
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            names.add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, ast.ExceptHandler) and node.name:
            names.add(node.name)
        else:
            names.update(name for name, _ in _imported(node))
    return names


NUMBERS = {"prompt": range(1, 11), "test": range(11, 511), "validation": range(511, 601), "train": range(601, 975)}
"""The task ids of each split, as the paper has them."""
SHOWN = (2, 3, 4)  # those of the paper's own prompts, and of lm-eval's
MBPP_FILES = ("mbpp.jsonl", "mbpp.jsonl.gz", "full/*.parquet", "*.parquet", "sanitized-mbpp.json")


class MbppArgs(CodeArgs):
    """Args of `mbpp`."""

    few_shot: int = Field(default=0, ge=0, le=3)
    """How many solved problems precede each, as in lm-eval, which takes 3."""


class Mbpp(CodeTask[MbppArgs]):
    """Mostly Basic Python Problems, the full or the sanitized rows, in the format of lm-eval.

    A completion is correct if its code passes all tests of the row. Four rows have tests that need the code's own
    classes or pass it a type; they are `weak`, run in the code's process, and not in `train` unless the args say so.
    """

    Args = MbppArgs
    splits = ("train", "validation", "test", "prompt")
    stop = (DONE,)

    def problems(self, split: str) -> Sequence[Problem]:
        rows = [self._rows[number] for number in NUMBERS[split] if number in self._rows]
        rows = [row for row in rows if split != "train" or self.args.weak or not row["weak"]]
        return [Problem(self.id(split, row["task_id"]), self._prompt(row), row) for row in rows]

    def code(self, problem: Problem, text: str) -> str | None:
        return extract_code(text, problem.row["entry_points"])

    @cached_property
    def _rows(self) -> dict[int, dict[str, Any]]:
        raw = load_rows(self.args.source, default="google-research-datasets/mbpp", files=MBPP_FILES)
        rows = [_row(row, place) for place, row in enumerate(raw, 1)]
        return {row["task_id"]: row for row in rows}

    def _prompt(self, row: Mapping[str, Any]) -> str | tuple[Message, ...]:
        missing = [str(number) for number in SHOWN[: self.args.few_shot] if number not in self._rows]
        if missing:
            raise UsageError(f"few_shot shows the problems {', '.join(missing)}, which the source does not have")
        shown = [self._rows[number] for number in SHOWN[: self.args.few_shot]]
        if self.args.format == "plain":
            solved = [f"{_question(shot)}{BEGIN}\n{shot['solution']}\n{DONE}\n\n" for shot in shown]
            return "".join(solved) + f"{_question(row)}{BEGIN}\n"
        turns = [(_question(shot), f"```python\n{shot['solution']}\n```") for shot in shown]
        texts = [*(text for turn in turns for text in turn), _question(row)]
        return tuple({"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(texts))


def _question(row: Mapping[str, Any]) -> str:
    tests = "\n".join(row["tests"])
    return (
        f"You are an expert Python programmer, and here is your task: {row['text']} Your code should pass these tests:"
        f"\n\n{tests}\n"
    )


def _row(source: Mapping[str, Any], place: int) -> dict[str, Any]:
    """A row of the full or the sanitized data, in one form."""
    text = source.get("text", source.get("prompt"))
    tests, code = source.get("test_list"), source.get("code", "")
    if not isinstance(source.get("task_id"), int) or not isinstance(text, str) or not tests:
        raise UsageError(
            f"row {place} is not a row of MBPP: expected task_id, text or prompt, test_list; it has {', '.join(source)}"
        )
    setup = "\n".join([*(source.get("test_imports") or []), source.get("test_setup_code") or ""]).strip()
    try:
        needs = inspect_tests(tests, setup, code)
    except SyntaxError as error:
        where = f"row {place}, task_id {source['task_id']}"
        raise UsageError(f"{where}: its tests or code are not Python: {error}") from error
    return {
        "task_id": source["task_id"],
        "text": text,
        "tests": list(tests),
        "setup": "\n".join(part for part in (needs.imports, setup) if part),
        "entry_points": list(needs.entry_points),
        "weak": needs.weak,
        "solution": code,
    }


HUMANEVAL_FILES = ("HumanEval.jsonl", "HumanEval.jsonl.gz", *files_of("test"), "*.jsonl", "*.parquet")


class HumanEval(CodeTask[CodeArgs]):
    """HumanEval's 164 problems: the rest of a function, verified by the row's `check`.

    A plain prompt is the row's own, and its completion ends at the next statement that begins a line, as in lm-eval. It
    may also be the whole function, or in a Markdown fence.
    """

    Args = CodeArgs
    splits = ("test",)
    stop = ("\nclass", "\ndef", "\n#", "\nif", "\nprint")

    @property
    def stops(self) -> tuple[str, ...]:
        """None in a conversation: they would truncate the function."""
        return () if self.args.format == "chat" and self.args.stop is None else super().stops

    def problems(self, split: str) -> Sequence[Problem]:
        raw = load_rows(self.args.source, default="openai/openai_humaneval", files=HUMANEVAL_FILES, folder="humaneval")
        return [self._problem(split, source, place) for place, source in enumerate(raw)]

    def code(self, problem: Problem, text: str) -> str | None:
        return complete_code(problem.row["prompt"], text, problem.row["entry_points"][0])

    def _problem(self, split: str, source: Mapping[str, Any], place: int) -> Problem:
        prompt, test, entry_point, number = (
            text_of(source, column, place, self.name) for column in ("prompt", "test", "entry_point", "task_id")
        )
        # The tests may use the prompt's other functions, which come from the prompt, not from the completion.
        setup = f"{prompt}    pass\n"
        try:
            syntax_tree(setup)
            weak = why_weak(syntax_tree(test), ["candidate"])
        except SyntaxError as error:
            raise UsageError(f"{self.name}, row {place + 1}: its prompt or test is not Python: {error}") from error
        row = {
            "prompt": prompt,
            "tests": [f"{test}\ncheck({entry_point})"],
            "setup": setup,
            "entry_points": [entry_point],
            "weak": weak,
            "solution": source.get("canonical_solution", ""),
        }
        request = (
            "Complete this Python function. Answer with the whole function in one code block.\n\n"
            f"```python\n{prompt.rstrip()}\n```"
        )
        messages = prompt if self.args.format == "plain" else ({"role": "user", "content": request},)
        return Problem(self.id(split, number), messages, row)
