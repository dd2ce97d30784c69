"""The shipped specs learn what they are for."""

import pytest
from example_specs import ROOT

import palestra


@pytest.mark.slow
def test_fast_cartpole_spec_solves_it_with_every_one_of_four_seeds(tmp_path):
    run = palestra.run(ROOT / "examples/control/ppo_cartpole_fast.yaml", root=tmp_path, quiet=True, max_session=4)
    for seed in run.seeds:
        rows = run.metrics(seed)
        assert rows[0]["return"] < 50  # it begins like a random policy, whose return is 22
        assert rows[-1]["eval/return"] >= 475  # Gymnasium's threshold for CartPole-v1, over 100 episodes
    assert run.summary()["eval/return"] >= 475
