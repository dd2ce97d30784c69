"""CartPoleVector against Gymnasium's own CartPole, number for number."""

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from hypothesis import given, settings
from hypothesis import strategies as st

from palestra.control.envs.classic import CartPoleVector
from palestra.errors import UsageError


def balancing(observations: np.ndarray, rng: np.random.Generator, noise: float) -> np.ndarray:
    """A policy that holds the pole up for a whole episode when `noise` is 0, and drops it sooner the higher it is."""
    x, x_velocity, angle, angle_velocity = observations.T
    good = (angle + 0.4 * angle_velocity + 0.03 * x + 0.1 * x_velocity > 0).astype(np.int64)
    return np.where(rng.random(len(good)) < noise, rng.integers(0, 2, len(good)), good)


@pytest.mark.parametrize(("num_envs", "steps"), [(1, 1200), (5, 1100), (64, 120)])
def test_step_same_states_as_gymnasium_gives_equal_bits(num_envs, steps):
    ours = CartPoleVector(num_envs)
    theirs = [gymnasium.make("CartPole-v1") for _ in range(num_envs)]
    rng = np.random.default_rng(0)
    observations, infos = ours.reset(seed=11)
    assert infos == {}
    singles = np.stack([env.reset(seed=11 + i)[0] for i, env in enumerate(theirs)])
    np.testing.assert_array_equal(observations, singles, strict=True)
    noise = np.linspace(0, 1, num_envs)  # the first environment balances to the time limit, the last one falls soon
    truncations = terminations = 0
    for _ in range(steps):
        actions = balancing(observations, rng, noise)
        observations, rewards, terminated, truncated, infos = ours.step(actions)
        states = ours.get_state()["state"]
        for i, env in enumerate(theirs):
            obs, reward, term, trunc, _ = env.step(actions[i])
            assert (rewards[i], terminated[i], truncated[i]) == (reward, term, trunc)
            if term or trunc:
                assert infos["_final_obs"][i]
                np.testing.assert_array_equal(infos["final_obs"][i], obs, strict=True)
                obs, _ = env.reset()
            np.testing.assert_array_equal(observations[i], obs, strict=True)
            # the float64 state behind the observation too
            np.testing.assert_array_equal(states[[0, 2, 1, 3], i], env.unwrapped.state, strict=True)
        ended = terminated | truncated
        assert infos.keys() == ({"final_obs", "_final_obs"} if ended.any() else set())
        if ended.any():
            np.testing.assert_array_equal(infos["_final_obs"], ended, strict=True)
        terminations, truncations = terminations + terminated.sum(), truncations + truncated.sum()
    assert truncations > 0 or steps < 500
    assert terminations > 0 or num_envs == 1


def test_step_beside_sync_vector_env_same_seed_gives_equal_bytes():
    ours = CartPoleVector(6, max_episode_steps=30)
    make = [lambda: gymnasium.make("CartPole-v1", max_episode_steps=30)] * 6
    theirs = SyncVectorEnv(make, autoreset_mode=AutoresetMode.SAME_STEP)
    assert ours.metadata["autoreset_mode"] == theirs.metadata["autoreset_mode"]
    assert ours.single_observation_space == theirs.single_observation_space
    assert ours.observation_space == theirs.observation_space
    assert ours.action_space == theirs.action_space
    rng = np.random.default_rng(1)
    for seed in (3, None, 5):
        obs_ours, _ = ours.reset(seed=seed)
        obs_theirs, _ = theirs.reset(seed=seed)
        assert obs_ours.tobytes() == obs_theirs.tobytes()
        for _ in range(70):
            actions = rng.integers(0, 2, 6)
            *step_ours, infos_ours = ours.step(actions)
            *step_theirs, infos_theirs = theirs.step(actions)
            for mine, its in zip(step_ours, step_theirs, strict=True):
                np.testing.assert_array_equal(mine, its, strict=True)
            for i in np.flatnonzero(infos_ours.get("_final_obs", [])):
                np.testing.assert_array_equal(infos_ours["final_obs"][i], infos_theirs["final_obs"][i], strict=True)


def test_step_returned_arrays_are_never_written_again():
    env = CartPoleVector(3, max_episode_steps=7)
    results = [env.reset(seed=0)[0]]
    rng = np.random.default_rng(0)
    for _ in range(30):
        observations, rewards, terminated, truncated, infos = env.step(rng.integers(0, 2, 3))
        results += [observations, rewards, terminated, truncated, *infos.values()]
        kept = [array.copy() for array in results]
        env.step(rng.integers(0, 2, 3))
        for array, copy in zip(results, kept, strict=True):
            np.testing.assert_array_equal(array, copy)


@settings(deadline=None, max_examples=25)
@given(before=st.integers(0, 60), seed=st.integers(0, 2**32 - 1), num_envs=st.integers(1, 5))
def test_set_state_in_fresh_env_continues_with_equal_bytes(before, seed, num_envs):
    env = CartPoleVector(num_envs, max_episode_steps=20)
    rng = np.random.default_rng(seed)
    env.reset(seed=seed)
    for _ in range(before):
        env.step(rng.integers(0, 2, num_envs))
    state = env.get_state()
    other = CartPoleVector(num_envs, max_episode_steps=20)
    other.reset(seed=seed + 1)
    other.set_state(state)
    for _ in range(40):
        actions = rng.integers(0, 2, num_envs)
        for mine, its in zip(env.step(actions)[:4], other.step(actions)[:4], strict=True):
            assert mine.tobytes() == its.tobytes()


def test_set_state_of_other_number_of_envs_is_refused():
    env = CartPoleVector(2)
    env.reset(seed=0)
    with pytest.raises(UsageError, match="2 environments, not of 3"):
        CartPoleVector(3).set_state(env.get_state())


@pytest.mark.parametrize(
    "actions", [[0, 2], [0, -1], [0, 256], [-2, 1], [0.0, 1.0], [0, 1, 1], [[0], [1]], 1, [0, 2**40], [True, False]]
)
def test_step_invalid_actions_raises_and_changes_nothing(actions):
    env = CartPoleVector(2)
    env.reset(seed=0)
    before = env.get_state()
    with pytest.raises(UsageError, match="2 integers from 0 to 1"):
        env.step(np.array(actions))
    np.testing.assert_equal(env.get_state(), before)


@pytest.mark.parametrize("dtype", [np.int8, np.int32, np.int64, np.uint8, np.uint64])
def test_step_actions_of_any_integer_type_push_alike(dtype):
    env, reference = CartPoleVector(3), CartPoleVector(3)
    env.reset(seed=0)
    reference.reset(seed=0)
    actions = np.array([0, 1, 1])
    np.testing.assert_array_equal(env.step(actions.astype(dtype))[0], reference.step(actions)[0])


def test_step_before_reset_raises():
    with pytest.raises(UsageError, match="before reset"):
        CartPoleVector(2).step(np.array([0, 1]))


def test_reset_options_are_refused():
    with pytest.raises(UsageError, match="reset takes no options"):
        CartPoleVector(2).reset(options={"low": -1})
