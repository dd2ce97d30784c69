"""Lessons in two games: transcripts of players who know the rules and nothing else.

    python examples/games/lessons.py guess|tictactoe [data/games/<game>.jsonl]

Both play at random, so that a model of characters learns to write moves at all. How to win it learns from rewards.
"""

import json
import random
import sys
from pathlib import Path

LESSONS = 10_000
EMPTY, MINE, THEIRS = "012345678", "abcdefghi", "ABCDEFGHI"  # as in boards.py
LINES = [(0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6)]


def guesses(chance: random.Random) -> list[str]:
    """Three different guesses at a number of 1 to 7, with the game's hints, which are not heeded."""
    secret, lines = chance.randint(1, 7), ["?"]
    for guess in chance.sample(range(1, 8), 3):
        lines.append(str(guess))
        if guess == secret:
            break
        lines.append("<" if guess > secret else ">")
    return lines


def games(chance: random.Random) -> list[str]:
    """One player's side of a random game of tic-tac-toe: boards as it sees them, and its moves."""
    board, seat, lines = list(EMPTY), chance.randrange(2), []
    for turn in range(9):
        cell = chance.choice([place for place, mark in enumerate(board) if mark in EMPTY])
        marks = MINE if turn % 2 == seat else THEIRS
        if marks == MINE:
            lines += ["".join(board), str(cell)]
        board[cell] = marks[cell]
        if any({board[place] for place in line} <= set(marks) for line in LINES):
            break
    return lines


def write_lessons(game: str, path: Path, seed: int = 0) -> None:
    chance, play = random.Random(seed), {"guess": guesses, "tictactoe": games}[game]
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        for first, *rest in (lines for lines in (play(chance) for _ in range(LESSONS)) if len(lines) > 1):
            file.write(json.dumps({"prompt": f"{first}\n", "completion": "".join(f"{line}\n" for line in rest)}) + "\n")


if __name__ == "__main__":
    write_lessons(sys.argv[1], Path(sys.argv[2] if len(sys.argv) > 2 else f"data/games/{sys.argv[1]}.jsonl"))
