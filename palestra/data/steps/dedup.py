"""Deduplication: of documents (or paragraphs) that are the same, and of those that are nearly, the first stays.

What is the same is decided on hashes of normalised texts: shards are hashed, each once and in parallel; then all hashes
are compared; then shards are written, each without what came before. The order is that of the source, so the result
depends neither on how it is cut into shards nor on the workers. Texts are read twice (thrice where near duplicates are
verified) and never kept: memory grows with the number of documents, by some 60 bytes each.
"""

import functools
import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from palestra.data.duplicates import candidates, first_of_equal, first_of_similar
from palestra.data.minhash import MinHash
from palestra.data.shingles import Hashes, Shingles, Unit, jaccard, normalised
from palestra.data.shuffle import Keys
from palestra.data.steps.dedup_phases import HASHES, SETS, Job, hash_file, kept_documents, kept_parts, texts
from palestra.data.steps.documents import Compression
from palestra.data.steps.shards import Source, Where, each_shard
from palestra.errors import UsageError
from palestra.runs.store import written
from palestra.spec.execution import Execution

Of = Literal["documents", "paragraphs", "lines"]

SEPARATORS: dict[str, str] = {"paragraphs": "\n\n", "lines": "\n"}
BATCH_ROWS, BATCH_CHARACTERS = 1024, 1 << 16
DIGEST_BYTES, KEY_BYTES = 16, 8
DUPLICATE, NEAR = "duplicate", "near duplicate"


def dedup_exact(
    out: Path,
    *,
    source: Where,
    of: Of = "documents",
    text_key: str = "text",
    split: str | None = None,
    compression: Compression = "none",
    workers: Execution[int] = 2,
) -> None:
    """Leave out every document whose normalised text an earlier one has; or paragraphs or lines, of all documents.

    Normalised are case, white space and Unicode composition. Paragraphs are separated by an empty line. A blank one is
    never a duplicate; a document of which nothing else is left is dropped.
    """
    if of not in get_args(Of):
        raise UsageError(f"dedup_exact: of is {of!r}; it can be {', '.join(get_args(Of))}")
    job = Job("dedup_exact", out, source, {"of": of}, text_key, split, compression, workers)

    def decide() -> dict[str, Any]:
        count = sum(job.counts(DIGEST_BYTES))
        with job.deciding(count) as first:
            first_of_equal(lambda: (chunk.view("<u8") for chunk in job.hashes(DIGEST_BYTES)), count, first)
            unique = int(np.count_nonzero(first == np.arange(count)))
        return {of: count, "unique": unique}

    job.hash_shards(functools.partial(_digests, of))
    job.decide(decide, DIGEST_BYTES)
    job.write(
        functools.partial(kept_documents, DUPLICATE)
        if of == "documents"
        else functools.partial(kept_parts, SEPARATORS[of])
    )


def dedup_fuzzy(
    out: Path,
    *,
    source: Where,
    bands: int = 26,
    rows: int = 11,
    shingle: int = 5,
    unit: Unit = "characters",
    threshold: float | None = 0.7,
    seed: int = 42,
    text_key: str = "text",
    split: str | None = None,
    compression: Compression = "none",
    workers: Execution[int] = 2,
) -> None:
    """Leave out documents that have most of their shingles in common with an earlier one, found by MinHash.

    Candidates agree in all `rows` permutations of one of the `bands`; with a threshold their true Jaccard similarity
    must reach it too. Documents that hang together over others are one group, of which the first stays.
    """
    if threshold is not None and not 0 < threshold <= 1:
        raise UsageError(f"dedup_fuzzy: threshold is {threshold}; give a similarity above 0, at most 1, or null")
    shingles, minhash = Shingles(shingle, unit, seed), MinHash(bands, rows, seed)
    about = {"bands": bands, "rows": rows, "shingle": shingle, "unit": unit, "threshold": threshold, "seed": seed}
    job = Job("dedup_fuzzy", out, source, about, text_key, split, compression, workers)
    bytes_each = KEY_BYTES * bands

    def decide() -> dict[str, Any]:
        count, keys = sum(job.counts(bytes_each)), _keys_by_band(job, bands)
        similarity = None if threshold is None else _similarity(job, shingles, candidates(keys), bands)
        roots, compared = first_of_similar(keys, similarity, threshold or 0.0)
        with job.deciding(count) as first:
            first[:] = roots
        alone = roots == np.arange(count)
        said = {"documents": count, "unique": int(np.count_nonzero(alone)), "groups": len(np.unique(roots[~alone]))}
        return said if threshold is None else {**said, "compared": compared}

    job.hash_shards(functools.partial(_band_keys, shingles, minhash))
    job.decide(decide, bytes_each)
    job.write(functools.partial(kept_documents, NEAR))


