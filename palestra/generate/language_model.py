"""A trained language model to call from Python."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from palestra.data.chat import encode_chat
from palestra.data.tokenizers import Tokenizer
from palestra.generate.engine import Engine
from palestra.generate.types import Generation, Request, Sampling
from palestra.lm.model import Transformer


class LanguageModel:
    """Writes on from texts and answers in conversations: `model.write("Once")`, `model.answer("Who are you?")`."""

    def __init__(
        self, model: Transformer, tokenizer: Tokenizer, eos: frozenset[int], *, device: torch.device | str = "cpu"
    ):
        self.tokenizer = tokenizer
        self.engine = Engine(model, eos=eos, tokenizer=tokenizer, device=device)

    def write(self, prompt: str, **sampling: Any) -> str:
        """The continuation of a text; keywords are those of `Sampling`, such as `max_new_tokens=50`."""
        return self.generate(self.tokenizer.encode_prompt(prompt), **sampling).text or ""

    def answer(self, messages: str | Sequence[Mapping[str, Any]], **sampling: Any) -> str:
        """The assistant's next turn after a question or a list of messages."""
        turns = [{"role": "user", "content": messages}] if isinstance(messages, str) else list(messages)
        prompt = encode_chat(self.tokenizer, turns, add_generation_prompt=True).tokens
        return self.generate(prompt, **sampling).text or ""

    def generate(self, tokens: Sequence[int], **sampling: Any) -> Generation:
        """Tokens after tokens, with their log-probabilities."""
        (result,) = self.engine.run([Request(tuple(tokens), Sampling(**sampling))])
        return result.generations[0]
