"""DQN and SARSA: targets by hand, exploration, probe environments, exact resume."""

import shutil
from functools import partial
from itertools import pairwise, product
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import fast_only
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from probe_envs import OneStep, Scripted, Walk, learner_on, sync

from palestra.control.algorithms.dqn import DQN
from palestra.control.algorithms.sarsa import SARSA
from palestra.control.envs.snapshot import Snapshot, decode, encode
from palestra.control.episodes import NotFinite
from palestra.control.memory.replay import ReplayBatch
from palestra.errors import UsageError
from palestra.rl.losses import quantile_loss

torch.set_num_threads(1)

QUICK = {"lr": 5e-3, "batch": 32, "buffer": 2000, "start": 64, "horizon": 32, "tau": 0.05}
QUICK |= {"replay_ratio": 0.25, "update_every": 4}
VARIANTS = {
    "vanilla": {"tau": 1.0, "double": False},
    "double": {},
    "copied": {"target_every": 20},
    "dueling": {"dueling": True},
    "n_step": {"n_step": 3},
    "prioritized": {"prioritized": {"alpha": 0.6}},
    "quantiles": {"distributional": {"quantiles": 8}},
    "softmax": {"temperature": {"shape": "linear", "start": 1.0, "end": 0.1}},
    "atoms": {"distributional": {"atoms": 21, "low": -2, "high": 2}},
    "noisy": {"noisy": 0.5, "epsilon": 0.0},
    "everything": {"dueling": True, "n_step": 2, "prioritized": {"alpha": 0.5}, "distributional": {"quantiles": 4}},
}
VARIANTS["rainbow"] = VARIANTS["everything"] | VARIANTS["atoms"] | VARIANTS["noisy"]
EITHER = [("dqn", QUICK), ("sarsa", {"lr": 1e-2, "horizon": 8})]


def dqn(env, **given) -> DQN:
    made = learner_on(env, "dqn", **{"net": {"hidden": [32]}, **QUICK, **given})
    assert isinstance(made, DQN)
    return made


def q(algorithm, *places: float) -> list[list[float]]:
    with torch.no_grad():
        return algorithm.net.q(torch.tensor(places)[:, None]).tolist()


def trained(algorithm, steps: int):
    for i in range(steps):
        algorithm.step(i / steps)
    return algorithm


# ---- targets


def by_hand(**given) -> tuple[DQN, ReplayBatch]:
    """Learning network: Q = (2, 1); target network: Q = (10, 30), whatever is seen."""
    algorithm = dqn(sync(lambda: OneStep(lambda shown, action: 0.0), 2), **given)
    for flat, values in ((algorithm.flat, (2.0, 1.0)), (algorithm.target, (10.0, 30.0))):
        flat.vector.zero_()
        flat.net.advantage_head.bias.data.copy_(torch.tensor(values))
    batch = ReplayBatch(
        obs=torch.zeros(3, 1),
        actions=torch.tensor([0, 1, 1]),
        rewards=torch.tensor([1.0, 2.0, 3.0]),
        next_obs=torch.ones(3, 1),
        discounts=torch.tensor([0.9, 0.0, 0.81]),
        weights=None,
        rows=torch.zeros(0, dtype=torch.long),
    )
    return algorithm, batch


def test_targets_double_and_plain_differ_as_they_should():
    """Point 40: the target network's own best action, or that of the learning network."""
    for double, value in ((False, 30.0), (True, 10.0)):
        algorithm, batch = by_hand(double=double)
        expected = [1 + 0.9 * value, 2.0, 3 + 0.81 * value]
        assert algorithm.targets(batch)[:, 0].tolist() == pytest.approx(expected)


def test_targets_nothing_flows_into_the_target_network():
    """Point 42."""
    algorithm, batch = by_hand()
    assert not algorithm.targets(batch).requires_grad
    assert not any(p.requires_grad for p in algorithm.target.net.parameters())
    before = algorithm.target.vector.clone()
    algorithm.update_once(batch, torch.tensor([1e-2, 1e-8]), torch.zeros(4), None)
    assert torch.equal(algorithm.target.vector, before)


