"""A2C, REINFORCE and self-imitation: their losses, what waits for the end of an episode, their states."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from conftest import fast_only
from gymnasium.vector import AutoresetMode
from hypothesis import given, settings
from hypothesis import strategies as st
from probe_envs import Scripted, Walk, learner_on, sync

from palestra.control.algorithms.a2c import A2C
from palestra.control.algorithms.on_policy import OnPolicy, Rates, SelfImitation
from palestra.control.algorithms.ppo import METRICS, PPO
from palestra.control.algorithms.reinforce import Reinforce
from palestra.control.envs.make import make_vector
from palestra.control.episodes import WholeEpisodes
from palestra.control.scaling import ObsScale
from palestra.spec.kinds.control import EnvSpec

torch.set_num_threads(1)

MODES = [AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP, AutoresetMode.DISABLED]
NAMES: dict[str, dict[str, Any]] = {
    "a2c": {"horizon": 12},
    "reinforce": {"horizon": 12},
    "ppo": {"horizon": 12, "minibatch": 18},
    "ppo_imitating": {"horizon": 12, "minibatch": 18, "self_imitation": {"buffer": 50, "batch": 16, "updates": 2}},
    "a2c_imitating": {"horizon": 12, "self_imitation": {"buffer": 50, "batch": 16, "updates": 2}},
}


def made(name: str, env: Any = None, **spec: Any) -> Any:
    return learner_on(env or sync(Scripted, 3), name.split("_")[0], net={"hidden": [8]}, **(NAMES[name] | spec))


def disturbed(learner: Any) -> Any:
    noise = torch.randn(learner.flat.vector.shape, generator=torch.Generator().manual_seed(1))
    learner.flat.vector.add_(0.3 * noise)
    return learner


def test_a2c_loss_equals_the_formula_row_by_row():
    a2c = disturbed(made("a2c", value_coef=0.7))
    batch = a2c.prepare(a2c.collect())
    loss, metrics = a2c.loss(a2c.net, batch, Rates(torch.tensor(0.1), None, torch.tensor(0.02)))
    distribution, values = a2c.net(batch.obs)
    policy, value, entropy = [], [], []
    for i in range(36):
        p = distribution.logprobs[i].detach().double().exp().tolist()
        policy.append(-math.log(p[int(batch.actions[i])]) * float(batch.advantages[i]))
        value.append((float(values[i].detach()) - float(batch.returns[i])) ** 2)
        entropy.append(-sum(x * math.log(x) for x in p))
    means = [float(np.mean(part)) for part in (policy, value, entropy)]
    assert metrics.tolist() == pytest.approx(means, abs=1e-5)
    assert float(loss.detach()) == pytest.approx(means[0] + 0.7 * means[1] - 0.02 * means[2], abs=1e-5)


@pytest.mark.parametrize("lam", [None, 0.0, 0.8, 1.0])
def test_a2c_advantages_are_of_n_step_returns_or_of_gae(lam):
    a2c = disturbed(made("a2c", lam=lam, gamma=0.9))
    rollout = a2c.collect()
    batch = a2c.prepare(rollout)
    with torch.no_grad():
        values, after = rollout.next_values(a2c.net.value)
    for n in range(3):
        expected = 0.0
        for t in reversed(range(12)):
            over = bool(rollout.terminated[t, n] | rollout.truncated[t, n])
            bootstrap = 0.0 if rollout.terminated[t, n] else float(after[t, n])
            if lam is None:  # the return to the end of the episode or of the rollout, bootstrapped
                ahead = bootstrap if over or t == 11 else expected
                expected = float(rollout.rewards[t, n]) + 0.9 * ahead
                assert float(batch.advantages[t * 3 + n]) == pytest.approx(expected - float(values[t, n]), abs=1e-5)
            else:
                delta = float(rollout.rewards[t, n]) + 0.9 * bootstrap - float(values[t, n])
                expected = delta + (0.0 if over else 0.9 * lam * expected)
                assert float(batch.advantages[t * 3 + n]) == pytest.approx(expected, abs=1e-5)


def test_a2c_normalized_advantages_have_mean_zero_and_deviation_one():
    a2c = made("a2c", normalize_advantages=True)
    advantages = a2c.prepare(a2c.collect()).advantages
    assert float(advantages.mean()) == pytest.approx(0, abs=1e-6)
    assert float(advantages.std(correction=0)) == pytest.approx(1, abs=1e-5)


@given(
    ends=st.lists(st.lists(st.booleans(), min_size=3, max_size=3), min_size=24, max_size=24),
    dropped=st.lists(st.lists(st.booleans(), min_size=3, max_size=3), min_size=24, max_size=24),
    horizon=st.sampled_from([1, 3, 8, 24]),
    masked=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_whole_episodes_any_ends_give_each_row_once_with_the_return_to_its_end(ends, dropped, horizon, masked):
    ended, valid = torch.tensor(ends), ~torch.tensor(dropped) | torch.tensor(ends)
    place = torch.arange(72).view(24, 3)
    rewards = (place % 7 - 3).float()
    whole, found = WholeEpisodes(3, 0.5), {}
    for start in range(0, 24, horizon):
        part = slice(start, start + horizon)
        columns = {"place": place[part], "rewards": rewards[part], "masks": None}
        rows = whole.add(columns, ended[part], valid[part] if masked else None)
        if rows is not None:
            assert set(rows) == {"place", "rewards", "returns"}
            for at, value in zip(rows["place"].tolist(), rows["returns"].tolist(), strict=True):
                assert at not in found
                found[at] = value
    expected = {}
    for n in range(3):
        value, over = 0.0, False
        for t in reversed(range(24)):
            if masked and not valid[t, n]:
                continue
            over = over or bool(ended[t, n])
            value = float(rewards[t, n]) + (0.0 if ended[t, n] else 0.5 * value)
            if over:
                expected[t * 3 + n] = value
    assert found == pytest.approx(expected)


@pytest.mark.parametrize("mode", MODES)
def test_reinforce_learns_from_rows_of_whole_episodes_alone(mode):
    """Walks of five steps, rollouts of three: the first update comes with the second rollout, on whole walks."""
    learner = made("reinforce", sync(lambda: Walk([1.0, 0.0, 0.0, 0.0, 2.0]), 2, mode), horizon=3, gamma=0.5)
    seen = []
    learn = learner.learn
    learner.learn = lambda rows, progress: seen.append(rows) or learn(rows, progress)
    first = learner.step(0.0)
    assert first["updates"] == 0
    assert "policy_loss" not in first
    for _ in range(20):
        learner.step(0.0)
    assert seen.pop(0) is None
    for found in filter(None, seen):
        assert len(found["obs"]) % 5 == 0
        assert found["obs"][:5, 0].tolist() == [0, 1, 2, 3, 4]
        assert found["returns"][:5].tolist() == [1 + 2 / 16, 2 / 8, 2 / 4, 1.0, 2.0]
    assert sum(len(found["obs"]) for found in filter(None, seen)) == learner.episodes.finished * 5


@pytest.mark.parametrize("normalize", [False, True])
def test_reinforce_loss_equals_the_formula(normalize):
    learner = disturbed(made("reinforce", normalize_returns=normalize, entropy=0.03))
    assert isinstance(learner, Reinforce)
    captured: list[Any] = []
    update = learner._update

    def recorded(adam: Any, rows: Any, rates: Any) -> Any:
        captured.append((rows, learner.loss(learner.net, rows, rates)[0].detach(), learner.net.policy(rows["obs"])))
        return update(adam, rows, rates)

    learner._update = recorded
    found: list[Any] = []
    learn = learner.learn
    learner.learn = lambda rows, rates: found.append(rows) or learn(rows, rates)
    learner.step(0.0)
    (rows, loss, distribution), returns = captured[0], found[0]["returns"].double()
    if normalize:
        returns = (returns - returns.mean()) / (returns.std(correction=0) + 1e-8)
    logprobs = distribution.logprobs.detach().double()
    chosen = logprobs[torch.arange(len(rows["actions"])), rows["actions"]]
    entropy = -(logprobs.exp() * logprobs).sum(1).mean()
    assert float(loss) == pytest.approx(float(-(chosen * returns).mean() - 0.03 * entropy), abs=1e-5)


def imitating(name: str = "ppo_imitating", **spec: Any) -> tuple[Any, SelfImitation]:
    learner = disturbed(made(name, **spec))
    assert learner.imitation is not None
    return learner, learner.imitation


def test_imitation_loss_equals_the_formula_and_has_no_gradient_where_nothing_was_better():
    learner, memory = imitating(self_imitation={"buffer": 50, "batch": 16, "coef": 0.3, "value_coef": 0.2})
    for _ in range(4):
        learner.prepare(learner.collect())
    _, rows = memory._sample()
    loss, out = memory.loss(learner.net, rows)
    distribution, values = learner.net(rows.obs)
    better = (rows.returns - values).clamp_min(0).detach()
    assert 0 < int((better > 0).sum()) < 16
    policy = -(rows.weights * distribution.log_prob(rows.actions).detach() * better).mean()
    value = 0.5 * (rows.weights * better.square()).mean()
    assert float(loss.detach()) == pytest.approx(float(0.3 * policy + 0.2 * value), abs=1e-6)
    torch.testing.assert_close(out[3:], better)
    worse = rows._replace(returns=torch.full_like(rows.returns, -100.0))
    gradient, _ = learner.flat.gradient(lambda net: memory.loss(net, worse))
    assert not gradient.any()


def test_imitation_draws_in_proportion_to_what_was_better_and_weighs_against_it():
    _, memory = imitating(self_imitation={"buffer": 8, "batch": 4000, "alpha": 0.5, "beta": 0.4})
    rows = {"obs": torch.zeros(8, 4), "actions": torch.zeros(8, dtype=torch.int64), "returns": torch.arange(8.0)}
    memory._remember(rows)
    better = torch.tensor([0.0, 1.0, 4.0, 9.0, 0.0, 0.0, 16.0, 1.0])
    memory._weigh(np.arange(8), better)
    at, found = memory._sample()
    counts = np.bincount(at, minlength=8)
    share = (better.double() + 1e-6).sqrt() / (better.double() + 1e-6).sqrt().sum()
    np.testing.assert_allclose(counts / 4000, share, atol=0.03)
    expected = (1 / share[at]) ** 0.4
    torch.testing.assert_close(found.weights, (expected / expected.max()).float(), rtol=1e-5, atol=1e-6)
    assert memory.most == 16.0


def test_imitation_remembers_true_returns_of_finished_episodes_and_the_oldest_make_room():
    factory = lambda: Walk([1.0, 0.0, 4.0])  # noqa: E731
    learner, memory = imitating(env=sync(factory, 2), gamma=0.5, minibatch=8, horizon=4)
    memory.spec = memory.spec.model_copy(update={"batch": 1000})
    for _ in range(12):
        learner.step(0.0)
    assert memory.size == 50
    expected = {0.0: 2.0, 1.0: 2.0, 2.0: 4.0}
    for obs, value in zip(memory.columns["obs"][:, 0].tolist(), memory.columns["returns"].tolist(), strict=True):
        assert value == expected[obs]


def test_imitation_truncated_episode_goes_on_with_the_value_of_its_final_observation():
    learner, memory = imitating(
        env=sync(lambda: Walk([1.0, 1.0], truncates=True), 2), gamma=0.5, minibatch=4, horizon=2
    )
    learner.prepare(learner.collect())
    with torch.no_grad():
        final = float(learner.net.value(torch.tensor([[2.0]]))[0])
    ahead = 1 + 0.5 * final
    found = memory.columns["returns"][:4].tolist()
    assert found == pytest.approx([1 + 0.5 * ahead, ahead] * 2, abs=1e-6)


def test_imitation_makes_its_gradient_steps_after_each_improvement():
    plain, (learner, _) = disturbed(made("ppo")), imitating()
    rows = [(plain.step(0.0), learner.step(0.0)) for _ in range(4)]
    done = [other["updates"] - one["updates"] for one, other in rows]
    assert done[-1] > 0
    assert all(step % 2 == 0 for step in done)
    assert {"imitation_policy_loss", "imitation_value_loss", "imitation_share"} <= set(rows[-1][1])
    assert not torch.equal(plain.flat.vector, learner.flat.vector)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("scaled", fast_only([False, True], True))
def test_state_round_trip_in_the_middle_of_episodes_continues_identically(name, scaled):
    given = {"normalize_obs": True, "normalize_reward": True, "clip_reward": 5.0} if scaled else {}

    def learner() -> OnPolicy:
        return made(name, make_vector(EnvSpec(id="object:Scripted"), 3, Scripted), given=given)

    going = learner()
    for _ in range(4):
        going.step(0.1)
    state, generator = going.state(), going.generator.get_state()
    expected = [going.step(0.2) for _ in range(4)]
    resumed = learner()
    resumed.load_state(state)
    resumed.generator.set_state(generator)
    assert [resumed.step(0.2) for _ in range(4)] == expected
    assert torch.equal(resumed.flat.vector, going.flat.vector)
    # the state is a copy: going on did not change it
    going.load_state(state)
    going.generator.set_state(generator)
    assert [going.step(0.2) for _ in range(4)] == expected


@pytest.mark.parametrize("name", NAMES)
def test_step_same_seed_gives_the_same_numbers_and_another_seed_others(name):
    def run(seed: int) -> list[dict[str, float]]:
        learner = made(name, seed=seed)
        return [learner.step(0.0) for _ in range(3)]

    first = run(1)
    assert run(1) == first
    assert run(2) != first


@pytest.mark.parametrize("name", NAMES)
def test_cut_environments_that_restarted_leave_nothing_waiting(name):
    learner = made(name, sync(lambda: Walk([1.0] * 100), 3))
    learner.step(0.0)
    learner.cut(np.array([True, False, False]))
    whole = getattr(learner, "whole", None) or (learner.imitation and learner.imitation.episodes)
    if whole:
        assert [waited is None for waited in whole.waiting] == [True, False, False]


@pytest.mark.parametrize("name", ["a2c", "reinforce", "ppo"])
@pytest.mark.parametrize("mode", MODES)
def test_obs_scale_is_the_same_when_acting_and_learning_and_moves_after_it(name, mode):
    learner = made(name, sync(Scripted, 3, mode), given={"normalize_obs": True})
    (scale,) = [module for module in learner.net.modules() if isinstance(module, ObsScale)]
    update, during, seen = learner._update, [], []

    def recorded(adam: Any, batch: Any, rates: Any) -> Any:
        during.append(scale.mean.clone())
        return update(adam, batch, rates)

    learner._update = recorded
    for _ in range(3):
        before = scale.mean.clone()
        learner.step(0.0)
        assert all(torch.equal(mean, before) for mean in during)
        assert not torch.equal(scale.mean, before)
        during.clear()
        valid = torch.from_numpy(learner.collector.valid)
        seen.append(torch.from_numpy(learner.collector.obs.copy())[valid])
    everything = torch.cat(seen).double()
    torch.testing.assert_close(scale.mean, everything.mean(0))
    torch.testing.assert_close(scale.var, everything.var(0, correction=0))


def test_obs_scale_ratio_of_the_first_minibatch_is_exactly_one():
    ppo = disturbed(made("ppo", given={"normalize_obs": True}))
    assert isinstance(ppo, PPO)
    ppo.step(0.0)
    batch = ppo.prepare(ppo.collect())
    rates = Rates(torch.tensor(1e-3), torch.tensor(0.2), torch.tensor(0.0))
    _, _, metrics = ppo.update(ppo.adam, ppo._minibatches(batch)[0], rates)
    assert dict(zip(METRICS, metrics.tolist(), strict=True))["approx_kl"] == 0.0


def test_final_observations_are_scaled_as_all_others():
    """Checklist 17: the bootstrap of a truncated episode sees the final observation through the same scale."""
    a2c = disturbed(made("a2c", sync(lambda: Walk([1.0, 1.0], truncates=True), 2), given={"normalize_obs": True}))
    assert isinstance(a2c, A2C)
    a2c.step(0.0)
    (scale,) = [module for module in a2c.net.modules() if isinstance(module, ObsScale)]
    rollout = a2c.collect()
    with torch.no_grad():
        _, next_values = a2c.values(rollout)
        value = float(a2c.net._values(a2c.net.value_trunk(scale(torch.tensor([[2.0]]))))[0])
    torch.testing.assert_close(next_values.flatten()[rollout.ends], torch.full((len(rollout.ends),), value))


def test_rewards_are_scaled_for_learning_and_logged_raw():
    a2c = made("a2c", sync(lambda: Walk([5.0, 5.0]), 3), given={"clip_reward": 1.0}, gamma=0.0)
    rollout = a2c.collect()
    assert a2c.prepare(rollout).returns.tolist() == pytest.approx([1.0] * 36)
    assert a2c.episodes.metrics()["return"] == 10.0
