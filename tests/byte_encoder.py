"""An encoder for the token store that needs no tokenizer: a token for each byte, and 256 to close a document."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from palestra.data.encoders import EncodedRow, Encoder
from palestra.errors import PalestraError


@dataclass(frozen=True)
class ByteEncoder(Encoder):
    tokenizer: str = "bytes"
    fingerprint: str = "b" * 64
    vocab_size: int = 257
    text_key: str = "text"
    masked: bool = False
    close: bool = True
    shift: int = 0
    """Added to every token."""
    seconds: float = 0.0
    """Slept for each batch."""
    log: str | None = None
    """A file that gets a line for each batch."""

    @property
    def recipe(self) -> dict[str, Any]:
        return {"encoder": "bytes", "shift": self.shift, "text_key": self.text_key}

    def __call__(self, rows: list[dict]) -> list[EncodedRow]:
        if self.log is not None:
            with Path(self.log).open("a") as file:
                file.write(f"{rows[0][self.text_key]}\n")
        time.sleep(self.seconds)
        return [self.document(row) for row in rows]

    def document(self, row: dict) -> EncodedRow:
        text = row.get(self.text_key)
        if not isinstance(text, str):
            raise PalestraError(f"expected text, found {text!r}")
        tokens = [*text.encode(), *([256] if self.close else [])]
        loss = [not 65 <= token <= 90 for token in tokens]  # capitals are the prompt
        shifted = np.array(tokens, np.int64) + self.shift
        return EncodedRow(shifted, len(text.encode()), loss if self.masked else None)
