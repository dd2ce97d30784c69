"""The list of runs and the page of one: state, progress, headline, spec with differences, files, checkpoints."""

import mimetypes
import os
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from palestra.errors import PalestraError
from palestra.runs import checkpoint as checkpoints
from palestra.runs.run import Run, measured
from palestra.runs.session import read_status, state_of
from palestra.runs.store import read_json, write_json
from palestra.spec.load import ABSENT, Difference, differences
from palestra.view.lines import LineFile
from palestra.view.places import DAMAGED, Places, checked
from palestra.view.series import FILE, parsed, plain

NOTES = "notes.json"
HAS = (FILE, "rollouts.jsonl", "answers.jsonl", "samples.jsonl", "trace.json", "log.txt")
UNITS = {"steps": "step", "frames": "frame", "tokens": "tokens"}
SPARK = 40  # points
SPARK_BYTES = 1 << 16
FILES = 2000


def differing(changes: list[Difference]) -> list[dict[str, Any]]:
    """Differences as JSON; a side that is absent has no key."""
    sides = [{"path": one.path, "before": one.before, "after": one.after} for one in changes]
    return [{key: value for key, value in side.items() if value is not ABSENT} for side in sides]


class RunList:
    """Rows of the list of runs; a row is made again only when a file that it shows has changed."""

    def __init__(self, places: Places):
        self.places = places
        self._rows: dict[str, tuple[Any, dict[str, Any]]] = {}
        self._changes: dict[tuple[str, str], tuple[Any, Any, list[Any]]] = {}

    def rows(self) -> list[dict[str, Any]]:
        """All runs, newest first, each with its difference to the next older of its name."""
        before, rows = self._rows, {}
        for name, path in self.places.runs().items():
            stamp, (known, row) = _stamp(path), before.get(name, (None, {}))
            try:
                if known != stamp or row["state"] == "running":
                    row = _row(name, checked(path))
            except (PalestraError, *DAMAGED) as error:
                row = {"run": name, "name": path.parent.name, "id": path.name, "state": "unreadable"}
                row["reason"] = str(error)
            rows[name] = stamp, row
        self._rows = rows
        older: dict[str, dict[str, Any]] = {}
        listed = []
        for _, row in reversed(rows.values()):
            content = {key: value for key, value in row.items() if key != "spec"}
            if row.get("spec"):
                if (last := older.get(row["name"])) is not None:
                    content |= {"versus": last["run"], "diff": self._diff(last, row)}
                older[row["name"]] = row
            listed.append(content)
        return listed[::-1]

    def _diff(self, before: dict[str, Any], after: dict[str, Any]) -> list[Any]:
        key, (a, b) = (before["run"], after["run"]), (before["spec"], after["spec"])
        if (known := self._changes.get(key)) is None or known[0] is not a or known[1] is not b:
            with suppress(RecursionError):  # nested without end
                known = self._changes[key] = a, b, differing(differences(a, b))
        return [] if known is None else known[2]


def _stamp(path: Path) -> list[tuple[int, int]]:
    """Changes when something that the row shows does."""
    files, stamps = [f"{path}/trial.json", f"{path}/{NOTES}"], []
    with suppress(OSError):
        seeds = sorted(os.listdir(f"{path}/sessions"))
        files += [f"{path}/sessions/{seed}/{file}" for seed in seeds for file in ("status.json", "manifest.json")]
    for file in files:
        with suppress(OSError):  # not there, or no longer
            about = os.stat(file)
            stamps.append((about.st_mtime_ns, about.st_size))
    return stamps


def _row(name: str, run: Run) -> dict[str, Any]:
    info, sessions, progress = run.info, run.sessions, run.progress()
    spec = info.get("spec") or (run.spec if sessions else {})
    statuses = [status for session in sessions if (status := read_status(session.path)) is not None]
    means = progress.pop("headline")
    train = spec.get("train") or {}
    for unit, counter in UNITS.items():
        if isinstance(total := train.get(unit), int | float) and "total" not in progress:
            done = progress.get(counter, 0)
            progress |= {"unit": counter, "done": done, "total": total, "share": min(1.0, done / max(total, 1))}
    return {
        "run": name, "name": str(info["name"]), "id": str(info["id"]), "path": str(run.path), "kind": spec.get("kind"),
        "state": run.state, "seeds": info["seeds"], "created": info["created"], "progress": progress, "headline": means,
        "started": min((status["started"] for status in statuses), default=None),
        "heartbeat": max((status["heartbeat"] for status in statuses), default=None),
        "reason": next((status["reason"] for status in statuses if status.get("reason")), None),
        "spark": _spark(sessions[0].path / FILE, next(iter(means))) if sessions and means else [],
        "tags": read_notes(run)["tags"], "spec": spec,
    }  # fmt: skip


