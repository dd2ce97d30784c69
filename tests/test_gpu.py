"""What only a GPU can show: kernels against float64, graphs, trainer and generator against each other."""

import copy
import math
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from tiny_models import FAMILIES, tiny_checkpoint

from palestra.generate.engine.batch import BatchRows
from palestra.generate.engine.engine import Engine
from palestra.generate.engine.kv_cache import Cache, Segment
from palestra.generate.engine.pages import PAGE, pages_for
from palestra.generate.engine.sampler import uniform
from palestra.generate.types import Request, Sampling, StopReason
from palestra.lm.batch import Batch, score
from palestra.lm.head import token_logprobs, weighted_logprob
from palestra.lm.layers import rotate, swiglu
from palestra.lm.model import Transformer
from palestra.lm.optim import Optimizer
from palestra.rl.kl import k3
from palestra.spec.lm import AdamWSpec
from palestra.spec.shape import Shape

if torch.cuda.is_available():
    from palestra.generate.engine import cuda
    from palestra.generate.engine.cuda import KernelAttention
    from palestra.generate.engine.decode_layers import DecodeLayers

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")

SHAPE = Shape(layers=3, width=192, heads=6, kv_heads=2, mlp=256, context=256, vocab=1000)


def make(dtype: torch.dtype, shape: Shape = SHAPE) -> Transformer:
    model = Transformer(shape, dtype)
    model.initialize(torch.Generator().manual_seed(0))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4)  # scores that differ
    return model


def with_varied_norms(model: Transformer) -> Transformer:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) * 0.2 + 1)
    return model


def prompts(count: int, seed: int = 0) -> list[tuple[int, ...]]:
    draws = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 90, (count,), generator=draws).tolist()
    return [tuple(torch.randint(0, 1000, (n,), generator=draws).tolist()) for n in lengths]


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    found, expected = found.double().cpu(), expected.double().cpu()
    return ((found - expected).norm() / expected.norm()).item()


