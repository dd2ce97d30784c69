"""Recurrent policies: torch's cells, memory cleared where episodes begin, sequences in minibatches (checklist 35)."""

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from conftest import fast_only
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from on_policy_envs import Cue, TwoStep
from probe_envs import Scripted, learner_on, sync
from pydantic import ValidationError

from palestra.control.algorithms.on_policy import Rates
from palestra.control.algorithms.ppo import METRICS, PPO
from palestra.control.envs.make import make_vector
from palestra.control.envs.stepping import Stepper
from palestra.control.evaluation import evaluate
from palestra.control.nets.actor_critic import Cell, Recurrent, unroll
from palestra.control.nets.heads import ActionHead
from palestra.control.policy import Policy
from palestra.errors import UsageError
from palestra.spec.kinds.control import ControlSpec, EnvSpec
from palestra.spec.shape import NetSpec, RecurrentSpec

torch.set_num_threads(1)

CELLS = ["lstm", "gru"]
MODES = [AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP, AutoresetMode.DISABLED]
RATES = Rates(torch.tensor(3e-4), torch.tensor(0.2), torch.tensor(0.01))


def spec(cell: str = "lstm", size: int = 8, **given: Any) -> dict[str, Any]:
    return {"hidden": [8], "recurrent": {"cell": cell, "size": size}, **given}


def made_net(cell: str = "lstm", **given: Any) -> Recurrent:
    torch.manual_seed(0)
    net = Recurrent((4,), ActionHead.of(spaces.Discrete(3)), NetSpec.model_validate(spec(cell, **given)))
    with torch.no_grad():
        for p in net.parameters():  # far from the initial ones, where memory matters
            p.add_(0.4 * torch.randn_like(p))
    return net


def recurrent_ppo(env: Any, cell: str = "lstm", shared: bool = False, **given: Any) -> PPO:
    ppo = learner_on(env, "ppo", net=spec(cell, shared=shared), **given)
    assert isinstance(ppo, PPO)
    ppo.flat.vector.add_(0.3 * torch.randn(ppo.flat.vector.shape, generator=torch.Generator().manual_seed(1)))
    return ppo


@pytest.mark.parametrize("cell", CELLS)
def test_cell_step_equals_torch(cell):
    ours = Cell(5, RecurrentSpec(cell=cell, size=6), None)
    theirs = (torch.nn.LSTMCell if cell == "lstm" else torch.nn.GRUCell)(5, 6)
    for mine, its in ((ours.inputs, "ih"), (ours.hidden, "hh")):
        getattr(theirs, f"weight_{its}").data.copy_(mine.weight.data)
        getattr(theirs, f"bias_{its}").data.copy_(mine.bias.data)
    x, memory = torch.randn(3, 5), torch.randn(3, ours.memory)
    out = unroll([ours], [x[None]], torch.zeros(1, 3, dtype=torch.bool), memory)[0]
    if cell == "lstm":
        torch.testing.assert_close(out, torch.cat(theirs(x, (memory[:, :6], memory[:, 6:])), dim=1))
    else:
        torch.testing.assert_close(out, theirs(x, memory))


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("shared", [False, True])
def test_sequence_with_beginnings_equals_each_episode_by_itself(cell, shared):
    net = made_net(cell, shared=shared)
    generator = torch.Generator().manual_seed(1)
    obs, began = torch.randn(12, 3, 4, generator=generator), torch.rand(12, 3, generator=generator) < 0.3
    start = torch.randn(3, net.memory, generator=generator)
    with torch.no_grad():
        distribution, values = net(obs, began, start)
        for env in range(3):
            memory = start[env : env + 1]
            for t in range(12):
                if began[t, env]:
                    memory = net.nothing(1)
                one, value, memory = net.advance(obs[t, env][None], memory)
                torch.testing.assert_close(one.logprobs[0], distribution.logprobs[t, env])
                torch.testing.assert_close(value[0], values[t, env])


def test_output_of_an_environment_is_unaffected_by_the_beginning_of_another():
    net, obs = made_net(), torch.randn(6, 2, 4)
    began = torch.zeros(6, 2, dtype=torch.bool)
    other = began.clone()
    other[3, 1] = True
    _, plain = net(obs, began, net.nothing(2))
    _, moved = net(obs, other, net.nothing(2))
    assert torch.equal(plain[:, 0], moved[:, 0])
    assert torch.equal(plain[:3, 1], moved[:3, 1])
    assert not torch.isclose(plain[3:, 1], moved[3:, 1]).any()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("cell", CELLS)
