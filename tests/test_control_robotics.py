"""FetchReach of gymnasium-robotics: it is made, its rewards take batches, its episodes continue after a resume."""

import numpy as np
import pytest
import torch
from probe_envs import learner_on

from palestra.control.envs.goals import goals_of
from palestra.control.envs.make import make_single, make_vector
from palestra.spec.kinds.control import EnvSpec

pytest.importorskip("gymnasium_robotics", reason="needs the extra robotics")
torch.set_num_threads(1)

SPEC = EnvSpec.model_validate({"id": "FetchReach-v4", "module": "palestra.control.envs.robotics", "vectorize": "sync"})


def test_goals_of_fetch_reach_are_rewarded_within_five_centimeters():
    goals = goals_of(make_single(SPEC))
    assert goals is not None
    achieved = np.zeros((3, 3), np.float32)
    desired = np.array([[0, 0, 0], [0.04, 0, 0], [0.06, 0, 0]], np.float32)
    assert goals.reward(achieved, desired, {}).tolist() == [0, 0, -1]


def test_state_round_trip_with_hindsight_continues_identically():
    def made():
        env = make_vector(SPEC, 2)
        return learner_on(env, "td3", net={"hidden": [8]}, her={}, horizon=30, start=40, batch=16, buffer=100)

    going = made()
    going.step(0.0)
    state, generator = going.state(), going.generator.get_state()
    expected = [going.step(0.0) for _ in range(2)]
    resumed = made()
    resumed.load_state(state)
    resumed.generator.set_state(generator)
    assert [resumed.step(0.0) for _ in range(2)] == expected
