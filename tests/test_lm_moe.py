"""Mixture of experts against a loop over tokens and experts; the losses and biases that keep loads even."""

import copy

import pytest
import torch
import torch.nn.functional as F
from conftest import BF16
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from palestra.lm.batch import Batch, score
from palestra.lm.layers import swiglu
from palestra.lm.model import Transformer
from palestra.lm.moe import (
    MoE,
    balance_loss,
    choose,
    expert_load,
    grouped,
    router_terms,
    selection_bias,
    update_bias,
    z_loss,
)
from palestra.spec.shape import MoESpec, Shape

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
SPEC = MoESpec(experts=6, active=2, mlp=10)
VARIANTS = [
    SPEC,
    SPEC.model_copy(update={"active": 1, "normalize": False}),
    SPEC.model_copy(update={"activation": "bilinear", "shared": 2, "normalize": False}),
    SPEC.model_copy(update={"active": 6, "bias_rate": 0.1}),
    SPEC.model_copy(update={"active": 3, "bias_rate": 0.1, "shared": 1}),
]


def make(spec: MoESpec, width: int = 12, seed: int = 0) -> MoE:
    """Experts with random weights, and random biases where there are any."""
    moe, generator = MoE(width, spec), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in moe.state_dict().values():
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.3)
    return moe


def dense(moe: MoE, x: Tensor) -> Tensor:
    """Every token through each of its experts, one by one."""
    spec, rows = moe.spec, []
    for token in x:
        p = (moe.router @ token).softmax(0)
        ranked = p if moe.bias is None else p + moe.bias
        best = sorted(range(spec.experts), key=lambda e: -ranked[e].item())[: spec.active]
        total = sum(p[e] for e in best) if spec.normalize else 1.0
        out = torch.zeros_like(token)
        for e in best:
            gate, up = (moe.gate_up[e] @ token).chunk(2)
            gate = gate if spec.activation == "bilinear" else gate * gate.sigmoid()
            out = out + p[e] / total * (moe.down[e] @ (gate * up))
        if moe.shared is not None:
            gate, up = (moe.shared.gate_up.weight @ token).chunk(2)
            gate = gate if spec.activation == "bilinear" else gate * gate.sigmoid()
            out = out + moe.shared.down.weight @ (gate * up)
        rows.append(out)
    return torch.stack(rows)


def results(function, moe: MoE, x: Tensor) -> dict[str, Tensor]:
    """The output, and the gradients of a weighted sum of it by the input and every parameter."""
    x = x.clone().requires_grad_()
    moe.zero_grad()
    out = function(x)
    (out * torch.linspace(-1, 1, out.numel(), device=x.device).view_as(out)).sum().backward()
    return {"out": out.detach(), "x": x.grad, **{name: p.grad for name, p in moe.named_parameters()}}


def random_router(layers: int, tokens: int, experts: int, seed: int = 0) -> Tensor:
    return torch.randn(layers, tokens, experts, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("tokens", [1, 3, 40])
@pytest.mark.parametrize("spec", VARIANTS, ids=range(len(VARIANTS)))
def test_experts_equal_a_loop_over_tokens_with_their_gradients(spec, tokens):
    moe = make(spec).double()
    x = torch.randn(tokens, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    found, expected = results(lambda x: moe(x)[0], moe, x), results(lambda x: dense(moe, x), moe, x)

    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-9, atol=1e-12, msg=name)
    if spec.active > 1:
        assert found["router"].abs().max() > 1e-3


def test_experts_of_no_tokens_give_none():
    out, router = make(SPEC)(torch.zeros(0, 12))

    assert (out.shape, router.shape) == ((0, 12), (0, 6))


@pytest.mark.parametrize(
    ("dtype", "few", "many"), [(torch.float32, 16, 90), pytest.param(torch.bfloat16, 64, 200, marks=BF16)]
)
def test_a_tokens_output_does_not_depend_on_who_shares_its_experts(dtype, few, many):
    """To the bit. The sizes are those at which the CPU's products of few rows round differently."""
    moe = make(MoESpec(experts=8, active=2, mlp=384), width=768).to(dtype)
    x = torch.randn(many, 768, generator=torch.Generator().manual_seed(1)).to(dtype)

    with torch.no_grad():
        assert torch.equal(moe(x[:few])[0], moe(x)[0][:few])


@pytest.mark.parametrize("spec", VARIANTS, ids=range(len(VARIANTS)))
def test_half_precision_copy_computes_what_full_precision_weights_do(spec):
    """The trainer keeps FP32 weights, the generator a bf16 copy: they must choose the same experts."""
    moe = make(spec, width=64)
    x = torch.randn(200, 64, generator=torch.Generator().manual_seed(1)).bfloat16()

    for mine, theirs in zip(moe(x), copy.deepcopy(moe).bfloat16()(x), strict=True):
        assert torch.equal(mine, theirs)
    assert moe(x)[1].dtype == torch.float32


def test_choose_of_equals_takes_the_first():
    router = torch.tensor([[1.0, 2, 2, 0, 2], [0, 0, 0, 0, 0], [3, 1, 3, 1, 3]])

    assert choose(router, 2, None)[1].tolist() == [[1, 2], [0, 1], [0, 2]]
    assert (choose(torch.zeros(50, 256), 8, None)[1] == torch.arange(8)).all()


def test_bias_changes_the_choice_and_not_the_weights():
    router, bias = torch.tensor([[0.0, 1.0, 2.0]]), torch.tensor([1.0, 0.0, 0.0])

    weights, chosen = choose(router, 2, bias)

    assert chosen.tolist() == [[0, 2]]
    torch.testing.assert_close(weights, router.softmax(-1)[:, [0, 2]])


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.integers(1, 4), st.booleans(), st.integers(0, 99))
def test_balance_loss_equals_its_definition_for_each_sequence(lengths, active, biased, seed):
    experts, layers = 4, 2
    router = random_router(layers, sum(lengths), experts, seed).requires_grad_()
    bias = random_router(1, layers, experts, seed + 1)[0] if biased else None

    found = balance_loss(router, lengths, active, bias)

    expected, start = torch.zeros((), dtype=torch.float64), 0
    for length in lengths:
        for layer in range(layers):
            rows = router[layer, start : start + length]
            chosen = choose(rows, active, None if bias is None else bias[layer])[1].flatten().tolist()
            for e in range(experts):
                fraction = chosen.count(e) * experts / (active * length)
                expected = expected + length * fraction * rows.softmax(-1)[:, e].mean()
        start += length
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(*(torch.autograd.grad(value, router)[0] for value in (found, expected)))


