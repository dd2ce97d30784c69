"""Training tokens a second on one GPU: 135M parameters (SmolLM2's shape), context 1,024, bf16 over FP32 weights, AdamW.

    python benchmarks/train_gpu.py [--batch 64] [--steps 20] [--peer] [--prompt 512]

The engine's own step: micro-batches, fused head, clipping, optimizer. `--peer` also times transformers with
torch.compile in the same run, at a batch of 16, which is what its logits leave room for. With `--prompt` each eight
sequences begin with so many tokens alike, as the answers of a group do: computed once, and eight times. Tokens of the
batch are counted either way.
"""

import argparse
import json
import time
from collections.abc import Callable

import torch

from palestra.lm.batch import Batch, total_logprob
from palestra.lm.engine import Loss, TrainEngine, compile_for_training
from palestra.lm.model import Transformer
from palestra.lm.optim import Optimizer
from palestra.lm.ranks import Ranks
from palestra.lm.trainer import peak_flops
from palestra.spec.lm import AdamWSpec, LmTrainSpec
from palestra.spec.shape import Shape

SHAPE = Shape(layers=30, width=576, heads=9, kv_heads=3, mlp=1536, context=2048, vocab=49152, rope_theta=1e5)
CONTEXT = 1024
GROUP = 8


def loss(model: Transformer, batch: Batch) -> Loss:
    return Loss(-total_logprob(model, batch)[0], {})


def ours(batch: int, *, prompt: int = 0, share: bool = True) -> Callable[[], None]:
    model = Transformer(SHAPE, torch.bfloat16)
    model.initialize(torch.Generator().manual_seed(0))
    model.cuda()
    spec = LmTrainSpec(steps=1000, batch=batch, compile="on")
    compile_for_training(model, spec, torch.device("cuda"))
    optimizer = Optimizer(model, AdamWSpec(name="adamw"), 1000)
    engine = TrainEngine(
        model, optimizer, Ranks(), micro_tokens=batch * CONTEXT, flops_per_token=SHAPE.flops_per_token(CONTEXT)
    )
    draws = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, SHAPE.vocab or 0, (batch, CONTEXT), generator=draws)
    groups = tokens.unflatten(0, (-1, min(batch, GROUP)))
    groups[:, 1:, :prompt] = groups[:, :1, :prompt]
    examples = Batch.pack(list(tokens.numpy()), [[0.0] * prompt + [1.0] * (CONTEXT - prompt)] * batch)
    if not share:
        object.__setattr__(examples, "shared", None)

    def step() -> None:
        engine.forward_backward(examples, loss, float(examples.loss_mask.sum()))
        engine.optim_step(0.5)

    return step


def theirs(batch: int) -> Callable[[], None]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=SHAPE.width,
        intermediate_size=SHAPE.hidden,
        num_hidden_layers=SHAPE.layers,
        num_attention_heads=SHAPE.heads,
        num_key_value_heads=SHAPE.kv,
        vocab_size=SHAPE.vocab or 0,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config).cuda()
    model.compile()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    tokens = torch.randint(0, SHAPE.vocab or 0, (batch, CONTEXT), device="cuda")

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            model(input_ids=tokens, labels=tokens).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def measure(name: str, step: Callable[[], None], batch: int, steps: int) -> None:
    torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    for _ in range(4):
        step()
    torch.cuda.synchronize()
    warm, began = time.perf_counter() - began, time.perf_counter()
    for _ in range(steps):
        step()
    torch.cuda.synchronize()
    seconds = (time.perf_counter() - began) / steps
    speed, peak = batch * CONTEXT / seconds, peak_flops(torch.device("cuda")) or float("nan")
    line = {
        "bench": "train_gpu",
        "gpu": torch.cuda.get_device_name(),
        "what": name,
        "batch": batch,
        "tokens_per_s": round(speed),
        "mfu_6n": round(6 * SHAPE.parameters() * speed / peak, 3),
        "mfu": round(3 * SHAPE.flops_per_token(CONTEXT) * speed / peak, 3),
        "warm_s": round(warm, 1),
        "memory_gib": round(torch.cuda.max_memory_allocated() / 2**30, 1),
    }
    print(json.dumps(line), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--peer", action="store_true", help="also time transformers with torch.compile")
    parser.add_argument("--prompt", type=int, help="time groups of eight with so long a prompt instead")
    given = parser.parse_args()
    if given.prompt is not None:
        for share in (True, False):
            name = f"prompts of {given.prompt} " + ("computed once" if share else "computed eight times")
            measure(name, ours(given.batch, prompt=given.prompt, share=share), given.batch, given.steps)
            torch.cuda.empty_cache()
        return
    measure("palestra", ours(given.batch), given.batch, given.steps)
    if given.peer:
        torch.cuda.empty_cache()
        measure("transformers, compiled", theirs(16), 16, given.steps)


if __name__ == "__main__":
    main()
