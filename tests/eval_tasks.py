"""Tasks for tests of evaluation: prompts of letters, and a judge that a random model pleases now and then."""

import asyncio
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from palestra.tasks.task import Completion, Problem, Status, Task, TaskArgs, Verdict

LETTERS = "abcdefghijklmnopqrstuvwxyz"


class LetterArgs(TaskArgs):
    size: int = 6
    length: int = 5
    """Of a prompt."""
    chat: bool = False


class Letters(Task[LetterArgs]):
    """Right is an answer that begins with a letter of the first half of the alphabet; half of the points for others."""

    Args = LetterArgs
    stop = (".",)

    def problems(self, split: str) -> Sequence[Problem]:
        shift = 0 if split == "test" else 13
        texts = [
            "".join(LETTERS[(i * 7 + j * j + shift) % 26] for j in range(self.args.length))
            for i in range(self.args.size)
        ]
        prompts: list[Any] = [({"role": "user", "content": text},) if self.args.chat else text for text in texts]
        return [Problem(self.id(split, i), prompt, {"number": i}) for i, prompt in enumerate(prompts)]

    def verify(self, problem: Problem, answer: Completion) -> Verdict:
        first = answer.text[:1].lower()
        if first not in LETTERS or not first:
            return Verdict(0.0, Status.UNPARSABLE)
        right = first < "n"
        return Verdict(1.0 if right else 0.5, Status.CORRECT if right else Status.WRONG, {"early": float(first < "e")})


class Broken(Letters):
    """Its judge fails on every problem, or on those before `size` alone."""

    def verify(self, problem: Problem, answer: Completion) -> Verdict:
        raise ValueError(f"no verdict on {problem.id}")


class HalfBroken(Letters):
    def verify(self, problem: Problem, answer: Completion) -> Verdict:
        if problem.row["number"] % 2:
            raise ValueError(f"no verdict on {problem.id}")
        return super().verify(problem, answer)


class Fragile(Letters):
    """Kills its process at the answer whose number is in the file EVAL_KILL; may fail while EVAL_KILL.fail exists."""

    judged = waiting = 0

    async def verify(self, problem: Problem, answer: Completion) -> Verdict:
        Fragile.waiting += 1
        for _ in range(4 * Fragile.waiting):  # one after another, so that those before it are written when it kills
            await asyncio.sleep(0)
        Fragile.waiting -= 1
        Fragile.judged += 1
        path = Path(os.environ["EVAL_KILL"])
        if path.exists() and Fragile.judged == int(path.read_text()):
            path.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        if problem.row["number"] % 4 == 0 and Path(os.environ["EVAL_KILL"] + ".fail").exists():
            raise MemoryError("not now")
        return super().verify(problem, answer)


def noted(moment: Any) -> dict[str, float]:
    """A hook."""
    return {"noted": moment.metrics["eval/accuracy"]}
