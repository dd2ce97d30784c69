"""The timeline of a session: the spans of a window of time, one by one, or added up in bins where they are many."""

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from palestra.view.index import EVENT, THREAD, Index
from palestra.view.lines import LineFile, step_of
from palestra.view.series import parsed

EXACT_BYTES = 3 << 19  # of spans that are given one by one: some 11,000
OPENING_BYTES = 1 << 19  # shown at first of a longer file, its end
BEYOND = 2000  # spans after a window that are looked at: one that ends later may have begun in it
ROWS = 1_500_000  # of an index that are added up; beyond it its coarse copy is read
CELLS = 4_000_000  # of lanes, names and bins
ROLES = ("trainer", "generator", "verifier", "sync")
START = re.compile(r'"name":"start","args":\{"unix_ns":(\d+)')
Span = tuple[str, str, float, float, dict[str, Any]]
"""Track, name, start, seconds and args."""


def ends(line: bytes) -> float | None:
    """When the span of a line ended, in seconds: the order of a trace."""
    match = EVENT.search(line.decode(errors="replace"))
    return None if match is None else (float(match[4]) + float(match[5])) / 1e6


def begins(line: bytes) -> float | None:
    """When the span of a line began, in seconds."""
    match = EVENT.search(line.decode(errors="replace"))
    return None if match is None else float(match[4]) / 1e6


