"""Tasks for tests of post-training: prompts of letters, and judges that a random model pleases now and then."""

import asyncio
import os
import random
import time
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import Any

from palestra.rollout.workflows import single_turn
from palestra.tasks.sets.shapes import CountShapes
from palestra.tasks.task import Completion, Problem, Status, Task, TaskArgs, Verdict

ALPHABET = "abcdefghijklmnopqrstuvwxyz"


class LetterArgs(TaskArgs):
    size: int = 40
    """Problems of a split."""
    pause: float = 0.0
    """Judging takes up to so many seconds, each time other ones: what a run gives must not depend on it."""
    score: float | None = None
    """What every answer gets; null judges it."""
    chat: bool = False
    """Prompts as conversations."""


class Letters(Task[LetterArgs]):
    """Right is an answer whose first letter is of the first half of the alphabet."""

    Args = LetterArgs
    stop = (".",)

    def problems(self, split: str) -> Sequence[Problem]:
        shift = 0 if split == "test" else 13
        texts = ["".join(ALPHABET[(i * 7 + j * j + shift) % 26] for j in range(5)) for i in range(self.args.size)]
        prompts: list[Any] = [({"role": "user", "content": text},) if self.args.chat else text for text in texts]
        return [Problem(self.id(split, i), prompt, {"place": i}) for i, prompt in enumerate(prompts)]

    # A judge may also be asynchronous; the type of `Task.verify` speaks of the others.
    def verify(self, problem: Problem, answer: Completion) -> Verdict | Awaitable[Verdict]:  # type: ignore[override]
        verdict = self.verdict(problem, answer.text)
        return _later(verdict, self.args.pause) if self.args.pause else verdict

    def verdict(self, problem: Problem, text: str) -> Verdict:
        if self.args.score is not None:
            return Verdict(self.args.score, Status.CORRECT if self.args.score > 0 else Status.WRONG)
        letter = text[:1].lower()
        if not letter or letter not in ALPHABET:
            return Verdict(0.0, Status.UNPARSABLE)
        right = letter < "n"
        return Verdict(float(right), Status.CORRECT if right else Status.WRONG, {"early": float(letter < "e")})


class Moody(Letters):
    """Gives every verdict there is, by the first character: it fails, and so some groups have fewer answers."""

    def verdict(self, problem: Problem, text: str) -> Verdict:
        letter = text[:1].lower()
        if letter and letter in "aeiou":
            raise ValueError("no vowels")
        if letter and letter in "xyzbcd":
            return Verdict(0.0, Status.TIMEOUT, note="too long")
        return super().verdict(problem, text)


class Halves(Letters):
    """All answers to a prompt have the same reward, which differs from prompt to prompt."""

    def verdict(self, problem: Problem, text: str) -> Verdict:
        score = float(problem.row["place"] % 2)
        return Verdict(score, Status.CORRECT if score else Status.WRONG)


class Pictures(CountShapes):
    """Pictures of shapes; an answer is right as one to `Letters` is."""

    def verify(self, problem: Problem, completion: Completion) -> Verdict:
        right = completion.text[:1].lower() in ALPHABET[:13]
        return Verdict(float(right), Status.CORRECT if right else Status.WRONG)


async def _later(verdict: Verdict, most: float) -> Verdict:
    await asyncio.sleep(random.SystemRandom().random() * most)
    return verdict


class Signalling(Letters):
    """Sends itself the signal in the file PALESTRA_LAB/signal, as `number answers`, at so many answers judged."""

    judged = 0

    def verdict(self, problem: Problem, text: str) -> Verdict:
        Signalling.judged += 1
        path = Path(os.environ["PALESTRA_LAB"]) / "signal"
        if path.exists() and Signalling.judged >= int(path.read_text().split()[1]):
            number = int(path.read_text().split()[0])
            path.unlink()
            os.kill(os.getpid(), number)
        return super().verdict(problem, text)


async def blocking(episode: Any) -> list[Any]:
    """The workflow of one turn, which blocks the event loop while the file PALESTRA_LAB/block is there."""
    block = Path(os.environ["PALESTRA_LAB"]) / "block"
    if episode.problem.row["place"] % 2 and block.exists():
        block.with_name("blocked").touch()
        while True:
            time.sleep(0.1)
    return await single_turn(episode)


class Slow(Letters):
    """Judging some answers takes longer than anybody waits."""

    isolated = True

    def verdict(self, problem: Problem, text: str) -> Verdict:
        if text[:1].lower() in "nopqrstuvwxyz":
            time.sleep(600)
        return super().verdict(problem, text)
