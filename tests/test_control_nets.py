"""Networks, action heads and policies: initial weights, log-probabilities, clipping, states."""

import itertools
import math

import gymnasium as gym
import numpy as np
import probe_envs
import pytest
import torch
from gymnasium import spaces
from probe_envs import ppo_on, sync

from palestra.control.nets.actor_critic import ActorCritic
from palestra.control.nets.heads import ActionHead
from palestra.control.optim import FlatNet
from palestra.control.policy import Policy
from palestra.errors import UsageError
from palestra.spec.shape import NetSpec

torch.set_num_threads(1)

CPU = torch.device("cpu")
ACTIONS: dict[str, gym.Space] = {
    "discrete": spaces.Discrete(5, start=2),
    "multi_discrete": spaces.MultiDiscrete([3, 2, 4], start=[0, 1, 5]),
    "multi_binary": spaces.MultiBinary(4),
    "box": spaces.Box(np.array([-1, -2, 0], np.float32), np.array([1, 2, 3], np.float32)),
}


def policy_for(space: gym.Space, **net: object) -> Policy:
    return probe_envs.policy_for(spaces.Box(-np.inf, np.inf, (6,), np.float32), space, **net)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("kind", ["discrete", "multi_discrete", "multi_binary"])
def test_policy_orthogonal_start_is_almost_uniform(kind, shared):
    policy = policy_for(ACTIONS[kind], shared=shared)
    entropy = policy.net.policy(torch.randn(500, 6)).entropy()
    uniform = {"discrete": math.log(5), "multi_discrete": math.log(3 * 2 * 4), "multi_binary": 4 * math.log(2)}[kind]
    assert entropy.min() > 0.99 * uniform
    assert entropy.max() <= uniform + 1e-5


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("kind", ACTIONS)
def test_net_orthogonal_weights_have_their_gains_at_their_layers(kind, shared):
    net = policy_for(ACTIONS[kind], shared=shared).net
    head = net.policy_head.weight
    torch.testing.assert_close(head @ head.T, 0.01**2 * torch.eye(len(head)), atol=1e-7, rtol=0)
    torch.testing.assert_close(net.value_head.weight.norm(), torch.tensor(1.0))
    for trunk in {net.trunk, net.value_trunk} - {None}:
        square = trunk.mlp.layers[1].weight
        torch.testing.assert_close(square @ square.T, 2 * torch.eye(64), atol=1e-5, rtol=0)
    assert all(not p.any() for name, p in net.named_parameters() if name.endswith("bias"))
    assert (net.value_trunk is None) == shared
    assert net.log_std is None if kind != "box" else not net.log_std.any()


@pytest.mark.parametrize("shared", [False, True])
def test_flat_vector_and_parameters_are_the_same_numbers(shared):
    policy = policy_for(ACTIONS["box"], shared=shared)
    flat = FlatNet(policy.net)
    assert len(flat.vector) == sum(p.numel() for p in policy.net.parameters())
    obs = torch.randn(3, 6)
    before = policy.net.value(obs)
    flat.vector.add_(0.1)
    assert not torch.allclose(policy.net.value(obs), before)
    policy.load_state(policy_for(ACTIONS["box"], shared=shared).state())  # copied into the views
    assert torch.equal(policy.net.value(obs), before)
    torch.testing.assert_close(flat.vector, torch.cat([p.detach().reshape(-1) for p in policy.net.parameters()]))


def test_trunk_images_are_scaled_once_and_scalars_are_taken():
    net = probe_envs.policy_for(spaces.Box(0, 255, (2, 2), np.uint8), spaces.Discrete(2)).net
    white = torch.full((3, 2, 2), 255, dtype=torch.uint8)
    assert torch.equal(net.value(white), net.value(torch.ones(3, 4)))
    scalar = probe_envs.policy_for(spaces.Box(0, 1, (), np.float32), spaces.Discrete(2))
    assert scalar.act(np.float32(0.5)) in (0, 1)
    assert scalar.act(np.zeros(7, np.float32)).shape == (7,)


