"""Local files and folders that a step reads and no other step made: they count in its address by what is in them.

A value is a path where it is a `Path`, or text with a slash or an ending (`books.jsonl`, `data/*.txt`), or stands under
a key of `KEYS`, and something is there. Hashes are kept in `PALESTRA_CACHE/hashes`, for as long as a file has the size
and the times that it had.
"""

import glob
import hashlib
import json
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path, PurePath

from palestra.data.cache import cache_root, file_sha256
from palestra.runs.store import write_bytes

KEYS = frozenset(("path", "source", "init", "tokenizer", "model", "order", "replay"))
"""Under these a text without a slash is a path too, if there is a file or folder of that name."""
RECENT_NS = 2_000_000_000
"""A file that changed just now may change again without another time: clocks of file systems tick coarsely."""


def content_hash(value: str | PurePath, key: str) -> str | None:
    """A hash of what is at a path, the names inside a folder included; None where the value is no path."""
    text = os.fspath(value)
    if "://" in text or len(text) > 4096 or not text.isprintable() or not re.search(r"\w", text):  # such as "/"
        return None
    if not (isinstance(value, PurePath) or key in KEYS or "/" in text or PurePath(text).suffix):
        return None
    path = os.path.expanduser(text)
    found = [path] if os.path.exists(path) else sorted(glob.glob(path, recursive=True))
    return _hash([(os.path.basename(name), _of(Path(name))) for name in found]) if found else None


def _of(path: Path) -> str:
    """The hash of one file or folder; only what changed since the last time is read."""
    kept = cache_root() / "hashes" / hashlib.sha256(os.fsencode(path.resolve())).hexdigest()[:32]
    known = json.loads(kept.read_bytes()) if kept.exists() else {}
    hashes: list[tuple[str, str]] = []
    now: dict[str, list[object]] = {}
    for name, file in [("", path)] if path.is_file() else _files(path):
        about = file.stat()
        stamp = [about.st_size, about.st_mtime_ns, about.st_ctime_ns]
        digest = known[name][1] if known.get(name, [None])[0] == stamp else file_sha256(file)
        hashes.append((name, digest))
        if time.time_ns() - max(stamp[1:]) > RECENT_NS:
            now[name] = [stamp, digest]
    if now != known:
        write_bytes(kept, json.dumps(now).encode())
    return _hash(hashes)


def _files(folder: Path) -> Iterator[tuple[str, Path]]:
    """The files of a folder but hidden ones, in order."""
    for where, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        files = [Path(where, name) for name in sorted(names) if not name.startswith(".")]
        yield from ((file.relative_to(folder).as_posix(), file) for file in files if file.is_file())


def _hash(parts: list[tuple[str, str]]) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()