def _spark(path: Path, metric: str) -> list[float | None]:
    """A metric in few points: of a long file lines at even distances are read."""
    try:
        with LineFile(path) as file:
            lines = file.lines() if file.end < SPARK_BYTES else file.spread(2 * SPARK)
            rows = [parsed(line.data) or {} for line in lines]
    except OSError:
        return []
    values = [row[metric] for row in rows if isinstance(row.get(metric), int | float)]
    return plain(values[:: max(1, -(-len(values) // SPARK))] + values[-1:] if len(values) > SPARK else values)


def detail(name: str, run: Run) -> dict[str, Any]:
    """Everything on the page of a run that is not a series."""
    shown = [file for file in files(run) if file["type"].startswith(("image/", "video/"))]
    about = {key: run.info.get(key) or {} for key in ("command", "origins")}
    about |= {"shown": shown, "notes": read_notes(run)}
    results = {"summary": run.summary(), "suites": [vars(result) for result in measured(run)]}
    return _row(name, run) | about | results | {"sessions": [_session(session) for session in run.sessions]}


def _session(session: Run) -> dict[str, Any]:
    manifest, diff = read_json(session.path / "manifest.json"), session.path / "git.diff"
    metas = checkpoints.metas(session.path)
    return {
        "seed": session.seed, "state": state_of(session.path), "status": read_status(session.path),
        "manifest": {key: value for key, value in manifest.items() if key not in ("spec", "before")},
        "diff": tail(diff, 0, 1 << 20)["text"] if diff.is_file() else None,
        "checkpoints": [{"step": meta.step, "reasons": sorted(meta.reasons), "score": meta.score,
                         "path": meta.path.name, "bytes": sum(file["size"] for file in meta.files.values())}
                        for meta in metas],
        "has": [name for name in HAS if (session.path / name).is_file()],
    }  # fmt: skip


def files(run: Run) -> list[dict[str, Any]]:
    """The files of a run with size and type, checkpoints left out."""
    found: list[dict[str, Any]] = []
    for folder, folders, names in os.walk(run.path):
        folders[:] = sorted(one for one in folders if one[0] != "." and one != checkpoints.FOLDER)
        for name in sorted(names):
            path = Path(folder, name)
            if name[0] != "." and not path.is_symlink() and len(found) < FILES:
                kind = mimetypes.guess_type(name)[0] or "application/octet-stream"
                place = path.relative_to(run.path).as_posix()
                found.append({"path": place, "bytes": path.stat().st_size, "type": kind})
    return found


def tail(path: Path, after: int | None, count: int = 1 << 16) -> dict[str, Any]:
    """Text of a file from a byte on, or its end; `after` of the next request is `cursor`."""
    size = path.stat().st_size if path.is_file() else 0
    start = max(0, size - count) if after is None or after > size else after
    data = b""
    if size:
        with path.open("rb") as file:
            file.seek(start)
            data = file.read(count)
    data = data[: data.rfind(b"\n") + 1] or data
    return {"text": data.decode(errors="replace"), "start": start, "cursor": start + len(data), "bytes": size}


def read_notes(run: Run) -> dict[str, Any]:
    """Tags of the run, favorites and notes on its groups."""
    path = run.trial.path / NOTES
    content, new = read_json(path) if path.is_file() else {}, {"tags": [], "text": "", "groups": {}}
    stored = content.items() if isinstance(content, dict) else ()
    return new | {key: value for key, value in stored if isinstance(value, type(new.get(key, value)))}


def change_notes(run: Run, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Merge changes into the notes, at any depth; null removes."""
    with _NOTES:
        notes = _merged(read_notes(run), changes)
        try:
            write_json(run.trial.path / NOTES, notes)
        except OSError as error:
            what = f"the notes cannot be kept: {run.trial.path / NOTES} cannot be written ({error.strerror}). "
            raise PalestraError(what + "Make the folder writable, or copy the run to one that is.") from error
    return notes


_NOTES = threading.Lock()


def _merged(before: Any, changes: Any) -> Any:
    if not isinstance(changes, Mapping):
        return changes
    merged = dict(before) if isinstance(before, Mapping) else {}
    merged |= {key: _merged(merged.get(key), value) for key, value in changes.items()}
    return {key: value for key, value in merged.items() if value is not None}
