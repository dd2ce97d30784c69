"""Rollouts collected elsewhere: which policy collects which, GAE as the limit of V-trace, exact resume, failures."""

from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import palestra
from palestra.control.asynchronous import Elsewhere, Segment
from palestra.control.envs.stepping import EnvironmentFailed
from palestra.control.envs.watchdog import EnvironmentHung
from palestra.control.seeding import stream
from palestra.errors import Interrupted, PalestraError, UsageError
from palestra.rl.returns import gae, stale_gae, vtrace
from palestra.spec.kinds.control import ControlSpec


def spec_of(**given: Any) -> dict[str, Any]:
    algorithm = {"name": "ppo", "horizon": 16, "minibatch": 32, "epochs": 2, "staleness": 2}
    return {
        "kind": "control",
        "name": "stale",
        "env": {"id": "CartPole-v1", "num_envs": 4},
        "algorithm": algorithm | given.pop("algorithm", {}),
        "net": {"hidden": [8]},
        "train": {"frames": 640},
        "cluster": {"environments": 2},
        "eval": {"episodes": 2},
        "every": {"checkpoint": "128 frames"},
    } | given


def numbers(run: Any) -> list[dict[str, Any]]:
    return [{name: value for name, value in row.items() if not name.startswith("time/")} for row in run.metrics()]


