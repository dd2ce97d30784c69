"""Redacts secrets: values of environment variables with secret names, secrets in URLs, and known key formats.

As a script it is a filter: its stdin up to the first NUL names a log, and the rest is appended to that, redacted. A
worker prints through one, so that the output of its children and the last output of a killed task are redacted too. It
runs without site-packages: only the standard library is imported here.
"""

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

SECRET = re.compile(
    r"TOKEN(?!IZ)|KEY(?!BOARD|MAP)|SECRET|PASSW|PASSPHRASE|CREDENTIAL|AUTH(?!OR)|(?:^|_)P(?:AT|WD)$"
    r"|CONNECTION_STRING|WEBHOOK|(?:^|_)DSN$",
    re.IGNORECASE,
)
"""In the name of a variable that holds a secret."""
SHORTEST = 8
"""Shorter values are common words (`true`, `enabled`), not secrets."""
REDACTED = "(redacted)"
PASSWORD = re.compile(r"(\b[a-z][a-z0-9+.-]*://[^\s/?#@:\"'<>]*:)[^\s/?#\"'<>]+(?=@)", re.IGNORECASE | re.ASCII)
ACCOUNT = re.compile(r"(\bhttps?://)[^\s/?#@:\"'<>]+(?=@)", re.IGNORECASE | re.ASCII)
"""`https://TOKEN@host`; in other schemes a name alone is no secret: `abfs://container@account`, `ssh://git@host`."""
QUERY = re.compile(r"((?:[?&]|&amp;|\\u0026)([\w.%\[\]-]+)=)[^\s&#\"'<>\\]+", re.ASCII)
SIGNATURE = re.compile(r"signature|^sig$", re.IGNORECASE)
"""Names of signatures in signed URLs, besides those of `SECRET` (`X-Amz-Credential`, `token`)."""
FORM = re.compile(
    r"""(?<![A-Za-z0-9_])(?:
    hf_[A-Za-z0-9]{30,} | (?:AKIA|ASIA)[A-Z0-9]{16}(?![A-Za-z0-9]) | AIza[\w-]{35} | npm_[A-Za-z0-9]{36}
    | gh[pousr]_[A-Za-z0-9]{36,} | github_pat_\w{50,} | glpat-[\w-]{20,} | xox[abeprs]-[A-Za-z0-9-]{10,}
    | sk-(?:(?:proj|ant|svcacct|admin|or)-[\w-]{20,} | [A-Za-z0-9]{32,})
    | eyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]{8,}  # a JWT: two parts are JSON in Base64
    )""",
    re.VERBOSE | re.ASCII,
)
"""Key formats of services. Hashes, run ids and model names do not match."""
FORM_HINTS = ("hf_", "AKIA", "ASIA", "AIza", "npm_", "gh", "github_pat_", "glpat-", "xox", "sk-", "eyJ")
"""A text without any of these has no match of `FORM`, and looking for them is faster."""
PLACED = re.compile(
    r"""(
    \bhttps://(?:hooks\.slack\.com/|(?:\w+\.)?discord(?:app)?\.com/api/webhooks/|[\w.-]+\.webhook\.office\.com/)
    | \b(?:AccountKey|SharedAccessKey|SharedAccessSignature|Password|Pwd)=  # in connection strings
    | \b(?:[A-Z0-9]+_)*(?:TOKEN|KEY|SECRET|PASSWORD|CONNECTION_STRING)\s?["']?[=:]\s?["']?(?=[^\s"']*[0-9])
    )[^\s"'<>;,()&\\]{12,}""",
    re.VERBOSE | re.ASCII,
)
"""The path of a webhook URL, or the value assigned to a name in capitals, as in a diff of `.env`."""
PLACED_HINTS = ("https://", "Key=", "Signature=", "Password=", "Pwd=", "TOKEN", "KEY", "SECRET", "PASSWORD", "_STRING")
"""The same for `PLACED`."""
NUMBERS = frozenset((int, float, bool))
WORD = 48
"""Shorter texts are remembered."""
LONGEST_WORD = 8192
"""The most bytes without a space to hold back, as they may be half a URL."""


def secrets(environment: Mapping[str, str] | None = None) -> list[str]:
    """The values to hide, in every form they are printed in; longest first, as one may be part of another."""
    forms: set[str] = set()
    for name, value in (os.environ if environment is None else environment).items():
        value = value.strip()
        # A credentials file or an agent's socket is a path, not a secret.
        if name == "PWD" or not SECRET.search(name) or len(value) < SHORTEST or os.path.exists(value):
            continue
        lines = [line.strip() for line in value.splitlines()]  # a PEM key is printed line by line
        for text in {value, *(line for line in lines if len(line) >= SHORTEST)}:
            forms |= {text, json.dumps(text)[1:-1], json.dumps(text, ensure_ascii=False)[1:-1], repr(text)[1:-1]}
    return sorted(forms, key=len, reverse=True)


