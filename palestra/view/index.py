"""An index over a long file of rollouts or a trace: columns in the cache folder, made by a process of its own."""

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import threading
from bisect import bisect_left
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from palestra.data.cache import cache_root
from palestra.runs.store import read_json, write_json
from palestra.tasks.task import Status
from palestra.view.lines import Line, LineFile, step_of

SHORT = 4 << 20  # bytes; a shorter file is read each time
CHUNK, CHUNK_BYTES = 1 << 16, 64 << 20  # lines, and bytes, that are indexed at a time
FORMAT = 1  # of the columns; an index of another is made anew
COARSE = 16  # bins of a chunk in the coarse copy of a trace
BITS = {str(status).encode(): 1 << place for place, status in enumerate(Status)}
KINDS = {"at": "i8", "step": "i4", "problem": "u8", "least": "f4", "most": "f4", "status": "u1",
         "low": "f8", "high": "f8", "busy": "f4", "lane": "u2", "name": "u2"}  # fmt: skip
EVENT = re.compile(r'"name":"([^"]*)","pid":(\d+),"tid":(\d+),"ts":([-+.\de]+),"dur":([-+.\de]+)')
THREAD = re.compile(r'"name":"thread_name","pid":(\d+),"tid":(\d+),"args":\{"name":"([^"]*)"')
_PROBLEM = re.compile(rb'"problem": ?\{"id": ?("(?:[^"\\]|\\.)*")')
_REWARD = re.compile(rb'"reward": ?([^,]+), ?"verdict": ?\{"score": ?[^,]+, ?"status": ?"(\w+)"')
Columns = dict[str, np.ndarray]
_EXTENDING = threading.Lock()


def problem_hash(quoted: bytes) -> int:
    """The number that stands for a problem; `quoted` is its id as JSON."""
    return int.from_bytes(hashlib.blake2b(quoted, digest_size=8).digest(), "little")


