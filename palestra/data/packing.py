"""Packing: sequences of different lengths into bins, few bins under a limit or a given number of equal ones."""

import heapq
from collections.abc import Sequence

from palestra.errors import UsageError

Bin = tuple[int, int, int, list[int]]  # −sum, −count and an index of its own (both break ties of sums), indices


def first_fit_decreasing(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Bins of indices with at most `capacity` tokens each: longest first, each into the first bin with room.

    At most 11/9 of the fewest bins possible plus 6/9 (Dósa, 2007). O(n log n).
    """
    _check(lengths)
    for index, length in enumerate(lengths):
        if length > capacity:
            raise UsageError(
                f"sequence {index} has {length} tokens, more than the {capacity} that fit at once; "
                "truncate, split or drop it, or raise the limit"
            )
    # room[1] is the root of a binary tree whose leaves are the bins, in order; a node holds the most room below it.
    leaves = 1 << max(0, len(lengths) - 1).bit_length()
    room = [capacity] * (2 * leaves)
    bins: list[list[int]] = []
    for index in _longest_first(lengths):
        length, node = lengths[index], 1
        while node < leaves:
            node = 2 * node + (room[2 * node] < length)
        if node - leaves == len(bins):
            bins.append([])
        bins[node - leaves].append(index)
        room[node] -= length
        while node > 1:
            node //= 2
            room[node] = max(room[2 * node], room[2 * node + 1])
    return [sorted(indices) for indices in bins]


def balanced(lengths: Sequence[int], bins: int) -> list[list[int]]:
    """Exactly `bins` bins of indices with sums as equal as differencing makes them; none empty where n ≥ bins.

    Karmarkar and Karp's largest differencing, with several bins: of the partial solutions, the two whose bins differ
    most are joined, the fullest bin of one with the emptiest of the other. The largest sum is at most 4/3 − 1/(3·bins)
    of the best possible (Michiels, Korst and Aarts, 2003). O(n · bins · log(n · bins)).
    """
    _check(lengths)
    if bins < 1:
        raise ValueError(f"cannot split into {bins} bins")
    if bins == 1:
        return [list(range(len(lengths)))]
    # A solution is its bins that are not empty, from the fullest on; the heap orders by how much the fullest has more
    # than the emptiest.
    solutions: list[tuple[int, int, list[Bin]]] = [
        (-lengths[index], order, [(-lengths[index], -1, index, [index])])
        for order, index in enumerate(_longest_first(lengths))
    ]
    heapq.heapify(solutions)
    while len(solutions) > 1:
        _, order, one = heapq.heappop(solutions)
        _, _, other = heapq.heappop(solutions)
        joined = _joined(one, other, bins)
        least = joined[-1][0] if len(joined) == bins else 0
        heapq.heappush(solutions, (joined[0][0] - least, order, joined))
    filled = [sorted(indices) for *_, indices in solutions[0][2]] if solutions else []
    return sorted(filled) + [[] for _ in range(bins - len(filled))]


def _joined(one: list[Bin], other: list[Bin], bins: int) -> list[Bin]:
    """The fullest bin of one with the emptiest of the other, and so on; the lists of indices are used up."""
    alone = bins - len(other)  # the first bins of one meet empty ones
    found = one[:alone] + other[: bins - len(one)]
    for (a, b, first, x), (c, d, _, y) in zip(one[alone:], reversed(other[bins - len(one) :]), strict=True):
        x, y = (x, y) if len(x) >= len(y) else (y, x)
        x += y  # the longer one grows: no index is copied more than log n times
        found.append((a + c, b + d, first, x))
    return sorted(found)


def micro_batches(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """As few bins of at most `max_tokens` as first-fit decreasing finds, of similar size where that still fits."""
    fewest = first_fit_decreasing(lengths, max_tokens)
    if not fewest:
        return []
    even = balanced(lengths, len(fewest))
    fits = all(sum(lengths[index] for index in indices) <= max_tokens for indices in even)
    return even if fits else fewest


def _check(lengths: Sequence[int]) -> None:
    for index, length in enumerate(lengths):
        if length < 1:
            raise ValueError(f"sequence {index} has {length} tokens; an empty one cannot be packed")


def _longest_first(lengths: Sequence[int]) -> list[int]:
    return sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
