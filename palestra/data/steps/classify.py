"""The steps `train_classifier` and `classify`: documents scored by a linear classifier of hashed word n-grams.

As fastText does (Joulin et al. 2016, https://arxiv.org/abs/1607.01759), with the embedding and the output as one
matrix: words and n-grams are hashed into buckets, and a softmax over classes is linear in their counts.
"""

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from palestra.data.duplicates import ngram_hashes, word_hashes
from palestra.data.mixture import permutation, stream_key
from palestra.data.readers import Row
from palestra.data.steps.shards import (
    LEDGER,
    NO_TEXT,
    NOT_UNICODE,
    Compression,
    Drop,
    ShardSource,
    Where,
    documents,
    each_shard,
    forget,
    map_documents,
    same_recipe,
    sources,
    writable,
    write_counts,
)
from palestra.errors import UsageError
from palestra.runs.store import read_json, write_json, written
from palestra.spec.model import Execution

MODEL, ABOUT = "weights.npy", "classifier.json"
FEATURES, TRAINED = "features", "trained.npz"
BATCH = 32
EPSILON = 1e-8


@dataclass(frozen=True)
class Classifier:
    """Weights of a softmax over classes, linear in the counts of n-grams."""

    classes: tuple[str, ...]
    weights: np.ndarray
    """(buckets, classes), float32."""
    ngrams: int

    def scores(self, text: str) -> np.ndarray:
        """The probability of each class (classes)."""
        buckets, values = features(text, self.ngrams, len(self.weights))
        return _softmax((self.weights[buckets] * values[:, None]).sum(0, dtype=np.float64))


def features(text: str, ngrams: int, buckets: int) -> tuple[np.ndarray, np.ndarray]:
    """The buckets of a text's words and n-grams, and the counts in them as a vector of length 1; the last is a bias."""
    words = word_hashes(text)
    grams = np.concatenate([ngram_hashes(words, n) for n in range(1, ngrams + 1)])
    # The upper bits: the lower ones of a product depend on fewer bits of what was multiplied.
    used, counts = np.unique((grams >> np.uint64(20)) % np.uint64(buckets - 1), return_counts=True)
    values = counts / np.sqrt(np.square(counts).sum()) if len(counts) else counts
    return np.append(used.astype(np.int64), buckets - 1), np.append(values, 1.0).astype(np.float32)


def train_classifier(
    out: Path,
    *,
    classes: Mapping[str, Where],
    ngrams: int = 2,
    buckets: int = 1 << 18,
    epochs: int = 5,
    lr: float = 0.5,
    held_out: float = 0.1,
    seed: int = 0,
    text_key: str = "text",
    split: str | None = None,
    workers: Execution[int] = 2,
) -> None:
    """Train a classifier of documents, such as `{good: books/, bad: spam/}`, for `classify`.

    A share of the documents, chosen by their text, is held out; `counts.json` has the accuracy on it and the confusion.
    Trained by AdaGrad on batches of 32, all documents in a new order each epoch. A kill costs one epoch.
    """
    if len(classes) < 2:
        raise UsageError(f"classes: expected at least two, got {', '.join(classes) or 'none'}")
    if not 0 < held_out < 1 or epochs < 1 or buckets < 2 or ngrams < 1:
        raise UsageError("held_out is a share in (0, 1); epochs, ngrams and buckets - 1 are at least 1")
    hyper = _Hyper(tuple(classes), ngrams, buckets, epochs, lr, held_out, seed)
    same_recipe(out, {"step": "train_classifier", **asdict(hyper), "text_key": text_key, "split": split})
    began = time.perf_counter()
    parts: list[Path] = []
    results: list[dict[str, Any]] = []
    for label, (name, where) in enumerate(classes.items()):
        folder, shards = out / LEDGER / f"{FEATURES}-{label}", sources(where, split=split)
        extract = partial(_extract, folder, hyper, label, text_key)
        of_class = each_shard(out, folder.name, shards, extract, workers=workers)
        if not sum(result["trained"] for result in of_class):
            raise UsageError(f"classes.{name}: no document is left to train on after {held_out:g} were held out")
        results += of_class
        parts += [folder / f"{shard.number:05}.npz" for shard in shards]
    corpus = _Corpus(out / LEDGER / FEATURES, parts)
    weights = _train(out, hyper, corpus)
    confusion = _confusion(weights, corpus)
    with written(out / MODEL) as file:
        np.save(file, weights)
    write_json(out / ABOUT, {"classes": list(classes), "ngrams": ngrams, "buckets": buckets})
    held = int(confusion.sum())
    accuracy = round(float(np.trace(confusion) / held), 6) if held else None
    more = {"classes": list(classes), "accuracy": accuracy, "held_out": held, "confusion": confusion.tolist()}
    write_counts(out, "train_classifier", results, **more, seconds=round(time.perf_counter() - began, 3))
    for phase in (FEATURES, *(f"{FEATURES}-{label}" for label in range(len(classes)))):
        forget(out, phase)
    (out / LEDGER / TRAINED).unlink(missing_ok=True)


