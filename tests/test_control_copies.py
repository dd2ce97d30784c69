"""Copies of an environment here and in processes: the same numbers, states that fit either way, hangs named."""

import os
import subprocess
import sys
import textwrap
import time
from contextlib import closing
from importlib.util import find_spec

import gymnasium as gym
import numpy as np
import psutil
import pytest
import zygote
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from hanging_envs import Hanging

from palestra.control.envs import make as choice
from palestra.control.envs.make import cores, make_vector
from palestra.control.envs.snapshot import Snapshot, restore_vector, vector_exactness, vector_state
from palestra.control.envs.stepping import EnvironmentFailed, Stepper
from palestra.control.envs.vector import Copies, copies
from palestra.control.envs.watchdog import EnvironmentHung, Patience
from palestra.control.episodes import Episodes
from palestra.control.evaluation import random_episodes
from palestra.control.spaces import PackedObservation
from palestra.errors import UsageError
from palestra.spec.kinds.control import EnvSpec

WAYS = ("sync", "async")
LUNAR = pytest.param(
    "LunarLander-v3",
    marks=pytest.mark.skipif(find_spec("Box2D") is None, reason="needs Box2D: see CONTRIBUTING.md"),
)
NAMES = ["CartPole-v1", "Pendulum-v1", LUNAR, "InvertedPendulum-v5", "Blackjack-v1"]


CHANGES = [("sync", "async"), ("async", "sync"), ("async", "async")]


def made(name: str, num_envs: int, way: str, **given) -> Copies:
    env = make_vector(EnvSpec(id=name, vectorize=way, **given), num_envs)
    assert isinstance(env, Copies)
    return env


def actions_for(env, steps: int, seed: int = 0) -> list[np.ndarray]:
    env.action_space.seed(seed)
    return [env.action_space.sample() for _ in range(steps)]


def trace(env, actions: list[np.ndarray]) -> list[bytes]:
    out = []
    for action in actions:
        obs, rewards, terminated, truncated, infos = env.step(action)
        ended = np.flatnonzero(terminated | truncated)
        finals = [np.asarray(infos["final_obs"][i]).tobytes() for i in ended]
        out.append(b"".join([obs.tobytes(), rewards.tobytes(), terminated.tobytes(), truncated.tobytes(), *finals]))
    return out


@pytest.mark.parametrize("name", NAMES)
def test_step_here_and_in_processes_gives_gymnasiums_bytes(name):  # points 5, 14
    flat = name == "Blackjack-v1"

    def single() -> gym.Env:
        return PackedObservation(gym.make(name)) if flat else gym.make(name)

    theirs = SyncVectorEnv([single] * 3, autoreset_mode=AutoresetMode.SAME_STEP)
    actions = actions_for(theirs, 150)
    obs, _ = theirs.reset(seed=7)
    expected = [obs.tobytes(), *trace(theirs, actions)]
    assert len(set(map(bytes, obs))) == 3 or flat
    for way in WAYS:
        with closing(made(name, 3, way)) as env:
            assert env.processes == (0 if way == "sync" else 2)  # three copies in two processes
            assert env.action_space == theirs.action_space
            assert env.observation_space == theirs.observation_space
            assert [env.reset(seed=7)[0].tobytes(), *trace(env, actions)] == expected


def test_copies_here_and_in_processes_at_once_give_the_bytes_of_those_here():
    makers = [lambda: Snapshot(gym.make("CartPole-v1"))] * 5
    with (
        closing(copies("poles", makers, 0, 60.0)) as env,
        closing(copies("poles", makers, 2, 60.0, here=True)) as other,
    ):
        assert other.processes == 2
        actions = actions_for(env, 90)
        assert env.reset(seed=1)[0].tobytes() == other.reset(seed=1)[0].tobytes()
        assert trace(env, actions[:40]) == trace(other, actions[:40])
        state = vector_state(other)
        assert trace(env, actions[40:60]) == trace(other, actions[40:60])
        assert restore_vector(env, state) is None
        assert restore_vector(other, state) is None
        assert trace(env, actions[40:]) == trace(other, actions[40:])


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        *(("CartPole-v1", *ways) for ways in CHANGES),
        *(pytest.param(*LUNAR.values, *ways, marks=LUNAR.marks) for ways in CHANGES),
        ("Reacher-v5", "async", "sync"),
        *(pytest.param("Reacher-v5", *ways, marks=pytest.mark.slow) for ways in CHANGES if ways != ("async", "sync")),
    ],
)
def test_restore_the_other_way_continues_with_equal_bytes(name, before, after):  # point 62
    with closing(made(name, 3, before)) as env, closing(made(name, 3, after)) as other:
        assert vector_exactness(env) is None
        actions = actions_for(env, 90)
        env.reset(seed=1)
        trace(env, actions[:40])
        state = vector_state(env)
        other.reset(seed=2)
        assert restore_vector(other, state) is None
        assert trace(other, actions[40:]) == trace(env, actions[40:])


