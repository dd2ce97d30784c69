"""The table of one GPU in one go: numerics, generation, training and post-training steps. One JSON line a row.

    python benchmarks/gpu.py [--rows generate train posttrain] [--small]

Random weights, whose tokens cost as much as real ones. `roofline` is the share of the card's memory bandwidth that a
decode step's weights, keys and values come to, or of its bf16 peak that training does. `--small` tries everything
with tiny shapes on any device, and measures nothing worth telling.
"""

import argparse
import asyncio
import json
import math
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))

import cluster
import generate_gpu

from palestra.generate.engine.engine import Engine
from palestra.generate.types import Generation
from palestra.lm.batch import Batch, total_logprob
from palestra.lm.engine import Loss, TrainEngine, compile_for_training
from palestra.lm.model import Transformer
from palestra.lm.moe import router_terms
from palestra.lm.optim import Optimizer
from palestra.lm.ranks import Ranks
from palestra.lm.trainer import peak_flops
from palestra.rollout.episode import Episode, trajectory
from palestra.rollout.types import Trajectory
from palestra.spec.lm import AdamWSpec, LmTrainSpec
from palestra.spec.shape import Shape
from palestra.tasks.task import Completion, Problem, Status, Task, TaskArgs, Verdict

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32
BANDWIDTH = {"H200": 4.8e12, "H100": 3.35e12, "A100": 2.0e12}
"""Bytes a second by the maker's data sheet."""
M135 = {"layers": 30, "width": 576, "heads": 9, "kv_heads": 3, "mlp": 1536, "context": 2048, "vocab": 49152}
SHAPES: dict[str, dict[str, Any]] = {
    "135M": M135,
    "0.6B (Qwen3)": {
        "layers": 28, "width": 1024, "heads": 16, "kv_heads": 8, "head_dim": 128, "mlp": 3072, "context": 2048,
        "vocab": 151936, "qk_norm": "head",
    },
    "0.5B (Qwen2.5)": {
        "layers": 24, "width": 896, "heads": 14, "kv_heads": 2, "mlp": 4864, "context": 1024, "vocab": 151936,
        "attention_bias": True,
    },
    "135M, 8 experts": {**M135, "mlp": None, "moe": {"experts": 8, "active": 2, "mlp": 768}},
}  # fmt: skip
SMALL = {"layers": 2, "width": 64, "heads": 4, "kv_heads": 2, "mlp": 128, "context": 2048, "vocab": 512}


def shape_of(name: str, small: bool) -> Shape:
    sizes = SHAPES[name]
    if small:
        moe = {"experts": 4, "active": 2, "mlp": 64} if sizes.get("moe") else None
        sizes = {**SMALL, "mlp": None if moe else 128, "moe": moe, "qk_norm": sizes.get("qk_norm")}
        sizes["head_dim"] = None
    return Shape.model_validate({key: value for key, value in sizes.items() if value is not None})


def say(**line: Any) -> None:
    card = torch.cuda.get_device_name() if DEVICE == "cuda" else "none"
    print(json.dumps({"bench": "gpu", "gpu": card, **line}), flush=True)


def share(value: float, table: dict[str, float]) -> float | None:
    card = torch.cuda.get_device_name() if DEVICE == "cuda" else ""
    return next((round(value / most, 3) for name, most in table.items() if name in card), None)


def synchronize() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def model_of(shape: Shape) -> Transformer:
    model = Transformer(shape, DTYPE)
    model.initialize(torch.Generator().manual_seed(0))
    return model.to(DEVICE)


def generate(name: str, batches: list[int], small: bool) -> None:
    """Tokens a second, k3 to the trainer, kernels of a decode step, and its bytes beside the bandwidth."""
    shape, prompt, new = shape_of(name, small), generate_gpu.PROMPT, generate_gpu.NEW
    model, vocab = model_of(shape), shape.vocab or 0
    engine = Engine(model, eos=frozenset(), dtype=DTYPE, device=DEVICE, context=prompt + new, max_running=max(batches))
    for batch in batches:
        engine.run(generate_gpu.requests(batch, vocab, 0, new=40))
        best, results = float("inf"), []
        for seed in range(1, 2 if small else 4):
            asked = generate_gpu.requests(batch, vocab, seed)
            synchronize()
            began = time.perf_counter()
            results = engine.run(asked)
            synchronize()
            best = min(best, time.perf_counter() - began)
        weights = sum(p.numel() for p in model.parameters()) * DTYPE.itemsize
        cached = 2 * shape.layers * shape.kv * shape.dim * DTYPE.itemsize * batch * (prompt + new / 2)
        say(
            row="generate",
            model=name,
            rows=batch,
            tokens_per_s=round(batch * new / best),
            roofline=share((weights + cached) * new / best, BANDWIDTH),
            kernels_a_step=kernels(engine, batch, vocab),
            k3=generate_gpu.mismatch(model, results[:16])["k3"] if not small else None,
        )


def kernels(engine: Engine, batch: int, vocab: int) -> float | None:
    """Kernels of a decode step."""
    if DEVICE != "cuda":
        return None
    counts = []
    for new in (40, 40 + engine.steps):  # one more burst
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            engine.run(generate_gpu.requests(batch, vocab, 9, new=new))
            torch.cuda.synchronize()
        counts.append(sum(event.device_type == torch.autograd.DeviceType.CUDA for event in profile.events() or ()))
    return round((counts[1] - counts[0]) / engine.steps, 1)


