"""Encoders: rows of text, conversations or preference pairs to tokens and loss masks."""

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np

from palestra.data.chat import encode_chat
from palestra.data.media import Image, PixelLimits, content_text
from palestra.data.readers import Row
from palestra.data.tokenizers import Tokenizer
from palestra.errors import PalestraError, UsageError


@dataclass(frozen=True)
class EncodedRow:
    """A row as tokens."""

    tokens: Sequence[int] | np.ndarray
    num_bytes: int
    """UTF-8 bytes of the text that the tokens stand for."""
    loss: Sequence[bool] | np.ndarray | None = None
    """Whether each token is trained on; None where all are."""
    images: Sequence[Image] = ()


@dataclass(frozen=True)
class Encoder(ABC):
    """Turns rows into documents. It is sent to worker processes: pickled."""

    tokenizer: str
    """The tokenizer's name, for people."""
    fingerprint: str
    """The tokenizer's fingerprint."""
    vocab_size: int
    """One more than the largest token."""
    text_key: str
    """The key under which a text file gives its documents."""
    masked: bool
    """Whether documents say which of their tokens are trained on."""

    @property
    @abstractmethod
    def recipe(self) -> dict[str, Any]:
        """All else that decides the tokens, as JSON; stored in the ledger and compared."""

    @abstractmethod
    def __call__(self, rows: list[Row]) -> list[EncodedRow]:
        """One document for each row; a row that cannot be one is a PalestraError that says what was expected."""


@lru_cache(maxsize=2)
def cached_tokenizer(folder: str) -> Tokenizer:
    """The tokenizer of a folder, loaded once in each process."""
    return Tokenizer.load(Path(folder))


@dataclass(frozen=True)
class TextEncoder(Encoder):
    """Plain text under one key, each document closed by a token."""

    folder: str
    """Where the tokenizer is loaded from, once in each process."""
    opening: tuple[int, ...]
    """What every text begins with, such as Llama's BOS."""
    closing: int | None
    """The token put after each document, where the tokenizer has one."""

    @classmethod
    def load(cls, folder: Path | str, *, text_key: str = "text") -> "TextEncoder":
        """With the tokenizer of a folder; documents are closed by its end-of-text token, where it has one."""
        tokenizer = cached_tokenizer(str(folder))
        names = (tokenizer.name, tokenizer.fingerprint, tokenizer.vocab_size)
        return cls(*names, text_key, False, str(folder), tokenizer.beginning, tokenizer.eos)

    @property
    def recipe(self) -> dict[str, Any]:
        return {"encoder": "text", "text_key": self.text_key, "opening": self.opening, "closing": self.closing}

    def __call__(self, rows: list[Row]) -> list[EncodedRow]:
        texts = [_text(row, self.text_key) for row in rows]
        closing = [] if self.closing is None else [self.closing]
        encoded = cached_tokenizer(self.folder).encode_all(texts)
        return [
            EncodedRow([*self.opening, *tokens, *closing], len(text.encode()))
            for text, tokens in zip(texts, encoded, strict=True)
        ]


def _text(row: Row, key: str) -> str:
    text = row.get(key)
    if not isinstance(text, str):
        instead = f"{type(text).__name__} there" if key in row else f"only {', '.join(row) or 'no keys'}"
        raise PalestraError(f"expected a string under {key!r}, found {instead}")
    return text


Messages = list[dict[str, Any]]

QUESTION_KEYS = (("prompt", "completion"), ("instruction", "output"), ("question", "answer"))
"""Columns of a question and its answer, in datasets of single exchanges."""


