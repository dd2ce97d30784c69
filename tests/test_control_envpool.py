"""Environments of EnvPool: transitions at episode ends by brute force, spaces and returns, seeds, resume."""

from contextlib import closing
from importlib.util import find_spec

import gymnasium as gym
import numpy as np
import pytest

from palestra.control.envs.make import make_single, make_vector
from palestra.control.envs.snapshot import restore_vector, vector_exactness, vector_state
from palestra.control.envs.stepping import Stepper
from palestra.errors import MissingExtra, UsageError
from palestra.spec.kinds.control import EnvSpec

installed = pytest.mark.skipif(find_spec("envpool") is None, reason="pip install 'palestra[envpool]': 821 MB")


def pool(id: str, num_envs: int, **kwargs):
    return make_vector(EnvSpec(id=id, vectorize="envpool", kwargs=kwargs), num_envs)


@pytest.mark.skipif(find_spec("envpool") is not None, reason="EnvPool is installed")
def test_envpool_that_is_not_installed_names_the_extra():
    with pytest.raises(MissingExtra, match=r"palestra\[envpool\]"):
        pool("CartPole-v1", 2)


@installed
@pytest.mark.parametrize(
    ("id", "kwargs", "said"),
    [
        ("Nope-v1", {}, "no environment 'Nope-v1'"),
        ("ALE/Pong-v5", {}, "It has Pong-v5"),
        ("CartPole-v1", {"gravity": 3}, "could not be made with"),
        ("CartPole-v1", {"batch_size": 1}, "batch_size cannot be set"),
        ("Pong-v5", {"episodic_life": True}, "no game is ever played to its end"),
    ],
)
def test_what_envpool_does_not_have_is_refused(id, kwargs, said):
    with pytest.raises(UsageError, match=said):
        pool(id, 2, **kwargs)


@installed
def test_terminations_have_the_true_last_observation_and_dummy_steps_are_not_valid():
    """CartPole ends exactly where its position or angle is out of bounds; the next step resets and counts nothing."""
    with closing(pool("CartPole-v1", 5)) as env:
        stepper = Stepper(env, "CartPole-v1")
        before, random = stepper.reset(seed=3), np.random.default_rng(0)
        lengths, ended_before, finished = np.zeros(5, int), np.zeros(5, bool), 0
        physics = gym.make("CartPole-v1").unwrapped
        for _ in range(150):
            actions = random.integers(0, 2, 5)
            obs, rewards, terminated, truncated, valid, ended, final = stepper.step(actions)
            assert np.array_equal(~ended_before, np.ones(5, bool) if valid is None else valid)
            for i in range(5):
                if ended_before[i]:  # only the reset of the new episode
                    assert (rewards[i], terminated[i], truncated[i]) == (0.0, False, False)
                    assert np.abs(obs[i]).max() <= 0.05
                    lengths[i] = 0
                    continue
                lengths[i] += 1
                physics.reset()
                physics.state = tuple(before[i].astype(float))
                expected, reward, over, _, _ = physics.step(int(actions[i]))
                row = i if ended is None or i not in ended else None
                seen = obs[i] if row is not None else final[list(ended).index(i)]
                assert np.allclose(seen, expected, atol=1e-5)
                assert (bool(terminated[i]), float(rewards[i])) == (over, reward)
                assert not truncated[i]
            ended_before = terminated | truncated
            finished += ended_before.sum()
            before = obs
        assert finished > 10


@installed
def test_time_limits_truncate_and_do_not_terminate():
    with closing(pool("Pendulum-v1", 3)) as env:
        stepper = Stepper(env, "Pendulum-v1")
        stepper.reset(seed=0)
        for t in range(1, 402):
            _, _, terminated, truncated, valid, ended, final = stepper.step(np.zeros((3, 1), np.float32))
            assert not terminated.any()
            assert truncated.all() == (t in (200, 401))  # the reset between them is a step that is not valid
            assert (valid is not None) == (t == 201)
            assert (ended is not None) == truncated.any()
        assert final.shape == (3, 3)


@installed
def test_half_cheetah_has_gymnasiums_spaces_and_returns():
    pytest.importorskip("mujoco", reason="pip install 'palestra[mujoco]'")

    def returns(env) -> np.ndarray:
        """Of a fixed gait; the first of the initial states and velocities are random."""
        stepper, total = Stepper(env, "HalfCheetah-v5"), np.zeros(env.num_envs)
        stepper.reset(seed=7)
        for t in range(300):
            action = np.sin(0.4 * t + np.arange(6.0)).astype(np.float32)
            total += stepper.step(np.tile(action, (env.num_envs, 1))).rewards
        return total

    with closing(pool("HalfCheetah-v5", 16)) as ours, closing(make_vector(EnvSpec(id="HalfCheetah-v5"), 16)) as theirs:
        for name in ("observation", "action"):
            mine, other = (getattr(env, f"single_{name}_space") for env in (ours, theirs))
            assert (mine.shape, mine.low.tolist(), mine.high.tolist()) == (
                *(other.shape, other.low.tolist()),
                other.high.tolist(),
            )
        a, b = returns(ours), returns(theirs)
    error = np.sqrt(a.var() / 16 + b.var() / 16)
    assert abs(a.mean() - b.mean()) < 4 * error + 1.0


@installed
def test_the_seed_decides_everything_and_copies_differ():
    def played(seed: int) -> np.ndarray:
        with closing(pool("CartPole-v1", 3)) as env:
            rows = [env.reset(seed=seed)[0]]
            rows += [env.step(np.full(3, t % 2))[0] for t in range(60)]
            return np.array(rows)

    assert np.array_equal(played(5), played(5))
    assert not np.array_equal(played(5), played(6))
    first = played(5)[0]
    assert len(np.unique(first[:, 0])) == 3


@installed
def test_a_resume_says_that_episodes_restart_and_begins_the_same_new_ones():
    def resumed(state):
        with closing(pool("CartPole-v1", 3)) as env:
            env.reset(seed=1)
            with pytest.warns(UserWarning, match="they restart"):
                restarted = restore_vector(env, state)
            assert restarted.which.all()
            return restarted.observations, env.step(np.zeros(3, int))[0]

    with closing(pool("CartPole-v1", 3)) as env:
        first, _ = env.reset(seed=9)
        env.step(np.zeros(3, int))
        state = vector_state(env)
        assert "restart" in vector_exactness(env)
    once, again = resumed(state), resumed(state)
    assert all(np.array_equal(a, b) for a, b in zip(once, again, strict=True))
    assert not np.array_equal(once[0], first)  # not the run's first episodes again


@installed
def test_actions_of_another_shape_are_refused_before_envpool_reads_them():
    with closing(pool("CartPole-v1", 3)) as env:
        env.reset(seed=0)
        assert env.action_space.sample().shape == (3,)
        with pytest.raises(UsageError, match=r"actions of shape \(3,\), got \(\)"):
            env.step(np.int64(1))


@installed
def test_one_environment_is_what_the_vector_has():
    env = make_single(EnvSpec(id="CartPole-v1", vectorize="envpool"))
    with closing(env):
        env.reset(seed=0)
        for _ in range(100):
            obs, _, terminated, truncated, _ = env.step(1)
            if terminated:
                break
        assert terminated
        assert not truncated
        assert abs(obs[2]) > 0.2  # the last observation, not the first of the next episode
