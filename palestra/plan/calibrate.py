"""`palestra plan --calibrate`: prices of work on this machine, from kernels, decode steps and short runs."""

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import compress
from math import ceil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import psutil

from palestra.errors import needs_extra
from palestra.plan.costs import Layout, scored_again, traffic, train_step, train_work
from palestra.plan.devices import CPU, PUBLISHED, Device, Pool, Work
from palestra.plan.job import open_job
from palestra.plan.measure import Measured, measured, small
from palestra.plan.search import Plan, Search
from palestra.spec.load import load
from palestra.spec.shape import Shape

ROUNDS = 3
"""Of each measurement; the best counts, because others may use the machine."""
DECODED = 16
"""Tokens of the decode steps that are timed."""
# Layers, width, MLP, vocabulary, sequences, tokens of each.
Case = tuple[int, int, int, int, int, int]
CASES: dict[str, list[Case]] = {
    CPU: [
        *((2, 64, 192, 64, 16, 16), (2, 64, 192, 64, 64, 64), (6, 128, 384, 512, 8, 64), (3, 256, 768, 2048, 8, 96)),
        *((8, 64, 256, 128, 32, 24), (2, 384, 1024, 256, 4, 192), (1, 640, 2560, 128, 4, 64)),
        (4, 192, 512, 64, 64, 32),
    ],
    "cuda": [
        *((12, 512, 1536, 8192, 64, 256), (30, 576, 1536, 49152, 1, 128), (30, 576, 1536, 49152, 64, 256)),
        *((24, 1024, 2816, 32768, 32, 512), (16, 2048, 5632, 32768, 16, 1024), (30, 576, 1536, 49152, 256, 128)),
        *((6, 768, 2304, 4096, 16, 256), (20, 1024, 3072, 4096, 8, 384), (12, 768, 2048, 16384, 128, 128)),
        *((4, 1024, 4096, 8192, 64, 64), (8, 512, 1536, 128, 32, 64)),
    ],
}
RUNS: dict[str, tuple[dict[str, Any], tuple[tuple[int, int], ...]]] = {
    CPU: ({"layers": 2, "width": 64, "heads": 2, "mlp": 192}, ((4, 24), (24, 24), (5, 96))),
    "cuda": ({"layers": 12, "width": 512, "heads": 8, "mlp": 1536}, ((4, 24), (24, 24), (24, 128), (6, 320))),
}
"""Shape of the short runs; prompts and tokens of those that sample."""


def calibrated(tell: Callable[[str], None], *, kind: str | None = None) -> Device:
    """This machine's first GPU, else one of its cores; two to three minutes. `kind` has the cases and runs of a GPU."""
    with needs_extra("calibrating", "train"):
        import torch
    cuda = torch.cuda.is_available()
    kind = kind or ("cuda" if cuda else CPU)
    torch.set_num_threads(1)
    samples: dict[str, list[tuple[Work, float]]] = {"train": [], "update": [], "prefill": [], "decode": []}
    for number, case in enumerate(CASES[kind], 1):
        for phase, work, seconds in (*_trained(case, cuda, number % 2 == 0), *_generated(case, cuda)):
            samples[phase].append((work, seconds))
        gc.collect()  # models and their caches; some refer to themselves
        torch.cuda.empty_cache()
        tell(f"kernels {number}/{len(CASES[kind])}")
    tensor = torch.ones(2**24, device="cuda" if cuda else "cpu")
    copied = tensor.nbytes / _best(tensor.clone, cuda)
    prices = {phase: fitted(rows) for phase, rows in samples.items()}
    if kind != CPU:
        prices["train"] = fitted_apart(samples["train"])
    prices |= {name: Work() for name in ("complete", "apart", "joined")} | {"publish": Work(bytes=1 / copied)}
    name = torch.cuda.get_device_name() if cuda else "one core"
    source = f"calibrated, {name}, torch {torch.__version__}"
    if cuda:  # links and network as published, or as those of an H200
        short = max((each for each in PUBLISHED if each in name.replace(" ", "")), key=len, default=None)
        total = torch.cuda.mem_get_info()[1]
        device = replace(PUBLISHED[short or "H200"], name=short or name.split()[-1], memory=total)
    else:  # Gloo moves a fifth of what a copy does (docs/log.md)
        memory = psutil.virtual_memory().total
        device = Device(CPU, memory, copied / 5, copied / 5, {}, hop=0.0, base=0.0)
    return _with_runs(replace(device, prices=prices, source=source), *RUNS[kind], tell)


