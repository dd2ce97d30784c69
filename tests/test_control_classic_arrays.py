"""Acrobot, Pendulum and both MountainCars as arrays against Gymnasium's own, number for number."""

import gymnasium
import numpy as np
import pytest
from conftest import fast_only
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from palestra.control.envs.classic import (
    AcrobotVector,
    MountainCarContinuousVector,
    MountainCarVector,
    NumpyVector,
    PendulumVector,
)
from palestra.errors import UsageError

ENVS: dict[str, type[NumpyVector]] = {
    "Acrobot-v1": AcrobotVector,
    "Pendulum-v1": PendulumVector,
    "MountainCar-v0": MountainCarVector,
    "MountainCarContinuous-v0": MountainCarContinuousVector,
}
everywhere = pytest.mark.parametrize("name", ENVS)


def lively(name: str, obs: np.ndarray, rng: np.random.Generator, noise: np.ndarray) -> np.ndarray:
    """Actions that swing up and reach the goal when `noise` is 0, and are random when it is 1."""
    n = len(obs)
    forward = (-obs[:, 4] if name == "Acrobot-v1" else obs[:, -1]) >= 0
    if name in ("Acrobot-v1", "MountainCar-v0"):
        return np.where(rng.random(n) < noise, rng.integers(0, 3, n), 2 * forward)
    # also beyond the bounds, and exactly at them
    bounds = np.where(rng.random(n) < 0.3, 1.0, rng.uniform(0, 1.5, n)) * np.where(forward, 1, -1)
    actions = np.where(rng.random(n) < noise, rng.uniform(-2.5, 2.5, n), bounds)
    return actions.astype(np.float32)[:, None]


@everywhere
@pytest.mark.parametrize(
    ("num_envs", "steps", "limit"),
    fast_only([(1, 1100, None), (7, 600, None), (33, 120, 50)], (1, 1100, None), (33, 120, 50)),
)
def test_step_beside_sync_vector_env_same_seed_gives_equal_bytes(name, num_envs, steps, limit):
    given = {} if limit is None else {"max_episode_steps": limit}
    ours = ENVS[name](num_envs, **given)
    theirs = SyncVectorEnv([lambda: gymnasium.make(name, **given)] * num_envs, autoreset_mode=AutoresetMode.SAME_STEP)
    assert ours.single_observation_space == theirs.single_observation_space
    assert ours.observation_space == theirs.observation_space
    assert ours.action_space == theirs.action_space
    rng = np.random.default_rng(num_envs)
    noise = np.linspace(0, 1, num_envs)
    obs, _ = ours.reset(seed=5)
    assert obs.tobytes() == theirs.reset(seed=5)[0].tobytes()
    terminations = truncations = 0
    for _ in range(steps):
        actions = lively(name, obs, rng, noise)
        obs, *step_ours, infos_ours = ours.step(actions)
        obs_theirs, *step_theirs, infos_theirs = theirs.step(actions)
        assert obs.tobytes() == obs_theirs.tobytes()
        for mine, its in zip(step_ours, step_theirs, strict=True):
            np.testing.assert_array_equal(mine, its, strict=True)
        for i in np.flatnonzero(infos_ours.get("_final_obs", [])):
            np.testing.assert_array_equal(infos_ours["final_obs"][i], infos_theirs["final_obs"][i], strict=True)
        terminations, truncations = terminations + step_ours[1].sum(), truncations + step_ours[2].sum()
    state = ours.get_state()["state"].T
    singles = np.array([np.asarray(env.unwrapped.state, np.float64) for env in theirs.envs])
    np.testing.assert_array_equal(state, singles)
    assert truncations > 0 or terminations > 0
    assert (terminations > 0) == (name != "Pendulum-v1") or limit is not None


@everywhere
def test_set_state_in_fresh_env_continues_with_equal_bytes(name):
    rng = np.random.default_rng(0)
    for before in (0, 1, 13, 70):
        env, other = ENVS[name](3, max_episode_steps=20), ENVS[name](3, max_episode_steps=20)
        obs, _ = env.reset(seed=before)
        for _ in range(before):
            obs = env.step(lively(name, obs, rng, np.ones(3)))[0]
        state = env.get_state()
        other.reset(seed=99)
        other.set_state(state)
        for _ in range(45):
            actions = lively(name, obs, rng, np.ones(3))
            results = [one.step(actions)[:4] for one in (env, other)]
            assert all(a.tobytes() == b.tobytes() for a, b in zip(*results, strict=True))
            obs = results[0][0]


@everywhere
def test_step_returned_arrays_are_never_written_again(name):  # point 13
    env = ENVS[name](3, max_episode_steps=7)
    rng = np.random.default_rng(0)
    results = [env.reset(seed=0)[0]]
    for _ in range(20):
        obs, rewards, terminated, truncated, infos = env.step(lively(name, results[0], rng, np.ones(3)))
        results += [obs, rewards, terminated, truncated, *infos.values()]
        kept = [array.copy() for array in results]
        env.step(lively(name, obs, rng, np.ones(3)))
        for array, copy in zip(results, kept, strict=True):
            np.testing.assert_array_equal(array, copy)


@pytest.mark.parametrize("name", ["Acrobot-v1", "MountainCar-v0"])
@pytest.mark.parametrize("actions", [[0, 3], [0, -1], [0.0, 1.0], [0, 1, 1], [[0], [1]], [True, False]])
def test_step_invalid_choice_raises_and_changes_nothing(name, actions):
    env = ENVS[name](2)
    env.reset(seed=0)
    before = env.get_state()
    with pytest.raises(UsageError, match="2 integers from 0 to 2"):
        env.step(np.array(actions))
    np.testing.assert_equal(env.get_state(), before)


@pytest.mark.parametrize("name", ["Pendulum-v1", "MountainCarContinuous-v0"])
@pytest.mark.parametrize("actions", [[0.0, 1.0], [[0.0], [np.nan]], [[0], [1]], [[0.0, 1.0]]])
def test_step_invalid_push_raises_and_changes_nothing(name, actions):
    env = ENVS[name](2)
    env.reset(seed=0)
    before = env.get_state()
    with pytest.raises(UsageError, match=r"floats of shape \(2, 1\)"):
        env.step(np.array(actions))
    np.testing.assert_equal(env.get_state(), before)
