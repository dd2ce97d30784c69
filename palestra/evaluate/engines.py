"""The engine that answers an evaluation's questions, with no more context than these need: its rows are as long."""

from collections.abc import Iterable, Sequence

import torch

from palestra.data.tokenizers import Tokenizer
from palestra.evaluate.questions import Questions
from palestra.generate.engine import Engine
from palestra.lm.model import Transformer
from palestra.spec.kinds.evaluate import AnswerEval

ROWS = {"cuda": 1024, "cpu": 256}
"""Answers that are written at the same time."""


def answering_engine(
    model: Transformer,
    tokenizer: Tokenizer,
    eos: Iterable[int],
    asked: Sequence[Questions],
    settings: AnswerEval,
    *,
    device: torch.device,
    dtype: torch.dtype | None = None,
) -> Engine:
    """An engine with a copy of the model on the device."""
    reads = model.shape.context
    prompts = [len(one.prompt) for questions in asked for one in questions.questions]
    longest = max((length for length in prompts if length < reads), default=0)
    single = settings.workflow.name == "single_turn"
    return Engine(
        model,
        eos=frozenset(eos),
        tokenizer=tokenizer,
        dtype=dtype,
        device=device,
        context=min(reads, longest + settings.max_new_tokens) if single else reads,
        max_running=ROWS[device.type],
    )
