"""What may be seen: runs under the folders given, files of a run, and nothing else."""

import os
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from palestra.errors import PalestraError, UsageError
from palestra.runs.run import Run

DEPTH = 4  # levels of folders under one that was given in which runs are looked for: NAME/ID, NAME/ID/trials/NUMBER
MARK = re.compile(r"(trial|tokenizer|search|speedrun|report-.*)\.json|benchmarks\.jsonl")
DATA = re.compile(r"ledger\.json|(?!benchmarks\.).*\.(jsonl|parquet|arrow)(\.gz|\.zst)?")
SECONDS = 1.0  # that a list of folders is used again


DAMAGED = (OSError, KeyError, TypeError, ValueError, AttributeError, IndexError, RecursionError)
"""What reading a file raises that is gone, or not what it should be."""


class NotThere(PalestraError):
    """What a request names does not exist, or no longer."""


class Places:
    """The folders that are served. A run is named by its place under them, and found by it in the list of all."""

    def __init__(self, roots: Sequence[Path]):
        self.roots = [root.resolve() for root in roots]
        for root in self.roots:
            if not root.is_dir():
                raise UsageError(f"{root} is not a folder: name a folder of runs, or a run")
        self._known: tuple[float, list[tuple[Path, Path]]] = (-SECONDS, [])

    def _walk(self) -> list[tuple[Path, Path]]:
        """The files that mark runs and other things, each with the folder given."""
        if time.monotonic() - self._known[0] > SECONDS:
            found = [(root, path) for root in self.roots for path in _marks(root, DEPTH)]
            self._known = time.monotonic(), found
        return self._known[1]

    def runs(self) -> dict[str, Path]:
        """The folders of all trials by name, newest first."""
        named: dict[str, Path] = {}
        for root, path in ((root, file.parent) for root, file in self._walk() if file.name == "trial.json"):
            parts = path.relative_to(root).parts
            name = "/".join(parts if len(parts) > 1 else path.parts[-2:])
            named.setdefault(name if named.get(name, path) == path else f"{root.name}/{name}", path)
        return dict(sorted(named.items(), key=lambda item: (item[1].name, item[0]), reverse=True))

    def files(self) -> list[Path]:
        """The files that mark a search, a pipeline, a speedrun or benchmarks."""
        others = [path for _, path in self._walk() if MARK.fullmatch(path.name)]
        return sorted({path for path in others if path.name not in ("trial.json", "tokenizer.json")})

    def data(self) -> dict[str, Path]:
        """Files of rows, and the folders of token stores, by name."""
        found = [(root, path) for root, path in self._walk() if DATA.fullmatch(path.name)]
        named = [(root, path.parent if path.name == "ledger.json" else path) for root, path in found]
        return {f"{root.name}/{path.relative_to(root).as_posix()}": path for root, path in named}

    def tokenizers(self) -> list[Path]:
        """Folders of tokenizers that are not in a run."""
        return [path.parent for _, path in self._walk() if path.name == "tokenizer.json"]

    def run(self, name: str) -> Run:
        """The run of a name."""
        path = self.runs().get(name)
        if path is None or not (path / "trial.json").is_file():
            raise NotThere(f"there is no run {name!r} here: it was removed, or the view was started without its folder")
        return checked(path)

    def session(self, name: str, seed: int | None = None) -> Run:
        """The session of a seed, or the first."""
        sessions = self.run(name).sessions
        chosen = [session for session in sessions if seed in (None, session.seed)]
        if not chosen:
            raise NotThere(f"{name} has no session of seed {seed}" if sessions else f"{name} has not begun yet")
        return chosen[0]


def checked(path: Path) -> Run:
    """The run in a folder, of which nothing that is read unasked is a link: it could lead anywhere."""
    sessions = path / "sessions"
    for folder in (path, sessions, *(sessions.iterdir() if sessions.is_dir() else ())):
        for entry in os.scandir(folder) if folder.is_dir() else ():
            if entry.is_symlink() and (folder != path or entry.name.endswith(("sessions", ".json"))):
                raise NotThere(f"{entry.path} is a link, which the view does not follow: copy the file there")
    return Run(path)


def inside(folder: Path, name: str) -> Path:
    """The file `name` of a folder; nothing hidden, and nothing that a link takes out of the folder."""
    parts = name.split("/")
    if not name or "\\" in name or "\0" in name or any(part in ("", "..") or part[0] == "." for part in parts):
        raise NotThere(f"{name!r} is not the name of a file here")
    path = folder.joinpath(*parts)
    if not path.resolve().is_relative_to(folder.resolve()) or not path.is_file():
        raise NotThere(f"there is no file {name!r} here")
    return path


def _marks(folder: Path, depth: int) -> Iterator[Path]:
    try:
        with os.scandir(folder) as entries:
            names = {entry.name: entry for entry in entries if entry.name[0] != "." and not entry.is_symlink()}
    except OSError:  # removed meanwhile, or not ours to read
        return
    yield from (folder / name for name in names if MARK.fullmatch(name) or DATA.fullmatch(name))
    if depth and "trial.json" not in names:
        for name, entry in names.items():
            if entry.is_dir(follow_symlinks=False):
                yield from _marks(folder / name, depth - 1)
