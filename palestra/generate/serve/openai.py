"""OpenAI's JSON: its completion requests as requests for the engine, and results as its responses."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from palestra.data.tokenizers import Detokenizer, Tokenizer
from palestra.generate import client as wire
from palestra.generate.engine.request import LONGEST_STOP, MOST_STOPS, Alternatives
from palestra.generate.types import Chunk, Generation, Guide, Request, Result, Sampling, StopReason

# Accepted and without effect: none of these changes what is generated.
HARMLESS = frozenset({
    "metadata", "parallel_tool_calls", "prediction", "prompt_cache_key", "prompt_cache_retention", "safety_identifier",
    "service_tier", "store", "user",
})  # fmt: skip
# Would change what is generated: accepted at the value that changes nothing, refused by name at any other.
UNSUPPORTED: dict[str, Any] = {
    "audio": None, "best_of": 1, "function_call": "none", "functions": [], "modalities": ["text"],
    "reasoning_effort": None, "suffix": "", "tool_choice": "none", "tools": [], "verbosity": None,
    "web_search_options": None,
}  # fmt: skip
# Called the same here.
SAME = ("temperature", "top_p", "min_p", "ignore_eos", "seed", "logit_bias",
        "repetition_penalty", "frequency_penalty", "presence_penalty")  # fmt: skip
# What a chat template gets from the server itself.
RESERVED = frozenset({"messages", "tools", "tokenizer", "add_generation_prompt"})
# OpenAI's stand-in for a log-probability of minus infinity, which JSON cannot say.
NEVER = -9999.0
FINISH = {StopReason.EOS: "stop", StopReason.STOP: "stop", StopReason.LENGTH: "length", StopReason.ABORT: "abort"}


class ApiError(Exception):
    """A refusal, as OpenAI's error object and HTTP status."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
    ):
        super().__init__(message)
        self.status = status
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


class StreamOptions(BaseModel):
    """Options of a stream."""

    include_usage: bool = False


class JsonSchema(wire.StrictBody):
    """A schema as OpenAI has it. It is always followed, whatever `strict` says."""

    name: str | None = None
    description: str | None = None
    of_json: Annotated[dict[str, Any], Field(alias="schema", default_factory=dict)]
    strict: bool | None = None


