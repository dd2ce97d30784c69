"""Tasks that hang, crash and fail, for the tests of judging; a module of its own, because workers import it."""

import os
import re
import signal
import time
from pathlib import Path
from typing import cast

import numpy as np

from palestra.errors import MissingExtra
from palestra.tasks.rewards.rewards import reward
from palestra.tasks.task import Completion, Problem, Status, Task, TaskArgs, Verdict


class TroubleArgs(TaskArgs):
    slow_start: float = 0.0
    """Seconds that the first import would take."""
    started: str | None = None
    """A file that takes a line for each time the task is made ready."""


class Trouble(Task[TroubleArgs]):
    """The answer says what judging does."""

    Args = TroubleArgs

    def problems(self, split: str) -> list[Problem]:
        return [Problem(self.id(split, 0), "say good")]

    def verify(self, problem: Problem, answer: Completion) -> Verdict:
        match answer.text.split():
            case ["sleep", seconds]:
                time.sleep(float(seconds))
            case ["spin"]:
                while True:
                    pass
            case ["stuck"]:  # in C, with the interpreter lock
                re.match(r"(a|a)*b", "a" * 60)
            case ["die"]:
                os.kill(os.getpid(), signal.SIGKILL)
            case ["exit"]:
                os._exit(0)
            case ["raise"]:
                raise ValueError("a judge with a mistake")
            case ["unusable"]:
                raise MissingExtra("this task", "some")
            case ["meet", folder]:
                return self._meet(Path(folder))
            case ["score", score]:
                number, half = cast(list[float], np.array([score, 0.5], np.float32))
                return Verdict(number, Status.CORRECT, {"half": half})
            case ["pid"]:
                return Verdict(1.0, Status.CORRECT, note=str(os.getpid()))
        right = answer.text == "good"
        return Verdict(float(right), Status.CORRECT if right else Status.WRONG, note=f"{self.name} {os.getpid()}")

    def _meet(self, folder: Path) -> Verdict:
        """Right once two workers are here at the same time."""
        mine = folder / str(os.getpid())
        mine.touch()
        try:
            deadline = time.monotonic() + 0.2
            while time.monotonic() < deadline:
                if len(list(folder.iterdir())) == 2:
                    time.sleep(0.05)  # for the other to see it too
                    return Verdict(1.0, Status.CORRECT)
        finally:
            mine.unlink()
        return Verdict(0.0, Status.WRONG)


class TroubleElsewhere(Trouble):
    """The same in a process of its own."""

    isolated = True

    def warm_up(self) -> None:
        time.sleep(self.args.slow_start)
        if self.args.started:
            with Path(self.args.started).open("a") as file:
                file.write(f"{os.getpid()}\n")


def longer(completion: str, least: int = 3) -> float:
    """A reward of the user, in a process of its own."""
    if completion == "spin":
        while True:
            pass
    return float(len(completion) >= least)


async def awaited(completion: str) -> Verdict:
    """One that awaits, in a process of its own."""
    return Verdict(0.5, Status.WRONG, note=f"{completion} {os.getpid()}")


@reward(isolated=False)
async def awaited_here(completion: str) -> Verdict:
    """One that awaits on the loop."""
    return Verdict(0.5, Status.WRONG, note=f"{completion} {os.getpid()}")
