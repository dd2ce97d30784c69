"""From preferences to behavior: a language model, a reward model learned from pairs, and PPO with a critic.

    python examples/posttrain/rlhf/run.py [--seed 0]

It takes about 70 seconds of processor time and needs no network. The run folder of PPO gets a result.json.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import make_data
from rich.console import Console
from rich.table import Table

import palestra

HERE = Path(__file__).parent
ROWS = {
    "right and polite": "eval/pass@1",
    "right": "eval/Manners/parts/right",
    "polite": "eval/Manners/parts/polite",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    seed = parser.parse_args().seed
    began, console = time.perf_counter(), Console()
    sys.path += map(str, HERE.parents)  # ppo.yaml names manners.py as seen from one of them

    console.print("[bold]1/3[/] lessons: answers that are right, and rude two times in three")
    make_data.main(Path("data/rlhf"), seed)
    palestra.run(str(HERE / "sft.yaml"), overrides=[f"seed={seed}"])
    console.print("[bold]2/3[/] a reward model: of two answers, people prefer the polite one")
    judge = palestra.run(str(HERE / "reward_model.yaml"), overrides=[f"seed={seed}"])
    console.print("[bold]3/3[/] PPO with a critic: higher scores of the reward model, near the model of the lessons")
    trained = palestra.run(str(HERE / "ppo.yaml"), overrides=[f"seed={seed}"])

    rows = [row for row in trained.metrics(seed) if "eval/pass@1" in row]
    before, after = rows[0], rows[-1]
    result = {
        "before": {label: before[key] for label, key in ROWS.items()},
        "after": {label: after[key] for label, key in ROWS.items()},
        "reward_model_accuracy": judge.metrics(seed)[-1]["eval/accuracy"],
        "seconds": round(time.perf_counter() - began, 1),
        "seed": seed,
    }
    (trained.path / "result.json").write_text(json.dumps(result, indent=1) + "\n")
    table = Table(title="answers to 250 questions that no step has seen, judged by manners.py", title_justify="left")
    for name in ("", "before", "after"):
        table.add_column(name, justify="right" if name else "left")
    for label, key in ROWS.items():
        table.add_row(label, *(f"{row[key]:.1%}" for row in (before, after)))
    console.print(table)
    console.print(f"The reward model tells {result['reward_model_accuracy']:.1%} of held-out pairs apart.")
    console.print(f"{result['seconds']:.0f} seconds. The curve: {trained.path / 'plots' / 'learning_curve.png'}")
    console.print(f"What it wrote: palestra rollouts {trained.path}")


if __name__ == "__main__":
    main()
