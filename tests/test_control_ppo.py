"""PPO's update: its loss and gradient, its first ratio, its epochs, its optimizer, its state."""

import math
from copy import deepcopy
from functools import partial
from itertools import product

import numpy as np
import pytest
import torch
from conftest import fast_only
from envs import Identity
from gymnasium.vector import AutoresetMode
from probe_envs import Scripted, ppo_on, sync

from palestra.control.algorithms.on_policy import Rates, RolloutBatch
from palestra.control.algorithms.ppo import METRICS, PPO
from palestra.control.optim import Adam, FlatNet, adam_step, clip_norm
from palestra.control.trainer import ControlTrainer
from palestra.rl.distributions import Categorical
from palestra.spec.kinds.control import ControlSpec

torch.set_num_threads(1)

KINDS = ("discrete", "multi_discrete", "multi_binary", "box")
RATES = Rates(torch.tensor(3e-4), torch.tensor(0.2), torch.tensor(0.01))
LOOSE = Rates(torch.tensor(1e-2), torch.tensor(0.2), torch.tensor(0.01))


def disturbed(ppo: PPO, size: float = 0.3) -> PPO:
    """With weights far from the initial ones, where policy and values differ between observations."""
    noise = torch.randn(ppo.flat.vector.shape, generator=torch.Generator().manual_seed(1))
    ppo.flat.vector.add_(size * noise)
    return ppo


def identity_ppo(kind: str, shared: bool = False, horizon: int = 16, **spec) -> PPO:
    return disturbed(ppo_on(sync(partial(Identity, kind), 6), horizon=horizon, net={"shared": shared}, **spec))


def in_float64(ppo: PPO, batch: RolloutBatch, rates: Rates) -> tuple[RolloutBatch, Rates]:
    """Makes the learner's network compute in double precision; gives the batch and the rates for it."""
    ppo.flat = FlatNet(ppo.policy.net.double())
    wide = RolloutBatch(*(x if x is None or not x.is_floating_point() else x.double() for x in batch))
    return wide, Rates(*(None if rate is None else rate.double() for rate in rates))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("minibatch", "shared"),
    fast_only(product([2, 3, 8, 16, 24, 32, 48, 96], [False, True]), (3, False), (8, True), (32, True), (96, False)),
)
def test_first_minibatch_of_any_size_has_ratio_exactly_one(kind, shared, minibatch):
    ppo = identity_ppo(kind, shared, minibatch=minibatch)
    batch = ppo.prepare(ppo.collect())
    for start in range(0, 96, minibatch):  # none has been learned from yet, so each might be the first
        rows = batch.rows(slice(start, start + minibatch))
        _, _, metrics = ppo.update(ppo.adam, rows, RATES)
        named = dict(zip(METRICS, metrics.tolist(), strict=True))
        assert named["approx_kl"] == 0.0
        assert named["clip_fraction"] == 0.0
        assert torch.equal(ppo.policy.net(rows.obs)[0].log_prob(rows.actions), rows.logprobs)


def test_first_minibatch_at_benchmark_size_has_ratio_exactly_one():
    ppo = identity_ppo("discrete", horizon=128, minibatch=128)
    metrics = ppo.learn(ppo.prepare(ppo.collect()), 0.0)
    assert metrics["approx_kl"] > 0  # later ones have learned
    batch = ppo.prepare(ppo.collect()).rows(slice(0, 128))
    assert torch.equal(ppo.policy.net(batch.obs)[0].log_prob(batch.actions), batch.logprobs)


