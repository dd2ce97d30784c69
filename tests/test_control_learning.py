"""PPO learns what can be learned: identity environments of every action space, and values known in closed form."""

from functools import partial
from itertools import product

import numpy as np
import pytest
import torch
from conftest import fast_only
from envs import LENGTH, Identity
from gymnasium.vector import AutoresetMode
from probe_envs import OneStep, Walk, ppo_on, sync

from palestra.control.algorithms.ppo import PPO
from palestra.control.envs.make import make_vector
from palestra.control.envs.stepping import Stepper
from palestra.control.evaluation import evaluate
from palestra.spec.kinds.control import EnvSpec

torch.set_num_threads(1)

QUICK = {"lr": 1e-2, "horizon": 32, "minibatch": 64, "net": {"hidden": [32]}}


def trained(ppo: PPO, steps: int) -> PPO:
    for _ in range(steps):
        ppo.step(0.0)
    return ppo


@pytest.mark.parametrize("kind", Identity.SPACES)
def test_identity_environment_of_any_space_is_learned(kind):
    spec = EnvSpec(id="object:Identity", num_envs=8)
    ppo = ppo_on(make_vector(spec, 8, partial(Identity, kind)), gamma=0.0, **QUICK)
    stepper = Stepper(make_vector(spec, 5, partial(Identity, kind)))
    before = evaluate(ppo.policy, stepper, 10, seed=1).returns.mean()
    after = evaluate(trained(ppo, 12).policy, stepper, 10, seed=1).returns.mean()
    assert before < 0.8 * LENGTH
    assert after > 0.9 * LENGTH


def values(ppo: PPO, *places: float) -> list[float]:
    with torch.no_grad():
        return ppo.policy.net.value(torch.tensor(places)[:, None]).tolist()


MODES = [AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP]


@pytest.mark.parametrize("mode", fast_only(MODES, AutoresetMode.SAME_STEP))
def test_value_of_a_constant_reward_is_that_reward(mode):
    ppo = trained(ppo_on(sync(lambda: OneStep(lambda shown, action: 1.0), 8, mode), **QUICK), 8)
    assert values(ppo, -1.0, 1.0) == pytest.approx([1.0, 1.0], abs=0.05)


@pytest.mark.parametrize("mode", fast_only(MODES, AutoresetMode.NEXT_STEP))
def test_value_of_a_reward_shown_is_what_is_shown(mode):
    ppo = trained(ppo_on(sync(lambda: OneStep(lambda shown, action: shown), 8, mode), **QUICK), 8)
    assert values(ppo, -1.0, 1.0) == pytest.approx([-1.0, 1.0], abs=0.05)


@pytest.mark.parametrize("mode", fast_only(MODES, AutoresetMode.NEXT_STEP))
def test_policy_and_value_of_a_reward_for_the_shown_action_are_learned(mode):
    pays = lambda shown, action: float((shown > 0) == action)  # noqa: E731
    ppo = trained(ppo_on(sync(lambda: OneStep(pays), 8, mode), **QUICK), 14)
    assert ppo.policy.act(np.array([[-1.0], [1.0]])).tolist() == [0, 1]
    assert values(ppo, -1.0, 1.0) == pytest.approx([1.0, 1.0], abs=0.1)


@pytest.mark.parametrize(
    ("gamma", "mode"),
    fast_only(product([0.5, 0.9], MODES), (0.5, AutoresetMode.SAME_STEP), (0.9, AutoresetMode.NEXT_STEP)),
)
def test_value_of_a_delayed_reward_is_discounted_once_a_step(mode, gamma):
    ppo = trained(ppo_on(sync(lambda: Walk([0.0, 0.0, 1.0]), 8, mode), gamma=gamma, **QUICK), 14)
    assert values(ppo, 0.0, 1.0, 2.0) == pytest.approx([gamma**2, gamma, 1.0], abs=0.06)


@pytest.mark.parametrize(
    ("truncates", "mode"),
    fast_only(
        product([True, False], AutoresetMode),
        *((True, mode) for mode in AutoresetMode),
        (False, AutoresetMode.SAME_STEP),
    ),
)
def test_value_of_a_loop_counts_the_future_beyond_a_time_limit(mode, truncates):
    """Reward 1, γ = 0.9, five steps: r/(1-γ) = 10 when a limit cuts them off, and the mean of Σγᵏ when they end.

    The state is one and the same all the time, so the terminating one learns (4.0951 + 3.439 + 2.71 + 1.9 + 1) / 5.
    Taking truncation for termination gives that, 2.63, for the first as well (4.1 in the state at the start).
    """
    factory = partial(Walk, [1.0] * 5, truncates=truncates, loop=True)
    settings = QUICK | {"lr": 3e-2, "max_grad_norm": None}
    ppo = trained(ppo_on(sync(factory, 8, mode), gamma=0.9, lam=1.0, **settings), 20)
    assert values(ppo, 0.0) == pytest.approx([10.0 if truncates else 2.63], abs=0.35)
