"""What changes the scores of single rows before sampling: logit_bias, penalties, and the tokens a guide allows."""

from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from palestra.generate.engine.guide import GuideMatcher
from palestra.generate.types import Request
from palestra.lm.layers import sent


class RowEdits:
    """Of one sample, as its tokens ask for; kept on the host."""

    def __init__(self, request: Request, guide: GuideMatcher | None):
        self._sampling, self.guide = request.sampling, guide
        self._places: dict[int, int] = {}
        self._counts: Counter[int] = Counter()
        self.tokens = array("q")
        """Whose scores change, each once: score + bias, then divided or multiplied by the factor, then + after."""
        self.bias, self.factor, self.after = array("f"), array("f"), array("f")
        for token, bias in (self._sampling.logit_bias or {}).items():
            self.bias[self._place(token)] = bias
        if self._sampling.repetition_penalty != 1:
            for token in set(request.prompt):
                self.factor[self._place(token)] = self._sampling.repetition_penalty

    def completed_by(self, tokens: Sequence[int]) -> bool:
        """Take in tokens that were sampled; whether they complete the guide."""
        sampling = self._sampling
        if sampling.repetition_penalty != 1 or sampling.frequency_penalty or sampling.presence_penalty:
            self._counts.update(tokens)
            for token in tokens:
                place = self._place(token)
                self.factor[place] = sampling.repetition_penalty
                self.after[place] = -sampling.frequency_penalty * self._counts[token] - sampling.presence_penalty
        if self.guide is not None:
            self.guide.push(tokens)
        return self.guide is not None and self.guide.complete

    def _place(self, token: int) -> int:
        if token not in self._places:
            self._places[token] = len(self.tokens)
            for column, value in ((self.tokens, token), (self.bias, 0), (self.factor, 1), (self.after, 0)):
                column.append(value)
        return self._places[token]


@dataclass(frozen=True)
class ScoreEdits:
    """Of one step of a batch, as tensors: N single scores, and whole rows (G) with guides."""

    rows: Tensor
    """(N) int64, and the tokens in them; each pair once."""
    tokens: Tensor
    bias: Tensor
    """(N) FP32 each."""
    factor: Tensor
    after: Tensor
    guided: Tensor
    """(G) int64."""
    forbidden: Tensor
    """(G, V) bool."""

    @classmethod
    def of(cls, edits: Sequence[tuple[int, RowEdits]], vocab: int, device: torch.device) -> "ScoreEdits | None":
        """Those of the rows that have any; None where none has."""
        if not edits:
            return None
        rows = np.repeat([row for row, _ in edits], [len(edit.tokens) for _, edit in edits])
        columns = [
            np.concatenate([np.array(getattr(edit, name), kind) for _, edit in edits])
            for name, kind in (("tokens", "q"), ("bias", "f"), ("factor", "f"), ("after", "f"))
        ]
        guides = [(row, edit.guide.allowed) for row, edit in edits if edit.guide is not None]
        allowed = np.stack([mask for _, mask in guides]) if guides else np.ones((0, vocab), bool)
        parts = [rows, *columns, np.array([row for row, _ in guides], np.int64), ~allowed]
        return cls(*(sent(torch.from_numpy(part), device) for part in parts))

    def apply_(self, scores: Tensor) -> None:
        """Change scores (B, V, FP32) in place, in vLLM's order: guide, logit_bias, repetition, frequency, presence."""
        if len(self.guided):
            masked = scores.index_select(0, self.guided).masked_fill_(self.forbidden, float("-inf"))
            scores.index_copy_(0, self.guided, masked)
        if len(self.rows):
            score = scores[self.rows, self.tokens] + self.bias
            scores[self.rows, self.tokens] = (
                torch.where(score > 0, score / self.factor, score * self.factor) + self.after
            )
