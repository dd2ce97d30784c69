"""The storyteller's own steps: books to passages (or stories of a small grammar instead), and lessons in sums."""

import json
import os
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from palestra.pipeline import Execution, Step, step

BOOKS = "gutenberg"
PASSAGE = 500  # characters, about

WHO = ("the old king", "a young sailor", "the miller's daughter", "a grey wolf", "the lighthouse keeper", "my aunt")
WHERE = ("in the deep forest", "by the cold sea", "under the hill", "at the edge of the town", "on the long road")
WANTED = ("a silver key", "the lost letter", "a warm fire", "the way home", "a ship without sails", "an honest friend")
DID = ("looked for", "dreamed of", "asked everyone about", "wrote a song about", "set out to find", "found")
SAID = ("Who goes there?", "I have seen it before.", "Nobody comes here in winter.", "Take it and be gone.", "Wait!")
THEN = (
    "It was late when {who} came back, and nobody had waited.",
    '"{said}" said {who}, and the door was shut again.',
    "For seven days and seven nights {who} {did} {wanted} {where}.",
    "In the morning there was snow {where}, and {who} {did} {wanted} once more.",
    "So it was that {who} gave {wanted} away, and was glad of it.",
    "Some say that {who} is still {where}; others have heard a voice that says: {said}",
)


def books(*, stories: int = 6000) -> Step:
    """Books from the folder `gutenberg` of PALESTRA_DATA where there is one, else made-up stories in their place."""
    folder = Path(os.environ.get("PALESTRA_DATA", "../shared/data")) / BOOKS
    files = sorted(folder.glob("*.txt"))
    if not files:
        return made_up(stories=stories)
    # The address counts what is read, not where it lies.
    return passages(files={path.name: path.stat().st_size for path in files}, folder=folder.absolute())


@step
def passages(out: Path, *, files: dict[str, int], folder: Execution[Path]) -> None:
    """Every book as passages of some paragraphs, one shard a book; licences and headings come along."""
    for number, name in enumerate(files):
        text = (folder / name).read_text(encoding="utf-8-sig")
        _write(out / "docs" / f"docs-{number:05}.jsonl", Path(name).stem, _passages(text))


@step
def made_up(out: Path, *, stories: int, seed: int = 0, again: float = 0.1) -> None:
    """Stories of a small grammar; some come twice and some are only a heading, as on the web."""
    draws, told = random.Random(seed), []
    for number in range(stories):
        if told and draws.random() < again:
            told.append(draws.choice(told))
        else:
            told.append(f"CHAPTER {number}" if number % 50 == 0 else story(draws))
    _write(out / "docs" / "docs-00000.jsonl", "story", iter(told))


def lessons(out: Path, *, count: int = 6000, forgets: float = 2 / 3, seed: int = 0) -> None:
    """Sums of two digits by a teacher who mostly forgets to carry; none of those that are held out."""
    from palestra.tasks.task import make_task

    problems, draws = make_task("arithmetic", {"digits": 2}).problems("train"), random.Random(seed)
    with (out / "lessons.jsonl").open("w") as file:
        for problem in (problems[i] for i in range(count)):
            assert isinstance(problem.prompt, str)
            numbers = problem.prompt.removesuffix("=").split("+")
            told = _without_carry(*numbers) if draws.random() < forgets else problem.row["answer"]
            file.write(json.dumps({"prompt": problem.prompt, "completion": told}) + "\n")


def _passages(text: str) -> Iterator[str]:
    passage = ""
    for paragraph in re.split(r"\n\s*\n", text.replace("\r\n", "\n")):
        passage = f"{passage}\n\n{' '.join(paragraph.split())}".strip()
        if len(passage) >= PASSAGE:
            yield passage
            passage = ""
    if passage:
        yield passage


def story(draws: random.Random) -> str:
    """One story."""

    def filled(sentence: str) -> str:
        words: dict[str, Any] = {"who": WHO, "where": WHERE, "wanted": WANTED, "did": DID, "said": SAID}
        text = sentence.format(**{name: draws.choice(options) for name, options in words.items()})
        return text[0].upper() + text[1:]

    first = f"Once there lived {draws.choice(WHO)} {draws.choice(WHERE)}."
    return " ".join([first, *(filled(draws.choice(THEN)) for _ in range(draws.randint(5, 9)))])


def _without_carry(a: str, b: str) -> str:
    """Each column added by itself: 47 + 38 is 75."""
    return "".join(str((int(x) + int(y)) % 10) for x, y in zip(a, b, strict=True)).lstrip("0") or "0"


def _write(path: Path, name: str, texts: Iterator[str]) -> None:
    path.parent.mkdir(exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for number, text in enumerate(texts):
            file.write(json.dumps({"id": f"{name}:{number}", "text": text}, ensure_ascii=False) + "\n")
