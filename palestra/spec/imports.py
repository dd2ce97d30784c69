"""What a spec names: modules beside where the command was started or installed, and objects given from Python."""

import importlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from palestra.errors import UsageError

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


def load_named(name: str, field: str, what: str) -> Any:
    """The function or class (`what`) that `field` of a spec names as module:name or object:name."""
    module, _, attribute = name.partition(":")
    if not name.startswith(OBJECT):
        found = getattr(import_named(module, field), attribute, None)
        if not callable(found):
            raise UsageError(f"{field}: {module} has no {what} {attribute!r}")
        return found
    if name not in _objects:
        raise UsageError(
            f"{field}: this run was given the Python object {attribute}: resume it from Python with that object, "
            f"palestra.run(resume=…, {ARGUMENTS.get(field, field.replace('.', '__'))}=…)"
        )
    return _objects[name]


def load_function(name: str, field: str) -> Callable[..., Any]:
    """The function that `field` of a spec names as module:function."""
    return load_named(name, field, "function")