def fitted(samples: Sequence[tuple[Work, float]], known: Sequence[float] | float = 0.0) -> Work:
    """Prices, none below 0, with the least sum of squared relative errors; `known` seconds of each have others."""
    rows = np.array([[count / seconds for count in work] for work, seconds in samples])
    scale = np.maximum(rows.max(0), 1e-300)
    rows, prices = rows / scale, np.zeros(len(Work._fields))
    rest = 1 - known / np.array([seconds for _, seconds in samples])
    norms = np.maximum((rows**2).sum(0), 1e-12)
    for _ in range(20_000):  # coordinate descent: each price in turn is the best for what the others leave
        for j in range(len(prices)):
            price = max(0.0, prices[j] + rows[:, j] @ rest / norms[j])
            rest -= rows[:, j] * (price - prices[j])
            prices[j] = price
    return Work(*(prices / scale).tolist())


def fitted_apart(samples: Sequence[tuple[Work, float]]) -> Work:
    """Prices of a GPU and of the Python that starts its kernels ahead: the longer of both is what is measured."""
    fastest = min(seconds / work.flops for work, seconds in samples)
    waited = [work.flops * fastest > seconds / 2 for work, seconds in samples]  # for the GPU, not for Python
    prices = Work()
    for _ in range(10):
        gpu = [(Work(work.flops, work.bytes), seconds) for work, seconds in compress(samples, waited)]
        host = [(Work(0, 0, *work[2:]), s) for (work, s), gpus in zip(samples, waited, strict=True) if not gpus]
        prices = Work(*fitted(gpu)[:2], *(fitted(host)[2:] if host else (0, 0, 0)))
        parts = [Work(*(price * count for price, count in zip(prices, work, strict=True))) for work, _ in samples]
        if waited == (waited := [each.flops + each.bytes > each.host for each in parts]) or not any(waited):
            break
    return prices


def _best(work: Callable[[], object], cuda: bool, before: Callable[[], object] = lambda: None) -> float:
    """Seconds of the fastest of a few calls; of the processor on a CPU that others use too."""
    import torch

    clock, wait = (time.perf_counter, torch.cuda.synchronize) if cuda else (time.process_time, lambda: None)
    seconds = []
    for _ in range(1 + ROUNDS):
        before()
        wait()
        begin = clock()
        work()
        wait()
        seconds.append(clock() - begin)
    return max(1e-6, min(seconds[1:]))


