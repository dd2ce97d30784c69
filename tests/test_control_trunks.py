"""What reads observations: images scaled once, convolutions, layer norm, graphs of the spec and their errors."""

import math

import numpy as np
import pytest
import torch
from gymnasium import spaces
from probe_envs import policy_for

from palestra.control.nets.trunks import Images, Trunk
from palestra.control.scaling import ObsScale
from palestra.errors import UsageError
from palestra.spec.shape import NetSpec

torch.set_num_threads(1)


def net(**given: object) -> NetSpec:
    return NetSpec.model_validate(given)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((4, 84, 84), 64 * 7 * 7),
        ((84, 84, 3), 64 * 7 * 7),
        ((1, 36, 36), 64),
        ((4, 84, 84, 3), 64 * 7 * 7),  # a stack of color images
        ((4, 3, 84, 84), 64 * 7 * 7),
        ((84, 84), 64 * 7 * 7),
    ],
)
def test_auto_images_of_any_layout_go_through_the_nature_network(shape, expected):
    trunk = Trunk(shape, net(hidden=[512]))
    assert isinstance(trunk.front, Images)
    assert trunk.front.size == expected
    assert trunk(torch.zeros(2, *shape, dtype=torch.uint8)).shape == (2, 512)
    assert trunk.size == 512


@pytest.mark.parametrize("shape", [(7,), (4, 6), (2, 3, 4), (35, 35, 3), (4, 100)])
def test_auto_what_is_no_image_goes_through_hidden_layers_alone(shape):
    trunk = Trunk(shape, net(hidden=[32]))
    assert trunk.front is None
    assert trunk(torch.zeros(3, *shape)).shape == (3, 32)


@pytest.mark.parametrize("kind", ["nature", "impala"])
def test_image_channels_last_equals_channels_first(kind):
    torch.manual_seed(0)
    first = Trunk((3, 40, 48), net(trunk=kind))
    last = Trunk((40, 48, 3), net(trunk=kind))
    last.load_state_dict(first.state_dict())
    image = torch.randint(0, 256, (2, 3, 40, 48), dtype=torch.uint8)
    torch.testing.assert_close(last(image.permute(0, 2, 3, 1)), first(image))


def test_impala_has_the_layers_of_the_paper():
    trunk = Trunk((4, 84, 84), net(trunk="impala", hidden=[256]))
    assert trunk.front.size == 32 * 11 * 11
    assert sum(isinstance(m, torch.nn.Conv2d) for m in trunk.modules()) == 15


@pytest.mark.parametrize("shape", [(4,), (30, 30, 3)])
def test_nature_observations_too_small_are_refused(shape):
    with pytest.raises(UsageError, match=r"net.trunk: nature"):
        Trunk(shape, net(trunk="nature"))


@pytest.mark.parametrize("kind", ["mlp", "nature", "impala"])
def test_white_image_is_scaled_by_255_exactly_once(kind):
    """Checklist 23: the network sees 1 for white, whatever reads it, and floats as they are."""
    seen = []
    trunk = Trunk((3, 36, 36), net(trunk=kind))
    for module in trunk.modules():
        if isinstance(module, torch.nn.Conv2d):
            module.register_forward_pre_hook(lambda module, inputs: seen.append(float(inputs[0].detach().max())))
    whole = torch.full((1, 3, 36, 36), 255, dtype=torch.uint8)
    torch.testing.assert_close(trunk(whole), trunk(torch.ones(1, 3, 36, 36)))
    assert seen[:1] == ([] if kind == "mlp" else [1.0])


def test_image_with_obs_scale_is_not_divided_again():
    scale = ObsScale((3, 36, 36), 10.0)
    trunk = Trunk((3, 36, 36), net(), obs_scale=scale)
    plain = Trunk((3, 36, 36), net())
    plain.load_state_dict({k: v for k, v in trunk.state_dict().items() if not k.startswith("obs_scale")})
    image = torch.randint(0, 9, (2, 3, 36, 36), dtype=torch.uint8)
    torch.testing.assert_close(trunk(image), plain(image.float()))


def test_obs_scale_is_saved_with_the_weights_and_applied_first():
    scale = ObsScale((2,), 10.0)
    scale.update(torch.tensor([[0.0, 10.0], [2.0, 30.0]]))
    trunk = Trunk((2,), net(hidden=[8]), obs_scale=scale)
    obs = torch.tensor([[1.0, 20.0], [3.0, 0.0]])
    torch.testing.assert_close(trunk(obs), trunk.mlp(scale(obs)))
    assert "obs_scale.mean" in trunk.state_dict()


def test_layer_norm_stands_before_each_nonlinearity():
    trunk = Trunk((5,), net(hidden=[7, 6], layer_norm=True, activation="relu"))
    x = torch.randn(4, 5)
    expected = x
    for layer in trunk.mlp.layers:
        h = layer(expected)
        h = (h - h.mean(1, keepdim=True)) / torch.sqrt(h.var(1, keepdim=True, correction=0) + 1e-5)
        expected = torch.relu(h)
    torch.testing.assert_close(trunk(x), expected)


@pytest.mark.parametrize("kind", ["nature", "impala"])
def test_convolutions_orthogonal_weights_are_applied(kind):
    """Checklist 28: to the layers that are used, with gain √2."""
    trunk = Trunk((4, 40, 40), net(trunk=kind))
    for module in trunk.modules():
        if isinstance(module, torch.nn.Conv2d | torch.nn.Linear):
            weight = module.weight.detach().flatten(1)
            gram = weight @ weight.T if weight.shape[0] <= weight.shape[1] else weight.T @ weight
            torch.testing.assert_close(gram, 2 * torch.eye(len(gram)), atol=1e-4, rtol=0)
            assert not module.bias.any()
    other = Trunk((4, 40, 40), net(trunk=kind, orthogonal=False))
    assert any(m.bias.any() for m in other.modules() if isinstance(m, torch.nn.Conv2d))


