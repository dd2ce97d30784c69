"""Rainbow's parts: projection and losses of distributions against brute force, noisy layers, masks, refusals."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from on_policy_envs import Forbidding
from probe_envs import OneStep, learner_on, sync

from palestra.control.envs.stepping import Stepper
from palestra.control.evaluation import evaluate
from palestra.control.memory.replay import ReplayBatch
from palestra.control.nets.trunks import NoisyLinear, affine
from palestra.rl.losses import atoms_loss, projected, quantile_loss
from palestra.spec.load import load
from palestra.spec.validate import SpecError

torch.set_num_threads(1)

SMALL: dict[str, Any] = {"horizon": 16, "start": 24, "batch": 32, "buffer": 90, "replay_ratio": 1 / 3, "gamma": 0.9}
ATOMS = {"atoms": 5, "low": -1.0, "high": 1.0}
RAINBOW = {"distributional": ATOMS, "noisy": 0.5, "dueling": True, "n_step": 2, "prioritized": {}, "epsilon": 0.0}


def by_loop(probs: np.ndarray, returns: np.ndarray, support: np.ndarray) -> np.ndarray:
    """Algorithm 1 of Bellemare et al. 2017: each return's mass goes to the atoms at its two sides."""
    made = np.zeros((len(probs), len(support)))
    width = (support[-1] - support[0]) / (len(support) - 1)
    for row, (masses, places) in enumerate(zip(probs, returns, strict=True)):
        for mass, place in zip(masses, places, strict=True):
            at = (min(max(place, support[0]), support[-1]) - support[0]) / width
            lower = min(int(np.floor(at)), len(support) - 2)
            made[row, lower] += mass * (lower + 1 - at)
            made[row, lower + 1] += mass * (at - lower)
    return made


@given(st.integers(0, 2**32 - 1), st.integers(2, 60), st.floats(-50, 50), st.floats(0.1, 100), st.floats(0, 1))
@settings(max_examples=100, deadline=None)
def test_projection_equals_the_loop_over_returns_and_keeps_mass_and_inner_mean(seed, atoms, low, width, discount):
    random = np.random.default_rng(seed)
    support = np.linspace(low, low + width, atoms)
    probs = random.dirichlet(np.ones(atoms), 4)
    returns = random.normal(0, width, (4, 1)) + discount * support
    made = projected(*map(torch.from_numpy, (probs, returns, support))).numpy()
    np.testing.assert_allclose(made, by_loop(probs, returns, support), atol=1e-9)
    np.testing.assert_allclose(made.sum(axis=1), 1, atol=1e-9)
    inside = np.clip(returns, support[0], support[-1])
    np.testing.assert_allclose(made @ support, (probs * inside).sum(axis=1), atol=1e-8 * (1 + abs(low) + width))


def test_atoms_loss_is_the_divergence_and_its_gradient_the_difference_of_probabilities():
    random = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 7, generator=random, dtype=torch.float64, requires_grad=True)
    probs = torch.rand(6, 7, generator=random, dtype=torch.float64).softmax(dim=1)
    probs[0] = torch.eye(7, dtype=torch.float64)[3]  # also where probabilities are 0
    loss = atoms_loss(logits, probs)
    expected = torch.distributions.kl_divergence(
        torch.distributions.Categorical(probs=probs), torch.distributions.Categorical(logits=logits)
    )
    torch.testing.assert_close(loss, expected)
    loss.sum().backward()
    torch.testing.assert_close(logits.grad, (logits.softmax(dim=1) - probs).detach())
    assert atoms_loss(probs.log().clamp_min(-1e3), probs).abs().max() < 1e-12


def test_quantile_loss_equals_its_formula():
    random = np.random.default_rng(0)
    values, targets = random.normal(0, 2, (3, 4)), random.normal(0, 2, (3, 6))
    expected = []
    for row in range(3):
        total = 0.0
        for i, theta in enumerate(values[row]):
            for target in targets[row]:
                u = target - theta
                huber = 0.5 * u * u if abs(u) <= 1 else abs(u) - 0.5
                total += abs((2 * i + 1) / 8 - (u < 0)) * huber / 6
        expected.append(total)
    found = quantile_loss(torch.from_numpy(values), torch.from_numpy(targets))
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-12)


def test_noisy_layer_is_a_linear_one_with_the_outer_product_of_its_noise():
    torch.manual_seed(0)
    layer = NoisyLinear(5, 3, 0.5).double()
    x, noise = torch.randn(4, 5).double(), torch.randn(4, 8).double()  # of each row its own
    for row in range(4):
        before, after = noise[row, :5], noise[row, 5:]
        weight = layer.weight + layer.weight_std * after[:, None] * before[None]
        expected = x[row] @ weight.T + layer.bias + layer.bias_std * after
        torch.testing.assert_close(affine(x, layer, noise)[row], expected)
        torch.testing.assert_close(affine(x, layer, noise[row])[row], expected)  # or one for all
    torch.testing.assert_close(affine(x, layer), layer(x))
    assert layer.weight_std.unique().tolist() == [pytest.approx(0.5 / 5**0.5)]


