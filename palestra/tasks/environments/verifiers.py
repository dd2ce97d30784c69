"""Tasksets of the package verifiers: their environment plays, in an interpreter of its own, and the gateway samples.

The package pins many others, so it is installed elsewhere: `python` names its interpreter. This file lists the tasks,
`palestra.rollout.agents.taskset` plays them, and `taskset_player.py` is the part of both that runs over there.
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import Field

from palestra.errors import UsageError
from palestra.tasks.task import Completion, Problem, Task, TaskArgs, Verdict

PLAYER = Path(__file__).with_name("taskset_player.py")
LIST_SECONDS = 600
WORKFLOW = '{name: agent, function: "palestra.rollout.agents.taskset:play", reward: program}'


class VerifiersArgs(TaskArgs):
    """Args of a taskset of verifiers."""

    taskset: str = Field(min_length=1)
    """Its id, the name of an installed package: `verifiers:gsm8k-v1` says it already."""
    python: str = sys.executable
    """The interpreter in which verifiers and the taskset are installed."""
    config: dict[str, Any] = Field(default={})
    """The block [env] of verifiers, such as {taskset: {num_tasks: 9}, agent: {harness: {id: "null"}}}."""
    size: int = Field(default=1000, ge=1)
    """The first so many tasks are taken; every tenth is of the split `test`."""


class Verifiers(Task[VerifiersArgs]):
    """A taskset of verifiers, as `verifiers:<id>`; the rewards are its own."""

    Args = VerifiersArgs
    workflow, named = "agent", "taskset"

    def problems(self, split: str) -> Sequence[Problem]:
        self.check_split(split)
        args = self.args
        block = {**args.config, "taskset": {**args.config.get("taskset", {}), "id": args.taskset}}
        command = args.python, "-P", str(PLAYER), json.dumps(block), str(args.size)
        held_out = split == "test"
        return [
            Problem(self.id(split, number), prompt, {"metadata": {"command": command, "number": number}})
            for number, prompt in enumerate(_prompts(command))
            if (number % 10 == 9) == held_out
        ]

    def verify(self, problem: Problem, completion: Completion) -> Verdict:
        raise UsageError(f"{self.name} is scored by its own rewards: expected rollout.workflow = {WORKFLOW}")


@cache
def _prompts(command: tuple[str, ...]) -> list[str]:
    """The prompts of the tasks, as text."""
    try:
        done = subprocess.run([*command, "list"], capture_output=True, text=True, timeout=LIST_SECONDS)
    except OSError as error:
        raise UsageError(f"verifiers: cannot start {command[0]}: {error.strerror or error}") from error
    if done.returncode != 0:
        why = done.stderr.strip().rpartition("\n")[2]
        raise UsageError(f"verifiers: the tasks cannot be listed by {command[0]}: {why}")
    return json.loads(done.stdout.strip().rpartition("\n")[2])