def test_loss_discrete_actions_equals_the_formula_row_by_row():
    ppo = identity_ppo("discrete", minibatch=96, value_coef=0.7, clip_value=0.3)
    generator = torch.Generator().manual_seed(2)
    batch = ppo.prepare(ppo.collect())
    batch = batch._replace(
        logprobs=batch.logprobs + 0.3 * torch.randn(96, generator=generator),
        values=batch.values + 0.5 * torch.randn(96, generator=generator),
    )
    loss, metrics = ppo.loss(ppo.policy.net, batch, RATES)
    a = batch.advantages.double().numpy()
    a = (a - a.mean()) / (a.std() + 1e-8)
    terms: dict[str, list[float]] = {"policy": [], "value": [], "entropy": [], "kl": [], "clipped": []}
    with torch.no_grad():
        distribution, values = ppo.policy.net(batch.obs)
    assert isinstance(distribution, Categorical)
    for i in range(96):
        p = distribution.logprobs[i].double().exp().tolist()
        ratio = p[int(batch.actions[i])] / math.exp(float(batch.logprobs[i]))
        terms["policy"].append(-min(ratio * a[i], min(max(ratio, 0.8), 1.2) * a[i]))
        v, old, target = float(values[i]), float(batch.values[i]), float(batch.returns[i])
        near = old + min(max(v - old, -0.3), 0.3)
        terms["value"].append(max((v - target) ** 2, (near - target) ** 2))
        terms["entropy"].append(-sum(x * math.log(x) for x in p))
        terms["kl"].append(ratio - 1 - math.log(ratio))
        terms["clipped"].append(abs(ratio - 1) > 0.2)
    means = {name: float(np.mean(values)) for name, values in terms.items()}
    assert 0.1 < means["clipped"] < 0.9
    assert float(loss.detach()) == pytest.approx(
        means["policy"] + 0.7 * means["value"] - 0.01 * means["entropy"], abs=1e-5
    )
    assert metrics.tolist() == pytest.approx(list(means.values()), abs=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shared", [False, True])
def test_gradient_of_the_whole_loss_equals_finite_differences(kind, shared):
    net = {"hidden": [5], "shared": shared}
    ppo = ppo_on(sync(partial(Identity, kind), 6), horizon=4, minibatch=24, clip_value=0.2, net=net)
    disturbed(ppo)
    batch, rates = in_float64(ppo, ppo.prepare(ppo.collect()), RATES)
    noise = torch.randn(2, 24, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    batch = batch._replace(logprobs=batch.logprobs + 0.2 * noise[0], values=batch.values + 0.2 * noise[1])
    gradient, _ = ppo.flat.gradient(lambda net: ppo.loss(net, batch, rates))

    @torch.no_grad()
    def loss_at(i: int, moved: float) -> float:
        before = float(ppo.flat.vector[i])
        ppo.flat.vector[i] = before + moved
        loss = float(ppo.loss(ppo.policy.net, batch, rates)[0])
        ppo.flat.vector[i] = before
        return loss

    h = 1e-6
    numeric = [(loss_at(i, h) - loss_at(i, -h)) / (2 * h) for i in range(len(gradient))]
    torch.testing.assert_close(gradient, torch.tensor(numeric, dtype=torch.float64), rtol=1e-5, atol=1e-7)
    assert (gradient != 0).float().mean() > 0.8


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("max_grad_norm", [0.5, None])
def test_updates_equal_torch_adam_with_clipped_gradients(shared, max_grad_norm):
    ppo = identity_ppo("box", shared, minibatch=96, max_grad_norm=max_grad_norm)
    batch, rates = in_float64(ppo, ppo.prepare(ppo.collect()), LOOSE)
    reference, adam = deepcopy(ppo.policy.net), Adam.zeros(ppo.flat.vector)
    optimizer = torch.optim.Adam(reference.parameters(), lr=float(rates.lr), eps=ppo.spec.adam_eps)
    for _ in range(20):
        vector, adam, metrics = ppo.update(adam, batch, rates)
        ppo.flat.vector.copy_(vector)
        optimizer.zero_grad()
        ppo.loss(reference, batch, rates)[0].backward()
        most = math.inf if max_grad_norm is None else max_grad_norm
        norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), most)
        optimizer.step()
        torch.testing.assert_close(metrics[-1], norm)
    expected = torch.cat([p.detach().reshape(-1) for p in reference.parameters()])
    torch.testing.assert_close(ppo.flat.vector, expected, rtol=1e-9, atol=1e-9)
    assert float(adam.count) == 20