def test_multi_discrete_log_probs_equal_the_enumerated_joint_distribution():
    head = ActionHead.of(spaces.MultiDiscrete([3, 2, 4]))
    outputs = torch.randn(5, head.outputs, dtype=torch.float64)
    distribution = head.distribution(outputs, None)
    parts = [part.softmax(-1) for part in outputs.split([3, 2, 4], dim=-1)]
    joint = torch.einsum("ba,bc,bd->bacd", *parts)
    total = torch.zeros(5, dtype=torch.float64)
    for action in itertools.product(range(3), range(2), range(4)):
        logprob = distribution.log_prob(torch.tensor([action] * 5))
        assert logprob.shape == (5,)
        torch.testing.assert_close(logprob, joint[:, *action].log())
        total += logprob.exp()
    torch.testing.assert_close(total, torch.ones_like(total))
    torch.testing.assert_close(distribution.entropy(), -(joint * joint.log()).sum((1, 2, 3)))


@pytest.mark.parametrize("kind", ACTIONS)
def test_act_any_space_gives_members_of_it(kind):
    space = ACTIONS[kind]
    policy = policy_for(space)
    with torch.no_grad():
        for p in policy.net.parameters():
            p.add_(torch.randn_like(p))
    obs = np.random.default_rng(0).normal(size=(200, 6))
    for deterministic in (True, False):
        actions = policy.act(obs, deterministic=deterministic)
        assert len(actions) == 200
        assert all(space.contains(action) for action in actions)
    np.testing.assert_allclose(policy.act(obs[0]), policy.act(obs)[0], atol=1e-4)


@pytest.mark.parametrize("kind", ["discrete", "multi_discrete", "multi_binary"])
def test_act_sampled_from_every_action_of_the_space_is_reached(kind):
    actions = policy_for(ACTIONS[kind]).act(np.zeros((2000, 6)), deterministic=False)
    assert len(np.unique(actions, axis=0)) == {"discrete": 5, "multi_discrete": 24, "multi_binary": 16}[kind]


def test_act_wrong_shape_names_the_shapes():
    with pytest.raises(UsageError, match=r"\(6,\).*\(5,\)"):
        policy_for(ACTIONS["discrete"]).act(np.zeros(5))


@pytest.mark.parametrize(
    "space", [spaces.Box(0, 9, (2,), np.int64), spaces.Box(0, 1, (2, 2)), spaces.MultiBinary([2, 2]), spaces.Text(3)]
)
def test_head_unsupported_action_space_is_refused(space):
    with pytest.raises(UsageError, match="not supported"):
        ActionHead.of(space)


class Listening(gym.Env):
    """Keeps the actions that it is given."""

    def __init__(self) -> None:
        self.observation_space = spaces.Box(-1, 1, (2,), np.float32)
        self.action_space = spaces.Box(-0.5, 0.25, (2,), np.float32)
        self.heard: list[np.ndarray] = []

    def reset(self, **arguments: object) -> tuple[np.ndarray, dict]:
        return np.ones(2, np.float32), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict]:
        self.heard.append(action.copy())
        return np.ones(2, np.float32), 0.0, False, False, {}


def test_collect_box_actions_are_stored_as_sampled_and_given_clipped():
    env = sync(Listening, 1)
    ppo = ppo_on(env, horizon=64, minibatch=64)
    rollout = ppo.collect()
    heard = np.stack(env.envs[0].unwrapped.heard)
    stored = rollout.actions[:, 0].numpy()
    assert heard.min() == -0.5
    assert heard.max() == 0.25
    # Stored in units of half the range: −1 is the lower bound, 1 the upper.
    assert stored.min() < -1
    assert stored.max() > 1
    np.testing.assert_allclose(heard, -0.125 + 0.375 * np.clip(stored, -1, 1), rtol=1e-6)
    batch = ppo.prepare(rollout)
    with torch.no_grad():
        mean = ppo.policy.net.policy(batch.obs).mode()
    expected = torch.distributions.Normal(mean, 1.0).log_prob(batch.actions).sum(-1)
    torch.testing.assert_close(batch.logprobs, expected)
    assert torch.equal(batch.actions.sort(dim=0).values, rollout.actions[:, 0].sort(dim=0).values)


def test_state_is_a_copy_and_restores_the_policy():
    policy = policy_for(ACTIONS["box"])
    obs = np.random.default_rng(0).normal(size=(20, 6))
    state, before = policy.state(), policy.act(obs)
    with torch.no_grad():
        policy.net.policy_head.bias.add_(1.0)
    assert not np.array_equal(policy.act(obs), before)
    restored = Policy((6,), ActorCritic((6,), ActionHead(state["actions"]), NetSpec()))
    restored.load_state(state)
    np.testing.assert_array_equal(restored.act(obs), before)
