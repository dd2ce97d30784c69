"""The compiled kernels of the CPU against float64, and against torch's operations, which stand in for them."""

import logging
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from palestra.generate.engine.kv_cache import Cache, DecodeAttention
from palestra.generate.engine.sampler import Needs, Settings, sample
from palestra.lm import native
from palestra.lm.layers import RMSNorm, doubled, rotate, swiglu
from palestra.lm.model import Transformer
from palestra.spec.shape import Shape

needs_compiler = pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="no C++ compiler")
EPS = torch.finfo(torch.float32).eps


def drawn(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 2).to(dtype)


def rms(x: Tensor, weight: Tensor, eps: float = 1e-5) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def gated(both: Tensor) -> Tensor:
    gate, up = both.chunk(2, dim=-1)
    return F.silu(gate) * up


def compare(found: Tensor, expected: Tensor, dtype: torch.dtype, size: Tensor | None = None, terms: int = 0) -> None:
    """Within the rounding of FP32 sums of so many `terms`, of absolute values `size` in all, and of the result."""
    assert found.dtype == dtype
    bound = ((terms + 8) * EPS + torch.finfo(dtype).eps) * (expected if size is None else size).abs()
    assert ((found.double() - expected).abs() <= bound + 1e-30).all()


@needs_compiler
@settings(max_examples=30, deadline=None)
@given(
    st.integers(1, 70),
    st.sampled_from([2, 6, 16, 100, 256, 258, 600]),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.sampled_from([1, 3]),
)
def test_results_and_gradients_equal_those_in_float64(rows, width, dtype, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        x, weight = drawn(rows, width, dtype=dtype), drawn(width, dtype=dtype, seed=1)
        grad, angles = drawn(rows, width, dtype=dtype, seed=2), torch.randn(rows, width // 2)
        exact = x.double().requires_grad_(), weight.double().requires_grad_()

        out, scale = native.norm(x, weight, 1e-5)
        to_x, to_weight = native.norm_backward(grad, x, weight, scale)
        expected = rms(*exact)
        gradients = torch.autograd.grad(expected, exact, grad.double())
        compare(out, expected.detach(), dtype, terms=width)
        by = (x.double().square().mean(-1, keepdim=True) + 1e-5).rsqrt()
        to_hat, hat = (grad.double() * weight.double()).abs(), x.double().abs() * by
        compare(to_x, gradients[0], dtype, (to_hat + hat * (to_hat * hat).mean(-1, keepdim=True)) * by, width)
        compare(to_weight, gradients[1], torch.float32, (grad.double().abs() * hat).sum(0), rows + width)

        cos, sin = angles.cos(), angles.sin()
        found = native.turn(x[:, None], *doubled(cos, sin))[:, 0]
        size = x.double().abs().unflatten(1, (2, -1)).sum(1).repeat(1, 2)
        compare(found, turned(x.double(), cos.double(), sin.double()), dtype, size)
        compare(native.turn(found[:, None], *doubled(cos, sin), -1.0)[:, 0], x.double(), dtype, 2 * size)

        both = drawn(rows, 2 * width, dtype=dtype, seed=3)
        leaf = both.double().requires_grad_()
        compare(native.gate(both), gated(leaf).detach(), dtype)
        gate, up = both.double().chunk(2, dim=-1)
        size = torch.cat([up * (1 + gate.abs()), gate], dim=-1) * (grad.double() * gate.sigmoid()).repeat(1, 2)
        compare(native.gate_backward(grad, both), torch.autograd.grad(gated(leaf), leaf, grad.double())[0], dtype, size)
    finally:
        torch.set_num_threads(before)


@needs_compiler
@settings(max_examples=30, deadline=None)
@given(st.integers(1, 70), st.integers(1, 70), st.integers(1, 40), st.sampled_from([1, 2]))
def test_products_equal_those_in_float64_and_a_row_has_the_same_bits_alone(rows, inputs, outputs, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        x, weight = drawn(rows, inputs, dtype=torch.float32), drawn(outputs, inputs, dtype=torch.float32, seed=1)
        panels = native.in_panels(weight)
        out = native.product(x, panels, torch.empty(rows, outputs))
        size = F.linear(x.double().abs(), weight.double().abs())
        compare(out, F.linear(x.double(), weight.double()), torch.float32, size, inputs)
        for row in {0, rows // 2, rows - 1}:
            assert torch.equal(native.product(x[row : row + 1], panels, torch.empty(1, outputs))[0], out[row])
    finally:
        torch.set_num_threads(before)


@needs_compiler
@pytest.mark.parametrize("rows", [1, 3, 70, 200])
def test_a_large_product_shared_between_threads_has_the_bits_of_one_thread(rows):
    x, panels = drawn(rows, 576, dtype=torch.float32), native.in_panels(drawn(3000, 576, dtype=torch.float32, seed=1))
    before, results = torch.get_num_threads(), []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results.append(native.product(x, panels, torch.empty(rows, 3000)))
    torch.set_num_threads(before)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_depends_on_nothing_but_itself(dtype):
    x, weight = drawn(300, 96, dtype=dtype), drawn(96, dtype=dtype, seed=1)
    cos, sin = doubled(torch.randn(300, 48), torch.randn(300, 48))
    for kernel in (
        lambda part: native.norm(x[part], weight, 1e-5)[0],
        lambda part: native.turn(x[part, None], cos[part], sin[part]),
        lambda part: native.gate(x[part]),
    ):
        whole = kernel(slice(None))
        for part in (slice(0, 1), slice(7, 19), slice(299, 300)):
            assert torch.equal(kernel(part), whole[part])


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_that_lie_apart_are_read_where_they_are(dtype):
    wide = drawn(20, 9, 16, dtype=dtype)
    part, weight = wide[:, 2:7], drawn(16, dtype=dtype, seed=1)
    cos, sin = doubled(torch.randn(20, 8), torch.randn(20, 8))

    assert torch.equal(native.norm(part, weight, 1e-5)[0], native.norm(part.contiguous(), weight, 1e-5)[0])
    assert torch.equal(native.turn(part, cos, sin), native.turn(part.contiguous(), cos, sin))
    assert torch.equal(native.gate(wide[:, 0, :8]), native.gate(wide[:, 0, :8].contiguous()))


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_numbers_that_are_none_and_very_large_ones_come_out_as_such(dtype):
    both = torch.tensor([[float("nan"), float("inf"), -200.0, 200.0, 1.0, 1.0, 2.0, 2.0]], dtype=dtype)

    out = native.gate(both)[0]

    assert out[0].isnan()
    assert out[1] == float("inf")
    assert abs(float(out[2])) < 1e-30
    assert out[3] == 400.0
    assert native.norm(both, torch.ones(8), 1e-5)[0].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_a_compiler_torch_computes_the_same(dtype, monkeypatch, caplog):
    angles, grad = torch.randn(7, 8), drawn(7, 3, 16, dtype=dtype, seed=2)

    def results() -> list[Tensor]:
        x, both = drawn(7, 3, 16, dtype=dtype).requires_grad_(), drawn(7, 64, dtype=dtype, seed=1).requires_grad_()
        norm = RMSNorm(16, 1e-5)
        out = rotate(norm(x), angles.cos(), angles.sin())
        gate = swiglu(both)
        out.backward(grad)
        gate.backward(drawn(7, 32, dtype=dtype, seed=3))
        assert x.grad is not None
        assert both.grad is not None
        assert norm.weight.grad is not None
        with torch.no_grad():
            again = [rotate(norm(x), angles.cos(), angles.sin()), swiglu(both)]
        assert all(torch.equal(one, other) for one, other in zip(again, (out, gate), strict=True))
        return [out.detach(), gate.detach(), x.grad, both.grad, norm.weight.grad]

    with_kernels = results()
    monkeypatch.setattr(shutil, "which", lambda name: None)
    native.library.cache_clear()
    try:
        with caplog.at_level(logging.INFO):
            without = results()
    finally:
        native.library.cache_clear()

    assert "no C++ compiler" in caplog.text
    for mine, theirs in zip(with_kernels, without, strict=True):
        tolerance = 32 * EPS + 4 * torch.finfo(dtype).eps
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)


@needs_compiler
def test_it_is_compiled_once_and_a_failure_is_told_and_survived(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("PALESTRA_CACHE", str(tmp_path))
    monkeypatch.setattr(native, "FLAGS", ["-O0", "-march=native", "-std=c++17", "-shared", "-fPIC", "-pthread"])
    compiler = shutil.which("g++") or shutil.which("clang++")
    assert compiler is not None
    first = native._built(compiler)
    written = first.stat().st_mtime_ns

    assert native._built(compiler) == first
    assert first.stat().st_mtime_ns == written
    assert list(first.parent.iterdir()) == [first]

    monkeypatch.setattr(native, "FLAGS", ["--no-such-flag"])
    native.library.cache_clear()
    try:
        assert native.library() is None
        assert not native.available(torch.ones(2, 2))
    finally:
        native.library.cache_clear()
    assert "--no-such-flag" in caplog.text


@needs_compiler
@pytest.mark.parametrize("trouble", ["no room", "hangs"])
def test_a_cache_that_cannot_be_written_and_a_compiler_that_hangs_are_survived(trouble, tmp_path, monkeypatch, caplog):
    (tmp_path / "file").touch()
    monkeypatch.setenv("PALESTRA_CACHE", str(tmp_path / ("file/below" if trouble == "no room" else "cache")))
    monkeypatch.setattr(native, "COMPILE_SECONDS", 1e-3)
    native.library.cache_clear()
    try:
        assert native.library() is None
    finally:
        native.library.cache_clear()
    assert "could not be compiled" in caplog.text


@needs_compiler
def test_what_it_cannot_compute_is_left_to_torch():
    assert native.available(torch.ones(2, 2))
    assert not native.available(torch.ones(2, 2, dtype=torch.float64))
    assert not native.available(torch.ones(2, 2).t()[:1, :])
    assert not native.available(torch.ones(2, 2, device="meta"))


@needs_compiler
@pytest.mark.parametrize("vocab", [1, 5, 97, 256, 1000, 49152])
def test_tokens_and_log_probabilities_are_those_of_the_sampler(vocab, monkeypatch):
    rows = 200 if vocab < 2000 else 8
    heats = torch.rand(rows, generator=torch.Generator().manual_seed(1)) + 0.3
    heats[::5] = 0.0
    seeds, draws = torch.randint(-(2**62), 2**62, (rows,)), torch.randint(0, 1000, (rows,))
    scores = drawn(rows, vocab, dtype=torch.float32)
    scores[:, : vocab // 3] = float("-inf")

    tokens, logprobs = native.sample_tokens(scores, heats, seeds, draws)

    nothing, whole = torch.zeros(rows, dtype=torch.int64), torch.full((rows,), 2**62)
    settings = Settings(heats, whole, torch.ones(rows), torch.zeros(rows), seeds, draws, nothing, nothing[:, None] - 1)
    monkeypatch.setattr(native, "available", lambda x: False)
    expected = sample(scores, settings, Needs(filtered=False, min_tokens=False))
    assert torch.equal(tokens, expected.tokens)
    torch.testing.assert_close(logprobs, expected.logprobs, rtol=1e-6, atol=1e-5)
    assert scores.gather(1, tokens[:, None]).isfinite().all()


@needs_compiler
def test_scores_that_are_no_numbers_give_log_probabilities_that_are_none():
    scores = torch.zeros(1, 300)
    scores[0, 200] = float("nan")
    one = torch.ones(1, dtype=torch.int64)

    assert native.sample_tokens(scores, torch.ones(1), one, one)[1].isnan().all()


@needs_compiler
def test_a_row_that_asks_for_nothing_else_has_the_same_bits_beside_those_that_do():
    scores, draws = drawn(4, 50, dtype=torch.float32), torch.arange(4)
    whole, none = torch.full((4,), 2**62), torch.zeros(4, dtype=torch.int64)
    plain = Settings(torch.ones(4), whole, torch.ones(4), torch.zeros(4), draws + 7, draws, none, none[:, None] - 1)
    some = replace(plain, top_k=torch.tensor([2**62, 3, 2**62, 2**62]), top_p=torch.tensor([1.0, 1.0, 0.5, 1.0]))

    alone = sample(scores, plain, Needs(greedy=False, tempered=False, filtered=False, min_tokens=False))
    beside = sample(scores, some, Needs(greedy=False, tempered=False, min_tokens=False, top=2))

    for row in (0, 3):
        assert alone.tokens[row] == beside.tokens[row]
        assert torch.equal(alone.logprobs[row], beside.logprobs[row])
    assert not torch.equal(alone.logprobs[1:3], beside.logprobs[1:3])


@needs_compiler
def test_library_that_others_could_have_written_is_built_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "cache_root", lambda: tmp_path)
    monkeypatch.setattr(native, "FLAGS", ["-O0", "-march=native", "-std=c++17", "-shared", "-fPIC", "-pthread"])
    path = native._built(shutil.which("g++") or "clang++")
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert not path.stat().st_mode & 0o022
    kept = path.read_bytes()
    path.write_bytes(b"planted")
    path.chmod(0o777)
    path.parent.chmod(0o777)
    assert native._built(shutil.which("g++") or "clang++").read_bytes() == kept
    assert path.parent.stat().st_mode & 0o777 == 0o700


def test_library_in_a_folder_of_another_user_is_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "cache_root", lambda: tmp_path)
    other = os.getuid() + 1
    monkeypatch.setattr(native.os, "getuid", lambda: other)
    with pytest.raises(OSError, match="belongs to another user"):
        native._built(shutil.which("g++") or "clang++")


@needs_compiler
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"kv_heads": 1, "attention_bias": True},
        {"qk_norm": "head", "head_dim": 48, "kv_heads": 2},
        {"qk_norm": "full", "window": 5, "window_from": 1},
    ],
    ids=["plain", "bias", "norm of each head", "norm of all heads, window"],
)
def test_a_step_of_all_layers_equals_the_model_in_float64(more, threads):
    shape = Shape(layers=3, width=64, heads=4, mlp=96, context=64, vocab=50, **more)
    model = Transformer(shape)
    model.initialize(torch.Generator().manual_seed(0))
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:  # biases and norms that do something
            parameter.data += drawn(len(parameter), dtype=torch.float32, seed=len(name)) / 4
    lengths, tokens = torch.tensor([0, 3, 40, 11, 7]), torch.tensor([4, 9, 0, 33, 4])
    cache = Cache(shape, 2 * len(tokens) + 1, torch.float64, torch.device("cpu"))
    tables = (1 + torch.randperm(2 * len(tokens), generator=torch.Generator().manual_seed(0))).view(-1, 2).int()
    for seed, tensor in enumerate((cache.keys, cache.values)):
        tensor.copy_(drawn(*tensor.shape, dtype=torch.float64, seed=seed))
    keys, values = cache.keys.float(), cache.values.float()
    parts = {name: native.in_panels(part) if part.ndim == 2 else part for name, part in model.state_dict().items()}
    parts |= {name.removesuffix(".weight"): part for name, part in parts.items() if part.ndim == 3}
    with torch.inference_mode():
        angles, embedded = doubled(*model.rotation(lengths)), F.embedding(tokens, model.embed)
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            decode = native.Decoder(shape, parts, keys, values)
            found = model.norm(decode(embedded.clone(), *angles, lengths, tables))
        finally:
            torch.set_num_threads(before)
        wide = Transformer(shape, torch.float64).double()
        wide.load_state_dict(model.state_dict())
        expected = wide(tokens, lengths, DecodeAttention(cache, tables, lengths, 41)).hidden
    torch.testing.assert_close(found.double(), expected, atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(keys.double(), cache.keys, atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(values.double(), cache.values, atol=2e-5, rtol=2e-5)


@needs_compiler
@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from([(1, 1, 16), (8, 4, 8), (9, 3, 64), (6, 1, 5)]),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.sampled_from([None, 1, 7, 100]),
    st.booleans(),
    st.sampled_from([1, 3]),
    st.integers(0, 10**6),
)
def test_sequences_that_share_beginnings_attend_as_in_float64(sizes, dtype, window, sinks, threads, seed):
    heads, kv, dim = sizes
    numbers = torch.Generator().manual_seed(seed)
    one, two, three = torch.randint(1, 150, (3,), generator=numbers).tolist()
    # Tokens lie one, two, three; the second sequence begins with some of the first, the third with some of both.
    part, more = one // 2 + 1, two // 2 + 1
    ranges = [(0, one), (0, part), (one, two), (0, part), (one, more), (one + two, three)]
    bounds = [(0, 1, one), (1, 3, 1 + two // 3), (3, 6, three)]
    whole = drawn(one + two + three, heads + 2 * kv, dim, dtype=dtype, seed=seed)
    q, k, v = whole.split([heads, kv, kv], dim=1)
    logits = drawn(heads, dtype=dtype, seed=seed + 1) if sinks else None

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    found = native.attend_tree(q, k, v, torch.tensor(ranges), torch.tensor(bounds), window, logits)
    torch.set_num_threads(before)

    for first, last, asked in bounds:
        tokens = torch.cat([torch.arange(start, start + count) for start, count in ranges[first:last]])
        own = torch.arange(len(tokens))[-asked:]
        behind = own[:, None] - torch.arange(len(tokens))
        hidden = (behind < 0) if window is None else (behind < 0) | (behind >= window)
        keys, values = (t[tokens].double().repeat_interleave(heads // kv, dim=1) for t in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[tokens[own]].double(), keys) / dim**0.5
        scores = scores.masked_fill(hidden, float("-inf"))
        if logits is not None:
            scores = torch.cat([scores, logits.double()[:, None, None].expand(-1, len(own), 1)], dim=-1)
        weights = scores.softmax(-1)[..., : len(tokens)]
        expected = torch.einsum("hqk,khd->qhd", weights, values)
        torch.testing.assert_close(found[tokens[own]].double(), expected, rtol=torch.finfo(dtype).eps, atol=1e-4)
