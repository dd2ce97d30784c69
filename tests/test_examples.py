"""The shipped specs learn what they are for."""

import pytest
from example_specs import ROOT

import palestra


@pytest.mark.slow
def test_fast_cartpole_spec_solves_it_with_every_one_of_four_seeds(tmp_path):
    run = palestra.run(ROOT / "examples/control/ppo_cartpole_fast.yaml", root=tmp_path, quiet=True, max_session=4)
    for seed in run.seeds:
        evaluations = [row["eval/return"] for row in run.metrics(seed) if "eval/return" in row]
        assert evaluations[0] < 450  # after a sixth of the frames it is not there yet
        assert evaluations[-1] >= 475  # Gymnasium's threshold for CartPole-v1, over 100 episodes
    assert run.summary()["eval/return"] >= 475
