"""AdamW and Muon against loops in float64, clipping, skipped steps, state, schedules, the moving average."""

import math
from contextlib import suppress

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from palestra.errors import PalestraError
from palestra.lm.layers import Linear
from palestra.lm.model import Transformer
from palestra.lm.optim import COEFFICIENTS, Ema, Optimizer, clip_gradients, orthogonalize, stacked
from palestra.runs.tree import flatten, unflatten
from palestra.spec.lm import AdamWSpec, MuonSpec
from palestra.spec.schedule import Schedule
from palestra.spec.shape import MoESpec, Shape

SHAPE = Shape(
    layers=2,
    width=16,
    heads=4,
    kv_heads=2,
    mlp=24,
    context=32,
    vocab=20,
    tied=False,
    qk_norm="head",
    attention_bias=True,
)
EXPERTS = SHAPE.model_copy(update={"moe": MoESpec(experts=3, active=2, mlp=8, shared=1)})
ADAMW = AdamWSpec(name="adamw", lr=Schedule(shape="cosine", start=0.01, end=0.001, warmup=0.2), max_grad_norm=5.0)
MUON = MuonSpec(name="muon", lr=Schedule(shape="linear", start=0.02, warmup=0.3), max_grad_norm=5.0)
SPECS = pytest.mark.parametrize("spec", [ADAMW, MUON], ids=["adamw", "muon"])
STEPS = 8


def make(shape: Shape = SHAPE, dtype: torch.dtype = torch.float32) -> Transformer:
    model = Transformer(shape, dtype)
    model.initialize(torch.Generator().manual_seed(0))
    return model.to(dtype)


def gradients(model: nn.Module, step: int, scale: float = 1.0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {
        name: scale * torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.dtype)
        for name, p in model.named_parameters()
    }


def give(model: nn.Module, found: dict[str, Tensor]) -> None:
    for name, p in model.named_parameters():
        p.grad = found[name].clone()


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def rates(spec: AdamWSpec | MuonSpec, model: nn.Module) -> list[dict[str, float]]:
    """What each step of a run reports."""
    optimizer, found = Optimizer(model, spec, STEPS), []
    for step in range(STEPS):
        give(model, gradients(model, step))
        found.append(optimizer.step(step / STEPS))
    return found


def clipped(found: dict[str, Tensor], most: float) -> tuple[dict[str, Tensor], float]:
    norm = math.sqrt(sum(float(g.double().square().sum()) for g in found.values()))
    factor = min(1.0, most / (norm + 1e-6))
    return {name: g.double() * factor for name, g in found.items()}, norm


class AdamLoop:
    """AdamW as its paper has it, one parameter at a time."""

    def __init__(self, betas: list[float], eps: float, decay: float):
        self.betas, self.eps, self.decay, self.count, self.mean, self.square = betas, eps, decay, {}, {}, {}

    def step(self, name: str, w: Tensor, g: Tensor, lr: float) -> Tensor:
        b1, b2 = self.betas
        t = self.count[name] = self.count.get(name, 0) + 1
        self.mean[name] = b1 * self.mean.get(name, 0.0) + (1 - b1) * g
        self.square[name] = b2 * self.square.get(name, 0.0) + (1 - b2) * g * g
        w = w * (1 - lr * self.decay) if w.ndim >= 2 else w
        return w - lr * (self.mean[name] / (1 - b1**t)) / ((self.square[name] / (1 - b2**t)).sqrt() + self.eps)


def newton_schulz(matrix: Tensor) -> Tensor:
    """φ of every singular value, five times, through the decomposition."""
    a, b, c = COEFFICIENTS
    u, s, v = torch.linalg.svd(matrix, full_matrices=False)
    s = s / s.norm()
    for _ in range(5):
        s = a * s + b * s**3 + c * s**5
    return u @ s.diag() @ v


# --- AdamW


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.float64, 1e-12)])
@pytest.mark.parametrize("scale", [0.01, 10.0], ids=["unclipped", "clipped"])
def test_adamw_steps_equal_a_loop_in_float64(dtype, tolerance, scale):
    model = make(dtype=dtype)
    optimizer = Optimizer(model, ADAMW, STEPS)
    loop, expected = (
        AdamLoop(ADAMW.betas, ADAMW.eps, ADAMW.weight_decay),
        {n: w.double() for n, w in weights(model).items()},
    )
    for step in range(STEPS):
        found, norm = clipped(gradients(model, step, scale), ADAMW.max_grad_norm)
        give(model, gradients(model, step, scale))
        metrics = optimizer.step(step / STEPS)
        assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-5)
        expected = {name: loop.step(name, w, found[name], metrics["lr"]) for name, w in expected.items()}
    for name, w in weights(model).items():
        torch.testing.assert_close(w.double(), expected[name], rtol=tolerance, atol=tolerance)
    assert all(p.grad is None for p in model.parameters())


