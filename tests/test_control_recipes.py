"""The recipes for MiniGrid and the DeepMind Control Suite: what is observed, that both train, what is refused."""

import numpy as np
import pytest

import palestra
from palestra.control.envs.make import make_single
from palestra.errors import UsageError
from palestra.spec.kinds.control import EnvSpec

ROOMS = {"id": "palestra.control.envs.grids:Grid", "kwargs": {"id": "MiniGrid-Empty-5x5-v0"}}


def test_grid_shows_every_cell_one_hot():
    pytest.importorskip("minigrid")
    env = make_single(EnvSpec.model_validate(ROOMS), render_mode="rgb_array")
    obs, _ = env.reset(seed=0)
    image = env.unwrapped.gen_obs()["image"]
    cells = obs.reshape(7, 7, 21)
    assert (cells.reshape(49, 21).sum(1) == 3).all()
    np.testing.assert_array_equal(cells[..., :11].argmax(-1), image[..., 0])
    np.testing.assert_array_equal(cells[..., 11:17].argmax(-1), image[..., 1])
    np.testing.assert_array_equal(cells[..., 17:].argmax(-1), image[..., 2])
    assert env.observation_space.contains(obs)
    assert env.render().shape[-1] == 3


def test_grid_of_another_environment_is_refused():
    pytest.importorskip("minigrid")
    with pytest.raises(UsageError, match="CartPole-v1 is not an environment of MiniGrid"):
        make_single(EnvSpec.model_validate({**ROOMS, "kwargs": {"id": "CartPole-v1"}}))


def test_grid_recipe_trains_for_a_moment(tmp_path):
    pytest.importorskip("minigrid")
    few = {"train.frames": 1024, "max_session": 1, "eval.episodes": 1, "every.eval": None}
    run = palestra.run("examples/control/ppo_minigrid.yaml", root=tmp_path, quiet=True, overrides=few)
    assert np.isfinite(run.metrics()[-1]["eval/return"])


def test_control_suite_has_its_observations_as_one_array():
    pytest.importorskip("shimmy")
    pytest.importorskip("dm_control")
    spec = {"id": "dm_control/cartpole-balance-v0", "module": "palestra.control.envs.dm_control"}
    env = make_single(EnvSpec.model_validate(spec))
    obs, _ = env.reset(seed=0)
    again, _ = env.reset(seed=0)
    assert obs.shape == (5,)
    np.testing.assert_array_equal(obs, again)
    _, reward, terminated, truncated, _ = env.step(np.zeros(1))
    assert 0 < float(reward) <= 1
    assert not terminated
    assert not truncated


@pytest.mark.slow
def test_control_suite_recipe_learns(tmp_path):
    pytest.importorskip("shimmy")
    pytest.importorskip("dm_control")
    run = palestra.run("examples/control/sac_dm_control.yaml", root=tmp_path, quiet=True, seed=100, max_session=1)
    first = next(row["return"] for row in run.metrics() if "return" in row)  # no episode has ended in the row before
    assert run.metrics()[-1]["eval/return"] > first + 200


@pytest.mark.slow
def test_empty_room_is_solved_with_every_one_of_three_seeds(tmp_path):
    pytest.importorskip("minigrid")
    given = {"seed": 100, "max_session": 3}
    run = palestra.run("examples/control/ppo_minigrid.yaml", root=tmp_path, quiet=True, overrides=given)
    for seed in run.seeds:
        assert run.metrics(seed)[-1]["eval/return"] > 0.9  # 1 less 0.9 × the share of steps used