def test_adam_step_single_precision_equals_torch():
    generator = torch.Generator().manual_seed(0)
    parameters = torch.randn(500, generator=generator)
    reference = torch.nn.Parameter(parameters.clone())
    optimizer = torch.optim.Adam([reference], lr=1e-2, eps=1e-5)
    adam = Adam.zeros(parameters)
    for i in range(100):
        reference.grad = torch.randn(500, generator=generator) * 10.0 ** (i % 5 - 4)
        optimizer.step()
        parameters, adam = adam_step(parameters, reference.grad, adam, torch.tensor(1e-2), 1e-5)
        torch.testing.assert_close(parameters, reference.detach(), rtol=0, atol=1e-6)  # a ten-thousandth of one step


def test_update_changes_nothing_but_what_it_returns():
    ppo = identity_ppo("discrete", minibatch=96)
    batch = ppo.prepare(ppo.collect())
    before, adam = ppo.flat.vector.clone(), Adam(*(x.clone() for x in ppo.adam))
    first = ppo.update(ppo.adam, batch, RATES)
    second = ppo.update(ppo.adam, batch, RATES)
    assert torch.equal(ppo.flat.vector, before)
    assert all(torch.equal(a, b) for a, b in zip(ppo.adam, adam, strict=True))
    assert torch.equal(first[0], second[0])


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e9])
def test_clip_norm_gradient_of_any_size_is_at_most_the_limit_and_keeps_its_direction(scale):
    gradient = scale * torch.tensor([3.0, 4.0])
    clipped, norm = clip_norm(gradient, 0.5)
    assert float(norm) == pytest.approx(5 * scale)
    assert float(clipped.norm()) == pytest.approx(min(0.5, 5 * scale), rel=1e-5)
    assert float(clipped[1] / clipped[0]) == pytest.approx(4 / 3)
    assert clip_norm(gradient, None)[0] is gradient


def test_learn_every_row_exactly_once_an_epoch_in_another_order():
    ppo = ppo_on(sync(Scripted, 4), horizon=24, minibatch=16, epochs=3)
    rollout = ppo.collect()
    everything = sorted(map(tuple, rollout.obs.flatten(0, 1).tolist()))
    assert len(set(everything)) == 96
    update, seen = ppo._update, []

    def recorded(adam, batch, rates):
        seen.append([tuple(row) for row in batch.obs.tolist()])
        return update(adam, batch, rates)

    ppo._update = recorded
    metrics = ppo.learn(ppo.prepare(rollout), 0.0)
    assert metrics["updates"] == len(seen) == 18
    epochs = [[row for minibatch in seen[i : i + 6] for row in minibatch] for i in (0, 6, 12)]
    assert all(sorted(epoch) == everything for epoch in epochs)
    assert all(epochs[i] != epochs[j] for i, j in ((0, 1), (0, 2), (1, 2)))
    assert all(epoch != everything for epoch in epochs)


@pytest.mark.parametrize("value", [0.0, 0.1, -3e7])
@pytest.mark.parametrize("masked", [False, True])
def test_gradient_equal_advantages_normalized_is_exactly_zero(value, masked):
    ppo = identity_ppo("discrete", minibatch=96, value_coef=0.0)
    batch = ppo.prepare(ppo.collect())._replace(advantages=torch.full((96,), value))
    if masked:
        batch = batch._replace(valid=torch.arange(96) % 7 != 0)
    silent = RATES._replace(entropy=torch.tensor(0.0))
    gradient, _ = ppo.flat.gradient(lambda net: ppo.loss(net, batch, silent))
    assert not gradient.any()


@pytest.mark.parametrize("kind", KINDS)
def test_loss_dummy_rows_change_nothing(kind):
    ppo = identity_ppo(kind, minibatch=96, clip_value=0.2)
    batch = ppo.prepare(ppo.collect())
    batch = batch._replace(logprobs=batch.logprobs + 0.2 * torch.randn(96, generator=torch.Generator().manual_seed(4)))
    valid = torch.arange(96) % 5 != 0
    alone = batch.rows(valid)
    garbage = batch._replace(
        obs=torch.where(valid[:, None], batch.obs, 7.0),
        logprobs=torch.where(valid, batch.logprobs, 50.0),
        advantages=torch.where(valid, batch.advantages, 1e6),
        returns=torch.where(valid, batch.returns, -1e6),
        values=torch.where(valid, batch.values, 1e6),
        valid=valid,
    )
    expected, expected_metrics = ppo.flat.gradient(lambda net: ppo.loss(net, alone, RATES))
    gradient, metrics = ppo.flat.gradient(lambda net: ppo.loss(net, garbage, RATES))
    torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(metrics, expected_metrics, rtol=1e-5, atol=1e-6)


