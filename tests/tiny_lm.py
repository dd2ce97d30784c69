"""Tiny language-model runs: generated texts, conversations and pairs, a spec of each kind, seconds to train."""

import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import palestra
from palestra.runs.run import Run

SHAPE: dict[str, Any] = {"layers": 2, "width": 32, "heads": 2, "mlp": 48, "context": 48}
EXPERTS: dict[str, Any] = {"experts": 4, "active": 2, "mlp": 16, "bias_rate": 0.01}
MUON: dict[str, Any] = {"name": "muon", "lr": 0.01, "adam_lr": 2e-3}
WORDS = ("red", "green", "blue", "old", "new", "cat", "dog", "hen", "runs", "sits")


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> str:
    """A JSONL file; its path."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def write_data(folder: Path) -> None:
    """text.jsonl, other.jsonl, chat.jsonl and pairs.jsonl; the same at every call."""
    draw = random.Random(7)

    def phrase() -> str:
        return " ".join(draw.choices(WORDS, k=draw.randint(2, 6)))

    write_rows(folder / "text.jsonl", ({"text": phrase()} for _ in range(200)))
    write_rows(folder / "other.jsonl", ({"text": phrase().upper()} for _ in range(100)))
    asked = [draw.choices(WORDS, k=draw.randint(1, 3)) for _ in range(60)]
    write_rows(
        folder / "chat.jsonl",
        ({"prompt": " ".join(words), "completion": " ".join(reversed(words))} for words in asked),
    )
    write_rows(
        folder / "pairs.jsonl",
        ({"prompt": " ".join(words), "chosen": "yes " + words[0], "rejected": "no"} for words in asked),
    )


def spec_of(kind: str, folder: Path, **changes: Any) -> dict[str, Any]:
    """A spec of 12 steps; `changes` are fields with `__` for the dot."""
    source = {"pretrain": "text", "sft": "chat"}.get(kind, "pairs")
    spec: dict[str, Any] = {
        "kind": kind,
        "name": kind,
        "model": {"tokenizer": "characters", "shape": dict(SHAPE)},
        "data": {"train": {source: {"path": str(folder / f"{source}.jsonl")}}, "holdout": 0.1, "context": 48},
        "train": {"steps": 12, "batch": 6, "precision": "fp32"},
        "optim": {"name": "adamw", "lr": 3e-3},
        "every": {"log": "1 steps", "eval": "5 steps", "checkpoint": "3 steps"},
        "threads": 1,
    }
    for path, value in changes.items():
        *parents, last = path.split("__")
        block = spec
        for name in parents:
            block = block.setdefault(name, {})
        block[last] = value
    if spec["model"]["shape"].get("moe") is not None:
        del spec["model"]["shape"]["mlp"]
    if spec["model"].get("init"):
        for field in ("tokenizer", "shape"):
            if f"model__{field}" not in changes:
                del spec["model"][field]
    return spec


class Lab:
    """A folder with the data, in which runs are trained."""

    def __init__(self, path: Path):
        self.path = path
        if not (path / "text.jsonl").exists():
            write_data(path)

    @property
    def root(self) -> Path:
        """Where the runs are."""
        return self.path / "runs"

    def spec(self, kind: str, **changes: Any) -> dict[str, Any]:
        """A spec on this folder's data."""
        return spec_of(kind, self.path, **changes)

    def checked(self, kind: str, **changes: Any) -> Any:
        """The same as the typed spec of its kind."""
        return palestra.check(self.spec(kind, **changes)).spec

    def run(self, kind: str, **changes: Any) -> Run:
        """Train a spec to its end."""
        return palestra.run(self.spec(kind, **changes), root=self.root, quiet=True)

    def resume(self, name: str, **settings: Any) -> Run:
        """Go on with a run."""
        return palestra.run(resume=name, root=self.root, quiet=True, **settings)


def session_of(run: Run, seed: int = 0) -> Path:
    """The folder of one seed of a run."""
    return run.path / "sessions" / str(seed)


def rows_of(run: Run) -> list[dict[str, Any]]:
    """The rows of metrics without the timings."""
    return [{key: value for key, value in row.items() if not key.startswith("time/")} for row in run.metrics()]
