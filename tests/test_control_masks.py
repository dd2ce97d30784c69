"""Action masks: from the environment's infos through acting, learning, evaluation and resuming (checklist 37)."""

from functools import partial
from itertools import product
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import fast_only
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, VectorEnv
from on_policy_envs import Forbidding
from probe_envs import Walk, learner_on, policy_for, sync

from palestra.control.envs.make import make_vector
from palestra.control.envs.stepping import Stepper
from palestra.control.evaluation import evaluate, play, random_episodes
from palestra.errors import UsageError
from palestra.spec.kinds.control import EnvSpec

torch.set_num_threads(1)

MODES = [AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP, AutoresetMode.DISABLED]
FORMS = [((4,), "flat"), ((4,), "sometimes"), ((3, 2), "flat"), ((3, 2), "tuple")]
QUICK: dict[str, Any] = {"lr": 1e-2, "horizon": 32, "net": {"hidden": [32]}, "gamma": 0.0}


def forbidding(sizes: tuple[int, ...] = (4,), form: str = "flat", mode: AutoresetMode = MODES[0]) -> VectorEnv:
    return sync(partial(Forbidding, sizes, form), 6, mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("sizes", "form"), FORMS)
def test_stepper_any_autoreset_mode_gives_the_mask_of_what_is_acted_on_next(sizes, form, mode):
    stepper = Stepper(forbidding(sizes, form, mode))
    obs, random = stepper.reset(3), np.random.default_rng(0)
    dummy = np.zeros(6, bool)
    for _ in range(40):
        assert stepper.mask is not None
        np.testing.assert_array_equal(stepper.mask[~dummy], obs[~dummy] > 0)  # the observation is the mask
        assert stepper.mask[dummy].all()
        allowed = np.where(stepper.mask, random.random(stepper.mask.shape), -1)
        parts = np.split(allowed, np.cumsum(sizes)[:-1], axis=1)
        actions = np.stack([part.argmax(1) for part in parts], axis=1)
        moved = stepper.step(actions[:, 0] if len(sizes) == 1 else actions)
        obs = moved.obs
        dummy = (moved.terminated | moved.truncated) & stepper.has_dummy_steps


def test_stepper_environments_in_processes_give_their_masks():
    env = AsyncVectorEnv([Forbidding] * 2, autoreset_mode=AutoresetMode.SAME_STEP)
    try:
        stepper = Stepper(env)
        obs = stepper.reset(1)
        for _ in range(12):
            np.testing.assert_array_equal(stepper.mask, obs > 0)
            obs = stepper.step(stepper.mask.argmax(1)).obs
    finally:
        env.close()


LEARNERS = ["ppo", "a2c", "reinforce"]
# Every form with every learner and with every mode.
SQUARE = [(form, LEARNERS[i], MODES[(i + j) % 3]) for j, form in enumerate(FORMS) for i in range(3)]


@pytest.mark.parametrize(("given", "name", "mode"), fast_only(product(FORMS, LEARNERS, MODES), *SQUARE))
def test_learner_and_evaluation_never_do_what_is_forbidden(given, name, mode):
    """The environment raises at a forbidden action."""
    (sizes, form), given = given, QUICK | ({"minibatch": 64} if name == "ppo" else {})
    learner = learner_on(forbidding(sizes, form, mode), name, **given)
    for _ in range(3):
        assert np.isfinite(list(learner.step(0.0).values())).all()
    evaluate(learner.policy, Stepper(forbidding(sizes, form, mode)), 12, seed=1)


GRU = {"cell": "gru", "size": 16}


def test_recurrent_learner_and_evaluation_never_do_what_is_forbidden():
    learner = learner_on(
        forbidding((3, 2)), "ppo", minibatch=64, **(QUICK | {"net": {"hidden": [8], "recurrent": GRU}})
    )
    for _ in range(2):
        assert np.isfinite(list(learner.step(0.0).values())).all()
    evaluate(learner.policy, Stepper(forbidding((3, 2))), 6, seed=1)


@pytest.mark.parametrize("recurrent", [None, pytest.param(GRU, marks=pytest.mark.slow)])
def test_learner_masked_environment_is_learned(recurrent):
    net = {"hidden": [32], "recurrent": recurrent}
    learner = learner_on(forbidding((3, 2)), "ppo", minibatch=64, **(QUICK | {"net": net}))
    for _ in range(12):
        learner.step(0.0)
    assert evaluate(learner.policy, Stepper(forbidding((3, 2))), 20, seed=1).returns.mean() > 4.6  # of 5


def test_rollout_stores_the_masks_that_were_acted_by_and_learning_uses_them():
    ppo = learner_on(forbidding(), "ppo", minibatch=96, **(QUICK | {"horizon": 16}))
    rollout = ppo.collect()
    torch.testing.assert_close(rollout.masks, rollout.obs > 0)
    batch = ppo.prepare(rollout)
    torch.testing.assert_close(batch.masks, batch.obs > 0)
    distribution, _ = batch.outputs(ppo.net)
    assert not distribution.logprobs.exp()[~batch.masks].any()
    assert torch.equal(distribution.log_prob(batch.actions), batch.logprobs)  # the ratio is 1 with the mask in place
    assert batch.masks.gather(1, batch.actions[:, None]).all()
    single = batch.masks.sum(1) == 1
    assert single.any()
    torch.testing.assert_close(distribution.entropy()[single], torch.zeros(int(single.sum())))


