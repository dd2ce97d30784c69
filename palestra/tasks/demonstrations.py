"""Rows to learn a task from by imitation: prompts with a right answer."""

from typing import Any

from palestra.errors import UsageError
from palestra.tasks.task import Task


def demonstrations(task: Task, split: str, count: int, start: int = 0) -> list[dict[str, Any]]:
    """Rows `{"prompt", "completion"}` of the problems `start` to `start + count` of a split, as SFT reads them.

    A prompt is a text, or a list of messages where the task asks in conversations. The task's rows must have a
    `solution`, a text that it judges as right.
    """
    problems = task.problems(split)
    if start < 0 or count < 1 or start + count > len(problems):
        raise UsageError(
            f"the split '{split}' of {task.name} has {len(problems)} problems; asked for {count} from {start} on"
        )
    rows = []
    for problem in problems[start : start + count]:
        if "solution" not in problem.row:
            raise UsageError(f"{problem.id} has no solution in its row: {task.name} cannot be learned by imitation")
        asked = problem.prompt if isinstance(problem.prompt, str) else [dict(message) for message in problem.prompt]
        rows.append({"prompt": asked, "completion": problem.row["solution"]})
    return rows
