"""What guided decoding and penalties cost on the host: CPU time for each token of a row.

    python benchmarks/guided.py --tokenizer ../shared/data/tokenizers/smollm

Completions are sampled at random from the tokens that a guide allows. `mask_us` is CPU time to take in a token and find
the tokens that may follow, `apply_us` that of changing the scores of a row by them (of 32 rows together, over 32), and
`compile_ms` that of a guide's first use; `vocabulary_ms` is once for a tokenizer. Penalties have a prompt of 1,000
tokens. A JSON line for each.
"""

import argparse
import json
import random
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from palestra.data.tokenizers import Tokenizer
from palestra.generate.engine.guide import Guides
from palestra.generate.engine.score_edits import RowEdits, ScoreEdits
from palestra.generate.types import Guide, Request, Sampling

ROWS = 32
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 60},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 20}, "maxItems": 10},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
GUIDES = {
    "json": Guide(json=PERSON),
    "any object": Guide(json={"type": "object"}),
    "regex": Guide(regex=r"[A-Z][a-z]+( [a-z]+){5,40}, \d{4}-\d\d-\d\d\."),
    "1,000 choices": Guide(choice=tuple(f"item {i}" for i in range(1000))),
}


def applied_us(edits: Sequence[RowEdits], vocab: int) -> float:
    """CPU microseconds a row of changing the scores of a batch."""
    scores, device = torch.randn(len(edits), vocab), torch.device("cpu")
    began = time.process_time()
    for _ in range(20):
        step = ScoreEdits.of(list(enumerate(edits)), vocab, device)
        assert step is not None
        step.apply_(scores)
    return (time.process_time() - began) / 20 / len(edits) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=1000)
    args = parser.parse_args()
    torch.set_num_threads(1)
    tokenizer, choose = Tokenizer.load(args.tokenizer), random.Random(0)
    vocab, guides = tokenizer.vocab_size, Guides(tokenizer, tokenizer.vocab_size)
    began = time.process_time()
    guides.compiled(Guide(regex="a"))
    print(json.dumps({"vocabulary": vocab, "vocabulary_ms": round((time.process_time() - began) * 1e3, 1)}))
    for name, guide in GUIDES.items():
        began = time.process_time()
        compiled = guides.compiled(guide)
        compile_ms = (time.process_time() - began) * 1e3
        spent, count, slowest = 0.0, 0, 0.0
        while count < args.tokens:
            matcher = compiled.start(())
            while not matcher.complete and count < args.tokens:
                token = int(choose.choice(np.flatnonzero(matcher.allowed)))
                began = time.process_time()
                matcher.push([token])
                took = time.process_time() - began
                spent, count, slowest = spent + took, count + 1, max(slowest, took)
        rows = [RowEdits(Request((0,), Sampling(guide=guide)), compiled.start(())) for _ in range(ROWS)]
        row = {"guide": name, "compile_ms": round(compile_ms, 1), "mask_us": round(spent / count * 1e6, 1)}
        print(json.dumps({**row, "slowest_us": round(slowest * 1e6), "apply_us": round(applied_us(rows, vocab), 1)}))
    prompt = tuple(choose.randrange(vocab) for _ in range(1000))
    request = Request(prompt, Sampling(repetition_penalty=1.1, frequency_penalty=0.5))
    edits = [RowEdits(request, None) for _ in range(ROWS)]
    began = time.process_time()
    for _ in range(1000):
        edits[0].completed_by([choose.randrange(vocab)])
    row = {"guide": None, "penalties": True, "push_us": round((time.process_time() - began) * 1e3, 2)}
    print(json.dumps({**row, "apply_us": round(applied_us(edits[1:], vocab), 1)}))


if __name__ == "__main__":
    main()
