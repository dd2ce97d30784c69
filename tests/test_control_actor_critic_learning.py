"""SAC, TD3 and CrossQ on probe environments with known answers."""

import numpy as np
import pytest
import torch
from actor_critic_probes import CONTINUOUS, DISCRETE, Aim, q, rate, trained
from conftest import fast_only
from probe_envs import OneStep, Walk


@pytest.mark.parametrize("name", fast_only(CONTINUOUS, "td3"))
def test_constant_reward_of_one_step_is_the_value(name: str):
    algorithm = trained(name, lambda: Aim(lambda shown, action: 1.0), 80)
    torch.testing.assert_close(
        q(algorithm, [[1, 0, 0], [-1, 0, 0]], [[0.3], [-0.8]]), torch.ones(2, 2), atol=0.1, rtol=0
    )


@pytest.mark.parametrize("name", fast_only(CONTINUOUS, "crossq"))
def test_reward_that_depends_on_the_observation_is_told_apart(name: str):
    algorithm = trained(name, lambda: Aim(lambda shown, action: shown), 100)
    expected = torch.tensor([[1.0, -1.0]]).expand(2, 2)
    torch.testing.assert_close(q(algorithm, [[1, 0, 0], [-1, 0, 0]], [[0.0], [0.0]]), expected, atol=0.15, rtol=0)


@pytest.mark.parametrize("name", fast_only(CONTINUOUS, "sac"))
def test_delayed_reward_counts_gamma_one_step_earlier(name: str):
    # The targets follow fast: what is learned is a fixed point and not how fast it is reached.
    targets = {} if name == "crossq" else {"tau": 0.05}
    algorithm = trained(name, lambda: Aim(lambda shown, action: 1.0, steps=2), 250, gamma=0.5, lr=rate(1e-2), **targets)
    values = q(algorithm, [[1, 0, 0]], [[0.0]])
    torch.testing.assert_close(values, torch.full((2, 1), 0.5), atol=0.12, rtol=0)


@pytest.mark.parametrize("name", fast_only(CONTINUOUS, "td3"))
def test_continuous_target_is_hit_in_the_environment_units(name: str):
    algorithm = trained(name, lambda: Aim(lambda shown, action: -((action - shown) ** 2)), 300, lr=rate(1e-2))
    actions = algorithm.policy.act(np.array([[1, 0, 0], [-1, 0, 0]], np.float32))
    np.testing.assert_allclose(actions[:, 0], [1.0, -1.0], atol=0.25)


@pytest.mark.parametrize("name", fast_only(CONTINUOUS, "sac"))
def test_two_step_credit_goes_to_the_first_action(name: str):
    targets = {} if name == "crossq" else {"tau": 0.05}
    algorithm = trained(
        name, lambda: Aim(lambda shown, action: shown * action, steps=2), 250, gamma=0.9, lr=rate(1e-2), **targets
    )
    actions = algorithm.policy.act(np.array([[1, 0, 0], [-1, 0, 0]], np.float32))
    assert actions[0, 0] > 1
    assert actions[1, 0] < -1


@pytest.mark.parametrize("name", fast_only(DISCRETE, "sac"))
def test_discrete_choice_by_the_observation_is_learned(name: str):
    algorithm = trained(name, lambda: OneStep(lambda shown, action: shown * (2 * action - 1)), 150)
    assert algorithm.policy.act(np.array([[1], [-1]], np.float32)).tolist() == [1, 0]
    values = q(algorithm, [[1.0], [-1.0]])  # (2, B, A)
    expected = torch.tensor([[-1.0, 1.0], [1.0, -1.0]]).expand(2, 2, 2)
    torch.testing.assert_close(values, expected, atol=0.3, rtol=0)


@pytest.mark.parametrize("name", fast_only(DISCRETE, "crossq"))
def test_discrete_truncation_is_bootstrapped(name: str):
    # One state, reward 1 for ever, cut off after 5 steps: the value is 1 / (1 - γ) = 2, and with α → 0 nothing more.
    targets = {} if name == "crossq" else {"tau": 0.05}
    factory = lambda: Walk([1.0] * 5, truncates=True, loop=True)  # noqa: E731
    # An observation of 0 leaves only biases to learn: they need a larger step.
    algorithm = trained(
        name, factory, 200 if name == "crossq" else 400, gamma=0.5, alpha=1e-4, lr=rate(1e-2), **targets
    )
    assert abs(q(algorithm, [[0.0]]).mean().item() - 2.0) < 0.15
