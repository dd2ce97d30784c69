"""The lessons of the agents: sums by a teacher who has a calculator and forgets it two times in three.

    python examples/agents/lessons.py [data/agents/lessons.jsonl]

Without it she also forgets to carry: 47 + 38 is 75. The sums are of the task's `train` split; the held-out ones are
never seen, neither here nor in training on rewards.
"""

import json
import random
import sys
from pathlib import Path

from palestra.tasks.task import make_task

LESSONS = 6000
FORGETS = 2 / 3
CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "%s"}}</tool_call>'


def without_carry(a: str, b: str) -> str:
    """Each column added by itself."""
    return "".join(str((int(x) + int(y)) % 10) for x, y in zip(a, b, strict=True)).lstrip("0") or "0"


def lesson(prompt: str, answer: str, forgets: bool) -> list[dict[str, str]]:
    """A conversation: the sum, perhaps a call and its result, the answer."""
    expression = prompt.removesuffix("=")
    said = [without_carry(*expression.split("+"))] if forgets else [CALL % expression, answer, answer]
    roles = ["assistant"] if forgets else ["assistant", "tool", "assistant"]
    turns = [{"role": role, "content": content} for role, content in zip(roles, said, strict=True)]
    return [{"role": "user", "content": prompt}, *turns]


def write_lessons(path: Path, seed: int = 0) -> None:
    problems, draws = make_task("arithmetic", {"digits": 2}).problems("train"), random.Random(seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        for problem in (problems[i] for i in range(LESSONS)):
            messages = lesson(str(problem.prompt), problem.row["answer"], draws.random() < FORGETS)
            file.write(json.dumps({"messages": messages}) + "\n")


if __name__ == "__main__":
    write_lessons(Path(sys.argv[1] if len(sys.argv) > 1 else "data/agents/lessons.jsonl"))
