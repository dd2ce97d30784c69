"""Names and layout: where trials and sessions lie under the folder of all runs, and how one is found again."""

import difflib
import math
import os
import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from palestra.errors import UsageError
from palestra.runs.store import clear_write_errors, read_json, write_bytes, write_json
from palestra.spec.renames import translated
from palestra.work.redact import hidden, redacted

ROOT = "runs"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True)
class SessionDir:
    """The folder of one seed: `…/sessions/<seed>`."""

    path: Path

    @property
    def seed(self) -> int:
        """The seed, which is the folder's name."""
        return int(self.path.name)

    @property
    def trial(self) -> "Trial":
        """The trial it belongs to."""
        return Trial(self.path.parent.parent)


@dataclass(frozen=True)
class Trial:
    """The folder of one experiment, `runs/<name>/<id>`, with a session for every seed."""

    path: Path

    @property
    def info(self) -> dict[str, Any]:
        """What trial.json says: name, id, seeds, created, command, spec."""
        info = read_json(self.path / "trial.json")
        return info | {"spec": translated(info["spec"])}

    def session(self, seed: int) -> SessionDir:
        """The folder of a seed's session, made or not."""
        return SessionDir(self.path / "sessions" / str(seed))

    def sessions(self) -> list[SessionDir]:
        """The sessions that have been made, by seed."""
        folder = self.path / "sessions"
        names = os.listdir(folder) if folder.is_dir() else []
        made = [self.session(int(name)) for name in names if name.isdecimal()]
        return sorted((one for one in made if _is_session(one.path)), key=lambda one: one.seed)

    def amend(self, *, seeds: Sequence[int], spec: Mapping[str, Any]) -> None:
        """Store the seeds and the spec of a trial that is resumed with changes."""
        info = redacted(self.info | {"seeds": list(seeds), "spec": dict(spec)})
        if info != self.info:
            with clear_write_errors(self.path):
                write_json(self.path / "trial.json", info)

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Store what the sessions came to as summary.json; what is not a number becomes null."""
        numbers = {k: None if isinstance(v, float) and math.isnan(v) else v for k, v in summary.items()}
        with clear_write_errors(self.path):
            write_json(self.path / "summary.json", numbers)


def new_trial(
    root: Path | str,
    name: str,
    *,
    seeds: Sequence[int],
    command: Sequence[str],
    spec: Mapping[str, Any] | None = None,
) -> Trial:
    """Make `root/<name>/<id>` with its trial.json, and point `root/<name>/latest` to it.

    With the spec in it, a trial that is killed before its first session was made can be resumed.
    """
    if not NAME.fullmatch(name):
        raise UsageError(
            f"{name!r} cannot name a run: use letters, digits, '.', '_' and '-', beginning with one of the first two"
        )
    now = datetime.now(UTC)
    with clear_write_errors(Path(root) / name):
        while True:
            trial = Trial(Path(root) / name / f"{now:%Y%m%dT%H%M%S}-{uuid.uuid4().hex[:4]}")
            try:
                trial.path.mkdir(parents=True)
                break
            except FileExistsError:
                if not (Path(root) / name).is_dir():  # a file stands where the folder should be
                    raise
        (trial.path / "plots").mkdir()
        info = {
            "name": name,
            "id": trial.path.name,
            "seeds": list(seeds),
            "created": now.isoformat(timespec="seconds"),
            "command": list(command),
            "spec": None if spec is None else dict(spec),
        }
        write_json(trial.path / "trial.json", redacted(info))
        write_bytes(trial.path.parent / "latest", f"{trial.path.name}\n".encode())
    return trial


def refuse_secrets(spec: Mapping[str, Any], what: str) -> None:
    """Refuse a spec that others must be able to read from a folder and that has secrets in it."""
    if found := hidden(spec):
        raise UsageError(
            f"{what} keeps its spec in its folder, for all who work on it, and {' and '.join(found)} has a secret in "
            "it: download it first, and give the path"
        )


def trials(root: Path | str = ROOT) -> list[Trial]:
    """All trials under a folder of runs, newest first."""
    found = [Trial(folder) for name in _folders(Path(root)) for folder in _folders(name) if _is_trial(folder)]
    return sorted(found, key=_age, reverse=True)


def find(ref: Path | str, root: Path | str = ROOT) -> Trial | SessionDir:
    """The run meant by a path, a name (its latest), name/id, or the beginning of an id if only one begins so."""
    for path in (Path(os.path.abspath(ref)), Path(os.path.abspath(root)) / ref):
        if _is_trial(path):
            return Trial(path)
        if _is_session(path):
            return SessionDir(path)
        if (path / "latest").is_file() or path.parent == Path(os.path.abspath(root)):
            latest = _latest(path)
            if latest is not None:
                return latest
    return _by_prefix(str(ref), Path(root))


def _by_prefix(ref: str, root: Path) -> Trial:
    known = {f"{trial.path.parent.name}/{trial.path.name}": trial for trial in trials(root)}
    if not known:
        raise UsageError(f"no run {ref!r}: there are no runs in {root.absolute()}")
    matches = [key for key in known if key.startswith(ref) if "/" in ref] or [
        key for key, trial in known.items() if ref and trial.path.name.startswith(ref)
    ]
    if len(matches) == 1:
        return known[matches[0]]
    if matches:
        shown = ", ".join(matches[:5]) + (", …" if len(matches) > 5 else "")
        raise UsageError(f"{ref!r} could be any of {len(matches)} runs: {shown}. Give more of the id.")
    names = sorted({trial.path.parent.name for trial in known.values()})
    near = difflib.get_close_matches(ref, [*names, *known], n=3, cutoff=0.5)
    hint = f"Did you mean {' or '.join(near)}?" if near else f"There are: {', '.join(names[:10])}."
    raise UsageError(f"no run {ref!r} in {root.absolute()}. {hint}")


def _latest(folder: Path) -> Trial | None:
    pointer = folder / "latest"
    if pointer.is_file():
        trial = folder / pointer.read_text().strip()
        if _is_trial(trial):
            return Trial(trial)
    # The pointer is missing or points to a run that was removed.
    made = [Trial(path) for path in _folders(folder) if _is_trial(path)]
    return max(made, key=_age, default=None)


def _age(trial: Trial) -> tuple[str, int]:
    """The second in the id, then when trial.json was written: at the start, unless it was resumed with changes."""
    return trial.path.name.partition("-")[0], (trial.path / "trial.json").stat().st_mtime_ns


def _folders(path: Path) -> Iterator[Path]:
    if path.is_dir():
        with os.scandir(path) as entries:
            yield from (path / entry.name for entry in entries if entry.is_dir())


def _is_trial(path: Path) -> bool:
    return os.path.isfile(path / "trial.json")


def _is_session(path: Path) -> bool:
    return os.path.isfile(path / "manifest.json")
