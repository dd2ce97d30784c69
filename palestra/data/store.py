"""The token store: documents as one memory-mapped array of token ids, with a ledger of what it was made from.

A folder with
    tokens.bin   all tokens, end to end (uint16 where the vocabulary fits, else uint32; little endian)
    ends.bin     where each document ends in it (int64)
    loss.bin     whether each token is trained on (one byte each), for data with prompts and answers
    ledger.json  the tokenizer and recipe, the shards with their documents, tokens and bytes; written last
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from palestra.data.readers import Shard
from palestra.errors import PalestraError, UsageError
from palestra.runs.store import read_json, write_json

FORMAT = 1
LEDGER, TOKENS, ENDS, LOSS = "ledger.json", "tokens.bin", "ends.bin", "loss.bin"
PARTS = "parts"  # while the store is built: the same files of each shard
END, FLAG = np.dtype("<i8"), np.dtype("?")  # on disk


@dataclass(frozen=True)
class ShardRecord:
    """A shard as it was when it was tokenised, and what it gave."""

    shard: Shard
    checksum: str | None
    """SHA-256 of a local file; one that is elsewhere is known by its stamp."""
    documents: int
    tokens: int
    num_bytes: int
    """UTF-8 bytes of the text that the tokens stand for."""

    @classmethod
    def read(cls, data: dict[str, Any]) -> "ShardRecord":
        """The record in a ledger or beside a part."""
        fields: dict[str, Any] = {**data, "shard": Shard(**data["shard"])}
        return cls(**fields)

    def matches(self, shard: Shard) -> bool:
        """Whether a shard has the content that was tokenised, even where a local file was moved or copied since."""
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

    @classmethod
    def read(cls, folder: Path) -> "Ledger | None":
        """The ledger of a folder; None where there is none."""
        if not (folder / LEDGER).exists():
            return None
        data = read_json(folder / LEDGER)
        if data.pop("format", None) != FORMAT:
            raise PalestraError(f"{folder} is a token store of another format than {FORMAT}; remove it and build again")
        fields: dict[str, Any] = {**data, "shards": tuple(map(ShardRecord.read, data["shards"]))}
        return cls(**fields)

    def write(self, folder: Path) -> None:
        """Write it, whole at once."""
        write_json(folder / LEDGER, {"format": FORMAT, **asdict(self)})

    def check_tokenizer(self, fingerprint: str, tokenizer: str, folder: Path) -> None:
        """Refuse another tokenizer than the store's, naming both."""
        if fingerprint != self.fingerprint:
            raise UsageError(
                f"{folder} was tokenised with {self.tokenizer} ({self.fingerprint[:12]}), and {tokenizer} "
                f"({fingerprint[:12]}) gives other tokens; use the store's tokenizer, or build into another folder"
            )

    def check_recipe(self, wanted: "Ledger", folder: Path) -> None:
        """Refuse a store that was made otherwise than is wanted."""
        self.check_tokenizer(wanted.fingerprint, wanted.tokenizer, folder)
        # As JSON, since one of them has been on disk: a tuple is a list there.
        here, there = (json.loads(json.dumps({**one.recipe, "masked": one.masked})) for one in (self, wanted))
        for key in sorted({*here, *there}):
            if here.get(key) != there.get(key):
                raise UsageError(
                    f"{folder} was built with {key} = {here.get(key)!r}, and {there.get(key)!r} is asked for; "
                    "build into another folder, or remove this one"
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

    @classmethod
    def open(cls, folder: Path | str, *, fingerprint: str | None = None, tokenizer: str = "this one") -> "TokenStore":
        """Open a finished store; where a tokenizer's fingerprint is given (and its name), only one made with it."""
        folder = Path(folder)
        ledger = Ledger.read(folder)
        if ledger is None:
            raise UsageError(f"there is no token store at {folder}")
        if not ledger.finished:
            raise PalestraError(f"the token store {folder} is not finished; build it again to go on where it stopped")
        if fingerprint is not None:
            ledger.check_tokenizer(fingerprint, tokenizer, folder)
        return cls(folder, ledger)

    @property
    def fingerprint(self) -> str:
        """The fingerprint of its tokenizer."""
        return self.ledger.fingerprint

    def __len__(self) -> int:
        """How many documents."""
        return len(self.ends)

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
            f"{path} has {size} bytes and should have {length * dtype.itemsize}: it was cut off or changed; "
            "copy the store again, or remove it and build it"
        )
    return np.memmap(path, dtype, mode="r", shape=(length,))
