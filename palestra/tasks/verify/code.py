"""The code in what a model wrote: in Markdown fences, between [BEGIN] and [DONE], or plain."""

import ast
import re
import textwrap
import warnings
from collections.abc import Collection, Iterator

BEGIN, DONE = "[BEGIN]", "[DONE]"
LANGUAGES = ("", "python", "python3", "py")
FENCE = re.compile(r"^[ \t]*(`{3,}|~{3,})[ \t]*([^\s`]*)[^\n]*$", re.MULTILINE)
STATEMENT = re.compile(r"^(?:(?:(?:async[ \t]+)?def|class|import|from)[ \t]|@\w)", re.MULTILINE)
MOST_TRIES = 20  # blocks that are looked at, the last ones; lines where code may begin; cuts where it may end
MOST_CHARACTERS = 50_000  # of code: longer code is not an answer, and slow to parse


def extract_code(text: str, entry_points: Collection[str] = ()) -> str | None:
    """The Python code in a text, best with the entry points in it; None where there is none.

    Of several fenced blocks the last that defines the entry points counts, else the last that defines anything.
    Code that parses is not truncated: helpers may follow the function that they help. What does not parse counts
    up to the line where it stops being code.
    """
    before, mark, after = text.partition(BEGIN)
    text = (after if mark else before).partition(DONE)[0]
    blocks = [code for block in fenced(text) if (code := _longest(textwrap.dedent(block))) is not None]
    blocks = blocks or list(_plain(_before_fence(text)))
    for wanted in (entry_points, ()):
        if whole := [block for block in blocks if defines(block, wanted)]:
            return whole[-1]
    return None


def complete_code(prompt: str, text: str, entry_point: str) -> str | None:
    """The program that a prompt, the beginning of a function, and what a model wrote after it make together.

    The text may be the rest of the function, the function again, or either in a fence.
    """
    for block in reversed(fenced(text)):
        function = textwrap.dedent(block)
        if parse(function) is not None and defines(function, [entry_point]):
            return f"{prompt}\n{function}"
        if block.strip() and parse(prompt + block) is not None:
            return prompt + block
    code = _longest(prompt + _before_fence(text), least=prompt.count("\n"))
    return code if code is not None and len(code.rstrip()) > len(prompt.rstrip()) else None


def fenced(text: str) -> list[str]:
    """What is in fences that hold Python or do not say what; the last may be open, and its end that of the text."""
    blocks: list[str] = []
    opened: re.Match[str] | None = None
    for mark in FENCE.finditer(text):
        if opened is None:
            opened = mark
        elif mark[1].startswith(opened[1]) and not mark[2]:
            if opened[2].lower() in LANGUAGES:
                blocks.append(text[opened.end() + 1 : mark.start()])
            opened = None
    # Without a language it is the end of code that began without a fence, and not the beginning of some.
    if opened is not None and opened[2] and opened[2].lower() in LANGUAGES:
        blocks.append(text[opened.end() + 1 :])
    return [block for block in blocks[-MOST_TRIES:] if len(block) <= MOST_CHARACTERS]


def parse(code: str) -> ast.Module | None:
    """The syntax tree of code, or None."""
    parsed = _parsed(code)
    return parsed if isinstance(parsed, ast.Module) else None


def syntax_tree(code: str) -> ast.Module:
    """The syntax tree of code; SyntaxError, ValueError, RecursionError or MemoryError where it has none."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # such as of "\\d": the code's own business
        return ast.parse(code)


def defines(code: str, names: Collection[str]) -> bool:
    """Whether code binds all names at its top level, and at least one."""
    tree = parse(code)
    bound = set() if tree is None else top_level_names(tree)
    return bool(bound) and set(names) <= bound


def top_level_names(tree: ast.Module) -> set[str]:
    """The names that a module's own statements bind."""
    names: set[str] = set()
    for statement in tree.body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(statement.name)
        elif isinstance(statement, ast.Import | ast.ImportFrom):
            names.update((alias.asname or alias.name).partition(".")[0] for alias in statement.names)
        else:
            names.update(n.id for n in ast.walk(statement) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))
    return names


def _before_fence(text: str) -> str:
    """What comes before the first fence, which ends code that began without one."""
    mark = FENCE.search(text)
    return text[:MOST_CHARACTERS] if mark is None else text[: min(mark.start(), MOST_CHARACTERS)]


def _plain(text: str) -> Iterator[str]:
    """Code without a fence: the whole text, or what begins at one of its statements."""
    starts = [0, *(match.start() for match in STATEMENT.finditer(text))][:MOST_TRIES]
    # The first that is code comes last, and so counts: what begins later is a part of it.
    for start in reversed(starts):
        if (code := _longest(text[start:])) is not None:
            yield code


def _longest(text: str, least: int = 0) -> str | None:
    """The longest beginning of a text, in lines, that is code; it has more than `least` lines."""
    lines = re.split(r"(?<=\n)", text)
    for _ in range(MOST_TRIES):
        code = "".join(lines)
        parsed = _parsed(code)
        if isinstance(parsed, ast.Module):
            return code if parsed.body else None
        end = min(parsed - 1, len(lines) - 1)
        if end <= least:
            return None
        lines = lines[:end]
    return None


def _parsed(code: str) -> ast.Module | int:
    """The syntax tree of code, or the line where it stops being code; 0 where that is not known."""
    try:
        return syntax_tree(code)
    except SyntaxError as error:
        return error.lineno or 0
    except (ValueError, RecursionError, MemoryError):  # the last two: nested too deeply
        return 0
