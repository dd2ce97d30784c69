"""Sentences to write backwards, letter by letter; the reward is how much of the completion is right."""

import random
from collections.abc import Sequence
from difflib import SequenceMatcher

from palestra.tasks.task import Completion, Problem, Status, Task, TaskArgs, Verdict

REQUEST = "Reverse the text character by character. Answer with the reversed text alone.\n\n"
WORDS = """\
old small red heavy empty golden broken strange wooden silent narrow bright cold famous round wet
green sharp lonely clever dusty proud warm yellow

farmers teachers sailors doctors painters bakers soldiers singers writers hunters drivers millers tailors
students widows kings cousins monks nurses pilots judges thieves dancers giants

found sold carried painted lost broke watched bought cleaned hid moved opened repaired burned counted forgot
borrowed wanted dropped shared guarded stole followed admired

two three four five six seven eight nine ten twelve twenty thirty forty fifty sixty ninety

boats tables letters windows horses bridges lamps gardens coats baskets clocks ladders mirrors wagons drums
stoves candles pictures chairs ropes buckets hammers pillows violins

near behind under beside above inside beyond around

rivers churches markets trees stations hills castles forests harbors villages kitchens islands mountains
schools palaces deserts caves farms towers lakes prisons temples meadows valleys"""
WHICH, WHO, DID, MANY, WHAT, WHERE, PLACES = (words.split() for words in WORDS.split("\n\n"))
SIZES = {"train": 4000, "test": 200}


def sentence(split: str, number: int) -> str:
    """A sentence of a split, from its number alone. No word is in all of them: none earns a reward by itself."""
    pick = random.Random(f"{split}/{number}").choice
    which, *others = (pick(words) for words in (WHICH, WHO, DID, MANY, WHICH, WHAT, WHERE, WHICH, PLACES))
    return " ".join((which.capitalize(), *others)) + "."


class ReverseText(Task[TaskArgs]):
    """4,000 sentences to train on, and 200 others."""

    def problems(self, split: str) -> Sequence[Problem]:
        """The sentences of a split as conversations."""
        texts = [sentence(split, number) for number in range(SIZES[split])]
        return [
            Problem(self.id(split, number), ({"role": "user", "content": REQUEST + text},), {"answer": text[::-1]})
            for number, text in enumerate(texts)
        ]

    def verify(self, problem: Problem, completion: Completion) -> Verdict:
        """The share of characters that completion and answer have in common, in order, as prime-rl's task does."""
        text, answer = completion.text.strip(), problem.row["answer"]
        share = SequenceMatcher(None, text, answer, autojunk=False).ratio()
        return Verdict(share, Status.CORRECT if text == answer else Status.WRONG, note=text)
