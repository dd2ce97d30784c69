"""Scalar heads: critics, reward models, and a trained reward model to call from Python."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from palestra.data.chat import encode_chat
from palestra.data.tokenizers import Tokenizer
from palestra.errors import UsageError
from palestra.lm.batch import Batch, forward
from palestra.lm.hf import load_pretrained
from palestra.lm.layers import wide
from palestra.lm.model import ModelOutput, Transformer


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
        self.value = ValueHead(transformer.shape.width)
        if not transformer.embed.is_meta:
            self.value.to(transformer.embed.device)

    def values(self, batch: Batch) -> Tensor:
        """The value of each token and those before it (T), in FP32."""
        return self.value(forward(self.transformer, batch).hidden)

    def scores_of(self, output: ModelOutput, batch: Batch) -> Tensor:
        """The score of each sequence (B), read at its last token, in FP32; `output` is of the batch."""
        return self.value(output.hidden[batch.cu_seqlens[1:].long() - 1])


Conversation = Sequence[Mapping[str, Any]]

LANES = 16
"""Sequences are padded to a multiple of this many tokens: vectors are full, and there are few lengths."""
TOKENS = 256
"""Tokens of a pass over short sequences: 4 to 5 times the rate of one by one for a small model; longer ones are
passed alone, because they keep the processor busy by themselves."""


class Scorer:
    """Scores conversations.

    A conversation has the same score, to the last bit, whatever others are scored with it. How many rows a pass has
    depends on the length of the conversation alone: a matrix library picks its kernel, and with it the order of
    additions, by the number of rows. Rows that are to spare are filled up, and what comes of them is not read.
    """

    def __init__(self, model: ScalarModel, tokenizer: Tokenizer):
        self.model, self.tokenizer = model, tokenizer

    @classmethod
    def load(cls, folder: Path) -> "Scorer":
        """The reward model in a folder."""
        loaded = load_pretrained(folder)
        if loaded.score is None or loaded.tokenizer is None:
            missing = "score" if loaded.score is None else "tokenizer"
            raise UsageError(f"{folder} is not a reward model: it has no {missing}")
        model = ScalarModel(loaded.model)
        with torch.no_grad():
            model.value.weight.copy_(loaded.score)
        return cls(model, Tokenizer.load(loaded.tokenizer))

    @property
    def context(self) -> int:
        """The most tokens that it reads."""
        return self.model.transformer.shape.context

    def score(self, messages: Conversation) -> float:
        """A number for a conversation, higher for a better one."""
        return self.scores([messages])[0]

    def scores(self, conversations: Sequence[Conversation]) -> list[float]:
        """A number for each conversation, the same that `score` gives."""
        return self.token_scores([self.encode(messages) for messages in conversations])

    def encode(self, messages: Conversation) -> list[int]:
        """The tokens of a conversation."""
        tokens = encode_chat(self.tokenizer, list(messages), add_generation_prompt=False).tokens
        if not tokens:
            raise UsageError("the chat template writes nothing for this conversation, so that it has no score")
        return tokens

    @torch.no_grad()
    def token_scores(self, sequences: Sequence[Sequence[int]]) -> list[float]:
        """A number for each conversation that `encode` gave."""
        longest = max(map(len, sequences), default=0)
        if longest > self.context:
            raise UsageError(f"the conversation has {longest} tokens; the reward model reads at most {self.context}")
        same: dict[int, list[int]] = {}  # by length, once filled up
        for place, tokens in enumerate(sequences):
            same.setdefault(-(-len(tokens) // LANES) * LANES, []).append(place)
        scores: dict[int, float] = {}
        for length, places in same.items():
            # How many tokens an expert gets depends on all sequences of a pass: with experts there is one.
            rows = 1 if self.model.transformer.shape.moe is not None else max(1, TOKENS // length)
            for start in range(0, len(places), rows):
                taken = places[start : start + rows]
                scores |= zip(taken, self._pass([sequences[i] for i in taken], length, rows), strict=True)
        return [scores[place] for place in range(len(sequences))]

    def _pass(self, sequences: Sequence[Sequence[int]], length: int, rows: int) -> list[float]:
        """The scores of at most `rows` sequences of at most `length` tokens; no token sees those that fill them up."""
        filled = [[*tokens, *[tokens[0]] * (length - len(tokens))] for tokens in sequences]
        filled += [filled[0]] * (rows - len(filled))
        hidden = forward(self.model.transformer, Batch.pack(filled)).hidden.unflatten(0, (rows, length))
        last = (row[len(tokens) - 1] for row, tokens in zip(hidden, sequences, strict=False))
        # One by one: the product of several at once could round differently.
        return [float(self.model.value(state[None])) for state in last]
