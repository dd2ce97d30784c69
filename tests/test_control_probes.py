"""On-policy algorithms solve their probe environments: constant, shown, delayed, credit over two steps, a target."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from conftest import fast_only
from envs import LENGTH, Identity
from gymnasium import spaces
from on_policy_envs import Target, TwoStep
from probe_envs import OneStep, Walk, learner_on, sync

from palestra.control.envs.make import make_vector
from palestra.control.envs.stepping import Stepper
from palestra.control.evaluation import evaluate
from palestra.errors import UsageError
from palestra.spec.kinds.control import EnvSpec

torch.set_num_threads(1)

IMITATION = {"buffer": 1000, "batch": 64, "updates": 2}
NAMES: dict[str, dict[str, Any]] = {
    "a2c": {"name": "a2c", "horizon": 16, "lr": 1e-2, "steps": 60},
    "a2c_imitating": {"name": "a2c", "horizon": 16, "lr": 1e-2, "steps": 36, "self_imitation": IMITATION},
    "reinforce": {"name": "reinforce", "horizon": 16, "lr": 2e-2, "steps": 60},
    "ppo_imitating": {
        "name": "ppo",
        "horizon": 32,
        "lr": 1e-2,
        "steps": 8,
        "minibatch": 64,
        "self_imitation": IMITATION,
    },
    "ppo_normalizing": {
        "name": "ppo",
        "horizon": 32,
        "lr": 1e-2,
        "steps": 9,
        "minibatch": 64,
        "given": {"normalize_obs": True, "normalize_reward": True},
    },
}
CRITICS = ["a2c", "a2c_imitating", "ppo_imitating"]


def trained(which: str, env: Any, longer: float = 1.0, **spec: Any) -> Any:
    given = {"net": {"hidden": [32]}, **NAMES[which], **spec}
    learner = learner_on(env, given.pop("name"), **{k: v for k, v in given.items() if k != "steps"})
    for _ in range(int(given["steps"] * longer)):
        learner.step(0.0)
    return learner


def values(learner: Any, *places: float) -> list[float]:
    with torch.no_grad():
        return learner.policy.net.value(torch.tensor(places)[:, None]).tolist()


@pytest.mark.parametrize("which", fast_only(CRITICS, "ppo_imitating"))
def test_value_of_a_constant_reward_is_that_reward(which):
    learner = trained(which, sync(lambda: OneStep(lambda shown, action: 1.0), 8))
    assert values(learner, -1.0, 1.0) == pytest.approx([1.0, 1.0], abs=0.05)


@pytest.mark.parametrize("which", fast_only(CRITICS, "a2c"))
def test_value_of_a_reward_shown_is_what_is_shown(which):
    learner = trained(which, sync(lambda: OneStep(lambda shown, action: shown), 8))
    assert values(learner, -1.0, 1.0) == pytest.approx([-1.0, 1.0], abs=0.1)


@pytest.mark.parametrize("which", fast_only(CRITICS, "a2c_imitating"))
def test_value_of_a_delayed_reward_is_discounted_once_a_step(which):
    learner = trained(which, sync(lambda: Walk([0.0, 0.0, 1.0]), 8), longer=1.5, gamma=0.8)
    assert values(learner, 0.0, 1.0, 2.0) == pytest.approx([0.64, 0.8, 1.0], abs=0.1)


@pytest.mark.parametrize("which", fast_only(NAMES, "a2c_imitating", "ppo_normalizing"))
def test_policy_of_a_reward_for_the_shown_action_is_learned(which):
    pays = lambda shown, action: float((shown > 0) == action)  # noqa: E731
    learner = trained(which, sync(lambda: OneStep(pays), 8))
    assert learner.policy.act(np.array([[-1.0], [1.0]])).tolist() == [0, 1]


@pytest.mark.parametrize("which", fast_only(NAMES, "a2c", "reinforce"))
def test_policy_of_two_steps_gives_the_first_its_credit(which):
    learner = trained(which, sync(TwoStep, 8), longer=1.5)
    assert learner.policy.act(np.array([[0.0], [1.0]])).tolist() == [1, 1]


@pytest.mark.parametrize(
    ("which", "distribution"),
    fast_only(
        [("a2c", "beta"), ("reinforce", "gaussian"), ("ppo_normalizing", "beta")],
        ("reinforce", "gaussian"),
        ("ppo_normalizing", "beta"),
    ),
)
def test_policy_of_a_continuous_target_is_found(which, distribution):
    """Actions are asked for in the Box's own units of ±2, and learned in halves of its range."""
    learner = trained(which, sync(Target, 8), longer=1.5, distribution=distribution)
    shown = np.array([[-0.8], [0.0], [0.8]])
    np.testing.assert_allclose(learner.policy.act(shown), shown / 2, atol=0.25)
    drawn = learner.policy.act(np.zeros((500, 1)), deterministic=False)
    assert np.abs(drawn).max() <= 2


@pytest.mark.parametrize(
    ("which", "kind"),
    fast_only(
        [("a2c", "discrete_from_1"), ("a2c", "multi_binary"), ("reinforce", "multi_discrete"), ("reinforce", "box")],
        ("a2c", "discrete_from_1"),
        ("reinforce", "multi_discrete"),
    ),
)
def test_identity_environment_of_any_space_is_learned(which, kind):
    spec = EnvSpec(id="object:Identity", num_envs=8)
    learner = trained(which, make_vector(spec, 8, partial(Identity, kind)), longer=1.5, gamma=0.0)
    stepper = Stepper(make_vector(spec, 5, partial(Identity, kind)))
    assert evaluate(learner.policy, stepper, 10, seed=1).returns.mean() > 0.85 * LENGTH


@pytest.mark.parametrize("name", ["ppo", "a2c", "reinforce"])
def test_beta_distribution_of_a_box_without_bounds_is_refused(name):
    class Open(Target):
        def __init__(self) -> None:
            super().__init__()
            self.action_space = spaces.Box(-np.inf, 1, (1,), np.float32)

    with pytest.raises(UsageError, match=r"algorithm.distribution: beta"):
        learner_on(sync(Open, 2), name, distribution="beta")


def test_beta_policy_state_round_trip_acts_the_same():
    learner = trained("a2c", sync(Target, 4), longer=0.1, distribution="beta")
    state = learner.policy.state()
    assert state["actions"]["family"] == "beta"
    other = trained("a2c", sync(Target, 4), longer=0, seed=3, distribution="beta")
    other.policy.load_state(state)
    obs = np.linspace(-1, 1, 9)[:, None]
    np.testing.assert_array_equal(other.policy.act(obs), learner.policy.act(obs))
