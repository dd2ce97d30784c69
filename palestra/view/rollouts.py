"""Rollouts for reading: the groups of a step without their tokens, filters, histograms, and one group in full."""

import json
import math
import re
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from palestra.data.tokenizers import Tokenizer, token_texts
from palestra.errors import PalestraError
from palestra.runs.run import Run
from palestra.view.flags import flags
from palestra.view.index import BITS, Index, problem_hash
from palestra.view.lines import Line, LineFile, step_of
from palestra.view.places import DAMAGED, NotThere
from palestra.view.series import parsed

PREVIEW = 240  # characters
STEP_SECONDS = 1.0  # of reading one step, per request; the next one reads on
SECONDS = 0.15  # of a search over all steps, per request
CACHE = 64 << 20  # characters of lists
BINS = 20
ROUNDING = 1e-5  # rewards are indexed in single precision
EVERYTHING = (-math.inf, math.inf)
# Inside a JSON text quotes are escaped, so this matches keys alone.
_PER_TOKEN = re.compile(
    rb'"(tokens|loss_mask|logprobs|versions|advantages|entropy|trained_logprobs)": ?\[([^\[\]{}"]*)\]')  # fmt: skip


def _shortened(match: re.Match[bytes]) -> bytes:
    return b'"sampled": %d' % match[2].count(b"1") if match[1] == b"loss_mask" else b'"%s": null' % match[1]


def grouped(row: dict[str, Any]) -> dict[str, Any]:
    """A line of rollouts, of evaluation answers or of texts sampled in training, in the form of the first."""
    if "trajectories" in row:
        return row
    answers = row.get("answers") or [{**row, "tokens": 0, "verdict": {"score": 0.0, "status": "sampled"}}]
    trajectories = [
        {"reward": one["verdict"]["score"], "verdict": one["verdict"], "sampled": one["tokens"], "turns": [],
         "stop_reason": one["stop_reason"], "completion": one["text"], "advantages": None} for one in answers
    ]  # fmt: skip
    problem = {"id": row.get("id", row["prompt"]), "prompt": row["prompt"], "row": {}}
    about = {"number": 0, "step": row.get("step", 0), "fate": row.get("mode", "sampled"), "version": row.get("step", 0)}
    return about | {"asked": len(answers), "seconds": 0.0, "problem": problem, "trajectories": trajectories}


def listed(at: int, line: bytes | None) -> dict[str, Any] | None:
    """A group as a list shows it, without its tokens; None if the line is not one."""
    try:
        row = grouped(parsed(_PER_TOKEN.sub(_shortened, line or b"")) or {})
        completions = [
            {"reward": one["reward"], "score": one["verdict"]["score"], "status": one["verdict"]["status"],
             "note": one["verdict"].get("note", ""), "length": one["sampled"], "stop": one["stop_reason"],
             "turns": len(one["turns"]), "advantage": one["advantages"], "flags": flags(one["completion"]),
             "completion": one["completion"]} for one in row["trajectories"]
        ]  # fmt: skip
        about = {key: row[key] for key in ("number", "step", "fate", "version", "asked", "seconds")}
        problem, prompt = row["problem"]["id"], shown(row["problem"]["prompt"])
        about |= {"problem": problem, "task": problem.partition("/")[0], "prompt": prompt, "completions": completions}
        return {"at": at, **about, "reward": fmean(one["reward"] for one in completions) if completions else None}
    except DAMAGED:
        return None


def shown(prompt: Any) -> str:
    """A prompt as text: of a conversation the last message."""
    content = prompt[-1].get("content") if isinstance(prompt, list) and prompt else prompt
    parts = content if isinstance(content, list) else [{"text": content}]
    texts = ("<image>" if "image" in str(part.get("type")) else part.get("text") for part in parts)
    return " ".join(text for text in texts if isinstance(text, str))


@dataclass(frozen=True)
class Wanted:
    """Filters: a group is shown if it fits and one of its completions does."""

    task: str | None = None
    fate: str | None = None
    problem: str | None = None
    status: str | None = None
    flag: str | None = None
    text: str | None = None
    reward: tuple[float, float] = EVERYTHING
    length: tuple[float, float] = EVERYTHING

    def fits(self, group: Mapping[str, Any]) -> list[int]:
        """The completions that fit; none if the group does not."""
        if any(getattr(self, key) not in (None, group[key]) for key in ("task", "fate", "problem")):
            return []
        text = (self.text or "").casefold()
        return [
            number
            for number, one in enumerate(group["completions"])
            if self.reward[0] <= one["reward"] <= self.reward[1]
            and self.length[0] <= one["length"] <= self.length[1]
            and self.status in (None, one["status"])
            and (self.flag is None or self.flag in one["flags"])
            and any(text in where.casefold() for where in (group["prompt"], one["completion"], one["note"]))
        ]


