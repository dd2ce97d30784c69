"""SLM-Lab's schedules in frames, as ours in fractions of the run."""

from typing import Any

from palestra.migrate.blocks import Block

KEYS = frozenset({"name", "start_val", "end_val", "start_step", "end_step"})
SHAPES = {"linear_decay": "linear", "rate_decay": "rate", "periodic_decay": "periodic"}


def schedule(block: Block, key: str, frames: int) -> Any:
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
    """A schedule over frames `first` to `last` of a run of `frames`; what lies beyond the run is cut off."""
    if first >= frames or last <= first:
        return start
    if last > frames:  # the line goes on beyond the end of the run
        end = start + (end - start) * (frames - first) / (last - first) if shape == "linear" else end
        last = frames
    found: dict[str, Any] = {"shape": shape, "start": start, "end": end}
    if first > 0:
        found["begin"] = first / frames
    if last < frames:
        found["finish"] = last / frames
    return found
