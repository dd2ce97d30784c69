"""Environments in JAX: final observations at time limits, exact resume, seeds; `gymnax:`, which compiles fastest."""

from contextlib import closing
from importlib.util import find_spec
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest

import palestra
from palestra.control.envs.make import make_single, make_vector
from palestra.control.envs.snapshot import restore_vector, vector_exactness, vector_state
from palestra.control.envs.stepping import Stepper
from palestra.errors import MissingExtra, UsageError
from palestra.spec.kinds.control import EnvSpec

installed = pytest.mark.skipif(find_spec("gymnax") is None, reason="pip install 'palestra[gymnax]'")
brax = pytest.mark.skipif(find_spec("brax") is None, reason="pip install 'palestra[brax]'")
playground = pytest.mark.skipif(find_spec("mujoco_playground") is None, reason="pip install 'palestra[playground]'")
CARTPOLE = "gymnax:CartPole-v1"
SPEC = Path(__file__).parents[1] / "examples" / "control" / "ppo_jax.yaml"


def poles(num_envs: int = 5, id: str = CARTPOLE, **kwargs):
    return make_vector(EnvSpec(id=id, kwargs=kwargs), num_envs)


@pytest.mark.skipif(find_spec("gymnax") is not None, reason="gymnax is installed")
def test_a_library_that_is_not_installed_names_its_extra():
    with pytest.raises(MissingExtra, match=r"palestra\[gymnax\]"):
        poles()


@installed
@pytest.mark.parametrize(
    ("id", "kwargs", "said"),
    [
        ("gymnax:Nope-v1", {}, "gymnax has no environment 'Nope-v1'; it has CartPole-v1"),
        (CARTPOLE, {"moon": 3}, "could not be made with"),
        pytest.param("brax:nope", {}, "Brax has no environment 'nope'", marks=[brax, pytest.mark.slow]),
        pytest.param(
            "playground:Nope", {}, "MuJoCo Playground has no environment 'Nope'", marks=[playground, pytest.mark.slow]
        ),
    ],
)
def test_what_a_library_does_not_have_is_refused(id, kwargs, said):
    with pytest.raises(UsageError, match=said):
        poles(id=id, **kwargs)


@installed
def test_every_transition_is_that_of_the_physics_and_its_final_observation_is_kept():
    """Also at time limits, where libraries of JAX return the reset: V would be of another episode."""
    limit = 12
    with closing(poles(max_steps_in_episode=limit)) as env:
        stepper = Stepper(env, CARTPOLE)
        before, random = stepper.reset(seed=3), np.random.default_rng(0)
        physics = gym.make("CartPole-v1").unwrapped
        lengths, ends = np.zeros(5, int), {"terminated": 0, "truncated": 0}
        for _ in range(100):
            # Two copies lean to one side and fall before the limit.
            actions = np.where(np.arange(5) < 2, 1, random.integers(0, 2, 5))
            obs, rewards, terminated, truncated, valid, ended, final = stepper.step(actions)
            lengths += 1
            assert valid is None
            assert np.array_equal(truncated, lengths >= limit)
            finals = dict(zip([] if ended is None else ended.tolist(), [] if final is None else final, strict=True))
            for i in range(5):
                physics.reset()
                physics.state = tuple(before[i].astype(float))
                expected, reward, over, _, _ = physics.step(int(actions[i]))
                assert (bool(terminated[i]), float(rewards[i])) == (over, reward)
                assert np.allclose(finals.get(i, obs[i]), expected, atol=1e-5)
                if i in finals:
                    assert np.abs(obs[i]).max() <= 0.05  # the first of the next episode
                    assert not np.allclose(obs[i], finals[i], atol=1e-3)
                    lengths[i] = 0
            ends["terminated"] += int(terminated.sum())
            ends["truncated"] += int((truncated & ~terminated).sum())
            before = obs
        assert min(ends.values()) > 5


