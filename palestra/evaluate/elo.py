"""Elo ratings of players from the results of their games."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable

PRIOR = 0.5  # points that each of a pair is given besides its games: a player that never lost has a rating too
ROUNDS = 10_000


def elo(results: Iterable[tuple[str, str, float]], anchor: str) -> dict[str, float]:
    """The ratings under which the results are most likely (Bradley & Terry 1952), where `anchor` has 0.

    A result is two players and the points of the first: 1 for a win, ½ for a draw, 0 for a loss. A difference of 400
    means ten times as many points. Solved by the updates of Hunter (2004), MM algorithms.
    """
    points: defaultdict[str, float] = defaultdict(float)
    games: Counter[frozenset[str]] = Counter()
    for first, second, score in results:
        if first == second or not 0.0 <= score <= 1.0:
            raise ValueError(f"expected two players and points from 0 to 1, got {first!r}, {second!r}, {score}")
        points[first] += score
        points[second] += 1.0 - score
        games[frozenset((first, second))] += 1
    if anchor not in points:
        raise ValueError(f"{anchor!r} has no games; there are {', '.join(sorted(points)) or 'none'}")
    for name in (name for pair in games for name in pair):
        points[name] += PRIOR
    strength = dict.fromkeys(points, 1.0)
    for _ in range(ROUNDS):
        expected = dict.fromkeys(points, 0.0)
        for (one, other), count in ((tuple(pair), count) for pair, count in games.items()):
            share = (count + 2 * PRIOR) / (strength[one] + strength[other])
            expected[one] += share
            expected[other] += share
        updated = {name: points[name] / expected[name] for name in points}
        scale = updated[anchor]
        updated = {name: value / scale for name, value in updated.items()}
        moved = max(abs(math.log(updated[name] / strength[name])) for name in points)
        strength = updated
        if moved < 1e-12:
            break
    return {name: 400.0 * math.log10(value) for name, value in strength.items()}
