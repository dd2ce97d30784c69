"""Hooks: the user's own functions, named in a spec as `module:function`, called at every row of metrics."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from palestra.errors import PalestraError
from palestra.spec.imports import load_function


class HookFailed(PalestraError):
    """A hook raised; its traceback is the cause."""


@dataclass
class Moment:
    """What a hook sees: the row about to be written, the policy as it is now, and where the run lives."""

    step: int
    seen: int
    """Frames, or tokens of a language model, so far."""
    metrics: dict[str, float]
    policy: Any
    folder: Path
    stop: bool = False
    """Set it to True to end the run here, as if it had reached its end."""


Hook = Callable[[Moment], dict[str, float] | None]


def load_hooks(names: list[str]) -> dict[str, Hook]:
    """The functions that a spec names, by name."""
    return {name: load_function(name, "hooks") for name in names}


def call_hooks(hooks: dict[str, Hook], moment: Moment) -> None:
    """Call each hook; numbers that it returns join the row."""
    for name, hook in hooks.items():
        try:
            moment.metrics.update(hook(moment) or {})
        except Exception as error:
            raise HookFailed(f"the hook {name} raised {type(error).__name__} at step {moment.step}: {error}") from error
