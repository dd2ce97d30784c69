"""`palestra plan --calibrate`: prices of work on this machine, from kernels, decode steps and short runs."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np

from palestra.errors import needs_extra
from palestra.plan.costs import Layout, train_step, train_work
from palestra.plan.devices import CPU, Device, Pool, Work, this_cpu, this_gpu
from palestra.plan.job import Job, open_job
from palestra.plan.measure import digits, measured
from palestra.plan.search import Search
from palestra.spec.load import load
from palestra.spec.shape import Shape

ROUNDS = 3
"""Of each measurement; the best counts, because others may use the machine."""
TEXT = "0123456789+-*=abcdefghijklmnopqrstuvwxyz<>/ \n"


class Case(NamedTuple):
    """Sizes that one measurement has."""

    layers: int
    width: int
    mlp: int
    vocab: int
    sequences: int
    length: int
    """Tokens of a sequence; of generation, of a prompt."""

    @property
    def shape(self) -> Shape:
        heads = max(2, self.width // 64)
        return Shape(layers=self.layers, width=self.width, heads=heads, mlp=self.mlp, context=2048, vocab=self.vocab)


CASES = {
    CPU: [
        *(Case(2, 64, 192, 64, 16, 16), Case(2, 64, 192, 64, 64, 64), Case(6, 128, 384, 512, 8, 64)),
        *(Case(3, 256, 768, 2048, 8, 96), Case(8, 64, 256, 128, 32, 24), Case(2, 384, 1024, 256, 4, 192)),
    ],
    "cuda": [
        *(Case(12, 512, 1536, 8192, 64, 256), Case(30, 576, 1536, 49152, 1, 128), Case(30, 576, 1536, 49152, 64, 256)),
        *(
            Case(24, 1024, 2816, 32768, 32, 512),
            Case(16, 2048, 5632, 32768, 16, 1024),
            Case(30, 576, 1536, 49152, 256, 128),
        ),
    ],
}
DECODED = 16
"""Tokens of the decode steps that are timed."""


def calibrated(tell: Callable[[str], None]) -> Device:
    """This machine's first GPU, else one of its cores; about two minutes."""
    with needs_extra("calibrating", "train"):
        import torch
    cuda = torch.cuda.is_available()
    torch.set_num_threads(1)
    cases = CASES["cuda" if cuda else CPU]
    samples: dict[str, list[tuple[Work, float]]] = {"train": [], "update": [], "prefill": [], "decode": []}
    for number, case in enumerate(cases, 1):
        for phase, work, seconds in (*_trained(case, cuda), *_generated(case, cuda)):
            samples[phase].append((work, seconds))
        tell(f"kernels {number}/{len(cases)}")
    prices = {phase: fitted(rows) for phase, rows in samples.items()} | {"complete": Work(), "publish": Work()}
    copied = _copy_rate(cuda)
    prices["publish"] = Work(bytes=1 / copied)
    source = f"calibrated, {torch.cuda.get_device_name() if cuda else 'one core'}, torch {torch.__version__}"
    if cuda:
        device = this_gpu(torch.cuda.get_device_name(), torch.cuda.mem_get_info()[1], prices, source)
    else:  # Gloo moves a fifth of what a copy does (docs/log.md)
        device = this_cpu(prices, copied / 5, 0.0, 0.0, source)
    return _with_runs(device, tell)


def fitted(samples: Sequence[tuple[Work, float]]) -> Work:
    """Prices, none below 0, with the least sum of squared relative errors."""
    rows = np.array([[count / seconds for count in work] for work, seconds in samples])
    scale = np.maximum(rows.max(0), 1e-300)
    rows, prices, rest = rows / scale, np.zeros(len(Work._fields)), np.ones(len(samples))
    norms = np.maximum((rows**2).sum(0), 1e-12)
    for _ in range(20_000):  # coordinate descent: each price in turn is the best for what the others leave
        for j in range(len(prices)):
            price = max(0.0, prices[j] + rows[:, j] @ rest / norms[j])
            rest -= rows[:, j] * (price - prices[j])
            prices[j] = price
    return Work(*(prices / scale).tolist())


