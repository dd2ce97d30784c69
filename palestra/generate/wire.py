"""Requests, results and chunks as JSON: what the server's `/generate` and its client say to each other."""

import uuid
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from palestra.generate.jobs import LONGEST_STOP, MOST_ALTERNATIVES, MOST_STOPS
from palestra.generate.types import Chunk, Generation, Request, Result, Sampling, StopReason

# What both `/generate` and OpenAI's endpoints accept. Numbers are finite, and fit the engine's 64-bit tensors.
Temperature = Annotated[float, Field(ge=0, allow_inf_nan=False)]
TopP = Annotated[float, Field(gt=0, le=1)]
MinP = Annotated[float, Field(ge=0, le=1)]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Count = Annotated[int, Field(ge=1, lt=2**31)]
MOST_SAMPLES = 1024  # that one HTTP request may ask for, all of its prompts together
Samples = Annotated[int, Field(ge=1, le=MOST_SAMPLES)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
StopString = Annotated[str, Field(min_length=1, max_length=LONGEST_STOP)]
Alternatives = Annotated[int, Field(ge=0, le=MOST_ALTERNATIVES)]


class SamplingBody(BaseModel):
    """`Sampling` as JSON."""

    model_config = ConfigDict(strict=True, extra="forbid")

    temperature: Temperature = 1.0
    top_k: Count | None = None
    top_p: TopP = 1.0
    min_p: MinP = 0.0
    max_new_tokens: Count = 128
    min_new_tokens: Annotated[int, Field(ge=0, lt=2**31)] = 0
    # JSON has lists, no tuples.
    stop: Annotated[tuple[StopString, ...], Field(strict=False, max_length=MOST_STOPS)] = ()
    stop_ids: Annotated[tuple[TokenId, ...], Field(strict=False)] = ()
    ignore_eos: bool = False
    seed: Seed | None = None
    logprobs: Alternatives = 0


class GenerateBody(BaseModel):
    """`Request` as JSON, and whether to stream."""

    model_config = ConfigDict(strict=True, extra="forbid")

    prompt: list[TokenId]
    sampling: SamplingBody = SamplingBody()
    n: Samples = 1
    id: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    stream: bool = False

    def request(self) -> Request:
        """The request it describes; without an id it gets one, so that it can be ended."""
        sampling = Sampling(**dict(self.sampling))
        return Request(tuple(self.prompt), sampling, self.n, self.id or uuid.uuid4().hex)


def request_json(request: Request, *, stream: bool) -> dict[str, Any]:
    """The body of `POST /generate`."""
    return {**vars(request), "sampling": vars(request.sampling), "stream": stream}


def result_json(result: Result) -> dict[str, Any]:
    """The answer of `POST /generate`; the prompt is what was sent."""
    return {"id": result.id, "generations": [vars(generation) for generation in result.generations]}


def result_from_json(data: dict[str, Any], prompt: tuple[int, ...]) -> Result:
    """The inverse of `result_json`."""
    return Result(data["id"], prompt, tuple(Generation(**_typed(item)) for item in data["generations"]))


def chunk_json(chunk: Chunk) -> dict[str, Any]:
    """One event of a stream of `POST /generate`."""
    return vars(chunk)


def chunk_from_json(data: dict[str, Any]) -> Chunk:
    """The inverse of `chunk_json`."""
    return Chunk(**_typed(data))


def _typed(data: dict[str, Any]) -> dict[str, Any]:
    reason = data["stop_reason"]
    return {
        **data,
        "tokens": tuple(data["tokens"]),
        "logprobs": tuple(data["logprobs"]),
        "versions": tuple(data["versions"]),
        "top": tuple(tuple((token, logprob) for token, logprob in row) for row in data["top"]),
        "stop_reason": None if reason is None else StopReason(reason),
    }