def rainbow(**given: Any) -> Any:
    return learner_on(sync(Forbidding, 3), "dqn", net={"hidden": [16, 16]}, **{**SMALL, **RAINBOW, **given})


def test_noise_is_sampled_for_every_environment_and_step_and_is_off_in_evaluation():
    made = learner_on(sync(lambda: OneStep(lambda shown, action: 0.0), 3), "dqn", **SMALL, noisy=0.5, epsilon=0.0)
    layers = made.explore(8).layers
    assert len(layers.flatten(0, 1).unique(dim=0)) == 24
    assert not torch.equal(layers, made.explore(8).layers)
    # sign(x) √|x| has mean 0 and the square of it E|x| = √(2/π).
    many = made.layer_noise(4000)
    assert float(many.mean()) == pytest.approx(0, abs=0.02)
    assert float(many.square().mean()) == pytest.approx((2 / np.pi) ** 0.5, abs=0.02)
    obs = torch.full((3, 1), 0.3)
    with torch.no_grad():
        noisy = made.net.q(obs, layers[0])
        assert len(noisy.unique(dim=0)) == 3  # the same observation, three environments
        made.net.advantage_head.bias_std.fill_(100.0)  # noise that would decide alone
        best = made.net.q(obs).argmax(dim=1)
        assert all(torch.equal(made.policy.actions(obs), best) for _ in range(5))
        acted = torch.stack([made.act(obs, made.explore(1), 0, 1.0) for _ in range(20)])
        assert len(acted.unique()) == 2


def test_scales_of_noise_are_learned_and_updates_differ_in_noise():
    made = rainbow()
    before = made.net.value_head.weight_std.detach().clone()
    seen = []
    update = made._update
    made._update = lambda batches, rates, totals, noise: seen.append(noise) or update(batches, rates, totals, noise)
    for _ in range(2):
        made.step(0.0)
    assert not torch.equal(before, made.net.value_head.weight_std)
    assert len(torch.cat(seen).flatten(0, 1).unique(dim=0)) == 3 * made.updates


def test_masked_actions_are_never_taken_nor_valued():
    made = rainbow()
    for _ in range(3):
        made.step(0.0)
    assert made.updates > 0
    evaluate(made.policy, Stepper(sync(Forbidding, 3)), 6, seed=1)  # it raises at a forbidden action


def test_targets_of_atoms_are_the_projected_distribution_of_the_best_action():
    made = learner_on(
        sync(lambda: OneStep(lambda shown, action: 0.0), 3), "dqn", **SMALL, distributional=ATOMS, double=False
    )
    logits = torch.tensor([[0.0, 0, 0, 0, 5.0], [5.0, 0, 0, 0, 0]])  # the first action returns about 1, the other -1
    made.target.vector.zero_()
    made.target.net.advantage_head.bias.data.copy_(logits.flatten())
    rows = torch.zeros(0, dtype=torch.long)
    obs, actions, rewards = torch.zeros(2, 1), torch.tensor([0, 1]), torch.tensor([-0.25, 0.5])
    batch = ReplayBatch(obs, actions, rewards, obs, torch.tensor([0.5, 0.0]), None, rows)
    support = np.linspace(-1, 1, 5)
    probs = logits[0].softmax(dim=0).double().numpy()
    expected = by_loop(np.stack([probs, probs]), np.stack([-0.25 + 0.5 * support, 0.5 + 0 * support]), support)
    np.testing.assert_allclose(made.targets(batch).numpy(), expected, atol=1e-6)


@pytest.mark.parametrize(
    ("algorithm", "net", "says"),
    [
        ({"noisy": 0.5}, {"recurrent": {}}, "net.recurrent does not support it"),
        ({"distributional": {"atoms": 11, "low": 1, "high": 1}}, {}, "expected less than high = 1"),
        ({"distributional": {"atoms": 11, "low": 0}}, {}, "high"),
        ({"distributional": {"atoms": 11, "low": 0, "high": 1, "quantiles": 3}}, {}, "quantiles"),
        ({"noisy": 0}, {}, "noisy"),
    ],
)
def test_spec_that_does_not_fit_is_refused(algorithm, net, says):
    base = {"kind": "control", "name": "x", "env": {"id": "CartPole-v1"}, "train": {"frames": 1000}}
    with pytest.raises(SpecError, match=says):
        load({**base, "algorithm": {"name": "dqn", **algorithm}, "net": net})


def test_recurrent_network_learns_atoms():
    sequence = {"sequence": {"length": 4, "burn_in": 2}, "batch": 32, "start": 32}
    made = learner_on(
        sync(lambda: OneStep(lambda shown, action: 1.0), 2),
        "dqn",
        net={"hidden": [8], "recurrent": {"cell": "gru", "size": 8}},
        **{**SMALL, **sequence, "distributional": ATOMS, "lr": 1e-2, "replay_ratio": 0.5, "horizon": 64},
    )
    for _ in range(3):
        metrics = made.step(0.0)
    assert metrics["q"] == pytest.approx(1.0, abs=0.1)
