"""The table of tasks: where each lives, loaded on use."""

from collections.abc import Mapping
from difflib import get_close_matches
from functools import cache
from typing import Any

from palestra.errors import UsageError
from palestra.spec.imports import load_named
from palestra.tasks.task import Task

TASKS: dict[str, str] = {
    "arithmetic": "palestra.tasks.arithmetic:Arithmetic",
    "countdown": "palestra.tasks.countdown:Countdown",
    "reverse": "palestra.tasks.sequences:Reverse",
    "sort": "palestra.tasks.sequences:Sort",
    "copy": "palestra.tasks.sequences:Copy",
    "gsm8k": "palestra.tasks.gsm8k:Gsm8k",
    "math": "palestra.tasks.math:Math",
    "aime": "palestra.tasks.math:Aime",
    "answers": "palestra.tasks.answers:Answers",
    "mbpp": "palestra.tasks.mbpp:Mbpp",
    "humaneval": "palestra.tasks.humaneval:HumanEval",
    "ifeval": "palestra.tasks.ifeval:IfEval",
    "reasoning_gym": "palestra.tasks.reasoning_gym:ReasoningGym",
}
"""Palestra's own tasks. Others come by the entry points `palestra.tasks`, or are named as `module:Class`."""


def task_type(name: str) -> type[Task]:
    """The class of a task: one of the table, an installed one, or `module:Class`."""
    reference = name if ":" in name else (TASKS | _installed()).get(name)
    if reference is None:
        near = get_close_matches(name, TASKS | _installed(), n=1)
        hint = f" Did you mean '{near[0]}'?" if near else ""
        raise UsageError(
            f"unknown task {name!r}.{hint} The tasks are: {', '.join(sorted(TASKS | _installed()))}; "
            "your own is named as 'module:Class'"
        )
    found = load_named(reference, "task", "class")
    if not (isinstance(found, type) and issubclass(found, Task)):
        raise UsageError(f"the task {name!r} is {reference}, which is no subclass of palestra.tasks.task.Task")
    return found


def make_task(task: str, args: Mapping[str, Any] | None = None, name: str | None = None) -> Task:
    """A task with its args, called `name` in this run."""
    found = task_type(task)
    return found(found.Args.model_validate(dict(args or {})), name or task)


@cache
def _installed() -> dict[str, str]:
    from importlib.metadata import entry_points  # here, because our own tasks need not wait for a walk of all packages

    return {point.name: point.value for point in entry_points(group="palestra.tasks")}
