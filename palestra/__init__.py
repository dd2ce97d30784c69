"""Palestra: train policies, from CartPole to language models, against rewards that can be checked."""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

# Read by OpenMP when torch is imported: threads that wait sleep instead of spinning. Where a core is busy with
# something else, spinning made training with two threads 15 times slower (docs/log.md).
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

if TYPE_CHECKING:
    from palestra.api import (
        chat,
        check,
        convert_model,
        enjoy,
        evaluate,
        evaluate_policy,
        export,
        fetch_model,
        load,
        run,
        serve,
    )
    from palestra.runs.run import Run, list_runs, open_run

__version__ = "0.1.0"
__all__ = [
    "Run",
    "chat",
    "check",
    "convert_model",
    "enjoy",
    "evaluate",
    "evaluate_policy",
    "export",
    "fetch_model",
    "list_runs",
    "load",
    "open_run",
    "run",
    "serve",
]
_OF_RUNS = ("Run", "list_runs", "open_run")


def __getattr__(name: str) -> Any:
    """Import on use: `import palestra` itself costs nothing."""
    if name not in __all__:
        raise AttributeError(f"module 'palestra' has no attribute {name!r}")
    if name == "evaluate":  # a package too, which is called like the function
        return import_module("palestra.evaluate")
    return getattr(import_module("palestra.runs.run" if name in _OF_RUNS else "palestra.api"), name)


def __dir__() -> list[str]:
    """The public names, whether or not they are imported yet."""
    return sorted({*__all__, *globals()})
