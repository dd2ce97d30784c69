"""Tokens a second of the engine on one GPU: 135M parameters (SmolLM2's shape), bf16, prompts of 128, 256 new tokens.

    python benchmarks/generate_gpu.py [--batches 64 512] [--model FOLDER]

The whole engine counts: queue, prompts, sampling, log-probabilities, stops. Random weights by default, whose tokens
cost as much as real ones. Also measured: how far the trainer's log-probabilities of the same tokens are (k3).
"""

import argparse
import json
import time
from pathlib import Path

import torch

from palestra.generate.engine.engine import Engine
from palestra.generate.types import Request, Sampling
from palestra.lm.batch import Batch, score
from palestra.lm.hf import load_pretrained
from palestra.lm.model import Transformer
from palestra.rl.kl import k3
from palestra.spec.shape import Shape

SHAPE = Shape(layers=30, width=576, heads=9, kv_heads=3, mlp=1536, context=2048, vocab=49152, rope_theta=1e5)
PROMPT, NEW = 128, 256


def model_of(folder: str | None) -> Transformer:
    if folder is not None:
        return load_pretrained(Path(folder), torch.bfloat16, device="cuda").model
    model = Transformer(SHAPE, torch.bfloat16)
    model.initialize(torch.Generator().manual_seed(0))
    return model.cuda()


def requests(count: int, vocab: int, seed: int, new: int = NEW) -> list[Request]:
    """Prompts that no other seed has: none is in the cache already."""
    draws = torch.Generator().manual_seed(1000 * count + seed)
    prompts = torch.randint(0, vocab, (count, PROMPT), generator=draws).tolist()
    sampling = [Sampling(max_new_tokens=new, ignore_eos=True, seed=seed) for seed in range(count)]
    return [Request(tuple(prompt), how) for prompt, how in zip(prompts, sampling, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batches", type=int, nargs="+", default=[64, 512])
    parser.add_argument("--model")
    given = parser.parse_args()
    model = model_of(given.model)
    vocab = model.shape.vocab or 0
    engine = Engine(
        model,
        eos=frozenset(),
        dtype=torch.bfloat16,
        device="cuda",
        context=PROMPT + NEW,
        max_running=max(given.batches),
    )
    for batch in given.batches:
        engine.run(requests(batch, vocab, 0, new=40))  # captures the graphs
        captures, times, results = engine.captures, [], []
        for seed in range(1, 4):
            asked = requests(batch, vocab, seed)
            torch.cuda.synchronize()
            began = time.perf_counter()
            results = engine.run(asked)
            torch.cuda.synchronize()
            times.append(time.perf_counter() - began)
        best = min(times)
        line = {
            "bench": "generate_gpu",
            "gpu": torch.cuda.get_device_name(),
            "batch": batch,
            "tokens_per_s": round(batch * NEW / best),
            "seconds": [round(t, 3) for t in times],
            "new_graphs": engine.captures - captures,
        }
        print(json.dumps(line | mismatch(model, results[:32])), flush=True)


@torch.no_grad()
def mismatch(model: Transformer, results: list) -> dict[str, float]:
    sequences = [(*r.prompt, *r.generations[0].tokens) for r in results]
    behavior = torch.tensor([value for r in results for value in r.generations[0].logprobs], device="cuda")
    masks = [[0.0] * PROMPT + [1.0] * NEW for _ in results]
    batch = Batch.pack(sequences, masks).to("cuda")
    found = score(model, batch).logprobs[batch.loss_mask > 0]
    gap = (found - behavior).abs()
    return {"k3": k3(behavior, found).mean().item(), "gap_mean": gap.mean().item(), "gap_max": gap.max().item()}


if __name__ == "__main__":
    main()
