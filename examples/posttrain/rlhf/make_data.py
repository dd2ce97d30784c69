"""Writes what this example learns from: answers with good and with bad manners, and which of two people prefer.

python examples/posttrain/rlhf/make_data.py [FOLDER]   # data/rlhf by default
"""

import json
import random
import sys
from collections.abc import Iterable
from pathlib import Path

from manners import POLITE, RUDE, questions

PAIRS = 3000


def main(folder: Path, seed: int = 0) -> None:
    """Lessons and preferences; none is about a question that is held out."""
    draw, asked = random.Random(seed), questions("train")
    lessons = [{"prompt": one.text, "completion": f"{one.answer} {draw.choice(POLITE + RUDE + RUDE)}"} for one in asked]
    pairs = [
        {"prompt": text, "chosen": f"{answer} {draw.choice(POLITE)}", "rejected": f"{answer} {draw.choice(RUDE)}"}
        for text, answer in draw.sample(asked, PAIRS)
    ]
    folder.mkdir(parents=True, exist_ok=True)
    write(folder / "lessons.jsonl", lessons)
    write(folder / "preferences.jsonl", pairs)


def write(path: Path, rows: Iterable[dict[str, str]]) -> None:
    """One row a line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "data/rlhf"))
