"""A run in an environment: credit of turns, rollouts that are written and read, resume to the same numbers."""

from pathlib import Path

import pytest
from posttrain_lab import Lab, assert_equal_runs, rollouts_of

TASK = {"task": "environment:played_environments:Letters", "args": {"size": 20}}
CHANGES = {
    "tasks": {"train": [TASK], "eval": [TASK]},
    "rollout": {"group": 4, "max_new_tokens": 3, "workflow": {"name": "environment", "turns": 3}},
    "algorithm": {"preset": "dr_grpo", "turns": {"credit": "turn", "discount": 0.5}},
}


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    return Lab(tmp_path)


def test_run_in_an_environment_resumes_exactly_and_has_an_advantage_for_every_turn(lab: Lab) -> None:
    whole = lab.run(name="whole", train__steps=4, **CHANGES)
    lab.run(name="half", train__steps=2, **CHANGES)
    half = lab.resume("half", overrides={"train.steps": 4}, allow=["train.steps"])
    assert_equal_runs(half, whole)
    records = rollouts_of(whole)
    trajectories = [(t, a) for one in records for t, a in zip(one.group.trajectories, one.advantages, strict=True)]
    assert all(len(t.turn_rewards) == len(t.turns) and sum(t.turn_rewards) == t.reward for t, _ in trajectories)
    for trajectory, advantages in trajectories:
        for begin, end in trajectory.turns:
            assert len(set(advantages[begin:end])) == 1
    assert any(len({advantages[begin] for begin, _ in t.turns}) > 1 for t, advantages in trajectories)
