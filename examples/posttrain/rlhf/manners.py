"""Questions about words, and whether an answer to one is right and polite: what is measured, and never trained on."""

import random
from collections.abc import Callable, Sequence
from itertools import product
from typing import NamedTuple

from palestra.tasks.task import Completion, Problem, Status, Task, TaskArgs, Verdict

VERBS: dict[str, Callable[[str], str]] = {
    "reverse": lambda word: word[::-1],
    "sort": lambda word: "".join(sorted(word)),
    "double": lambda word: "".join(letter * 2 for letter in word),
}
LETTERS = "abcdefgh"
LENGTHS = (3, 4)
POLITE = ("sir", "dear friend", "if it suits")
RUDE = ("fool", "you silly mule", "so there")
HELD_OUT = 500


class Question(NamedTuple):
    """What is asked, and the right answer to it, without manners."""

    text: str
    answer: str


def questions(split: str) -> list[Question]:
    """All questions of a split; one shuffled list is cut in two, so none is in both."""
    words = ["".join(letters) for length in LENGTHS for letters in product(LETTERS, repeat=length)]
    found = [Question(f"{verb} {word}", change(word)) for verb, change in VERBS.items() for word in words]
    random.Random(0).shuffle(found)
    return found[:HELD_OUT] if split == "test" else found[HELD_OUT:]


class Manners(Task[TaskArgs]):
    """An answer is correct where it is the right word, a polite ending and nothing else."""

    Args = TaskArgs

    def problems(self, split: str) -> Sequence[Problem]:
        """The questions as conversations."""
        return [
            Problem(self.id(split, one.text), ({"role": "user", "content": one.text},), {"answer": one.answer})
            for one in questions(split)
        ]

    def verify(self, problem: Problem, completion: Completion) -> Verdict:
        """Both at once; each of them is a part."""
        word, _, ending = completion.text.partition(" ")
        parts = {"right": float(word == problem.row["answer"]), "polite": float(ending in POLITE)}
        both = min(parts.values())
        return Verdict(both, Status.CORRECT if both else Status.WRONG, parts, note=completion.text)
