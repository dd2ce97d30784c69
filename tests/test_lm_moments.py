"""Moments in 8 bits and on the host, weights in bf16: codes, rounding, exact resume, curves beside FP32."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from palestra.errors import PalestraError
from palestra.lm import moments
from palestra.lm.batch import Batch, score
from palestra.lm.model import Transformer
from palestra.lm.moments import BLOCK, code, dequantize, moments_of, quantize, round_stochastically
from palestra.lm.optim import Optimizer
from palestra.runs.tree import flatten, unflatten
from palestra.spec.lm import AdamWSpec
from palestra.spec.schedule import Schedule
from palestra.spec.shape import Shape

CPU = torch.device("cpu")
SHAPE = Shape(layers=2, width=64, heads=4, kv_heads=2, mlp=96, context=64, vocab=72, tied=False)
RATE = Schedule(shape="constant", start=3e-3)
FP32 = AdamWSpec(name="adamw", lr=RATE)
EIGHT = AdamWSpec(name="adamw", lr=RATE, state="8bit")
HOST = AdamWSpec(name="adamw", lr=RATE, offload=True)
BOTH = AdamWSpec(name="adamw", lr=RATE, state="8bit", offload=True)


def make(seed: int = 0, *, narrow: bool = False) -> Transformer:
    model = Transformer(SHAPE)
    model.initialize(torch.Generator().manual_seed(seed))
    if narrow:
        for p in model.parameters():
            p.data = p.data.bfloat16() if p.ndim >= 2 else p.data
    return model


def give(model: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator).to(p.device, p.dtype)


# --- 8 bits


@pytest.mark.parametrize("signed", [True, False])
def test_code_is_ascending_and_has_each_decade_half_as_fine_as_the_next(signed):
    numbers = code(signed, CPU)
    assert len(numbers) == 256
    assert (numbers.diff() > 0).all()
    assert 0.0 in numbers
    assert numbers[-1] == 1.0
    counts = [int(((numbers > 10.0**-k) & (numbers < 10.0 ** (1 - k))).sum()) for k in range(1, 8)]
    assert counts == [(1 if signed else 2) * 2 ** (7 - k) for k in range(1, 8)]
    if signed:
        assert torch.equal(numbers[:127], -numbers[128:255].flip(0))


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 3 * BLOCK), st.integers(0, 10**6), st.booleans(), st.sampled_from([1e-30, 1e-8, 1.0, 1e6]))
def test_quantized_number_is_the_nearest_of_its_block(count, seed, signed, scale):
    x = torch.randn(count, generator=torch.Generator().manual_seed(seed)).pow(5) * scale
    x = x if signed else x.abs()
    codes, scales = quantize(x, signed=signed)
    back = dequantize(codes, scales, signed=signed)

    largest = torch.cat([block.abs().max().expand(len(block)) for block in x.split(BLOCK)])
    assert (codes.dtype, codes.shape, len(scales)) == (torch.uint8, x.shape, -(-count // BLOCK))
    distance = (x[:, None].double() / largest[:, None] - code(signed, CPU)).abs().min(1).values * largest
    if not signed:  # what would be 0 is the smallest above it
        distance = torch.where(back > 3.3e-7 * largest, distance, 3.3e-7 * largest)
    assert ((back - x).abs() <= distance * (1 + 1e-4) + 1e-6 * largest.double()).all()
    # The largest gap between neighbors, halved, bounds the error of all; the largest of a block is exact.
    assert ((back - x).abs() <= (0.0071 if signed else 0.0036) * largest).all()
    assert torch.equal(back.abs().max(), x.abs().max()) or signed


def test_quantized_zeros_stay_and_small_squares_do_not_become_zero():
    x = torch.zeros(2 * BLOCK)
    assert not dequantize(*quantize(x, signed=True), signed=True).any()
    x[:3] = torch.tensor([1.0, 1e-20, 1e-3])
    back = dequantize(*quantize(x, signed=False), signed=False)
    assert (back[:3] > 0).all()
    assert not back[3:].any()


def test_moments_in_8_bits_take_a_quarter_and_small_parameters_keep_fp32():
    matrix, norm = moments_of(torch.zeros(64, 128), 8), moments_of(torch.zeros(128), 8)
    assert matrix["exp_avg"].dtype == matrix["exp_avg_sq"].dtype == torch.uint8
    assert sum(t.nbytes for t in matrix.values()) == 2 * 64 * 128 + 2 * 4 * 32 + 4
    assert norm["exp_avg"].dtype == torch.float32
    assert norm.keys() == {"step", "exp_avg", "exp_avg_sq"}


class Fresh(TorchDispatchMode):
    """The most numbers in a tensor that was allocated while it watched."""

    def __init__(self, *known: Tensor):
        super().__init__()
        self.known, self.most = {t.untyped_storage().data_ptr() for t in known}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, list | tuple) else [out]:
            if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() not in self.known:
                self.most = max(self.most, tensor.numel())
        return out


def test_step_in_8_bits_never_has_all_moments_in_fp32(monkeypatch):
    monkeypatch.setattr(moments, "CHUNK", 4 * BLOCK)
    model = nn.Linear(128, 96, bias=False)
    optimizer = Optimizer(model, BOTH.model_copy(update={"max_grad_norm": None}), 2)
    give(model, 0)
    known = [model.weight, model.weight.grad, *optimizer.adam["weight"].values()]
    with Fresh(*known) as fresh:
        optimizer.step(0.0)
    assert 0 < fresh.most <= 4 * BLOCK


# --- on the host


@pytest.mark.parametrize("narrow", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("spec", "other"), [(HOST, FP32), (BOTH, EIGHT)], ids=["fp32 moments", "8 bits"])
def test_offloaded_moments_give_the_same_numbers_to_the_bit(monkeypatch, spec, other, narrow):
    models = make(narrow=narrow), make(narrow=narrow)
    optimizers = [Optimizer(model, each, 6, 3) for model, each in zip(models, (spec, other), strict=True)]
    assert optimizers[0].adam["embed"]["exp_avg"].device == CPU
    for step in range(6):
        if narrow:  # the rounding's noise is that of a chunk
            monkeypatch.setattr(moments, "CHUNK", 8 * BLOCK)
        for model, optimizer in zip(models, optimizers, strict=True):
            if not narrow:
                monkeypatch.setattr(moments, "CHUNK", (8 if optimizer.offload else 2**16) * BLOCK)
            give(model, step)
            optimizer.step(step / 6)
    assert all(map(torch.equal, models[0].parameters(), models[1].parameters()))
    first, second = (flatten(optimizer.state())[1] for optimizer in optimizers)
    assert [leaf.carrier.tobytes() for leaf in first] == [leaf.carrier.tobytes() for leaf in second]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize(("spec", "other"), [(HOST, FP32), (BOTH, EIGHT)], ids=["fp32 moments", "8 bits"])
def test_moments_on_the_host_of_a_gpu_give_the_same_numbers(monkeypatch, spec, other):
    monkeypatch.setattr(moments, "CHUNK", 8 * BLOCK)
    models = make().cuda(), make().cuda()
    optimizers = [Optimizer(model, each, 6) for model, each in zip(models, (spec, other), strict=True)]
    assert optimizers[0].adam["embed"]["exp_avg"].is_pinned()
    for step in range(6):
        for model, optimizer in zip(models, optimizers, strict=True):
            give(model, step)
            optimizer.step(step / 6)
    assert all(map(torch.equal, models[0].parameters(), models[1].parameters()))
    first, second = (flatten(optimizer.state())[1] for optimizer in optimizers)
    assert [leaf.carrier.tobytes() for leaf in first] == [leaf.carrier.tobytes() for leaf in second]


# --- weights in bf16


def test_rounding_is_to_the_neighbors_and_its_mean_is_the_number():
    x = torch.tensor([1.0, -1.0, 1.001, -1.001, 3e-5, 1.0 + 2**-7 + 2**-9, 0.0])
    rounded = torch.stack([round_stochastically(x, key) for key in range(4000)]).double()
    exact = x == x.bfloat16()
    assert (rounded[:, exact] == x[exact]).all()
    for column, number in zip(rounded.t(), x.tolist(), strict=True):
        values = column.unique()
        assert len(values) <= 2
        gap = float(values.max() - values.min())
        assert values.min() <= number <= values.max()
        assert abs(column.mean() - number) <= 4 * gap / 2 / 4000**0.5
    assert torch.equal(round_stochastically(x, 5), round_stochastically(x, 5))


def test_rounding_keeps_what_is_not_finite():
    x = torch.tensor([float("inf"), float("-inf"), 3.3e38])
    found = round_stochastically(x, 0)
    assert found[0] == x[0]
    assert found[1] == x[1]


def test_steps_too_small_for_bf16_move_weights_on_average_where_the_nearest_would_not():
    model = nn.Linear(64, 64, bias=False)
    nn.init.ones_(model.weight)
    model.bfloat16()
    spec = AdamWSpec(name="adamw", lr=Schedule(shape="constant", start=1e-4), weight_decay=0.0)
    optimizer = Optimizer(model, spec, 200, 0)
    nearest = torch.ones(())
    for step in range(200):
        model.weight.grad = torch.ones_like(model.weight)
        optimizer.step(step / 200)
        nearest = (nearest - 1e-4).bfloat16().float()
    assert nearest == 1.0
    assert model.weight.dtype == torch.bfloat16
    assert model.weight.float().mean().item() == pytest.approx(1 - 200 * 1e-4, abs=1e-3)


def test_gradient_norm_of_bf16_is_that_of_fp32():
    model = make(narrow=True)
    give(model, 0)
    exact = torch.cat([p.grad.double().flatten() for p in model.parameters()]).norm()
    assert Optimizer(model, FP32, 1, 0).step(0.0)["grad_norm"] == pytest.approx(float(exact), rel=1e-5)


# --- state


@pytest.mark.parametrize("narrow", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("spec", [FP32, EIGHT, BOTH], ids=["fp32 moments", "8 bits", "8 bits on the host"])
def test_state_loaded_continues_to_the_bit(spec, narrow):
    model = make(narrow=narrow)
    optimizer = Optimizer(model, spec, 8, 7)
    for step in range(8):
        if step == 3:
            weights = {name: p.detach().clone() for name, p in model.named_parameters()}
            tree, leaves = flatten({"state": optimizer.state(), "weights": weights})
            saved = unflatten(tree, {leaf.key: leaf.carrier.copy() for leaf in leaves})
        give(model, step)
        optimizer.step(step / 8)

    again = make(1, narrow=narrow)
    again.load_state_dict(saved["weights"])
    resumed = Optimizer(again, spec, 8, 7)
    resumed.load_state(saved["state"])
    for step in range(3, 8):
        give(again, step)
        resumed.step(step / 8)
    assert all(map(torch.equal, model.parameters(), again.parameters()))


def test_rounding_of_another_seed_or_step_is_another():
    ends = []
    for seed, first in ((1, 0), (1, 0), (2, 0), (1, 1)):
        model = make(narrow=True)
        give(model, 0)
        Optimizer(model, FP32, 8, seed).step(first / 8)
        ends.append(model.embed.detach())
    same, again, *others = ends
    assert torch.equal(same, again)
    assert not any(torch.equal(same, other) for other in others)


@pytest.mark.parametrize(("first", "second"), [(FP32, EIGHT), (EIGHT, FP32)])
def test_state_of_another_precision_is_refused(first, second):
    with pytest.raises(PalestraError, match=r"moments of embed have another precision: keep `optim\.state`"):
        Optimizer(make(), second, 4).load_state(Optimizer(make(), first, 4).state())


# --- curves


def learned(seed: int, spec: AdamWSpec, steps: int, *, narrow: bool = False) -> float:
    """The mean loss of the last twenty steps on sequences of a random Markov chain."""
    model, generator = make(seed, narrow=narrow), torch.Generator().manual_seed(seed)
    follows = torch.randn(72, 72, generator=generator).mul(2).softmax(-1)
    optimizer, losses = Optimizer(model, spec, steps, seed), []
    for step in range(steps):
        tokens = [torch.randint(72, (8,), generator=generator)]
        for _ in range(15):
            tokens.append(torch.multinomial(follows[tokens[-1]], 1, generator=generator)[:, 0])
        batch = Batch.pack(torch.stack(tokens, 1).tolist())
        loss = -score(model, batch, entropy=False).logprobs.sum() / (8 * 15)
        loss.backward()
        losses.append(float(loss.detach()))
        optimizer.step(step / steps)
    return sum(losses[-20:]) / 20


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1000, 1001, 1002])
def test_curves_in_8_bits_and_bf16_end_where_those_of_fp32_do(seed):
    plain = learned(seed, FP32, 300)
    assert plain < 3.6  # it began at ln 72 = 4.28
    assert learned(seed, EIGHT, 300) == pytest.approx(plain, rel=0.01)
    assert learned(seed, FP32, 300, narrow=True) == pytest.approx(plain, rel=0.01)
    assert learned(seed, BOTH, 300, narrow=True) == pytest.approx(plain, rel=0.01)


def test_curve_in_8_bits_and_bf16_follows_fp32_for_some_steps():
    plain = learned(1000, FP32, 40)
    assert plain < 4.2
    assert learned(1000, BOTH, 40, narrow=True) == pytest.approx(plain, rel=0.01)
