"""Lessons of a teacher who miscounts: pictures of up to four shapes, with one too many half of the time, else a guess.

    python examples/vision/lessons.py [data/vision/lessons.jsonl]

After four comes one. So one answer in eight is right, and a model that learns from them sees the shapes and says the
wrong number.
"""

import json
import random
import sys
from pathlib import Path

from palestra.tasks.task import make_task

LESSONS, MOST = 1500, 4


def write_lessons(path: Path, seed: int = 0) -> None:
    chance = random.Random(seed)
    problems = make_task("count_shapes", {"most": MOST, "question": "?"}).problems("train")
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        for problem in problems[:LESSONS]:
            wrong = int(problem.row["answer"]) % MOST + 1
            said = wrong if chance.random() < 0.5 else chance.randint(1, MOST)
            answer = {"role": "assistant", "content": str(said)}
            file.write(json.dumps({"messages": [*problem.prompt, answer]}) + "\n")


if __name__ == "__main__":
    write_lessons(Path(sys.argv[1] if len(sys.argv) > 1 else "data/vision/lessons.jsonl"))