@dataclass
class Part:
    """The groups of a step that have been read, how many lines could not be, and where it ends."""

    end: int
    groups: list[dict[str, Any]] = field(default_factory=list)
    malformed: int = 0
    too_long: int = 0
    size: int = 0
    """About how many characters it holds."""
    before: str = ""
    """The bytes before its end: a resumed run may have written others."""


class Rollouts:
    """Reads files of rollouts; the lists of the steps last looked at stay in memory."""

    def __init__(self, limit: int = CACHE):
        self._limit, self._lock = limit, threading.Lock()
        self._parts: OrderedDict[Any, Part] = OrderedDict()

    def step(self, file: LineFile, step: int | None, wanted: Wanted, after: int, limit: int) -> dict[str, Any]:
        """The groups of a step, by default the last, that fit, with histograms over the whole step."""
        last = file.last_key(step_of)
        step = int(last or 0) if step is None else step
        # Evaluation answers have no steps: they are one list.
        start, end = (0, file.end) if last is None else (file.search(step_of, step), file.search(step_of, step + 1))
        part = self._part(file, start, end)
        matches = [(group, hits) for group in part.groups if (hits := wanted.fits(group))]
        page = [(group, hits) for group, hits in matches if group["at"] > after]
        skipped = {"malformed": part.malformed, "too_long": part.too_long, "unread_bytes": end - part.end}
        return {
            "step": step, "first": step_of(file.head(0)), "last": last, "previous": file.last_key(step_of, start),
            "following": step_of(file.head(end)), "groups": [_preview(*one) for one in page[:limit]],
            "next": page[limit - 1][0]["at"] if len(page) > limit else None, "matched": summary(matches),
            "summary": summary([(group, range(len(group["completions"]))) for group in part.groups]),
            "count": len(part.groups), "matching": len(matches), "skipped": skipped,
        }  # fmt: skip

    def search(self, file: LineFile, index: Index, wanted: Wanted, after: int, limit: int) -> dict[str, Any]:
        """Groups of all steps that fit, from a byte on, as many as a moment finds; `next` continues.

        What is indexed is looked up; the rest is read line by line.
        """
        hits: list[dict[str, Any]] = []
        stop, place = time.monotonic() + SECONDS, after
        for line in candidates(file, index, wanted, after):
            place = line.end
            if (group := listed(line.start, line.data)) is not None and (matches := wanted.fits(group)):
                hits.append(_preview(group, matches))
            if len(hits) >= limit or time.monotonic() > stop:
                break
        else:
            place = file.end
        return {"groups": hits, "next": None if place >= file.end else place, "scanned": place / max(file.end, 1)}

    def _part(self, file: LineFile, start: int, end: int) -> Part:
        """All groups of a step; what was read of a step that grows is kept."""
        with self._lock:
            part = self._parts.pop(key := (file.path, file.before(start), start), Part(start))
            if part.end > end or part.before != file.before(part.end):
                part = Part(start)
            stop = time.monotonic() + STEP_SECONDS
            for line in file.lines(part.end, end):
                part.end, group = line.end, listed(line.start, line.data)
                if group is not None:
                    part.groups.append(group)
                    part.size += 1000 + sum(500 + len(one["completion"]) for one in group["completions"])
                part.too_long += line.data is None
                part.malformed += line.data is not None and group is None
                if time.monotonic() > stop:
                    break
            part.before, self._parts[key] = file.before(part.end), part
            while len(self._parts) > 1 and sum(one.size for one in self._parts.values()) > self._limit:
                self._parts.popitem(last=False)
            return part


def candidates(file: LineFile, index: Index, wanted: Wanted, after: int) -> Iterator[Line]:
    """The lines that may hold what is wanted."""
    meta, asked, both = index.meta(file), wanted.problem, (True, False)  # as the two encoders write it
    forms = [json.dumps(asked, ensure_ascii=how).encode(errors="surrogatepass") for how in both if asked is not None]
    if after < meta["cursor"]:
        rows = meta["rows"]
        first = index.find("at", after, rows)
        fits = np.ones(rows - first, bool)
        if forms:
            fits &= np.isin(index.column("problem", first, rows), [problem_hash(form) for form in forms])
        if wanted.status is not None:
            fits &= index.column("status", first, rows) & BITS.get(wanted.status.encode(), 0) > 0
        if wanted.reward != EVERYTHING:
            fits &= index.column("most", first, rows) >= wanted.reward[0] - ROUNDING
            fits &= index.column("least", first, rows) <= wanted.reward[1] + ROUNDING
        for row in (first + np.flatnonzero(fits)).tolist():
            yield from file.lines(at := int(index.column("at", row, row + 1)[0]), at + 1)
    for line in file.lines(max(after, meta["cursor"])):
        # What cannot fit is not taken apart, but passed on now and then, so that time is looked at.
        if line.data is None or not forms or any(form in line.data for form in forms) or line.start % 64 == 0:
            yield line


