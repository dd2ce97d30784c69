"""Twin critics, batch renormalization and the vectors of actor-critics against plain torch."""

import math
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from probe_envs import learner_on
from torch import Tensor, nn

from palestra.control.envs.make import make_vector
from palestra.control.nets.heads import ActionHead
from palestra.control.nets.values import (
    EPS,
    MOST_SCALE,
    MOST_SHIFT,
    Critics,
    DeterministicActor,
    RenormCritics,
    Running,
    SoftActor,
    check_bounds,
    normalized,
    renormalized,
    warmth_after,
)
from palestra.control.optim import (
    Adam,
    FunctionalNet,
    Rule,
    Trained,
    adam_step,
    copied,
    gradient,
    pace,
    products,
    restore,
    rule_of,
)
from palestra.errors import UsageError
from palestra.spec.kinds.control import EnvSpec
from palestra.spec.load import load
from palestra.spec.shape import NetSpec
from palestra.spec.validate import SpecError

BOX = ActionHead.of(gym.spaces.Box(-2, 2, (2,), np.float32))
DISCRETE = ActionHead.of(gym.spaces.Discrete(3))
NET = NetSpec(hidden=[16, 8], activation="relu")


def one_of(critics: Critics, which: int) -> nn.Sequential:
    """One of the twins as plain layers."""
    layers: list[nn.Module] = []
    for weight, bias in zip(critics.weights, critics.biases, strict=True):
        layer = nn.Linear(weight.shape[1], weight.shape[2])
        layer.weight.data, layer.bias.data = weight.data[which].T.contiguous(), bias.data[which, 0]
        layers += [layer, nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def test_critics_stacked_equal_two_plain_networks():
    torch.manual_seed(0)
    critics, obs, actions = Critics((5,), BOX, NET), torch.randn(7, 5), torch.randn(7, 2)
    for parameter in critics.biases:
        nn.init.normal_(parameter)
    plain = [one_of(critics, which)(torch.cat([obs, actions], dim=1))[:, 0] for which in range(2)]
    torch.testing.assert_close(critics(obs, actions), torch.stack(plain))
    assert not torch.equal(plain[0], plain[1])  # twins begin apart


def test_critics_of_discrete_actions_give_a_value_to_each():
    critics = Critics((5,), DISCRETE, NET)
    assert critics(torch.randn(7, 5)).shape == (2, 7, 3)


def test_critics_take_images_and_widths_of_their_own():
    net = NetSpec(hidden=[8], critic_hidden=[12, 4])
    critics = Critics((4, 36, 36), DISCRETE, net)
    assert critics(torch.zeros(2, 4, 36, 36, dtype=torch.uint8)).shape == (2, 2, 3)
    assert [weight.shape[2] for weight in critics.weights] == [12, 4, 3]


def test_critics_with_layer_norm_are_blind_to_the_scale_before_it():
    torch.manual_seed(0)
    critics = Critics((5,), DISCRETE, NetSpec(hidden=[16], layer_norm=True))
    obs = torch.randn(7, 5)
    torch.testing.assert_close(critics(1000 * obs), critics(100 * obs), rtol=1e-3, atol=1e-3)


def test_soft_actor_begins_with_the_spec_log_std_and_no_preference():
    actor = SoftActor((5,), BOX, NetSpec(log_std=-0.7))
    policy = actor(torch.randn(9, 5))
    torch.testing.assert_close(policy.log_std, torch.full((9, 2), -0.7), atol=0.05, rtol=0)
    assert policy.mean.abs().max() < 0.05
    assert SoftActor((5,), DISCRETE, NET).actions(torch.randn(9, 5)).dtype == torch.int64
    assert DeterministicActor((5,), BOX, NET).actions(torch.randn(9, 5)).abs().max() <= 1


def test_check_bounds_without_bounds_says_so():
    with pytest.raises(UsageError, match="sac needs an action space with finite bounds"):
        check_bounds(ActionHead.of(gym.spaces.Box(-np.inf, np.inf, (1,), np.float32)), "sac")


def running(width: int = 3, seed: int = 1) -> Running:
    generator = torch.Generator().manual_seed(seed)
    return Running(torch.randn(2, 1, width, generator=generator), torch.rand(2, 1, width, generator=generator) + 0.5)


def test_renorm_before_the_warmup_is_batch_norm():
    x, statistics = torch.randn(2, 64, 3), running()
    ours, after = renormalized(x, statistics, torch.tensor(warmth_after(0, 100)), 0.1)
    for which in range(2):
        norm = nn.BatchNorm1d(3, eps=EPS, momentum=0.1, affine=False)
        assert norm.running_mean is not None
        assert norm.running_var is not None
        norm.running_mean.copy_(statistics.mean[which, 0])
        norm.running_var.copy_(statistics.var[which, 0])
        torch.testing.assert_close(ours[which], norm(x[which]))
        torch.testing.assert_close(after.mean[which, 0], norm.running_mean)
        # torch keeps the unbiased variance
        biased = statistics.var[which, 0].lerp(x[which].var(dim=0, correction=0), 0.1)
        torch.testing.assert_close(after.var[which, 0], biased)


def test_renorm_after_the_warmup_within_bounds_is_what_the_running_statistics_give():
    x, statistics = torch.randn(2, 64, 3), running()
    ours, _ = renormalized(x, statistics, torch.tensor(warmth_after(100, 100)), 0.1)
    torch.testing.assert_close(ours, normalized(x, statistics), rtol=1e-4, atol=1e-5)


def test_renorm_after_the_warmup_beyond_bounds_is_clipped():
    x, statistics = 100 * torch.randn(2, 64, 1) + 1e4, Running(torch.zeros(2, 1, 1), torch.ones(2, 1, 1))
    ours, _ = renormalized(x, statistics, torch.tensor(warmth_after(10, 10)), 0.1)
    torch.testing.assert_close(ours.mean(dim=1), torch.full((2, 1), MOST_SHIFT), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(ours.std(dim=1, correction=0), torch.full((2, 1), MOST_SCALE), rtol=1e-3, atol=1e-3)


def test_renorm_gradient_is_that_of_batch_norm_scaled():  # Ioffe 2017: r and d are constants
    x = torch.randn(2, 16, 3, dtype=torch.float64, requires_grad=True)
    statistics = Running(*(part.double() for part in running()))
    given = torch.randn(2, 16, 3, dtype=torch.float64)
    ours, _ = renormalized(x, statistics, torch.tensor(warmth_after(1, 1)), 0.1)
    slope = torch.autograd.grad((ours * given).sum(), x)[0]
    var, mean = torch.var_mean(x, dim=1, keepdim=True, correction=0)
    scale = ((var + EPS) / (statistics.var + EPS)).sqrt().detach()
    plain = torch.autograd.grad((((x - mean) / (var + EPS).sqrt()) * scale * given).sum(), x)[0]
    torch.testing.assert_close(slope, plain)


def test_renorm_critics_learn_and_act_modes_differ_and_only_learning_moves_statistics():  # checklist 59
    torch.manual_seed(0)
    critics = RenormCritics((5,), BOX, NET, None, 0.01)
    statistics, obs, actions = critics.start(), 3 * torch.randn(32, 5) + 1, torch.randn(32, 2)
    acting, same = critics(obs, actions, statistics)
    learning, moved = critics(obs, actions, statistics, torch.tensor(warmth_after(0, 10)))
    assert not torch.allclose(acting, learning)
    assert all(torch.equal(a, b) for x, y in zip(same, statistics, strict=True) for a, b in zip(x, y, strict=True))
    assert all(not torch.equal(x.mean, y.mean) for x, y in zip(moved, statistics, strict=True))


RULES: dict[str, tuple[Rule, Any]] = {
    "adam": (Rule(), torch.optim.Adam),
    "small_beta1": (Rule(0.5), partial(torch.optim.Adam, betas=(0.5, 0.999))),
    "no_beta1": (Rule(0.0), partial(torch.optim.Adam, betas=(0.0, 0.999))),
    "adamw": (Rule(decay=0.3), partial(torch.optim.AdamW, weight_decay=0.3)),
    "rmsprop": (Rule(0.0, 0.99, corrected=False), torch.optim.RMSprop),
}


@pytest.mark.parametrize("name", RULES)
def test_updates_in_place_and_as_a_function_equal_torch(name):
    rule, optimizer = RULES[name]
    begun, target = torch.linspace(-1, 1, 5), torch.tensor([3.0, 1.0, -2.0, 0.0, 1.0])
    theirs = nn.Parameter(begun.clone())
    torchs = optimizer([theirs], lr=0.05, eps=1e-3)
    ours, vector, adam = Trained.of(begun.clone()), begun.clone(), Adam.zeros(begun, rule)
    for count in range(1, 30):
        torchs.zero_grad()
        (theirs - target).square().sum().backward()
        torchs.step()
        slope = lambda v: gradient(lambda v: ((v - target).square().sum(), None), v)[0]  # noqa: E731
        ours.step(slope(ours.vector), torch.tensor(pace(0.05, 1e-3, count, rule)), None, rule)
        vector, adam = adam_step(vector, slope(vector), adam, torch.tensor(0.05), 1e-3, rule)
    torch.testing.assert_close(ours.vector, theirs.data, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(vector, theirs.data, rtol=1e-5, atol=1e-6)


def test_spec_names_the_rule_and_weight_decay_is_of_adamw_alone():
    base = {"kind": "control", "name": "x", "env": {"id": "CartPole-v1"}, "train": {"frames": 1000}}

    def algorithm(**fields: Any) -> Any:
        return load({**base, "algorithm": fields}).spec.algorithm

    assert rule_of(algorithm(name="ppo")) == Rule()
    assert rule_of(algorithm(name="crossq")) == Rule(0.5)
    assert rule_of(algorithm(name="sac", optimizer="adamw", weight_decay=0.1)) == Rule(decay=0.1)
    assert rule_of(algorithm(name="a2c", optimizer="rmsprop")) == Rule(0.0, 0.99, corrected=False)
    assert "optimizer" not in algorithm(name="dqn").model_dump()  # specs from before it keep their hash
    with pytest.raises(SpecError, match="expected nothing, because `optimizer: adam` has none"):
        algorithm(name="dqn", weight_decay=0.1)


@pytest.mark.parametrize("name", ["dqn", "sac", "td3", "ppo", "a2c"])
def test_optimizer_of_the_spec_is_the_one_that_moves_weights(name):
    def after(**fields: Any) -> Tensor:
        small = {"start": 16, "batch": 8, "buffer": 100, "horizon": 16} if name in ("dqn", "sac", "td3") else {}
        small |= {"horizon": 16, "minibatch": 16} if name == "ppo" else {}
        env = make_vector(EnvSpec(id="Pendulum-v1" if name == "td3" else "CartPole-v1", num_envs=2), 2)
        learner = learner_on(env, name, net={"hidden": [8]}, **small, **fields)
        learner.step(0.0)
        assert learner.updates > 0
        return torch.cat([p.detach().flatten() for p in learner.net.parameters()])

    plain = after()
    for fields in ({"optimizer": "adamw", "weight_decay": 0.5}, {"optimizer": "rmsprop"}):
        assert not torch.equal(plain, after(**fields))
    assert torch.equal(plain, after(optimizer="adamw", weight_decay=0.0))


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("name", ["ppo", "a2c"])
def test_critic_lr_moves_the_layers_of_the_value_alone(name, shared):
    env = make_vector(EnvSpec(id="CartPole-v1", num_envs=2), 2)
    small = {"horizon": 16, "minibatch": 16} if name == "ppo" else {}
    learner = learner_on(env, name, net={"hidden": [8], "shared": shared}, lr=0.0, critic_lr=1e-3, **small)
    before = {key: p.detach().clone() for key, p in learner.net.named_parameters()}
    learner.step(0.0)
    moved = {key for key, p in learner.net.named_parameters() if not torch.equal(p, before[key])}
    assert moved == {key for key in before if key.startswith("value_")}
    assert any(key.startswith("value_trunk") for key in moved) != shared


def test_shaped_network_of_a_vector_equals_the_network_and_differentiates():
    torch.manual_seed(0)
    net = SoftActor((5,), DISCRETE, NET)
    shaped, obs = FunctionalNet(net), torch.randn(4, 5)
    assert torch.equal(shaped(shaped.start())(obs).logprobs, net(obs).logprobs)
    slope, _ = gradient(lambda v: (shaped(v)(obs).logprobs[:, 0].sum(), None), shaped.start())
    net(obs).logprobs[:, 0].sum().backward()
    torch.testing.assert_close(slope, torch.cat([p.grad.reshape(-1) for p in net.parameters() if p.grad is not None]))


def test_copied_and_restore_keep_the_same_tensors():
    trained = Trained.of(torch.arange(3.0))
    saved = copied((trained, [running()]))
    statistics, view = running(seed=9), trained.vector[1:]
    trained.vector.zero_()
    assert not torch.equal(statistics.mean, saved[1][0][0])
    restore((trained, [statistics]), saved)
    assert view.tolist() == [1.0, 2.0]
    assert torch.equal(statistics.mean, running().mean)
    assert math.isclose(saved[0][0][2].item(), 2.0)


def test_products_in_bf16_are_near_and_what_was_set_before_comes_back():
    before = torch.get_float32_matmul_precision()
    a, b = torch.randn(2, 256, 256, generator=torch.Generator().manual_seed(0))
    exact = a.double() @ b.double()
    for precision, most in (("fp32", 1e-4), ("bf16", 0.5)):
        with products(precision):
            assert (a @ b - exact).abs().max() < most
            assert torch.get_float32_matmul_precision() == ("highest" if precision == "fp32" else "medium")
    assert torch.get_float32_matmul_precision() == before
