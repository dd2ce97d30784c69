"""What a generator in a process of its own costs: the same post-training steps in one process and in two, in turns.

    python benchmarks/cluster.py [--steps 12] [--prompts 64] [--rounds 3] [--staleness 0]
    python benchmarks/cluster.py --device cuda --model 135m --prompts 64 --new 128      # weights by CUDA IPC

On the CPU synchronous steps are bit for bit the same work, and the two processes take turns on the cores. Start-up is
not counted: the first two steps are left out. One JSON line per run, then the ratio of the medians.
"""

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import palestra
from palestra.data.tokenizers import character_tokenizer
from palestra.lm.hf import save_pretrained
from palestra.lm.model import Transformer
from palestra.spec.shape import Shape

TIMES = ("time/rollout", "time/train", "time/publish", "time/record")
WARM_UP = 2


SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {"layers": 4, "width": 128, "heads": 4, "mlp": 512, "context": 64},
    "135m": {"layers": 30, "width": 576, "heads": 9, "kv_heads": 3, "mlp": 1536, "context": 512, "vocab": 49152},
}


def save_model(folder: Path, name: str) -> None:
    """A random model that writes characters."""
    tokenizer = character_tokenizer("0123456789+-*=abcdefghijklmnopqrstuvwxyz<>/ \n")
    assert tokenizer.eos is not None
    model = Transformer(Shape.model_validate({"vocab": tokenizer.vocab_size, **SHAPES[name]}))
    model.initialize(torch.Generator().manual_seed(0))
    save_pretrained(folder, model, tokenizer=tokenizer, eos=[tokenizer.eos])


def spec_of(model: Path, given: argparse.Namespace, cluster: dict[str, Any]) -> dict[str, Any]:
    return {
        "kind": "posttrain",
        "name": "apart" if cluster else "alone",
        "model": {"init": str(model)},
        "tasks": {"train": [{"task": "arithmetic", "args": {"digits": 3}}]},
        "rollout": {"group": 8, "max_new_tokens": given.new, "staleness": given.staleness, "record": False},
        "algorithm": {"preset": "dr_grpo"},
        "train": {"steps": given.steps, "prompts_per_step": given.prompts, "precision": given.precision},
        "optim": {"name": "adamw", "lr": 1e-4},
        "every": {"checkpoint": "1 hours", "eval": None},
        "device": given.device,
        "cluster": cluster,
    }


def digits(prompt: str, completion: str, **row: Any) -> float:
    """A reward that differs within every group: what has no advantage is not trained on."""
    return sum(map(str.isdigit, completion)) / max(1, len(completion))


def measured(
    spec: dict[str, Any], root: Path, reward: Callable[..., float] | None = digits
) -> tuple[dict[str, float], list[float]]:
    """Medians of a run's steps, and what must be equal."""
    run = palestra.run(spec, root=root, quiet=True, reward=reward)
    rows = [row for row in run.metrics() if "time/train" in row]
    steps = rows[WARM_UP:]
    seconds = [sum(row.get(name, 0.0) for name in TIMES) for row in steps]
    tokens = steps[-1]["tokens"] - rows[WARM_UP - 1]["tokens"]
    medians = {
        name: statistics.median(row[f"time/{name}"] for row in steps) for name in ("rollout", "train", "publish")
    }
    row = {"seconds_a_step": statistics.median(seconds), "tokens_per_s": tokens / sum(seconds), **medians}
    return row, [row["length"] for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--staleness", type=int, default=0)
    parser.add_argument("--new", type=int, default=12, help="new tokens of a completion, at most")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--model", choices=SHAPES, default="tiny")
    parser.add_argument("--precision", default="auto")
    given = parser.parse_args()
    medians: dict[str, list[float]] = {"alone": [], "apart": []}
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        save_model(model, given.model)
        for number in range(given.rounds):
            lengths = {}
            for name, cluster in (("alone", {}), ("apart", {"generators": 1})):
                row, lengths[name] = measured(spec_of(model, given, cluster), Path(folder) / f"runs{number}")
                medians[name].append(row["seconds_a_step"])
                print(
                    json.dumps({"run": name, "round": number, **{key: round(value, 4) for key, value in row.items()}})
                )
            if given.staleness == 0 and given.device == "cpu":
                assert lengths["alone"] == lengths["apart"], "the work was not the same"
    alone, apart = (statistics.median(medians[name]) for name in ("alone", "apart"))
    print(json.dumps({"alone": round(alone, 4), "apart": round(apart, 4), "ratio": round(apart / alone, 4)}))


if __name__ == "__main__":
    main()
