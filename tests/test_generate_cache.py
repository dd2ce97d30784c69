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


@given(
    lengths=st.lists(st.integers(1, 600), min_size=1, max_size=4),
    window=st.none() | st.integers(1, 300),
    cut=st.integers(1, 300),
)
@settings(max_examples=25, deadline=None)
def test_attention_over_the_cache_equals_brute_force(lengths, window, cut):
    """Prompts in one or two pieces, then one token in each row."""
    cache = Cache(SHAPE, 4, 704, torch.float32, CPU)
    q, k, v = (
        [drawn(length + 1, heads, 8, seed=10 * i + n) for i, length in enumerate(lengths)]
        for n, heads in enumerate((6, 2, 2))
    )
    cut = cut // 256 * 256
    found = [[] for _ in lengths]
    for bounds in ([(0, min(cut, n)) for n in lengths], [(min(cut, n), n) for n in lengths]):
        segments = [Segment(row, start, end) for row, (start, end) in enumerate(bounds) if start < end]
        if not segments:
            continue
        packed = [torch.cat([t[s.row][s.start : s.end] for s in segments]) for t in (q, k, v)]
        padded = [F.pad(t, (0, 0, 0, 0, 0, 5), value=float("nan")) for t in packed]
        out = PrefillAttention(cache, segments)(1, *padded, window)
        assert (out[-5:] == 0).all()
        for segment, part in zip(segments, out[:-5].split([s.end - s.start for s in segments]), strict=True):
            found[segment.row].append(part)
    attend = DecodeAttention(cache, torch.tensor(lengths), max(lengths) + 1)
    last = [F.pad(torch.stack([t[row][-1] for row in range(len(lengths))]), (0, 0, 0, 0, 0, 2)) for t in (q, k, v)]
    out = attend(1, *last, window)
    assert (out[-2:] == 0).all()
    for row, length in enumerate(lengths):
        torch.testing.assert_close(
            torch.cat([*found[row], out[row : row + 1]]).double(),
            brute_force(q[row], k[row], v[row], window),
            rtol=1e-4,
            atol=1e-5,
        )
        assert torch.equal(cache.keys[1, row, :, : length + 1].transpose(0, 1), k[row])
        assert torch.equal(cache.values[1, row, :, : length + 1].transpose(0, 1), v[row])
    assert cache.keys[0].count_nonzero() == 0  # the other layer's


def test_masked_positions_change_no_bit_of_attention():
    """However many positions behind its own a row is computed with, whatever they hold."""
    for dtype in (torch.float32, torch.bfloat16):
        cache = Cache(SHAPE, 3, 704, dtype, CPU)
        cache.keys[:], cache.values[:] = drawn(*cache.keys.shape), drawn(*cache.keys.shape, seed=1)
        lengths = torch.tensor([5, 63, 40])
        inputs = [drawn(3, heads, 8, seed=heads).to(dtype) for heads in (6, 2, 2)]
        few = DecodeAttention(cache, lengths, 64)(0, *inputs, None)
        for longest in (65, 200, 513, 704):
            assert torch.equal(DecodeAttention(cache, lengths, longest)(0, *inputs, None), few)


def test_copy_gives_a_row_the_beginning_of_another():
    cache = Cache(SHAPE, 3, 64, torch.float32, CPU)
    cache.keys[:], cache.values[:] = drawn(*cache.keys.shape), drawn(*cache.values.shape, seed=1)
    before = cache.keys.clone()
    cache.copy(2, 0, 10)
    assert torch.equal(cache.keys[:, 0, :, :10], before[:, 2, :, :10])
    assert torch.equal(cache.keys[:, 0, :, 10:], before[:, 0, :, 10:])
    assert torch.equal(cache.keys[:, 1:], before[:, 1:])


def test_memory_of_a_large_cache_is_taken_only_when_it_is_written():
    process = psutil.Process()
    before = process.memory_info().rss
    cache = Cache(SHAPE.model_copy(update={"layers": 32}), 64, 8192, torch.bfloat16, CPU)
    assert cache.nbytes == 2 * 32 * 64 * 2 * 8192 * 8 * 2
    assert cache.keys[3, 5].float().sum() == 0
    assert process.memory_info().rss - before < 100 * 2**20


def test_rows_follow_the_budget():
    def rows(*settings) -> int:
        return Cache.fitting(SHAPE, 700, *settings).keys.shape[1]

    each = 2 * 2 * 2 * 704 * 8 * 4  # positions are a multiple of 64
    assert rows(torch.float32, CPU, 10 * each + 1, 100) == 10
    assert rows(torch.bfloat16, CPU, 10 * each + 1, 100) == 20
    assert rows(torch.float32, CPU, 10 * each, 3) == 3
    assert rows(torch.float32, CPU, None, 7) == 7
    with pytest.raises(UsageError, match=r"a sequence of 704 tokens needs 0\.2 MiB"):
        rows(torch.float32, CPU, each - 1, 3)


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
