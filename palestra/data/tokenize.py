"""Tokenizes the rows of many shards into one token store, in parallel and resumably.

Each shard becomes a part of its own under parts/: its arrays, and last its record, which says that they are whole. When
all are there they are joined in the order of the shards. So the bytes of a store depend on the shards and the recipe
alone, neither on the number of workers nor on when it was killed.
"""

import logging
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import numpy as np

from palestra.data.cache import held_alone
from palestra.data.encoders import EncodedRow, Encoder
from palestra.data.readers import Row, Shard, numbered_rows
from palestra.data.steps.shards import carried_out
from palestra.data.store import END, ENDS, FLAG, LOSS, PARTS, TOKENS, Ledger, ShardRecord, TokenStore, token_dtype
from palestra.errors import PalestraError, UsageError
from palestra.runs.lease import Lease
from palestra.runs.store import LocalStore, read_json, write_json, written

log = logging.getLogger("palestra.data")

RECORD = "record.json"  # of a part: it is whole
BATCH_ROWS, BATCH_CHARACTERS = 256, 1 << 22  # rows are encoded together until one of these is reached
COPY_BYTES = 1 << 24


def build_store(folder: Path | str, sources: Sequence[Shard], encoder: Encoder, *, workers: int = 1) -> TokenStore:
    """Tokenize shards into a store, or go on where a build was interrupted; a finished store is only opened.

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
                _check_shards(folder, _records(folder / PARTS), sources)
                new.write(folder)
                _build_parts(folder / PARTS, sources, encoder, workers)
                _join_parts(folder, new, len(sources))
    shutil.rmtree(folder / PARTS, ignore_errors=True)  # also where a build was killed in the middle of this
    return TokenStore.open(folder)


def build_part(parts: Path, encoder: Encoder, job: tuple[int, Shard]) -> ShardRecord:
    """Tokenize one shard into its part; runs in a worker."""
    number, shard = job
    dtype = token_dtype(encoder.vocab_size)
    documents = tokens = num_bytes = 0
    with ExitStack() as stack:
        tokens_file, ends_file = (stack.enter_context(written(_part(parts, number, name))) for name in (TOKENS, ENDS))
        loss_file = stack.enter_context(written(_part(parts, number, LOSS))) if encoder.masked else None
        for batch in _batches(shard, encoder.text_key):
            encoded = _encode(encoder, shard, batch)
            arrays = [np.asarray(one.tokens, np.int64) for one in encoded]
            ends = tokens + np.cumsum([len(array) for array in arrays])
            joined = np.concatenate(arrays)
            _check_tokens(joined, encoder, shard, batch)
            tokens_file.write(joined.astype(dtype).tobytes())
            ends_file.write(ends.astype(END).tobytes())
            if loss_file is not None:
                loss_file.write(np.concatenate([_mask(one) for one in encoded]).astype(FLAG).tobytes())
            documents, tokens = documents + len(encoded), int(ends[-1])
            num_bytes += sum(one.num_bytes for one in encoded)
    checksum = shard.checksum() if shard.local else None
    if shard.now() != shard:
        raise PalestraError(f"{shard.path} was changed while it was read; wait until it is written, then build again")
    record = ShardRecord(shard, checksum, documents, tokens, num_bytes)
    write_json(_part(parts, number, RECORD), asdict(record))
    return record


def _finished(folder: Path, new: Ledger, sources: Sequence[Shard]) -> bool:
    """Whether the store is there whole; one that was made otherwise or from other shards is refused."""
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
        if number >= len(sources):
            raise UsageError(
                f"{folder} holds {record.shard.path}, which is not among the {len(sources)} shards given; "
                "give the same shards, or build into another folder"
            )
        was, now = record.shard, sources[number]
        if record.matches(now):
            continue
        what = f"{now.path} was changed since it was tokenized into {folder}"
        if now.path != was.path:
            what = f"{folder} has {was.path} where {now.path} is given now"
        elif now.split != was.split:
            what = f"{now.path} was split by {was.split!r} for {folder}, and is to be split by {now.split!r} now"
        elif now.size != was.size:
            what += f" (from {was.size} to {now.size} bytes)"
        raise UsageError(f"{what}; restore it, or remove {folder} to build it anew")


def _build_parts(parts: Path, sources: Sequence[Shard], encoder: Encoder, workers: int) -> None:
    parts.mkdir(exist_ok=True)
    for left_over in [*parts.glob(".*.tmp"), *parts.parent.glob(".*.bin.*.tmp"), *parts.parent.glob(".ledger*.tmp")]:
        left_over.unlink()
    done = _records(parts)
    missing = [(number, shard) for number, shard in enumerate(sources) if number not in done]
    build = partial(build_part, parts, encoder)
    # Each worker has one core: the tokenizer must not start a thread for every core in each.
    env = {"TOKENIZERS_PARALLELISM": "false"}
    for _, record in carried_out(missing, build, lambda job: job[1].path, workers, "tokenize", env):
        log.info("tokenized %s: %d documents, %d tokens", record.shard.path, record.documents, record.tokens)


def _join_parts(folder: Path, new: Ledger, count: int) -> None:
    parts = folder / PARTS
    records = [ShardRecord.read(read_json(_part(parts, number, RECORD))) for number in range(count)]
    if not any(record.tokens for record in records):
        raise PalestraError(f"the {count} shards of {folder} have no text, from {records[0].shard.path} on")
    for name in (TOKENS, LOSS) if new.masked else (TOKENS,):
        with written(folder / name) as joined:
            for number in range(count):
                with _part(parts, number, name).open("rb") as part:
                    shutil.copyfileobj(part, joined, COPY_BYTES)
    with written(folder / ENDS) as joined:
        before = 0
        for number, record in enumerate(records):
            joined.write((np.fromfile(_part(parts, number, ENDS), END) + before).tobytes())
            before += record.tokens
    finished = replace(new, finished=True, shards=tuple(records))
    TokenStore(folder, finished)  # the sizes are right
    finished.write(folder)


def _records(parts: Path) -> dict[int, ShardRecord]:
    """The parts that are whole."""
    return {int(path.name.split(".")[0]): ShardRecord.read(read_json(path)) for path in parts.glob(f"[0-9]*.{RECORD}")}


def _part(parts: Path, number: int, name: str) -> Path:
    return parts / f"{number:06}.{name}"


def _batches(shard: Shard, text_key: str) -> Iterator[list[tuple[int, Row]]]:
    batch: list[tuple[int, Row]] = []
    characters = 0
    for number, row in numbered_rows(shard, text_key=text_key):
        batch.append((number, row))
        characters += sum(len(value) for value in row.values() if isinstance(value, str))
        if len(batch) == BATCH_ROWS or characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _encode(encoder: Encoder, shard: Shard, batch: list[tuple[int, Row]]) -> list[EncodedRow]:
    try:
        encoded = encoder([row for _, row in batch])
    except PalestraError as error:
        if len(batch) == 1:
            raise PalestraError(f"{shard.place(batch[0][0])}: {error}") from error
        for one in batch:  # which of them was it?
            _encode(encoder, shard, [one])
        raise
    if len(encoded) != len(batch):
        raise ValueError(f"{type(encoder).__name__} made {len(encoded)} documents of {len(batch)} rows")
    return encoded


def _mask(encoded: EncodedRow) -> np.ndarray:
    if encoded.loss is None:
        return np.ones(len(encoded.tokens), bool)
    if len(encoded.loss) != len(encoded.tokens):
        raise ValueError(f"a document has {len(encoded.tokens)} tokens and a mask of {len(encoded.loss)}")
    return np.asarray(encoded.loss, bool)


def _check_tokens(tokens: np.ndarray, encoder: Encoder, shard: Shard, batch: list[tuple[int, Row]]) -> None:
    if tokens.size and (tokens.min() < 0 or tokens.max() >= encoder.vocab_size):
        raise PalestraError(
            f"{shard.place(batch[0][0])} or a row soon after it: {encoder.tokenizer} gives tokens from {tokens.min()} "
            f"to {tokens.max()}, and its vocabulary has {encoder.vocab_size}"
        )