def test_loss_is_hubers_and_its_gradient_stops_growing():
    """Point 43: δ = 1, so a larger error has no larger gradient."""
    algorithm, batch = by_hand(max_grad_norm=None)
    targets = torch.tensor([[2.5], [1.0], [101.0]])
    loss, (errors, _) = algorithm.loss(algorithm.net, batch, targets)
    assert float(loss) == pytest.approx((0.5 * 0.25 + 0.0 + 99.5) / 3)
    assert errors.tolist() == pytest.approx([0.5, 0.0, 100.0])
    gradient, _ = algorithm.flat.gradient(lambda net: algorithm.loss(net, batch, targets))
    assert gradient[-2:].tolist() == pytest.approx([-0.5 / 3, -1 / 3])


def test_loss_importance_weights_weigh_each_row():
    algorithm, batch = by_hand()
    targets = torch.tensor([[2.5], [1.5], [2.0]])
    weights = torch.tensor([1.0, 0.5, 0.0])
    loss, _ = algorithm.loss(algorithm.net, batch._replace(weights=weights), targets)
    assert float(loss) == pytest.approx(0.5 * 0.25 * 1.5 / 3)


def test_target_network_copy_at_the_start_then_as_the_spec_says():
    """Point 41: equal at first; `tau` moves towards the learning network, `target_every` copies it."""
    env = partial(sync, lambda: OneStep(lambda shown, action: shown), 2)
    soft = dqn(env(), tau=0.25)
    assert torch.equal(soft.target.vector, soft.flat.vector)
    soft.step(0.0)
    before, target = soft.flat.vector.clone(), soft.target.vector.clone()
    soft.learn(1, 0.0)
    assert not torch.equal(soft.flat.vector, before)
    torch.testing.assert_close(soft.target.vector, target + 0.25 * (soft.flat.vector - target))
    hard = dqn(env(), target_every=3)
    hard.step(0.0)
    for _ in range(7):
        target = hard.target.vector.clone()
        hard.learn(1, 0.0)
        copied = torch.equal(hard.target.vector, hard.flat.vector)
        assert copied == (hard.updates % 3 == 0)
        assert copied or torch.equal(hard.target.vector, target)


def test_target_network_statistics_of_observations_follow():
    """Point 41: buffers too."""
    algorithm = dqn(sync(Scripted, 2), given={"normalize_obs": True}, start=16)
    for _ in range(3):
        algorithm.step(0.0)
    assert float(algorithm.net.trunk.obs_scale.count) > 0
    algorithm.learn(1, 0.0)
    for mine, theirs in zip(algorithm.net.buffers(), algorithm.target.net.buffers(), strict=True):
        assert torch.equal(mine, theirs)