def test_balance_loss_is_one_a_token_and_layer_where_loads_are_even_and_more_where_not():
    even = torch.eye(4).repeat(6, 1)[None].double()  # every expert is the first choice of every fourth token
    one = torch.tensor([9.0, 0, 0, 0]).repeat(24, 1)[None].double()

    torch.testing.assert_close(balance_loss(even, [12, 12], 1) / 24, torch.tensor(1.0).double())
    assert balance_loss(one, [24], 1) / 24 > 3.9


def test_losses_of_a_batch_are_the_sums_of_its_parts():
    router = random_router(3, 20, 5)

    for loss in (lambda r, lengths: balance_loss(r, lengths, 2), lambda r, lengths: z_loss(r)):
        parts = loss(router[:, :9], [4, 5]) + loss(router[:, 9:], [11])
        torch.testing.assert_close(loss(router, [4, 5, 11]), parts)


def test_z_loss_is_the_squared_log_of_the_sum_of_exponentials():
    router = torch.tensor([[[0.0, 0.0], [1.0, 2.0]], [[-1.0, 1.0], [3.0, 3.0]]]).double()

    expected = sum(torch.tensor(row).exp().sum().log() ** 2 for layer in router.tolist() for row in layer)
    torch.testing.assert_close(z_loss(router), expected.double(), rtol=1e-6, atol=0)


def test_expert_load_counts_the_tokens_of_every_expert():
    router = random_router(3, 50, 6)
    bias = random_router(1, 3, 6, 1)[0]

    load = expert_load(router, 2, bias)

    for layer in range(3):
        chosen = choose(router[layer], 2, bias[layer])[1].flatten()
        assert load[layer].tolist() == torch.bincount(chosen, minlength=6).tolist()


def model_of(spec: MoESpec) -> Transformer:
    model = Transformer(Shape(layers=2, width=16, heads=2, mlp=1, context=64, vocab=30, moe=spec))
    model.initialize(torch.Generator().manual_seed(0))
    return model


def test_update_bias_moves_every_expert_by_the_rate_towards_the_mean_load():
    model = model_of(MoESpec(experts=4, active=1, mlp=8, bias_rate=0.25))

    update_bias(model, torch.tensor([[4.0, 0, 2, 2], [0, 8, 0, 0]]))
    update_bias(model, torch.tensor([[2.0, 2, 2, 2], [0, 8, 0, 0]]))

    assert selection_bias(model).tolist() == [[-0.25, 0.25, 0, 0], [0.5, -0.5, 0.5, 0.5]]


def test_update_bias_step_by_step_evens_the_loads():
    model = model_of(MoESpec(experts=8, active=2, mlp=8, bias_rate=0.002))
    router = random_router(2, 400, 8).float() + torch.linspace(0, 2, 8)  # far more tokens for the later experts

    def excess() -> float:
        load = expert_load(router, 2, selection_bias(model))
        return (load.max() / load.mean() - 1).item()

    before = excess()
    for _ in range(300):
        update_bias(model, expert_load(router, 2, selection_bias(model)))

    assert before > 1
    assert excess() < 0.1


def test_update_bias_without_biases_changes_nothing():
    model = model_of(SPEC)

    update_bias(model, torch.ones(2, 6))

    assert selection_bias(model) is None
    assert not [name for name in model.state_dict() if "bias" in name]


