"""The exact bytes behind a token's printed form, as the decoder of a tokenizer.json spells them."""

import re
from dataclasses import dataclass
from typing import Any

from palestra.errors import UsageError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable character for each byte: Latin-1 where it prints, U+0100 and on for the other 68 bytes."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}


_BYTES = _byte_alphabet()


@dataclass(frozen=True)
class Spelling:
    """How printed tokens become bytes, and how many spaces the start of a text has too many.

    Two families cover the language models: byte-level (GPT-2, Llama 3, Qwen), where each printed character is a byte,
    and SentencePiece-like (Llama 2, Mistral), where a sign stands for the space, `<0x0A>` for a byte, and the space
    put before every text is taken away again.
    """

    byte_level: bool
    replacements: tuple[tuple[str, str], ...]
    byte_fallback: bool
    leading_spaces: int

    def bytes_of(self, printed: str) -> bytes:
        """The bytes of one ordinary token (an added token is its own text)."""
        if self.byte_level:
            if all(character in _BYTES for character in printed):
                return bytes(_BYTES[character] for character in printed)
            return printed.encode()
        if self.byte_fallback and (byte := _BYTE_TOKEN.fullmatch(printed)):
            return bytes([int(byte[1], 16)])
        for old, new in self.replacements:
            printed = printed.replace(old, new)
        return printed.encode()


def read_spelling(decoder: dict[str, Any] | None) -> Spelling:
    """The spelling that a tokenizer.json's `decoder` describes; one that is not understood is refused by name."""
    steps = [] if decoder is None else decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    byte_level, fallback, spaces, replacements = False, False, 0, []
    for step in steps:
        match step:
            case {"type": "ByteLevel"}:
                byte_level = True
            case {"type": "ByteFallback"}:
                fallback = True
            case {"type": "Fuse"}:
                pass
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
                replacements.append((old, new))
            case {"type": "Strip", "content": " ", "start": int(start), "stop": 0}:
                spaces = start
            case _:
                raise _refusal(step["type"])
    if not steps:
        raise _refusal("none")
    return Spelling(byte_level, tuple(replacements), fallback, spaces)


def _refusal(kind: str) -> UsageError:
    return UsageError(
        f"tokenizer.json has the decoder {kind!r}, whose text cannot be put together piece by piece. Supported are "
        "ByteLevel, and Replace (of a string), ByteFallback, Fuse and Strip (of leading spaces) in a Sequence"
    )
