"""How good a model is at a task: greedy accuracy, pass@k, likelihoods, reports.

The package is also the function: `palestra.evaluate(model, tasks=[…])` is `palestra.api.evaluate`.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import Any


class _Evaluate(ModuleType):
    """One name for both: importing a module of the package binds `palestra.evaluate` to it, over any function."""

    def __call__(self, *args: Any, **settings: Any) -> Any:
        return import_module("palestra.api").evaluate(*args, **settings)  # by name: this layer is below the API


sys.modules[__name__].__class__ = _Evaluate
