"""Palestra: train policies, from CartPole to language models, against rewards that can be checked."""

import os
from typing import TYPE_CHECKING, Any

# Read by OpenMP when torch is imported: threads that wait sleep instead of spinning. Where a core is busy with
# something else, spinning made training with two threads 15 times slower (docs/log.md).
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

if TYPE_CHECKING:
    from palestra.api import check, enjoy, load, run
    from palestra.runs.run import Run, list_runs, open_run

__version__ = "0.1.0"

_LAZY = {
    "run": "palestra.api",
    "load": "palestra.api",
    "check": "palestra.api",
    "enjoy": "palestra.api",
    "Run": "palestra.runs.run",
    "open_run": "palestra.runs.run",
    "list_runs": "palestra.runs.run",
}
__all__ = ["Run", "check", "enjoy", "list_runs", "load", "open_run", "run"]


def __getattr__(name: str) -> Any:
    """Import on use: `import palestra` itself costs nothing."""
    if name not in _LAZY:
        raise AttributeError(f"module 'palestra' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_LAZY[name]), name)
