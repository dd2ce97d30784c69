"""The steps `tokenize` and `train_tokenizer`: documents to a token store, and to a vocabulary."""

import itertools
import re
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Literal

from palestra.data.readers import shards
from palestra.data.steps.shards import Drop, Where, documents, same_recipe, sources, write_counts
from palestra.errors import MissingExtra, PalestraError, UsageError
from palestra.spec.model import Execution

if TYPE_CHECKING:
    from palestra.data.encoders import Encoder

HELD_OUT = frozenset(("test", "validation", "valid", "val", "eval", "dev", "holdout", "heldout"))


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
    to be tested on is refused unless `allow_held_out`.
    """
    from palestra.data.sources import resolve
    from palestra.data.tokenize import build_store

    found = shards(source, split=split)
    if not allow_held_out:
        _refuse_held_out([file.path for file in found])
    began = time.perf_counter()
    folder = resolve(str(tokenizer), kind="model", allow=("*.json", "*.jinja", "*.txt", "*.model"))
    store = build_store(out, found, _encoder(folder, format, text_key), workers=workers)
    records = store.ledger.shards
    said = [{"rows_in": one.documents, "rows_out": one.documents} for one in records]
    counts = {"tokens": store.num_tokens, "bytes": store.num_bytes, "tokenizer": store.ledger.tokenizer}
    write_counts(out, "tokenize", said, **counts, seconds=round(time.perf_counter() - began, 3))


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
    train_bpe = _tokenizers().train_bpe
    rows = (
        row for one in sources(source, split=split) for row in documents(one, text_key) if not isinstance(row, Drop)
    )
    count = itertools.count()
    made = train_bpe(
        (row["text"] for row, _ in zip(itertools.islice(rows, max_documents), count, strict=False)), vocab_size
    )
    if not (read := next(count)):
        raise PalestraError(f"{source} has no documents to make a tokenizer of")
    made.save(out)
    said = [{"rows_in": read, "seconds": time.perf_counter() - began}]
    write_counts(out, "train_tokenizer", said, vocab_size=made.vocab_size)


def _encoder(folder: Path, format: str, text_key: str) -> "Encoder":
    _tokenizers()
    from palestra.data.encoders import ChatEncoder, TextEncoder

    if format == "text":
        return TextEncoder.load(folder, text_key=text_key)
    return ChatEncoder.load(folder, format="chat" if format == "chat" else "plain")


def _tokenizers() -> ModuleType:
    try:
        from palestra.data import tokenizers
    except ImportError as error:
        raise MissingExtra("tokenizing", "train") from error
    return tokenizers


def _refuse_held_out(paths: Sequence[str]) -> None:
    """A file, or one of the two folders that it is in, must not be named like something to test on."""
    for path in paths:
        *folders, name = path.split("/")
        said = [*(folder.lower() for folder in folders[-2:]), *re.split(r"[^a-z]+", name.lower())]
        if found := HELD_OUT.intersection(said):
            raise UsageError(
                f"{path} says {min(found)!r} in its name, and training on what is to be tested on spoils the test; "
                "give the training part alone, or allow_held_out=True if it is meant"
            )
