"""A number for every token or sequence: critics and reward models."""

import torch
from torch import Tensor, nn

from palestra.lm.batch import Batch, forward
from palestra.lm.model import Output, Transformer
from palestra.lm.ops import wide


class ValueHead(nn.Module):
    """A number of each hidden state, in FP32; 0 before training."""

    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, width))

    def forward(self, hidden: Tensor) -> Tensor:
        """(T, D) → (T)."""
        return wide(hidden) @ wide(self.weight)[0]


class ScalarModel(nn.Module):
    """A transformer with a value head in place of its vocabulary."""

    def __init__(self, transformer: Transformer):
        super().__init__()
        self.transformer = transformer
        self.value = ValueHead(transformer.shape.width).to(transformer.embed.device)

    def values(self, batch: Batch) -> Tensor:
        """What each token and those before it are worth (T), in FP32."""
        return self.value(forward(self.transformer, batch).hidden)

    def scores_of(self, output: Output, batch: Batch) -> Tensor:
        """What each sequence is worth (B), read at its last token, in FP32; `output` is of the batch."""
        last = batch.cu_seqlens[1:].long() - 1
        return self.value(output.hidden[last])