def train(name: str, small: bool) -> float:
    """Training tokens a second at a context of 1,024."""
    shape, batch, context, steps = shape_of(name, small), 2 if small else 64, 1024, 2 if small else 20
    model = model_of(shape)
    compile_for_training(
        model, LmTrainSpec(steps=1000, batch=batch, compile="off" if small else "on"), torch.device(DEVICE)
    )
    optimizer = Optimizer(model, AdamWSpec(name="adamw"), 1000)
    flops = shape.flops_per_token(context)
    engine = TrainEngine(model, optimizer, Ranks(), micro_tokens=batch * context, flops_per_token=flops)
    tokens = torch.randint(0, shape.vocab or 0, (batch, context), generator=torch.Generator().manual_seed(1))
    examples = Batch.pack(list(tokens.numpy()))
    began = 0.0
    for step in range(4 + steps):
        if step == 4:
            synchronize()
            began = time.perf_counter()
        engine.forward_backward(examples, next_token, float(len(examples.tokens)))
        engine.optim_step(0.5)
    synchronize()
    speed = batch * context * steps / (time.perf_counter() - began)
    peak = peak_flops(torch.device(DEVICE))
    say(row="train", model=name, tokens_per_s=round(speed), mfu=round(3 * flops * speed / peak, 3) if peak else None)
    return speed


def next_token(model: Transformer, batch: Batch) -> Loss:
    total, router = total_logprob(model, batch)
    return Loss(-total, {}, router_terms(model, router, batch))


class Coin(Task[TaskArgs]):
    """Sums to continue. By its tokens a completion is right or wrong: groups differ whatever random weights write."""

    def problems(self, split: str) -> Sequence[Problem]:
        return [Problem(self.id(split, n), f"{100 + n}+{999 - n}=") for n in range(800)]

    def verify(self, problem: Problem, completion: Completion) -> Verdict:
        right = hash(completion.completion_ids) % 2 == 0
        return Verdict(float(right), Status.CORRECT if right else Status.WRONG)


async def uneven(episode: Episode) -> list[Trajectory]:
    """A workflow whose completions have log-normal lengths: 210 on average, and a few of ten times as many."""
    draws = random.Random(episode.seed)

    async def one(sample: int) -> Generation:
        length = round(draws.lognormvariate(math.log(210) - 0.5, 1.0))
        limit = max(1, min(length, episode.sampling.max_new_tokens))
        asked = replace(episode, sampling=replace(episode.sampling, max_new_tokens=limit))
        return (await asked.generate(episode.prompt, sample=sample))[0]

    completions = await asyncio.gather(*(one(sample) for sample in range(episode.samples)))
    verdicts = await episode.verdicts(completions)
    return [trajectory(episode.prompt, *pair) for pair in zip(completions, verdicts, strict=True)]


def posttrain(
    name: str, prompts: int, new: int, staleness: int, small: bool, profile: Path | None = None, mixed: bool = False
) -> float:
    """Seconds of a GRPO step by its parts; every completion has its full length, or with `mixed` its own."""
    cluster.SHAPES["this"] = {**(SMALL if small else SHAPES[name]), "context": 4096}
    given = argparse.Namespace(
        new=8 if small else new, staleness=staleness, steps=4 if small else 14, prompts=4 if small else prompts,
        precision="auto", device=DEVICE,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        cluster.save_model(model, "this")
        spec = cluster.spec_of(model, given, {})
        spec["tasks"], spec["rollout"]["record"] = {"train": [{"task": "gpu:Coin"}]}, True
        spec["train"] |= {"compile": "off" if small else "on", "micro_tokens": 65536}
        if mixed:
            spec["rollout"]["workflow"] = {"name": "custom", "function": "gpu:uneven"}
        if profile is not None:
            spec["train"]["profile"] = {"steps": [given.steps - 1, given.steps - 1]}
        row, _ = cluster.measured(spec, Path(folder) / "runs", reward=None)
        if profile is not None:
            for trace in Path(folder).rglob("profile.json"):
                profile.write_bytes(trace.read_bytes())
    say(row="posttrain", model=name, prompts=prompts, group=8, new=new, mixed=mixed, staleness=staleness,
        **{key: round(value, 4) for key, value in row.items()})  # fmt: skip
    return row["tokens_per_s"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", default=["generate", "train", "posttrain"])
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--profile", type=Path, help="a Chrome trace of the training of one 0.5B step")
    given = parser.parse_args()
    began = time.perf_counter()
    if "generate" in given.rows:
        generate("135M", [1, 4] if given.small else [1, 64, 512], given.small)
        generate("0.6B (Qwen3)", [2] if given.small else [256], given.small)
    if "train" in given.rows:
        dense = train("135M", given.small)
        say(row="train", what="experts beside dense", ratio=round(train("135M, 8 experts", given.small) / dense, 3))
    if "posttrain" in given.rows:
        posttrain("135M", 32, 256, 0, given.small)
        posttrain("135M", 32, 256, 1, given.small)
        posttrain("0.5B (Qwen2.5)", 64, 256, 1, given.small, given.profile)
        speeds = [posttrain("135M", 32, 2048, staleness, given.small, mixed=True) for staleness in (0, 4)]
        say(row="posttrain", what="staleness 4 beside 0, log-normal lengths", ratio=round(speeds[1] / speeds[0], 3))
    say(row="all", seconds=round(time.perf_counter() - began, 1))


if __name__ == "__main__":
    main()
