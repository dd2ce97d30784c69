"""The reference page of all kinds, made from the types: every key, what it takes, its default and its meaning."""

from collections.abc import Iterator
from typing import Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from palestra.spec.base import NamedSpec
from palestra.spec.kinds import kinds, spec_type
from palestra.spec.model import Model, plain
from palestra.spec.schedule import Schedule
from palestra.spec.source import write_text
from palestra.spec.validate import models
from palestra.spec.words import field_words

_INTRODUCTION = """\
# Spec reference

Generated from the types by `docs/generate.py`; do not edit.

A spec is a YAML or JSON file. `kind` selects what it may hold. A file without `kind` and `extends` at the top holds
several named specs (`file.yaml:name`); keys that begin with `_` hold anchors only.

Any spec may have `extends`: a file relative to this one (`base.yaml`, `base.yaml:name`, or `:name` in the same file),
or a list of them. Mappings merge, everything else replaces, and `name` is not inherited. `${var}` is filled by
`-s var=value`, `${var:default}` need not be, `$${` is a literal `${`. Then come overrides such as `algorithm.lr=3e-4`.
"""

_CADENCES = """\
## Cadences

An amount and a unit: `20 steps`, `1e4 frames`, `30 seconds`, `5 minutes`, `2 hours`. Evaluation and logging go by
steps or frames, because a resumed run must repeat them exactly.
"""


def reference_markdown() -> str:
    """The page, as Markdown."""
    parts = [_INTRODUCTION]
    for kind in sorted(kinds()):
        model = spec_type(kind)
        parts += [f"## kind: {kind}\n", f"{_summary(model)}\n", _table(model)]
        for title, inner in _sections(model, ""):
            parts += [f"### {title}\n", f"{_summary(inner)}\n", _table(inner)]
    parts += ["## Schedules\n", f"{_summary(Schedule)}\n", _table(Schedule), _CADENCES]
    return "\n".join(parts)


def _sections(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, type[BaseModel]]]:
    """The models inside a model with a title each, outer ones first; schedules have a section of their own."""
    for name, field in model.model_fields.items():
        for inner in models(field.annotation):
            if inner is Schedule:
                continue
            yield f"`{prefix}{name}`{_tag(inner)}", inner
            yield from _sections(inner, f"{prefix}{name}.")


def _tag(model: type[BaseModel]) -> str:
    """The key and value that tell a model apart from the others that may stand in its place."""
    for name, field in model.model_fields.items():
        options = get_args(field.annotation)
        if get_origin(field.annotation) is Literal and len(options) == 1 and field.is_required():
            return f" with `{name}: {options[0]}`"
    return ""


def _summary(model: type[BaseModel]) -> str:
    return (model.__doc__ or "").strip()


def _table(model: type[BaseModel]) -> str:
    rows = ["| key | takes | default | meaning |", "| --- | --- | --- | --- |"]
    assert issubclass(model, Model)
    meanings = model.descriptions()
    for name, field in model.model_fields.items():
        inner = next(models(field.annotation), None)
        nested = inner is not None and inner is not Schedule
        takes = field_words(field) + (", see below" if nested else "")
        default = "" if nested and not field.is_required() else _default(field)
        if name == "name" and issubclass(model, NamedSpec):
            default = "the key or the file's stem"
        cells = [f"`{name}`", takes, default, meanings.get(name, "")]
        rows.append("| " + " | ".join(cell.replace("|", r"\|").replace("\n", " ") for cell in cells) + " |")
    return "\n".join(rows) + "\n"


def _default(field: FieldInfo) -> str:
    """The default as a spec would write it, on one line."""
    if field.is_required():
        return "required"
    default = plain(field.get_default(call_default_factory=True))
    return f"`{write_text({'v': default}).removeprefix('v:').strip()}`"
