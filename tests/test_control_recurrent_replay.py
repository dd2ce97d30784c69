"""Recurrent DQN and SAC: stored states, burn-in and targets by brute force, masks, resuming, a task for memory."""

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from on_policy_envs import Forbidding
from probe_envs import Scripted, learner_on, sync
from pydantic import ValidationError
from test_control_dqn import SavedSync

from palestra.control.algorithms.off_policy import Inputs
from palestra.control.algorithms.recurrent import Steps, learned_rows
from palestra.control.envs.make import make_vector
from palestra.control.envs.memory import TMaze
from palestra.control.envs.snapshot import Snapshot
from palestra.control.envs.stepping import Stepper
from palestra.control.evaluation import evaluate
from palestra.control.nets.sequences import one_step
from palestra.errors import UsageError
from palestra.spec.kinds.control import EnvSpec

torch.set_num_threads(1)

SEQUENCE = {"length": 4, "burn_in": 3}
SMALL: dict[str, Any] = {"horizon": 24, "start": 24, "batch": 16, "buffer": 120, "replay_ratio": 1 / 3}
MODES = [AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP]


def made(name: str = "dqn", cell: str = "gru", env: Any = None, steps: int = 2, **given: Any) -> Any:
    env = env or sync(lambda: Scripted(9), 3)
    net = {"hidden": [8], "recurrent": {"cell": cell, "size": 6}}
    learner = learner_on(env, name, net=net, **{**SMALL, "sequence": SEQUENCE, **given})
    for _ in range(steps):
        learner.step(0.0)
    return learner


def sampled(learner: Any, size: int = 32) -> Any:
    return learner.memory.sample(size, torch.Generator().manual_seed(5))


@pytest.mark.parametrize("mode", MODES)
def test_sequences_are_consecutive_steps_of_one_environment_and_begin_where_episodes_do(mode):
    learner = made(env=sync(lambda: Scripted(9), 3, mode))
    batch = sampled(learner, 200)
    assert batch.obs.shape[:2] == (200, 7)
    env, episode, step, first = batch.obs.unbind(-1)
    same = batch.valid[:, 1:] & batch.valid[:, :-1] & ~batch.began[:, 1:]
    assert (env == env[:, :1]).all()
    assert (episode[:, 1:] == episode[:, :-1])[same].all()
    assert (step[:, 1:] == step[:, :-1] + 1)[same].all()
    assert torch.equal(first[batch.valid] == 1, batch.began[batch.valid])
    assert batch.valid.all() == (mode is AutoresetMode.SAME_STEP)


@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_stored_states_are_those_of_following_each_episode_with_the_weights_that_acted(cell):
    learner = made(cell=cell, steps=0, start=10_000, buffer=20_000)  # nothing is learned: the weights stay
    for _ in range(2):
        learner.step(0.0)
    memory, columns = learner.net.nothing(3), learner.memory.columns
    with torch.no_grad():
        for t in range(learner.memory.added):
            memory = torch.where(columns["began"].tensor[t][:, None], 0.0, memory)
            torch.testing.assert_close(columns["states"].tensor[t], memory)
            _, memories = learner.net(*one_step(columns["obs"].tensor[t]), memory)
            memory = memories[0]
    torch.testing.assert_close(learner.states, memory)


def followed(net: Any, batch: Any, row: int, states: torch.Tensor, upto: int, **more: Any) -> tuple[Any, torch.Tensor]:
    """What `net` gives at step `upto` of a sequence, followed step by step from the stored state, and its memory."""
    memory, out = states[row : row + 1], None
    for t in range(upto + 1):
        if batch.began[row, t]:
            memory = torch.zeros_like(memory)
        given = {name: column[row, t][None] for name, column in more.items()}
        out, memories = net(*one_step(batch.obs[row, t][None]), memory, *given.values())
        memory = memories[0]
    return out, memory


@pytest.mark.parametrize("double", [True, False])
def test_dqn_targets_equal_following_every_sequence_step_by_step(double):
    learner = made(double=double, env=sync(lambda: Scripted(9), 3, AutoresetMode.NEXT_STEP))
    learner.target.vector.add_(
        0.2 * torch.randn(learner.target.vector.shape, generator=torch.Generator().manual_seed(1))
    )
    batch = sampled(learner, 6)
    with torch.no_grad():
        targets = learner.targets(batch).view(4, 6)
        for row, t in np.ndindex(6, 4):
            at = t + 3
            _, memory = followed(learner.target.net, batch, row, batch.states, at)
            following = learner.target.net(*one_step(batch.next_obs[row, at][None]), memory)[0].flatten()
            best = following.argmax()
            if double:
                _, own = followed(learner.net, batch, row, batch.states, at)
                best = learner.net(*one_step(batch.next_obs[row, at][None]), own)[0].flatten().argmax()
            expected = batch.rewards[row, at] + batch.discounts[row, at] * following[best]
            torch.testing.assert_close(targets[t, row], expected)


def test_dqn_loss_is_of_the_steps_after_the_burn_in_and_its_gradient_stops_there():
    learner = made(env=sync(lambda: Scripted(9), 3, AutoresetMode.NEXT_STEP))
    batch = sampled(learner, 6)
    targets = torch.randn(24, 1)
    gradient, (errors, _) = learner.flat.gradient(lambda net: learner.loss(net, batch, targets))
    starts = [followed(learner.net, batch, row, batch.states, 2)[1] for row in range(6)]
    parameters = list(learner.net.parameters())
    total = torch.zeros(())
    for row in range(6):
        memory = starts[row].detach()
        for t in range(3, 7):
            memory = torch.zeros_like(memory) if batch.began[row, t] else memory
            values, memories = learner.net(*one_step(batch.obs[row, t][None]), memory)
            memory, value = memories[0], values[0, 0, batch.actions[row, t], 0]
            each = torch.nn.functional.smooth_l1_loss(value, targets.view(4, 6)[t - 3, row])
            total = total + each * batch.valid[row, t]
    total = total / batch.valid[:, 3:].sum()
    expected = torch.cat([g.reshape(-1) for g in torch.autograd.grad(total, parameters)])
    torch.testing.assert_close(gradient, expected, atol=1e-6, rtol=1e-4)
    assert errors.shape == (24,)


