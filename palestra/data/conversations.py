"""Rows of the usual datasets as conversations, and as pairs of a chosen and a rejected one."""

import re
from collections.abc import Mapping
from typing import Any

from palestra.errors import UsageError

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
            asked = row[question]
            if question == "instruction" and row.get("input"):
                asked = f"{asked}\n\n{row['input']}"
            return _prompt(asked, question) + _answer(row[answer], answer)
    raise UsageError(
        "expected a row with 'messages', 'conversations', or one of "
        + ", ".join(f"'{question}' and '{answer}'" for question, answer in QUESTION_KEYS)
        + f"; this one has {', '.join(map(repr, row))}"
    )


def pair(row: Mapping[str, Any]) -> tuple[Messages, Messages]:
    """The chosen and the rejected conversation of a row with `chosen` and `rejected`.

    They are answers where there is a `prompt` or `messages`, else whole conversations: lists of messages, or texts of
    alternating "Human:" and "Assistant:" paragraphs as in hh-rlhf.
    """
    if "chosen" not in row or "rejected" not in row:
        raise UsageError(f"expected a row with 'chosen' and 'rejected'; this one has {', '.join(map(repr, row))}")
    if "messages" in row:
        before = _messages(row["messages"], "messages")
    elif "prompt" in row:
        before = _prompt(row["prompt"], "prompt")
    else:
        return _whole(row["chosen"], "chosen"), _whole(row["rejected"], "rejected")
    chosen, rejected = (_without(before, _answer(row[key], key)) for key in ("chosen", "rejected"))
    return before + chosen, before + rejected


def _messages(value: Any, key: str) -> Messages:
    if not isinstance(value, list) or not value:
        what = "an empty list" if value == [] else type(value).__name__
        raise UsageError(f"expected a list of messages in {key!r}, got {what}")
    for message in value:
        if not isinstance(message, Mapping) or "role" not in message or "content" not in message:
            raise UsageError(f"expected messages with 'role' and 'content' in {key!r}, got {message!r:.200}")
    return [dict(message) for message in value]


def _prompt(value: Any, key: str) -> Messages:
    return _turn("user", value, key)


def _answer(value: Any, key: str) -> Messages:
    return _turn("assistant", value, key)


def _turn(role: str, value: Any, key: str) -> Messages:
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    if not isinstance(value, list):
        raise UsageError(f"expected a text or a list of messages in {key!r}, got {type(value).__name__}")
    return _messages(value, key)


def _without(before: Messages, messages: Messages) -> Messages:
    """Some datasets repeat the prompt in `chosen` and `rejected`."""
    return messages[len(before) :] if messages[: len(before)] == before else messages


def _whole(value: Any, key: str) -> Messages:
    if not isinstance(value, str):
        return _messages(value, key)
    parts = re.split(r"(?:^|\n\n)(Human|Assistant): ?", value)
    if len(parts) < 3 or parts[0].strip():
        raise UsageError(f"expected paragraphs that begin with 'Human:' or 'Assistant:' in {key!r}, got {value!r:.200}")
    roles = {"Human": "user", "Assistant": "assistant"}
    return [{"role": roles[who], "content": text} for who, text in zip(parts[1::2], parts[2::2], strict=True)]
