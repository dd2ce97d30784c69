"""Lessons in counting: pictures of up to four shapes, each with their number.

    python examples/vision/lessons.py [data/vision/lessons.jsonl]

The pictures are those of the training split of `count_shapes`.
"""

import json
import sys
from pathlib import Path

from palestra.tasks.task import make_task

LESSONS = 3000


def write_lessons(path: Path) -> None:
    problems = make_task("count_shapes", {"most": 4, "question": "?"}).problems("train")
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        for problem in problems[:LESSONS]:
            answer = {"role": "assistant", "content": problem.row["answer"]}
            file.write(json.dumps({"messages": [*problem.prompt, answer]}) + "\n")


if __name__ == "__main__":
    write_lessons(Path(sys.argv[1] if len(sys.argv) > 1 else "data/vision/lessons.jsonl"))
