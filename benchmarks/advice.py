"""How precise the advice is: each rule over runs broken for it, over runs near to its limit, and over healthy runs.

    python benchmarks/advice.py --runs advice_runs > docs/advice.jsonl && python docs/generate.py

It trains the examples below with small budgets and seeds from 1000 on (half an hour on two cores; runs that are there
already are not trained again), and writes five broken runs and five near ones for each rule with the writers of real
runs (`tests/advice_fixtures.py`). One JSON line a rule: in how many of these runs it fired. Before them one line for
each of a few examples that are broken by a setting: what is said of them.
"""

import argparse
import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
sys.path += [str(ROOT / "tests"), str(EXAMPLES / "quickstart"), str(EXAMPLES / "lm")]

import advice_fixtures  # noqa: E402  # pyrefly: ignore[missing-import]
import make_data  # noqa: E402
import teacher  # noqa: E402

import palestra  # noqa: E402
from palestra.runs.run import Run, list_runs  # noqa: E402
from palestra.view.advice import RULES, advise  # noqa: E402

TEXT = Path(os.environ.get("PALESTRA_DATA", ROOT / "../shared/data")) / "tinyshakespeare/input.txt"
ONE = "max_session=1"
GRPO = ("train.steps=40", "train.prompts_per_step=32", "eval.problems=64", "every.eval=10 steps")
# A name, the example, and what is smaller than in it.
HEALTHY: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("ppo_fast", "control/ppo_cartpole_fast", ("max_session=4",)),
    ("sums_sft", "quickstart/sft", ()),
    ("words_sft", "lm/sft", ("every.log=5 steps",)),
    ("sums_grpo", "quickstart/grpo", GRPO),
    ("sums_async", "quickstart/grpo", (*GRPO, "rollout.staleness=2")),
    ("sums_dapo", "quickstart/grpo", (*GRPO, "algorithm.preset=dapo")),
    ("sums_rloo", "quickstart/grpo", (*GRPO, "algorithm.preset=rloo")),
    ("sums_gspo", "quickstart/grpo", (*GRPO, "algorithm.preset=gspo")),
    ("words_dpo", "lm/dpo", ("model.init=words_sft", "every.log=2 steps")),
    ("words_reward", "lm/reward_model", ("model.init=words_sft", "every.log=2 steps")),
    ("words_moe", "lm/moe", ("train.steps=100", "every.log=4 steps")),
    ("shakespeare", "lm/shakespeare", ("train.steps=30", "every.log=1 steps", "train.batch=16", "eval.examples=16")),
    ("ppo_cartpole", "control/ppo_cartpole", ("train.frames=25000", ONE)),
    ("a2c_cartpole", "control/a2c_cartpole", ("train.frames=25000", ONE)),
    ("reinforce_cartpole", "control/reinforce_cartpole", ("train.frames=40000", ONE)),
    ("dqn_cartpole", "control/dqn_cartpole", ("train.frames=15000", ONE)),
    ("ddqn_cartpole", "control/ddqn_per_cartpole", ("train.frames=12000", ONE)),
    ("sarsa_cartpole", "control/sarsa_cartpole", ("train.frames=30000", ONE)),
    ("sac_pendulum", "control/sac_pendulum", ("train.frames=6000", ONE)),
    ("td3_pendulum", "control/td3_pendulum", ("train.frames=5000", ONE)),
    ("crossq_pendulum", "control/crossq_pendulum", ("train.frames=8000", ONE)),
    ("ppo_pendulum", "control/ppo_pendulum", ("train.frames=80000", ONE)),
    ("ppo_acrobot", "control/ppo_acrobot", ("train.frames=60000", ONE)),
    ("ppo_imitation", "control/ppo_sil_cartpole", ("train.frames=25000", ONE)),
)

SHORT = ("train.steps=24", "train.prompts_per_step=16", "eval.problems=32", "every.eval=8 steps")
SFT = ("train.steps=60", "every.log=2 steps")
# The same, broken by what comes last.
BROKEN: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("cut_short", "quickstart/grpo", (*SHORT, "rollout.max_new_tokens=2")),
    ("large_lr", "quickstart/grpo", (*SHORT, "optim.lr=0.05")),
    ("large_lr_ppo", "control/ppo_cartpole_fast", (ONE, "train.frames=45000", "algorithm.lr=0.5")),
    ("tiny_lr", "lm/sft", (*SFT, "optim={name: adamw, lr: 1.0e-9}")),
    ("growing_lr", "lm/sft", (*SFT, "optim={name: adamw, lr: {shape: linear, start: 0.001, end: 3.0}}")),
)


def trained(root: Path) -> Iterator[Run]:
    """The runs of HEALTHY and then of BROKEN, each trained if it is not there."""
    root.mkdir(parents=True, exist_ok=True)
    os.chdir(root.parent)  # the examples name their data from the folder where they are started
    if not Path("data/quickstart").exists():
        teacher.write_lessons(Path("data/quickstart/lessons.jsonl"))
        make_data.main(Path("data"))
    there = {run.name: run for run in list_runs(root) if run.state == "done"}
    for number, (name, example, smaller) in enumerate(HEALTHY + BROKEN):
        if name not in there:
            print(f"{name}: {example}", file=sys.stderr, flush=True)
            overrides = [f"name={name}", f"seed={1000 + number}", *smaller]
            variables = {"text": str(TEXT)} if name == "shakespeare" else {}
            spec = str(EXAMPLES / f"{example}.yaml")
            there[name] = palestra.run(spec, overrides=overrides, variables=variables, root=root, quiet=True)
        yield there[name]


def fired(run: Run) -> list[str]:
    return [advice.rule for advice in advise(run)]


def of_fixtures(folder: Path, broken: bool, count: int) -> dict[str, Counter[str]]:
    """By the rule that the runs were made for: how often each rule fired in them."""
    found: dict[str, Counter[str]] = {rule: Counter() for rule in RULES}
    for noise in range(100, 100 + count):
        for rule in advice_fixtures.CASES:
            found[rule].update(fired(advice_fixtures.write_case(folder, rule, broken=broken, noise=noise)))
        found["failed"].update(fired(advice_fixtures.write_failed(folder, broken=broken, noise=noise)))
        found["odd_seed"].update(fired(advice_fixtures.write_seeds(folder, broken=broken, noise=noise)))
        with advice_fixtures.running(folder, broken=broken, noise=noise) as run:
            found["stalled"].update(fired(run))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=Path("advice_runs"), help="the folder of the healthy runs")
    parser.add_argument("--count", type=int, default=5, help="broken and near runs for each rule")
    options = parser.parse_args()
    found = {run.name: [advice.rule for advice in advise(run)] for run in trained(options.runs.absolute())}
    for name, example, changes in BROKEN:
        print(json.dumps({"example": example, "broken by": changes[-1], "fired": found.pop(name)}), flush=True)
    healthy = Counter(rule for names in found.values() for rule in set(names))
    with tempfile.TemporaryDirectory() as folder:
        broken = of_fixtures(Path(folder), True, options.count)
        near = sum(of_fixtures(Path(folder), False, options.count).values(), Counter())
    for rule in RULES:
        runs = {"broken": options.count, "near": options.count * len(RULES), "healthy": len(found)}
        hits = {"broken": broken[rule][rule], "near": near[rule], "healthy": healthy[rule]}
        print(json.dumps({"rule": rule, "runs": runs, "fired": hits}), flush=True)


if __name__ == "__main__":
    main()