def _digests(of: Of, texts: Iterator[str]) -> Iterator[np.ndarray]:
    for text in texts:
        parts = [text] if of == "documents" else [part for part in text.split(SEPARATORS[of]) if part.strip()]
        digests = [hashlib.blake2b(normalised(part).encode(), digest_size=DIGEST_BYTES).digest() for part in parts]
        yield np.frombuffer(b"".join(digests), np.uint8)


def _band_keys(shingles: Shingles, minhash: MinHash, texts: Iterator[str]) -> Iterator[np.ndarray]:
    """The keys of the bands of each text, (texts, bands)."""

    def of(pieces: list[str], begins: list[int]) -> Keys:
        signatures = np.minimum.reduceat(minhash.signatures(*shingles(pieces)), begins, axis=0)
        return minhash.keys(signatures).astype("<u8")

    pieces: list[str] = []
    begins: list[int] = []
    characters = 0
    for text in texts:
        begins.append(len(pieces))
        pieces += shingles.pieces(normalised(text))
        characters += len(text)
        if len(begins) == BATCH_ROWS or characters >= BATCH_CHARACTERS:
            yield of(pieces, begins)
            pieces, begins, characters = [], [], 0
    if begins:
        yield of(pieces, begins)


def _keys_by_band(job: Job, bands: int) -> Keys:
    """The keys of all documents, (bands, documents), in a file."""
    count = sum(job.counts(KEY_BYTES * bands))
    path = job.folder(HASHES) / "keys.npy"
    path.unlink(missing_ok=True)
    keys = np.lib.format.open_memmap(path, "w+", np.uint64, (bands, max(1, count)))[:, :count]
    at = 0
    for chunk in job.hashes(KEY_BYTES * bands):
        some = chunk.view("<u8")
        keys[:, at : at + len(some)] = some.T
        at += len(some)
    return keys


def _similarity(job: Job, shingles: Shingles, chosen: np.ndarray, bands: int) -> Callable[[int, int], float]:
    """The Jaccard similarity of two of the chosen documents, whose shingles are written to files first."""
    counts, path = job.counts(KEY_BYTES * bands), job.folder(SETS) / "chosen.npy"
    with written(path) as file:
        np.save(file, chosen)
    begins = (np.cumsum(counts) - counts).tolist()
    do = functools.partial(_write_sets, job.folder(SETS), job.text_key, shingles, begins)
    each_shard(job.out, SETS, job.given, do, workers=job.workers)
    lengths = [np.fromfile(job.folder(SETS) / f"{one.number:05}.lengths", "<i8") for one in job.given]
    starts = np.concatenate([np.cumsum(each) - each for each in lengths])
    shard, length = np.repeat(np.arange(len(lengths)), [len(each) for each in lengths]), np.concatenate(lengths)
    numbers = np.flatnonzero(chosen)

    @functools.lru_cache(maxsize=1024)
    def shingles_of(number: int) -> Hashes:
        rank = int(np.searchsorted(numbers, number))
        return np.fromfile(hash_file(job.folder(SETS), shard[rank]), "<u4", length[rank], offset=4 * starts[rank])

    return lambda left, right: jaccard(shingles_of(left), shingles_of(right))


def _write_sets(folder: Path, text_key: str, shingles: Shingles, begins: list[int], source: Source) -> dict[str, Any]:
    """The shingles of those texts of a shard that are chosen; runs in a worker."""
    chosen = np.load(folder / "chosen.npy", mmap_mode="r")[begins[source.number] :]
    lengths = []
    with written(hash_file(folder, source.number)) as file:
        for index, text in enumerate(texts(source, text_key)):
            if chosen[index]:
                ours = shingles.set(normalised(text)).astype("<u4")
                file.write(ours.tobytes())
                lengths.append(len(ours))
    with written(folder / f"{source.number:05}.lengths") as file:
        file.write(np.array(lengths, "<i8").tobytes())
    return {}