def classify(
    out: Path,
    *,
    source: Where,
    model: Path,
    column: str = "scores",
    keep: str | None = None,
    threshold: float = 0.5,
    text_key: str = "text",
    split: str | None = None,
    compression: Compression = "none",
    workers: Execution[int] = 2,
) -> None:
    """Write the probability of each class into a column; with `keep`, leave out rows where that class is below a bound.

    The column is an object: `consolidate` finds a class as `scores.good`.
    """
    known = load_classifier(str(model)).classes
    if keep is not None and keep not in known:
        raise UsageError(f"keep: {keep!r} is not a class of {model}; its classes are {', '.join(known)}")
    work = partial(_score, str(model), column, keep, threshold)
    recipe = {"column": column, "keep": keep, "threshold": threshold, "classes": list(known)}
    map_documents(out, source, work, "classify", recipe, workers, text_key, split, compression)


@lru_cache(maxsize=4)
def load_classifier(folder: str) -> Classifier:
    """The classifier that `train_classifier` left in a folder."""
    path = Path(folder)
    if not (path / ABOUT).exists():
        raise UsageError(f"{folder} is not a classifier: `train_classifier` writes {ABOUT} and {MODEL}")
    about = read_json(path / ABOUT)
    return Classifier(tuple(about["classes"]), np.load(path / MODEL, mmap_mode="r"), about["ngrams"])


@dataclass(frozen=True)
class _Hyper:
    classes: tuple[str, ...]
    ngrams: int
    buckets: int
    epochs: int
    lr: float
    held_out: float
    seed: int


def _score(
    model: str, column: str, keep: str | None, threshold: float, _: int, rows: Iterator[Row]
) -> Iterator[Row | Drop]:
    classifier = load_classifier(model)
    for row in rows:
        values = [round(float(value), 6) for value in classifier.scores(row["text"])]
        scores = dict(zip(classifier.classes, values, strict=True))
        if keep is not None and scores[keep] < threshold:
            yield Drop(f"{keep} below {threshold:g}")
        else:
            yield {**row, column: scores}


def _extract(folder: Path, hyper: _Hyper, label: int, text_key: str, source: ShardSource) -> dict[str, Any]:
    """The features of a shard's documents, into a file; runs in a worker."""
    buckets, values, sizes, held, dropped = [], [], [], [], Counter({NO_TEXT: 0})
    for row in documents(source, text_key):
        if isinstance(row, Drop) or not writable(row["text"]):
            dropped[row.reason if isinstance(row, Drop) else NOT_UNICODE] += 1
            continue
        used, counts = features(row["text"], hyper.ngrams, hyper.buckets)
        buckets.append(used)
        values.append(counts)
        sizes.append(len(used))
        # By the text, not the id: what is held out is not also trained on under another id.
        held.append(stream_key(hyper.seed, "held out", row["text"]) < hyper.held_out * 2**64)
    folder.mkdir(parents=True, exist_ok=True)
    with written(folder / f"{source.number:05}.npz") as file:
        np.savez(
            file,
            buckets=np.concatenate([np.empty(0, np.int64), *buckets]),
            values=np.concatenate([np.empty(0, np.float32), *values]),
            ends=np.cumsum(sizes, dtype=np.int64),
            held=np.array(held, bool),
            label=np.int64(label),
        )
    rows = len(sizes) + dropped.total()
    return {"rows_in": rows, "rows_out": 0, "trained": len(held) - sum(held), "dropped": dict(dropped)}