class Index:
    """The index of one file. Rows are added as the file grows; when it shrinks, the index begins anew."""

    def __init__(self, path: Path):
        self.path = path
        self.folder = cache_root() / "view" / "index" / hashlib.sha256(str(path).encode()).hexdigest()[:24]

    def meta(self, file: LineFile) -> dict[str, Any]:
        """What is indexed: `cursor` (bytes), `rows`, `lanes` and `names`; as of a new index if it does not fit."""
        meta = read_json(self.folder / "meta.json") if (self.folder / "meta.json").is_file() else {}
        new = {"identity": f"{FORMAT} {file.identity}", "before": "", "cursor": 0, "rows": 0, "coarse": 0}
        fits = meta.get("identity") == new["identity"] and meta["before"] == file.before(meta["cursor"])
        return meta if fits else new | {"lanes": [], "names": []}

    def current(self, file: LineFile) -> dict[str, Any]:
        """The same; what is missing of a short file is indexed here and now."""
        with _EXTENDING:
            if self.meta(file)["cursor"] < file.end < SHORT:
                self.extend()
            return self.meta(file)

    def column(self, name: str, start: int, stop: int, part: str = "rows") -> np.ndarray:
        """Rows of a column, of all or of the coarse copy."""
        kind = np.dtype(KINDS[name])
        return np.fromfile(self.folder / f"{part}_{name}", kind, max(0, stop - start), offset=start * kind.itemsize)

    def find(self, name: str, value: float, rows: int, part: str = "rows") -> int:
        """The first row of a rising column that is at least `value`."""
        return bisect_left(range(rows), value, key=lambda row: self.column(name, row, row + 1, part)[0])

    def extend(self, parent: int | None = None) -> None:
        """Index what the file has by now, as long as the parent process lives."""
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        with LineFile(self.path) as file, open(f"{self.folder}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # another server may index the same file
            meta = self.meta(file)
            if meta["cursor"] == 0:
                shutil.rmtree(self.folder, ignore_errors=True)
            self.folder.mkdir(parents=True, exist_ok=True)
            for chunk in _chunks(file.lines(meta["cursor"])):
                if parent not in (None, os.getppid()):
                    return
                rows = _events(chunk, meta) if self.path.suffix == ".json" else _groups(chunk)
                for part, columns in {"rows": rows, "coarse": _coarse(rows) if "high" in rows else {}}.items():
                    for name, values in columns.items():
                        with open(self.folder / f"{part}_{name}", "ab") as out:
                            # What a killed process wrote after its meta.json goes.
                            out.truncate(meta[part] * values.itemsize)
                            out.write(values.tobytes())
                    meta[part] += len(next(iter(columns.values()), ()))
                meta |= {"cursor": chunk[-1].end, "before": file.before(chunk[-1].end)}
                write_json(self.folder / "meta.json", meta)


def _chunks(lines: Iterator[Line]) -> Iterator[list[Line]]:
    chunk: list[Line] = []
    for line in lines:
        chunk.append(line)
        if len(chunk) >= CHUNK or line.end - chunk[0].start > CHUNK_BYTES:
            yield chunk
            chunk = []
    if chunk:
        yield chunk


def _columns(rows: list[Any], *names: str) -> Columns:
    return {name: np.array(values, KINDS[name]) for name, values in zip(names, zip(*rows, strict=True), strict=False)}


def _groups(chunk: list[Line]) -> Columns:
    rows = []
    for start, data, _ in chunk:
        step = None if data is None else step_of(data[:256])
        if data is not None and step is not None and (problem := _PROBLEM.search(data)):
            verdicts = _REWARD.findall(data)
            rewards, bits = [float(reward) for reward, _ in verdicts] or [0.0], 0
            for _, status in verdicts:
                bits |= BITS.get(status, 0)
            rows.append((start, step, problem_hash(problem[1]), min(rewards), max(rewards), bits))
    return _columns(rows, "at", "step", "problem", "least", "most", "status")


def _events(chunk: list[Line], meta: dict[str, Any]) -> Columns:
    text = b"\n".join(line.data for line in chunk if line.data).decode(errors="replace")
    tracks = {(pid, tid): name for pid, tid, name in THREAD.findall(text)}
    lanes = {(pid, tid): place for place, (pid, tid, _) in enumerate(meta["lanes"])}
    names = {name: place for place, name in enumerate(meta["names"])}
    rows = []
    for name, pid, tid, start, duration in EVENT.findall(text):
        if (pid, tid) not in lanes:
            lanes[pid, tid] = len(lanes)
            meta["lanes"].append([pid, tid, tracks.get((pid, tid), f"{pid}/{tid}")])
        low = float(start) / 1e6
        place = names.setdefault(name, len(names))
        rows.append((low, low + float(duration) / 1e6, lanes[pid, tid], place))
    meta["names"] = list(names)
    columns = _columns(rows, "low", "high", "lane", "name")
    # Threads may write in another order than they end, by microseconds.
    return columns | {"high": np.maximum.accumulate(columns["high"])} if rows else {}


def _coarse(rows: Columns) -> Columns:
    """The same time in fewer rows: short events are added up by lane and name in bins, long ones are kept."""
    low, high, lane, name = (rows[key] for key in ("low", "high", "lane", "name"))
    edges = np.linspace(high[0], high[-1] + 1e-6, COARSE + 1)
    long = high - low > 4 * (edges[1] - edges[0])
    bins = np.clip(np.searchsorted(edges, high, "right") - 1, 0, COARSE - 1)
    keys = (bins.astype("i8") << 32) + (lane.astype("i8") << 16) + name
    found, places = np.unique(keys[~long], return_inverse=True)
    busy = np.bincount(places, (high - low)[~long], len(found))
    made = {
        "low": (edges[found >> 32], low), "high": (edges[(found >> 32) + 1], high), "busy": (busy, high - low),
        "lane": ((found >> 16) & 0xFFFF, lane), "name": (found & 0xFFFF, name),
    }  # fmt: skip
    joined = {key: np.concatenate([short, kept[long]]).astype(KINDS[key]) for key, (short, kept) in made.items()}
    order = np.argsort(joined["high"], kind="stable")
    return {key: values[order] for key, values in joined.items()}


class Indexer:
    """Has one process at a time make indexes; `share` is how much of a file is indexed."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def share(self, index: Index, file: LineFile) -> float:
        """The indexed share of a file; what is missing is begun if no other index is being made.

        The end of a file that grows may be missing where all is said to be there.
        """
        if file.end < SHORT or index.path.name in ("answers.jsonl", "samples.jsonl"):
            return 1.0
        cursor = index.meta(file)["cursor"]
        if file.end - cursor > SHORT // 4 and (self._process is None or self._process.poll() is not None):
            command = ["nice", "-n", "10", sys.executable, "-m", "palestra.view.index", str(index.path)]
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        return 1.0 if file.end - cursor <= SHORT else cursor / file.end


if __name__ == "__main__":
    Index(Path(sys.argv[1])).extend(parent=os.getppid())
