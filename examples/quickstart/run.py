"""The quickstart: a small language model learns from imperfect lessons, then from rewards that can be checked.

    python examples/quickstart/run.py [--seed 0] [--control]

It takes a minute and a half on two ARM cores and needs no network. `--control` shuffles the rewards across completions:
what is gained without it is gained from the rewards. The run folder gets a result.json.
"""

import argparse
import json
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table
from teacher import write_lessons

import palestra

HERE = Path(__file__).parent
ROWS = {"right at the first attempt": "greedy", "right at a random attempt": "pass@1", "right in one of four": "pass@4"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--control", action="store_true", help="shuffle the rewards across completions")
    given = parser.parse_args()
    began, console = time.perf_counter(), Console()

    console.print("[bold]1/2[/] lessons of a teacher who forgets to carry two times in three")
    write_lessons(Path("data/quickstart/lessons.jsonl"), given.seed)
    taught = palestra.run(str(HERE / "sft.yaml"), overrides=[f"seed={given.seed}"])

    console.print("[bold]2/2[/] rewards: is the sum right?" + (" (shuffled)" if given.control else ""))
    overrides = [f"seed={given.seed}", f"model.init={taught.path}"]
    overrides += ["name=sums_control", "control=shuffled_rewards"] if given.control else []
    trained = palestra.run(str(HERE / "grpo.yaml"), overrides=overrides)

    rows = [row for row in trained.metrics(given.seed) if "eval/accuracy" in row]
    result = {
        "before": rows[0]["eval/arithmetic/accuracy"],
        "after": rows[-1]["eval/arithmetic/accuracy"],
        "seconds": round(time.perf_counter() - began, 1),
        "seed": given.seed,
        "control": given.control,
    }
    (trained.path / "result.json").write_text(json.dumps(result, indent=1) + "\n")
    table = Table(title="500 sums that it has never seen", title_justify="left")
    for name in ("", "before", "after"):
        table.add_column(name, justify="right" if name else "left")
    for label, key in ROWS.items():
        metric = "eval/arithmetic/accuracy" if key == "greedy" else f"eval/arithmetic/{key}"
        table.add_row(label, *(f"{row[metric]:.1%}" for row in (rows[0], rows[-1])))
    console.print(table)
    console.print(f"{result['seconds']:.0f} seconds. The curve: {trained.path / 'plots' / 'learning_curve.png'}")
    console.print(f"What it wrote: palestra rollouts {trained.path} --status wrong")


if __name__ == "__main__":
    main()