def test_quantile_loss_of_samples_is_least_at_their_quantiles():
    samples = torch.randn(1, 4000, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 50
    values = torch.zeros(1, 4, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.Adam([values], lr=1.0)
    for _ in range(200):
        optimizer.zero_grad()
        quantile_loss(values, samples).sum().backward()
        optimizer.step()
    expected = samples[0].quantile(torch.tensor([0.125, 0.375, 0.625, 0.875], dtype=torch.float64))
    torch.testing.assert_close(values.detach()[0], expected, atol=1.5, rtol=0)  # of a standard deviation of 50


def test_dueling_advantages_have_mean_zero_and_value_their_mean():
    algorithm = dqn(sync(lambda: OneStep(lambda shown, action: 0.0), 2), dueling=True, net={"hidden": [16, 8]})
    net, obs = algorithm.net, torch.randn(5, 1)
    value = net.value_head(net.value_stream(net.trunk(obs)))
    torch.testing.assert_close(net.q(obs).mean(dim=1, keepdim=True), value)


# ---- acting and interleaving


def test_act_epsilon_is_drawn_for_each_environment_by_itself():
    """Point 44: N draws a step, not one; their mean is ε and pairs are independent."""
    algorithm = dqn(sync(lambda: OneStep(lambda shown, action: 0.0), 4), epsilon=0.5)
    algorithm.flat.vector.zero_()
    algorithm.net.advantage_head.bias.data[1] = 1.0  # the best action is 1
    noise = algorithm.explore(2000)
    obs = torch.zeros(4, 1)
    with torch.no_grad():
        random = 1 - torch.stack([algorithm.act(obs, noise, t, 0.0) for t in range(2000)]).double()  # 0: explored
    # Half of the random actions happen to be the best one.
    assert random.mean(dim=0).tolist() == pytest.approx([0.25] * 4, abs=0.04)
    correlation = torch.corrcoef(random.T) - torch.eye(4)
    assert float(correlation.abs().max()) < 0.09


def test_act_temperature_draws_by_the_softmax():
    algorithm = dqn(sync(lambda: OneStep(lambda shown, action: 0.0), 4), temperature=0.5)
    algorithm.flat.vector.zero_()
    algorithm.net.advantage_head.bias.data[1] = 0.5
    noise = algorithm.explore(2000)
    with torch.no_grad():
        drawn = torch.stack([algorithm.act(torch.zeros(4, 1), noise, t, 0.0) for t in range(2000)]).double()
    assert float(drawn.mean()) == pytest.approx(1 / (1 + np.exp(-1)), abs=0.02)


@pytest.mark.parametrize("given", [{}, {"dueling": True}, {"dueling": True, "net": {"hidden": [32, 24, 16]}}])
def test_act_on_one_row_by_numpy_orders_actions_as_the_network_does_also_after_updates_and_a_resume(given):
    net = given.get("net", {"hidden": [32, 24]}) | {"activation": "relu"}
    make = partial(sync, lambda: OneStep(lambda shown, action: shown), 1)
    algorithm = trained(dqn(make(), **given | {"net": net}), 6)
    assert algorithm.updates > 0
    resumed = dqn(make(), **given | {"net": net})
    resumed.load_state(algorithm.state())
    for each in (algorithm, resumed):
        assert each.one_row is not None
        for place in np.linspace(-3, 3, 20, dtype=np.float32):
            fast, whole = each.one_row(np.array([[place]])), torch.tensor(q(each, float(place)))
            torch.testing.assert_close(fast - fast.mean(), whole - whole.mean(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("envs", "given"),
    [
        (2, {}),
        (1, {"net": {"hidden": [32], "activation": "tanh"}}),
        (1, {"net": {"hidden": [32], "activation": "relu", "layer_norm": True}}),
        (1, {"noisy": 0.5}),
        (1, {"distributional": {"quantiles": 8}}),
        (1, {"given": {"normalize_obs": True}}),
    ],
)
def test_act_by_numpy_only_where_one_row_goes_through_linear_layers_and_relus(envs, given):
    env = sync(lambda: OneStep(lambda shown, action: shown), envs)
    assert dqn(env, **{"net": {"hidden": [32], "activation": "relu"}} | given).one_row is None


def test_act_epsilon_moves_with_the_frames_inside_a_step():
    epsilon = {"shape": "linear", "start": 1.0, "end": 0.0, "finish": 1.0}
    algorithm = dqn(sync(lambda: Walk([0.0] * 100), 2), epsilon=epsilon, frames=400, horizon=200, start=2)
    seen = []
    act = algorithm.act

    def recorded(obs, noise, t, progress):
        seen.append(progress)
        return act(obs, noise, t, progress)

    algorithm.act = recorded
    algorithm.step(0.0)
    assert seen[0] == pytest.approx(2 / 400)
    assert seen[-1] == pytest.approx(398 / 400)
    assert all(b > a for a, b in pairwise(seen))


@pytest.mark.parametrize("num_envs", fast_only([1, 4, 16], 1, 4))
def test_step_gradient_steps_for_each_frame_whatever_the_number_of_environments(num_envs):
    """Points 48 and 49: none before `start`, then `replay_ratio` a frame."""
    algorithm = dqn(sync(Scripted, num_envs), replay_ratio=0.5, update_every=2, start=64, horizon=64)
    algorithm.step(0.0)
    before = algorithm.updates
    assert before == (algorithm.episodes.frame - 64) * 0.5 + num_envs  # two vector steps: those that reached `start`
    algorithm.step(0.1)
    assert algorithm.updates - before == 64 * num_envs * 0.5


def test_step_before_start_is_random_and_learns_nothing():
    algorithm = dqn(sync(Scripted, 2), start=100, epsilon=0.0)
    vector = algorithm.flat.vector.clone()
    metrics = algorithm.step(0.0)
    assert metrics == {"updates": 0}
    assert torch.equal(algorithm.flat.vector, vector)
    assert len(algorithm.memory.columns["actions"].tensor[:32].unique()) == 3


def test_step_rewards_clipped_and_normalized_as_the_spec_says():
    algorithm = dqn(sync(lambda: OneStep(lambda shown, action: 5.0 * shown), 2), given={"clip_reward": 1.0})
    algorithm.step(0.0)
    assert set(algorithm.memory.columns["rewards"].tensor[:32].unique().tolist()) == {-1.0, 1.0}
    assert abs(algorithm.episodes.recent[0][0]) == 5.0  # logged returns are the environment's
    algorithm = dqn(sync(lambda: Walk([100.0] * 5), 2), given={"normalize_reward": True})
    algorithm.step(0.0)
    assert float(algorithm.memory.columns["rewards"].tensor[0, 0]) == 100.0
    assert float(next(iter(algorithm.batches(1)))[0].rewards.max()) < 20


class Broken(Walk):
    def step(self, action):
        obs, reward, *rest = super().step(action)
        return obs, float("nan") if self.at == 7 else reward, *rest


def test_step_reward_that_is_not_finite_stops_and_is_named():
    """Point 61."""
    algorithm = dqn(sync(lambda: Broken([0.0] * 10), 2))
    with pytest.raises(NotFinite, match=r"reward of nan in environment 0 at vector step 7"):
        algorithm.step(0.0)
    assert algorithm.memory.added == 6


class Overflowing(Walk):
    """Its episode ends at an infinite observation."""

    def step(self, action):
        obs, reward, terminated, truncated, info = super().step(action)
        return obs * np.inf if terminated else obs, reward, terminated, truncated, info


def test_step_final_observation_that_is_not_finite_is_named_with_its_environment():
    makers = [lambda: Walk([0.0] * 9), lambda: Overflowing([0.0] * 4)]
    algorithm = dqn(SyncVectorEnv(makers, autoreset_mode=AutoresetMode.SAME_STEP))
    with pytest.raises(
        NotFinite, match=r"final observation of inf in environment 1 at vector step 4 \(about frame 8\)"
    ):
        algorithm.step(0.0)


class Forbidding(Walk):
    def reset(self, **given):
        obs, _ = super().reset(**given)
        return obs, {"action_mask": np.array([1, 0], np.int8)}


def test_sarsa_environment_that_forbids_actions_is_refused():
    algorithm = learner_on(sync(lambda: Forbidding([0.0] * 10), 2), "sarsa")
    with pytest.raises(UsageError, match="use dqn, sac, ppo, a2c or reinforce"):
        algorithm.step(0.0)


# ---- what can be learned


@pytest.mark.parametrize(
    ("name", "mode"),
    fast_only(
        product(["dqn", "sarsa"], [AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP]),
        ("dqn", AutoresetMode.NEXT_STEP),
        ("sarsa", AutoresetMode.SAME_STEP),
    ),
)
def test_probe_values_of_constant_shown_and_delayed_rewards(name, mode):
    quick = dict(EITHER)[name]

    def run(make, steps=6):
        steps = steps if name == "dqn" else 14 * steps
        return trained(learner_on(sync(make, 4, mode), name, net={"hidden": [32]}, gamma=0.9, **quick), steps)

    constant = run(lambda: OneStep(lambda shown, action: 1.0))
    assert np.array(q(constant, -1.0, 1.0)) == pytest.approx(1.0, abs=0.1)
    shown = run(lambda: OneStep(lambda shown, action: shown))
    assert np.array(q(shown, -1.0, 1.0)).mean(axis=1) == pytest.approx([-1.0, 1.0], abs=0.1)
    delayed = run(lambda: Walk([0.0, 1.0]), 10)
    assert np.array(q(delayed, 0.0, 1.0)).mean(axis=1) == pytest.approx([0.9, 1.0], abs=0.1)


@pytest.mark.parametrize("variant", fast_only(VARIANTS, "vanilla", "everything", "rainbow"))
def test_probe_every_variant_learns_the_action_that_what_is_shown_asks_for(variant):
    make = lambda: OneStep(lambda shown, action: 1.0 if (shown > 0) == (action == 1) else -1.0)  # noqa: E731
    algorithm = trained(dqn(sync(make, 4), **VARIANTS[variant]), 8)
    low, high = q(algorithm, -1.0, 1.0)
    assert low == pytest.approx([1.0, -1.0], abs=0.3)
    assert high == pytest.approx([-1.0, 1.0], abs=0.3)


class TwoSteps(gym.Env):
    """The first action, remembered in what is shown next, decides what the second step pays."""

    observation_space = spaces.Box(-1, 1, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.first = None
        return np.zeros(1, np.float32), {}

    def step(self, action):
        if self.first is None:
            self.first = 1.0 if action else -1.0
            return np.array([self.first], np.float32), 0.0, False, False, {}
        return np.zeros(1, np.float32), self.first, True, False, {}


@pytest.mark.parametrize(("name", "quick"), EITHER)
def test_probe_two_step_credit_goes_to_the_first_action(name, quick):
    steps = 25 if name == "dqn" else 250
    algorithm = trained(learner_on(sync(TwoSteps, 4), name, net={"hidden": [32]}, gamma=0.9, **quick), steps)
    (left, right), low, high = q(algorithm, 0.0, -1.0, 1.0)
    assert [left, right] == pytest.approx([-0.9, 0.9], abs=0.2)
    if name == "dqn":  # SARSA hardly comes there any more when it has learned
        assert low == pytest.approx([-1, -1], abs=0.2)
    assert high == pytest.approx([1, 1], abs=0.2)


@pytest.mark.parametrize(("name", "quick"), EITHER)
def test_probe_truncated_loop_is_worth_its_endless_future(name, quick):
    """Points 1 and 60: reward 1, time limit 5, γ 0.8: Q is 1 / (1 − γ) = 5, not what five steps bring."""
    make = lambda: Walk([1.0] * 5, truncates=True, loop=True)  # noqa: E731
    steps = 15 if name == "dqn" else 100
    algorithm = trained(learner_on(sync(make, 4), name, net={"hidden": [32]}, gamma=0.8, **quick), steps)
    assert np.array(q(algorithm, 0.0)) == pytest.approx(5.0, abs=0.5)


def test_sarsa_targets_are_of_the_actions_that_were_taken():
    algorithm = learner_on(sync(lambda: Scripted(4), 2), "sarsa", horizon=6, gamma=0.5, epsilon=1.0)
    assert isinstance(algorithm, SARSA)
    algorithm.collect(0.0)
    chosen = algorithm.chosen.clone()
    rollout = algorithm.collect(0.0)
    assert torch.equal(rollout.actions[0], chosen)  # what the last row was valued by is what is done next
    batch = algorithm.prepare(rollout, 0.0)
    ends = set(rollout.ends.tolist())
    with torch.no_grad():
        for i in range(12):
            t, n = divmod(i, 2)
            if rollout.terminated[t, n]:
                expected = float(rollout.rewards[t, n])
            elif i in ends:
                finals = algorithm.net.q(rollout.final_obs[[rollout.ends.tolist().index(i)]])[0]
                options = [float(rollout.rewards[t, n] + 0.5 * v) for v in finals]
                assert min(abs(float(batch.targets[i]) - v) for v in options) < 1e-5
                continue
            else:
                obs = rollout.obs[t + 1, n] if t < 5 else rollout.last_obs[n]
                action = rollout.actions[t + 1, n] if t < 5 else algorithm.chosen[n]
                expected = float(rollout.rewards[t, n] + 0.5 * algorithm.net.q(obs[None])[0, action])
            assert float(batch.targets[i]) == pytest.approx(expected, abs=1e-5)


def test_sarsa_targets_lambda_mix_what_follows_with_its_own_target():
    algorithm = learner_on(sync(lambda: Scripted(4), 2), "sarsa", horizon=6, gamma=0.5, lam=0.75, epsilon=0.0)
    assert isinstance(algorithm, SARSA)
    rollout = algorithm.collect(0.0)
    targets = algorithm.prepare(rollout, 0.0).targets.view(6, 2)
    with torch.no_grad():
        following = algorithm.following(rollout, algorithm.chosen, 0.0)  # greedy: nothing is drawn
    for n in range(2):
        later = None  # the target of the next row, where it is of the same episode
        for t in reversed(range(6)):
            value = float(following[t, n])
            if later is not None and not rollout.truncated[t, n]:
                value = 0.25 * value + 0.75 * later
            expected = float(rollout.rewards[t, n]) + (0.0 if rollout.terminated[t, n] else 0.5 * value)
            assert float(targets[t, n]) == pytest.approx(expected, abs=1e-5)
            later = expected


# ---- determinism and resume


@pytest.mark.parametrize("variant", fast_only(["double", "everything", "softmax"], "everything"))
def test_step_same_seed_gives_the_same_numbers_and_another_seed_others(variant):
    def run(seed):
        algorithm = dqn(sync(Scripted, 3), seed=seed, start=32, **VARIANTS[variant])
        return [algorithm.step(0.1 * i) for i in range(2)]

    first = run(1)
    assert run(1) == first
    assert run(2) != first


class SavedSync(SyncVectorEnv):
    """A vector environment that saves its own state, in any autoreset mode."""

    INTERNALS = ("_env_obs", "_observations", "_rewards", "_terminations", "_truncations", "_autoreset_envs")

    def get_state(self) -> dict[str, Any]:
        internals = {name: encode(getattr(self, name)) for name in self.INTERNALS}
        return {"envs": [env.get_state() for env in self.envs], "internals": internals}

    def set_state(self, state: dict[str, Any]) -> None:
        for env, saved in zip(self.envs, state["envs"], strict=True):
            assert env.set_state(saved)
        for name, value in state["internals"].items():
            setattr(self, name, decode(value))


@pytest.mark.parametrize(
    ("name", "mode"),
    fast_only(
        product(["double", "copied", "everything", "rainbow", "softmax", "sarsa"], AutoresetMode),
        ("copied", AutoresetMode.NEXT_STEP),
        ("everything", AutoresetMode.SAME_STEP),
        ("rainbow", AutoresetMode.NEXT_STEP),
        ("softmax", AutoresetMode.DISABLED),
        *(("sarsa", mode) for mode in AutoresetMode),
    ),
)
def test_state_round_trip_next_steps_are_identical(name, mode):
    """Point 62: networks, optimizer, target, replay, priorities, environments."""

    def make():
        env = SavedSync([lambda: Snapshot(Scripted(9))] * 3, autoreset_mode=mode)
        given = {"normalize_obs": True, "normalize_reward": True}
        if name == "sarsa":
            return learner_on(env, "sarsa", given=given, horizon=8)
        return dqn(env, given=given, start=32, buffer=100, **VARIANTS[name])

    going = make()
    for i in range(2):  # of 96 frames: the buffer is full, and its oldest rows are gone
        going.step(0.1 * i)
    state, numbers = going.state(), going.generator.get_state()
    expected = [going.step(0.5) for _ in range(2)]
    resumed = make()
    resumed.load_state(state)
    resumed.generator.set_state(numbers)
    assert [resumed.step(0.5) for _ in range(2)] == expected


@pytest.mark.parametrize("name", ["dqn", "sarsa"])
def test_load_state_environments_that_begin_anew_cut_transitions_and_returns(name):
    """Nothing saves the state of these environments: what came before the resume must not run on into what follows."""

    def make():
        given = {"normalize_reward": True}
        env = sync(lambda: Walk([1.0] * 50), 3)
        return dqn(env, given=given) if name == "dqn" else learner_on(env, "sarsa", given=given, horizon=8)

    going = make()
    going.step(0.0)
    state = going.state()
    assert (going.rewards.scale.running != 0).all()
    resumed = make()
    resumed.load_state(state)
    assert resumed.rewards.scale.running.tolist() == [0.0] * 3
    if name == "dqn":
        newest = resumed.memory.added - 1
        assert resumed.memory.columns["flags"][newest].tolist() == [1, 1, 1]
        shown = going.memory.columns["obs"][newest + 1]
        kept = resumed.memory.finals.get(torch.from_numpy(resumed.memory.columns["final"][newest]))
        assert torch.equal(kept, torch.from_numpy(shown))


@pytest.mark.slow
@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="compiling needs a C++ compiler")
@pytest.mark.parametrize("variant", ["copied", "everything", "rainbow"])
def test_compiled_updates_equal_eager_ones_and_see_the_rate_move(variant: str):
    given = VARIANTS[variant] | {"lr": {"shape": "linear", "start": 5e-3, "end": 0.0}, "update_every": 8}
    env = partial(sync, lambda: OneStep(lambda shown, action: shown * (2 * action - 1)), 2)
    eager, graph = (dqn(env(), compile=compile, **given) for compile in (False, True))
    for progress in (0.0, 0.3, 0.6):
        assert eager.step(progress) == pytest.approx(graph.step(progress), rel=2e-3, abs=2e-3)
    assert graph.updates > 10
    assert graph.together == 4  # updates in one graph
    before = graph.flat.vector.clone()
    graph.learn(4, 1.0)
    assert torch.equal(before, graph.flat.vector)  # a learning rate of 0
