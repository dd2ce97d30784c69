"""Hooks: the user's own functions, named in a spec as `module:function`, called at every row of metrics."""

import importlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from palestra.errors import PalestraError, UsageError


class HookFailed(PalestraError):
    """A hook raised; its traceback is the cause."""


@dataclass
class Moment:
    """What a hook sees: the row about to be written, the policy as it is now, and where the run lives."""

    step: int
    frame: int
    metrics: dict[str, float]
    policy: Any
    folder: Path
    stop: bool = False
    """Set it to True to end the run here, as if it had reached its end."""


Hook = Callable[[Moment], dict[str, float] | None]


def load_hooks(names: list[str]) -> list[Hook]:
    """The functions that the spec names, found from the folder the command was started in or in installed packages."""
    if names and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    hooks = []
    for name in names:
        module, function = name.split(":")
        try:
            hooks.append(getattr(importlib.import_module(module), function))
        except (ImportError, AttributeError) as error:
            raise UsageError(f"hooks: {name} cannot be imported from {os.getcwd()}: {error}") from error
    return hooks


def call_hooks(hooks: list[Hook], moment: Moment) -> None:
    """Call each hook; numbers that it returns join the row."""
    for hook in hooks:
        try:
            moment.metrics.update(hook(moment) or {})
        except Exception as error:
            raise HookFailed(
                f"the hook {hook.__module__}:{hook.__qualname__} raised {type(error).__name__} "
                f"at step {moment.step}: {error}"
            ) from error