def test_critic_hidden_gives_the_critic_its_own_widths():
    policy = policy_for(spaces.Box(-1, 1, (3,)), spaces.Discrete(2), hidden=[8], critic_hidden=[16, 5])
    assert policy.net.trunk.size == 8
    assert policy.net.value_trunk.size == 5
    assert policy.net.value(torch.zeros(2, 3)).shape == (2,)


@pytest.mark.parametrize("log_std", [0.0, -1.5])
def test_log_std_begins_with_what_the_spec_says(log_std):
    """Checklist 34: the same in every state, a parameter, and gradients reach it."""
    policy = policy_for(spaces.Box(-1, 1, (3,)), spaces.Box(-1, 1, (2,), np.float32), log_std=log_std)
    assert policy.net.log_std.tolist() == [log_std] * 2
    (gradient,) = torch.autograd.grad(policy.net.policy(torch.zeros(4, 3)).entropy().sum(), policy.net.log_std)
    assert gradient.tolist() == [4.0, 4.0]


DIAMOND = {
    "layers": {
        "left": {"LazyLinear": {"out_features": 6}},
        "bent": {"Tanh": {}},
        "right": {"Linear": {"in_features": 4, "out_features": 3}},
        "both": {"LazyLinear": {"out_features": 5}},
        "end": {"ReLU": {}},
    },
    "join": {"right": ["obs"], "both": ["bent", "right"]},
}


def test_graph_of_joined_layers_computes_what_it_says():
    trunk = Trunk((4,), net(graph=DIAMOND))
    layers, x = trunk.front.nodes, torch.randn(3, 4)
    expected = torch.relu(layers["both"](torch.cat([torch.tanh(layers["left"](x)), layers["right"](x)], dim=1)))
    torch.testing.assert_close(trunk(x), expected)
    assert trunk.size == 5
    assert not any(isinstance(p, torch.nn.UninitializedParameter) for p in trunk.parameters())
    weight = layers["left"].weight.detach()
    torch.testing.assert_close(weight.T @ weight, 2 * torch.eye(4), atol=1e-5, rtol=0)


def test_graph_of_convolutions_reads_images_scaled_once():
    graph = {"layers": {"conv": {"LazyConv2d": {"out_channels": 2, "kernel_size": [3, 3], "stride": 2}}}}
    trunk = Trunk((3, 9, 9), net(graph=graph))
    assert trunk.size == 2 * 4 * 4
    white = torch.full((1, 3, 9, 9), 255, dtype=torch.uint8)
    torch.testing.assert_close(trunk(white), trunk.front.nodes["conv"](torch.ones(1, 3, 9, 9)).flatten(1))


@pytest.mark.parametrize("kind", ["discrete", "box"])
def test_graph_policy_starts_almost_uniform_and_has_gradients_everywhere(kind):
    actions = spaces.Discrete(3) if kind == "discrete" else spaces.Box(-1, 1, (2,), np.float32)
    policy = policy_for(spaces.Box(-1, 1, (4,)), actions, graph=DIAMOND)
    distribution, values = policy.net(torch.randn(20, 4))
    if kind == "discrete":
        assert distribution.entropy().min() > 0.99 * math.log(3)
    loss = distribution.log_prob(distribution.mode()).sum() + values.sum() + distribution.entropy().sum()
    assert len(torch.autograd.grad(loss, list(policy.net.parameters()))) > 0


@pytest.mark.parametrize(
    ("graph", "says"),
    [
        ({"layers": {}}, "at least one layer"),
        ({"layers": {"a": {"Linearr": {}}}}, r"layers\.a\.Linearr: torch.nn has no layer"),
        ({"layers": {"a": {"functional": {}}}}, r"layers\.a\.functional: torch.nn has no layer"),
        ({"layers": {"a": {"Linear": {"out": 3}}}}, r"layers\.a\.Linear: cannot be made with"),
        ({"layers": {"a": {"Linear": {"in_features": 3, "out_features": 2}}}}, r"layers\.a: does not accept"),
        ({"layers": {"a": {"Tanh": {}, "ReLU": {}}}}, r"layers\.a: expected one class"),
        ({"layers": {"a": {"Dropout": {}}}}, r"layers\.a\.Dropout: .*training"),
        ({"layers": {"a": {"LazyBatchNorm1d": {}}}}, r"layers\.a\.LazyBatchNorm1d: .*training"),
        ({"layers": {"a": {"Tanh": {}}, "b": {"Tanh": {}}}, "join": {"b": ["obs"]}}, r"layers\.a: no later layer"),
        ({"layers": {"a": {"Tanh": {}}}, "join": {"c": ["obs"]}}, r"join\.c: there is no such layer"),
        ({"layers": {"a": {"Tanh": {}}}, "join": {"a": ["b"]}}, r"join\.a: expected layers that come before"),
        ({"layers": {"a": {"Tanh": {}}}, "join": {"a": []}}, r"join\.a: expected layers that come before"),
        ({"layers": {"obs": {"Tanh": {}}}}, r"layers\.obs: the name"),
        ({"layers": {"a.b": {"Tanh": {}}}}, r"layers\.a\.b: a layer cannot have this name"),
        ({"layers": {"a": {"GRU": {"input_size": 4, "hidden_size": 2}}}}, r"layers\.a: returns a tuple"),
    ],
)
def test_graph_that_cannot_be_is_refused_with_its_key(graph, says):
    with pytest.raises(UsageError, match=says):
        Trunk((4,), net(graph=graph))
