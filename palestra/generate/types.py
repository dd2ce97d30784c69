"""Requests, results, and the `Generator` interface that the engine in this process and the HTTP clients share."""

import threading
from collections.abc import AsyncGenerator, Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol

from palestra.data.media import Image
from palestra.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor


GROUP: ContextVar[int | None] = ContextVar("GROUP", default=None)
"""The number of the group whose workflow is running: its requests go to one generator, which has its prompt."""


@dataclass(frozen=True)
class Guide:
    """What a completion must be, as exactly one of these. Needs the extra `guided`."""

    json: Mapping[str, Any] | None = None
    """A JSON schema that it validates against; an empty one is any JSON."""
    regex: str | None = None
    """A regular expression that all of it matches; Rust's syntax: no look-around, and `\\d` is 0 to 9."""
    choice: tuple[str, ...] | None = None
    """Texts of which it is one."""
    grammar: str | None = None
    """A context-free grammar in llguidance's form of Lark, whose rule `start` produces it."""

    def __post_init__(self) -> None:
        if sum(value is not None for value in vars(self).values()) != 1:
            raise UsageError(f"a guide has exactly one of {', '.join(vars(self))}")


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters. Log-probabilities are of the distribution sampled from, after all of these are applied."""

    temperature: float = 1.0
    """0 takes the most likely token."""
    top_k: int | None = None
    """Only the k most likely tokens."""
    top_p: float = 1.0
    """Only the most likely tokens that together hold this much probability."""
    min_p: float = 0.0
    """Only tokens at least this likely, relative to the most likely one."""
    max_new_tokens: int = 128
    """Stop after this many."""
    min_new_tokens: int = 0
    """No stop before this many: end tokens cannot be sampled, stop strings are ignored."""
    stop: tuple[str, ...] = ()
    """Strings that end a generation once its text contains one; the tokens up to there are kept."""
    stop_ids: tuple[int, ...] = ()
    """Tokens that end a generation; kept as its last token."""
    ignore_eos: bool = False
    """Continue after the model's own end tokens."""
    seed: int | None = None
    """The same request and seed give the same tokens, whatever else is in the batch; null picks a random seed."""
    logprobs: int = 0
    """How many of the most likely alternatives to give for each token."""
    logit_bias: Mapping[int, float] | None = None
    """Added to the scores of these tokens, −100 to 100."""
    repetition_penalty: float = 1.0
    """Divides positive scores of tokens in the prompt or the generation, and multiplies negative ones."""
    frequency_penalty: float = 0.0
    """Subtracted from the score of a token for each time that it was generated, −2 to 2."""
    presence_penalty: float = 0.0
    """Subtracted from the scores of tokens that were generated, −2 to 2."""
    guide: Guide | None = None
    """Only tokens with which the completion can still become what this describes; it ends when it is complete."""

    def given(self, names: Iterable[str]) -> list[str]:
        """Those of the parameters that are not at their defaults."""
        return [name for name in names if getattr(self, name) != getattr(Sampling, name)]


EDITS = ("logit_bias", "repetition_penalty", "frequency_penalty", "presence_penalty", "guide")
"""Parameters that change scores before they are sampled from, on the host's word: one step at a time."""
RESHAPES = ("top_k", "top_p", "min_p", "min_new_tokens", *EDITS)
"""Parameters other than the temperature that change the distribution: trainers do not know them."""


@dataclass(frozen=True)
class Request:
    """A prompt as tokens, and how to continue it."""

    prompt: tuple[int, ...]
    sampling: Sampling = Sampling()
    n: int = 1
    """How many generations; the prompt is computed once for all of them."""
    id: str | None = None
    """For `abort`; null lets the generator choose."""
    media: tuple[Image, ...] = ()
    """The images that its tokens of images stand for, in order."""


class StopReason(StrEnum):
    """Why a generation ended."""

    EOS = "eos"
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True)
class Generation:
    """One continuation. `tokens`, `logprobs` and `versions` have one entry for each new token, aligned."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Of the distribution that each token was sampled from."""
    versions: tuple[int, ...]
    """The version of the weights that sampled each token."""
    stop_reason: StopReason
    text: str | None = None
    """The text up to a stop string; null where the generator has no tokenizer."""
    top: tuple[tuple[tuple[int, float], ...], ...] = ()
    """The most likely alternatives for each token, if asked for: (token, log-probability)."""
    stop_match: str | int | None = None
    """The stop string or token that ended it."""


@dataclass(frozen=True)
class Chunk:
    """An item of a stream: new tokens of generation `index`; the last one of an index has its `stop_reason`."""

    index: int
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    text: str = ""
    stop_reason: StopReason | None = None
    top: tuple[tuple[tuple[int, float], ...], ...] = ()


@dataclass(frozen=True)
class Result:
    """The result of a request: its n generations."""

    id: str
    prompt: tuple[int, ...]
    generations: tuple[Generation, ...] = ()


class Generator(Protocol):
    """What workflows and trainers see: the engine in this process, or a server elsewhere."""

    async def generate(self, request: Request) -> Result:
        """The completions of a prompt."""
        ...

    def stream(self, request: Request) -> AsyncGenerator[Chunk, None]:
        """The same in chunks as tokens are sampled. Closing it early ends the request and frees its slots."""
        ...

    async def abort(self, id: str) -> None:
        """End a request now; it returns what it has, with the reason `abort`."""
        ...

    async def pause(self) -> None:
        """Stop sampling; requests wait where they are."""
        ...

    async def resume(self) -> None:
        """Continue sampling."""
        ...

    async def publish(self, weights: "Mapping[str, Tensor]", version: int, *, keep_cache: bool = True) -> None:
        """Load new weights between two tokens; no later token has an older version.

        Running requests continue, with their caches as they are or recomputed.
        """
        ...


class DrivenGenerator(Generator, Protocol):
    """A generator as a training loop sees it: its own thread generates here, or waits for those elsewhere."""

    @property
    def generated(self) -> float:
        """Tokens so far, which shows progress."""
        ...

    def counters(self) -> dict[str, float]:
        """What a row of metrics should have of it."""
        ...

    def work(self, seconds: float) -> bool:
        """Generate, or wait at most `seconds` and return False where there is nothing to do here."""
        ...

    def overlap(self) -> None:
        """Generate between two micro-batches, where that is this thread's work."""
        ...

    def wake(self) -> None:
        """End a wait in `work`, from any thread."""
        ...

    def load(self, weights: "Mapping[str, Tensor]", version: int, *, keep_cache: bool = True) -> None:
        """`publish`, and wait for it."""
        ...


class GeneratesElsewhere:
    """The half of a `DrivenGenerator` whose thread only waits for those that generate."""

    def __init__(self) -> None:
        self._wake = threading.Event()

    def work(self, seconds: float) -> bool:
        woken = self._wake.wait(seconds)
        self._wake.clear()
        return woken

    def overlap(self) -> None: ...

    def wake(self) -> None:
        self._wake.set()