@pytest.mark.parametrize("way", WAYS)
def test_restore_environment_without_state_restarts_it_and_says_so(way):
    def no_state() -> gym.Env:
        env = Hanging(at=-1)
        env.palestra_state = None
        return env

    env = make_vector(EnvSpec(id="object:x", vectorize=way), 2, no_state)
    with closing(env):
        env.reset(seed=0)
        trace(env, [np.zeros(2, np.int64)] * 3)
        assert "episodes restart" in str(vector_exactness(env))
        with pytest.warns(UserWarning, match="restart"):
            restarted = restore_vector(env, vector_state(env))
        assert restarted is not None
        assert restarted.which.tolist() == [True, True]
        assert restarted.observations[:, 0].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("way", WAYS)
def test_restore_of_another_number_of_copies_is_refused(way):
    with closing(made("CartPole-v1", 2, "sync")) as env, closing(made("CartPole-v1", 3, way)) as other:
        env.reset(seed=0)
        other.reset(seed=0)
        with pytest.raises(UsageError, match="2 environments, not of 3"):
            restore_vector(other, vector_state(env))


@pytest.mark.parametrize("way", WAYS)
def test_step_returned_arrays_are_never_written_again(way):  # point 13
    with closing(made("CartPole-v1", 3, way)) as env:
        kept = [(env.reset(seed=0)[0], None)]
        for action in actions_for(env, 60):
            *arrays, infos = env.step(action)
            kept += [(array, array.copy()) for array in [*arrays, *infos.values()]]
        for array, copy in kept[1:]:
            np.testing.assert_array_equal(array, copy)


@pytest.mark.parametrize("way", WAYS)
def test_step_actions_of_wrong_shape_are_refused(way):
    with closing(made("CartPole-v1", 2, way)) as env:
        env.reset(seed=0)
        with pytest.raises(UsageError, match=r"shape \(2,\), got \(3,\)"):
            env.step(np.zeros(3, np.int64))


@pytest.mark.parametrize("way", WAYS)
def test_masks_come_through_either_way(way):
    with closing(make_vector(EnvSpec(id="hanging_envs:Masked", vectorize=way), 3)) as env:
        stepper = Stepper(env, "Masked")
        stepper.reset(0)
        for t in range(20):
            assert stepper.mask is not None
            assert stepper.mask.argmax(1).tolist() == [t % 7 % 3] * 3
            stepper.step(stepper.mask.argmax(1))


@pytest.mark.parametrize("way", WAYS)
def test_score_is_of_whole_games_though_lives_end_episodes(way):  # point 10
    with closing(make_vector(EnvSpec(id="hanging_envs:Lives", vectorize=way), 2)) as env:
        episodes = Episodes(Stepper(env, "Lives"))
        episodes.reset(0)
        ends = 0
        for _ in range(120):
            moved = episodes.step(np.zeros(2, np.int64))
            ends += 0 if moved.ended is None else len(moved.ended)
        assert ends == 60
        assert list(episodes.recent) == [(-24.0, 12)] * 20
        assert random_episodes(Stepper(env, "Lives"), 6, seed=0).returns.tolist() == [-24.0] * 6


def test_environment_that_raises_in_a_process_raises_the_same_here():
    given = {"when": "step", "at": 3, "how": "raise"}
    for way in WAYS:
        with closing(make_vector(EnvSpec(id="hanging_envs:Hanging", vectorize=way, kwargs=given), 2)) as env:
            stepper = Stepper(env, "Hanging")
            stepper.reset(0)
            for _ in range(2):
                stepper.step(np.zeros(2, np.int64))
            with pytest.raises(EnvironmentFailed, match=r"raised ValueError in vector step 3 .*the door is stuck"):
                stepper.step(np.zeros(2, np.int64))


def test_process_that_dies_is_named_and_the_others_end():
    given, before = {"when": "step", "at": 2, "how": "die", "seed": 3}, psutil.Process().children()
    env = make_vector(EnvSpec(id="hanging_envs:Hanging", vectorize="async", kwargs=given), 4)
    family = set(psutil.Process().children()) - set(before)
    env.reset(seed=0)
    env.step(np.zeros(4, np.int64))
    with closing(env), pytest.raises(EnvironmentFailed, match=r"environments 2 to 3 died \(exit code 3\) during step"):
        env.step(np.zeros(4, np.int64))
    assert not [child for child in family if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("when", "how"), [("reset", "sleep"), ("step", "loop"), ("reset", "loop")])
def test_environment_that_hangs_is_named_with_where(way, when, how):
    given = {"when": when, "how": how, "seed": 12, "at": 1}
    spec = EnvSpec(id="hanging_envs:Hanging", vectorize=way, kwargs=given, reset_timeout=0.6)
    env = make_vector(spec, 3)

    def both() -> None:
        env.reset(seed=10)
        env.step(np.zeros(3, np.int64))

    with closing(env), pytest.raises(EnvironmentHung) as hung:
        both()
    assert f"environment 2 did not return from {when} within 0.6 s" in str(hung.value)
    assert "hanging_envs.py" in str(hung.value)


