"""The token store: documents as one memory-mapped array, cut into examples and packed into sequences.

A folder with
    tokens.bin   all tokens, end to end (uint16 where the vocabulary fits, else uint32; little endian)
    ends.bin     where each document ends in it (int64)
    loss.bin     whether each token is trained on (one byte each), for data with prompts and answers
    images.bin   of each image its first token, height, width and place in pixels.bin (int64), for data with images
    pixels.bin   the pixels of all images, end to end (uint8)
    ledger.json  the tokenizer and recipe, the shards with their documents, tokens and bytes; written last
"""

import heapq
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import TypeAdapter

from palestra.data.media import Image
from palestra.data.readers import Shard
from palestra.errors import PalestraError, UsageError
from palestra.runs.store import read_json, write_json

FORMAT = 1
LEDGER, TOKENS, ENDS, LOSS = "ledger.json", "tokens.bin", "ends.bin", "loss.bin"
IMAGES, PIXELS = "images.bin", "pixels.bin"
PARTS = "parts"  # while the store is built: the same files of each shard
END, FLAG = np.dtype("<i8"), np.dtype("?")  # on disk


@dataclass(frozen=True)
class ShardRecord:
    """A shard as it was when it was tokenized, and its counts."""

    shard: Shard
    checksum: str | None
    """SHA-256 of a local file; one that is elsewhere is known by its stamp."""
    documents: int
    tokens: int
    num_bytes: int
    """UTF-8 bytes of the text that the tokens stand for."""

    def matches(self, shard: Shard) -> bool:
        """Whether a shard has the content that was tokenized, even where a local file was moved or copied since."""
        ours = self.shard
        if (shard.size, shard.split, shard.format) != (ours.size, ours.split, ours.format):
            return False
        if (shard.path, shard.stamp) == (ours.path, ours.stamp):
            return True
        return self.checksum is not None and shard.local and shard.checksum() == self.checksum


@dataclass(frozen=True)
class Ledger:
    """What a store is made of."""

    tokenizer: str
    """The tokenizer's name, for people."""
    fingerprint: str
    vocab_size: int
    masked: bool
    """Whether it says which tokens are trained on."""
    recipe: dict[str, Any]
    """What else decides the tokens."""
    finished: bool = False
    shards: tuple[ShardRecord, ...] = ()
    """In the order of their documents; empty until it is finished."""

    @property
    def sees(self) -> bool:
        """Whether documents may have images."""
        return "pixels" in self.recipe

    @classmethod
    def read(cls, folder: Path) -> "Ledger | None":
        """The ledger of a folder; None where there is none."""
        if not (folder / LEDGER).exists():
            return None
        data = read_json(folder / LEDGER)
        if data.pop("format", None) != FORMAT:
            raise PalestraError(f"{folder} is a token store of another format than {FORMAT}; remove it and build again")
        return TypeAdapter(cls).validate_python(data)

    def write(self, folder: Path) -> None:
        """Write it atomically."""
        write_json(folder / LEDGER, {"format": FORMAT, **asdict(self)})

    def check_recipe(self, wanted: "Ledger", folder: Path) -> None:
        """Refuse a store with another tokenizer or recipe than is wanted."""
        if wanted.fingerprint != self.fingerprint:
            raise UsageError(
                f"{folder} was tokenized with {self.tokenizer} ({self.fingerprint[:12]}), and {wanted.tokenizer} "
                f"({wanted.fingerprint[:12]}) gives other tokens; use the store's tokenizer, or another folder"
            )
        # As JSON, since one of them has been on disk: a tuple is a list there.
        before, now = (json.loads(json.dumps({**one.recipe, "masked": one.masked})) for one in (self, wanted))
        check_same(folder, before, now)


