"""Environments and opponents for tests; light to import, as worker processes do."""

import os
import random

from palestra.tasks.environments.environment import Turn
from palestra.tasks.task import Problem


class Sums:
    """Adds up what it is told; ends at 10, and misbehaves when told so."""

    def __init__(self, until: int = 10):
        self.until = until

    def reset(self, seed: int, problem: Problem) -> Turn:
        self.total, self.luck = 0, random.random()
        return Turn(f"seed {seed % 3}: add")

    def step(self, action: str) -> Turn:
        if action == "raise":
            raise ValueError("a broken game")
        if action == "hang":
            while True:
                pass
        if action == "die":
            os._exit(3)
        if action == "long":
            return Turn("a" * 300 + "z" * 300)
        self.total += int(action)
        return Turn(f"{self.total} {random.random():.3f}", {0: float(action)}, self.total >= self.until)

    def close(self) -> None:
        pass


def shout(text: str, limit: int) -> str:
    return f"<{len(text)}>"


def center_first(observation: str, chance: random.Random) -> str:
    return "[4]" if "'[4]'" in observation else "[99]"


class Letters:
    """Pays for every `a` in each of three turns, with luck."""

    def reset(self, seed: int, problem: Problem) -> Turn:
        self.turns = 0
        return Turn(f"go {random.randint(0, 9)}")

    def step(self, action: str) -> Turn:
        self.turns += 1
        reward = action.count("a") + random.randint(0, 1) / 4
        return Turn(f"more {random.randint(0, 9)}", {0: reward}, self.turns == 3)

    def close(self) -> None:
        pass
