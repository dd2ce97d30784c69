"""How many sequences the paged KV cache holds, and how much of prompts it shares; a small model, any device.

    python benchmarks/kv_pages.py [--device cuda] [--requests 500]

One line each: requests of 16 to 8,000 tokens (log-uniform, half prompt) in the memory of eight whole contexts, where a
cache of one row a sequence would hold eight; groups of 8 samples; conversations of four turns.
"""

import argparse
import json
import random
import time

import torch

from palestra.generate.engine.engine import Engine
from palestra.generate.engine.pages import PAGE
from palestra.generate.types import Request, Sampling
from palestra.lm.model import Transformer
from palestra.spec.shape import Shape

SHAPE = Shape(layers=1, width=64, heads=4, kv_heads=1, mlp=64, context=8192, vocab=512)
ROWS = 8
"""Whole contexts that the memory holds."""


class Ignored:
    """Takes what becomes of a request."""

    streams = False

    def __init__(self) -> None:
        self.ended = False

    def put(self, item: object) -> None:
        self.ended = True


def engine_of(device: str, exact: bool) -> Engine:
    model = Transformer(SHAPE)
    model.initialize(torch.Generator().manual_seed(0))
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    memory = 2 * SHAPE.layers * SHAPE.kv * SHAPE.dim * SHAPE.context * dtype.itemsize * ROWS
    settings = {"dtype": dtype, "device": device, "kv_bytes": memory, "max_running": 256, "exact": exact}
    return Engine(model, eos=frozenset(), **settings)


def prompt(draws: random.Random, length: int) -> tuple[int, ...]:
    return tuple(draws.randrange(512) for _ in range(length))


def mixed(device: str, exact: bool, count: int) -> None:
    draws, engine, running, sinks = random.Random(0), engine_of(device, exact), [], []
    tokens = 0
    for number in range(count):
        length = round(16 * 500 ** draws.random())
        sampling = Sampling(max_new_tokens=max(1, length // 2), ignore_eos=True, seed=number)
        sinks.append(Ignored())
        engine.submit(Request(prompt(draws, max(1, length - length // 2)), sampling), sinks[-1])
        tokens += length
    began = time.perf_counter()
    while engine.burst():
        if engine.metrics()["waiting"]:  # while there is more than fits
            running.append(engine.metrics()["running"])
    metrics = engine.metrics()
    line = {"bench": "kv_pages", "load": "mixed", "device": device, "exact": exact, "requests": count, "tokens": tokens}
    line |= {"rows_of_whole_contexts": ROWS, "running_mean": round(sum(running) / max(1, len(running)), 1)}
    line |= {"running_max": max(running, default=0), "preemptions": metrics["preemptions"]}
    line |= {"ended": sum(sink.ended for sink in sinks), "free_pages": metrics["free_pages"], "pages": metrics["pages"]}
    print(json.dumps(line | {"seconds": round(time.perf_counter() - began, 1)}), flush=True)


def shared(device: str, exact: bool, load: str) -> None:
    draws, engine = random.Random(1), engine_of(device, exact)
    if load == "groups":
        asked = [Request(prompt(draws, draws.randint(40, 200)), Sampling(max_new_tokens=64), n=8) for _ in range(64)]
        engine.run(asked)
    else:
        histories = [prompt(draws, draws.randint(40, 200)) for _ in range(32)]
        for turn in range(4):
            asked = [Request(history, Sampling(max_new_tokens=64, seed=turn)) for history in histories]
            said = engine.run(asked)
            histories = [(*r.prompt, *r.generations[0].tokens, *prompt(draws, 30)) for r in said]
    metrics = engine.metrics()
    hits = metrics["shared_tokens"] / (metrics["shared_tokens"] + metrics["prefill_tokens"])
    line = {"bench": "kv_pages", "load": load, "device": device, "exact": exact, "page": PAGE}
    print(json.dumps(line | {"hit_rate": round(hits, 3), "prefill_tokens": metrics["prefill_tokens"]}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--requests", type=int, default=500)
    given = parser.parse_args()
    for exact in (True, False):
        mixed(given.device, exact, given.requests)
        for load in ("groups", "conversations"):
            shared(given.device, exact, load)


if __name__ == "__main__":
    main()
