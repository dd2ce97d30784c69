import itertools

import psutil
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from small_lm import small_model

from palestra.errors import UsageError
from palestra.generate.engine.cpu import Runner
from palestra.generate.engine.kv_cache import Cache, DecodeAttention, PrefillAttention, Segment
from palestra.generate.engine.pages import PAGE, pages_for
from palestra.lm import native
from palestra.spec.shape import Shape

CPU = torch.device("cpu")
SHAPE = Shape(layers=2, width=48, heads=6, kv_heads=2, head_dim=8, mlp=16, context=700, vocab=32)


def brute_force(q, k, v, window):
    """Attention in float64 of queries at the last positions of the keys: q (n, H, dim), k and v (m, K, dim)."""
    n, m, group = len(q), len(k), q.shape[1] // k.shape[1]
    k, v = (t.double().repeat_interleave(group, 1) for t in (k, v))
    scores = torch.einsum("nhd,mhd->hnm", q.double(), k) * q.shape[-1] ** -0.5
    behind = torch.arange(m - n, m)[:, None] - torch.arange(m)
    seen = (behind >= 0) & (behind < (window or m + 1))
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    return torch.einsum("hnm,mhd->nhd", weights, v)


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def shuffled_tables(rows: int, length: int, pages: int, seed: int = 0) -> torch.Tensor:
    """Pages of each row for `length` tokens, in no order; none is page 0."""
    order = 1 + torch.randperm(pages - 1, generator=torch.Generator().manual_seed(seed))
    return order[: rows * pages_for(length)].view(rows, -1).int()


def without_kernels(monkeypatch):
    monkeypatch.setattr(native, "library", lambda: None)


@given(
    lengths=st.lists(st.integers(1, 600), min_size=1, max_size=4),
    window=st.none() | st.integers(1, 300),
    cut=st.integers(0, 300),
    dim=st.sampled_from([8, 16, 48]),
    kernels=st.booleans(),
)
@settings(max_examples=25, deadline=None)
def test_attention_over_the_cache_equals_brute_force(lengths, window, cut, dim, kernels):
    """Prompts in one or two pieces, then one token in each row; pages anywhere."""
    shape = SHAPE.model_copy(update={"head_dim": dim})
    cache = Cache(shape, 4 * pages_for(700) + 1, torch.float32, CPU)
    tables = shuffled_tables(len(lengths), 700, cache.pages)
    q, k, v = (
        [drawn(length + 1, heads, dim, seed=10 * i + n) for i, length in enumerate(lengths)]
        for n, heads in enumerate((6, 2, 2))
    )
    found = [[] for _ in lengths]
    for bounds in ([(0, min(cut, n)) for n in lengths], [(min(cut, n), n) for n in lengths]):
        rows = [row for row, (start, end) in enumerate(bounds) if start < end]
        segments = [Segment(tables[row].tolist(), *bounds[row]) for row in rows]
        if not segments:
            continue
        packed = [torch.cat([t[row][slice(*bounds[row])] for row in rows]) for t in (q, k, v)]
        padded = [F.pad(t, (0, 0, 0, 0, 0, 5), value=float("nan")) for t in packed]
        out = PrefillAttention(cache, segments)(1, *padded, window)
        assert (out[-5:] == 0).all()
        for row, part in zip(rows, out[:-5].split([s.end - s.start for s in segments]), strict=True):
            found[row].append(part)
    attend = DecodeAttention(cache, tables, torch.tensor(lengths), max(lengths) + 1)
    last = [F.pad(torch.stack([t[row][-1] for row in range(len(lengths))]), (0, 0, 0, 0, 0, 2)) for t in (q, k, v)]
    with pytest.MonkeyPatch.context() as patch:
        if not kernels:
            without_kernels(patch)
        out = attend(1, *last, window)
    assert (out[-2:] == 0).all()
    for row, length in enumerate(lengths):
        torch.testing.assert_close(
            torch.cat([*found[row], out[row : row + 1]]).double(),
            brute_force(q[row], k[row], v[row], window),
            rtol=1e-4,
            atol=1e-5,
        )
        assert torch.equal(cache.keys[1][tables[row].long()].flatten(0, 1)[: length + 1], k[row])
        assert torch.equal(cache.values[1][tables[row].long()].flatten(0, 1)[: length + 1], v[row])
    assert cache.keys[0].count_nonzero() == 0  # the other layer's


