"""Runs in a bucket: their files, checkpoints left out, copied into the cache folder and kept up to date."""

import hashlib
import logging
import time
from pathlib import Path
from typing import Any

from palestra.data.cache import cache_root
from palestra.data.remote import open_filesystem, version_of
from palestra.runs.store import write_bytes

log = logging.getLogger("palestra.view")

EVERY = 5.0  # seconds
OVERLAP = 48  # bytes that must be the same where a grown file is continued
BLOCK = 64 << 20  # bytes of a request, and of the largest file that does not grow by lines


class Mirror:
    """A local copy of what lies under a URL; of a file that grew only the new bytes are fetched."""

    def __init__(self, url: str):
        self.url, self._versions = url, {}
        self.folder = cache_root() / "view" / "mirror" / hashlib.sha256(url.encode()).hexdigest()[:24]
        self.folder.mkdir(parents=True, exist_ok=True)
        opened: Any = open_filesystem(url)
        self._files, self._root = opened

    def follow(self) -> None:
        """Copy again and again, for ever."""
        while True:
            time.sleep(EVERY)
            try:
                self.update()
            except Exception as error:  # each service has errors of its own; the next round may succeed
                log.warning("%s could not be read (%s: %s); it is tried again", self.url, type(error).__name__, error)

    def update(self) -> None:
        """Fetch what is new or has changed, and remove what is gone."""
        self._files.invalidate_cache()
        listed = self._files.find(self._root, detail=True)
        there = {name: about for path, about in listed.items() if _is_wanted(name := path[len(self._root) + 1 :])}
        for name, about in there.items():
            if self._versions.get(name) != (version := (about["size"], version_of(about))):
                self._fetch(f"{self._root}/{name}", self.folder / name, about["size"])
                self._versions[name] = version
        for path in self.folder.rglob("*"):
            if path.is_file() and path.relative_to(self.folder).as_posix() not in there:
                path.unlink()

    def _fetch(self, source: str, target: Path, size: int) -> None:
        if target.suffix not in (".jsonl", ".txt") and target.name != "trace.json":
            if size <= BLOCK:
                write_bytes(target, self._files.cat_file(source))
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("a+b") as file:
            have = file.tell()
            file.seek(max(0, have - OVERLAP))
            if have > size or file.read() != self._files.cat_file(source, start=max(0, have - OVERLAP), end=have):
                have = 0  # a resume has truncated it
            file.truncate(have)
            for start in range(have, size, BLOCK):
                file.write(self._files.cat_file(source, start=start, end=min(size, start + BLOCK)))


def _is_wanted(name: str) -> bool:
    parts = name.split("/")
    hidden = any(not part or part[0] == "." for part in parts)
    return not hidden and ("checkpoints" not in parts or parts[-1].startswith("tokenizer"))
