"""Observations of two games of TextArena in few characters, for models that are small: hooks of `summarize`."""

import re

EMPTY, MINE, THEIRS = "012345678", "abcdefghi", "ABCDEFGHI"


def guess(observation: str, limit: int) -> str:
    """Guess the number: `>` for higher, `<` for lower, `!` for an invalid guess, `?` at the beginning."""
    if "invalid" in observation.lower():
        return "!"
    hints = re.findall(r"target number is (higher|lower)", observation)
    return "?" if not hints else ">" if hints[-1] == "higher" else "<"


def tictactoe(observation: str, limit: int) -> str:
    """Tic-tac-toe: the nine cells in order, a sign for each place: 0-8 if empty, a-i if mine, A-I if theirs.

    A small model need not count places in a line to know which cell is which. Player 0 begins with O.
    """
    board = observation.rpartition("Current Board:")[2].partition("Available")[0]
    cells = re.findall(r"[XO\d]", board)
    mine = "O" if cells.count("O") == cells.count("X") else "X"
    return "".join((MINE if mark == mine else THEIRS if mark in "XO" else EMPTY)[n] for n, mark in enumerate(cells))