@given(
    length=st.integers(1, 400),
    cuts=st.lists(st.integers(1, 399), max_size=4),
    others=st.lists(st.integers(1, 300), max_size=3),
)
@settings(max_examples=25, deadline=None)
def test_a_token_of_a_prompt_has_the_same_bits_however_it_is_cut_and_beside_any_others(length, cuts, others):
    def attended(cuts: list[int], others: list[int]) -> torch.Tensor:
        cache = Cache(SHAPE, 4 * pages_for(700) + 1, torch.float32, CPU)
        tables = shuffled_tables(4, 700, cache.pages, seed=len(cuts)).tolist()
        inputs, out = [drawn(length, heads, 8, seed=heads) for heads in (6, 2, 2)], []
        for start, end in itertools.pairwise([0, *sorted({cut for cut in cuts if cut < length}), length]):
            segments = [Segment(tables[0], start, end)]
            segments += [Segment(tables[row + 1], 0, other) for row, other in enumerate(others)]
            more = [drawn(sum(others), t.shape[1], 8, seed=9) for t in inputs]
            packed = [torch.cat([t[start:end], extra]) for t, extra in zip(inputs, more, strict=True)]
            out.append(PrefillAttention(cache, segments)(0, *packed, None)[: end - start])
        return torch.cat(out)

    assert torch.equal(attended(cuts, others), attended([], []))


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("dim", [8, 32])
def test_masked_positions_change_no_bit_of_attention(kernels, dim, monkeypatch):
    """However many positions behind its own a row is computed with, whatever they hold."""
    if not kernels:
        without_kernels(monkeypatch)
    for dtype in (torch.float32, torch.bfloat16):
        cache = Cache(SHAPE.model_copy(update={"head_dim": dim}), 3 * pages_for(704) + 1, dtype, CPU)
        cache.keys[:], cache.values[:] = drawn(*cache.keys.shape), drawn(*cache.keys.shape, seed=1)
        lengths, tables = torch.tensor([5, 63, 40]), shuffled_tables(3, 704, cache.pages)
        inputs = [drawn(3, heads, dim, seed=heads).to(dtype) for heads in (6, 2, 2)]
        few = DecodeAttention(cache, tables, lengths, 64)(0, *inputs, None)
        for longest in (65, 200, 513, 704):
            assert torch.equal(DecodeAttention(cache, tables, lengths, longest)(0, *inputs, None), few)


@pytest.mark.skipif(native.library() is None, reason="no C++ compiler")
def test_attention_in_bf16_is_as_near_to_float64_as_torch():
    shape = SHAPE.model_copy(update={"head_dim": 64})
    cache = Cache(shape, 2 * pages_for(300) + 1, torch.bfloat16, CPU)
    cache.keys[:], cache.values[:] = drawn(*cache.keys.shape), drawn(*cache.keys.shape, seed=1)
    lengths, tables = torch.tensor([299, 17]), shuffled_tables(2, 300, cache.pages)
    inputs = [drawn(2, heads, 64, seed=heads).bfloat16() for heads in (6, 2, 2)]
    ours = DecodeAttention(cache, tables, lengths, 300)(0, *inputs, None)
    keys, values = cache.read(0, tables.long())
    for row, length in enumerate(lengths.tolist()):
        k, v = keys[row, :, : length + 1].transpose(0, 1), values[row, :, : length + 1].transpose(0, 1)
        exact = brute_force(inputs[0][row : row + 1], k, v, None)
        torch.testing.assert_close(ours[row : row + 1].double(), exact, atol=2e-3, rtol=4e-3)


def test_copy_gives_pages_what_others_hold():
    cache = Cache(SHAPE, 6, torch.float32, CPU)
    cache.keys[:], cache.values[:] = drawn(*cache.keys.shape), drawn(*cache.values.shape, seed=1)
    keys, values = cache.keys.clone(), cache.values.clone()
    cache.copy([2, 2, 4], [0, 1, 5])
    for now, before in ((cache.keys, keys), (cache.values, values)):
        assert torch.equal(now, before[:, [2, 2, 2, 3, 4, 4]])


def test_memory_of_a_large_cache_is_taken_only_when_it_is_written():
    process = psutil.Process()
    before = process.memory_info().rss
    cache = Cache(SHAPE.model_copy(update={"layers": 32}), 64 * 256, torch.bfloat16, CPU)
    assert cache.nbytes == 2 * 32 * 64 * 2 * 8192 * 8 * 2
    assert cache.keys[3, 5].float().sum() == 0
    assert process.memory_info().rss - before < 100 * 2**20


def test_pages_follow_the_budget():
    def pages(*settings) -> int:
        return Cache.fitting(SHAPE, 700, *settings).pages - 1  # and one is scratch

    each = 2 * 2 * 2 * PAGE * 8 * 4
    assert pages(torch.float32, CPU, 50 * each + 1, 100) == 50
    assert pages(torch.bfloat16, CPU, 50 * each + 1, 100) == 100
    assert pages(torch.float32, CPU, 200 * each, 3) == 3 * 22
    assert pages(torch.float32, CPU, None, 7) == 7 * 22
    with pytest.raises(UsageError, match=r"a sequence of 700 tokens needs 0\.2 MiB"):
        pages(torch.float32, CPU, 22 * each - 1, 3)


def test_weights_laid_out_anew_are_those_published_last():
    """Matrices of real size are kept in the library's own order as well."""
    sizes = {"width": 384, "heads": 6, "kv_heads": 2, "mlp": 512, "vocab": 512}
    old, new = small_model(0, deviation=0.05, **sizes), small_model(1, deviation=0.05, **sizes)
    runner = Runner(old, torch.bfloat16, CPU, 64, None, 2, 8)
    assert sum(matrix.packed is not None for matrix in runner.tiles._matrices) > 4
    hidden = drawn(5, 384).bfloat16()
    before = runner.tiles.head(hidden)
    runner.load(new.state_dict())
    fresh = Runner(new, torch.bfloat16, CPU, 64, None, 2, 8)
    assert torch.equal(runner.tiles.head(hidden), fresh.tiles.head(hidden))
    assert torch.equal(
        runner.model.layers[1].mlp.down.forward(drawn(5, 512).bfloat16()),
        fresh.model.layers[1].mlp.down(drawn(5, 512).bfloat16()),
    )
    assert not torch.equal(before, fresh.tiles.head(hidden))
    torch.testing.assert_close(
        fresh.tiles.head(hidden).float(), hidden.float() @ new.embed.bfloat16().float().t(), rtol=0.02, atol=0.02
    )