def conversation(row: Mapping[str, Any]) -> Messages:
    """The messages of a row: `messages`, ShareGPT's `conversations`, or a question and its answer."""
    if "messages" in row:
        return _messages(row["messages"], "messages")
    if "conversations" in row:
        turns = row["conversations"]
        if isinstance(turns, list) and turns and isinstance(turns[0], Mapping) and "role" in turns[0]:
            return _messages(turns, "conversations")
        speakers = {"human": "user", "gpt": "assistant", "system": "system"}
        try:
            return [{"role": speakers[turn["from"]], "content": turn["value"]} for turn in turns]
        except (KeyError, TypeError) as error:
            raise UsageError(
                f"expected turns with 'from' (human, gpt, system) and 'value' in 'conversations': {error}"
            ) from error
    for question, answer in QUESTION_KEYS:
        if question in row and answer in row:
            prompt = row[question]
            if question == "instruction" and row.get("input"):
                prompt = f"{prompt}\n\n{row['input']}"
            return _turn("user", prompt, question) + _turn("assistant", row[answer], answer)
    raise UsageError(
        "expected a row with 'messages', 'conversations', or one of "
        + ", ".join(f"'{question}' and '{answer}'" for question, answer in QUESTION_KEYS)
        + f"; this one has {', '.join(map(repr, row))}"
    )


def pair(row: Mapping[str, Any]) -> tuple[Messages, Messages]:
    """The chosen and the rejected conversation of a row with `chosen` and `rejected`.

    They are completions where there is a `prompt` or `messages`, else whole conversations: lists of messages, or texts
    of alternating "Human:" and "Assistant:" paragraphs as in hh-rlhf.
    """
    if "chosen" not in row or "rejected" not in row:
        raise UsageError(f"expected a row with 'chosen' and 'rejected'; this one has {', '.join(map(repr, row))}")
    if "messages" in row:
        before = _messages(row["messages"], "messages")
    elif "prompt" in row:
        before = _turn("user", row["prompt"], "prompt")
    else:
        return _whole(row["chosen"], "chosen"), _whole(row["rejected"], "rejected")
    chosen, rejected = (_turn("assistant", row[key], key) for key in ("chosen", "rejected"))
    # Some datasets repeat the prompt in `chosen` and `rejected`.
    repeated = [messages[: len(before)] == before for messages in (chosen, rejected)]
    return chosen if repeated[0] else before + chosen, rejected if repeated[1] else before + rejected


def _messages(value: Any, key: str) -> Messages:
    if not isinstance(value, list) or not value:
        what = "an empty list" if value == [] else type(value).__name__
        raise UsageError(f"expected a list of messages in {key!r}, got {what}")
    for message in value:
        if not isinstance(message, Mapping) or "role" not in message or "content" not in message:
            raise UsageError(f"expected messages with 'role' and 'content' in {key!r}, got {message!r:.200}")
    return [dict(message) for message in value]


def _turn(role: str, value: Any, key: str) -> Messages:
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    if not isinstance(value, list):
        raise UsageError(f"expected a text or a list of messages in {key!r}, got {type(value).__name__}")
    return _messages(value, key)


def _whole(value: Any, key: str) -> Messages:
    if not isinstance(value, str):
        return _messages(value, key)
    parts = re.split(r"(?:^|\n\n)(Human|Assistant): ?", value)
    if len(parts) < 3 or parts[0].strip():
        raise UsageError(f"expected paragraphs that begin with 'Human:' or 'Assistant:' in {key!r}, got {value!r:.200}")
    roles = {"Human": "user", "Assistant": "assistant"}
    return [{"role": roles[who], "content": text} for who, text in zip(parts[1::2], parts[2::2], strict=True)]


Format = Literal["chat", "plain"]


