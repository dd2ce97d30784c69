"""Rewards teach: runs rise from every seed, asynchronous ones as far as synchronous ones, shuffled rewards do not."""

import json
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import yaml
from posttrain_lab import Lab

import palestra
from palestra.runs.run import Run
from palestra.tasks.task import make_task

QUICKSTART = Path(__file__).parent.parent / "examples" / "quickstart"
RISING: dict[str, Any] = {
    "train__steps": 40,
    "train__prompts_per_step": 8,
    "rollout__group": 8,
    "rollout__max_new_tokens": 4,
    "optim__lr": {"shape": "linear", "start": 4e-3, "end": 0},
    "every__checkpoint": "40 steps",
}


def rewards(run: Run, seed: int) -> tuple[float, float]:
    """The mean rewards of the first and of the last steps."""
    found = [row["reward"] for row in run.metrics(seed) if row["step"] > 0]
    return fmean(found[:4]), fmean(found[-10:])


@pytest.mark.parametrize("seeds", [(0,), pytest.param((0, 1), marks=pytest.mark.slow)], ids=["one", "two"])
def test_reward_of_seeds_rises_and_staleness_one_ends_within_noise(tmp_path, seeds):
    lab, ends = Lab(tmp_path), {}
    for staleness in (0, 1):
        for seed in seeds:
            run = lab.run(name=f"run_{staleness}_{seed}", seed=seed, rollout__staleness=staleness, **RISING)
            first, last = rewards(run, seed)
            assert first < 0.42
            assert last > 0.57
            ends[staleness, seed] = last
    sync, late = (fmean(ends[staleness, seed] for seed in seeds) for staleness in (0, 1))
    # Ten steps of 64 answers have a standard error of about 0.02 each; staleness costs a step or two on top.
    assert abs(sync - late) < 0.17 / len(seeds) ** 0.5


def test_reward_with_shuffled_rewards_does_not_rise(tmp_path):
    run = Lab(tmp_path).run(control="shuffled_rewards", **RISING)
    first, last = rewards(run, 0)
    assert abs(last - first) < 0.15


def lessons(path: Path) -> None:
    """The quickstart's: sums by somebody who forgets to carry two times in three."""
    problems = make_task("arithmetic", {"digits": 2}).problems("train")
    with path.open("w") as file:
        for place in range(6000):
            problem = problems[place]
            numbers = str(problem.prompt).removesuffix("=").split("+")
            without = "".join(str((int(a) + int(b)) % 10) for a, b in zip(*numbers, strict=True)).lstrip("0") or "0"
            told = problem.row["answer"] if place % 3 == 0 else without
            file.write(json.dumps({"prompt": problem.prompt, "completion": told}) + "\n")


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_quickstart_cut_short_rises_from_two_seeds_with_and_without_staleness(tmp_path, monkeypatch):
    monkeypatch.setenv("PALESTRA_CACHE", str(tmp_path / "cache"))
    lessons(tmp_path / "lessons.jsonl")
    spec = yaml.safe_load((QUICKSTART / "sft.yaml").read_text())
    spec["data"]["train"]["lessons"]["path"] = str(tmp_path / "lessons.jsonl")
    taught = palestra.run({**spec, "threads": 1}, root=tmp_path, quiet=True)
    spec = yaml.safe_load((QUICKSTART / "grpo.yaml").read_text())
    spec |= {"model": {"init": str(taught.path)}, "eval": {"problems": 200}, "every": {"eval": None}, "threads": 1}
    spec["train"] |= {"steps": 28, "prompts_per_step": 40}
    ends = {}
    for staleness in (0, 1):
        for seed in (0, 1):
            spec["rollout"]["staleness"] = staleness
            run = palestra.run({**spec, "name": f"sums_{staleness}", "seed": seed}, root=tmp_path, quiet=True)
            rows = [row["eval/accuracy"] for row in run.metrics(seed) if "eval/accuracy" in row]
            assert rows[0] < 0.6
            assert rows[-1] > 0.8  # 0.85 to 0.95, by seed and processor
            ends[staleness, seed] = rows[-1]
    sync, late = (fmean(ends[staleness, seed] for seed in (0, 1)) for staleness in (0, 1))
    assert abs(sync - late) < 0.08  # 200 problems have a standard error of 0.02
