"""`palestra dev`: what it checks on every algorithm, and that each of its checks can fail."""

from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import SHORT
from torch import nn

from palestra.control import smoke_test as sanity
from palestra.control.algorithms import ALGORITHMS
from palestra.control.episodes import NotFinite
from palestra.control.smoke_test import SmokeTestFailed, check_learning, tiny, try_out
from palestra.control.trainer import ControlTrainer
from palestra.errors import UsageError
from palestra.spec.kinds.control import ControlSpec
from palestra.spec.load import load

BASE = {key: value for key, value in SHORT.items() if key != "every"}
CONTINUOUS = ("tqc", "td3", "td3_bc")
OFFLINE = ("bc", "td3_bc", "iql")


def spec_of(name: str, **algorithm: object) -> ControlSpec:
    env = {"id": "Pendulum-v1" if name in CONTINUOUS else "CartPole-v1", "num_envs": 2}
    loaded = load({**BASE, "name": "dev", "env": env, "algorithm": {"name": name, **algorithm}}).spec
    assert isinstance(loaded, ControlSpec)
    return loaded


def transitions(folder: Path, continuous: bool) -> Path:
    """A file of noise, of Pendulum's sizes or of CartPole's."""
    draws, rows, size = np.random.default_rng(0), 400, 3 if continuous else 4
    actions = draws.uniform(-2, 2, (rows, 1)).astype(np.float32) if continuous else draws.integers(2, size=rows)
    obs, following = draws.standard_normal((2, rows, size)).astype(np.float32)
    ends = {"rewards": draws.random(rows), "terminated": draws.random(rows) < 0.1}
    path = folder / f"{continuous}.npz"
    np.savez(path, observations=obs, actions=actions, next_observations=following, **ends)
    return path


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_dev_any_algorithm_passes_and_says_what_was_checked(name, tmp_path):
    lines: list[str] = []
    few: dict[str, dict[str, object]] = {"ppo": {"horizon": 32, "minibatch": 32}, "reinforce": {"horizon": 32}}
    few |= {name: {"replay_ratio": 0.25, "update_every": 2} for name in ("sac", "tqc", "td3", "crossq")}
    few |= {name: {"data": str(transitions(tmp_path, name in CONTINUOUS))} for name in OFFLINE}
    learner = check_learning(spec_of(name, **few.get(name, {})), tell=lines.append)
    assert learner.steps == sanity.STEPS
    text = "\n".join(lines)
    for said in ("gradient steps in 3 steps", "losses are finite", "moved by", "evaluation: 2 episodes"):
        assert said in text, text
    assert all(line.startswith("ok ") for line in lines)


def test_tiny_keeps_the_networks_and_cuts_the_run():
    spec = spec_of("dqn", start=10_000, buffer=50_000, batch=64)
    small = tiny(spec)
    assert small.net == spec.net
    assert small.steps == sanity.STEPS
    assert small.algorithm.start < small.frames_per_step
    assert small.algorithm.buffer <= 2 * small.train.frames
    assert load(small).spec == small  # still a valid spec


def ppo(**algorithm: object) -> ControlSpec:
    return spec_of("ppo", horizon=32, minibatch=32, **algorithm)


def test_dev_parameters_that_never_change_fail():
    with pytest.raises(SmokeTestFailed, match=r"policy\.policy_head .* did not change"):
        check_learning(ppo(lr=0.0), tell=lambda line: None)


def test_dev_part_without_gradients_that_never_changes_fails(monkeypatch):
    made = ControlTrainer.__init__

    def with_a_dead_part(self: ControlTrainer, *args: object, **kwargs: object) -> None:
        made(self, *args, **kwargs)
        self.algorithm.forgotten = nn.Linear(2, 2)  # a network that nothing trains

    monkeypatch.setattr(ControlTrainer, "__init__", with_a_dead_part)
    with pytest.raises(SmokeTestFailed, match=r"forgotten\.weight .* did not change"):
        check_learning(ppo(), tell=lambda line: None)


def test_dev_exploding_gradients_fail(monkeypatch):
    monkeypatch.setattr(sanity, "LARGEST_NORM", 1e-3)
    with pytest.raises(SmokeTestFailed, match=r"expected between 0 and 0\.001"):
        check_learning(ppo(), tell=lambda line: None)


def test_dev_loss_that_is_not_finite_fails():
    with pytest.raises(NotFinite, match="diverged"):
        check_learning(ppo(lr=1e30, max_grad_norm=None), tell=lambda line: None)


def test_parts_of_counts_every_parameter_once():
    learner = ControlTrainer(tiny(ppo()), 0, None, compile=False)
    try:
        counted = sum(p.numel() for parts in sanity.parts_of(learner).values() for p in parts)
        assert counted == sum(p.numel() for p in learner.policy.net.parameters())
    finally:
        learner.env.close()


def test_parts_of_critics_are_the_vectors_that_learn():
    learner = ControlTrainer(tiny(spec_of("sac")), 0, None, compile=False)
    try:
        assert {"critics.weights", "target.weights"} <= sanity.parts_of(learner).keys()
    finally:
        learner.env.close()


def test_parts_of_dqn_has_the_target_network_too():
    learner = ControlTrainer(tiny(spec_of("dqn")), 0, None, compile=False)
    try:
        assert any(name.startswith("target.") for name in sanity.parts_of(learner))
    finally:
        learner.env.close()


def test_recorded_gradient_norms_sees_each_and_is_gone_after():
    x = torch.tensor([3.0, 4.0], requires_grad=True)
    original = torch.autograd.grad
    with sanity.recorded_gradient_norms() as norms:
        torch.autograd.grad((x * x).sum() / 2, x)
    assert norms == [5.0]
    assert torch.autograd.grad is original


def test_try_out_other_kind_is_a_usage_error():
    spec = load("examples/lm/shakespeare.yaml", variables={"text": "x.txt"}).spec
    with pytest.raises(UsageError, match="kind control"):
        try_out(spec, print)


def test_try_out_algorithm_that_cannot_act_in_the_environment_is_refused_as_training_does():
    spec = load({**BASE, "name": "dev", "env": {"id": "CartPole-v1"}, "algorithm": {"name": "td3"}}).spec
    with pytest.raises(UsageError, match="td3 acts in spaces of type box, and CartPole-v1 has one of type discrete"):
        try_out(spec, print)


def test_dev_command_checks_and_writes_a_video_without_a_display(scratch):
    result = scratch("dev", scratch.spec(), "--render", DISPLAY="", WAYLAND_DISPLAY="")
    assert result.returncode == 0, result.stderr
    assert "ok      policy.trunk" in result.stdout
    assert (scratch.path / "dev.gif").stat().st_size > 1000
    assert not (scratch.path / "runs").exists()