def test_reset_of_an_ended_episode_that_hangs_is_told_from_a_step():
    given = {"when": "reset", "at": 2, "seed": 1, "length": 2}
    for way in WAYS:
        spec = EnvSpec(id="hanging_envs:Hanging", vectorize=way, kwargs=given, reset_timeout=0.5)
        with closing(make_vector(spec, 2)) as env:
            env.reset(seed=0)
            env.step(np.zeros(2, np.int64))
            with pytest.raises(EnvironmentHung, match="environment 1 did not return from reset"):
                env.step(np.zeros(2, np.int64))


def test_slow_copies_that_go_on_are_not_taken_for_hung():
    def slow() -> gym.Env:
        env = gym.make("CartPole-v1")
        return gym.wrappers.TransformAction(env, lambda action: (time.sleep(0.15), action)[1], None)

    for way in WAYS:
        env = make_vector(EnvSpec(id="object:slow", vectorize=way, reset_timeout=0.4), 8, slow)
        with closing(env):
            env.reset(seed=0)
            assert env.step(np.zeros(8, np.int64))[0].shape == (8, 4)  # after 1.2 s in this process


def started(script: str) -> zygote.Popen:
    """A script in a process of its own."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return zygote.Popen([sys.executable, "-c", textwrap.dedent(script)], **pipes, text=True)


def test_compiled_code_that_never_returns_ends_the_process_with_the_message():
    script = """
        import ctypes
        import gymnasium as gym
        from palestra.control.envs import watchdog
        from palestra.control.envs.make import make_vector
        from palestra.spec.kinds.control import EnvSpec

        watchdog.GRACE = 0.5

        class Stuck(gym.Wrapper):
            def reset(self, **given):
                mutex = ctypes.create_string_buffer(64)
                for _ in range(2):  # the second waits for ever, whatever signal comes
                    ctypes.CDLL(None).pthread_mutex_lock(mutex)

        spec = EnvSpec(id="object:x", vectorize="sync", reset_timeout=0.5)
        make_vector(spec, 1, lambda: Stuck(gym.make("CartPole-v1"))).reset(seed=0)
    """
    process = started(script)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1, err
    assert "palestra: object:x hangs: environment 0 did not return from reset within 0.5 s" in err
    assert "in reset" in err


def test_process_that_was_stopped_for_a_while_does_not_take_its_environment_for_hung():
    patience = Patience(8.0)
    assert not patience.over("same")
    patience._since -= 100  # as after a stop of 100 s, the last look before it
    patience._looked -= 100
    assert not patience.over("same")
    patience._since -= 9
    assert patience.over("same")


def test_trainer_that_is_killed_leaves_no_process():
    script = """
        import os, signal, psutil
        from palestra.control.envs.make import make_vector
        from palestra.spec.kinds.control import EnvSpec

        env = make_vector(EnvSpec(id="CartPole-v1", vectorize="async"), 4)
        env.reset(seed=0)
        print(*(child.pid for child in psutil.Process().children()), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    out, _ = started(script).communicate(timeout=60)
    pids = [int(pid) for pid in out.split()]
    assert len(pids) >= 2
    until = time.monotonic() + 20
    while any(psutil.pid_exists(pid) for pid in pids) and time.monotonic() < until:
        time.sleep(0.1)
    assert not [pid for pid in pids if psutil.pid_exists(pid)]


@pytest.mark.parametrize(("there", "expected"), [(0.7, 1), (0.9, 0)])
def test_auto_takes_processes_where_they_are_measured_to_pay(monkeypatch, caplog, there, expected):  # point 67
    seconds = {0: 1e-3, 1: there * 1e-3}
    monkeypatch.setattr(choice, "_chosen", {})
    monkeypatch.setattr(choice, "_step_seconds", lambda spec, makers, processes: seconds[processes])
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    with caplog.at_level("INFO", "palestra.control"), closing(made("Blackjack-v1", 4, "auto")) as env:
        assert env.processes == expected
    assert (
        f"Blackjack-v1: a step of 4 takes 1000 µs in this process, {1000 * there:.0f} µs in 2: using {1 + expected}"
        in caplog.text
    )


def test_auto_with_a_share_of_one_core_stays_here_without_measuring(monkeypatch):
    monkeypatch.setattr(choice, "_chosen", {})
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert cores() == 1
    with closing(made("Blackjack-v1", 2, "auto")) as env:
        assert env.processes == 0
    assert choice._chosen == {}
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert cores() == len(os.sched_getaffinity(0))


@pytest.mark.parametrize("processes", [0, 2])
def test_measured_step_takes_time_here_and_in_processes(processes):
    def slow() -> gym.Env:
        return gym.wrappers.TransformAction(gym.make("CartPole-v1"), lambda a: (time.sleep(0.002), a)[1], None)

    assert choice._step_seconds(EnvSpec(id="Slow-v0"), [slow] * 2, processes) >= 0.002
