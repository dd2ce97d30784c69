"""SAC, TD3 and CrossQ: the checklist's pitfalls, resume and determinism."""

import itertools
import math
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from actor_critic_probes import CONTINUOUS, Aim, made, rate, trained
from conftest import fast_only
from envs import Identity
from gymnasium import spaces
from probe_envs import OneStep, learner_on, sync
from torch import Tensor

from palestra.control.algorithms.crossq import CrossQ
from palestra.control.algorithms.off_policy import Inputs, held
from palestra.control.algorithms.td3 import TD3
from palestra.control.envs.make import make_vector
from palestra.control.memory.replay import ReplayBatch
from palestra.control.nets.values import warmth_after
from palestra.errors import UsageError
from palestra.spec.kinds.control import EnvSpec


def batch_for(algorithm: Any, rows: int = 16) -> ReplayBatch:
    generator = torch.Generator().manual_seed(5)
    obs, following = torch.randn(2, rows, *algorithm.policy.obs_shape, generator=generator)
    actions = torch.rand(rows, *algorithm.head.shape, generator=generator) * 2 - 1
    if not algorithm.head.continuous:
        actions = (actions > 0).long()
    rewards, discounts = torch.randn(rows, generator=generator), torch.full((rows,), 0.9)
    return ReplayBatch(obs, actions, rewards, following, discounts, None, torch.arange(rows))


def inputs_for(algorithm: Any, batch: ReplayBatch, seed: int) -> Inputs:
    noise = torch.randn(batch.actions.shape, generator=torch.Generator().manual_seed(seed))
    noise = noise if isinstance(algorithm, TD3) else torch.stack([noise, noise])
    warmth = torch.tensor(warmth_after(5, 10)) if isinstance(algorithm, CrossQ) else None
    return Inputs(noise, torch.tensor([1e-3, 1e-8]).expand(3, 2), warmth)


def critic_step(algorithm: Any, batch: ReplayBatch) -> Tensor:
    with torch.no_grad():
        return algorithm.step_critics(algorithm.learned, batch, inputs_for(algorithm, batch, seed=6))


def policy_step(algorithm: Any, batch: ReplayBatch) -> None:
    with torch.no_grad():
        algorithm.step_policy(algorithm.learned, batch, inputs_for(algorithm, batch, seed=7))


def aim() -> Aim:
    return Aim(lambda shown, action: 1.0)


def test_targets_begin_as_copies_and_follow_by_tau():  # checklist 41
    sac, td3 = made("sac", aim, tau=0.25), made("td3", aim, tau=0.25)
    for learned, target in (
        (sac.learned.critics, sac.learned.target),
        (td3.learned.critics, td3.learned.critic_target),
    ):
        assert torch.equal(learned.vector, target)
        assert learned.vector.data_ptr() != target.data_ptr()
    before = sac.learned.target.clone()
    critic_step(sac, batch_for(sac))
    torch.testing.assert_close(sac.learned.target, before.lerp(sac.learned.critics.vector, 0.25))


def test_target_networks_get_no_gradient():  # checklist 42
    sac = made("sac", aim, tau=1e-9)
    before = sac.learned.target.clone()
    critic_step(sac, batch_for(sac))
    assert not torch.equal(sac.learned.critics.vector, before)
    torch.testing.assert_close(sac.learned.target, before, atol=1e-6, rtol=0)
    assert sac.learned.target.grad is None


@pytest.mark.parametrize("name", CONTINUOUS)
def test_policy_step_moves_the_policy_alone(name: str):  # checklist 52 and 59
    algorithm = made(name, aim)
    batch = batch_for(algorithm)
    critic_step(algorithm, batch)
    critics = [part.clone() for part in algorithm.learned.critics]
    running = [p.clone() for one in algorithm.learned.running for p in one] if name == "crossq" else []
    actor = algorithm.learned.actor.vector.clone()
    policy_step(algorithm, batch)
    assert all(torch.equal(a, b) for a, b in zip(critics, algorithm.learned.critics, strict=True))
    assert not torch.equal(actor, algorithm.learned.actor.vector)
    if name == "crossq":
        now = [p for one in algorithm.learned.running for p in one]
        assert all(torch.equal(a, b) for a, b in zip(running, now, strict=True))
        critic_step(algorithm, batch)
        assert all(not torch.equal(a, b) for a, b in zip(running, now, strict=True))


def test_crossq_critics_see_both_batches_as_one():  # checklist 59
    crossq = made("crossq", aim, renorm_momentum=1.0)
    batch = batch_for(crossq)
    critic_step(crossq, batch)
    joint = torch.cat([batch.obs, batch.next_obs])
    # With momentum 1 the statistics of the first layer's observations are those of the joint batch.
    first = crossq.learned.running[0]
    torch.testing.assert_close(first.mean[0, 0, :3], joint.mean(dim=0))
    torch.testing.assert_close(first.var[1, 0, :3], joint.var(dim=0, correction=0))


