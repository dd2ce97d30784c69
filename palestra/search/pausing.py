"""Stops a trial at its rung: a hook in its spec asks the session to save and end, at the first evaluation there."""

import signal
from pathlib import Path
from typing import Any

from palestra.runs.store import read_json, write_json
from palestra.track.hooks import Moment

NAME = "rung.json"
HOOK = "palestra.search.pausing:pause_at_rung"


def write_rung(trial: Path, metric: str, by: str, level: int) -> None:
    """Say how far a trial runs before it pauses; a trial without this file runs to its end."""
    write_json(trial / NAME, {"metric": metric, "by": by, "level": level})


def clear_rung(trial: Path) -> None:
    """Let the trial run to its end whenever it is resumed."""
    (trial / NAME).unlink(missing_ok=True)


def pause_at_rung(moment: Moment) -> None:
    """Ask the session to stop, as SIGTERM does, at the first row with the metric at or after its rung."""
    path = moment.folder.parent.parent / NAME
    if not path.exists():
        return
    rung: dict[str, Any] = read_json(path)
    seen = moment.step if rung["by"] == "steps" else moment.seen
    if rung["metric"] in moment.metrics and seen >= rung["level"]:
        signal.raise_signal(signal.SIGTERM)
