"""MuJoCo's environments as arrays against Gymnasium's own, number for number."""

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from palestra.control.envs.make import make_vector
from palestra.control.envs.mujoco import VECTORS, MujocoVector
from palestra.errors import UsageError
from palestra.spec.kinds.control import EnvSpec

pytest.importorskip("mujoco")
everywhere = pytest.mark.parametrize("name", VECTORS)


def made(name: str, num_envs: int, threads: int) -> MujocoVector:
    return VECTORS[name](name, num_envs, threads)


def random_actions(env: MujocoVector, rng: np.random.Generator) -> np.ndarray:
    """Strong and weak ones, also beyond the bounds."""
    shape = env.action_space.shape
    return (rng.uniform(-1.5, 1.5, shape) * rng.choice([0.1, 1.0], (shape[0], 1))).astype(np.float32)


@everywhere
@pytest.mark.parametrize(("num_envs", "threads"), [(1, 1), (5, 3)])
def test_step_beside_sync_vector_env_same_seed_gives_equal_bytes(name, num_envs, threads):
    ours = made(name, num_envs, threads)
    theirs = SyncVectorEnv([lambda: gymnasium.make(name)] * num_envs, autoreset_mode=AutoresetMode.SAME_STEP)
    assert ours.single_observation_space == theirs.single_observation_space
    assert ours.observation_space == theirs.observation_space
    assert ours.action_space == theirs.action_space
    rng, ends = np.random.default_rng(num_envs), 0
    assert ours.reset(seed=5)[0].tobytes() == theirs.reset(seed=5)[0].tobytes()
    long = name in ("Ant-v5", "HalfCheetah-v5", "Swimmer-v5", "HumanoidStandup-v5")  # until the time limit
    for step in range(1010 if long and num_envs == 1 else 110):
        actions = random_actions(ours, rng)
        obs, rewards, terminated, truncated, infos = ours.step(actions)
        obs_theirs, rewards_theirs, *ends_theirs, infos_theirs = theirs.step(actions)
        assert obs.tobytes() == obs_theirs.tobytes(), step
        assert rewards.tobytes() == rewards_theirs.tobytes(), (step, rewards - rewards_theirs)
        np.testing.assert_array_equal([terminated, truncated], ends_theirs)
        for i in np.flatnonzero(infos.get("_final_obs", [])):
            ends += 1
            assert infos["final_obs"][i].tobytes() == infos_theirs["final_obs"][i].tobytes()
    assert ends > 0 or (long and num_envs > 1)
    ours.close()


@everywhere
def test_set_state_in_fresh_env_continues_with_equal_bytes(name):
    rng = np.random.default_rng(0)
    for before in (0, 1, 60):
        env, other = made(name, 3, 1), made(name, 3, 2)
        env.reset(seed=before)
        for _ in range(before):
            env.step(random_actions(env, rng))
        state = env.get_state()
        other.reset(seed=99)
        other.step(random_actions(other, rng))
        other.set_state(state)
        for _ in range(60):
            actions = random_actions(env, rng)
            results = [one.step(actions)[:4] for one in (env, other)]
            assert all(a.tobytes() == b.tobytes() for a, b in zip(*results, strict=True))
        other.close()


@pytest.mark.parametrize("actions", [np.zeros((2, 2)), np.full((2, 3), np.nan), np.zeros((2, 3), int)])
def test_step_invalid_actions_raises_and_changes_nothing(actions):
    env = made("Hopper-v5", 2, 1)
    env.reset(seed=0)
    before = env.get_state()
    with pytest.raises(UsageError, match=r"finite floats of shape \(2, 3\)"):
        env.step(actions)
    after = env.get_state()
    assert before["state"].tobytes() == after["state"].tobytes()
    assert before["elapsed"].tobytes() == after["elapsed"].tobytes()


def test_step_returned_arrays_are_never_written_again():
    env, rng = made("Ant-v5", 3, 2), np.random.default_rng(0)
    results = [env.reset(seed=0)[0]]
    for _ in range(20):
        obs, rewards, terminated, truncated, infos = env.step(random_actions(env, rng))
        results += [obs, rewards, terminated, truncated, *infos.values()]
    kept = [array.copy() for array in results]
    env.step(random_actions(env, rng))
    for array, copy in zip(results, kept, strict=True):
        np.testing.assert_array_equal(array, copy)
    env.close()


def test_make_vector_takes_it_without_keywords_and_copies_with_them():
    assert isinstance(make_vector(EnvSpec(id="Hopper-v5", num_envs=2), 2), MujocoVector)
    other = make_vector(EnvSpec(id="Hopper-v5", num_envs=2, kwargs={"frame_skip": 8}, vectorize="sync"), 2)
    assert not isinstance(other, MujocoVector)
    other.close()
