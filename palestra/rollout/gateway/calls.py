"""Tool calls in a model's text: the formats of Hermes and Qwen, Llama 3, Mistral and plain JSON, whole or in pieces."""

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from palestra.data.tokenizers import Tokenizer

Format = Literal["hermes", "llama3", "mistral", "json"]
OPENERS: dict[Format, tuple[str, ...]] = {
    "hermes": ("<tool_call>",),
    "mistral": ("[TOOL_CALLS]",),
    "llama3": ("<|python_tag|>",),
    "json": (),
}
"""What begins a call anywhere in the text. Llama 3 and plain JSON may also be the whole text."""
WHOLE = ("{", "[", "```json")
CLOSER = "</tool_call>"
DECODER = json.JSONDecoder()


@dataclass(frozen=True)
class Call:
    """A call of a tool."""

    name: str
    arguments: str
    """JSON, as the model wrote it."""
    id: str = ""

    @classmethod
    def of(cls, name: Any, arguments: Any, id: Any = "") -> "Call":
        """One whose arguments may be JSON or an object."""
        written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        return cls(str(name), written, str(id))

    @property
    def input(self) -> Any:
        """The arguments as an object; as a text where they are not JSON."""
        try:
            return _sendable(json.loads(self.arguments))
        except (ValueError, RecursionError):
            return self.arguments


def format_of(tokenizer: Tokenizer) -> Format:
    """The format that a chat template speaks of; plain JSON where it speaks of none."""
    template = tokenizer.chat_template or ""
    marks: dict[str, Format] = {"<tool_call>": "hermes", "[TOOL_CALLS]": "mistral", "<|python_tag|>": "llama3"}
    if '"parameters"' in template:
        marks["parameters"] = "llama3"
    return next((format for mark, format in marks.items() if mark in template), "json")


def with_ids(calls: list[Call], *seed: object) -> list[Call]:
    """The calls with ids that depend on the seed alone: some templates write them. Mistral's have nine characters."""
    return [
        Call(call.name, call.arguments, hashlib.blake2b(f"{seed} {place}".encode()).hexdigest()[:9])
        for place, call in enumerate(calls)
    ]


class CallReader:
    """Splits text that comes in pieces into what is said and what is called.

    What may become a call is held back; what turns out to be none is given out as text.
    """

    def __init__(self, format: Format):
        self.format: Format = format
        self._text, self._said, self._open = "", False, False

    def push(self, piece: str) -> tuple[str, list[Call]]:
        """The text and the calls that the piece makes certain."""
        self._text += piece
        text, calls = "", []
        while True:
            text += "" if self._open else self._before()
            if not self._open or self.format != "hermes" or CLOSER not in self._text:
                return text, calls
            call, _, self._text = self._text.partition(CLOSER)
            self._open, made = False, list(_parsed(call, self.format))
            calls, text = calls + made, text if made else text + call + CLOSER

    def finish(self) -> tuple[str, list[Call]]:
        """What was held back, when no more comes."""
        calls = list(_parsed(self._text, self.format)) if self._open else []
        return ("", calls) if calls else (self._text, [])

    def _before(self) -> str:
        """The text that is certainly no call; opens one where it begins. White space before a call is dropped."""
        begins = [place for opener in OPENERS[self.format] if (place := self._text.find(opener)) >= 0]
        bare = self.format in ("llama3", "json") and not self._said
        if bare and self._text.lstrip().startswith(WHOLE):
            begins = [0]
        if begins:
            said, self._open = self._text[: min(begins)].rstrip(), True
        else:
            body = self._text.rstrip()
            openers = (*OPENERS[self.format], *((WHOLE[-1],) if bare and len(body.lstrip()) == len(body) else ()))
            sizes = (n for opener in openers for n in range(len(opener) - 1, 0, -1) if body.endswith(opener[:n]))
            said = body[: len(body) - max(sizes, default=0)].rstrip()
        self._text = self._text[len(said) :]
        self._said = self._said or bool(said.strip())
        return said


def _parsed(text: str, format: Format) -> Iterator[Call]:
    """The calls of a text that begins with one; none where it is not well formed."""
    if format == "hermes":
        text = text.lstrip().removeprefix("<tool_call>")
    elif format == "mistral":
        text = text.lstrip().removeprefix("[TOOL_CALLS]")
        if named := re.findall(r"(?<![\w.-])([\w.-]++)\[ARGS\]\s*(\{.*?\})\s*(?=\[TOOL_CALLS\]|$)", text, re.DOTALL):
            yield from (Call(name, arguments) for name, arguments in named)
            return
    else:
        text = text.replace("<|python_tag|>", "").strip().removeprefix("```json").removesuffix("```")
    place, text, found = 0, text.strip(), []
    try:
        while place < len(text):
            value, place = DECODER.raw_decode(text, place)
            found += _sendable(value if isinstance(value, list) else [value])
            place += len(text[place:]) - len(text[place:].lstrip(" ;\n"))
    except (ValueError, RecursionError):  # the latter: nested too deeply
        return
    calls = [call for one in found if (call := _call(one)) is not None]
    yield from calls if len(calls) == len(found) else ()


def _call(value: Any) -> Call | None:
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = value["function"]
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    return Call.of(value["name"], value.get("arguments", value.get("parameters", {})))


def _sendable(value: Any) -> Any:
    """The value; ValueError where it has what Python reads and no client can be sent: NaN, half of a surrogate pair."""
    json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    return value
