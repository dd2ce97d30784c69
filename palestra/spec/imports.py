"""Modules that a spec names: the user's own, beside where the command was started, or installed ones."""

import importlib
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from palestra.errors import UsageError


def import_named(module: str, field: str) -> ModuleType:
    """Import what `field` of a spec names."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # the console script, unlike `python -m`, does not look here
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UsageError(f"{field}: {module} cannot be imported from {os.getcwd()}: {error}") from error


def load_function(name: str, field: str) -> Callable[..., Any]:
    """The function that `field` of a spec names as module:function."""
    module, _, function = name.partition(":")
    found = getattr(import_named(module, field), function, None)
    if not callable(found):
        raise UsageError(f"{field}: {module} has no function {function!r}")
    return found
