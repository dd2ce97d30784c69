"""A folder with a tiny random model, in which evaluations are run."""

from pathlib import Path
from typing import Any

from small_lm import small_model

import palestra
from palestra.data.tokenizers import character_tokenizer
from palestra.lm.hf import save_pretrained
from palestra.runs.run import Run

TOKENIZER = character_tokenizer("0123456789+-*=abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ .,?:()\n")


def save_model(folder: Path, seed: int = 0) -> Path:
    """A random model with a character tokenizer; its answers end or are cut off, as it likes."""
    assert TOKENIZER.eos is not None
    model = small_model(seed, vocab=TOKENIZER.vocab_size, deviation=0.3)
    save_pretrained(folder, model, tokenizer=TOKENIZER, eos=[TOKENIZER.eos])
    return folder


def spec_of(model: Path | str, *tasks: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A spec of kind evaluate; `changes` are blocks or, with `__`, fields of `eval`."""
    settings = {key.removeprefix("eval__"): changes.pop(key) for key in list(changes) if key.startswith("eval__")}
    return {
        "kind": "evaluate",
        "name": "scores",
        "model": {"init": str(model)},
        "tasks": list(tasks),
        "eval": {"samples": 4, "k": [1, 4], "max_new_tokens": 8, **settings},
        "dtype": "fp32",
        "threads": 1,
        **changes,
    }


def letters(name: str = "letters", task: str = "Letters", **args: Any) -> dict[str, Any]:
    """A task of `eval_tasks`."""
    return {"task": f"eval_tasks:{task}", "name": name, "args": {"size": 8, **args}}


def run(root: Path, spec: dict[str, Any] | None = None, **settings: Any) -> Run:
    """Evaluate without showing progress."""
    return palestra.run(spec, root=root / "runs", quiet=True, **settings)


def session_of(found: Run, seed: int = 0) -> Path:
    """The folder of one seed."""
    return found.path / "sessions" / str(seed)
