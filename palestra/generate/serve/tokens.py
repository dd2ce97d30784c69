"""vLLM's `/inference/v1/generate` (0.32): its JSON as requests for the engine, and results as its responses."""

import uuid
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from palestra.generate import client as wire
from palestra.generate.serve.openai import FINISH, NEVER, ApiError, Options
from palestra.generate.types import Chunk, Generation, Request, Result, Sampling

# Accepted and without effect on tokens.
HARMLESS = frozenset({
    "detokenize", "flat_logprobs", "include_stop_str_in_output", "output_kind", "skip_clone", "skip_special_tokens",
    "spaces_between_special_tokens",
})  # fmt: skip


class TokenSampling(Options):
    """vLLM's `SamplingParams`, as far as they change nothing or are known here."""

    logprobs: wire.Alternatives | None = None

    @model_validator(mode="before")
    @classmethod
    def _of_tokens(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        for name in ("model", "stream", "stream_options", "return_token_ids"):
            if name in data:
                raise ApiError(400, f"Unrecognized sampling parameter supplied: {name}", param=name)
        return {name: value for name, value in data.items() if name not in HARMLESS}

    def sampling(self, context: int) -> Sampling:
        """Up to the end of the context unless `max_tokens` says less."""
        return self._sampling(self.max_tokens or context, self.logprobs or 0)


class TokensBody(wire.StrictBody):
    """`POST /inference/v1/generate`."""

    token_ids: Annotated[list[wire.TokenId], Field(min_length=1)]
    sampling_params: TokenSampling
    request_id: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    model: str | None = None
    stream: bool | None = False
    cache_salt: str | None = None
    """Without effect: no request continues from what another has cached."""
    priority: Literal[0] = 0
    output_mode: Literal["tokens"] = "tokens"

    def request(self, context: int) -> Request:
        """The request it describes."""
        params = self.sampling_params
        return Request(tuple(self.token_ids), params.sampling(context), params.n, self.request_id or uuid.uuid4().hex)


PREFIX = "generate-tokens-"
"""vLLM answers with request ids that begin with this, and takes them back so."""


class AbortRequests(wire.StrictBody):
    """`POST /inference/v1/abort_requests`."""

    request_ids: list[str]

    @property
    def ids(self) -> list[str]:
        """As they were sent."""
        return [id.removeprefix(PREFIX) for id in self.request_ids]


class TokenReply:
    """A response to `TokensBody`, whole or as events of a stream."""

    def __init__(self, body: TokensBody, request: Request, model: str, created: int):
        self._head = {"request_id": f"{PREFIX}{request.id}", "output_mode": "tokens"}
        self._about = {"model": model, "created": created}
        self._asked, self._prompt = body.sampling_params.logprobs, len(request.prompt)
        self._versions: list[list[int]] = [[] for _ in range(request.n)]

    def whole(self, result: Result) -> dict[str, Any]:
        """The response object."""
        choices = [
            self._choice(index, made, made.versions)
            | {"stop_reason": made.stop_match if made.stop_reason == "stop" else None}
            for index, made in enumerate(result.generations)
        ]
        made = sum(len(generation.tokens) for generation in result.generations)
        usage = {"prompt_tokens": self._prompt, "completion_tokens": made, "total_tokens": self._prompt + made}
        return {**self._head, **self._about, "choices": choices, "usage": usage}

    def part(self, chunk: Chunk) -> dict[str, Any]:
        """The event for a chunk; vLLM tells the versions of all tokens with the last one, this in every event."""
        versions = self._versions[chunk.index]
        versions += chunk.versions
        return {**self._head, "choices": [self._choice(chunk.index, chunk, versions)]}

    def _choice(self, index: int, made: Generation | Chunk, versions: Sequence[int]) -> dict[str, Any]:
        reason = None if made.stop_reason is None else FINISH[made.stop_reason]
        logprobs = None if self._asked is None else {"content": list(self._content(made, max(self._asked, 1)))}
        about = {"index": index, "finish_reason": reason, "weight_versions": list(_spans(versions))}
        return {**about, "token_ids": made.tokens, "logprobs": logprobs}

    def _content(self, made: Generation | Chunk, most: int) -> Iterator[dict[str, Any]]:
        """An entry for each token; its alternatives begin with the token itself, and have `most` entries with it."""
        for token, logprob, top in zip(made.tokens, made.logprobs, made.top or ((),) * len(made.tokens), strict=True):
            ranks, rounded = {other: rank for rank, (other, _) in enumerate(top, start=1)}, dict(top)
            rows = [(token, rounded.get(token, logprob)), *(pair for pair in top if pair[0] != token)][:most]
            entries = [{"token_id": id, "logprob": max(value, NEVER), "rank": ranks.get(id)} for id, value in rows]
            yield {**entries[0], "logprob": max(logprob, NEVER), "top_logprobs": entries}


def _spans(versions: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Runs of tokens of one version; `end` is the place after the last."""
    start = 0
    for version, run in groupby(versions):
        end = start + len(list(run))
        yield {"version": str(version), "start": start, "end": end}
        start = end