@given(st.integers(0, 10_000), st.floats(0.0, 1.0), st.booleans())
def test_returns_of_stale_actions_are_those_of_v_trace_and_of_fresh_ones_those_of_gae(
    seed: int, lam: float, dummies: bool
) -> None:
    torch.manual_seed(seed)
    shape = (7, 3)
    rewards, values, following, then, now = torch.randn(5, *shape, dtype=torch.float64)
    ends = {"terminated": torch.rand(shape) < 0.2, "truncated": torch.rand(shape) < 0.2}
    settings = {**ends, "valid": torch.rand(shape) < 0.8 if dummies else None, "gamma": 0.9, "lam": lam}
    estimated = (rewards, values, following)
    advantages, returns = stale_gae(torch.exp(now - then), *estimated, **settings)
    expected, weighted = vtrace(then, now, *estimated, **settings)
    torch.testing.assert_close(returns, expected)
    if lam == 1.0 and not dummies:  # the paper's has the weight of its own action
        torch.testing.assert_close(torch.exp(now - then).clamp(max=1.0) * advantages, weighted)
    for ours, theirs in zip(
        stale_gae(torch.ones_like(rewards), *estimated, **settings), gae(*estimated, **settings), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


class Collectors:
    """Actors whose segments are numbered, and tell which weights they were collected with."""

    def __init__(self, envs: int):
        self.envs, self.number = envs, -1

    @property
    def ready(self) -> Any:
        return self.call("run", "ready")

    def call(self, _: str, command: str, weights: Any = None) -> Any:
        future: Future[Any] = Future()
        if command == "collect":
            self.number += 1
            rewards = np.full((2, self.envs), 10.0 * self.number + weights["version"].item())
            future.set_result(Segment({"rewards": rewards}, 2 * self.envs, 0, []))
        else:
            future.set_result(None)
        return future


@pytest.mark.parametrize("staleness", [1, 2, 4])
def test_rollout_j_is_collected_with_the_policy_after_j_minus_staleness_improvements(staleness: int) -> None:
    spec = ControlSpec.model_validate(spec_of(algorithm={"staleness": staleness}))
    env = Elsewhere(spec, [Collectors(2), Collectors(2)], None)  # pyrefly: ignore
    for step in range(12):
        rewards = [segment.columns["rewards"] for segment in env.segments({"version": torch.tensor(step)})]
        assert np.all(np.concatenate(rewards) == 10.0 * step + max(0, step - staleness))


def test_state_of_another_number_of_processes_is_refused() -> None:
    apart = Elsewhere(ControlSpec.model_validate(spec_of()), [Collectors(4)], None)  # pyrefly: ignore
    with pytest.raises(UsageError, match="collected by 2 processes, not 1"):
        apart.set_state({"collectors": [None, None], "waiting": []})


def test_ends_of_the_processes_are_rows_of_the_joined_rollout() -> None:
    env = {"id": "CartPole-v1", "num_envs": 5}
    spec = ControlSpec.model_validate(spec_of(env=env, algorithm={"minibatch": 16}))
    apart = Elsewhere(spec, [Collectors(2), Collectors(3)], None)  # pyrefly: ignore
    widths, segments = (2, 3), []
    flags = np.random.default_rng(0).random((4, 5)) < 0.4
    for offset, width in zip((0, 2), widths, strict=True):
        part = flags[:, offset : offset + width]
        ends = np.flatnonzero(part)
        names = ("obs", "actions", "rewards", "terminated", "truncated", "valid", "began", "logprobs")
        columns: dict[str, Any] = dict.fromkeys(names, part.astype(np.float32)) | {"ends": ends, "masks": None}
        t, n = np.divmod(ends, width)
        columns |= {"last_obs": np.zeros((width, 4)), "final_obs": np.stack([t, n + offset], axis=1)}
        segments.append(Segment(columns, 0, 0, []))
    rollout = apart.rollout(segments)
    assert rollout.rewards.tolist() == flags.astype(float).tolist()
    assert sorted(rollout.ends.tolist()) == np.flatnonzero(flags).tolist()
    assert (rollout.ends // 5 == rollout.final_obs[:, 0]).all()
    assert (rollout.ends % 5 == rollout.final_obs[:, 1]).all()


def test_components_of_episodes_collected_elsewhere_are_logged(tmp_path: Path) -> None:
    env = {"id": "test_control_hooks:TwoGoals", "num_envs": 4, "reward_weights": [1.0, 1.0], "components": ["energy"]}
    run = palestra.run(spec_of(env=env, train={"frames": 320}), root=tmp_path, quiet=True)
    assert {row["component/energy"] for row in run.metrics()} == {10.0}


def test_games_of_several_agents_are_collected_elsewhere(tmp_path: Path) -> None:
    env = {"id": "pettingzoo:examples.control.meeting:Meeting", "num_envs": 6, "kwargs": {"steps": 4}, "policies": 3}
    algorithm = {"horizon": 16, "minibatch": 32}
    run = palestra.run(spec_of(env=env, algorithm=algorithm, train={"frames": 192}), root=tmp_path, quiet=True)
    assert run.metrics()[-1]["episodes"] == 192 / 4
    with pytest.raises(UsageError, match=r"whole games of the 3 agents of .*, and 2 of env\.num_envs = 6 would be"):
        palestra.run(spec_of(env=env, algorithm=algorithm, cluster={"environments": 3}), root=tmp_path, quiet=True)


@pytest.mark.parametrize(
    "env", [{"id": "CartPole-v1"}, {"id": "Pendulum-v1", "normalize_obs": True, "normalize_reward": True}]
)
def test_stopped_run_continues_as_if_it_had_not_been(tmp_path: Path, monkeypatch, env: dict[str, Any]) -> None:
    train, spec = partial(palestra.run, root=tmp_path, quiet=True), spec_of(env=env | {"num_envs": 4})
    whole = train({**spec, "name": "whole"})
    assert len(whole.metrics()) > 2
    monkeypatch.setenv("PALESTRA_LAB", str(tmp_path))
    (tmp_path / "stop").write_text("4")
    with pytest.raises(Interrupted):
        train({**spec, "name": "stopped", "hooks": ["lm_hooks:end"]})
    assert numbers(train(resume="stopped")) == numbers(whole)


@pytest.mark.parametrize(
    ("how", "error", "message"),
    [
        ("die", EnvironmentFailed, r"environments/1 .*: it collected in environments 2 to 3 of hanging_envs:Hanging"),
        ("sleep", EnvironmentHung, r"did not return from a rollout within 2 s[\s\S]*hanging_envs\.py"),
        ("raise", EnvironmentFailed, r"raised ValueError in vector step 3 .*the door is stuck"),
    ],
)
def test_process_that_dies_hangs_or_raises_is_named(tmp_path: Path, how: str, error: type, message: str) -> None:
    given = {"when": "step", "at": 3, "how": how, "seed": stream(0, "env") + 3}
    env = {"id": "hanging_envs:Hanging", "num_envs": 4, "kwargs": given, "reset_timeout": 2.0}
    with pytest.raises(error, match=message):
        palestra.run(spec_of(env=env), root=tmp_path, quiet=True, seed=0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cluster": {"environments": 0}}, r"cluster\.environments: expected at least 1"),
        ({"env": {"id": "CartPole-v1", "num_envs": 4, "vectorize": "async"}}, r"env\.vectorize: expected auto"),
        ({"net": {"recurrent": {"size": 8}}}, r"algorithm\.staleness: expected 0"),
    ],
)
def test_settings_that_do_not_fit_are_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(PalestraError, match=message):
        palestra.check(spec_of(**changes))
