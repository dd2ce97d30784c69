"""Encoders of conversations and of preference pairs: which tokens they become, and which of them are trained on."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from palestra.data.chat import encode_chat
from palestra.data.conversations import Messages, conversation, pair
from palestra.data.encoders import Encoded, cached_tokenizer
from palestra.data.readers import Row
from palestra.data.tokenizers import Tokenizer
from palestra.errors import UsageError

Format = Literal["chat", "plain"]


@dataclass(frozen=True)
class ChatEncoder:
    """Conversations, or one side of preference pairs; the assistant's turns and what ends them are trained on.

    `chat` writes them with the tokenizer's template. `plain` writes a prompt, its answer and the end-of-text token.
    """

    folder: str
    """Where the tokenizer is loaded from, once in each process."""
    tokenizer: str
    fingerprint: str
    vocab_size: int
    format: Format
    side: Literal["chosen", "rejected"] | None
    """Of pairs: which of the two; only the answers, what the two do not share, are trained on."""
    template: str | None
    opening: tuple[int, ...]
    """What plain prompts begin with, such as Llama's BOS; a template writes its own."""

    @classmethod
    def load(
        cls, folder: Path | str, *, format: Format = "chat", side: Literal["chosen", "rejected"] | None = None
    ) -> "ChatEncoder":
        """With the tokenizer of a folder."""
        tokenizer = cached_tokenizer(str(folder))
        names = (tokenizer.name, tokenizer.fingerprint, tokenizer.vocab_size)
        chat = format == "chat"
        around = (tokenizer.chat_template if chat else None, () if chat else tokenizer.beginning)
        return cls(str(folder), *names, format, side, *around)

    @property
    def masked(self) -> bool:
        """Only answers are trained on."""
        return True

    @property
    def text_key(self) -> str:
        """Text files have no conversations: their rows are refused."""
        return "text"

    @property
    def recipe(self) -> dict[str, Any]:
        """How conversations are written, and which side of pairs."""
        form = {"format": self.format, "side": self.side, "template": self.template, "opening": self.opening}
        return {"encoder": "chat", **form}

    def __call__(self, rows: list[Row]) -> list[Encoded]:
        """The tokens of the conversations."""
        return [self._conversation(row) if self.side is None else self._side(row) for row in rows]

    def _conversation(self, row: Row) -> Encoded:
        tokens, loss, size = self._encode(conversation(row))
        if not any(loss):
            raise UsageError("a conversation without an assistant's turn has nothing to train on")
        return Encoded(tokens, size, loss)

    def _side(self, row: Row) -> Encoded:
        chosen, rejected = pair(row)
        if chosen == rejected:
            raise UsageError("the chosen and the rejected conversation are the same: nothing is preferred")
        (tokens, loss, size), (other, _, _) = (
            self._encode(messages) for messages in ((chosen, rejected) if self.side == "chosen" else (rejected, chosen))
        )
        shared = next((i for i, (a, b) in enumerate(zip(tokens, other, strict=False)) if a != b), len(tokens))
        return Encoded(tokens, size, [trained and i >= shared for i, trained in enumerate(loss)])

    def _encode(self, messages: Messages) -> tuple[list[int], list[bool], int]:
        """Tokens, whether each is trained on, and the bytes of the texts."""
        tokenizer = cached_tokenizer(self.folder)
        size = sum(len(str(message["content"]).encode()) for message in messages)
        if self.format == "plain":
            return *_plain(tokenizer, messages), size
        encoded = encode_chat(tokenizer, messages, add_generation_prompt=False)
        return encoded.tokens, encoded.loss_mask, size


def _plain(tokenizer: Tokenizer, messages: Messages) -> tuple[list[int], list[bool]]:
    if [message["role"] for message in messages] != ["user", "assistant"]:
        raise UsageError("format `plain` expects one prompt and one answer; use `chat` for longer conversations")
    if not all(isinstance(message["content"], str) for message in messages):
        raise UsageError("format `plain` expects a prompt and an answer that are texts")
    if tokenizer.eos is None:
        raise UsageError(f"format `plain` needs a tokenizer with an end-of-text token, and {tokenizer.name} has none")
    prompt, answer = tokenizer.encode_prompt(messages[0]["content"]), tokenizer.encode(messages[1]["content"])
    return [*prompt, *answer, tokenizer.eos], [False] * len(prompt) + [True] * (len(answer) + 1)