class ResponseFormat(wire.StrictBody):
    """OpenAI's way to ask for JSON."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    def guide(self) -> Guide | None:
        """What it asks for."""
        if self.type == "json_schema" and self.json_schema is None:
            raise ApiError(400, "response_format: json_schema is missing", param="response_format")
        if self.type == "text" or self.json_schema is None:
            return None if self.type == "text" else Guide(json={"type": "object"})
        return Guide(json=self.json_schema.of_json)


class StructuredOutputs(wire.GuideBody):
    """vLLM's way to ask for it, and for more; the schema may be JSON in a string."""

    @model_validator(mode="before")
    @classmethod
    def _as_a_guide(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        given = {name: value for name, value in data.items() if value not in (None, False)}
        if isinstance(given.get("json"), str):
            given["json"] = json.loads(given["json"])
        return {**given, "json": {"type": "object"}} if given.pop("json_object", False) else given


class Options(BaseModel):
    """What chat and plain completions have in common. A null is as good as leaving the field out."""

    model_config = ConfigDict(strict=True)

    model: str | None = None
    max_tokens: wire.Count | None = None
    n: wire.Samples = 1
    temperature: wire.Temperature = 1.0
    top_p: wire.TopP = 1.0
    seed: wire.Seed | None = None
    stop: (
        Annotated[str, Field(max_length=LONGEST_STOP)] | Annotated[list[wire.StopString], Field(max_length=MOST_STOPS)]
    ) = []
    stream: bool = False
    stream_options: StreamOptions | None = None
    logit_bias: wire.LogitBias | None = None
    frequency_penalty: wire.Penalty = 0.0
    presence_penalty: wire.Penalty = 0.0
    response_format: ResponseFormat | None = None
    # Beyond OpenAI's, under the names that vLLM gave them.
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] = 0
    min_p: wire.MinP = 0.0
    min_tokens: Annotated[int, Field(ge=0, lt=2**31)] = 0
    stop_token_ids: list[wire.TokenId] = []
    ignore_eos: bool = False
    return_token_ids: bool = False
    repetition_penalty: wire.Repetition = 1.0
    structured_outputs: StructuredOutputs | None = None

    @model_validator(mode="before")
    @classmethod
    def _known(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        fields = {name: value for name, value in data.items() if value is not None and name not in HARMLESS}
        for name in sorted(fields.keys() - cls.model_fields.keys()):
            if name not in UNSUPPORTED:
                raise ApiError(400, f"Unrecognized request argument supplied: {name}", param=name)
            if fields[name] != UNSUPPORTED[name]:
                message = f"{name} is not supported by this server: leave it out"
                raise ApiError(400, message, param=name, code="unsupported_parameter")
            del fields[name]
        return fields

    @property
    def usage_in_stream(self) -> bool:
        """Whether a stream ends with a count of tokens."""
        return self.stream_options is not None and self.stream_options.include_usage

    def _guide(self) -> Guide | None:
        asked = [form.guide() for form in (self.response_format, self.structured_outputs) if form is not None]
        if len(asked) > 1 and None not in asked:
            raise ApiError(400, "response_format and structured_outputs: give one of them", param="structured_outputs")
        return next(filter(None, asked), None)

    def _sampling(self, max_new_tokens: int, alternatives: int) -> Sampling:
        return Sampling(
            **{name: getattr(self, name) for name in SAME},
            top_k=self.top_k if self.top_k > 0 else None,
            max_new_tokens=max_new_tokens,
            min_new_tokens=self.min_tokens,
            stop=(self.stop,) if isinstance(self.stop, str) and self.stop else tuple(self.stop),
            stop_ids=tuple(self.stop_token_ids),
            logprobs=alternatives,
            guide=self._guide(),
        )


def _prompts(value: Any) -> Any:
    if isinstance(value, str) or (isinstance(value, list) and value and isinstance(value[0], int)):
        return [value]
    return value


class CompletionBody(Options):
    """`POST /v1/completions`."""

    prompt: Annotated[list[str | list[wire.TokenId]], BeforeValidator(_prompts), Field(min_length=1, max_length=2048)]
    """A string, a list of token ids, or a list of either."""
    logprobs: wire.Alternatives | None = None
    echo: bool = False
    """Whether choices begin with the prompt; with `logprobs`, with those of its tokens too."""

    @model_validator(mode="after")
    def _echo_whole(self) -> "CompletionBody":
        if self.echo and self.stream:
            raise ApiError(400, "echo is not supported in a stream: leave one of them out", param="echo")
        return self

    @property
    def characters(self) -> int:
        """The length of its longest text."""
        return max(len(prompt) if isinstance(prompt, str) else 0 for prompt in self.prompt)

    def sampling(self, context: int) -> Sampling:
        """Sampling parameters; 16 tokens by default, as OpenAI has it."""
        return self._sampling(self.max_tokens or 16, self.logprobs or 0)


class TextPart(wire.StrictBody):
    """Text as a part of a message."""

    type: Literal["text"]
    text: str


class ImageUrl(wire.StrictBody):
    """Where an image is."""

    url: str
    detail: Literal["auto", "low", "high"] | None = None
    """Without effect: sizes are the model's."""


class ImagePart(wire.StrictBody):
    """An image as a part of a message."""

    type: Literal["image_url"]
    image_url: ImageUrl
    text: Literal[""] = Field(default="", exclude=True)


Part = Annotated[TextPart | ImagePart, Field(discriminator="type")]


class MessageBody(wire.StrictBody):
    """A message of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[Part]
    name: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, data: Any) -> Any:
        # A message of an earlier response has tool_calls, refusal and the like as nulls.
        return {name: value for name, value in data.items() if value is not None} if isinstance(data, dict) else data

    @property
    def characters(self) -> int:
        """The length of its text."""
        return len(self.content) if isinstance(self.content, str) else sum(len(part.text) for part in self.content)

    def message(self) -> dict[str, Any]:
        """For the chat template. What OpenAI now calls developer messages, templates know as system messages."""
        return {**self.model_dump(exclude_none=True), "role": "system" if self.role == "developer" else self.role}


class ChatBody(Options):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[MessageBody], Field(min_length=1)]
    max_completion_tokens: wire.Count | None = None
    logprobs: bool = False
    top_logprobs: wire.Alternatives = 0
    # As vLLM has it: variables of the chat template, such as enable_thinking.
    chat_template_kwargs: Annotated[dict[Annotated[str, Field(max_length=64)], Any], Field(max_length=16)] = {}

    @property
    def characters(self) -> int:
        """The length of the conversation."""
        return sum(message.characters for message in self.messages)

    def sampling(self, context: int) -> Sampling:
        """Sampling parameters; up to the end of the context by default."""
        return self._sampling(self.max_completion_tokens or self.max_tokens or context, self.top_logprobs)

    @model_validator(mode="after")
    def _own_variables(self) -> "ChatBody":
        for name in self.chat_template_kwargs:
            if name in RESERVED or name.startswith("_") or name.endswith("_token"):
                message = f"chat_template_kwargs: {name} is set by the server: leave it out"
                raise ApiError(400, message, param="chat_template_kwargs")
        return self

    @model_validator(mode="after")
    def _logprobs_asked_for(self) -> "ChatBody":
        if self.top_logprobs and not self.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs to be true", param="top_logprobs")
        return self


@dataclass(frozen=True)
class Reply:
    """One response to a chat or completion request, whole or as events of a stream."""

    body: ChatBody | CompletionBody
    id: str
    created: int
    """Unix time in seconds."""
    model: str
    tokenizer: Tokenizer
    requests: tuple[Request, ...]
    """One for each prompt, of `body.n` generations each."""
    scored: tuple[tuple[list[float], list[Alternatives]], ...] = ()
    """Where they are asked for: of each prompt, the log-probabilities of its tokens but the first, and alternatives."""
    _offsets: dict[int, "_Offsets"] = field(default_factory=dict)
    """Of completions with log-probabilities: where in its text each choice is."""

    @property
    def chat(self) -> bool:
        """Whether it is the response to a chat."""
        return isinstance(self.body, ChatBody)

    def whole(self, results: Sequence[Result]) -> dict[str, Any]:
        """The response object."""
        choices = [
            self._choice(prompt, index, made, self._content(self._echoed(prompt) + (made.text or "")))
            for prompt, result in enumerate(results)
            for index, made in enumerate(result.generations)
        ]
        tokens = sum(len(generation.tokens) for result in results for generation in result.generations)
        kind = "chat.completion" if self.chat else "text_completion"
        return {**self._head(kind), "choices": choices, "usage": self.usage(tokens)} | self._chat_prompt()

    def opening(self) -> list[dict[str, Any]]:
        """The events before any token: the role of each choice of a chat."""
        if not self.chat:
            return []
        start = {"delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        return [self._event({"index": index, **start}) | self._chat_prompt() for index in range(self.body.n)]

    def part(self, prompt: int, chunk: Chunk) -> dict[str, Any] | None:
        """The event for a chunk of a prompt's stream; None where it has nothing new."""
        if not (chunk.text or chunk.stop_reason or self._asks_logprobs or self.body.return_token_ids):
            return None  # half a character, or what may become a stop string
        delta = {"delta": {"content": chunk.text} if chunk.text else {}}
        return self._event(self._choice(prompt, chunk.index, chunk, delta if self.chat else {"text": chunk.text}))

    def closing(self, tokens: int) -> list[dict[str, Any]]:
        """The events after the last token: what was used, if asked for."""
        if not self.body.usage_in_stream:
            return []
        return [{**self._head(self._event_kind), "choices": [], "usage": self.usage(tokens)}]

    def usage(self, tokens: int) -> dict[str, int]:
        """The count of tokens; each prompt counts once, whatever n."""
        prompt = sum(len(request.prompt) for request in self.requests)
        return {"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens}

    def _echoed(self, prompt: int) -> str:
        echo = isinstance(self.body, CompletionBody) and self.body.echo
        return self.tokenizer.decode(self.requests[prompt].prompt) if echo else ""

    @property
    def _asks_logprobs(self) -> bool:
        return self.body.logprobs is not None and self.body.logprobs is not False

    @property
    def _event_kind(self) -> str:
        return "chat.completion.chunk" if self.chat else "text_completion"

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _event(self, choice: dict[str, Any]) -> dict[str, Any]:
        usage = {"usage": None} if self.body.usage_in_stream else {}
        return {**self._head(self._event_kind), "choices": [choice], **usage}

    def _content(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "refusal": None}} if self.chat else {"text": text}

    def _choice(self, prompt: int, index: int, made: Generation | Chunk, content: dict[str, Any]) -> dict[str, Any]:
        place = prompt * self.body.n + index
        reason = None if made.stop_reason is None else FINISH[made.stop_reason]
        about = {"logprobs": self._logprobs(place, made), "finish_reason": reason}
        return {"index": place, **content, **about, **self._ids(prompt, made)}

    def _chat_prompt(self) -> dict[str, Any]:
        return {"prompt_token_ids": self.requests[0].prompt} if self.chat and self.body.return_token_ids else {}

    def _ids(self, prompt: int, made: Generation | Chunk) -> dict[str, Any]:
        if not self.body.return_token_ids:
            return {}
        ids = {"token_ids": made.tokens, "versions": made.versions}
        return ids if self.chat else {**ids, "prompt_token_ids": self.requests[prompt].prompt}

    def _logprobs(self, index: int, made: Generation | Chunk) -> dict[str, Any] | None:
        if not self._asks_logprobs:
            return None
        rows = list(zip(made.tokens, made.logprobs, made.top or ((),) * len(made.tokens), strict=True))
        if self.chat:
            content = [
                {**self._token(token, logprob), "top_logprobs": [self._token(*pair) for pair in top]}
                for token, logprob, top in rows
            ]
            return {"content": content, "refusal": None}
        first = None
        if self.scored:
            prompt, (logprobs, top) = self.requests[index // self.body.n].prompt, self.scored[index // self.body.n]
            first, *prompt = prompt
            rows = [*zip(prompt, logprobs, top, strict=True), *rows]
        offsets = self._offsets.setdefault(index, _Offsets(self.tokenizer, continues=first is None))
        before, unknown = ([], []) if first is None else ([first], [None])  # nothing predicts the first token
        tokens = [*before, *(token for token, _, _ in rows)]
        # The sampled token is always among them, also where others were likelier.
        alternatives = [*unknown, *(self._by_text({**dict(top), token: logprob}) for token, logprob, top in rows)]
        return {
            "tokens": [token_text(self.tokenizer.piece(token)) for token in tokens],
            "token_logprobs": [*unknown, *(max(logprob, NEVER) for _, logprob, _ in rows)],
            "top_logprobs": alternatives if self.body.logprobs else None,
            "text_offset": [offsets.before(token) for token in tokens],
        }

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        piece = self.tokenizer.piece(token)
        return {"token": token_text(piece), "logprob": max(logprob, NEVER), "bytes": list(piece)}

    def _by_text(self, logprobs: Mapping[int, float]) -> dict[str, float]:
        return {token_text(self.tokenizer.piece(token)): max(value, NEVER) for token, value in logprobs.items()}


class _Offsets:
    """How many characters of a choice's text come before each of its tokens."""

    def __init__(self, tokenizer: Tokenizer, continues: bool):
        self._text = Detokenizer(tokenizer, continues=continues)
        self._length = 0

    def before(self, token: int) -> int:
        start = self._length
        self._length += len(self._text.push([token]))
        return start


def token_text(piece: bytes) -> str:
    """A token's bytes as text; those that are not whole characters are spelled out, as OpenAI does."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)
