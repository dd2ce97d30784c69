"""Which things are the same as an earlier one, or nearly so: told from hashes alone, not from texts."""

from collections.abc import Callable, Iterable

import numpy as np

from palestra.data.components import Components
from palestra.data.shuffle import Indices, Keys

Similarity = Callable[[int, int], float]

AT_ONCE = 1 << 24  # digests that are sorted together: some 0.8 GB
NEIGHBOURS = 64
"""With how many others of a bucket a document is compared. Beyond that, texts that share a band by chance (a common
beginning, a licence) would be compared with each other in their square."""


def first_of_equal(read: Callable[[], Iterable[Keys]], count: int, first: Indices) -> None:
    """Fill `first` with the number of the first thing that has the same digest; of most things that is their own.

    `read` gives the digests of all `count` things, some at a time in order, each as (things, 2), 128 bits. They are
    sorted in as many parts as they need, and read as often; equal ones are always in one part.
    """
    parts = np.uint64(max(1, -(-count // AT_ONCE)))
    for part in range(int(parts)):
        digests, numbers, begin = [], [], 0
        for some in read():
            chosen = np.flatnonzero(some[:, 0] % parts == part)
            digests.append(some[chosen])
            numbers.append(chosen + begin)
            begin += len(some)
        if not digests:
            return
        ours, number = np.concatenate(digests), np.concatenate(numbers)
        order = np.lexsort((ours[:, 1], ours[:, 0]))  # stable: of equal ones the earlier comes first
        ours, number = ours[order], number[order]
        new = np.ones(len(ours), bool)
        new[1:] = (ours[1:] != ours[:-1]).any(axis=1)
        first[number] = number[new][np.cumsum(new) - 1]


def candidates(keys: Keys) -> np.ndarray:
    """Which documents share a band with another one; `keys` is (bands, documents)."""
    found = np.zeros(keys.shape[1], bool)
    for band in keys:
        order, same = _sorted(band, 1)
        found[order[:-1][same]] = found[order[1:][same]] = True
    return found


def first_of_similar(keys: Keys, similarity: Similarity | None, threshold: float) -> tuple[Indices, int]:
    """The first document of the component of each, and how many pairs were compared; `keys` is (bands, documents).

    Documents are linked where they share a band and, with a `similarity`, where this is at least the threshold. Two
    that hang together already are not compared: it would change nothing. So the components are those of the graph of
    all candidate pairs, in whatever order these come, up to `NEIGHBOURS`.
    """
    components, compared = Components(keys.shape[1]), 0
    for number, band in enumerate(keys):
        for distance in range(1, 2 if similarity is None else NEIGHBOURS + 1):
            order, same = _sorted(band, distance)
            if not same.any():
                break
            left, right = order[:-distance][same], order[distance:][same]
            if similarity is not None:
                apart = components.roots[left] != components.roots[right]
                left, right = left[apart], right[apart]
                new = ~np.any([earlier[left] == earlier[right] for earlier in keys[:number]], axis=0)
                left, right = (left[new], right[new]) if number else (left, right)
                compared += len(left)
                pairs = zip(left.tolist(), right.tolist(), strict=True)
                alike = np.fromiter((similarity(*pair) >= threshold for pair in pairs), bool, len(left))
                left, right = left[alike], right[alike]
            components.join(left, right)
    return components.roots, compared


def _sorted(band: Keys, distance: int) -> tuple[Indices, np.ndarray]:
    """The documents in the order of their keys, and which have the same key as the one `distance` places further."""
    order = np.argsort(band, kind="stable")
    ordered = band[order]
    return order, ordered[:-distance] == ordered[distance:]
