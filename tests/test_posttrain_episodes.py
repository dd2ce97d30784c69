"""An episode of several rows weighs as one: its reward, its baseline and its share of the loss."""

from dataclasses import replace

import pytest
import torch
from rollout_groups import group, trajectory

from palestra.posttrain.batch import denominator, pack, shuffled_rewards, with_advantages
from palestra.posttrain.metrics import group_metrics
from palestra.rollout.types import Group
from palestra.spec.algorithm import AlgorithmSpec

PRESETS = ["grpo", "dr_grpo", "dapo", "rloo", "reinforce_pp", "gspo"]


def in_rows(rows: int) -> Group:
    """Three completions, of which the second has 12 sampled tokens in so many rows."""
    pieces = [trajectory(1.0, 12 // rows, prompt=2 + place, row=place) for place in range(rows)]
    return group([0, 1, 0], trajectories=(trajectory(0.0, 4), *pieces, trajectory(0.0, 6)))


def losses(rows: int, algorithm: AlgorithmSpec) -> tuple[torch.Tensor, float]:
    """The weighted advantages of the trained tokens in order, and what divides their sum."""
    other = group([1, 0], number=1)
    batch = pack([in_rows(rows), other], algorithm)
    trained = batch.loss_mask > 0
    anchor = batch.per_token["behavior"]
    batch = with_advantages(batch, algorithm, max_new_tokens=16, anchor=anchor, reference=anchor)
    weighted = batch.per_token["advantages"] * batch.per_token["weights"]
    return weighted[trained], denominator(batch, algorithm, 16)


@pytest.mark.parametrize("rows", [2, 3])
@pytest.mark.parametrize("preset", PRESETS)
def test_loss_of_an_episode_does_not_depend_on_its_number_of_rows(preset, rows):
    algorithm = AlgorithmSpec.model_validate({"preset": preset})
    (one, divisor), (several, same) = losses(1, algorithm), losses(rows, algorithm)
    torch.testing.assert_close(several, one)
    assert same == divisor


def test_shuffled_rewards_are_those_of_the_episodes_and_alike_in_all_rows_of_one():
    algorithm = AlgorithmSpec.model_validate({"preset": "dr_grpo"})
    batch = pack([in_rows(3), group([1, 0], number=1)], algorithm)
    found = [shuffled_rewards(batch, key).per_sequence["reward"] for key in range(50)]
    assert all(len(set(rewards[1:4].tolist())) == 1 for rewards in found)
    episodes = [[rewards[row].item() for row in (0, 1, 4, 5, 6)] for rewards in found]
    assert all(sorted(rewards) == [0.0, 0.0, 0.0, 1.0, 1.0] for rewards in episodes)
    assert len(set(map(tuple, episodes))) == 10  # every order there is


def test_metrics_count_episodes_and_not_rows():
    one, several = (group_metrics([in_rows(rows)], [], 4) for rows in (1, 3))
    for name in ("reward", "reward_std", "reward_trained", "groups/partial", "pass@3", "status/correct"):
        assert several[name] == one[name]
    partial = replace(in_rows(3), trajectories=in_rows(3).trajectories[1:])
    assert group_metrics([partial], [], 4)["groups/partial"] == 1
