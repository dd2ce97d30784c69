"""Blocks of a foreign spec that track which keys were read, and SLM-Lab's schedules as ours."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from palestra.errors import UsageError


@dataclass
class Notes:
    """Notes for the reader of an imported spec, one line each."""

    lines: list[str] = field(default_factory=list)

    def add(self, path: str, what: str) -> None:
        """Add a line on a key; the same one only once."""
        line = f"{path}: {what}"
        if line not in self.lines:
            self.lines.append(line)


class ForeignBlock:
    """A mapping that records which of its keys were taken."""

    def __init__(self, data: Any, path: str, notes: Notes, known: frozenset[str] | None = None):
        if data is None:
            data = {}
        if not isinstance(data, Mapping):
            raise UsageError(f"{path}: expected a mapping, got {data!r}")
        self.data, self.path, self.notes, self.known = dict(data), path, notes, known
        self.read: set[str] = set()

    def __contains__(self, key: str) -> bool:
        return self.data.get(key) is not None

    def take(self, key: str, default: Any = None) -> Any:
        """The value of a key, which is then accounted for; the default where it is absent or null."""
        self.read.add(key)
        value = self.data.get(key)
        return default if value is None else value

    def count(self, key: str, default: int | None = None) -> Any:
        """The value of a key as a whole number, which SLM-Lab also writes as 1e6."""
        value = self.take(key, default)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or value % 1):
            raise UsageError(f"{self.path}.{key}: expected a whole number, got {value!r}")
        return value if value is None else int(value)

    def block(self, key: str, known: frozenset[str] | None = None) -> "ForeignBlock":
        """A mapping inside."""
        return ForeignBlock(self.take(key, {}), f"{self.path}.{key}", self.notes, known)

    def renamed(self, **ours: str) -> dict[str, Any]:
        """The values of those of their keys that the block has, by our names."""
        return {name: self.take(theirs) for theirs, name in ours.items() if theirs in self}

    def note(self, key: str, what: str) -> None:
        self.notes.add(f"{self.path}.{key}", what)

    def wanted(self, key: str, harmless: Any, what: str) -> None:
        """Take a key that has no counterpart, with a note unless its value is what we do anyway."""
        if key in self and self.data[key] != harmless:
            self.note(key, what)
        self.read.add(key)

    def rest(self) -> dict[str, Any]:
        """The keys that were not taken, which then count as taken."""
        left = {key: value for key, value in self.data.items() if key not in self.read}
        self.read |= set(left)
        return left

    def close(self) -> None:
        """Add a note for every key that was not taken; SLM-Lab itself ignores keys that it does not know."""
        for key, value in self.rest().items():
            if self.known is not None and key not in self.known:
                self.note(key, "SLM-Lab ignores this key, and so does the imported spec")
            elif value is not None and value is not False:
                self.note(key, f"has no counterpart here; {value!r} was left out")


KEYS = frozenset({"name", "start_val", "end_val", "start_step", "end_step"})
SHAPES = {"linear_decay": "linear", "rate_decay": "rate", "periodic_decay": "periodic"}


def schedule(block: ForeignBlock, key: str, frames: int) -> Any:
    """A number or a schedule from `{name, start_val, end_val, start_step, end_step}`; None where the key is absent."""
    if key not in block:
        block.take(key)
        return None
    inner = block.block(key, KEYS)
    name, start = inner.take("name", "no_decay"), inner.take("start_val", 0.0)
    end, first, last = inner.take("end_val", start), inner.take("start_step", 0), inner.take("end_step", frames)
    inner.close()
    if name == "no_decay" or start == end:
        return start
    if name not in SHAPES:
        inner.note("name", f"there is no schedule {name!r} in SLM-Lab; a constant was taken")
        return start
    if end == 0:
        inner.note("end_val", "SLM-Lab never reaches an end of 0 (it takes it for absent); here the value does")
    if name == "linear_decay" and end > start:
        inner.note("end_val", "SLM-Lab jumps to an end above the start at once; here the value rises in a line")
    return in_fractions(SHAPES[name], start, end, first, last, frames)


def in_fractions(shape: str, start: float, end: float, first: float, last: float, frames: int) -> Any:
    """A schedule over frames `first` to `last` of a run of `frames`, truncated to the run."""
    if first >= frames or last <= first:
        return start
    if last > frames:  # the line continues beyond the end of the run
        end = start + (end - start) * (frames - first) / (last - first) if shape == "linear" else end
        last = frames
    fields: dict[str, Any] = {"shape": shape, "start": start, "end": end}
    if first > 0:
        fields["begin"] = first / frames
    if last < frames:
        fields["finish"] = last / frames
    return fields