@dataclass(frozen=True)
class ChatEncoder(Encoder):
    """Conversations, or one side of preference pairs; the assistant's turns and what ends them are trained on.

    `chat` writes them with the tokenizer's template. `plain` writes a prompt, its completion and the end-of-text token.
    """

    folder: str
    """Where the tokenizer is loaded from, once in each process."""
    format: Format
    side: Literal["chosen", "rejected"] | None
    """Of pairs: which of the two; only the completions, what the two do not share, are trained on."""
    template: str | None
    opening: tuple[int, ...]
    """What plain prompts begin with, such as Llama's BOS; a template writes its own."""
    pixels: PixelLimits | None
    """How large images are, where the model reads any."""

    @classmethod
    def load(
        cls, folder: Path | str, *, format: Format = "chat", side: Literal["chosen", "rejected"] | None = None
    ) -> "ChatEncoder":
        """With the tokenizer of a folder."""
        tokenizer = cached_tokenizer(str(folder))
        names = (tokenizer.name, tokenizer.fingerprint, tokenizer.vocab_size)
        around = (tokenizer.chat_template, ()) if format == "chat" else (None, tokenizer.beginning)
        # Rows of text files are refused.
        return cls(*names, "text", True, str(folder), format, side, *around, tokenizer.pixels)

    @property
    def recipe(self) -> dict[str, Any]:
        form = {"format": self.format, "side": self.side, "template": self.template, "opening": self.opening}
        return {"encoder": "chat", **form} | ({} if self.pixels is None else {"pixels": asdict(self.pixels)})

    def __call__(self, rows: list[Row]) -> list[EncodedRow]:
        return [self._encoded(row) for row in rows]

    def _encoded(self, row: Row) -> EncodedRow:
        if self.side is None:
            encoded = self._encode(conversation(row))
            if encoded.loss is not None and not any(encoded.loss):
                raise UsageError("a conversation without an assistant's turn has nothing to train on")
            return encoded
        chosen, rejected = pair(row)
        if chosen == rejected:
            raise UsageError("the chosen and the rejected conversation are the same: nothing is preferred")
        sides = (chosen, rejected) if self.side == "chosen" else (rejected, chosen)
        mine, other = map(self._encode, sides)
        pairs = enumerate(zip(mine.tokens, other.tokens, strict=False))
        shared = next((i for i, (a, b) in pairs if a != b), len(mine.tokens))
        assert mine.loss is not None  # `_encode` says it
        return replace(mine, loss=[trained and i >= shared for i, trained in enumerate(mine.loss)])

    def _encode(self, messages: Messages) -> EncodedRow:
        """Tokens, whether each is trained on, the bytes of the texts, and images."""
        tokenizer = cached_tokenizer(self.folder)
        size = sum(len(content_text(message["content"]).encode()) for message in messages)
        if self.format == "plain":
            tokens, loss = _plain(tokenizer, messages)
            return EncodedRow(tokens, size, loss)
        encoded = encode_chat(tokenizer, messages, add_generation_prompt=False)
        return EncodedRow(encoded.tokens, size, encoded.loss_mask, encoded.images)


def encoders_of(kind: str, folder: Path, format: Format | None, text_key: str | None) -> dict[str, Encoder]:
    """What a kind of training encodes rows with: both sides of pairs, else one encoder without a name."""
    if kind == "pretrain":
        return {"": TextEncoder.load(folder, text_key=text_key or "text")}
    if kind in ("dpo", "reward_model"):
        return {
            "chosen": ChatEncoder.load(folder, format=format or "chat", side="chosen"),
            "rejected": ChatEncoder.load(folder, format=format or "chat", side="rejected"),
        }
    return {"": ChatEncoder.load(folder, format=format or "chat")}


def _plain(tokenizer: Tokenizer, messages: Messages) -> tuple[list[int], list[bool]]:
    if [message["role"] for message in messages] != ["user", "assistant"]:
        raise UsageError("format `plain` expects one prompt and one completion; use `chat` for longer conversations")
    if not all(isinstance(message["content"], str) for message in messages):
        raise UsageError("format `plain` expects a prompt and a completion that are strings")
    if tokenizer.eos is None:
        raise UsageError(f"format `plain` needs a tokenizer with an end-of-text token, and {tokenizer.name} has none")
    prompt, completion = tokenizer.encode_prompt(messages[0]["content"]), tokenizer.encode(messages[1]["content"])
    return [*prompt, *completion, tokenizer.eos], [False] * len(prompt) + [True] * (len(completion) + 1)