@SPECS
def test_decay_without_gradients_shrinks_matrices_and_embeddings_alone(spec):
    model = make(EXPERTS)
    before, optimizer = weights(model), Optimizer(model, spec, STEPS)
    give(model, gradients(model, 0, scale=0.0))
    metrics = optimizer.step(0.5)
    for name, w in weights(model).items():
        lr = metrics["lr"] if isinstance(spec, AdamWSpec) or name in stacked(model) else metrics["adam_lr"]
        if name.endswith(("norm.weight", "bias")):
            assert torch.equal(w, before[name]), name
        else:
            torch.testing.assert_close(w, before[name] * (1 - lr * 0.1), rtol=1e-6, atol=0.0)


# --- Muon


@pytest.mark.parametrize("shape", [(7, 7), (5, 30), (30, 5), (64, 48)])
def test_orthogonalize_singular_values_are_the_iterated_polynomial(shape):
    batch = torch.randn(3, *shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    batch[1] *= 1e-6  # the size of a gradient does not matter
    out = orthogonalize(batch, 5)
    for matrix, got in zip(batch, out, strict=True):
        torch.testing.assert_close(got, newton_schulz(matrix), rtol=1e-8, atol=1e-8)
    values = torch.linalg.svdvals(out)
    wide = torch.linalg.svdvals(batch) / torch.linalg.matrix_norm(batch)[:, None] > 0.01
    assert 0.65 < values[wide].min() <= values[wide].max() < 1.25
    assert torch.equal(orthogonalize(torch.zeros(1, *shape), 5), torch.zeros(1, *shape))


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("shape", [SHAPE, EXPERTS], ids=["dense", "experts"])
def test_muon_steps_equal_a_loop_over_single_matrices(shape, nesterov):
    spec = MUON.model_copy(update={"nesterov": nesterov})
    model = make(shape, torch.float64)
    optimizer = Optimizer(model, spec, STEPS)
    rows = {
        "qkv.weight": (16, 8, 8),
        "mlp.gate_up": (8, 8),
        "shared.gate_up.weight": (8, 8),
        "mlp.gate_up.weight": (24, 24),
    }
    loop, momentum, expected = AdamLoop(spec.betas, spec.eps, spec.weight_decay), {}, weights(model)
    for step in range(STEPS):
        found, _ = clipped(gradients(model, step), spec.max_grad_norm)
        give(model, gradients(model, step))
        metrics = optimizer.step(step / STEPS)
        for name, w in expected.items():
            if not name.startswith("layers") or name.endswith(("norm.weight", "bias", "router")):
                expected[name] = loop.step(name, w, found[name], metrics["adam_lr"])
                continue
            momentum[name] = 0.95 * momentum.get(name, 0.0) + 0.05 * found[name]
            ahead = 0.95 * momentum[name] + 0.05 * found[name] if nesterov else momentum[name]
            parts = next((p for end, p in rows.items() if name.endswith(end)), (w.shape[-2],))
            update = torch.stack([
                torch.cat([newton_schulz(m) * max(1, m.shape[0] / m.shape[1]) ** 0.5 for m in expert.split(parts)])
                for expert in ahead.reshape(-1, *w.shape[-2:])
            ])  # fmt: skip
            expected[name] = w * (1 - metrics["lr"] * 0.1) - metrics["lr"] * update.reshape(w.shape)
    for name, w in weights(model).items():
        torch.testing.assert_close(
            w, expected[name], rtol=1e-6, atol=1e-7, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_muon_few_matrices_at_a_time_gives_the_same(monkeypatch):
    together, apart = make(EXPERTS), make(EXPERTS)
    rates(MUON, together)
    monkeypatch.setattr("palestra.lm.optim.TOGETHER", 1)
    rates(MUON, apart)
    for a, b in zip(together.parameters(), apart.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_muon_agrees_with_torchs_up_to_its_rounding():
    model = nn.Sequential(Linear(32, {"x": 64}))
    nn.init.normal_(model[0].weight, std=0.02)
    other = nn.Parameter(model[0].weight.detach().clone())
    theirs = torch.optim.Muon([other], lr=0.02, weight_decay=0.1, momentum=0.95)
    spec = MuonSpec(name="muon", max_grad_norm=None)
    ours = Optimizer(model, spec, 4)
    for step in range(4):
        give(model, gradients(model, step))
        other.grad = gradients(model, step)["0.weight"]
        ours.step(step / 4)
        theirs.step()
    torch.testing.assert_close(model[0].weight, other, rtol=0.0, atol=4e-4)  # theirs is in bf16: 2⁻⁸ of 0.02, summed


def test_muon_moves_the_matrices_of_layers_alone():
    model = make(EXPERTS)
    moved = set(stacked(model))
    assert moved == {
        f"layers.{i}.{name}"
        for i in range(2)
        for name in (
            "attn.qkv.weight", "attn.o.weight", "mlp.gate_up", "mlp.down", "mlp.shared.gate_up.weight",
            "mlp.shared.down.weight",
        )
    }  # fmt: skip
    state = Optimizer(model, MUON, STEPS).state()
    assert set(state["momentum"]) == moved
    assert set(state["adam"]) == {name for name, _ in model.named_parameters()} - moved


# --- clipping and broken gradients


@settings(deadline=None)
@given(st.lists(st.floats(-100, 100), min_size=3, max_size=3), st.floats(0.1, 1000))
def test_clip_scales_to_the_norm_only_what_is_longer(numbers, most):
    parameters = [
        nn.Parameter(torch.zeros(2, dtype=torch.float64)),
        nn.Parameter(torch.zeros(1, 1, dtype=torch.float64)),
    ]
    parameters[0].grad = torch.tensor(numbers[:2], dtype=torch.float64)
    parameters[1].grad = torch.tensor([numbers[2:]], dtype=torch.float64)
    found = clip_gradients([*parameters, nn.Parameter(torch.zeros(3))], most)
    norm = math.hypot(*numbers)
    assert found == pytest.approx(norm, abs=1e-12)
    after = [*parameters[0].grad.tolist(), *parameters[1].grad[0].tolist()]
    if norm <= most:
        assert after == numbers
    else:
        assert after == pytest.approx([x * most / (norm + 1e-6) for x in numbers])


def test_clip_norm_of_many_numbers_is_exact():
    parameter = nn.Parameter(torch.zeros(4096, 1024))
    parameter.grad = torch.full_like(parameter, 0.1)
    assert clip_gradients([parameter], None) == pytest.approx(0.1 * 2048, rel=1e-5)
    assert torch.equal(parameter.grad, torch.full_like(parameter, 0.1))


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_clip_leaves_broken_gradients_as_they_are(broken):
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([1.0, broken])
    assert not math.isfinite(clip_gradients([parameter], 0.5))
    assert parameter.grad[0] == 1.0


@SPECS
@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_step_with_a_broken_gradient_changes_nothing_and_is_counted(spec, broken):
    model, calm = make(EXPERTS), make(EXPERTS)
    optimizer, other = Optimizer(model, spec, STEPS), Optimizer(calm, spec, STEPS)
    for step, bad in enumerate([False, True, True, False]):
        give(model, gradients(model, step))
        give(calm, gradients(calm, step))
        if bad:
            model.norm.weight.grad[3] = broken
        metrics = optimizer.step(step / STEPS)
        assert metrics["skipped"] == bad
        assert math.isfinite(metrics["grad_norm"]) != bad
        if not bad:
            other.step(step / STEPS)
        assert all(p.grad is None for p in model.parameters())
    assert metrics["skipped_steps"] == 2
    assert all(map(torch.equal, model.parameters(), calm.parameters()))
    mine, theirs = optimizer.state() | {"skipped": 0}, other.state()
    assert [leaf.carrier.tobytes() for leaf in flatten(mine)[1]] == [
        leaf.carrier.tobytes() for leaf in flatten(theirs)[1]
    ]


@SPECS
def test_step_reads_one_number_from_the_device(spec):
    class Reads(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.count += func is torch.ops.aten._local_scalar_dense.default
            return func(*args, **(kwargs or {}))

    model = make(EXPERTS)
    optimizer = Optimizer(model, spec, STEPS)
    give(model, gradients(model, 0))
    with Reads() as reads:
        optimizer.step(0.0)
    assert reads.count == 1


# --- state


@SPECS
def test_state_loaded_continues_to_the_bit(spec):
    model = make(EXPERTS)
    optimizer = Optimizer(model, spec, STEPS)
    for step in range(STEPS):
        if step == 3:
            tree, leaves = flatten({"state": optimizer.state(), "weights": weights(model)})
            saved = unflatten(tree, {leaf.key: leaf.carrier.copy() for leaf in leaves})
        give(model, gradients(model, step) if step != 1 else gradients(model, step, math.inf))
        optimizer.step(step / STEPS)

    again = make(EXPERTS)
    again.load_state_dict(saved["weights"], strict=False)
    resumed = Optimizer(again, spec, STEPS)
    resumed.load_state(saved["state"])
    for step in range(3, STEPS):
        give(again, gradients(again, step))
        metrics = resumed.step(step / STEPS)
    assert metrics["skipped_steps"] == 1
    assert all(map(torch.equal, model.parameters(), again.parameters()))


def test_state_of_another_optimizer_or_model_is_refused():
    model = make()
    optimizer = Optimizer(model, MUON, STEPS)
    with pytest.raises(PalestraError, match=r"AdamW's moments does not fit: it has layers.*not trained here"):
        optimizer.load_state(Optimizer(model, ADAMW, STEPS).state())
    model.norm.weight.requires_grad_(False)
    frozen = Optimizer(model, MUON, STEPS).state()
    with pytest.raises(PalestraError, match=r"norm\.weight is missing"):
        optimizer.load_state(frozen)


@SPECS
def test_parameters_that_are_frozen_stay(spec):
    model = make()
    model.embed.requires_grad_(False)
    model.layers[0].requires_grad_(False)
    before = weights(model)
    optimizer, generator = Optimizer(model, spec, STEPS), torch.Generator().manual_seed(0)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator) if p.requires_grad else None
    optimizer.step(0.5)
    changed = {name for name, w in weights(model).items() if not torch.equal(w, before[name])}
    assert changed == {name for name, p in model.named_parameters() if p.requires_grad}


def test_weights_in_less_than_fp32_are_refused():
    with pytest.raises(ValueError, match=r"embed is torch\.bfloat16"):
        Optimizer(make(dtype=torch.bfloat16), ADAMW, STEPS)


# --- learning rates


def test_rates_are_those_of_the_middle_of_each_step():
    lr, adam_lr = Schedule(shape="linear", start=1.0, warmup="3 steps"), Schedule(shape="constant", start=0.5)
    spec = MuonSpec(name="muon", lr=lr, adam_lr=adam_lr)
    found = rates(spec, make())
    assert [r["lr"] for r in found] == pytest.approx([1 / 6, 3 / 6, 5 / 6, 0.9, 0.7, 0.5, 0.3, 0.1])
    assert {r["adam_lr"] for r in found} == {0.5}


def test_rates_of_adamw_reach_every_parameter():
    model = make()
    before = weights(model)
    optimizer = Optimizer(model, AdamWSpec(name="adamw", lr=Schedule(shape="linear", start=1.0), weight_decay=0.0), 4)
    for step in range(4):
        give(model, {name: torch.ones_like(w) for name, w in before.items()})
        optimizer.step(step / 4)
    # Of gradients that are always 1, Adam makes steps of the learning rate: 7/8 + 5/8 + 3/8 + 1/8.
    for name, w in weights(model).items():
        torch.testing.assert_close(w, before[name] - 2.0, rtol=1e-5, atol=1e-5)


# --- the moving average


@settings(deadline=None, max_examples=20)
@given(st.floats(0.01, 0.999), st.integers(1, 12))
def test_ema_equals_the_weighted_mean(decay, steps):
    model = nn.Linear(2, 2).double()
    ema, seen = Ema(model, decay), []
    for step in range(steps):
        with torch.no_grad():
            model.weight.copy_(gradients(model, step)["weight"])
        ema.update(model)
        seen.append(model.weight.detach().clone())
    shares = [decay ** (steps - 1 - i) for i in range(steps)]
    expected = sum(share * w for share, w in zip(shares, seen, strict=True)) / sum(shares)
    torch.testing.assert_close(ema.average["weight"], expected, rtol=1e-9, atol=1e-9)


def test_ema_swapped_in_gives_the_average_and_then_the_weights_back():
    model = make()
    model.embed.requires_grad_(False)
    ema, addresses = Ema(model, 0.5), [p.data_ptr() for p in model.parameters()]
    ema.update(model)
    first = weights(model)
    with torch.no_grad():
        for p in model.layers.parameters():
            p.add_(1.0)
    last = weights(model)
    with suppress(KeyboardInterrupt), ema.swapped_in(model):
        assert all(map(torch.equal, weights(model).values(), first.values()))
        raise KeyboardInterrupt
    assert all(map(torch.equal, weights(model).values(), last.values()))
    assert all(map(torch.equal, ema.average.values(), [w for n, w in first.items() if n != "embed"]))
    assert [p.data_ptr() for p in model.parameters()] == addresses


def test_ema_state_loaded_continues_to_the_bit():
    model = make()
    ema, other = Ema(model, 0.9), Ema(make(), 0.9)
    for step in range(4):
        if step == 2:
            tree, leaves = flatten(ema.state())
            other.load_state(unflatten(tree, {leaf.key: leaf.carrier.copy() for leaf in leaves}))
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(0.9)
        for average in (ema, *([other] if step >= 2 else [])):
            average.update(model)
    assert all(map(torch.equal, ema.average.values(), other.average.values()))
    assert ema.count == other.count == 4
    assert not torch.equal(ema.average["embed"], model.embed)