class _Corpus:
    """The features of all documents, joined in a file; a batch of any of them is read from there."""

    def __init__(self, folder: Path, parts: Sequence[Path]) -> None:
        ends, held, labels, total = [], [], [], 0
        # Joined a shard at a time and mapped: buckets and values are never whole in memory.
        with written(folder / "buckets.bin") as buckets, written(folder / "values.bin") as values:
            for part in parts:
                with np.load(part) as data:
                    ends.append(data["ends"] + total)
                    total += buckets.write(data["buckets"].tobytes()) // data["buckets"].itemsize
                    values.write(data["values"].tobytes())
                    held.append(data["held"])
                    labels.append(np.full(len(data["held"]), data["label"]))
        self.ends, self.held, self.labels = np.concatenate(ends), np.concatenate(held), np.concatenate(labels)
        self.buckets = np.memmap(folder / "buckets.bin", np.int64, "r")
        self.values = np.memmap(folder / "values.bin", np.float32, "r")

    def batch(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Buckets and values of documents, one after the other, and where each document begins."""
        begins = np.where(rows > 0, self.ends[rows - 1], 0)
        sizes = self.ends[rows] - begins
        firsts = np.cumsum(sizes) - sizes
        at = np.arange(sizes.sum()) + np.repeat(begins - firsts, sizes)
        return self.buckets[at], self.values[at], firsts


def _train(out: Path, hyper: _Hyper, corpus: _Corpus) -> np.ndarray:
    """AdaGrad (Duchi et al. 2011) over all documents that are not held out, in a new order each epoch."""
    shape = (hyper.buckets, len(hyper.classes))
    weights, squares, done = np.zeros(shape, np.float32), np.zeros(shape, np.float32), 0
    state = out / LEDGER / TRAINED
    if state.exists():
        with np.load(state) as data:
            weights, squares, done = data["weights"], data["squares"], int(data["done"])
    rows = np.flatnonzero(~corpus.held)
    for epoch in range(done, hyper.epochs):
        order = rows[permutation(len(rows), stream_key(hyper.seed, "epoch", epoch))]
        for start in range(0, len(order), BATCH):
            batch = order[start : start + BATCH]
            buckets, values, firsts = corpus.batch(batch)
            error = _softmax(np.add.reduceat(weights[buckets] * values[:, None], firsts))  # (batch, classes)
            error[np.arange(len(batch)), corpus.labels[batch]] -= 1
            sizes = np.diff(firsts, append=len(buckets))
            each = np.repeat(error / len(batch), sizes, axis=0) * values[:, None]
            used, places = np.unique(buckets, return_inverse=True)
            gradient = np.stack([np.bincount(places, each[:, k], len(used)) for k in range(each.shape[1])], 1)
            # In place: the two are far larger than what a batch touches.
            squares[used] += gradient**2
            weights[used] -= hyper.lr * gradient / (np.sqrt(squares[used]) + EPSILON)
        with written(state) as file:
            np.savez(file, weights=weights, squares=squares, done=epoch + 1)
    return weights


def _confusion(weights: np.ndarray, corpus: _Corpus) -> np.ndarray:
    """(classes, classes): held-out documents by class and prediction."""
    rows, counts = np.flatnonzero(corpus.held), np.zeros((weights.shape[1], weights.shape[1]), np.int64)
    for start in range(0, len(rows), BATCH):
        batch = rows[start : start + BATCH]
        buckets, values, firsts = corpus.batch(batch)
        logits = np.add.reduceat(weights[buckets] * values[:, None], firsts)
        np.add.at(counts, (corpus.labels[batch], logits.argmax(1)), 1)
    return counts


def _softmax(logits: np.ndarray) -> np.ndarray:
    powers = np.exp(logits - logits.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)
