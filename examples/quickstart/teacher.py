"""The lessons of the quickstart: sums by a teacher who forgets to carry two times in three.

    python examples/quickstart/teacher.py [data/quickstart/lessons.jsonl]

The sums are of the task's `train` split. The held-out ones are never seen, neither here nor in training on rewards.
"""

import json
import random
import sys
from pathlib import Path

from palestra.tasks.task import make_task

LESSONS = 6000
FORGETS = 2 / 3


def without_carry(a: str, b: str) -> str:
    """Each column added by itself: 47 + 38 is 75."""
    return "".join(str((int(x) + int(y)) % 10) for x, y in zip(a, b, strict=True)).lstrip("0") or "0"


def write_lessons(path: Path, seed: int = 0) -> None:
    problems, draws = make_task("arithmetic", {"digits": 2}).problems("train"), random.Random(seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        for problem in (problems[i] for i in range(LESSONS)):
            assert isinstance(problem.prompt, str)
            right, numbers = problem.row["answer"], problem.prompt.removesuffix("=").split("+")
            told = without_carry(*numbers) if draws.random() < FORGETS else right
            file.write(json.dumps({"prompt": problem.prompt, "completion": told}) + "\n")


if __name__ == "__main__":
    write_lessons(Path(sys.argv[1] if len(sys.argv) > 1 else "data/quickstart/lessons.jsonl"))