def _model(case: Case, cuda: bool) -> Any:
    import torch

    from palestra.lm.model import Transformer

    layers, width, mlp, vocab, *_ = case
    shape = Shape(layers=layers, width=width, mlp=mlp, vocab=vocab, heads=max(2, width // 64), context=2048)
    model = Transformer(shape, torch.bfloat16 if cuda else torch.float32).to("cuda" if cuda else "cpu")
    model.initialize(torch.Generator().manual_seed(0))
    return model


def _trained(case: Case, cuda: bool, ragged: bool) -> Iterator[tuple[str, Work, float]]:
    """Gradients and updates, as in pretraining; or as in post-training, of lengths from half to one and a half."""
    import torch

    from palestra.lm.batch import Batch, score, total_logprob
    from palestra.lm.engine import Loss, TrainEngine
    from palestra.lm.optim import Optimizer
    from palestra.lm.ranks import Ranks
    from palestra.spec.lm import AdamWSpec

    torch.backends.cuda.enable_cudnn_sdp(not ragged)  # as post-training does
    model = _model(case, cuda)
    optimizer = Optimizer(model, AdamWSpec(name="adamw"), 10)
    engine = TrainEngine(model, optimizer, Ranks(), micro_tokens=16384, flops_per_token=1.0)
    lengths = [case[5] // 2 + case[5] * row // max(1, case[4] - 1) if ragged else case[5] for row in range(case[4])]
    tokens = [torch.randint(case[3], (length,)).tolist() for length in lengths]

    def loss(model: Any, batch: Batch) -> Loss:
        if not ragged:
            return Loss(-total_logprob(model, batch)[0], {})
        scored = score(model, batch)
        return Loss(-scored.logprobs.sum(), {"entropy": scored.entropy.sum()})

    def gradients() -> None:
        engine.forward_backward(Batch.pack(tokens).to(engine.device), loss, 1.0)

    spec = {
        **{"kind": "pretrain", "name": "case", "train": {"steps": 2, "batch": case[4]}},
        "model": {"shape": model.shape.model_dump(exclude_none=True), "tokenizer": "characters"},
        "data": {"train": {"texts": {"path": "-"}}, "context": case[5]},
    }
    train, update = train_work(open_job(load(spec).spec), Layout(), cpu=not cuda)
    again = sum(lengths) * scored_again(model.shape)
    work = train._replace(rows=float(case[4]), flops=train.flops + again) if ragged else train
    yield "train", work, _best(gradients, cuda)
    yield "update", update, _best(lambda: engine.optim_step(0.0), cuda, before=gradients)


def _generated(case: Case, cuda: bool) -> Iterator[tuple[str, Work, float]]:
    import torch

    from palestra.generate.engine.engine import Engine
    from palestra.generate.types import Request, Sampling

    model, used, (*_, vocab, rows, length) = _model(case, cuda), 2 if cuda else 4, case
    place, context = "cuda" if cuda else "cpu", length + DECODED + 1
    engine = Engine(model, eos=frozenset(), device=place, context=context, max_running=rows)
    generator = torch.Generator().manual_seed(0)  # no prompt is like one before

    def seconds(new: int) -> float:
        def work() -> None:
            prompts = torch.randint(vocab, (rows, length), generator=generator).tolist()
            engine.run([Request(tuple(prompt), Sampling(max_new_tokens=new)) for prompt in prompts])

        return _best(work, cuda)

    first, all_ = seconds(1), seconds(1 + DECODED)
    shape, context = model.shape, length + DECODED // 2
    flops = rows * length * shape.flops_per_token(length // 2)
    yield "prefill", Work(flops, rows * length * traffic(shape, used), 0.0, rows, 0.0), first
    keys = 2 * shape.layers * shape.kv * shape.dim * used * context
    step = Work(rows * shape.flops_per_token(context), shape.parameters() * used + rows * keys, shape.layers, rows, 1.0)
    yield "decode", step.times(DECODED), max(1e-6, all_ - first)


def _with_runs(
    device: Device, shape: dict[str, Any], sampled: Sequence[tuple[int, int]], tell: Callable[[str], None]
) -> Device:
    """With what only runs show: Python of steps and completions, memory of processes, what they do to each other."""

    def run(name: str, wider: int = 1, **changes: Any) -> tuple[Measured, Plan, float]:
        scaled = {key: count * (1 if key == "layers" else wider) for key, count in shape.items()}
        with TemporaryDirectory() as folder:
            spec, known = small(Path(folder), scaled, **changes)
            found = measured(spec, Path(folder))
            known |= {"new": found.length} if found.length else {}  # it learns to stop later, or earlier
            plan = Search(open_job(load(spec).spec, known=known), Pool(device, 2, 1)).written()
        assert plan is not None
        tell(f"{name}: {found.step:.3f} s a step, {plan.step:.3f} by what is known so far")
        return found, plan, max(0.0, found.peak - sum(plan.memory.values()))

    found, plan, more = run("pretraining", kind="pretrain", train={"batch": 8})
    device.prices["update"] = device.prices["update"].plus(Work(steps=max(0.0, found.step - plan.step)))
    device = replace(device, base=more) if device.cpu else device
    runs, known, bytes_ = [], [], []
    for prompts, new in sampled:
        changes = {"train": {"prompts_per_step": prompts}, "rollout": {"max_new_tokens": new}}
        found, plan, more = run(f"{8 * prompts} completions of {new} tokens", **changes)
        runs.append((Work(launches=8.0 * ceil(new / 8), rows=8.0 * prompts, steps=1.0), found.step))
        known.append(plan.step)
        bytes_.append(more)
    device.prices["complete"] = fitted(runs, known)
    if not device.cpu:
        return device
    device, many = replace(device, sampling=float(np.mean(bytes_))), {"train": {"prompts_per_step": 12}}
    found, plan, _ = run("a generator apart", **many, cluster={"generators": 1})
    device.prices["apart"] = Work(rows=max(0.0, found.step - plan.step) / 96)
    stale = {"train": {"prompts_per_step": 8}, "rollout": {"staleness": 1}}
    found, plan, _ = run("a generator apart, staleness 1", 3, **stale, cluster={"generators": 1})
    device = replace(device, crowd=max(0.0, found.step / plan.step - 1))
    found, plan, more = run("two trainers", kind="pretrain", devices=2, train={"batch": 8})
    device = replace(device, hop=1.0, joined=more)
    waits = train_step(plan.job, plan.layout, replace(plan.pool, device=device)).seconds - plan.train.seconds
    device = replace(device, hop=max(0.0, found.step / (1 + device.crowd) - plan.train.seconds) / waits)
    found, plan, _ = run("two trainers, a generator apart", **many, cluster={"trainers": 2, "generators": 1})
    device.prices["joined"] = Work(rows=max(0.0, found.step - plan.step) / 96)
    return device
