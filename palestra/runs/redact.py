"""Secrets stay out of what is written: the values of environment variables whose names look secret are replaced.

As a script it is a filter: `python redact.py LOG` appends what it reads on stdin to LOG, redacted. A worker prints
through one, so that also what its children print, and what a killed one said last, is seen to. It runs without
site-packages: nothing but the standard library is imported here.
"""

import json
import os
import re
import sys
from collections.abc import Iterable, Mapping
from typing import Any

SECRET = re.compile(
    r"TOKEN(?!IZ)|KEY(?!BOARD|MAP)|SECRET|PASSW|PASSPHRASE|CREDENTIAL|AUTH(?!OR)|(?:^|_)P(?:AT|WD)$", re.IGNORECASE
)
"""What the name of a variable that holds a secret has in it."""
SHORTEST = 8
"""Values of fewer characters are words that texts are full of (`true`, `enabled`), not secrets that can be hidden."""
REDACTED = "(redacted)"


def secrets(environment: Mapping[str, str] | None = None) -> list[str]:
    """The values to hide, in each form in which they get printed; the longest first, as one may be part of another."""
    found: set[str] = set()
    for name, value in (os.environ if environment is None else environment).items():
        value = value.strip()
        # A file of credentials, or the socket of an agent, is a place and no secret.
        if name == "PWD" or not SECRET.search(name) or len(value) < SHORTEST or os.path.exists(value):
            continue
        lines = [line.strip() for line in value.splitlines()]  # a PEM key is printed line by line
        for text in {value, *(line for line in lines if len(line) >= SHORTEST)}:
            found |= {text, json.dumps(text)[1:-1], json.dumps(text, ensure_ascii=False)[1:-1], repr(text)[1:-1]}
    return sorted(found, key=len, reverse=True)


def redact(text: str) -> str:
    """The text without secrets."""
    for secret in secrets():
        text = text.replace(secret, REDACTED)
    return text


def redacted(value: Any) -> Any:
    """Plain data without secrets: in texts, keys and values, at any depth."""
    known = secrets()
    return _redacted(value, known) if known else value


def _redacted(value: Any, known: list[str]) -> Any:
    if isinstance(value, str):
        for secret in known:
            value = value.replace(secret, REDACTED)
        return value
    if isinstance(value, Mapping):
        return {_redacted(key, known): _redacted(item, known) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_redacted(item, known) for item in value]
    return value


class Stream:
    """Redacts bytes that come in pieces: `feed` gives what is certain, `rest` what was held back as half a secret."""

    def __init__(self, hidden: Iterable[str]):
        self.hidden = [secret.encode(errors="surrogateescape") for secret in hidden]
        self.held = b""

    def feed(self, data: bytes) -> bytes:
        """What can be written now."""
        data = self.held + data
        for secret in self.hidden:
            data = data.replace(secret, REDACTED.encode())
        keep = max((_overlap(data, secret) for secret in self.hidden), default=0)
        self.held = data[len(data) - keep :]
        return data[: len(data) - keep]

    def rest(self) -> bytes:
        """What is left at the end."""
        held, self.held = self.held, b""
        return held


def _overlap(data: bytes, secret: bytes) -> int:
    """How many bytes at the end of the data are the beginning of the secret."""
    return next((size for size in range(min(len(data), len(secret) - 1), 0, -1) if data.endswith(secret[:size])), 0)


def main(log: str) -> None:
    """Filter stdin into a file until all who write are gone."""
    stream = Stream(secrets())
    with open(log, "ab", buffering=0) as file:
        while data := os.read(0, 1 << 16):
            file.write(stream.feed(data))
        file.write(stream.rest())


if __name__ == "__main__":
    main(sys.argv[1])
