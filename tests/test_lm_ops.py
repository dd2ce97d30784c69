"""The operations that have a backward pass by hand on the CPU, beside torch's own in float64."""

import pytest
import torch
import torch.nn.functional as F

from palestra.lm.attention import SHORT, causal
from palestra.lm.layers import RMSNorm, rotate, swiglu


def random(*size: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()


def masked(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None) -> torch.Tensor:
    """Attention by torch, with a mask and keys repeated for every head."""
    t = torch.arange(q.shape[2])
    behind = t[:, None] - t[None, :]
    mask = (behind >= 0) & (behind < (window or len(t)))
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def test_rms_norm_gradients_equal_numerical_ones():
    norm, x = RMSNorm(6, 1e-3).double(), random(2, 3, 6)
    norm.weight.data.copy_(random(6, seed=1).detach())
    assert torch.autograd.gradcheck(lambda x, w: torch.func.functional_call(norm, {"weight": w}, x), (x, norm.weight))
    torch.testing.assert_close(norm(x), F.rms_norm(x, (6,), norm.weight, 1e-3))


def test_rotate_gradients_equal_numerical_ones():
    angles = random(4, 3, seed=1).detach()
    assert torch.autograd.gradcheck(lambda x: rotate(x, angles.cos(), angles.sin()), random(4, 2, 6))


def test_swiglu_gradients_equal_numerical_ones():
    gate_up = random(5, 8)
    assert torch.autograd.gradcheck(swiglu, gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    torch.testing.assert_close(swiglu(gate_up), F.silu(gate) * up)


@pytest.mark.parametrize("length", [1, 5, 17, SHORT, SHORT + 1])
@pytest.mark.parametrize(("heads", "window"), [((4, 4), None), ((4, 2), None), ((4, 1), 3)])
def test_causal_attention_and_its_gradients_equal_torch_with_a_mask(length, heads, window):
    q, k, v = (random(2, n, length, 8, seed=i) for i, n in enumerate((heads[0], heads[1], heads[1])))
    found, expected = causal(q, k, v, window), masked(q, k, v, window)
    torch.testing.assert_close(found, expected)
    weights = random(*found.shape, seed=9).detach()
    for mine, theirs in zip(
        torch.autograd.grad((found * weights).sum(), (q, k, v)),
        torch.autograd.grad((expected * weights).sum(), (q, k, v)),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_operations_without_gradients_give_the_same_bits(dtype):
    norm, x, angles = RMSNorm(32, 1e-5), random(40, 4, 32, dtype=dtype), random(40, 16, dtype=torch.float32).detach()
    q = random(2, 4, 20, 16, dtype=dtype)
    calls = [
        lambda: norm(x),
        lambda: rotate(x, angles.cos(), angles.sin()),
        lambda: swiglu(x),
        lambda: causal(q, q, q, None),
    ]
    for call in calls:
        with_gradients = call()
        with torch.no_grad():
            assert torch.equal(with_gradients, call())
        assert with_gradients.dtype == dtype


def test_operations_in_bf16_are_within_its_rounding_of_float64():
    norm, exact = RMSNorm(64, 1e-5), RMSNorm(64, 1e-5).double()
    x = random(50, 64, dtype=torch.bfloat16)
    high = x.detach().double().requires_grad_()
    for mine, theirs in ((norm(x), exact(high)), (swiglu(x), swiglu(high))):
        torch.testing.assert_close(mine.double(), theirs, rtol=2**-7, atol=1e-2)
        found, expected = torch.autograd.grad(mine.sum(), x)[0], torch.autograd.grad(theirs.sum(), high)[0]
        torch.testing.assert_close(found.double(), expected, rtol=2**-6, atol=2e-2)
