"""Environments in hosted processes: the numbers of one process, runs that resume exactly, failures that are named."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from typing import Any

import numpy as np
import pytest
from gymnasium.wrappers import TransformReward
from test_control_copies import actions_for, trace

import palestra
from palestra.cluster.actor import Actor, Hub
from palestra.control.envs.hosted import HostedEnvs, hosted_copies
from palestra.control.envs.make import make_vector
from palestra.control.envs.stepping import EnvironmentFailed, Stepper
from palestra.control.envs.watchdog import EnvironmentHung
from palestra.errors import Interrupted, PalestraError
from palestra.spec.kinds.control import EnvSpec
from palestra.work.fanout import Processes

Start = Callable[[int], list[Actor]]


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    opened = Hub(Processes("envs", heartbeat_timeout=None), silence=4.0)
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def actors(hub: Hub) -> list[Actor]:
    return [hub.start(f"environments/{number}", HostedEnvs, log=None) for number in range(2)]


def spec_of(name: str, **given: Any) -> EnvSpec:
    return EnvSpec(id=name, vectorize="async", **given)


@pytest.mark.parametrize("name", ["CartPole-v1", "Pendulum-v1", "hanging_envs:Lives"])
def test_copies_elsewhere_give_the_numbers_of_one_process_bit_for_bit(actors: list[Actor], name: str) -> None:
    here = make_vector(EnvSpec(id=name, vectorize="sync"), 5)
    with closing(here), closing(hosted_copies(spec_of(name), 5, None, actors)) as there:
        assert there.reset(seed=3)[0].tobytes() == here.reset(seed=3)[0].tobytes()
        actions = actions_for(here, 250)
        assert trace(there, actions) == trace(here, actions)


def test_masks_come_through(actors: list[Actor]) -> None:
    with closing(hosted_copies(spec_of("hanging_envs:Masked"), 3, None, actors)) as env:
        stepper = Stepper(env, "Masked")
        stepper.reset(0)
        for t in range(20):
            assert stepper.mask is not None
            assert stepper.mask.argmax(1).tolist() == [t % 7 % 3] * 3
            stepper.step(stepper.mask.argmax(1))


def test_states_continue_here_and_there(actors: list[Actor]) -> None:
    here = make_vector(EnvSpec(id="CartPole-v1", vectorize="sync"), 3)
    with closing(here), closing(hosted_copies(spec_of("CartPole-v1"), 3, None, actors)) as there:
        there.reset(seed=5)
        actions = actions_for(there, 60)
        trace(there, actions[:30])
        assert here.set_state(there.get_state()) is None
        assert trace(here, actions[30:]) == trace(there, actions[30:])


def test_environment_of_a_function_reaches_the_other_process(actors: list[Actor]) -> None:
    import gymnasium as gym

    def shifted() -> gym.Env:
        return TransformReward(gym.make("CartPole-v1"), lambda reward: reward + 10)

    with closing(hosted_copies(spec_of("object:shifted"), 2, shifted, actors)) as env:
        env.reset(seed=0)
        assert env.step(np.zeros(2, np.int64))[1].tolist() == [11.0, 11.0]


def test_environment_that_raises_elsewhere_raises_the_same_here(actors: list[Actor]) -> None:
    given = {"when": "step", "at": 3, "how": "raise"}
    with closing(hosted_copies(spec_of("hanging_envs:Hanging", kwargs=given), 2, None, actors)) as env:
        stepper = Stepper(env, "Hanging")
        stepper.reset(0)
        for _ in range(2):
            stepper.step(np.zeros(2, np.int64))
        with pytest.raises(EnvironmentFailed, match=r"raised ValueError in vector step 3 .*the door is stuck"):
            stepper.step(np.zeros(2, np.int64))


@pytest.mark.parametrize(
    ("how", "error", "message"),
    [
        ("die", EnvironmentFailed, r"doomed/1 .*: it had environments 2 to 3 of hanging_envs:Hanging, during step"),
        ("sleep", EnvironmentHung, r"environment 3 did not return from step within 2 s[\s\S]*hanging_envs\.py"),
    ],
)
def test_process_that_dies_or_hangs_is_named(hub: Hub, how: str, error: type[Exception], message: str) -> None:
    own = [hub.start(f"doomed/{number}", HostedEnvs, log=None) for number in range(2)]
    given = {"when": "step", "at": 2, "how": how, "seed": 3}
    spec = spec_of("hanging_envs:Hanging", kwargs=given, reset_timeout=2.0)
    with closing(hosted_copies(spec, 4, None, own)) as env:
        env.reset(seed=0)
        env.step(np.zeros(4, np.int64))
        with pytest.raises(error, match=message):
            env.step(np.zeros(4, np.int64))


def test_process_that_is_stopped_is_named(hub: Hub) -> None:
    own = [hub.start("stopped/0", HostedEnvs, log=None)]
    with closing(hosted_copies(spec_of("CartPole-v1"), 2, None, own)) as env:
        env.reset(seed=0)
        os.kill(own[0].pid, signal.SIGSTOP)
        with pytest.raises(
            EnvironmentFailed, match=r"stopped/0 .*has not answered for 4 s: it had environments 0 to 1"
        ):
            env.step(np.zeros(2, np.int64))


RUN = {
    "kind": "control",
    "name": "hosted",
    "env": {"id": "CartPole-v1", "num_envs": 4, "vectorize": "async"},
    "algorithm": {"name": "ppo", "horizon": 32, "minibatch": 64},
    "train": {"frames": 768},
    "eval": {"episodes": 2},
    "every": {"checkpoint": "256 frames"},
}


def numbers(run: Any) -> list[dict[str, Any]]:
    return [{name: value for name, value in row.items() if not name.startswith("time/")} for row in run.metrics()]


def test_run_with_environments_apart_is_the_run_of_one_machine(tmp_path, monkeypatch) -> None:
    train = partial(palestra.run, root=tmp_path, quiet=True)
    alone = train(RUN)
    apart = train({**RUN, "name": "apart", "cluster": {"environments": 2}})
    assert numbers(apart) == numbers(alone)
    logs = apart.sessions[0].path / "logs"
    assert sorted(path.name for path in logs.iterdir()) == ["environments_0.txt", "environments_1.txt"]

    monkeypatch.setenv("PALESTRA_LAB", str(tmp_path))
    (tmp_path / "stop").write_text("3")
    with pytest.raises(Interrupted):
        train({**RUN, "name": "resumed", "cluster": {"environments": 2}, "hooks": ["lm_hooks:end"]})
    assert numbers(train(resume="resumed")) == numbers(alone)


@pytest.mark.slow
def test_environments_on_ray_give_the_run_of_one_machine(tmp_path) -> None:
    train = partial(palestra.run, root=tmp_path, quiet=True)
    cluster = {"environments": 2, "address": "auto"}
    assert numbers(train({**RUN, "cluster": cluster})) == numbers(train({**RUN, "name": "alone"}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cluster": {"environments": 5}}, r"cluster\.environments: expected at most `env\.num_envs` = 4"),
        ({"cluster": {"address": "auto"}}, r"cluster\.address: expected local"),
        ({"cluster": {"generators": 1}}, r"cluster\.generators"),
        (
            {"cluster": {"environments": 2}, "env": {"id": "CartPole-v1", "vectorize": "sync"}},
            r"env\.vectorize: expected async",
        ),
    ],
)
def test_clusters_that_cannot_be_are_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(PalestraError, match=message):
        palestra.check({**RUN, **changes})
