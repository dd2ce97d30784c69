"""status.json: how a session is doing, written by its owner and judged by readers."""

import time
import traceback
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from palestra.runs.lease import Owner
from palestra.runs.redact import redacted
from palestra.runs.store import read_json, write_json

NAME = "status.json"


def write_status(
    folder: Path, state: str, *, started: float, progress: Mapping[str, Any], error: BaseException | None = None
) -> None:
    """Write the status of a session this process owns: running, done, failed or interrupted."""
    status = {
        "state": state,
        "started": started,
        "heartbeat": time.time(),
        **asdict(Owner.here()),
        "progress": dict(progress),
        "reason": None if error is None else f"{type(error).__name__}: {error}",
        "traceback": None if error is None else "".join(traceback.format_exception(error)),
    }
    write_json(folder / NAME, redacted(status))


def read_status(folder: Path) -> dict[str, Any] | None:
    """The status as its owner last wrote it; None for a session that never started."""
    path = folder / NAME
    return read_json(path) if path.exists() else None


def state_of(folder: Path) -> str:
    """new, running, done, failed, interrupted, or killed where the status says running but its owner is dead."""
    status = read_status(folder)
    if status is None:
        return "new"
    if status["state"] == "running" and not Owner.read(status).alive(status["heartbeat"]):
        return "killed"
    return status["state"]
