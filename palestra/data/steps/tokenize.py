"""The steps `tokenize` and `train_tokenizer`: documents to a token store, and to a vocabulary.

Each shard becomes a part of the store under parts/: its arrays, and last its record, which marks them complete. When
all are there they are joined in the order of the shards. So the bytes of a store depend on the shards and the recipe
alone, neither on the number of workers nor on when it was killed.
"""

import itertools
import logging
import re
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
from pydantic import TypeAdapter

from palestra.data.cache import held_alone
from palestra.data.readers import Row, Shard, numbered_rows, shards
from palestra.data.steps.shards import Where, batches, carried_out, same_recipe, sources, texts, write_counts
from palestra.data.store import (
    END,
    ENDS,
    FLAG,
    IMAGES,
    LOSS,
    PARTS,
    PIXELS,
    TOKENS,
    Ledger,
    ShardRecord,
    TokenStore,
    token_dtype,
)
from palestra.errors import PalestraError, UsageError, needs_extra
from palestra.runs.lease import Lease
from palestra.runs.store import LocalStore, read_json, write_json, written
from palestra.spec.model import Execution

if TYPE_CHECKING:
    from palestra.data.encoders import EncodedRow, Encoder

log = logging.getLogger("palestra.data")

HELD_OUT = frozenset(("test", "validation", "valid", "val", "eval", "dev", "holdout", "heldout"))
RECORD = "record.json"  # of a part: marks it complete
BATCH_ROWS, BATCH_CHARACTERS = 256, 1 << 22  # rows are encoded together until one of these is reached
COPY_BYTES = 1 << 24


def tokenize(
    out: Path,
    *,
    source: Where,
    tokenizer: str | Path,
    format: Literal["text", "chat", "plain"] = "text",
    text_key: str = "text",
    split: str | None = None,
    allow_held_out: bool = False,
    workers: Execution[int] = 2,
) -> None:
    """A token store in `out`, made with the tokenizer of a folder, a run or the Hub.

    `text` takes documents, `chat` and `plain` conversations, as `sft` writes them. A source whose name says that it is
    held out for testing is refused unless `allow_held_out`.
    """
    from palestra.data.sources import resolve

    files = shards(source, split=split)
    if not allow_held_out:
        _refuse_held_out([file.path for file in files])
    began = time.perf_counter()
    folder = resolve(str(tokenizer), kind="model", allow=("*.json", "*.jinja", "*.txt", "*.model"))
    with needs_extra("tokenizing", "train"):
        from palestra.data.encoders import ChatEncoder, TextEncoder
    if format == "text":
        encoder = TextEncoder.load(folder, text_key=text_key)
    else:
        encoder = ChatEncoder.load(folder, format=format)
    store = build_store(out, files, encoder, workers=workers)
    rows = [{"rows_in": record.documents, "rows_out": record.documents} for record in store.ledger.shards]
    counts = {"tokens": store.num_tokens, "bytes": store.num_bytes, "tokenizer": store.ledger.tokenizer}
    write_counts(out, "tokenize", rows, **counts, seconds=round(time.perf_counter() - began, 3))


def train_tokenizer(
    out: Path,
    *,
    source: Where,
    vocab_size: int,
    text_key: str = "text",
    split: str | None = None,
    max_documents: int | None = None,
) -> None:
    """A byte-level BPE of documents, as a Hugging Face tokenizer in `out`; of the first `max_documents` where given."""
    began = time.perf_counter()
    same_recipe(out, {"vocab_size": vocab_size, "text_key": text_key, "split": split, "max_documents": max_documents})
    with needs_extra("tokenizing", "train"):
        from palestra.data.tokenizers import train_bpe
    read = 0

    def counted() -> Iterator[str]:
        nonlocal read
        of_all = (text for shard in sources(source, split=split) for text in texts(shard, text_key))
        for text in itertools.islice(of_all, max_documents):
            read += 1
            yield text

    tokenizer = train_bpe(counted(), vocab_size)
    if not read:
        raise PalestraError(f"{source} has no documents to train a tokenizer on")
    tokenizer.save(out)
    counts = [{"rows_in": read, "seconds": time.perf_counter() - began}]
    write_counts(out, "train_tokenizer", counts, vocab_size=tokenizer.vocab_size)