def test_gradient_through_a_forbidden_choice_is_exactly_zero():
    ppo = learner_on(forbidding(), "ppo", minibatch=96, **(QUICK | {"horizon": 16}))
    batch = ppo.prepare(ppo.collect())
    batch = batch._replace(masks=batch.masks & (torch.arange(4) != 2) | (torch.arange(4) == 0))
    batch = batch._replace(actions=batch.masks.float().argmax(1), masks=batch.masks)
    distribution, _ = batch.outputs(ppo.net)
    loss = distribution.log_prob(batch.actions).sum() + distribution.entropy().sum()
    (gradient,) = torch.autograd.grad(loss, ppo.net.policy_head.weight)
    assert not gradient[2].any()
    assert gradient[0].any()


def test_state_round_trip_masked_environment_continues_identically():
    def made() -> Any:
        env = make_vector(EnvSpec(id="object:Forbidding"), 3, Forbidding)
        return learner_on(env, "ppo", minibatch=48, **(QUICK | {"horizon": 16}))

    going = made()
    going.step(0.0)
    state, generator = going.state(), going.generator.get_state()
    expected = [going.step(0.0) for _ in range(2)]
    resumed = made()
    resumed.load_state(state)
    resumed.generator.set_state(generator)
    assert [resumed.step(0.0) for _ in range(2)] == expected


def test_random_episodes_masked_environment_draws_uniformly_from_what_is_allowed():
    found = random_episodes(Stepper(forbidding()), 300, seed=0)
    # One of k allowed choices is right: the mean of 1/k over the masks that are drawn.
    random, shares = np.random.default_rng(0), []
    for _ in range(20_000):
        mask = random.random(4) < 0.4
        mask[random.integers(4)] = True
        shares.append(1 / mask.sum())
    assert found.returns.mean() / 5 == pytest.approx(np.mean(shares), abs=0.03)


def test_random_episodes_masks_of_a_discrete_space_from_one_and_multi_discrete_stay_inside():
    assert len(random_episodes(Stepper(forbidding((3, 2))), 20, seed=0).returns) == 20

    class FromOne(gym.ActionWrapper):
        def __init__(self, env: gym.Env):
            super().__init__(env)
            self.action_space = spaces.Discrete(4, start=1)

        def action(self, action: Any) -> Any:
            return action - 1

    assert len(random_episodes(Stepper(sync(lambda: FromOne(Forbidding()), 2)), 20, seed=0).returns) == 20


def test_play_masked_environment_passes_the_mask():
    class Pictured(Forbidding):
        def render(self) -> None:
            return None

    policy = policy_for(Pictured().observation_space, Pictured().action_space)
    returns, _ = play(policy, Pictured(), 3, seed=0)
    assert len(returns) == 3


def test_act_with_a_mask_single_batch_and_wrong_sizes():
    policy = policy_for(spaces.Box(0, 1, (3,)), spaces.Discrete(3))
    for choice in range(3):
        mask = np.eye(3, dtype=np.int8)[choice]
        assert policy.act(np.zeros(3), mask=mask) == choice
        assert policy.act(np.zeros(3), mask=mask, deterministic=False) == choice
    assert policy.act(np.zeros((3, 3)), mask=np.eye(3)).tolist() == [0, 1, 2]
    with pytest.raises(UsageError, match="3 entries"):
        policy.act(np.zeros(3), mask=[1, 0])
    parts = policy_for(spaces.Box(0, 1, (3,)), spaces.MultiDiscrete([2, 3]))
    assert parts.act(np.zeros(3), mask=(np.array([0, 1]), np.array([0, 0, 1]))).tolist() == [1, 2]
    with pytest.raises(UsageError, match="Discrete"):
        policy_for(spaces.Box(0, 1, (3,)), spaces.Box(-1, 1, (2,), np.float32)).act(np.zeros(3), mask=[1, 1])


class Odd(Walk):
    """Gives `masks`, one after the other, with its reset and steps; None is none."""

    def __init__(self, *masks: Any, actions: gym.Space | None = None):
        super().__init__([1.0] * 9)
        self.masks = list(masks)
        self.action_space = actions or spaces.Discrete(2)

    def reset(self, **given: Any) -> tuple[np.ndarray, dict]:
        return super().reset(**given)[0], self._info()

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        return (*super().step(action)[:4], self._info())

    def _info(self) -> dict:
        mask = self.masks.pop(0)
        return {} if mask is None else {"action_mask": np.array(mask)}


@pytest.mark.parametrize(
    ("env", "says"),
    [
        (lambda: Odd([1, 1, 1]), "Odd-v0 gave an info.*3 entries.*2 choices"),
        (lambda: Odd([0, 0]), "Odd-v0 allows no action at all in environment 0"),
        (lambda: Odd(None, [1, 1]), "Odd-v0 gives.*after a step"),
        (lambda: Odd([1, 1], actions=spaces.Box(-1, 1, (2,))), "masks are for Discrete and MultiDiscrete"),
        (lambda: Odd([1, 0, 0, 0], actions=spaces.MultiDiscrete([2, 2])), "environment 0, part 1"),
    ],
)
def test_stepper_mask_that_cannot_be_is_refused(env, says):
    stepper = Stepper(sync(env, 1), "Odd-v0")

    def go() -> None:
        stepper.reset(0)
        stepper.step(np.zeros(1, np.int64))

    with pytest.raises(UsageError, match=says):
        go()