def job_of(case: Case) -> Job:
    """Pretraining with the sizes of a case."""
    spec = {
        "kind": "pretrain",
        "name": "case",
        "model": {"shape": case.shape.model_dump(exclude_none=True), "tokenizer": "characters"},
        "data": {"train": {"texts": {"path": "-"}}, "context": case.length},
        "train": {"steps": 2, "batch": case.sequences},
    }
    return open_job(load(spec).spec)


def _best(work: Callable[[], object], cuda: bool, before: Callable[[], object] = lambda: None) -> float:
    """Seconds of the fastest of a few calls; of the processor on a CPU that others use too."""
    import torch

    clock = time.perf_counter if cuda else time.process_time
    seconds = []
    before()
    work()
    for _ in range(ROUNDS):
        before()
        if cuda:
            torch.cuda.synchronize()
        begin = clock()
        work()
        if cuda:
            torch.cuda.synchronize()
        seconds.append(clock() - begin)
    return max(1e-6, min(seconds))


def _trained(case: Case, cuda: bool) -> Iterator[tuple[str, Work, float]]:
    import torch

    from palestra.lm.batch import Batch, score
    from palestra.lm.engine import Loss, TrainEngine
    from palestra.lm.model import Transformer
    from palestra.lm.optim import Optimizer
    from palestra.lm.ranks import Ranks
    from palestra.spec.lm import AdamWSpec

    device = torch.device("cuda" if cuda else "cpu")
    model = Transformer(case.shape).to(device)
    model.initialize(torch.Generator(device).manual_seed(0))
    settings: dict[str, Any] = {"micro_tokens": 16384, "flops_per_token": 1.0}
    engine = TrainEngine(model, Optimizer(model, AdamWSpec(name="adamw"), 10), Ranks(), **settings)
    tokens = torch.randint(case.vocab, (case.sequences, case.length)).tolist()

    def gradients() -> None:
        with torch.autocast("cuda", torch.bfloat16, enabled=cuda):
            batch = Batch.pack(tokens).to(device)
            engine.forward_backward(batch, lambda m, b: Loss(-score(m, b, entropy=False).logprobs.sum(), {}), 1.0)

    train, update = train_work(job_of(case), Layout(), cpu=not cuda)
    yield "train", train, _best(gradients, cuda)
    yield "update", update, _best(lambda: engine.optim_step(0.0), cuda, before=gradients)


def _generated(case: Case, cuda: bool) -> Iterator[tuple[str, Work, float]]:
    import torch

    from palestra.generate.engine.engine import Engine
    from palestra.generate.types import Request, Sampling
    from palestra.lm.model import Transformer

    model = Transformer(case.shape).to("cuda" if cuda else "cpu")
    model.initialize(torch.Generator(next(model.parameters()).device).manual_seed(0))
    dtype = torch.bfloat16 if cuda else torch.float32
    engine = Engine(model, eos=frozenset(), dtype=dtype, device="cuda" if cuda else "cpu", max_running=case.sequences)
    calls = iter(range(10**9))

    def seconds(new: int) -> float:
        def work() -> None:
            generator = torch.Generator().manual_seed(next(calls))  # no prompt is like one before
            prompts = torch.randint(case.vocab, (case.sequences, case.length), generator=generator).tolist()
            engine.run([Request(tuple(prompt), Sampling(max_new_tokens=new)) for prompt in prompts])

        return _best(work, cuda)

    first, all_ = seconds(1), seconds(1 + DECODED)
    yield "prefill", *_prompts(case, cuda, first)
    yield "decode", _decode(case, cuda).times(DECODED), max(1e-6, all_ - first)


