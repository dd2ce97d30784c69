"""Three agents, one model: it learns to use a calculator through each of three APIs.

    python examples/agents/run.py [--seed 0] [--agents chat responses messages]

Minutes on one core, without a network. Each run folder gets a result.json with the held-out score before and after.
"""

import argparse
import json
import time
from pathlib import Path

import palestra
from examples.agents.lessons import write_lessons

HERE = Path(__file__).parent
COUNTS = ("part/requests", "part/forks", "part/retokenized", "status/error", "status/timeout")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--agents", nargs="+", default=["chat", "responses", "messages"])
    given = parser.parse_args()
    write_lessons(Path("data/agents/lessons.jsonl"))
    taught = palestra.run(str(HERE / "sft.yaml"), overrides=[f"seed={given.seed}"])
    for agent in given.agents:
        began = time.process_time()
        run = palestra.run(str(HERE / f"{agent}.yaml"), overrides=[f"seed={given.seed}", f"model.init={taught.path}"])
        rows = list(run.metrics(given.seed))
        curve = [row["eval/accuracy"] for row in rows if "eval/accuracy" in row]
        counts = {name: max(row[name] for row in rows if name in row) for name in COUNTS}
        result = {"agent": agent, "seed": given.seed, "before": curve[0], "after": curve[-1], "curve": curve, **counts}
        result["cpu_seconds_without_agents"] = round(time.process_time() - began, 1)
        (run.path / "result.json").write_text(json.dumps(result, indent=1) + "\n")
        print(json.dumps(result))


if __name__ == "__main__":
    main()
