"""The step `decontaminate`: drops documents that overlap with evaluation sets, and notes which text they hit.

Compared are n-grams of words, by exact 64-bit hashes. A document is dropped where it has most of the n-grams of a text
of an evaluation set (a question in a long page), or where most of its own are in one set (a piece of a long passage).
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from palestra.data.duplicates import ngram_hashes, word_hashes
from palestra.data.readers import Row
from palestra.data.steps.shards import LEDGER, Compression, Drop, ShardSource, Where, map_documents, sources
from palestra.errors import UsageError
from palestra.runs.store import read_json, write_json, written
from palestra.spec.model import Execution


def decontaminate(
    out: Path,
    *,
    source: Where,
    against: Mapping[str, Where],
    n: int = 8,
    overlap: float = 0.7,
    fields: list[str] | None = None,
    text_key: str = "text",
    split: str | None = None,
    compression: Compression = "none",
    workers: Execution[int] = 2,
) -> None:
    """Leave out what overlaps with the evaluation sets `against`; `notes/` says which row hit which text of which set.

    Of the rows of a set each string is a text of its own, at any depth, or those under `fields`. Texts of fewer than
    `n` words match by chance and are only counted.
    """
    if not against:
        raise UsageError("against: give the evaluation sets by name, such as {gsm8k: gsm8k/test.jsonl}")
    if n < 1 or not 0 < overlap <= 1:
        raise UsageError(f"n must be at least 1 and overlap in (0, 1]; got n = {n} and overlap = {overlap:g}")
    indices, about = {}, {}
    for number, (name, where) in enumerate(against.items()):
        index = out / LEDGER / f"index-{number}"
        about[name] = _index(index, name, sources(where), n, fields)
        indices[name] = str(index)
    # With what is in the sets: shards that an earlier attempt did were compared with the same.
    recipe = {"against": about, "n": n, "overlap": overlap, "fields": fields}
    work = partial(_compare, indices, n, overlap)
    counts, name = {"against": about}, "decontaminate"
    map_documents(out, source, work, name, recipe, workers, text_key, split, compression, counts=counts)


@dataclass(frozen=True)
class Index:
    """The n-grams of an evaluation set: which texts each is in."""

    hashes: np.ndarray
    """(n-grams) of all texts, each of a text once, sorted."""
    texts: np.ndarray
    """(n-grams) the number of the text that each is of."""
    sizes: np.ndarray
    """(texts) how many n-grams each has."""
    places: list[str]
    """(texts) the row and the field, for people."""

    def hits(self, grams: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
        """Texts that share n-grams with these (each given once), how many they share, and how many are in any."""
        left, right = (np.searchsorted(self.hashes, grams, side) for side in ("left", "right"))
        hit = right > left
        if not hit.any():
            return np.empty(0, np.int64), np.empty(0, np.int64), 0
        shared = np.concatenate([self.texts[a:b] for a, b in zip(left[hit], right[hit], strict=True)])
        return *np.unique(shared, return_counts=True), int(hit.sum())


def _compare(indices: Mapping[str, str], n: int, overlap: float, _: int, rows: Iterator[Row]) -> Iterator[Row | Drop]:
    for row in rows:
        grams = np.unique(ngram_hashes(word_hashes(row["text"]), n))
        hits = (_hit(row, grams, name, load_index(folder), overlap) for name, folder in indices.items())
        yield next(filter(None, hits), row) if len(grams) else row


def _hit(row: Row, grams: np.ndarray, name: str, index: Index, overlap: float) -> Drop | None:
    texts, shared, inside = index.hits(grams)
    if not len(texts):
        return None
    shares = shared / index.sizes[texts]
    best = int(np.argmax(shares))
    of_text, of_row = float(shares[best]), inside / len(grams)
    if max(of_text, of_row) < overlap:
        return None
    shares_of = {"of_the_text": round(of_text, 4), "of_the_row": round(of_row, 4)}
    note = {"id": row["id"], "set": name, "hit": index.places[int(texts[best])], **shares_of}
    return Drop(f"contaminated: {name}", note)


@lru_cache(maxsize=64)
def load_index(folder: str) -> Index:
    """An index as it lies on disk, its arrays mapped: workers share them."""
    path = Path(folder)
    hashes, texts, sizes = (np.load(path / f"{name}.npy", mmap_mode="r") for name in ("hashes", "texts", "sizes"))
    return Index(hashes, texts, sizes, read_json(path / "places.json"))


def _index(folder: Path, name: str, shards: list[ShardSource], n: int, fields: list[str] | None) -> dict[str, int]:
    """Write the index of one set; returns how many rows, texts and n-grams it has."""
    rows = 0

    def texts() -> Iterator[tuple[str, str]]:
        nonlocal rows
        for made, _, row in chain.from_iterable(shard.rows() for shard in shards):
            rows += 1
            chosen = row if fields is None else {key: row[key] for key in fields if key in row}
            yield from ((f"{made} {field}", text) for field, text in strings(chosen, ""))

    index, short = indexed(texts(), n)
    if not index.places:
        raise UsageError(
            f"against.{name}: none of the {rows} rows has a text of {n} words or more"
            + (f" under {', '.join(fields)}" if fields else "")
        )
    for file in ("hashes", "texts", "sizes"):
        with written(folder / f"{file}.npy") as stream:
            np.save(stream, getattr(index, file))
    write_json(folder / "places.json", index.places)
    return {"rows": rows, "texts": len(index.places), "too_short": short, "ngrams": len(index.hashes)}


def indexed(texts: Iterable[tuple[str, str]], n: int) -> tuple[Index, int]:
    """The index of texts, each after its place, and how many of them are too short for it."""
    hashes, sizes, places, short = [np.empty(0, np.uint64)], [], [], 0
    for place, text in texts:
        grams = np.unique(ngram_hashes(word_hashes(text), n))
        if len(grams):
            hashes.append(grams)
            sizes.append(len(grams))
            places.append(place)
        else:
            short += 1
    joined, counts = np.concatenate(hashes), np.array(sizes, np.int64)
    order = np.argsort(joined, kind="stable")
    return Index(joined[order], np.repeat(np.arange(len(counts)), counts)[order], counts, places), short


def strings(value: Any, path: str) -> Iterator[tuple[str, str]]:
    """All texts inside a value, each with where it is."""
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, Mapping | list):
        for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from strings(item, f"{path}.{key}" if path else str(key))