def test_loss_minibatch_of_dummy_rows_alone_is_zero():
    ppo = identity_ppo("discrete", minibatch=96)
    batch = ppo.prepare(ppo.collect())._replace(valid=torch.zeros(96, dtype=torch.bool))
    gradient, metrics = ppo.flat.gradient(lambda net: ppo.loss(net, batch, RATES))
    assert not gradient.any()
    assert not metrics.any()


def test_prepare_environment_with_dummy_steps_masks_also_a_rollout_without_any():
    """A compiled update is not told apart by None: what it is given first, it must be given always."""
    next_step, same_step = (
        ppo_on(sync(lambda: Scripted(6), 2, mode), horizon=1, minibatch=2)
        for mode in (AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP)
    )
    for _ in range(20):
        assert next_step.prepare(next_step.collect()).valid is not None
        assert same_step.prepare(same_step.collect()).valid is None


def test_learn_target_kl_stops_after_the_epoch_that_passed_it():
    runs = {target: identity_ppo("discrete", minibatch=16, epochs=10, target_kl=target) for target in (1e-9, 1e9, None)}
    updates = {target: ppo.learn(ppo.prepare(ppo.collect()), 0.0)["updates"] for target, ppo in runs.items()}
    assert updates == {1e-9: 6, 1e9: 60, None: 60}
    assert torch.equal(runs[1e9].flat.vector, runs[None].flat.vector)


def test_step_schedules_move_with_progress():
    lr = {"shape": "linear", "start": 1e-2, "end": 0.0}
    ppo = identity_ppo("discrete", minibatch=48, lr=lr, epochs=1)
    assert ppo.step(0.25)["lr"] == pytest.approx(7.5e-3)
    before = ppo.flat.vector.clone()
    assert ppo.step(1.0)["lr"] == 0.0
    assert torch.equal(ppo.flat.vector, before)


def test_step_same_seed_gives_the_same_numbers_and_another_seed_others():
    def run(seed: int) -> list[dict[str, float]]:
        ppo = ppo_on(sync(Identity, 4), seed=seed, horizon=16, minibatch=32)
        return [ppo.step(0.0) for _ in range(3)]

    first = run(1)
    assert run(1) == first
    assert run(2) != first


def learner(env: str = "CartPole-v1", **env_spec) -> ControlTrainer:
    spec = ControlSpec.model_validate(
        {
            "kind": "control",
            "name": "probe",
            "env": {"id": env, "num_envs": 4, **env_spec},
            "algorithm": {"name": "ppo", "horizon": 32, "minibatch": 32},
            "train": {"frames": 10_000},
        }
    )
    return ControlTrainer(spec, 5, None, compile=False)


@pytest.mark.parametrize("vectorize", ["auto", "sync"])
def test_state_round_trip_next_step_is_identical(vectorize):
    going = learner(vectorize=vectorize)
    going.begin(None)
    for _ in range(2):
        going.algorithm.step(0.1)
    state = going.state()
    expected = [going.algorithm.step(0.2) for _ in range(2)]
    resumed = learner(vectorize=vectorize)
    resumed.begin(state)
    assert [resumed.algorithm.step(0.2) for _ in range(2)] == expected
    assert torch.equal(resumed.algorithm.flat.vector, going.algorithm.flat.vector)
    assert resumed.episodes.metrics() == going.episodes.metrics()
    # the state is a copy: going on did not change it, so it can be gone back to
    going.begin(state)
    assert [going.algorithm.step(0.2) for _ in range(2)] == expected


def test_state_taking_it_changes_no_number():
    watched, plain = learner(), learner()
    watched.begin(None)
    plain.begin(None)
    for _ in range(3):
        watched.state()
        assert watched.algorithm.step(0.0) == plain.algorithm.step(0.0)