def test_sac_critic_targets_equal_following_every_sequence_step_by_step():
    learner = made("sac", replay_ratio=1 / 3)
    batch = sampled(learner, 4)
    rows, steps = learned_rows(batch, 3), Steps.of(batch, 3)
    own, critics = batch.states.chunk(2, dim=1)
    target, alpha = learner.critics(learner.learned.target), learner.learned.alpha.vector.exp()
    with torch.no_grad():
        expected = torch.zeros(4, 4)
        for row, t in np.ndindex(4, 4):
            _, memory = followed(learner.net, batch, row, own, t + 3)
            policy, _ = learner.net(*one_step(batch.next_obs[row, t + 3][None]), memory)
            _, memory = followed(target, batch, row, critics, t + 3)
            q, _ = target(*one_step(batch.next_obs[row, t + 3][None]), memory)
            soft = (policy.logprobs.exp() * (q.amin(0) - alpha * policy.logprobs)).sum()
            expected[t, row] = batch.rewards[row, t + 3] + batch.discounts[row, t + 3] * soft
        q, _ = steps.learned(learner.critics(learner.learned.critics.vector), critics, rows.actions)
        chosen = learner.chosen(q, rows)
        loss = 0.5 * (chosen - expected.flatten()).square().mean(dim=1).sum()
        inputs = Inputs(torch.zeros(2, 0, 3), torch.tensor([[0.0, 1.0]] * 3))  # a step of size 0
        seen = learner.step_critics(learner.learned, batch, inputs)
    torch.testing.assert_close(seen[0], loss)


@pytest.mark.parametrize(("name", "mode"), [("dqn", MODES[0]), ("dqn", MODES[1]), ("sac", MODES[0])])
def test_state_round_trip_next_steps_are_identical(name, mode):
    def new() -> Any:
        env = SavedSync([lambda: Snapshot(Scripted(9))] * 3, autoreset_mode=mode)
        return made(name, "lstm", env, steps=0, given={"normalize_obs": True, "normalize_reward": True})

    going = new()
    for _ in range(2):
        going.step(0.1)
    state, generator = going.state(), going.generator.get_state()
    expected = [going.step(0.5) for _ in range(2)]
    resumed = new()
    resumed.load_state(state)
    resumed.generator.set_state(generator)
    assert [resumed.step(0.5) for _ in range(2)] == expected


@pytest.mark.parametrize("name", ["dqn", "sac"])
def test_recurrent_learner_and_evaluation_never_do_what_is_forbidden(name):
    env = SyncVectorEnv([Forbidding] * 3, autoreset_mode=AutoresetMode.SAME_STEP)
    learner = made(name, env=env)
    assert learner.updates > 0
    evaluate(learner.policy, Stepper(sync(Forbidding, 3)), 6, seed=1)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"batch": 18}, "multiple of sequence.length"),
        ({"start": 20}, "at least num_envs"),
        ({"n_step": 2}, "algorithm.n_step: expected 1"),
        ({"prioritized": {}}, "algorithm.prioritized: expected null"),
        ({"her": {}}, "algorithm.her: expected null"),
    ],
)
def test_spec_that_sequences_cannot_learn_from_is_refused(given, says):
    with pytest.raises(ValidationError, match=says):
        made(**given)


@pytest.mark.parametrize("name", ["td3", "tqc", "crossq", "sarsa", "reinforce"])
def test_algorithm_without_recurrence_is_refused_with_those_that_have_it(name):
    with pytest.raises(ValidationError, match="does not support it: use ppo, a2c, dqn or sac"):
        learner_on(sync(Scripted, 2), name, net={"recurrent": {}})


def test_t_maze_pays_for_the_turn_that_the_sign_says():
    env = TMaze(3)
    for seed in range(6):
        obs, _ = env.reset(seed=seed)
        assert abs(obs[0]) == 1
        sign = obs[0]
        assert env.step(1)[1:4] == (0.0, False, False)
        for _ in range(3):
            obs, reward, terminated, _, _ = env.step(0)
            assert (obs[0], reward, terminated) == (0, 0.0, False)
        assert obs[1] == 1
        assert env.step(1)[1:4] == (1.0 if sign < 0 else -1.0, True, False)
    env.reset(seed=0)
    assert [env.step(2)[3] for _ in range(12)] == [False] * 11 + [True]
    with pytest.raises(UsageError, match="at least 1"):
        TMaze(0)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dqn", "sac"])
def test_t_maze_is_solved_with_memory(name):
    def env() -> Any:
        return make_vector(EnvSpec(id="object:T", vectorize="sync"), 8, lambda: TMaze(3))

    net = {"hidden": [32], "recurrent": {"cell": "gru", "size": 32}}
    given = {"gamma": 0.95, "lr": 3e-3, "horizon": 64, "start": 256, "batch": 128, "buffer": 10_000, "tau": 0.02}
    sequence = {"length": 8, "burn_in": 4}
    learner = learner_on(env(), name, net=net, frames=10_000, replay_ratio=0.125, sequence=sequence, **given)
    for i in range(20):
        learner.step(i / 20)
    assert evaluate(learner.policy, Stepper(env()), 40, seed=1).returns.mean() > 0.9