def _prompts(case: Case, cuda: bool, seconds: float) -> tuple[Work, float]:
    from palestra.plan.costs import traffic

    tokens = case.sequences * case.length
    flops = tokens * case.shape.flops_per_token(case.length // 2)
    return Work(flops, tokens * traffic(case.shape, 2 if cuda else 4), 0.0, case.sequences, 0.0), seconds


def _decode(case: Case, cuda: bool) -> Work:
    """Of one step with all rows."""
    shape, used, context = case.shape, 2 if cuda else 4, case.length + DECODED // 2
    keys = 2 * shape.layers * shape.kv * shape.dim * used * context
    flops = case.sequences * shape.flops_per_token(context)
    return Work(flops, shape.parameters() * used + case.sequences * keys, shape.layers, case.sequences, 1.0)


def _copy_rate(cuda: bool) -> float:
    """Bytes a second of a copy in the device's memory."""
    import torch

    tensor = torch.ones(2**24, device="cuda" if cuda else "cpu")
    return tensor.nbytes / _best(tensor.clone, cuda)


def small_posttrain(folder: Path, shape: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A spec of post-training with a random model of characters, which is written first."""
    import torch

    from palestra.data.tokenizers import character_tokenizer
    from palestra.lm.hf import save_pretrained
    from palestra.lm.model import Transformer

    tokenizer = character_tokenizer(TEXT)
    tokenizer.save(folder / "tokenizer")
    model = Transformer(Shape.model_validate({"vocab": tokenizer.vocab_size, "context": 256, **shape}))
    model.initialize(torch.Generator().manual_seed(0))
    save_pretrained(folder / "model", model, tokenizer=tokenizer, eos=())
    rollout = {"group": 8, "max_new_tokens": 24, "record": False, **changes.pop("rollout", {})}
    task = {"task": "arithmetic", "args": {"digits": 3, "stop": []}}
    return {
        "kind": "posttrain",
        "name": "measured",
        "model": {"init": str(folder / "model")},
        "tasks": {"train": [{**task, "reward": {"function": f"{digits.__module__}:digits"}}]},
        "rollout": rollout,
        "algorithm": {"preset": "dr_grpo"},
        "train": {"steps": 6, "prompts_per_step": 8, **changes.pop("train", {})},
        "optim": {"name": "adamw", "lr": 1e-5},
        "every": {"checkpoint": "1 hours", "eval": None},
        "threads": 1,
        **changes,
    }


def small_pretrain(folder: Path, shape: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A spec of pretraining on characters, whose text is written first."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "text.txt").write_text(TEXT * 4000)
    return {
        "kind": "pretrain",
        "name": "measured",
        "model": {"shape": {"context": 256, **shape}, "tokenizer": "characters"},
        "data": {"train": {"text": {"path": str(folder / "text.txt")}}, "context": changes.pop("context", 64)},
        "train": {"steps": 10, "batch": 8, **changes.pop("train", {})},
        "every": {"log": "1 steps", "checkpoint": "1 hours", "eval": None},
        "threads": 1,
        **changes,
    }


def _with_runs(device: Device, tell: Callable[[str], None]) -> Device:
    """With what only a run shows: Python for each completion and step, processes, collectives between them."""
    shape = {"layers": 2, "width": 64, "heads": 2, "mlp": 192}
    rest: list[tuple[Work, float]] = []
    with TemporaryDirectory() as folder:
        for prompts in (4, 24):
            place = Path(folder) / str(prompts)
            spec = small_posttrain(place, shape, train={"prompts_per_step": prompts})
            run = measured(spec, place)
            plan = Search(open_job(load(spec).spec, known=KNOWN | {"new": run.length}), Pool(device, 1, 1)).written()
            assert plan is not None
            took = run.processor if device.cpu else run.wall
            rest.append((Work(rows=8.0 * prompts, steps=1.0), max(1e-6, took - plan.step)))
            if device.cpu and not device.base:  # of the smaller run, in which the model takes least
                device = replace(device, base=run.peak - sum(plan.memory.values()))
            tell(f"a run of {8 * prompts} completions a step: {took:.2f} s, {took - plan.step:.2f} beside its kernels")
        device.prices["complete"] = fitted(rest)
        if device.cpu:
            spec = small_pretrain(Path(folder) / "two", shape, devices=2)
            run = measured(spec, Path(folder) / "two")
            job, pool, layout = open_job(load(spec).spec), Pool(device, 1, 1), Layout(shard=2)
            known = 2 * train_step(job, layout, pool).seconds
            per = 2 * (train_step(job, layout, Pool(replace(device, hop=1.0), 1, 1)).seconds - known / 2)
            device = replace(device, hop=max(0.0, run.processor - known) / per)
            tell(f"two processes: {run.processor:.2f} s, {run.processor - known:.2f} of it for each other")
    return device


KNOWN: dict[str, float | None] = {"prompt": 8.0, "spread": 0.0, "verify": 0.0}
