"""A folder with a teacher that knows how to write words backwards, a student that hardly does, and their runs."""

import json
from pathlib import Path
from typing import Any

import palestra
from palestra.runs.run import Run
from palestra.tasks.task import make_task

TASK: dict[str, Any] = {"task": "reverse", "args": {"length": 3, "alphabet": "abcdef"}}
MUON: dict[str, Any] = {"name": "muon", "lr": 0.02, "adam_lr": 5e-3, "weight_decay": 0.0}


def write_demonstrations(folder: Path) -> str:
    """Every training problem with its answer; the path of the file."""
    path, task = folder / "right.jsonl", make_task(TASK["task"], TASK["args"])
    rows = [{"prompt": problem.prompt, "completion": problem.row["solution"]} for problem in task.problems("train")]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def taught(root: Path, name: str, steps: int, seed: int = 0, *, width: int = 48, data: str | None = None) -> Run:
    """A model of characters after so many steps of imitation."""
    root.mkdir(parents=True, exist_ok=True)
    spec = {
        "kind": "sft",
        "name": name,
        "seed": seed,
        "model": {
            "tokenizer": "characters",
            "shape": {"layers": 2, "width": width, "heads": 4, "mlp": 2 * width, "context": 32, "qk_norm": "head"},
        },
        "data": {
            "train": {"right": {"path": data or write_demonstrations(root)}},
            "context": 24,
            "format": "plain",
        },
        "train": {"steps": steps, "batch": 32, "precision": "fp32"},
        "optim": MUON,
        "every": {"log": "50 steps", "eval": None},
        "threads": 1,
    }
    return quietly(spec, root)


def spec_of(student: object, teacher: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A spec of kind distill; `changes` are blocks, merged into those that are there."""
    spec: dict[str, Any] = {
        "kind": "distill",
        "name": "distilled",
        "model": {"init": str(student)},
        "teacher": teacher,
        "tasks": {"train": [TASK], "eval": [TASK]},
        "rollout": {"group": 4, "max_new_tokens": 5},
        "train": {"steps": 4, "prompts_per_step": 8, "precision": "fp32"},
        "optim": {"name": "adamw", "lr": 3e-3, "weight_decay": 0.0},
        "eval": {"problems": 64},
        "every": {"eval": "2 steps", "checkpoint": "3 steps"},
        "threads": 1,
    }
    for key, value in changes.items():
        spec[key] = {**spec[key], **value} if isinstance(value, dict) and isinstance(spec.get(key), dict) else value
    return spec


def quietly(spec: dict[str, Any] | None, root: Path, **settings: Any) -> Run:
    """Run, or resume, in the folder `runs`."""
    return palestra.run(spec, root=root / "runs", quiet=True, **settings)


def session_of(run: Run, seed: int = 0) -> Path:
    """The folder of one seed."""
    return run.path / "sessions" / str(seed)


def scores(run: Run) -> list[float]:
    """Held-out accuracies, from the first on."""
    return [row["eval/accuracy"] for row in run.metrics() if "eval/accuracy" in row]