def check_same(folder: Path, before: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Refuse to resume in a folder that was begun with other arguments."""
    for key in sorted({*before, *wanted}):
        if before.get(key) != wanted.get(key):
            raise UsageError(
                f"{folder} was begun with {key} = {before.get(key)!r}, not {wanted.get(key)!r}; "
                "give another folder, or remove this one"
            )


class TokenStore:
    """A store whose documents are read from disk as they are used."""

    def __init__(self, folder: Path, ledger: Ledger) -> None:
        self.folder, self.ledger = folder, ledger
        self.num_tokens = sum(record.tokens for record in ledger.shards)
        self.num_bytes = sum(record.num_bytes for record in ledger.shards)
        documents = sum(record.documents for record in ledger.shards)
        self.tokens = _mapped(folder / TOKENS, token_dtype(ledger.vocab_size), self.num_tokens)
        """(tokens)"""
        self.ends = _mapped(folder / ENDS, END, documents)
        """(documents)"""
        self.loss = _mapped(folder / LOSS, FLAG, self.num_tokens) if ledger.masked else None
        """(tokens), None where all are trained on"""
        self.images: np.ndarray | None = None
        """(images, 4): first token, height, width, place in the pixels; None where there can be none."""
        if ledger.sees:
            count = (folder / IMAGES).stat().st_size // (4 * END.itemsize) if (folder / IMAGES).exists() else 0
            self.images = _mapped(folder / IMAGES, END, 4 * count).reshape(-1, 4)
            self.pixels = _mapped(folder / PIXELS, np.dtype(np.uint8), _pixels_end(self.images))

    @classmethod
    def open(cls, folder: Path | str) -> "TokenStore":
        """Open a finished store."""
        folder = Path(folder)
        ledger = Ledger.read(folder)
        if ledger is None:
            raise UsageError(f"there is no token store at {folder}")
        if not ledger.finished:
            raise PalestraError(f"the token store {folder} is not finished; build it again to resume where it stopped")
        return cls(folder, ledger)

    def __len__(self) -> int:
        """How many documents."""
        return len(self.ends)

    @property
    def lengths(self) -> np.ndarray:
        """(documents) tokens of each."""
        return np.diff(self.ends, prepend=0)

    def example(self, document: int, most: int) -> "Example":
        """The first `most` tokens of a document, with its loss mask."""
        stop = int(self.ends[document])
        start = stop - len(self[document])
        length = min(most, stop - start)
        return _example(self, start, start + length, np.array([length]))

    def __getitem__(self, document: int) -> np.ndarray:
        """The tokens of a document, a view of the file."""
        if not 0 <= document < len(self):
            raise IndexError(f"document {document} of a store with {len(self)}")
        return self.tokens[int(self.ends[document - 1]) if document else 0 : int(self.ends[document])]


def token_dtype(vocab_size: int) -> np.dtype:
    """The type of a token on disk."""
    return np.dtype("<u2") if vocab_size <= 1 << 16 else np.dtype("<u4")


def _mapped(path: Path, dtype: np.dtype, length: int) -> np.ndarray:
    size = path.stat().st_size if path.exists() else 0
    if size != length * dtype.itemsize:
        raise PalestraError(
            f"{path} has {size} bytes and should have {length * dtype.itemsize}: it was truncated or changed; "
            "copy the store again, or remove it and build it"
        )
    if not length:  # an empty file cannot be mapped
        return np.zeros(0, dtype)
    # A plain array over the map: slices of the subclass cost three times as much.
    return np.memmap(path, dtype, mode="r", shape=(length,)).view(np.ndarray)


@dataclass(frozen=True)
class Example:
    """One sequence of tokens, of one or several documents."""

    tokens: np.ndarray
    """(T) int32"""
    segments: np.ndarray
    """(S) int64, the lengths of the pieces of documents in it; they add up to T. Attention may stay inside them."""
    loss: np.ndarray | None = None
    """(T) bool, which tokens are trained on; None where all are."""
    images: tuple[Image, ...] = ()
    """Their places are counted from its first token."""


class Windows:
    """The documents end to end, cut every `length` tokens; what is left at the end is not used."""

    def __init__(self, store: TokenStore, length: int) -> None:
        if length < 2:
            raise UsageError(f"a window of {length} tokens has nothing to predict; it needs at least 2")
        self.store, self.length = store, length

    def __len__(self) -> int:
        return self.store.num_tokens // self.length

    def __getitem__(self, index: int) -> Example:
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        start, stop = index * self.length, (index + 1) * self.length
        ends = self.store.ends
        first, last = np.searchsorted(ends, [start, stop], side="right")
        # Unique: a document may end with the window, and one without tokens where the last one did.
        bounds = np.unique(np.concatenate([[start], ends[first:last], [stop]]))
        return _example(self.store, start, stop, np.diff(bounds))


class Documents:
    """One document an example; of one longer than `max_length` the end is cut, or it is refused."""

    def __init__(
        self, store: TokenStore, max_length: int, over_long: Literal["truncate", "error"] = "truncate"
    ) -> None:
        if max_length < 1:
            raise UsageError(f"documents of at most {max_length} tokens are empty")
        self.store = store
        stops = np.asarray(store.ends)
        self._starts = np.concatenate([[0], stops[:-1]])
        self._stops = np.minimum(stops, self._starts + max_length)
        long = np.flatnonzero(stops > self._stops)
        if over_long == "error" and long.size:
            raise UsageError(
                f"{long.size} of {len(store)} documents of {store.folder} have more than {max_length} tokens, first "
                f"document {long[0]} with {stops[long[0]] - self._starts[long[0]]}; truncate or drop them"
            )

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> Example:
        if not 0 <= index < len(self):
            raise IndexError(f"document {index} of {len(self)}")
        start, stop = int(self._starts[index]), int(self._stops[index])
        return _example(self.store, start, stop, np.array([stop - start]))


def _example(store: TokenStore, start: int, stop: int, segments: np.ndarray) -> Example:
    loss = None if store.loss is None else np.array(store.loss[start:stop])
    images: tuple[Image, ...] = ()
    if store.images is not None:
        first, last = np.searchsorted(store.images[:, 0], (start, stop))
        images = tuple(_image(store, row, start) for row in store.images[first:last].tolist())
    return Example(store.tokens[start:stop].astype(np.int32), segments, loss, images)


def _image(store: TokenStore, row: list[int], start: int) -> Image:
    token, height, width, at = row
    pixels = store.pixels[at : at + height * width * 3].reshape(height, width, 3)
    return Image(pixels, token - start)


def _pixels_end(images: np.ndarray) -> int:
    return int(images[-1, 3] + 3 * images[-1, 1] * images[-1, 2]) if len(images) else 0


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
    if sum(lengths) <= capacity:  # the usual case of short sequences
        return [list(range(len(lengths)))] if lengths else []
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
    joined = one[:alone] + other[: bins - len(one)]
    for (a, b, first, x), (c, d, _, y) in zip(one[alone:], reversed(other[bins - len(one) :]), strict=True):
        x, y = (x, y) if len(x) >= len(y) else (y, x)
        x += y  # the longer one grows: no index is copied more than log n times
        joined.append((a + c, b + d, first, x))
    return sorted(joined)


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