def test_rollout_values_and_successors_equal_following_each_environment(cell, mode):
    """With the memory it had when acting: cleared at the begin of an episode, kept for its final observation."""
    ppo = recurrent_ppo(sync(Scripted, 3, mode), cell, horizon=12, minibatch=36)
    memory: list[Any] = [ppo.net.nothing(1)] * 3
    fresh = [True] * 3
    for _ in range(2):
        rollout = ppo.collect()
        with torch.no_grad():
            values, successors = ppo.values(rollout)
            ends = dict(zip(rollout.ends.tolist(), rollout.final_obs, strict=True))
            for t, n in np.ndindex(12, 3):
                memory[n] = ppo.net.nothing(1) if fresh[n] else memory[n]
                _, value, memory[n] = ppo.net.advance(rollout.obs[t, n][None], memory[n])
                torch.testing.assert_close(values[t, n], value[0])
                over = t * 3 + n in ends
                following = rollout.last_obs[n] if t == 11 else rollout.obs[t + 1, n]
                after = ends[t * 3 + n] if over else following
                if rollout.valid[t, n]:
                    _, successor, _ = ppo.net.advance(after[None], memory[n])
                    torch.testing.assert_close(successors[t, n], successor[0])
                fresh[n] = over or not bool(rollout.valid[t, n])
        torch.testing.assert_close(ppo.memory, torch.cat(memory))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("cell", "shared", "minibatch"),
    fast_only(product(CELLS, [False, True], [16, 32, 64]), ("lstm", False, 32), ("gru", True, 16), ("lstm", True, 64)),
)
def test_first_minibatch_of_sequences_has_ratio_exactly_one(cell, shared, minibatch, mode):
    ppo = recurrent_ppo(sync(Scripted, 4, mode), cell, shared, horizon=16, minibatch=minibatch)
    for _ in range(2):  # the second rollout begins in the middle of episodes
        batch = ppo.prepare(ppo.collect())
        for i in range(64 // minibatch):
            _, _, metrics = ppo.update(ppo.adam, ppo._minibatches(batch)[i], RATES)
            named = dict(zip(METRICS, metrics.tolist(), strict=True))
            assert named["approx_kl"] == 0.0
            assert named["clip_fraction"] == 0.0


def test_minibatches_hold_whole_environments_each_exactly_once_an_epoch():
    ppo = recurrent_ppo(sync(Scripted, 4), horizon=6, minibatch=12, epochs=3)
    rollout = ppo.collect()
    columns = {tuple(map(tuple, rollout.obs[:, n].tolist())) for n in range(4)}
    update, seen = ppo._update, []

    def recorded(adam, batch, rates):
        assert batch.memory.shape == (1, 2, ppo.net.memory)
        seen.extend(tuple(map(tuple, batch.obs[:, n].tolist())) for n in range(2))
        return update(adam, batch, rates)

    ppo._update = recorded
    ppo.learn(ppo.prepare(rollout), 0.0)
    assert len(seen) == 12
    assert all(set(seen[i : i + 4]) == columns for i in (0, 4, 8))


@pytest.mark.parametrize(("cell", "name"), fast_only(product(CELLS, ["ppo", "a2c"]), ("lstm", "ppo")))
def test_cue_shown_before_is_remembered(name, cell):
    given: dict[str, Any] = {"minibatch": 64, "lr": 1e-2} if name == "ppo" else {"lr": 1e-2}
    learner = learner_on(sync(Cue, 16), name, net=spec(cell, 16), horizon=8, gamma=0.9, **given)
    stepper = Stepper(sync(Cue, 5))
    assert evaluate(learner.policy, stepper, 20, seed=1).returns.mean() < 0.7
    for _ in range(20 if name == "ppo" else 200):
        learner.step(0.0)
    assert evaluate(learner.policy, stepper, 40, seed=1).returns.mean() == 1.0
    assert played(learner.policy, 20) == [1.0] * 20


def played(policy: Policy, episodes: int, reset: bool = True) -> list[float]:
    """Returns of episodes acted one observation at a time."""
    env, returns = Cue(), []
    for seed in range(episodes):
        obs, _ = env.reset(seed=seed)
        if reset:
            policy.reset()
        over, total = False, 0.0
        while not over:
            obs, reward, over, _, _ = env.step(policy.act(obs))
            total += reward
        returns.append(total)
    return returns


def test_cue_shown_before_is_not_solved_without_memory():
    learner = learner_on(sync(Cue, 16), "ppo", net={"hidden": [8]}, horizon=16, minibatch=128, lr=1e-2, gamma=0.9)
    for _ in range(20):
        learner.step(0.0)
    assert evaluate(learner.policy, Stepper(sync(Cue, 5)), 40, seed=1).returns.mean() < 0.7


def test_act_remembers_until_reset():
    policy = Policy((4,), made_net())
    obs = np.random.default_rng(0).normal(size=(2, 5, 4)).astype(np.float32)

    def outputs() -> list[list[float]]:
        found = []
        for step in obs:
            policy.act(step)
            found.append(policy._memory.flatten().tolist())
        return found

    first = outputs()
    assert outputs() != first
    policy.reset()
    assert outputs() == first
    policy.reset(np.array([True, False, False, False, False]))
    assert not policy._memory[0].any()
    assert policy._memory[1:].all()
    with pytest.raises(UsageError, match=r"policy.reset\(\)"):
        policy.act(obs[0][:3])
    policy.reset()
    assert policy.act(obs[0][0], deterministic=False).shape == ()


@pytest.mark.parametrize("mode", MODES)
def test_evaluation_clears_the_memory_where_episodes_begin(mode, monkeypatch):
    net = made_net()
    advance, begins, others = net.advance, [], []

    def recorded(obs: torch.Tensor, memory: torch.Tensor, mask: torch.Tensor | None = None) -> Any:
        for flag, before in zip(obs[:, 3].tolist(), memory, strict=True):
            (begins if flag else others).append(bool(before.any()))
        return advance(obs, memory, mask)

    monkeypatch.setattr(net, "advance", recorded)
    evaluate(Policy((4,), net), Stepper(sync(Scripted, 3, mode)), 30, seed=5)
    assert len(begins) >= 30
    assert not any(begins)
    assert any(others)


@pytest.mark.parametrize("name", ["ppo", "a2c"])
def test_state_round_trip_in_the_middle_of_episodes_continues_identically(name):
    def made() -> Any:
        env = make_vector(EnvSpec(id="object:Cue"), 4, Cue)
        given = {"minibatch": 14} if name == "ppo" else {}
        return learner_on(env, name, net=spec(), horizon=7, **given)

    going = made()
    for _ in range(3):
        going.step(0.0)
    state, generator = going.state(), going.generator.get_state()
    assert state["memory"].any()
    expected = [going.step(0.0) for _ in range(3)]
    resumed = made()
    resumed.load_state(state)
    resumed.generator.set_state(generator)
    assert [resumed.step(0.0) for _ in range(3)] == expected
    assert torch.equal(resumed.flat.vector, going.flat.vector)


def test_gradient_of_the_whole_loss_equals_finite_differences():
    ppo = recurrent_ppo(sync(TwoStep, 2), "gru", horizon=5, minibatch=10)
    batch = ppo.prepare(ppo.collect())
    ppo.net.double()
    parameters = list(ppo.net.parameters())
    wide = type(batch)(*(x if x is None or not x.is_floating_point() else x.double() for x in batch))
    rates = Rates(*(None if rate is None else rate.double() for rate in RATES))
    loss, _ = ppo.loss(ppo.net, wide, rates)
    gradients = torch.autograd.grad(loss, parameters)
    generator = torch.Generator().manual_seed(0)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        direction = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        sides = []
        for h in (1e-6, -2e-6):
            parameter.data.add_(h * direction)
            sides.append(float(ppo.loss(ppo.net, wide, rates)[0].detach()))
        parameter.data.add_(1e-6 * direction)
        assert (sides[0] - sides[1]) / 2e-6 == pytest.approx(float((gradient * direction).sum()), rel=1e-4, abs=1e-7)


@pytest.mark.parametrize(
    ("algorithm", "net", "at"),
    [
        ({"name": "ppo", "horizon": 32, "minibatch": 48}, {}, "algorithm.minibatch"),
        ({"name": "ppo", "horizon": 32, "minibatch": 64, "self_imitation": {}}, {}, "algorithm.self_imitation"),
        ({"name": "reinforce"}, {}, "net.recurrent"),
        ({"name": "a2c"}, {"shared": True, "critic_hidden": [8]}, "net.critic_hidden"),
    ],
)
def test_conflicts_what_does_not_fit_a_recurrent_policy_is_said(algorithm, net, at):
    data = {"kind": "control", "name": "x", "env": {"id": "CartPole-v1", "num_envs": 3}, "train": {"frames": 960}}
    with pytest.raises(ValidationError, match=rf"{at}:"):
        ControlSpec.model_validate({**data, "algorithm": algorithm, "net": {"recurrent": {}, **net}})
