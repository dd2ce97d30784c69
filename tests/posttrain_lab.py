"""A folder with a tiny random model, in which runs of kind posttrain take seconds, and what is read from them."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from small_lm import small_model

import palestra
from palestra.data.tokenizers import character_tokenizer
from palestra.lm.hf import save_pretrained
from palestra.rollout.records import FILE, RolloutRecord, scan
from palestra.runs.checkpoint import load as load_checkpoint
from palestra.runs.run import Run

TOKENIZER = character_tokenizer("0123456789+-*=abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ .,?:()<>/\n")
TASK = "posttrain_tasks:Letters"


def save_model(folder: Path, seed: int = 0, deviation: float = 0.25) -> Path:
    """A random model with a character tokenizer; its answers end, or are cut off, as it likes."""
    assert TOKENIZER.eos is not None
    model = small_model(seed, vocab=TOKENIZER.vocab_size, deviation=deviation)
    save_pretrained(folder, model, tokenizer=TOKENIZER, eos=[TOKENIZER.eos])
    return folder


class Lab:
    """A folder with a model, in which runs are trained."""

    def __init__(self, path: Path):
        self.path = path
        self.model = path / "model"
        if not self.model.exists():
            save_model(self.model)

    @property
    def root(self) -> Path:
        """Where the runs are."""
        return self.path / "runs"

    def spec(self, **changes: Any) -> dict[str, Any]:
        """A spec of five steps; `changes` are fields with `__` for the dot."""
        spec: dict[str, Any] = {
            "kind": "posttrain",
            "name": "letters",
            "model": {"init": str(self.model)},
            "tasks": {"train": [{"task": TASK}]},
            "rollout": {"group": 4, "max_new_tokens": 6},
            "algorithm": {"preset": "dr_grpo"},
            "train": {"steps": 5, "prompts_per_step": 4, "precision": "fp32"},
            "optim": {"name": "adamw", "lr": 3e-3},
            "eval": {"problems": 6},
            "every": {"checkpoint": "2 steps", "eval": "2 steps"},
            "device": "cpu",
            "threads": 1,
        }
        for path, value in changes.items():
            *parents, last = path.split("__")
            block = spec
            for name in parents:
                block = block.setdefault(name, {})
            block[last] = value
        return spec

    def run(self, **changes: Any) -> Run:
        """Train a spec to its end, without the pictures: they take several times as long and are tested elsewhere."""
        return palestra.run(self.spec(**changes), root=self.root, quiet=True)

    def resume(self, name: str, **settings: Any) -> Run:
        """Go on with a run."""
        return palestra.run(resume=name, root=self.root, quiet=True, **settings)


def letters(task: str = "Letters", **args: Any) -> dict[str, Any]:
    """The tasks of a spec: one of `posttrain_tasks`, trained on and evaluated on."""
    use = {"task": f"posttrain_tasks:{task}", "args": args}
    return {"train": [use], "eval": [use]}


def session_of(run: Run, seed: int = 0) -> Path:
    """The folder of one seed."""
    return run.path / "sessions" / str(seed)


def rows_of(run: Run) -> list[dict[str, Any]]:
    """The rows of metrics without the timings."""
    return [{key: value for key, value in row.items() if not key.startswith("time/")} for row in run.metrics()]


def rollouts_of(run: Run) -> list[RolloutRecord]:
    """What was trained on and what was left out."""
    return list(scan(session_of(run) / FILE))


def texts_of(run: Run) -> list[dict[str, Any]]:
    """The lines of rollouts.jsonl without what depends on the clock."""
    rows = [json.loads(line) for line in (session_of(run) / FILE).read_text().splitlines()]
    for row in rows:
        del row["seconds"]
        for one in row["trajectories"]:
            del one["verdict"]["seconds"]
    return rows


def log_of(run: Run) -> str:
    """What the run told."""
    return (session_of(run) / "log.txt").read_text()


def weights_of(run: Run) -> dict[str, torch.Tensor]:
    """The last weights, or adapters."""
    (path,) = (run.checkpoint("last") / "model").glob("*.safetensors")
    return load_file(path)


def assert_equal_trees(found: Any, expected: Any) -> None:
    """The same to the last bit."""
    if isinstance(expected, torch.Tensor):
        assert torch.equal(found, expected)
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key in expected:
            assert_equal_trees(found[key], expected[key])
    else:
        assert found == expected


def assert_equal_runs(run: Run, reference: Run) -> None:
    """Number for number: metrics, rollouts, weights, optimizers, critics."""
    rows, expected = rows_of(run), rows_of(reference)
    assert [row["step"] for row in rows] == [row["step"] for row in expected]
    for row, one in zip(rows, expected, strict=True):
        assert json.dumps(row) == json.dumps(one)  # as text: every digit counts
    assert texts_of(run) == texts_of(reference)
    assert_equal_trees(weights_of(run), weights_of(reference))
    states = [load_checkpoint(one.checkpoint("last")).state["learner"] for one in (run, reference)]
    assert_equal_trees(*states)
