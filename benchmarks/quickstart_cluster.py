"""The quickstart in one process and on a cluster: held-out accuracy, staleness and lost groups, seed by seed.

    python benchmarks/quickstart_cluster.py [--seeds 100 101 102] [--staleness 1] [--address auto]

Both continue the same model of sft.yaml. The cluster has two trainers, two generators and a verifier, on a local Ray
(`--address local`: on processes of this machine). One JSON line a run, then the difference of the means.
"""

import argparse
import json
import os
import sys
import tempfile
from collections import Counter
from pathlib import Path
from statistics import fmean
from typing import Any

import palestra
from palestra.runs.run import Run

QUICKSTART = Path(__file__).parent.parent / "examples" / "quickstart"


def outcome(run: Run, seed: int) -> dict[str, Any]:
    """What a run has learned, and what became of its groups."""
    rows = run.metrics(seed)
    trained = Counter(
        row["number"]
        for row in map(json.loads, (run.path / "sessions" / str(seed) / "rollouts.jsonl").read_text().splitlines())
        if row["fate"] == "trained"
    )
    scores = [row["eval/arithmetic/accuracy"] for row in rows if "eval/arithmetic/accuracy" in row]
    steps = [row for row in rows if "time/train" in row]
    seconds = fmean(row["time/rollout"] + row["time/train"] + row["time/publish"] for row in steps)
    return {
        "before": scores[0],
        "after": scores[-1],
        "staleness_max": max(row["staleness_max"] for row in steps),
        "groups": len(trained),
        "twice": sum(count > 1 for count in trained.values()),
        "lost": max(trained) + 1 - len(trained),
        "seconds_a_step": round(seconds, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[100, 101, 102])
    parser.add_argument("--staleness", type=int, default=1)
    parser.add_argument("--address", default="auto")
    given = parser.parse_args()
    sys.path.insert(0, str(QUICKSTART))
    from teacher import write_lessons

    cluster = f"{{trainers: 2, generators: 2, verifiers: 1, address: {given.address}}}"
    cases = {"one process": [], "cluster": [f"cluster={cluster}", f"rollout.staleness={given.staleness}"]}
    after: dict[str, list[float]] = {name: [] for name in cases}
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for seed in given.seeds:
            write_lessons(Path("data/quickstart/lessons.jsonl"), seed)
            taught = palestra.run(str(QUICKSTART / "sft.yaml"), overrides=[f"seed={seed}"], quiet=True)
            for name, overrides in cases.items():
                settings = [f"seed={seed}", f"model.init={taught.path}", *overrides]
                run = palestra.run(str(QUICKSTART / "grpo.yaml"), overrides=settings, quiet=True)
                found = outcome(run, seed)
                after[name].append(found["after"])
                print(json.dumps({"run": name, "seed": seed, **found}), flush=True)
    means = {name: round(fmean(scores), 4) for name, scores in after.items()}
    print(json.dumps({**means, "difference": round(means["cluster"] - means["one process"], 4)}))


if __name__ == "__main__":
    main()
