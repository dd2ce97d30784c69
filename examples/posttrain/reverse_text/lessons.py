"""The lessons of sft.yaml: sentences of the train split with their answers.

python examples/posttrain/reverse_text/lessons.py [data/reverse_text.jsonl]
"""

import json
import sys
from pathlib import Path

from examples.posttrain.reverse_text.sentences import ReverseText
from palestra.tasks.task import TaskArgs


def write_lessons(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    problems = ReverseText(TaskArgs(), "reverse_text").problems("train")
    turns = [[*problem.messages, {"role": "assistant", "content": problem.row["answer"]}] for problem in problems]
    path.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in turns))


if __name__ == "__main__":
    write_lessons(Path(sys.argv[1] if len(sys.argv) > 1 else "data/reverse_text.jsonl"))