def test_alpha_moves_towards_the_target_entropy():  # checklist 53
    for target, falls in ((-5.0, True), (5.0, False)):
        sac = made("sac", aim, alpha="auto", target_entropy=target)
        policy_step(sac, batch_for(sac))
        assert (sac.learned.alpha.vector.item() < 0) == falls
    fixed = made("sac", aim, alpha=0.3)
    policy_step(fixed, batch_for(fixed))
    assert math.isclose(fixed.learned.alpha.vector.exp().item(), 0.3, rel_tol=1e-6)


@pytest.mark.parametrize("name", ["sac", "crossq", "tqc"])
def test_alpha_follows_its_schedule_to_zero(name):
    schedule = {"shape": "linear", "start": 0.8, "end": 0, "finish": 0.5}
    learner = made(name, aim, alpha=schedule, start=8, horizon=2)
    for progress, expected in ((0.0, 0.8), (0.25, 0.4), (0.5, 0.0), (1.0, 0.0)):
        learner.step(progress)
        assert learner.learned.alpha.vector.exp().item() == pytest.approx(expected, abs=0.01)
    assert learner.updates > 0
    assert all(torch.isfinite(part.vector).all() for part in (learner.learned.actor, learner.learned.critics))


def test_target_entropy_is_in_units_of_half_the_range_and_of_the_spec_where_given():  # checklist 54
    assert made("sac", aim, alpha="auto").target_entropy == -1.0  # whatever the bounds
    assert made("crossq", aim, alpha="auto", target_entropy=-0.3).target_entropy == -0.3


def test_alpha_of_two_actions_stays_bounded():  # checklist 54
    algorithm = trained(
        "sac", lambda: OneStep(lambda shown, action: shown * (2 * action - 1)), 80, alpha="auto", lr=rate(2e-2)
    )
    assert algorithm.learned.alpha.vector.exp().item() < 2.0


def test_sac_targets_follow_at_every_update_and_td3_targets_with_the_policy():  # checklist 56
    for name, expected in (("sac", 12), ("td3", 4)):
        algorithm = made(name, aim, start=32, horizon=32, policy_delay=3, replay_ratio=1 / 32, update_every=8)
        moved, policies = 0, 0
        # One gradient step in 8 vector steps of 4 environments: one of `learn`'s.
        for _ in range(3):
            algorithm.step(0.0)
        algorithm.updates = 0
        for _ in range(12):
            target = algorithm.learned.target if name == "sac" else algorithm.learned.critic_target
            before, actor = target.clone(), algorithm.learned.actor.vector.clone()
            algorithm.learn(1, 0.0)
            moved += not torch.equal(before, target)
            policies += not torch.equal(actor, algorithm.learned.actor.vector)
        assert (moved, policies) == (expected, 4)


def test_moments_behind_dead_units_become_zero_and_never_denormal():
    """Numbers below 1e-38 would stay there for ever and slow every update down."""
    sac = made("sac", aim, start=32, horizon=32, replay_ratio=0.25)
    sac.step(0.0)
    sac.learned.critics.vector.zero_()  # every unit is dead and passes nothing back: gradients are 0 but of the end
    sac.learned.critics.mean.fill_(1e-39)
    sac.step(0.0)
    assert sac.learned.critics.mean.count_nonzero() < 0.2 * sac.learned.critics.mean.numel()
    assert torch.tensor([1e-38]).mul(0.1).item() > 0  # outside of learning they are what they were


def test_first_critic_alone_says_what_it_says_beside_its_twin():
    td3 = made("td3", aim)
    batch = batch_for(td3)
    critics = td3.critics(td3.learned.critics.vector)
    torch.testing.assert_close(critics(batch.obs, batch.actions, 1), critics(batch.obs, batch.actions)[:1])


@pytest.mark.parametrize("name", CONTINUOUS)
def test_stored_actions_are_within_one_and_the_environment_sees_its_own_range(name: str):  # checklist 57
    envs = [aim() for _ in range(4)]
    made_envs = iter(envs)
    algorithm = made(name, lambda: next(made_envs), start=256, horizon=80, replay_ratio=0.25)
    algorithm.step(0.0)
    stored = algorithm.memory.sample(512, torch.Generator().manual_seed(0)).actions
    assert stored.abs().max() <= 1
    assert stored.abs().max() > 0.9
    taken = np.concatenate([env.taken[:64] for env in envs])  # the random ones
    assert 1.9 < np.abs(taken).max() <= 2  # twice as far, in the environment's units
    assert abs(taken.mean()) < 0.3