def test_fused_operations_equal_the_plain_ones():
    draws = torch.Generator("cuda").manual_seed(0)
    qkv = torch.randn(37, 15, 64, device="cuda", dtype=torch.bfloat16, generator=draws)
    angles = torch.randn(37, 32, device="cuda", generator=draws)
    gate_up = torch.randn(37, 600, device="cuda", dtype=torch.bfloat16, generator=draws)
    plain = rotate(qkv[:, :9], angles.cos(), angles.sin()), swiglu(gate_up)
    with torch.inference_mode():
        fused = rotate(qkv[:, :9], angles.cos(), angles.sin()), swiglu(gate_up)
    for ours, theirs in zip(fused, plain, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("rows", "heads", "kv", "dim", "context", "window"),
    [
        (5, 9, 3, 64, 300, None),
        (512, 9, 3, 64, 384, None),
        (1, 14, 2, 64, 4000, None),
        (7, 16, 8, 128, 700, 100),
        (3, 8, 8, 32, 130, 1),
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_decode_attention_equals_float64(rows, heads, kv, dim, context, window, dtype):
    from palestra.generate.engine.decode_kernel import attend

    draws = torch.Generator("cuda").manual_seed(0)
    across = pages_for(context)
    size = (rows * across + 3, PAGE, kv, dim)
    keys, values = (torch.randn(size, device="cuda", generator=draws).to(dtype) for _ in range(2))
    lengths = torch.randint(0, context, (rows,), device="cuda", generator=draws)
    lengths[0] = context - 1
    tables = torch.randperm(size[0], device="cuda", generator=draws)[: rows * across].view(rows, across).int()
    q = torch.randn(rows, heads, dim, device="cuda", generator=draws).to(dtype)
    found = attend(q, keys, values, tables, lengths, window)
    t = torch.arange(across * PAGE, device="cuda")
    seen = t[None] <= lengths[:, None]
    if window is not None:
        seen &= t[None] > lengths[:, None] - window
    wide = [x[tables.long()].flatten(1, 2).double().repeat_interleave(heads // kv, 2) for x in (keys, values)]
    scores = torch.einsum("bhd,bthd->bht", q.double(), wide[0]) * dim**-0.5
    expected = torch.einsum("bht,bthd->bhd", scores.masked_fill(~seen[:, None], -math.inf).softmax(-1), wide[1])
    assert relative(found, expected) < (1e-5 if dtype == torch.float32 else 5e-3)


@pytest.mark.parametrize("rows", [1, 5, 16, 17, 64, 65, 200])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"heads": 9, "kv_heads": 3, "width": 576, "mlp": 1536},
        {"heads": 2, "kv_heads": 1, "width": 256, "mlp": 100, "qk_norm": "head"},
        {"heads": 3, "kv_heads": 3, "width": 192, "attention_bias": True, "tied": False},
        {"head_dim": 128, "heads": 4, "kv_heads": 2, "width": 200, "window": 40},
    ],
)
def test_fused_layers_are_as_near_to_fp32_as_the_modules(rows, changes):
    shape = Shape(**{**SHAPE.model_dump(exclude_unset=True), **changes})
    model = with_varied_norms(make(torch.bfloat16, shape)).to("cuda", torch.bfloat16).requires_grad_(False)
    draws = torch.Generator("cuda").manual_seed(rows)
    tokens = torch.randint(0, 1000, (rows,), device="cuda", generator=draws)
    lengths = torch.randint(0, shape.context - 1, (rows,), device="cuda", generator=draws)
    across = pages_for(shape.context)
    pages = rows * across + 1
    tables = (1 + torch.randperm(pages - 1, device="cuda", generator=draws)).view(rows, across).int()
    caches = [
        Cache(shape, pages, dtype, torch.device("cuda")) for dtype in (torch.bfloat16, torch.bfloat16, torch.float32)
    ]
    for name in ("keys", "values"):
        old = torch.randn(getattr(caches[0], name).shape, device="cuda", generator=draws).bfloat16()
        for cache in caches:
            getattr(cache, name).copy_(old)
    with torch.inference_mode():
        plain = model(tokens, lengths, KernelAttention(caches[0], tables, lengths)).hidden
        layers = DecodeLayers.of(model, caches[1], across * PAGE)
        assert layers is not None
        fused = layers(tokens, lengths, tables)
        exact = copy.deepcopy(model).float()
        exact.dtype = torch.float32
        expected = exact(tokens, lengths, KernelAttention(caches[2], tables, lengths)).hidden
    assert relative(fused, expected) < 1.3 * relative(plain, expected) + 1e-3
    for ours, theirs in ((caches[1].keys, caches[2].keys), (caches[1].values, caches[2].values)):
        assert relative(ours, theirs) < 0.01


@pytest.mark.parametrize("vocab", [5000, 4096, 151_936])
def test_draw_follows_the_inverse_distribution_function_and_never_takes_the_impossible(vocab):
    from palestra.generate.engine.decode_kernel import sample_and_advance

    rows, draws = 1024, torch.Generator("cuda").manual_seed(0)
    scores = (torch.randn(1, vocab, device="cuda", generator=draws) * 3).repeat(rows, 1)
    scores[:, 100 : vocab - 700] = -math.inf
    state = BatchRows.empty(rows + 3, 64, torch.device("cuda"))
    state.integers[2], state.integers[3] = 1, 2
    state.integers[4] = torch.arange(rows + 3, device="cuda")
    state.integers[6] = torch.randint(-(2**62), 2**62, (rows + 3,), device="cuda", generator=draws)
    state.integers[2, 5] = 0
    u, before = uniform(state.integers[6], state.integers[4])[:rows], state.integers.clone()
    state.floats[0] = 0.7
    tokens, logprobs, counted = sample_and_advance(scores, state.integers, state.floats[0], state.ends)
    p = (scores[0].double() / 0.7).softmax(-1)
    expected = torch.searchsorted(p.cumsum(0), u, right=True).clamp(max=vocab - 1)
    assert (tokens != expected).sum() <= 4  # FP32 sums round at the borders
    assert bool((p[tokens] > 0).all())
    assert torch.allclose(logprobs.double(), p.log()[tokens], atol=1e-5)
    active = before[2, :rows]
    assert torch.equal(counted.long(), active)
    assert torch.equal(state.integers[0, :rows], torch.where(active > 0, tokens, before[0, :rows]))
    assert torch.equal(
        state.integers[[1, 3, 4], :rows],
        before[[1, 3, 4], :rows] + active * state.integers.new_tensor([[1], [-1], [1]]),
    )
    assert torch.equal(state.integers[:, rows:], before[:, rows:])  # rows that do not run
    best = int(scores[0].argmax())
    state.floats[0], state.ends[7, 3] = 0.0, best
    greedy, _, _ = sample_and_advance(scores, state.integers, state.floats[0], state.ends)
    assert bool((greedy == best).all())
    assert not state.active[:rows].any()  # two tokens were all
    state.integers[2], state.integers[3] = 1, 2
    sample_and_advance(scores, state.integers, state.floats[0], state.ends)
    assert (state.active[:rows] == 0).nonzero().tolist() == [[7]]  # its end token


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_burst_started_before_the_last_is_read_changes_nothing(dtype):
    model = make(dtype)
    asked = [Request(p, Sampling(max_new_tokens=5 + i % 50, seed=i)) for i, p in enumerate(prompts(150, seed=3))]
    results = []
    for ahead in (True, False):
        engine = Engine(model, eos=frozenset(range(9)), device="cuda", max_running=24, burst=4, kv_bytes=2**21)
        engine._runner.ahead = ahead
        results.append([result.generations[0] for result in engine.run(asked)])
        assert engine.metrics()["free_pages"] == engine.metrics()["pages"]
    same = [a.tokens == b.tokens for a, b in zip(*results, strict=True)]
    assert sum(same) >= 0.9 * len(same)  # rows beside others round otherwise, and a draw may fall on a border
    assert [len(g.tokens) for g in results[0]] == [len(g.logprobs) for g in results[0]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_fused_head_and_its_gradients_equal_float64(dtype):
    draws = torch.Generator().manual_seed(0)
    hidden, unembed = torch.randn(300, 64, generator=draws), torch.randn(7000, 64, generator=draws) * 0.3
    targets, weights = torch.randint(0, 7000, (300,), generator=draws), torch.randn(2, 300, generator=draws)
    hidden, unembed = hidden.to(dtype), unembed.to(dtype)
    results = []
    for device, kind in (("cuda", dtype), ("cpu", torch.float64)):
        h, w = (t.to(device, kind).requires_grad_() for t in (hidden, unembed))
        logprobs, entropies = token_logprobs(h, w, targets.to(device), 0.8)
        (logprobs * weights[0].to(device) + entropies * weights[1].to(device)).sum().backward()
        results.append((logprobs, entropies, h.grad, w.grad))
    bounds = (1e-5, 1e-5, 1e-4, 1e-4) if dtype == torch.float32 else (1e-5, 1e-4, 1e-2, 1e-2)
    for ours, exact, bound in zip(*results, bounds, strict=True):
        assert relative(ours.detach(), exact.detach()) < bound


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("heads", "kv", "dim", "width"), [(9, 3, 64, 1536), (2, 2, 8, 300), (14, 2, 64, 4864)])
def test_gradients_of_our_kernels_equal_float64(heads, kv, dim, width, compiled):
    from palestra.lm import kernels

    draws = torch.Generator().manual_seed(0)
    qkv, gate_up = torch.randn(37, heads + 2 * kv, dim, generator=draws), torch.randn(37, 2 * width, generator=draws)
    angles, weights = torch.randn(37, dim // 2, generator=draws), torch.randn(37, heads + 2 * kv, dim, generator=draws)

    def ours(qkv: torch.Tensor, gate_up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        turned = kernels.Turned.apply(qkv, angles.cos().cuda(), angles.sin().cuda(), heads)
        return torch.cat(turned, dim=1), swiglu(gate_up)

    def plain(qkv: torch.Tensor, gate_up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        turned = rotate(qkv[:, : heads + kv], angles.cos().double(), angles.sin().double())
        return torch.cat([turned, qkv[:, heads + kv :]], dim=1), swiglu(gate_up)

    results = []
    for function, device, dtype in ((ours, "cuda", torch.bfloat16), (plain, "cpu", torch.float64)):
        inputs = [t.bfloat16().to(device, dtype).requires_grad_() for t in (qkv, gate_up)]
        function = torch.compile(function) if compiled and device == "cuda" else function
        heads_out, gated = function(*inputs)
        ((heads_out * weights.to(device)).sum() + gated.square().sum()).backward()
        results.append([heads_out, gated, *(t.grad for t in inputs)])
    for found, exact in zip(*results, strict=True):
        assert relative(found.detach(), exact.detach()) < 1e-2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_head_of_weighted_tokens_equals_float64(dtype):
    draws = torch.Generator().manual_seed(0)
    hidden, unembed = torch.randn(300, 64, generator=draws), torch.randn(7000, 64, generator=draws) * 0.3
    targets, weights = torch.randint(0, 7000, (300,), generator=draws), torch.rand(300, generator=draws)
    results = []
    for device, kind in (("cuda", dtype), ("cpu", torch.float64)):
        h, w = (t.to(dtype).to(device, kind).requires_grad_() for t in (hidden, unembed))
        total = weighted_logprob(h, w, targets.to(device), weights.to(device))
        (total / 7).backward()
        results.append((total, h.grad, w.grad))
    bounds = (1e-6, 1e-4, 1e-4) if dtype == torch.float32 else (1e-5, 1e-2, 1e-2)
    for ours, exact, bound in zip(*results, bounds, strict=True):
        assert relative(ours.detach(), exact.detach()) < bound


def test_optimizer_that_does_not_wait_moves_and_skips_as_on_the_cpu():
    results = []
    for device in ("cuda", "cpu"):
        model = make(torch.float32).to(device)
        optimizer = Optimizer(model, AdamWSpec(name="adamw", max_grad_norm=0.5), 10)
        rows, draws = [], torch.Generator().manual_seed(0)
        for step in range(6):
            for parameter in model.parameters():
                noise = torch.randn(parameter.shape, generator=draws) * (1e-4 if step % 2 else 1.0)
                parameter.grad = (noise * (float("nan") if step == 3 else 1.0)).to(device)
            rows.append(optimizer.step(step / 10))
        found = [[float(row[name]) for name in ("grad_norm", "skipped", "skipped_steps")] for row in rows]
        weights = torch.cat([p.detach().flatten().cpu() for p in model.parameters()])
        results.append((found, weights, optimizer.state()["skipped"]))
    (ours, weights, skipped), (theirs, expected, also) = results
    assert torch.tensor(ours).allclose(torch.tensor(theirs), rtol=1e-5, equal_nan=True)
    assert skipped == also == 1
    assert relative(weights, expected) < 1e-6


@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("lengths", [[33, 5, 64, 1, 20], [32, 32, 32]])
def test_packed_model_in_bf16_is_near_fp32_on_the_cpu(lengths, window):
    shape = SHAPE.model_copy(update={"window": window})
    model = make(torch.float32, shape)
    draws = torch.Generator().manual_seed(1)
    batch = Batch.pack([torch.randint(0, 1000, (n,), generator=draws).numpy() for n in lengths])
    grads = []
    for device, dtype in (("cuda", torch.bfloat16), ("cpu", torch.float32)):
        model.to(device)
        model.dtype = dtype
        model.zero_grad()
        scored = score(model, batch.to(device))
        scored.logprobs.sum().backward()
        grads.append((scored.logprobs.detach().cpu(), model.layers[0].attn.qkv.weight.grad.cpu().clone()))
    assert relative(grads[0][0], grads[1][0]) < 2e-2
    assert relative(grads[0][1], grads[1][1]) < 6e-2


def test_engine_in_fp32_writes_the_same_tokens_as_on_the_cpu():
    model = make(torch.float32)
    asked = [Request(p, Sampling(max_new_tokens=40, temperature=t, seed=7)) for p in prompts(13) for t in (0.0, 1.0)]
    torch.backends.cuda.matmul.allow_tf32 = False
    results = [Engine(model, eos=frozenset({3}), device=device, max_running=9).run(asked) for device in ("cpu", "cuda")]
    same = [a.generations[0].tokens == b.generations[0].tokens for a, b in zip(*results, strict=True)]
    assert sum(same) >= len(same) - 1  # a draw may fall on a border


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_on_a_gpu_writes_the_tokens_of_the_cpu(family, tmp_path):
    _same_on_both(tiny_checkpoint(family, tmp_path))


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "gpt2", "olmoe"])
def test_a_gpu_without_triton_writes_the_tokens_of_the_cpu(family, tmp_path, monkeypatch):
    for module in ("lm.layers", "lm.head", "generate.engine.batch", "generate.engine.engine"):
        monkeypatch.setattr(f"palestra.{module}.TRITON", False)
    _same_on_both(tiny_checkpoint(family, tmp_path))


def _same_on_both(folder: Path) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    asked = [Request(tuple(range(3, 3 + n)), Sampling(max_new_tokens=12, temperature=0.0)) for n in (1, 9, 20)]
    engines = [Engine.from_folder(folder, device=device, max_running=4) for device in ("cuda", "cpu")]
    found, expected = ([result.generations[0].tokens for result in engine.run(asked)] for engine in engines)
    assert found == expected


@pytest.mark.parametrize("family", ["gpt_oss", "qwen3", "gemma3", "mixtral", "olmo3"])
def test_every_family_in_bf16_agrees_with_its_trainer(family, tmp_path):
    engine = Engine.from_folder(tiny_checkpoint(family, tmp_path), dtype=torch.bfloat16, device="cuda", max_running=4)
    asked = [Request(tuple(range(3, 3 + n)), Sampling(max_new_tokens=30, seed=n, ignore_eos=True)) for n in (1, 9, 20)]
    results = engine.run(asked)
    masks = [[0.0] * len(r.prompt) + [1.0] * len(r.generations[0].tokens) for r in results]
    batch = Batch.pack([(*r.prompt, *r.generations[0].tokens) for r in results], masks).to("cuda")
    behavior = torch.tensor([value for r in results for value in r.generations[0].logprobs], device="cuda")
    with torch.no_grad():
        trainer = score(engine.model, batch).logprobs[batch.loss_mask > 0]
    assert k3(behavior, trainer).mean().item() <= 1e-3


def test_penalties_beside_free_rows_write_the_same_tokens_as_on_the_cpu():
    model, settings = (
        make(torch.float32),
        ({}, {"frequency_penalty": 1.5, "repetition_penalty": 1.4, "logit_bias": {5: 9}}),
    )
    asked = [
        Request(p, Sampling(max_new_tokens=9 + 30 * (i % 2), seed=i, **settings[i % 2]))
        for i, p in enumerate(prompts(16))
    ]
    torch.backends.cuda.matmul.allow_tf32 = False
    results = [Engine(model, eos=frozenset({3}), device=device, max_running=9).run(asked) for device in ("cpu", "cuda")]
    same = [a.generations[0].tokens == b.generations[0].tokens for a, b in zip(*results, strict=True)]
    assert sum(same) >= len(same) - 1  # a draw may fall on a border


@pytest.mark.parametrize("lengths", [[1], [64], [30] * 32, [200, 1, 5], [7] * 20, [129, 100], [3] * 200])
def test_prompts_by_a_graph_have_the_keys_and_values_of_separate_kernels(lengths, monkeypatch):
    engine = Engine(make(torch.bfloat16).cuda(), eos=frozenset(), device="cuda", max_running=256)
    runner, draws = engine._runner, torch.Generator().manual_seed(len(lengths))
    across = pages_for(max(lengths))
    segments = [Segment([1 + i * across + p for p in range(pages_for(n))], 0, n) for i, n in enumerate(lengths)]
    tokens = torch.randint(0, 1000, (sum(lengths),), generator=draws).tolist()

    def cached() -> torch.Tensor:
        for part in (runner.cache.keys, runner.cache.values):
            part.fill_(float("nan"))
        runner.prefill(segments, tokens)
        rows = [
            (kept[:, list(s.pages)].flatten(1, 2)[:, : s.end])
            for s in segments
            for kept in (runner.cache.keys, runner.cache.values)
        ]
        return torch.cat(rows, dim=1)

    cached()  # captures
    captures, by_graph = engine.captures, cached()
    assert captures > 0
    monkeypatch.setattr(cuda, "_graphed", lambda *sizes: None)
    separately = cached()
    assert engine.captures == captures
    assert relative(by_graph, separately) < 5e-3


@pytest.mark.parametrize("halves", [False, True])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"layers": 1, "heads": 9, "kv_heads": 3, "width": 576},
        {"heads": 14, "kv_heads": 2, "head_dim": 64, "attention_bias": True, "window": 40},
        {"heads": 2, "kv_heads": 1, "head_dim": 32, "width": 200, "mlp": 100, "qk_norm": "head"},
        {"heads": 16, "kv_heads": 8, "head_dim": 128, "qk_norm": "head", "tied": False},
    ],
)
def test_prompts_by_fused_layers_have_the_keys_and_values_of_the_modules(changes, halves, monkeypatch):
    shape = Shape(**{**SHAPE.model_dump(exclude_unset=True), **changes})
    model = with_varied_norms(make(torch.bfloat16, shape)).cuda()
    runner, lengths = Engine(model, eos=frozenset(), device="cuda", max_running=8)._runner, [33, 1, 70, 5, 101]
    tokens = torch.randint(0, 1000, (5, 101), generator=torch.Generator().manual_seed(0)).tolist()
    pages = [[1 + i * pages_for(101) + p for p in range(pages_for(101))] for i in range(5)]

    def cached() -> torch.Tensor:
        for part in (runner.cache.keys, runner.cache.values):
            part.fill_(float("nan"))
        ends = [[0] * 5, [n // 2 for n in lengths], lengths] if halves else [[0] * 5, lengths]
        for bounds in pairwise(ends):
            some = [(i, start, end) for i, (start, end) in enumerate(zip(*bounds, strict=True)) if start < end]
            segments = [Segment(pages[i], start, end) for i, start, end in some]
            runner.prefill(segments, [token for i, start, end in some for token in tokens[i][start:end]])
        both, sizes = (runner.cache.keys, runner.cache.values), zip(pages, lengths, strict=True)
        return torch.cat([part[:, own].flatten(1, 2)[:, :n] for own, n in sizes for part in both], dim=1)

    assert runner._prompt_layers is not None
    fused = cached()
    monkeypatch.setattr(runner, "_prompt_layers", None)
    monkeypatch.setattr(cuda, "_graphed", lambda *sizes: None)
    modules = cached()
    assert relative(fused[0], modules[0]) < 1e-3  # rounded at the same places
    assert relative(fused, modules) < 1e-2


@pytest.mark.parametrize("prefill", [16, 4096])
def test_engine_in_bf16_agrees_with_the_trainer(prefill):
    model = make(torch.bfloat16).cuda()
    engine = Engine(model, eos=frozenset(), device="cuda", max_running=64, prefill_tokens=prefill)
    asked = [Request(p, Sampling(max_new_tokens=80, seed=i)) for i, p in enumerate(prompts(130, seed=5))]
    results = engine.run(asked)
    masks = [[0.0] * len(r.prompt) + [1.0] * len(r.generations[0].tokens) for r in results]
    batch = Batch.pack([(*r.prompt, *r.generations[0].tokens) for r in results], masks).to("cuda")
    behavior = torch.tensor([value for r in results for value in r.generations[0].logprobs], device="cuda")
    with torch.no_grad():
        trainer = score(model, batch).logprobs[batch.loss_mask > 0]
    kl = k3(behavior, trainer).mean().item()
    print(f"k3 {kl:.2e} over {len(behavior)} tokens, largest gap {(behavior - trainer).abs().max().item():.3f}")
    assert len(behavior) == 130 * 80
    assert kl <= 1e-4


def test_engine_stops_filters_and_publishes_inside_its_graphs():
    model = make(torch.bfloat16).cuda()
    engine = Engine(model, eos=frozenset(range(12)), device="cuda", max_running=16, burst=8)
    first = engine.run([Request(p, Sampling(max_new_tokens=60, seed=1, top_p=0.9)) for p in prompts(20)])
    captures = engine.captures
    for result in first:
        (done,) = result.generations
        ends = [token < 12 for token in done.tokens]
        assert not any(ends[:-1])
        assert (done.stop_reason == StopReason.EOS) == ends[-1]
        assert len(done.tokens) == len(done.logprobs) == len(done.versions)
    again = engine.run([Request(p, Sampling(max_new_tokens=60, seed=1, top_p=0.9)) for p in prompts(20)])
    assert engine.captures == captures  # nothing is captured twice
    assert [r.generations[0].tokens for r in again] == [r.generations[0].tokens for r in first]
    other = make(torch.bfloat16).cuda()
    with torch.no_grad():
        other.embed.normal_(0, 0.1)
    engine.publish(other.state_dict(), version=5)
    (changed,) = engine.run([Request(prompts(1)[0], Sampling(max_new_tokens=20, seed=1, min_new_tokens=20), n=4)])
    assert {len(g.tokens) for g in changed.generations} == {20}
    assert all(set(g.versions) == {5} for g in changed.generations)
    assert engine.captures <= captures + 2


@pytest.mark.parametrize("lengths", [[30] * 8, [5, 30, 17, 1, 30, 8, 22, 9]])
@pytest.mark.parametrize("compiled", [False, True])
def test_prompts_computed_once_give_the_gradients_of_whole_sequences(lengths, compiled):
    draws, texts = torch.Generator().manual_seed(0), []
    for first in (0, 4):
        prompt = torch.randint(0, 1000, (40,), generator=draws).tolist()
        for n in lengths[first : first + 4]:
            texts.append([*prompt, *torch.randint(0, 1000, (n,), generator=draws).tolist()])
    known = Batch.pack(texts, [[0] * 40 + [1] * n for n in lengths])
    batch = known.to("cuda")
    whole = copy.copy(batch)
    object.__setattr__(whole, "shared", None)
    exact, model = make(torch.float32).double(), make(torch.bfloat16).cuda()
    exact.dtype = torch.float64
    if compiled:
        for block in model.layers:
            block.compile()

    def gradient(model: Transformer, batch: Batch) -> torch.Tensor:
        model.zero_grad()
        score(model, batch).logprobs.sum().backward()
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    assert batch.shared is not None
    expected, found = gradient(exact, known), gradient(model, batch)
    assert torch.equal(found, gradient(model, batch))  # sums in order: the same bits again
    assert relative(found, expected) < 1.2 * relative(gradient(model, whole), expected)
