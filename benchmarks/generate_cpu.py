"""Tokens a second on the CPU: the engine beside `transformers.generate`, on SmolLM2-135M in bf16.

    palestra model fetch smollm2-135m models/smollm2-135m
    python benchmarks/generate_cpu.py --model models/smollm2-135m

32 prompts of 128 tokens, 128 new tokens each, no early stop, sampling at temperature 1; the two take turns in one
process, and the best round of each counts. Without --model the weights are random, of the same shape.
`ceiling_tokens_per_s` is what the engine's matrix products of the decode steps alone would give, with nothing between
them and no prompts: every weight is read once a step. On a machine that others use too, OMP_WAIT_POLICY=passive keeps
threads from spinning while they wait for each other. One JSON line.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import transformers

from palestra.generate.engine import Engine
from palestra.generate.tiles import TiledLinear
from palestra.generate.types import Request, Sampling
from palestra.lm.hf import save_pretrained
from palestra.lm.model import Transformer
from palestra.spec.shape import Shape

SMOLLM2 = Shape(
    layers=30, width=576, heads=9, kv_heads=3, mlp=1536, context=8192, vocab=49152, rope_theta=100000.0, tied=True
)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--model", type=Path, help="a model folder; without it random weights")
    arguments.add_argument("--batch", type=int, default=32)
    arguments.add_argument("--prompt", type=int, default=128)
    arguments.add_argument("--new", type=int, default=128)
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--threads", type=int, default=torch.get_num_threads())
    given = arguments.parse_args()
    torch.set_num_threads(given.threads)
    with tempfile.TemporaryDirectory() as scratch:
        folder = given.model or random_model(Path(scratch) / "model")
        engine = Engine.from_folder(
            folder, dtype=torch.bfloat16, context=given.prompt + given.new, max_running=given.batch
        )
        theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    prompts = torch.randint(3, 40000, (given.batch, given.prompt), generator=torch.Generator().manual_seed(0))
    sampling = Sampling(max_new_tokens=given.new, ignore_eos=True, seed=0)
    requests = [Request(tuple(prompt), sampling) for prompt in prompts.tolist()]

    def ours() -> None:
        for result in engine.run(requests):
            assert len(result.generations[0].tokens) == given.new

    @torch.inference_mode()
    def peer() -> None:
        out = theirs.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=given.new,
            min_new_tokens=given.new,
            do_sample=True,
            top_k=0,
            pad_token_id=0,
        )
        assert out.shape[1] == given.prompt + given.new

    seconds = alternating({"ours": ours, "transformers": peer}, given.rounds)
    tokens = given.batch * given.new
    rates = {name: tokens / min(times) for name, times in seconds.items()}
    ceiling = given.batch / products(engine, given.batch)
    print(
        json.dumps(
            {
                "benchmark": "generate_cpu",
                "model": str(given.model or "random"),
                "dtype": "bfloat16",
                "batch": given.batch,
                "prompt": given.prompt,
                "new": given.new,
                "threads": given.threads,
                "tokens_per_s": round(rates["ours"], 1),
                "transformers_tokens_per_s": round(rates["transformers"], 1),
                "ratio": round(rates["ours"] / rates["transformers"], 2),
                "ratio_of_medians": round(
                    statistics.median(seconds["transformers"]) / statistics.median(seconds["ours"]), 2
                ),
                "ceiling_tokens_per_s": round(ceiling, 1),
                "torch": torch.__version__,
                "transformers": transformers.__version__,
            }
        )
    )


def random_model(folder: Path) -> Path:
    model = Transformer(SMOLLM2)
    model.initialise(torch.Generator().manual_seed(0))
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
    inputs = [torch.randn(batch, matrix.weight.shape[1], dtype=torch.bfloat16) for matrix in matrices]
    best = float("inf")
    for _ in range(8):
        start = time.perf_counter()
        for x, matrix in zip(inputs, matrices, strict=True):
            matrix(x)
        best = min(best, time.perf_counter() - start)
    return best


if __name__ == "__main__":
    main()