def _preview(group: Mapping[str, Any], hits: Sequence[int]) -> dict[str, Any]:
    completions = [one | {"completion": one["completion"][:PREVIEW]} for one in group["completions"]]
    return {**group, "prompt": group["prompt"][: 2 * PREVIEW], "completions": completions, "hits": list(hits)}


def summary(matches: Sequence[tuple[Mapping[str, Any], Sequence[int]]]) -> dict[str, Any]:
    """Histograms and counts over the completions of groups that fit."""
    completions = [group["completions"][hit] for group, hits in matches for hit in hits]
    counts = {key: Counter(one[key] for one in completions) for key in ("status", "stop")}
    counts |= {key: Counter(str(group[key]) for group, _ in matches) for key in ("fate", "task", "version")}
    counts["flag"] = Counter(name for one in completions for name in one["flags"])
    histograms = {key: histogram([one[key] for one in completions]) for key in ("reward", "length")}
    return {"groups": len(matches), "completions": len(completions), **histograms, **counts}


def histogram(values: Sequence[float]) -> dict[str, Any] | None:
    """Counts in bins of equal width; few distinct values get a bin each, a single one none."""
    values = [value for value in values if math.isfinite(value)]
    distinct = sorted(set(values))
    if len(distinct) < 2:
        return None
    middles = [(low + high) / 2 for low, high in pairwise(distinct)]
    each = [2 * distinct[0] - middles[0], *middles, 2 * distinct[-1] - middles[-1]]
    counts, edges = np.histogram(values, each if len(distinct) <= BINS else BINS)
    return {"edges": edges.tolist(), "counts": counts.tolist(), "mean": fmean(values)}


def group_at(file: LineFile, at: int, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """The group that starts at a byte, with its tokens as texts."""
    line = file.line_at(at)
    if line is None:
        raise NotThere("there is no group at this place: the run was resumed from an earlier step, look again")
    if line.data is None:
        raise NotThere(f"this group has {line.end - line.start:,} bytes: it is too long to be shown")
    if listed(at, line.data) is None:
        raise NotThere("this line of the file is not a group")
    row = grouped(parsed(line.data) or {})
    return row | {"at": at, "trajectories": [_full(one, tokenizer) for one in row["trajectories"]]}


def _full(row: dict[str, Any], tokenizer: Tokenizer | None) -> dict[str, Any]:
    row = {"entropy": None, "ratio": None, "texts": None, "joined": {}, **row, "flags": flags(row["completion"])}
    if isinstance(advantage := row.get("advantages"), int | float):
        row["advantages"] = [advantage if sampled else 0.0 for sampled in row["loss_mask"]]
    if (trained := row.get("trained_logprobs")) is not None:
        pairs = zip(trained, row["logprobs"], strict=True)
        row["ratio"] = [math.exp(min(50.0, new - old)) if None not in (new, old) else None for new, old in pairs]
    if tokenizer is not None and max(row.get("tokens", ()), default=math.inf) < tokenizer.vocab_size:
        row["texts"], row["joined"] = token_texts(row["tokens"], tokenizer)
    return row


def tokenizer_folders(session: Run, runs: Mapping[str, Path]) -> Iterator[Path]:
    """Where the run's tokenizer is: in a checkpoint of its own, or of the run it began from."""
    start = session.spec.get("model", {}).get("init")
    earlier = [path for name, path in runs.items() if start in (name, name.partition("/")[0], str(path))]
    folders = [session.path, *(path / "sessions" for path in earlier)]
    files = (file for folder in folders for file in folder.glob("**/checkpoints/*/model/tokenizer.json"))
    return (file.parent for file in files if not file.is_symlink())


@lru_cache(maxsize=4)
def load_tokenizer(folder: Path) -> Tokenizer | None:
    """The tokenizer of a folder; None where its files are not one."""
    try:
        return Tokenizer.load(folder)
    except (PalestraError, *DAMAGED):
        return None