def test_td3_smoothing_and_exploration_stay_within_bounds():  # checklist 58
    td3 = made("td3", aim, target_noise=0.2, noise_clip=0.5, noise=rate(0.4))
    noise = torch.tensor([[0.0], [1.0], [10.0], [-10.0]])
    torch.testing.assert_close(
        td3.smoothed(torch.full((4, 1), 0.1), noise), torch.tensor([[0.1], [0.3], [0.6], [-0.4]])
    )
    assert td3.smoothed(torch.ones(4, 1), noise).max() == 1
    obs = torch.zeros(1000, 3)
    noise = torch.randn(1, 1000, 1, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        acted = td3.act(obs, noise, 0, 0.0)
    assert acted.abs().max() <= 1
    assert abs(acted.std().item() - 0.4) < 0.05


def test_td3_on_discrete_actions_is_no_algorithm_for_it():
    assert "discrete" not in TD3.supports


def test_unbounded_actions_are_refused():
    class Free(Aim):
        def __init__(self) -> None:
            super().__init__(lambda shown, action: 1.0)
            self.action_space = spaces.Box(-np.inf, np.inf, (1,), np.float32)

    with pytest.raises(UsageError, match="td3 needs an action space with finite bounds"):
        made("td3", Free)


def pendulum(name: str, seed: int = 0, env: Any = None, **given: Any) -> Any:
    env = env or make_vector(EnvSpec(id="Pendulum-v1", num_envs=2), 2)
    fields = {"batch": 32, "start": 100, "horizon": 60, "replay_ratio": 0.25, "update_every": 2, "buffer": 300} | given
    return learner_on(env, name, seed=seed, net={"hidden": [16]}, **fields)


@pytest.mark.parametrize("name", CONTINUOUS)
@pytest.mark.parametrize("scaled", fast_only([False, True], True))
def test_resume_gives_the_same_numbers(name: str, scaled: bool):  # checklist 62
    given: dict[str, Any] = {"given": {"normalize_obs": True, "normalize_reward": True}} if scaled else {}
    one = pendulum(name, **given)
    for _ in range(2):
        one.step(0.0)
    state, generator = one.state(), one.generator.get_state()
    straight = [one.step(0.1), one.step(0.2)]
    other = pendulum(name, seed=3, **given)
    other.load_state(state)
    other.generator.set_state(generator)
    assert [other.step(0.1), other.step(0.2)] == straight
    assert straight[-1]["updates"] > 50
    for mine, theirs in zip(
        one.policy.state()["weights"].values(), other.policy.state()["weights"].values(), strict=True
    ):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("name", CONTINUOUS)
def test_same_seed_gives_the_same_run_and_another_another(name: str):
    runs = []
    for seed in (0, 0, 1):
        algorithm = pendulum(name, seed=seed)
        runs.append([algorithm.step(0.0), algorithm.step(0.1)])
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]


@pytest.mark.slow
@pytest.mark.parametrize("name", CONTINUOUS)
@pytest.mark.parametrize("env", ["plain", "scaled", "three actions"])
def test_compiled_updates_equal_eager_ones_and_see_the_rates_move(name: str, env: str):  # checklist 66
    lr = {"shape": "linear", "start": 1e-3, "end": 0.0}
    given: dict[str, Any] = {"given": {"normalize_obs": True}} if env == "scaled" else {}
    envs = [sync(partial(Identity, "box"), 2) if env == "three actions" else None for _ in range(2)]
    eager, graph = (
        pendulum(name, env=one, compile=compile, lr=lr, policy_delay=2, **given)
        for one, compile in zip(envs, (False, True), strict=True)
    )
    for progress in (0.0, 0.3, 0.6):
        mine, theirs = eager.step(progress), graph.step(progress)
        assert mine == pytest.approx(theirs, rel=2e-3, abs=2e-3)
    before = graph.learned.critics.vector.clone()
    graph.learn(1, 1.0)
    assert torch.equal(before, graph.learned.critics.vector)  # a learning rate of 0


@pytest.mark.parametrize("shape", [(), (3,)])
def test_random_actions_are_held_for_so_many_steps_on_average(shape):
    generator = torch.Generator().manual_seed(0)
    drawn = torch.rand((4000, 2, *shape), generator=generator)
    assert held(drawn, 1, generator) is drawn
    kept = held(drawn, 8, generator).reshape(4000, 2, -1)
    for env in range(2):
        row = kept[:, env]
        starts = [0, *(t for t in range(1, 4000) if not torch.equal(row[t], row[t - 1]))]
        assert 4000 / len(starts) == pytest.approx(8, rel=0.2)
        for start in starts:  # every one is what was drawn for this step and environment
            assert torch.equal(row[start], drawn[start, env].reshape(-1))


def test_held_random_actions_are_those_the_environments_see():
    seen: list[list[int]] = []
    learner = learner_on(sync(Identity, 2), "crossq", start=400, horizon=100, hold=25.0)
    step = learner.episodes.step
    learner.episodes.step = lambda actions: (seen.append(list(np.asarray(actions))), step(actions))[1]
    learner.step(0.0)
    changes = sum(a != b for before, now in itertools.pairwise(seen) for a, b in zip(before, now, strict=True))
    assert changes < 20  # two thirds of 198 if each were drawn anew
