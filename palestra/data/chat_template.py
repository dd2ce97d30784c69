"""The sandbox in which chat templates run, with what transformers gives them."""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextvars import ContextVar
from datetime import datetime
from functools import lru_cache, wraps
from operator import mod
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError
from jinja2.utils import Namespace

GENERATION_MARKS = "_generation_marks"
"""The variable with the two strings that a render puts around each `{% generation %}` block."""


LONGEST = 2**23
"""Characters of a string or members of a list, far beyond any context; what makes a longer one is refused."""
STEPS = 500_000
"""Calls, turns of loops and pieces of text that one rendering may take; a long value counts as several."""
_steps_left = ContextVar("steps_left", default=STEPS)


class _Generation(Extension):
    """`{% generation %}`: what the assistant says, between the marks of the render."""

    tags = {"generation"}  # noqa: RUF012 (jinja's own declaration)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        marks = nodes.Name(GENERATION_MARKS, "load")
        return nodes.CallBlock(self.call_method("_between", [marks]), [], [], body).set_lineno(line)

    def _between(self, marks: tuple[str, str], caller: Macro) -> str:
        return marks[0] + caller() + marks[1]


class _Namespace(Namespace):
    """Jinja's `namespace` without names that begin with an underscore, which Python itself would look up."""

    def __init__(self, *values: Any, **named: Any):
        for name in dict(*values, **named):
            _allow(name)
        super().__init__(*values, **named)

    def __setitem__(self, name: str, value: Any) -> None:
        _allow(name)
        super().__setitem__(name, value)


def _allow(name: str) -> None:
    if name.startswith("_"):
        raise SecurityError(f"the name {name!r} is not allowed in a namespace")


def _spend(size: int) -> None:
    """Count a step, and more for a long value; refuse what grows or goes on without end."""
    _steps_left.set(left := _steps_left.get() - 1 - size // 256)
    if size > LONGEST:
        raise SecurityError(f"it makes a value of {size:.2g} characters or members, of which {LONGEST:,} are allowed")
    if left < 0:
        raise SecurityError(f"it takes more than {STEPS:,} steps")


def _size(value: Any) -> int:
    """How much a value holds; the digits of a number count more, because to multiply them takes longer."""
    if isinstance(value, int):
        return value.bit_length() * 256
    inside = value if isinstance(value, list | tuple) else ()
    return (len(value) if isinstance(value, Sized) else 1) + sum(len(one) for one in inside if isinstance(one, str))


def _charge(function: Any, values: Sequence[Any]) -> None:
    """Count a call by what its values hold, and where these say how wide or long the result is by that."""
    function = getattr(function, "__wrapped__", function)  # the sandbox has a format of its own
    values = [getattr(function, "__self__", None), *values]
    texts = [value for value in values if isinstance(value, str)]
    numbers = [value for value in values if isinstance(value, int)]
    size = sum(_size(value) for value in values if not isinstance(value, int))
    name = getattr(function, "__name__", "").removeprefix("do_")
    if name in ("center", "indent", "ljust", "rjust", "zfill", "slice", "sync_slice", "batch", "expandtabs"):
        size += sum(numbers) * (1 + texts[0].count("\n") + texts[0].count("\t") if texts else 1)
    elif name in ("format", "format_map", "mod") and texts:  # `%9d`, `%*d`, `{:9}`, `{:{}}`
        size += sum(map(int, re.findall(r"\d+", texts[0]))) + sum(numbers) * bool(re.search(r"\*|:\{", texts[0]))
    elif name == "replace" and len(texts) > 2:
        size += texts[0].count(texts[1]) * len(texts[2])
    _spend(size)


def _bounded(function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that counts."""

    @wraps(function)
    def bounded(*values: Any, **named: Any) -> Any:
        _charge(function, [*values, *named.values()])
        result = function(*values, **named)
        _spend(_size(result))
        return result

    return bounded


class _Environment(ImmutableSandboxedEnvironment):
    """A sandbox in which loops, calls and the growth of values come to an end."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in tree.find_all(nodes.For):
            loop.iter = nodes.Call(nodes.EnvironmentAttribute("counted"), [loop.iter], [], None, None)
        for sum_ in list(tree.find_all(nodes.Concat)):
            sum_.nodes = [nodes.Call(nodes.EnvironmentAttribute("concat"), [nodes.List(sum_.nodes)], [], None, None)]
        return tree

    def counted(self, values: Iterable[Any]) -> Iterator[Any]:
        """What a loop goes through, one step a turn."""
        for value in values:
            _spend(0)
            yield value

    def concat(self, pieces: Iterable[Any]) -> str:
        """What a template, a macro or a block writes, or `~` gives."""
        written, size = [], 0
        for piece in map(str, pieces):
            size += len(piece)
            _spend(len(piece) if size <= LONGEST else size)
            written.append(piece)
        return "".join(written)

    def call(self, context: Any, function: Any, /, *values: Any, **named: Any) -> Any:
        """Call a function, method or macro."""
        _charge(function, [*values, *named.values()])
        result = super().call(context, function, *values, **named)
        _spend(_size(result))
        return result

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """What an operator gives, if that is not too long."""
        if operator == "%" and isinstance(left, str):
            _charge(mod, [left, *(right if isinstance(right, tuple) else [right])])
        elif operator == "**" or isinstance(left, Sized):
            _spend(_size(left) * abs(right) if isinstance(right, int) else _size(left) + _size(right))
        else:
            _spend(_size(right) * abs(left) if isinstance(right, Sized) else _size(left) + _size(right))
        return super().call_binop(context, operator, left, right)


def render_template(template: str, values: Mapping[str, Any]) -> str:
    """What a template writes; one that takes too many steps or grows too long raises jinja2's SecurityError."""
    _steps_left.set(STEPS)
    return compile_template(template).render(values)


@lru_cache(maxsize=32)
def compile_template(template: str) -> jinja2.Template:
    """The template in the environment that transformers gives it: sandboxed, unable to change what it is given."""
    environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    environment.filters = {name: _bounded(one) for name, one in environment.filters.items()}
    environment.globals.pop("lipsum")  # words without end
    environment.filters["tojson"] = _to_json
    functions = {"raise_exception": _raise, "strftime_now": _now, "namespace": _Namespace}
    return environment.from_string(template, globals=functions)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    if indent not in (None, *range(101)):
        raise SecurityError(f"tojson(indent={indent}) is wider than 100")
    # Jinja's own filter writes < as \u003c, for HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _now(form: str) -> str:
    return datetime.now().strftime(form)


def _raise(message: str) -> str:
    raise jinja2.TemplateError(message)
