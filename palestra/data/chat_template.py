"""The sandbox in which chat templates run, with what transformers gives them."""

import json
from datetime import datetime
from functools import lru_cache
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


@lru_cache(maxsize=32)
def compile_template(template: str) -> jinja2.Template:
    """The template in the environment that transformers gives it: sandboxed, unable to change what it is given."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
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
    # Jinja's own filter writes < as \u003c, for HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _now(form: str) -> str:
    return datetime.now().strftime(form)


def _raise(message: str) -> str:
    raise jinja2.TemplateError(message)