def test_state_names_shared_experts_and_biases_where_there_are_any():
    names = model_of(MoESpec(experts=4, active=1, mlp=8, bias_rate=0.1, shared=2)).state_dict()

    of_layer = {name.removeprefix("layers.1.mlp.") for name in names if name.startswith("layers.1.mlp.")}
    assert of_layer == {"router", "gate_up", "down", "bias", "shared.gate_up.weight", "shared.down.weight"}
    assert names["layers.1.mlp.shared.gate_up.weight"].shape == (2 * 2 * 8, 16)


@pytest.mark.parametrize("parts", [[[0, 1, 2]], [[0], [2, 1]]])
def test_router_terms_of_a_model_weigh_its_losses_and_add_up_over_micro_batches(parts):
    spec = MoESpec(experts=4, active=2, mlp=8, balance=0.5, z_loss=0.25, bias_rate=0.1)
    model = model_of(spec)
    batch = Batch.pack([[1, 2, 3], [4, 5, 6, 7, 8], [9, 10]])

    found = [router_terms(model, score(model, part).router, part) for part in (batch.select(part) for part in parts)]

    router = score(model, batch).router
    balance, z = balance_loss(router, batch.lengths, 2, selection_bias(model)), z_loss(router)
    torch.testing.assert_close(sum(terms.total for terms in found), 0.5 * balance + 0.25 * z)
    torch.testing.assert_close(sum(terms.terms["router/balance"] for terms in found), balance / 2)
    torch.testing.assert_close(sum(terms.load for terms in found), expert_load(router, 2, selection_bias(model)))
    assert found[0].total.requires_grad
    assert not found[0].terms["router/z"].requires_grad


def test_router_terms_of_a_dense_model_are_none():
    model = Transformer(Shape(layers=1, width=8, heads=1, mlp=8, context=8, vocab=10))
    model.initialize(torch.Generator().manual_seed(0))
    batch = Batch.pack([[1, 2]])

    assert router_terms(model, score(model, batch).router, batch) is None


DEVICES = [
    pytest.param("cpu", torch.float32, 1e-6, id="cpu"),
    pytest.param("cuda", torch.bfloat16, 0.01, id="gpu", marks=needs_gpu),
]


@pytest.mark.parametrize(("device", "dtype", "tolerance"), DEVICES)
@pytest.mark.parametrize("counts", [[1, 0, 0, 0], [3, 0, 17, 9], [0, 0, 0, 5], [64, 64, 64, 64]], ids=str)
@pytest.mark.parametrize("biased", [False, True])
def test_grouped_product_equals_the_loop_over_experts_with_its_gradients(counts, biased, device, dtype, tolerance):
    generator = torch.Generator().manual_seed(0)
    sizes = [(sum(counts), 16), (4, 2 * 24, 16), (4, 16, 24), *([(4, 2 * 24), (4, 16)] if biased else [])]
    inputs = [torch.randn(size, generator=generator).to(device, dtype).requires_grad_() for size in sizes]
    ends = torch.tensor(counts, device=device).cumsum(0)
    rows, gate_up, down, *biases = inputs

    found = grouped(rows, ends, gate_up, down, swiglu, *biases)
    parts = zip(rows.split(counts), gate_up, down, *(biases or ([None] * 4, [None] * 4)), strict=True)
    expected = torch.cat([F.linear(swiglu(F.linear(part, a, c)), b, d) for part, a, b, c, d in parts])

    compared = [(found, expected)]
    weights = torch.randn(found.shape, generator=generator).to(device, dtype)
    compared += zip(*(torch.autograd.grad((out * weights).sum(), inputs) for out in (found, expected)), strict=True)
    for mine, theirs in compared:
        assert (mine - theirs).float().norm() <= tolerance * theirs.float().norm()


@needs_gpu
@pytest.mark.parametrize("spec", VARIANTS, ids=range(len(VARIANTS)))
@pytest.mark.parametrize("tokens", [1, 7, 300])
def test_experts_in_bf16_on_the_gpu_equal_those_in_fp32(spec, tokens):
    spec = spec.model_copy(update={"mlp": 24})
    moe = make(spec, width=64).bfloat16().float().to("cuda")  # so that both precisions choose the same experts
    x = torch.randn(tokens, 64, generator=torch.Generator().manual_seed(1)).to("cuda", torch.bfloat16)

    found = results(lambda x: moe(x)[0], moe, x)
    expected = results(lambda x: moe(x.float())[0].bfloat16(), moe, x)

    for name, tensor in expected.items():
        error = (found[name].float() - tensor.float()).norm() / tensor.float().norm().clamp(min=1e-6)
        assert error < 0.02, (name, error)


@needs_gpu
def test_experts_inside_a_cuda_graph_follow_new_inputs():
    """Nothing waits for the device, whichever experts the tokens choose."""
    moe = make(MoESpec(experts=8, active=2, mlp=64, shared=1, bias_rate=0.1), width=64).to("cuda", torch.bfloat16)
    inputs = [torch.randn(32, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    static, graph = inputs[0].clone(), torch.cuda.CUDAGraph()
    with torch.no_grad():
        moe(static)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            out, _ = moe(static)
        for x in inputs:
            static.copy_(x)
            graph.replay()
            assert torch.equal(out, moe(x)[0])