def _refuse_held_out(paths: Sequence[str]) -> None:
    """A file, or one of the two folders that it is in, must not be named like a test set."""
    for path in paths:
        *folders, name = path.split("/")
        words = [*(folder.lower() for folder in folders[-2:]), *re.split(r"[^a-z]+", name.lower())]
        if held_out := HELD_OUT.intersection(words):
            raise UsageError(
                f"{path} has {min(held_out)!r} in its name, and training on a test set makes its scores meaningless; "
                "give the training part alone, or allow_held_out=True if it is meant"
            )


def build_store(folder: Path | str, sources: Sequence[Shard], encoder: "Encoder", *, workers: int = 1) -> TokenStore:
    """Tokenize shards into a store, or resume an interrupted build; a finished store is only opened.

    Shards are done in `workers` spawned processes, or with 1 in this one. While another process builds the same
    store, this one waits.
    """
    folder = Path(folder)
    if not sources or workers < 1:
        raise UsageError(f"cannot build {folder} from {len(sources)} shards with {workers} workers: give at least one")
    new = Ledger(encoder.tokenizer, encoder.fingerprint, encoder.vocab_size, encoder.masked, encoder.recipe)
    if not _finished(folder, new, sources):
        folder.mkdir(parents=True, exist_ok=True)
        with held_alone(Lease(LocalStore(folder)), "the token store"):
            if not _finished(folder, new, sources):
                _build(folder, new, sources, encoder, workers)
    shutil.rmtree(folder / PARTS, ignore_errors=True)  # also where a build was killed in the middle of this
    return TokenStore.open(folder)


def _finished(folder: Path, new: Ledger, sources: Sequence[Shard]) -> bool:
    """Whether the store is complete; one with another recipe or from other shards is refused."""
    ledger = Ledger.read(folder)
    if ledger is None:
        return False
    ledger.check_recipe(new, folder)
    if ledger.finished:
        _check_shards(folder, dict(enumerate(ledger.shards)), sources)
        if len(sources) > len(ledger.shards):
            more = sources[len(ledger.shards)].path
            raise UsageError(f"{folder} was finished without {more}; build into another folder, or remove this one")
    return ledger.finished


def _check_shards(folder: Path, done: dict[int, ShardRecord], sources: Sequence[Shard]) -> None:
    """Refuse other shards than those that were tokenized, naming the first."""
    for number, record in sorted(done.items()):
        was, now = record.shard, sources[number] if number < len(sources) else None
        if now is None:
            raise UsageError(
                f"{folder} holds {was.path}, which is not among the {len(sources)} shards given; "
                "give the same shards, or build into another folder"
            )
        if not record.matches(now):
            before, after = (f"{shard.path} ({shard.size} bytes, split by {shard.split!r})" for shard in (was, now))
            raise UsageError(
                f"{folder} was made from {before}, and {after} has other content; restore it, or remove {folder} to "
                "build it again"
            )


def _build(folder: Path, new: Ledger, sources: Sequence[Shard], encoder: "Encoder", workers: int) -> None:
    parts, count = folder / PARTS, len(sources)
    done = {int(path.name.split(".")[0]): _record(path) for path in parts.glob(f"[0-9]*.{RECORD}")}
    _check_shards(folder, done, sources)
    new.write(folder)
    parts.mkdir(exist_ok=True)
    for left_over in [*parts.glob(".*.tmp"), *folder.glob(".*.bin.*.tmp"), *folder.glob(".ledger*.tmp")]:
        left_over.unlink()
    missing = [(number, shard) for number, shard in enumerate(sources) if number not in done]
    # Each worker has one core: the tokenizer must not start a thread for every core in each.
    env = {"TOKENIZERS_PARALLELISM": "false"}
    build = partial(_build_part, parts, encoder)
    for _, record in carried_out(missing, build, lambda job: job[1].path, workers, "tokenize", env):
        log.info("tokenized %s: %d documents, %d tokens", record.shard.path, record.documents, record.tokens)
    records = [_record(_part(parts, number, RECORD)) for number in range(count)]
    if not any(record.tokens for record in records):
        raise PalestraError(f"the {count} shards of {folder} have no text, from {records[0].shard.path} on")
    for name in (TOKENS, *((LOSS,) if new.masked else ()), *((PIXELS,) if new.sees else ())):
        with written(folder / name) as joined:
            for number in range(count):
                with _part(parts, number, name).open("rb") as part:
                    shutil.copyfileobj(part, joined, COPY_BYTES)
    with written(folder / ENDS) as joined:
        before = 0
        for number, record in enumerate(records):
            joined.write((np.fromfile(_part(parts, number, ENDS), END) + before).tobytes())
            before += record.tokens
    if new.sees:
        _join_images(folder, parts, records)
    finished = replace(new, finished=True, shards=tuple(records))
    TokenStore(folder, finished)  # checks the sizes
    finished.write(folder)


