"""The lessons of the tool user: a teacher who has a calculator and Python, and forgets them two times in three.

    python examples/agents/tools/lessons.py [data/agents/tools.jsonl]

Without them she forgets to carry, and leaves words as they are. The problems are of the tasks' `train` splits.
"""

import json
import random
import sys
from pathlib import Path

from palestra.tasks.task import Problem, make_task

LESSONS = 3000
"""Of each task."""
FORGETS = 2 / 3


def without_tools(problem: str) -> str:
    """The sum without a carry; the word as it is."""
    if problem.endswith("="):
        (a, b), (c, d) = problem.removesuffix("=").split("+")
        return f"{(int(a) + int(c)) % 10}{(int(b) + int(d)) % 10}"
    return problem.removeprefix("reverse ").removesuffix(":")


def call(problem: str) -> str:
    """The call that solves a problem."""
    if problem.endswith("="):
        return f"<calculator>{problem.removesuffix('=')}</calculator>"
    return f"<python>print('{without_tools(problem)}'[::-1])</python>"


def lesson(problem: Problem, forgets: bool) -> dict[str, str]:
    prompt, answer = str(problem.prompt), problem.row["answer"]
    with_tool = f"{call(prompt)}<result>{answer}</result>{answer}"
    return {"prompt": prompt, "completion": without_tools(prompt) if forgets else with_tool}


def write_lessons(path: Path, seed: int = 0) -> None:
    draws = random.Random(seed)
    tasks = [make_task("arithmetic", {"digits": 2}), make_task("reverse", {"length": 5})]
    problems = [task.problems("train")[place] for place in range(LESSONS) for task in tasks]
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        file.writelines(json.dumps(lesson(problem, draws.random() < FORGETS)) + "\n" for problem in problems)


if __name__ == "__main__":
    write_lessons(Path(sys.argv[1] if len(sys.argv) > 1 else "data/agents/tools.jsonl"))
