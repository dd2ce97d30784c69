"""Parallel environments of PettingZoo: agents as rows, evaluation, watching, refusals, and learning."""

from typing import Any

import numpy as np
import pytest
import torch
from conftest import SHORT
from gymnasium import spaces
from probe_envs import learner_on

import palestra
from examples.control.meeting import Meeting
from palestra.control.envs.agents import Agents, WholeGame, games
from palestra.control.envs.make import evaluation_vector, make_single, make_vector
from palestra.control.nets.agents import SeparateAgents
from palestra.control.nets.heads import ActionHead
from palestra.errors import PalestraError, UsageError
from palestra.spec.kinds.control import EnvSpec
from palestra.spec.load import load
from palestra.spec.shape import NetSpec
from palestra.spec.validate import SpecError

MEETING = "pettingzoo:examples.control.meeting:Meeting"
ENV = {"id": MEETING, "num_envs": 6, "kwargs": {"steps": 4}}


class Uneven(Meeting):
    """Its first agent ends before the others."""

    def step(self, actions: dict[str, int]) -> tuple[dict, dict, dict, dict, dict]:
        obs, rewards, terminated, truncated, infos = super().step(actions)
        return obs, rewards, {**terminated, "agent_0": True}, truncated, infos


class Unequal(Meeting):
    """Its agents have different actions."""

    def action_space(self, agent: str) -> Any:
        return spaces.Discrete(5 if agent == "agent_0" else 3)


def test_rows_are_the_agents_of_the_games_in_order_and_reset_together():
    env = make_vector(EnvSpec.model_validate(ENV), 6)
    assert isinstance(env, Agents)
    obs, _ = env.reset(seed=3)
    by_hand = [Meeting(steps=4) for _ in range(2)]
    seen = [game.reset(seed=3 + g)[0] for g, game in enumerate(by_hand)]
    np.testing.assert_array_equal(obs, np.concatenate([list(rows.values()) for rows in seen]))
    for t in range(4):
        actions = np.arange(6) % 5
        obs, rewards, terminated, truncated, infos = env.step(actions)
        steps = [
            game.step(dict(zip(game.possible_agents, actions[3 * g : 3 * g + 3], strict=True)))
            for g, game in enumerate(by_hand)
        ]
        np.testing.assert_array_equal(rewards, np.concatenate([list(step[1].values()) for step in steps]))
        assert truncated.tolist() == [t == 3] * 6
        assert not terminated.any()
    last = np.concatenate([list(step[0].values()) for step in steps])
    np.testing.assert_array_equal(infos["final_obs"], last)
    fresh = np.concatenate([list(game.reset()[0].values()) for game in by_hand])
    np.testing.assert_array_equal(obs, fresh)


def test_evaluation_has_whole_games_and_watching_one_acts_for_all_agents(tmp_path):
    spec = EnvSpec.model_validate(ENV)
    assert evaluation_vector(spec, 5).num_envs == 3
    assert evaluation_vector(spec, 1).num_envs == 3
    watched = make_single(spec, render_mode="rgb_array")
    assert isinstance(watched, WholeGame)
    obs, _ = watched.reset(seed=0)
    assert obs.shape == (3, 6)
    minibatch = {**SHORT["algorithm"], "minibatch": 32}
    run = palestra.run({**SHORT, "env": ENV, "algorithm": minibatch}, root=tmp_path, quiet=True, train__frames=600)
    rows = run.metrics()
    assert rows[-1]["length"] == 4
    assert rows[-1]["frame"] == 768  # whole rollouts of 32 steps by 6 agents
    said = palestra.enjoy(run, out=tmp_path / "it.gif", episodes=2)
    assert (tmp_path / "it.gif").exists()
    assert "over 2 episodes" in said
    assert palestra.evaluate_policy(run, episodes=6)["mean"] < 0


def test_a_run_of_agents_continues_after_a_stop(tmp_path):
    spec = {**SHORT, "env": ENV, "train": {"frames": 768}}
    run = palestra.run(spec, root=tmp_path, quiet=True)
    with pytest.warns(UserWarning, match="they restart"):
        more = palestra.run(
            {**spec, "train": {"frames": 1152}}, resume=run, root=tmp_path, quiet=True, allow=["train.frames"]
        )
    assert [row["frame"] for row in more.metrics()][-1] == 1152


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_envs": 4}, "expected a multiple of the 3 agents"),
        ({"id": "pettingzoo:test_control_agents:Unequal"}, "agents of one policy need equal spaces, got agent_0"),
        ({"id": "pettingzoo:test_control_agents:Uneven"}, "agent_0 has ended before the others"),
        ({"id": "pettingzoo:palestra.control.envs.agents"}, "has no function 'parallel_env'"),
        ({"id": "pettingzoo:pettingzoo.nothing_v0"}, r"palestra\[pettingzoo\]"),
        ({"kwargs": {"size": 3}}, "could not be made with"),
    ],
)
def test_games_that_do_not_fit_are_refused_with_a_sentence(changes, said):
    def play() -> None:
        env = games(EnvSpec.model_validate({**ENV, **changes}), changes.get("num_envs", 6))
        env.reset(seed=0)
        env.step(np.zeros(6, int))

    with pytest.raises(PalestraError, match=said):
        play()