def _join_images(folder: Path, parts: Path, records: Sequence[ShardRecord]) -> None:
    tokens = pixels = 0
    with written(folder / IMAGES) as joined:
        for number, record in enumerate(records):
            images = np.fromfile(_part(parts, number, IMAGES), END).reshape(-1, 4)
            images = images + np.array([tokens, 0, 0, pixels])
            joined.write(images.astype(END).tobytes())
            tokens, pixels = tokens + record.tokens, pixels + _part(parts, number, PIXELS).stat().st_size


def _build_part(parts: Path, encoder: "Encoder", job: tuple[int, Shard]) -> ShardRecord:
    """Tokenize one shard into its part; runs in a worker."""
    number, shard = job
    dtype = token_dtype(encoder.vocab_size)
    documents = tokens = num_bytes = 0
    with ExitStack() as stack:
        tokens_file, ends_file = (stack.enter_context(written(_part(parts, number, name))) for name in (TOKENS, ENDS))
        loss_file = stack.enter_context(written(_part(parts, number, LOSS))) if encoder.masked else None
        sees = "pixels" in encoder.recipe
        seen = [stack.enter_context(written(_part(parts, number, name))) for name in (IMAGES, PIXELS) if sees]
        pixels = 0
        rows = numbered_rows(shard, text_key=encoder.text_key)
        for batch in batches(rows, _characters, BATCH_ROWS, BATCH_CHARACTERS):
            encoded = _encode(encoder, shard, batch)
            arrays = [np.asarray(row.tokens, np.int64) for row in encoded]
            ends = tokens + np.cumsum([len(array) for array in arrays])
            joined = np.concatenate(arrays)
            if joined.size and (joined.min() < 0 or joined.max() >= encoder.vocab_size):
                raise PalestraError(
                    f"{shard.place(batch[0][0])} or a row soon after it: {encoder.tokenizer} gives tokens from "
                    f"{joined.min()} to {joined.max()}, and its vocabulary has {encoder.vocab_size}"
                )
            for row, end in zip(encoded, ends.tolist(), strict=True):
                for image in row.images:
                    first = end - len(row.tokens) + image.start
                    seen[0].write(np.array([first, *image.pixels.shape[:2], pixels], END).tobytes())
                    seen[1].write(image.pixels.tobytes())
                    pixels += image.pixels.size
            tokens_file.write(joined.astype(dtype).tobytes())
            ends_file.write(ends.astype(END).tobytes())
            if loss_file is not None:
                loss_file.write(np.concatenate([_mask(row) for row in encoded]).astype(FLAG).tobytes())
            documents, tokens = documents + len(encoded), int(ends[-1])
            num_bytes += sum(row.num_bytes for row in encoded)
    checksum = shard.checksum() if shard.local else None
    if shard.now() != shard:
        raise PalestraError(f"{shard.path} was changed while it was read; wait until it is written, then build again")
    record = ShardRecord(shard, checksum, documents, tokens, num_bytes)
    write_json(_part(parts, number, RECORD), asdict(record))
    return record


def _record(path: Path) -> ShardRecord:
    return TypeAdapter(ShardRecord).validate_python(read_json(path))


def _part(parts: Path, number: int, name: str) -> Path:
    return parts / f"{number:06}.{name}"


def _characters(numbered: tuple[int, Row]) -> int:
    return sum(len(value) for value in numbered[1].values() if isinstance(value, str))


def _encode(encoder: "Encoder", shard: Shard, batch: list[tuple[int, Row]]) -> "list[EncodedRow]":
    try:
        encoded = encoder([row for _, row in batch])
    except PalestraError as error:
        if len(batch) == 1:
            raise PalestraError(f"{shard.place(batch[0][0])}: {error}") from error
        for row in batch:  # which of them was it?
            _encode(encoder, shard, [row])
        raise
    if len(encoded) != len(batch):
        raise ValueError(f"{type(encoder).__name__} made {len(encoded)} documents of {len(batch)} rows")
    return encoded


def _mask(encoded: "EncodedRow") -> np.ndarray:
    if encoded.loss is None:
        return np.ones(len(encoded.tokens), bool)
    if len(encoded.loss) != len(encoded.tokens):
        raise ValueError(f"a document has {len(encoded.tokens)} tokens and a mask of {len(encoded.loss)}")
    return np.asarray(encoded.loss, bool)
