"""The compiled update computes what the eager one does, sees schedules move, and is nobody else's."""

import shutil
from functools import partial
from typing import NamedTuple

import pytest
import torch
from envs import Identity
from gymnasium.vector import AutoresetMode
from probe_envs import Walk, ppo_on, sync
from torch._dynamo.utils import counters

from palestra.control.algorithms.on_policy import Rates
from palestra.control.algorithms.ppo import METRICS, PPO
from palestra.control.nets.trunks import THIN, affine, product

torch.set_num_threads(1)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="compiling needs a C++ compiler"),
]

RATES = Rates(torch.tensor(3e-4), torch.tensor(0.2), torch.tensor(0.01))


def identity_ppo(compile: bool, **spec: object) -> PPO:
    env = sync(partial(Identity, "discrete"), 4)
    return ppo_on(env, compile=compile, horizon=32, minibatch=32, net={"hidden": [16], "shared": True}, **spec)


@pytest.fixture(scope="module")
def compiled() -> PPO:
    ppo = identity_ppo(compile=True)
    ppo.step(0.0)
    return ppo


def test_trace_of_a_hundred_updates_eager_and_compiled_are_close(compiled):
    eager = identity_ppo(compile=False)
    eager.flat.vector.copy_(compiled.flat.vector)
    batch = eager.prepare(eager.collect())
    traces = []
    for ppo in (eager, compiled):
        start, adam, trace = ppo.flat.vector.clone(), type(ppo.adam).zeros(ppo.flat.vector), []
        for i in range(100):
            rows = batch.rows(slice(32 * (i % 4), 32 * (i % 4 + 1)))
            vector, adam, metrics = ppo._update(adam, rows, RATES)
            ppo.flat.vector.copy_(vector)
            trace.append(metrics)
        traces.append((torch.stack(trace), ppo.flat.vector.clone()))
        ppo.flat.vector.copy_(start)
    torch.testing.assert_close(traces[0][0], traces[1][0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(traces[0][1], traces[1][1], rtol=1e-4, atol=1e-4)
    assert (traces[0][1] - eager.flat.vector).abs().max() > 1e-2  # it went somewhere


def test_first_minibatch_compiled_has_ratio_one_within_rounding(compiled):
    batch = compiled.prepare(compiled.collect()).rows(slice(0, 32))
    _, _, metrics = compiled._update(compiled.adam, batch, RATES)
    named = dict(zip(METRICS, metrics.tolist(), strict=True))
    assert abs(named["approx_kl"]) < 1e-6
    assert named["clip_fraction"] == 0.0


def test_rates_that_move_take_effect_without_compiling_again(compiled):
    batch = compiled.prepare(compiled.collect()).rows(slice(0, 32))
    graphs = counters["stats"]["unique_graphs"]
    moved = {}
    for lr in (1e-3, 1e-2, 0.0, 0.5e-3):
        rates = Rates(torch.tensor(lr), torch.tensor(0.1 + lr), torch.tensor(lr))
        vector, _, _ = compiled._update(compiled.adam, batch, rates)
        moved[lr] = float((vector - compiled.flat.vector).norm())
    compiled.step(0.5)
    assert counters["stats"]["unique_graphs"] == graphs
    assert moved[0.0] == 0
    assert moved[1e-2] == pytest.approx(10 * moved[1e-3], rel=0.05)
    assert moved[1e-3] == pytest.approx(2 * moved[0.5e-3], rel=0.05)


def test_two_learners_of_different_specs_do_not_share_a_graph(compiled):
    """Same network and shapes, so only numbers of the spec, which the graphs hold as constants, tell them apart."""
    other = identity_ppo(compile=True, value_coef=5.0, max_grad_norm=None)
    other.flat.vector.copy_(compiled.flat.vector)
    eager = identity_ppo(compile=False, value_coef=5.0, max_grad_norm=None)
    eager.flat.vector.copy_(compiled.flat.vector)
    batch = eager.prepare(eager.collect()).rows(slice(0, 32))
    expected, _, _ = eager.update(eager.adam, batch, RATES)
    vector, _, metrics = other._update(other.adam, batch, RATES)
    torch.testing.assert_close(vector, expected, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(compiled._update(compiled.adam, batch, RATES)[2][-1], metrics[-1])


def test_dummy_steps_after_a_rollout_without_any_are_masked():
    """Five steps an episode and rollouts of four: the first has no dummy step, the second has."""
    learners = [
        ppo_on(
            sync(lambda: Walk([1.0] * 5), 4, AutoresetMode.NEXT_STEP),
            compile=compile,
            horizon=4,
            minibatch=16,
            net={"hidden": [8]},
        )
        for compile in (False, True)
    ]
    for _ in range(3):
        eager, compiled = (ppo.step(0.0) for ppo in learners)
        assert compiled == pytest.approx(eager, rel=1e-4, abs=1e-5)
    assert not learners[0].collector.valid.all()


class Weights(NamedTuple):
    """What `affine` reads of a linear layer."""

    weight: torch.Tensor
    bias: torch.Tensor


@pytest.mark.parametrize(("inputs", "outputs"), [(3, 20), (20, 1), (THIN, 20), (20, THIN), (THIN + 1, 20), (1, 1)])
def test_thin_products_compiled_equal_plain_ones_and_their_gradients_too(inputs, outputs):
    drawn = torch.Generator().manual_seed(0)
    x, stacked, weight, bias = (
        torch.randn(*shape, generator=drawn)
        for shape in ((2, 6, inputs), (2, inputs, outputs), (outputs, inputs), (outputs,))
    )

    def total(x, stacked, weight, bias):
        return product(x, stacked).sin().sum() + affine(x[0], Weights(weight, bias)).cos().sum()

    slopes = torch.func.grad_and_value(total, argnums=(0, 1, 2, 3))
    graph = torch.compile(lambda *given: slopes(*given), fullgraph=True, dynamic=False)
    torch.testing.assert_close(graph(x, stacked, weight, bias), slopes(x, stacked, weight, bias), rtol=1e-5, atol=1e-5)
