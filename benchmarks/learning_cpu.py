"""Every preset on one task from one starting model: does it learn, how far, how evenly over seeds?

    python benchmarks/learning_cpu.py [--presets grpo dapo …] [--seeds 5] [--steps 50] [--folder FOLDER]

The start is the quickstart's: a model of characters that adds as its forgetful teacher did. A row is a preset, or GRPO
at a staleness: held-out accuracy (500 sums, greedy) before and after, mean and spread over seeds, the worst seed, and
seconds of a run on one core. Prints a JSON line a row and writes the table of docs/algorithms/posttrain.md to
FOLDER/table.md.
"""

import argparse
import json
import sys
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any, get_args

import palestra
from palestra.spec.algorithm import Preset

QUICKSTART = Path(__file__).parent.parent / "examples" / "quickstart"
sys.path.insert(0, str(QUICKSTART))

ASYNCHRONOUS = {"dr_grpo, staleness 1": 1, "dr_grpo, staleness 4": 4}
COSTS = ("time/rollout", "time/train", "time/publish", "time/eval")


def start(folder: Path) -> Path:
    """The model that all begin with."""
    from teacher import write_lessons

    write_lessons(folder / "lessons.jsonl")
    overrides = [f"data.train.lessons.path={folder / 'lessons.jsonl'}", "threads=1"]
    return palestra.run(str(QUICKSTART / "sft.yaml"), overrides=overrides, root=folder / "runs", quiet=True).path


def measure(label: str, preset: str, staleness: int, model: Path, given: argparse.Namespace) -> dict[str, Any]:
    """Train all seeds of a row."""
    overrides = [
        f"name={label.replace(', ', '_').replace(' ', '_')}",
        f"model.init={model}",
        f"algorithm={{preset: {preset}{', critic: {lr: 3e-4}' if preset == 'ppo' else ''}}}",
        f"rollout.staleness={staleness}",
        f"train.steps={given.steps}",
        "eval={problems: 500}",
        "every.eval=null",
        f"max_session={given.seeds}",
        "threads=1",
    ]
    run = palestra.run(str(QUICKSTART / "grpo.yaml"), overrides=overrides, root=given.folder / "runs", quiet=True)
    before, after, seconds = [], [], []
    for seed in run.seeds:
        rows = run.metrics(seed)
        scores = [row["eval/accuracy"] for row in rows if "eval/accuracy" in row]
        before.append(scores[0])
        after.append(scores[-1])
        seconds.append(sum(row.get(cost, 0.0) for row in rows for cost in COSTS))
    return {
        "benchmark": "learning_cpu",
        "row": label,
        "seeds": len(after),
        "before": round(fmean(before), 3),
        "after": round(fmean(after), 3),
        "spread": round(pstdev(after), 3),
        "worst": round(min(after), 3),
        "seconds": round(fmean(seconds), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--presets", nargs="*", default=[*get_args(Preset), *ASYNCHRONOUS])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--folder", type=Path, default=Path(".bench/learning_cpu"))
    given = parser.parse_args()
    model, rows = start(given.folder), []
    for label in given.presets:
        row = measure(label, label.split(",")[0], ASYNCHRONOUS.get(label, 0), model, given)
        rows.append(row)
        print(json.dumps(row), flush=True)
    lines = ["| preset | before | after | spread | worst seed | seconds |", "| --- | --- | --- | --- | --- | --- |"]
    lines += ["| " + " | ".join(str(row[key]) for key in ("row", *list(row)[3:])) + " |" for row in rows]
    (given.folder / "table.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
