"""Encoders: what turns rows into the documents of a token store, and all that decides their tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from palestra.data.readers import Row
from palestra.errors import PalestraError

if TYPE_CHECKING:
    from palestra.data.tokenizers import Tokenizer


@dataclass(frozen=True)
class Encoded:
    """A row as tokens."""

    tokens: Sequence[int] | np.ndarray
    num_bytes: int
    """UTF-8 bytes of the text that the tokens stand for."""
    loss: Sequence[bool] | np.ndarray | None = None
    """Whether each token is trained on; None where all are."""


class Encoder(Protocol):
    """Turns rows into documents. It is sent to worker processes: pickled."""

    @property
    def tokenizer(self) -> str:
        """The tokenizer's name, for people."""
        ...

    @property
    def fingerprint(self) -> str:
        """The tokenizer's fingerprint."""
        ...

    @property
    def vocab_size(self) -> int:
        """One more than the largest token."""
        ...

    @property
    def masked(self) -> bool:
        """Whether documents say which of their tokens are trained on."""
        ...

    @property
    def text_key(self) -> str:
        """The key under which a text file gives its documents."""
        ...

    @property
    def recipe(self) -> dict[str, Any]:
        """All else that decides the tokens, as JSON; kept in the ledger and compared."""
        ...

    def __call__(self, rows: list[Row]) -> list[Encoded]:
        """One document for each row; a row that cannot be one is a PalestraError that says what was expected."""
        ...


@dataclass(frozen=True)
class TextEncoder:
    """Plain text under one key, each document closed by a token."""

    folder: str
    """Where the tokenizer is loaded from, once in each process."""
    tokenizer: str
    fingerprint: str
    vocab_size: int
    text_key: str
    opening: tuple[int, ...]
    """What every text begins with, such as Llama's BOS."""
    closing: int | None
    """The token put after each document, where the tokenizer has one."""

    @classmethod
    def load(cls, folder: Path | str, *, text_key: str = "text") -> "TextEncoder":
        """With the tokenizer of a folder; documents are closed by its end-of-text token, where it has one."""
        tokenizer = cached_tokenizer(str(folder))
        names = (tokenizer.name, tokenizer.fingerprint, tokenizer.vocab_size)
        return cls(str(folder), *names, text_key, tokenizer.beginning, tokenizer.eos)

    @property
    def masked(self) -> bool:
        """Every token is trained on."""
        return False

    @property
    def recipe(self) -> dict[str, Any]:
        """The key of the text, and the tokens around it."""
        return {"encoder": "text", "text_key": self.text_key, "opening": self.opening, "closing": self.closing}

    def __call__(self, rows: list[Row]) -> list[Encoded]:
        """The tokens of the texts."""
        texts = [_text(row, self.text_key) for row in rows]
        closing = [] if self.closing is None else [self.closing]
        encoded = cached_tokenizer(self.folder).encode_all(texts)
        return [
            Encoded([*self.opening, *tokens, *closing], len(text.encode()))
            for text, tokens in zip(texts, encoded, strict=True)
        ]


def _text(row: Row, key: str) -> str:
    text = row.get(key)
    if not isinstance(text, str):
        found = f"{type(text).__name__} there" if key in row else f"only {', '.join(row) or 'no keys'}"
        raise PalestraError(f"expected a string under {key!r}, found {found}")
    return text


@lru_cache(maxsize=2)
def cached_tokenizer(folder: str) -> "Tokenizer":
    """The tokenizer of a folder, loaded once in each process."""
    from palestra.data.tokenizers import Tokenizer

    return Tokenizer.load(Path(folder))