def timeline(
    files: Sequence[LineFile], share: float, *, low: float | None, high: float | None, step: int | None, bins: int
) -> dict[str, Any]:
    """Spans between two times, in seconds since the start of the run; by default all of a short trace, or its end.

    The first file is that of the first trainer; those of other processes have clocks that began with them.
    """
    first = files[0]
    heads = [file.read(0, 1 << 20).decode(errors="replace") for file in files]
    starts = [int(match[1]) / 1e9 if (match := START.search(head)) else 0.0 for head in heads]
    shifts = [start - starts[0] for start in starts]
    last = max((file.last_key(ends) or 0.0) + shift for file, shift in zip(files, shifts, strict=True))
    if step is not None:
        begin, after = (first.next_key(begins, first.search(step_of, number)) for number in (step, step + 1))
        low, high = last if begin is None else begin, last if after is None else after
    if low is None or high is None:
        small = sum(file.end for file in files) < EXACT_BYTES
        start = 0.0 if small else first.next_key(begins, first.line_after(first.end - OPENING_BYTES // len(files)))
        low, high = start or 0.0, last
    about = {"low": low, "high": high, "end": last, "indexed": share, "unix": starts[0]}
    ranges = [[file.search(ends, t - shift) for t in (low, high)] for file, shift in zip(files, shifts, strict=True)]
    if sum(end - begin for begin, end in ranges) <= EXACT_BYTES:
        parts = zip(files, heads, shifts, ranges, strict=True)
        return about | _exact([span for part in parts for span in _spans(*part, high)])
    if share < 1:
        return about | {"exact": False, "lanes": [], "names": [], "bins": None}
    return about | _binned(files, shifts, low, high, bins)


def _spans(file: LineFile, head: str, shift: float, place: list[int], high: float) -> Iterator[Span]:
    threads, beyond = {(pid, tid): name for pid, tid, name in THREAD.findall(head)}, 0
    for line in file.lines(place[0]):
        text = (line.data or b"").decode(errors="replace")
        if match := EVENT.search(text):
            name, pid, tid, start = match[1], match[2], match[3], float(match[4]) / 1e6 + shift
            if start < high:
                args = parsed(text[match.end() + 8 :].rstrip(",")[:-1].encode()) or {}
                yield threads.get((pid, tid), f"{pid}/{tid}"), name, start, float(match[5]) / 1e6, args
        elif match := THREAD.search(text):
            threads[match[1], match[2]] = match[3]
        beyond += line.start >= place[1]
        if beyond > BEYOND:
            break


def _exact(rows: list[Span]) -> dict[str, Any]:
    seconds: dict[str, float] = {}
    for track, _, _, duration, _ in rows:
        seconds[track] = seconds.get(track, 0.0) + duration
    lanes = {track: place for place, track in enumerate(_ordered(seconds))}
    names = {name: place for place, name in enumerate(sorted({row[1] for row in rows}))}
    events = {"lane": [lanes[row[0]] for row in rows], "name": [names[row[1]] for row in rows]}
    events |= {"start": [round(row[2], 6) for row in rows], "duration": [round(row[3], 6) for row in rows]}
    tracks = [{"track": track, "seconds": seconds[track]} for track in lanes]
    return {"exact": True, "names": list(names), "lanes": tracks, "events": events | {"args": [row[4] for row in rows]}}


def _ordered(tracks: Iterable[str]) -> list[str]:
    """Trainers, generators, verifiers, then the others; `x/10` after `x/9`."""

    def key(track: str) -> Any:
        role, _, rank = track.partition("/")
        return ROLES.index(role) if role in ROLES else len(ROLES), role, int(rank) if rank.isdecimal() else 0, track

    return sorted(tracks, key=key)


def _binned(files: Sequence[LineFile], shifts: Sequence[float], low: float, high: float, bins: int) -> dict[str, Any]:
    indexes = [Index(file.path) for file in files]
    metas = [index.current(file) for index, file in zip(indexes, files, strict=True)]
    tracks = _ordered({track for meta in metas for _, _, track in meta["lanes"]})
    names = sorted({name for meta in metas for name in meta["names"]})
    windows = [(low - shift, high - shift) for shift in shifts]

    def rows(part: str) -> list[list[int]]:
        pairs = zip(indexes, metas, windows, strict=True)
        return [[index.find("high", value, meta[part], part) for value in window] for index, meta, window in pairs]

    part = "coarse" if sum(stop - start for start, stop in rows("rows")) > ROWS else "rows"
    read: list[list[np.ndarray]] = []
    for index, meta, shift, (start, stop) in zip(indexes, metas, shifts, rows(part), strict=True):
        stop = min(meta[part], stop + ROWS // 4)  # spans that end after the window may have begun in it
        began, ended, lane, name = (index.column(one, start, stop, part) for one in ("low", "high", "lane", "name"))
        busy = index.column("busy", start, stop, part) if part == "coarse" else ended - began
        places = np.array([tracks.index(track) for _, _, track in meta["lanes"]], int)[lane] * len(names)
        keys = places + np.array([names.index(name) for name in meta["names"]], int)[name]
        read.append([began + shift, ended + shift, busy, keys])
    began, ended, busy, keys = (np.concatenate(column) for column in zip(*read, strict=True))
    count = max(1, len(tracks) * len(names))
    bins = max(16, min(bins, CELLS // count))
    edges = np.linspace(low, high, bins + 1)
    density = busy / np.maximum(ended - began, 1e-9)
    # The time up to an edge e is Σ d·(e - t) over all beginnings before it, less the same over all ends.
    slope, offset = np.zeros((count, bins + 1)), np.zeros((count, bins + 1))
    for times, sign in ((began, 1.0), (ended, -1.0)):
        flat = keys * (bins + 2) + np.searchsorted(edges, times, "left")
        for table, weight in ((slope, density), (offset, density * times)):
            sums = np.bincount(flat, sign * weight, count * (bins + 2)).reshape(count, bins + 2)
            table += np.cumsum(sums, axis=1)[:, : bins + 1]
    width = float(edges[1] - edges[0])
    shares = np.clip(np.diff(edges * slope - offset, axis=1) / width, 0.0, 1.0)
    row, column = np.nonzero(shares > 0.0005)
    seconds = (shares.reshape(len(tracks), -1).sum(1) * width).tolist()
    cells = {"lane": row // len(names), "name": row % len(names), "bin": column}
    cells |= {"busy": shares[row, column].round(3)}
    lanes = [{"track": track, "seconds": one} for track, one in zip(tracks, seconds, strict=True)]
    about = {"width": width, "count": bins, **{key: values.tolist() for key, values in cells.items()}}
    return {"exact": False, "names": names, "lanes": lanes, "bins": about}
