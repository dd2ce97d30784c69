"""What an evaluation was begun with, and its report: all that a number needs to be compared with another."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from palestra.errors import UsageError
from palestra.evaluate.answers import Evaluation
from palestra.evaluate.likelihood import LikelihoodOutcome
from palestra.evaluate.texts import TextOutcome
from palestra.runs.redact import redacted
from palestra.runs.store import read_json, write_json

SETUP, REPORT = "setup.json", "evaluation.json"


def files_sha256(paths: Iterable[Path]) -> str:
    """One SHA-256 of the contents of files."""
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def settled(folder: Path, now: Mapping[str, Any]) -> dict[str, Any]:
    """Refuse to go on with another model or other questions than a session began with, which is written down then."""
    path = folder / SETUP
    if not path.exists():
        write_json(path, redacted(now))
    before, same = read_json(path), redacted(json.loads(json.dumps(now)))
    for what in ("model", "tasks", "likelihood", "texts"):
        keys = {**before[what], **same[what]}
        changed = [key for key in keys if before[what].get(key) != same[what].get(key)]
        if changed:
            raise UsageError(
                f"{what}: {' and '.join(changed)} is not what {folder} was started with: the score would be of two "
                "things. Restore the files as they were, or start a new run"
            )
    return json.loads(json.dumps(now))


def write_report(
    folder: Path,
    setup: Mapping[str, Any],
    evaluation: Evaluation,
    scores: Mapping[str, LikelihoodOutcome],
    texts: Mapping[str, TextOutcome],
    metrics: Mapping[str, float],
) -> None:
    """evaluation.json: the setup, and beside each task and file what came of it."""
    tasks = {
        label: {**setup["tasks"][label], **{mode: one.plain() for mode, one in modes.items()}}
        for label, modes in evaluation.outcomes.items()
    }
    likelihood = {label: {**setup["likelihood"][label], **one.plain()} for label, one in scores.items()}
    report = {
        "palestra": _version(),
        **setup,
        "tasks": tasks,
        "likelihood": likelihood,
        "texts": {label: {**setup["texts"][label], **one.plain()} for label, one in texts.items()},
        "metrics": dict(metrics),
    }
    write_json(folder / REPORT, redacted(report))


def _version() -> str | None:
    """Of the package that is installed; None where its code is used without."""
    try:
        return version("palestra")
    except PackageNotFoundError:
        return None
