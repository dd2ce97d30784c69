"""A trained reward model to call from Python."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from palestra.data.chat import encode_chat
from palestra.data.tokenizers import Tokenizer
from palestra.errors import UsageError
from palestra.lm.batch import Batch
from palestra.lm.hf import load_pretrained
from palestra.lm.value_head import ScalarModel


class Scorer:
    """Scores conversations."""

    def __init__(self, model: ScalarModel, tokenizer: Tokenizer):
        self.model, self.tokenizer = model, tokenizer

    @classmethod
    def load(cls, folder: Path) -> "Scorer":
        """The reward model in a folder."""
        found = load_pretrained(folder)
        if found.score is None or found.tokenizer is None:
            raise UsageError(
                f"{folder} is not a reward model: it has no {'score' if found.score is None else 'tokenizer'}"
            )
        model = ScalarModel(found.model)
        with torch.no_grad():
            model.value.weight.copy_(found.score)
        return cls(model, Tokenizer.load(found.tokenizer))

    @torch.no_grad()
    def score(self, messages: Sequence[Mapping[str, Any]]) -> float:
        """A number for a conversation, higher for a better one."""
        tokens = encode_chat(self.tokenizer, list(messages), add_generation_prompt=False).tokens
        context = self.model.transformer.shape.context
        if len(tokens) > context:
            raise UsageError(f"the conversation has {len(tokens)} tokens, and the reward model reads at most {context}")
        return float(self.model.sequence_scores(Batch.pack([tokens])))