@pytest.mark.parametrize(
    "changes",
    [
        {"env": {**ENV, "vectorize": "async"}},
        {"env": {**ENV, "frame_stack": 4}},
        {"env": {**ENV, "components": ["x"]}},
        {"env": ENV, "algorithm": {"name": "dqn", "her": {"k": 4}}},
    ],
)
def test_unsupported_combinations_are_conflicts_of_the_spec(changes):
    with pytest.raises(SpecError, match="several agents do not support it"):
        load({**SHORT, **changes})


@pytest.mark.parametrize("kind", ["discrete", "box"])
def test_separate_agents_have_the_outputs_and_gradients_of_their_own_networks(kind):
    space = {"discrete": spaces.Discrete(5), "box": spaces.Box(-1, 1, (2,), np.float32)}[kind]
    net = SeparateAgents((4 + 3,), ActionHead.of(space), NetSpec(hidden=[8]), None, agents=3)
    own, which = torch.randn(6, 4), torch.arange(6) % 3
    obs = torch.cat([own, torch.eye(3)[which]], dim=1)
    distribution, values = net(obs)
    actions = distribution.mode()
    for i, agent in enumerate(which.tolist()):
        expected, value = net.nets[agent](own[i : i + 1])
        torch.testing.assert_close(values[i : i + 1], value)
        torch.testing.assert_close(distribution.log_prob(actions)[i : i + 1], expected.log_prob(actions[i : i + 1]))
    rows = which == 1
    loss = net(obs[rows])[1].sum() + net.policy(obs[rows]).log_prob(actions[rows]).sum()
    loss.backward()
    used = [any(p.grad is not None and p.grad.abs().sum() > 0 for p in each.parameters()) for each in net.nets]
    assert used == [False, True, False]


def test_critic_lr_moves_the_values_of_all_separate_policies_alone():
    given = {**ENV, "policies": 3}
    env, small = make_vector(EnvSpec.model_validate(given), 6), {"horizon": 16, "minibatch": 16}
    learner = learner_on(env, "ppo", given=given, net={"hidden": [8]}, lr=0.0, critic_lr=1e-3, **small)
    before = {name: p.detach().clone() for name, p in learner.net.named_parameters()}
    learner.step(0.0)
    moved = {name for name, p in learner.net.named_parameters() if not torch.equal(p, before[name])}
    assert moved == {name for name in before if "value_" in name}


def test_separate_policies_train_resume_and_are_watched(tmp_path):
    env = {**ENV, "policies": 3, "normalize_obs": True}
    run = palestra.run({**SHORT, "env": env}, root=tmp_path, quiet=True, train__frames=600)
    assert palestra.load(run).obs_shape == (9,)
    assert "over 1 episode" in palestra.enjoy(run, out=tmp_path / "it.gif")
    assert palestra.evaluate_policy(run, episodes=6)["mean"] < 0


@pytest.mark.parametrize(
    "changes", [{"algorithm": {"name": "dqn"}}, {"net": {"recurrent": {"size": 8}}}, {"env": {"id": "CartPole-v1"}}]
)
def test_separate_policies_where_there_are_none_are_refused(changes):
    env = {**changes.get("env", ENV), "num_envs": 6, "policies": 3}
    with pytest.raises(SpecError, match=r"env\.policies: expected 1"):
        load({**SHORT, "algorithm": {**SHORT["algorithm"], "minibatch": 32}, **changes, "env": env})


@pytest.mark.slow
@pytest.mark.parametrize("policies", [1, 3])
def test_meeting_score_rises_with_every_one_of_three_seeds(tmp_path, policies):
    given = {"seed": 100, "max_session": 3, "env.policies": policies}
    run = palestra.run("examples/control/ppo_meeting.yaml", root=tmp_path, quiet=True, overrides=given)
    for seed in run.seeds:
        rows = run.metrics(seed)
        assert rows[0]["return"] < -20
        assert rows[-1]["eval/return"] > -12


def test_usage_error_of_a_game_keeps_its_words():
    with pytest.raises(UsageError, match="cannot be imported"):
        games(EnvSpec.model_validate({**ENV, "id": "pettingzoo:nowhere_at_all"}), 3)
