"""Tokens a second on the CPU: the engine beside `transformers.generate`, on SmolLM2-135M.

    palestra model fetch smollm2-135m
    python benchmarks/generate_cpu.py --model models/smollm2-135m

Batches of 1, 8 and 32 prompts of 128 tokens, 128 new tokens each, no early stop, sampling at temperature 1. The engine
computes in the precision that Palestra chooses for the CPU, `transformers` in the faster of bf16 and FP32 by a short
trial. The two take turns in one process, and the best round of each counts. Without --model the weights are random,
of the same shape. `ceiling_tokens_per_s` is what the engine's matrix products of the decode steps alone would give,
with nothing between them and no prompts: every weight is read once a step. On a machine that others use too,
OMP_WAIT_POLICY=passive keeps threads from spinning while they wait for each other. A JSON line for each batch.
"""

import argparse
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

from palestra.generate.engine.cpu import TiledLinear
from palestra.generate.engine.engine import Engine
from palestra.generate.types import Request, Sampling
from palestra.kinds.models import named_dtype
from palestra.lm.hf import save_pretrained
from palestra.lm.model import Transformer
from palestra.spec.shape import Shape, precision

SMOLLM2 = Shape(
    layers=30, width=576, heads=9, kv_heads=3, mlp=1536, context=8192, vocab=49152, rope_theta=100000.0, tied=True
)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--model", type=Path, help="a model folder; without it random weights")
    arguments.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    arguments.add_argument("--prompt", type=int, default=128)
    arguments.add_argument("--new", type=int, default=128)
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--threads", type=int, default=torch.get_num_threads())
    given = arguments.parse_args()
    torch.set_num_threads(given.threads)
    chosen = precision("auto", "cpu")
    with tempfile.TemporaryDirectory() as scratch:
        folder = given.model or random_model(Path(scratch) / "model")
        engine = Engine.from_folder(
            folder, dtype=named_dtype(chosen), context=given.prompt + given.new, max_running=max(given.batches)
        )
        theirs = {
            name: transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=named_dtype(name)).eval()
            for name in ("bf16", "fp32")
        }
    # An emulated precision takes minutes for more than a few tokens.
    few = torch.ones(1, 8, dtype=torch.int64)
    trial = alternating({name: lambda model=model: generate(model, few, 4) for name, model in theirs.items()}, 2)
    better = min(trial, key=lambda name: min(trial[name]))
    for batch in given.batches:
        found = compared(given, batch, engine, theirs[better])
        print(json.dumps({**found, "dtype": chosen, "transformers_dtype": better}), flush=True)


@torch.inference_mode()
def generate(model: Any, prompts: torch.Tensor, new: int) -> None:
    """Sample with transformers."""
    with torch.backends.mkldnn.flags(enabled=True):  # as torch comes
        out = model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=new,
            min_new_tokens=new,
            do_sample=True,
            top_k=0,
            pad_token_id=0,
        )
    assert out.shape[1] == prompts.shape[1] + new


def compared(given: argparse.Namespace, batch: int, engine: Engine, theirs: Any) -> dict[str, Any]:
    """Both with one batch."""
    prompts = torch.randint(3, 40000, (batch, given.prompt), generator=torch.Generator().manual_seed(0))
    sampling = Sampling(max_new_tokens=given.new, ignore_eos=True, seed=0)
    requests = [Request(tuple(prompt), sampling) for prompt in prompts.tolist()]

    def ours() -> None:
        for result in engine.run(requests):
            assert len(result.generations[0].tokens) == given.new

    seconds = alternating({"ours": ours, "transformers": lambda: generate(theirs, prompts, given.new)}, given.rounds)
    rates = {name: batch * given.new / min(times) for name, times in seconds.items()}
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    return {
        "benchmark": "generate_cpu",
        "architecture": platform.machine(),
        "model": str(given.model or "random"),
        "batch": batch,
        "prompt": given.prompt,
        "new": given.new,
        "threads": given.threads,
        "tokens_per_s": round(rates["ours"], 1),
        "transformers_tokens_per_s": round(rates["transformers"], 1),
        "ratio": round(rates["ours"] / rates["transformers"], 2),
        "ratio_of_medians": round(medians["transformers"] / medians["ours"], 2),
        "ceiling_tokens_per_s": round(batch / products(engine, batch), 1),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def random_model(folder: Path) -> Path:
    model = Transformer(SMOLLM2)
    model.initialize(torch.Generator().manual_seed(0))
    save_pretrained(folder, model, tokenizer=None, eos=(2,), dtype=torch.bfloat16)
    return folder


def alternating(runs: dict[str, Callable[[], None]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each, one after the other, after one round that does not count."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for round in range(rounds + 1):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            if round:
                seconds[name].append(time.perf_counter() - start)
    return seconds


@torch.inference_mode()
def products(engine: Engine, batch: int) -> float:
    """Seconds of a step's matrix products, at best."""
    matrices = [module for module in engine.model.modules() if isinstance(module, TiledLinear)]
    matrices.append(matrices[0].tiles.head)
    inputs = [torch.randn(batch, matrix.weight.shape[1], dtype=engine.model.dtype) for matrix in matrices]
    best = float("inf")
    for _ in range(8):
        start = time.perf_counter()
        for x, matrix in zip(inputs, matrices, strict=True):
            matrix(x)
        best = min(best, time.perf_counter() - start)
    return best


if __name__ == "__main__":
    main()