def redact(text: str, known: Iterable[str] | None = None) -> str:
    """The text without secrets; `known` are values to hide, by default those of the environment."""
    for secret in secrets() if known is None else known:
        text = text.replace(secret, REDACTED)
    return _known_word(text) if len(text) < WORD else _without_likely_secrets(text)


def redacted(value: Any, known: Sequence[str] | None = None) -> Any:
    """Plain data without secrets, in keys and values at any depth."""
    known = secrets() if known is None else known
    if isinstance(value, str):
        return redact(value, known)
    if isinstance(value, Mapping):
        return {redacted(key, known): redacted(item, known) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return value if _numbers(value) else [redacted(item, known) for item in value]
    return value


def _numbers(values: Sequence[Any]) -> bool:
    """Whether there is nothing else, as in the tokens of a rollout: not one by one, but by what can be added."""
    try:
        return type(values[0]) in NUMBERS and type(sum(values)) in NUMBERS if values else True
    except (TypeError, OverflowError):
        return False


def hidden(value: Any, path: str = "") -> list[str]:
    """The dotted paths of secrets in plain data."""
    if isinstance(value, Mapping):
        return [place for key, item in value.items() for place in hidden(item, f"{path}.{key}" if path else str(key))]
    if isinstance(value, list | tuple):
        return [place for index, item in enumerate(value) for place in hidden(item, f"{path}.{index}")]
    return [path] if isinstance(value, str) and redact(value) != value else []


def _without_likely_secrets(text: str) -> str:
    if any(hint in text for hint in FORM_HINTS):
        text = FORM.sub(REDACTED, text)
    if any(hint in text for hint in PLACED_HINTS):
        text = PLACED.sub(rf"\1{REDACTED}", text)
    if "://" in text:
        text = ACCOUNT.sub(rf"\1{REDACTED}", PASSWORD.sub(rf"\1{REDACTED}", text))
    return QUERY.sub(_parameter, text) if "=" in text else text


_known_word = lru_cache(4096)(_without_likely_secrets)
"""For the names of fields, which are the same in every row."""


def _parameter(match: re.Match[str]) -> str:
    return match[1] + REDACTED if SECRET.search(match[2]) or SIGNATURE.search(match[2]) else match[0]


class Terminal:
    """A text stream that redacts each text written to it."""

    def __init__(self, stream: Any):
        self._stream = stream

    def write(self, text: str) -> int:
        self._stream.write(redact(text))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class Stream:
    """Redacts a byte stream in pieces: `feed` returns what is complete, `rest` what was held back.

    Held back are the last word, which may be half a URL, and what may be the beginning of a known secret.
    """

    def __init__(self, hidden: Iterable[str]):
        self.hidden = [secret.encode(errors="surrogateescape") for secret in hidden]
        self.held = b""

    def feed(self, data: bytes) -> bytes:
        """What can be written now."""
        data = self.held + data
        for secret in self.hidden:
            data = data.replace(secret, REDACTED.encode())
        end = len(data) - max((_overlap(data, secret) for secret in self.hidden), default=0)
        last = 1 + max(data.rfind(space, 0, end) for space in (b" ", b"\n", b"\r", b"\t"))  # where the last word begins
        end = last if end - last <= LONGEST_WORD else end
        self.held = data[end:]
        return _without_likely_secrets(data[:end].decode("latin-1")).encode("latin-1")

    def rest(self) -> bytes:
        """What is left at the end."""
        held, self.held = self.held, b""
        return _without_likely_secrets(held.decode("latin-1")).encode("latin-1")


def _overlap(data: bytes, secret: bytes) -> int:
    """How many bytes at the end of the data are the beginning of the secret."""
    return next((size for size in range(min(len(data), len(secret) - 1), 0, -1) if data.endswith(secret[:size])), 0)


def main() -> None:
    """Filter stdin into the file that it names first, until all writers have closed it."""
    stream, data = Stream(secrets()), b""
    while b"\0" not in data:
        more = os.read(0, 1 << 16)
        if not more:  # the worker ended without another task
            return
        data += more
    log, _, data = data.partition(b"\0")
    with open(os.fsdecode(log), "ab", buffering=0) as file:
        file.write(stream.feed(data))
        while data := os.read(0, 1 << 16):
            file.write(stream.feed(data))
        file.write(stream.rest())


if __name__ == "__main__":
    main()
