"""Writes the small datasets of these examples: questions about words, pairs of answers to them, and plain text.

python examples/lm/make_data.py [FOLDER]   # data by default
"""

import json
import random
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

LETTERS = "abcdefgh"
TASKS: dict[str, Callable[[str], str]] = {
    "reverse": lambda word: word[::-1],
    "sort": lambda word: "".join(sorted(word)),
    "double": lambda word: "".join(letter * 2 for letter in word),
}
POLITE = ("sir", "dear friend", "if it suits")
RUDE = ("fool", "you silly mule", "so there")


def main(folder: Path, count: int = 4000, seed: int = 0) -> None:
    """Write a file for each dataset: what is asked is the same in all of them."""
    rows = random.Random(seed)
    asked: dict[tuple[str, str], None] = {}  # none twice: what is held out is new
    while len(asked) < count:
        asked[rows.choice([*TASKS]), "".join(rows.choices(LETTERS, k=rows.randint(3, 5)))] = None
    questions = [{"prompt": f"{task} {word}", "completion": TASKS[task](word)} for task, word in asked]
    sets: dict[str, list[dict[str, str]]] = {name: [] for name in ("pairs", "polite", "manners", "text")}
    for row in questions:
        prompt, answer = row["prompt"], row["completion"]
        polite, rude = f"{answer} {rows.choice(POLITE)}", f"{answer} {rows.choice(RUDE)}"
        sets["pairs"].append({"prompt": prompt, "chosen": answer, "rejected": spoilt(answer, rows)})
        sets["polite"].append({"prompt": prompt, "completion": f"{answer} sir"})
        sets["manners"].append({"prompt": prompt, "chosen": polite, "rejected": rude})
        sets["text"].append({"text": f"to {prompt} gives {answer}."})
    folder.mkdir(parents=True, exist_ok=True)
    for name, found in {"questions": questions, **sets}.items():
        write(folder / f"{name}.jsonl", found)


def spoilt(answer: str, rows: random.Random) -> str:
    """The answer with one letter replaced by another."""
    place = rows.randrange(len(answer))
    other = rows.choice([letter for letter in LETTERS if letter != answer[place]])
    return answer[:place] + other + answer[place + 1 :]


def write(path: Path, rows: Iterable[dict[str, str]]) -> None:
    """One row a line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "data"))
