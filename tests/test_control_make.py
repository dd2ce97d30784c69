"""Environments by import path and with stacked frames, and a run whose environment hangs."""

from contextlib import closing

import gymnasium as gym
import numpy as np
import pytest
from hanging_envs import Hanging

import palestra
from palestra.control.envs.classic import NumpyVector
from palestra.control.envs.make import NUMPY, make_single, make_vector
from palestra.control.envs.snapshot import restore_vector, vector_exactness, vector_state
from palestra.control.envs.vector import Copies
from palestra.control.envs.watchdog import EnvironmentHung
from palestra.errors import UsageError
from palestra.spec.kinds.control import EnvSpec


@pytest.mark.parametrize("name", NUMPY)
def test_array_environment_is_taken_without_being_asked_for_and_not_with_arguments(name):
    with closing(make_vector(EnvSpec(id=name), 2)) as env:
        assert isinstance(env, NumpyVector)
        assert env.max_episode_steps == gym.spec(name).max_episode_steps
    with closing(make_vector(EnvSpec(id=name, vectorize="sync", kwargs={"max_episode_steps": 3}), 2)) as env:
        assert isinstance(env, Copies)


def test_import_path_of_a_class_makes_it_with_the_arguments():
    env = make_single(EnvSpec(id="hanging_envs:Hanging", kwargs={"length": 9, "at": -1}))
    assert isinstance(env, Hanging)
    assert env.length == 9


def test_import_path_of_a_wrapper_makes_it_with_the_arguments():
    env = make_single(EnvSpec(id="hanging_envs:Wrapped", kwargs={"length": 9}), render_mode="rgb_array")
    assert isinstance(env.unwrapped, Hanging)
    assert env.unwrapped.length == 9


def test_import_path_of_a_registered_id_makes_that():
    gym.register("Counted-v0", entry_point=lambda: Hanging(at=-1), max_episode_steps=4)
    env = make_single(EnvSpec(id="hanging_envs:Counted-v0"))
    assert isinstance(env.unwrapped, Hanging)
    assert env.spec is not None
    assert env.spec.max_episode_steps == 4


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"id": "no_such_module:Env"}, r"env\.id: no_such_module cannot be imported"),
        ({"id": "hanging_envs:Nothing"}, r"env\.id: hanging_envs has no environment 'Nothing'"),
        ({"id": "hanging_envs:np"}, "has no environment 'np'"),
        ({"id": "hanging_envs:Hanging", "kwargs": {"no": 1}}, "could not be made with"),
        ({"id": "collections:OrderedDict"}, "must make a gymnasium.Env, it made a OrderedDict"),
        ({"id": "hanging_envs:Hanging", "vectorize": "vector"}, "no vectorized form"),
    ],
)
def test_import_path_that_is_wrong_is_an_error_of_the_spec(given, said):
    with pytest.raises(UsageError, match=said):
        make_vector(EnvSpec(**given), 1)


@pytest.mark.parametrize("way", ["auto", "sync", "async"])
def test_frame_stack_shows_the_last_observations_newest_last_and_clears_at_a_reset(way):  # point 33
    spec = EnvSpec(id="hanging_envs:Hanging", kwargs={"at": -1, "length": 5}, frame_stack=3, vectorize=way)
    with closing(make_vector(spec, 2)) as env:
        assert env.single_observation_space.shape == (3, 2)
        obs, _ = env.reset(seed=0)
        for t in range(1, 13):
            assert obs[:, :, 0].tolist() == [[max(0, (t - 1) % 5 + k - 2) for k in range(3)]] * 2
            assert not obs[:, :2].any() or (t - 1) % 5 > 0
            obs, _, _, truncated, infos = env.step(np.zeros(2, np.int64))
            if truncated.any():
                assert infos["final_obs"][:, :, 0].tolist() == [[3, 4, 5]] * 2


def test_frame_stack_saved_in_the_middle_continues_with_equal_bytes():
    spec = EnvSpec(id="CartPole-v1", frame_stack=4)
    with closing(make_vector(spec, 2)) as env, closing(make_vector(spec, 2)) as other:
        assert isinstance(env, Copies)
        assert vector_exactness(env) is None
        env.reset(seed=0)
        rng = np.random.default_rng(0)
        for _ in range(30):
            env.step(rng.integers(0, 2, 2))
        other.reset(seed=1)
        assert restore_vector(other, vector_state(env)) is None
        for _ in range(40):
            actions = rng.integers(0, 2, 2)
            results = env.step(actions)[:4], other.step(actions)[:4]
            assert all(a.tobytes() == b.tobytes() for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("way", ["sync", "async"])
def test_run_whose_environment_hangs_in_reset_fails_and_names_it(tmp_path, way):
    spec = {
        "kind": "control",
        "name": "hangs",
        "env": {
            "id": "hanging_envs:Hanging",
            "kwargs": {"when": "reset", "at": 4},
            "num_envs": 2,
            "vectorize": way,
            "reset_timeout": 1.0,
        },
        "algorithm": {"name": "ppo", "horizon": 16, "minibatch": 32},
        "train": {"frames": 1000, "compile": "off"},
        "eval": {"episodes": 1, "num_envs": 1},
    }
    with pytest.raises(EnvironmentHung, match="hanging_envs:Hanging hangs: environment 0 did not return from res"):
        palestra.run(spec, root=tmp_path, quiet=True)
    assert palestra.open_run("hangs", tmp_path).state == "failed"
