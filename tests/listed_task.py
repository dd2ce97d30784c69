"""A task with a few numbered problems, and prompts drawn from such tasks."""

from collections.abc import Sequence
from typing import Any

from palestra.spec.tasks import TasksSpec
from palestra.tasks.stream import Prompts
from palestra.tasks.task import Completion, Problem, Status, Task, TaskArgs, Verdict


class ListedArgs(TaskArgs):
    size: int = 10


class Listed(Task[ListedArgs]):
    Args = ListedArgs

    def problems(self, split: str) -> Sequence[Problem]:
        return [Problem(self.id(split, row), f"{row}?", {"answer": str(row)}) for row in range(self.args.size)]

    def verify(self, problem: Problem, answer: Completion) -> Verdict:
        right = answer.text == problem.row["answer"]
        return Verdict(float(right), Status.CORRECT if right else Status.WRONG)


def prompts(uses: Sequence[dict[str, Any]], seed: int = 0, **more: Any) -> Prompts:
    """Prompts of listed tasks: each use has a `name`, a `size` and what a spec may say of it."""
    sizes = {use["name"]: use.get("size", 10) for use in uses}
    train = [{"task": "listed", **{key: value for key, value in use.items() if key != "size"}} for use in uses]
    spec = TasksSpec.model_validate({"train": train, **more})
    return Prompts(spec, {name: Listed(ListedArgs(size=size), name) for name, size in sizes.items()}, seed)


def draw(stream: Prompts, numbers: range) -> list[str]:
    """The ids of prompts, without the split."""
    return [stream.sample(number).id.replace("/train/", "") for number in numbers]