def trace(env, steps: int, begin: int = 0) -> list[tuple]:
    rows = []
    for t in range(begin, begin + steps):
        obs, rewards, terminated, truncated, infos = env.step(np.full(env.num_envs, t // 3 % 2))
        rows.append((obs, rewards, terminated, truncated, infos.get("final_obs", np.zeros(0))))
    return rows


def equal(some: list[tuple], others: list[tuple]) -> bool:
    return all(np.array_equal(a, b) for x, y in zip(some, others, strict=True) for a, b in zip(x, y, strict=True))


@installed
def test_the_seed_decides_everything_and_copies_and_episodes_differ():
    def played(seed: int) -> list[tuple]:
        with closing(poles(3)) as env:
            env.reset(seed=seed)
            return trace(env, 60)

    assert equal(played(5), played(5))
    assert not equal(played(5), played(6))
    with closing(poles(3)) as env:
        first, again = env.reset(seed=5)[0], env.reset()[0]
    assert len(np.unique(np.concatenate([first, again])[:, 0])) == 6


@installed
def test_a_state_in_the_middle_of_episodes_continues_bit_for_bit():
    with closing(poles()) as env, closing(poles()) as other:
        env.reset(seed=1)
        trace(env, 33)
        assert vector_exactness(env) is None
        state = vector_state(env)
        rest = trace(env, 80, begin=33)
        assert restore_vector(other, state) is None
        assert equal(trace(other, 80, begin=33), rest)
        with closing(poles(4)) as fewer, pytest.raises(UsageError, match="number of environments"):
            restore_vector(fewer, state)


@installed
def test_a_run_that_is_stopped_and_resumed_is_the_uninterrupted_one(tmp_path: Path):
    overrides = {"env.num_envs": 8, "algorithm.horizon": 16, "algorithm.minibatch": 64, "algorithm.lr": 1e-3}
    overrides |= {"every.log": "1 step", "every.eval": None, "every.checkpoint": "1 step", "eval.episodes": 4}
    whole = palestra.run(str(SPEC), root=tmp_path / "a", quiet=True, overrides={**overrides, "train.frames": 1024})
    part = palestra.run(str(SPEC), root=tmp_path / "b", quiet=True, overrides={**overrides, "train.frames": 512})
    longer = {**overrides, "train.frames": 1024}
    resumed = palestra.run(str(SPEC), resume=part, quiet=True, overrides=longer, allow=["train.frames"])

    def plain(run) -> list[dict]:
        return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in run.metrics()]

    rows, again = ({row["frame"]: row for row in plain(run)} for run in (whole, resumed))
    assert again[1024]["frame"] == 1024
    assert again[1024] == rows[1024]


@installed
def test_one_environment_ends_with_its_last_observation_and_draws_no_pictures():
    spec = EnvSpec(id=CARTPOLE)
    with closing(make_single(spec)) as env:
        env.reset(seed=0)
        for _ in range(100):
            obs, _, terminated, _, _ = env.step(1)
            if terminated:
                break
        assert abs(obs[2]) > 0.2
    with pytest.raises(UsageError, match="draws no pictures"):
        make_single(spec, render_mode="rgb_array")


@pytest.mark.slow
@pytest.mark.parametrize(
    "id",
    [
        pytest.param("brax:inverted_pendulum", marks=brax),
        pytest.param("playground:CartpoleBalance", marks=playground),
    ],
)
def test_simulators_truncate_and_continue_bit_for_bit(id: str):
    with closing(poles(3, id, episode_length=7)) as env, closing(poles(3, id, episode_length=7)) as other:
        first, _ = env.reset(seed=1)
        actions = np.full((3, *env.single_action_space.shape), 0.1, np.float32)
        for t in range(1, 10):
            obs, _, terminated, truncated, infos = env.step(actions)
            assert not terminated.any()
            assert truncated.all() == (t == 7)
            if t == 7:
                assert not np.allclose(infos["final_obs"], obs)
        assert not np.allclose(obs, first)
        assert restore_vector(other, vector_state(env)) is None
        for _ in range(12):
            assert equal([env.step(actions)[:4]], [other.step(actions)[:4]])


@pytest.mark.slow
@installed
def test_ppo_learns_cartpole_in_jax(tmp_path: Path):
    run = palestra.run(str(SPEC), root=tmp_path, quiet=True, overrides={"max_session": 1}, seed=1000)
    assert [row["eval/return"] for row in run.metrics() if "eval/return" in row][-1] > 450
