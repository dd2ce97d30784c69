"""Functions a spec names: modules beside the command or installed, objects given from Python, checked arguments."""

import importlib
import inspect
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any, get_type_hints

from pydantic import PydanticSchemaGenerationError, TypeAdapter, ValidationError

from palestra.errors import UsageError, did_you_mean
from palestra.spec.model import Conflict
from palestra.spec.words import words

OBJECT = "object:"  # begins the name of what `palestra.run` was given as a Python object
ARGUMENTS = {"reward.function": "reward", "task": "tasks__train"}  # of `palestra.run`, where not the field itself

_objects: dict[str, Any] = {}


@contextmanager
def known_objects(objects: Mapping[str, Any]) -> Iterator[None]:
    """Let names mean these objects within the block, in this process."""
    before = dict(_objects)
    _objects.update(objects)
    try:
        yield
    finally:
        _objects.clear()
        _objects.update(before)


def objects_in(text: str) -> dict[str, Any]:
    """The objects that a JSON text names."""
    return {name: value for name, value in _objects.items() if f'"{name}"' in text}


def import_named(module: str, field: str) -> ModuleType:
    """Import what `field` of a spec names."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # the console script, unlike `python -m`, does not look here
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UsageError(f"{field}: {module} cannot be imported from {os.getcwd()}: {error}") from error


def load_named(name: str, field: str, what: str = "function") -> Any:
    """The function or class (`what`) that `field` of a spec names as module:name or object:name."""
    module, _, attribute = name.partition(":")
    if not name.startswith(OBJECT):
        named = getattr(import_named(module, field), attribute, None)
        if not callable(named):
            raise UsageError(f"{field}: {module} has no {what} {attribute!r}")
        return named
    if name not in _objects:
        raise UsageError(
            f"{field}: this run was given the Python object {attribute}: resume it from Python with that object, "
            f"palestra.run(resume=…, {ARGUMENTS.get(field, field.replace('.', '__'))}=…)"
        )
    return _objects[name]


def argument_problems(function: Callable[..., Any], given: Mapping[str, Any]) -> list[Conflict]:
    """Arguments that a function does not take, does not get, or gets as something else than it is annotated with."""
    parameters, hints, open_ended = _parameters(function)
    conflicts = []
    for name, value in given.items():
        if name in parameters:
            conflicts += _type_problem(name, hints.get(name, Any), value)
        elif not open_ended:
            hint = did_you_mean(name, parameters, f"It takes: {', '.join(parameters) or 'nothing'}")
            conflicts.append(Conflict((name,), f"unknown argument of {function.__name__}. {hint}"))
    for name, parameter in parameters.items():
        if name not in given and parameter.default is inspect.Parameter.empty:
            conflicts.append(Conflict((), f"missing '{name}'; expected {words(hints.get(name, Any))}"))
    return conflicts


def typed_arguments(function: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments as the function's annotations have them: paths, tuples, dataclasses."""
    _, hints, _ = _parameters(function)
    return {name: _typed(hints.get(name, Any), value) for name, value in given.items()}


def _parameters(function: Callable[..., Any]) -> tuple[dict[str, inspect.Parameter], dict[str, Any], bool]:
    """The parameters besides `out` by name, their types, and whether any other name is taken too."""
    plain = inspect.unwrap(function)
    listed = [p for p in inspect.signature(plain).parameters.values() if p.name != "out"]
    taken = {p.name: p for p in listed if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}
    return taken, get_type_hints(plain), any(p.kind is p.VAR_KEYWORD for p in listed)


def _type_problem(name: str, hint: Any, value: Any) -> Iterator[Conflict]:
    try:
        _typed(hint, value)
    except ValidationError as error:
        for problem in error.errors():
            if not problem["loc"] or len(error.errors()) > 3:  # one line says it
                yield Conflict((name,), f"expected {words(hint)}, got {value!r:.60}")
                return
            yield Conflict((name, *problem["loc"]), problem["msg"][0].lower() + problem["msg"][1:])


def _typed(hint: Any, value: Any) -> Any:
    try:
        adapter = TypeAdapter(hint)
    except PydanticSchemaGenerationError:  # a type of its own: the function itself says what it takes
        return value
    # As JSON a list may become a tuple and text a path, but never text a number.
    return adapter.validate_json(json.dumps(value), strict=True)
