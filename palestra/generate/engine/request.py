"""A request in the engine: validation, the state of each of its samples, growing text and stop strings."""

import itertools
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

from palestra.data.media import check_places, content_keys, rope_positions
from palestra.data.tokenizers import Detokenizer, Tokenizer, check_unicode
from palestra.errors import PalestraError, UsageError
from palestra.generate.engine.guide import CompiledGuide
from palestra.generate.engine.kv_cache import Looked
from palestra.generate.engine.pages import Joined
from palestra.generate.engine.score_edits import RowEdits
from palestra.generate.types import EDITS, Chunk, Generation, Request, Result, Sampling, StopReason


class StopStrings:
    """Finds stop strings in text that comes in pieces, and holds back what might become one."""

    def __init__(self, stops: Sequence[str]):
        self.stops = tuple(stops)
        self.found: str | None = None
        self._kept = ""

    def push(self, text: str, *, ignore: bool = False) -> str:
        """The text that is certain to lie before any stop string. Sets `found` once one ends in `text`.

        The first one to begin counts, of several the longest. With `ignore` none does.
        """
        seen, before = self._kept + text, len(self._kept)
        matches = []
        for stop in () if ignore else self.stops:
            # Not one that lay in the kept text already: it was ignored then.
            start = seen.find(stop, max(0, before - len(stop) + 1))
            if start >= 0:
                matches.append((start, -len(stop), stop))
        if matches:
            start, _, self.found = min(matches)
            self._kept = ""
            return seen[:start]
        length = max((self._beginning(seen, stop) for stop in self.stops), default=0)
        self._kept = seen[len(seen) - length :]
        return seen[: len(seen) - length]

    def finish(self) -> str:
        """What was kept back and did not become a stop string."""
        kept, self._kept = self._kept, ""
        return kept

    @staticmethod
    def _beginning(text: str, stop: str) -> int:
        """How many of the last characters are the first of `stop`, but not all of it."""
        return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)


class StopEnders(dict[int, bool]):
    """Whether a stop string may end in a token, by the token; found out when it is first asked for."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str]):
        self._piece = tokenizer.piece
        # A character comes out with its last byte, except U+FFFD, which stands for bytes that are none.
        unknown = any(stop[-1] == "\ufffd" for stop in stops)
        self._last = None if unknown else frozenset(stop.encode()[-1] for stop in stops)

    def __missing__(self, token: int) -> bool:
        self[token] = may = self._last is None or not self._last.isdisjoint(self._piece(token))
        return may


class GrowingText:
    """Tokens to text, up to a stop string. Text that may still change or be cut is not given out."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str]):
        self.text = ""
        """All that has been given out."""
        self._detokenizer = Detokenizer(tokenizer, continues=True)
        self._stops = StopStrings(stops)

    @property
    def stopped_by(self) -> str | None:
        """The stop string that the last token completed."""
        return self._stops.found

    def push(self, token: int, *, ignore_stops: bool) -> str:
        """The text that the token makes certain."""
        return self._give(self._stops.push(self._detokenizer.push([token]), ignore=ignore_stops))

    def finish(self) -> str:
        """The text that was kept back, when no more tokens come; nothing after a stop string."""
        if self.stopped_by is not None:
            return ""
        # Half a character becomes U+FFFD, which no more tokens can follow: too late to stop.
        return self._give(self._stops.push(self._detokenizer.finish(), ignore=True) + self._stops.finish())

    def _give(self, text: str) -> str:
        self.text += text
        return text


MOST_ENDERS = 64
"""Sets of stop strings that are remembered: anybody may send others to a server."""


class StopWatch:
    """Begins to follow a text once one of its stop strings may end; until then its text is not needed."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._enders: dict[tuple[str, ...], StopEnders] = {}

    def text(self, stops: tuple[str, ...], before: Sequence[int], tokens: Sequence[int]) -> GrowingText | None:
        """The text of the tokens `before`, in which no stop string ended, if one may end in the new `tokens`."""
        if not stops:
            return None
        if stops not in self._enders:
            if len(self._enders) == MOST_ENDERS:
                self._enders.clear()
            self._enders[stops] = StopEnders(self._tokenizer, stops)
        if not any(map(self._enders[stops].__getitem__, tokens)):
            return None
        text = GrowingText(self._tokenizer, stops)
        for token in before:
            text.push(token, ignore_stops=True)
        return text


MOST_ENDS = 16
"""How many end tokens a request can have."""
MOST_ALTERNATIVES = 20
"""How many alternatives to each token a request can ask for."""
MOST_STOPS, LONGEST_STOP = 16, 1000
"""How many stop strings a request can have, and of how many characters each: all are looked for after every token."""
COLDEST, HOTTEST = 1e-4, 1e4
"""Temperatures other than 0 that FP32 scores can be divided by."""
MOST_BIASED, MOST_BIAS = 1024, 100
"""How many tokens a logit_bias can have, and how large it can be."""
LEAST_TOP_P = 1e-6
"""Far below the probability of the most likely token in any vocabulary, which is always kept."""
LIMITS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "temperature": (f"0, or {COLDEST:g} to {HOTTEST:g}", lambda heat: heat == 0 or COLDEST <= heat <= HOTTEST),
    "top_k": ("at least 1", lambda most: most is None or most >= 1),
    "top_p": (f"{LEAST_TOP_P:g} to 1", lambda share: LEAST_TOP_P <= share <= 1),
    "min_p": ("from 0 to 1", lambda share: 0 <= share <= 1),
    "max_new_tokens": ("at least 1", lambda count: count >= 1),
    "min_new_tokens": ("0 or more", lambda count: count >= 0),
    "logprobs": (f"0 to {MOST_ALTERNATIVES}", lambda count: 0 <= count <= MOST_ALTERNATIVES),
    "repetition_penalty": ("0.01 to 100", lambda penalty: 0.01 <= penalty <= 100),
    "frequency_penalty": ("−2 to 2", lambda penalty: -2 <= penalty <= 2),
    "presence_penalty": ("−2 to 2", lambda penalty: -2 <= penalty <= 2),
}
"""Of a sampling's fields: what is expected, and whether a value is that."""
PROCESS, NUMBERS = secrets.token_hex(4), itertools.count()
"""Of ids: random once, since a request should not wait for the system's random numbers."""


Alternatives = tuple[tuple[int, float], ...]
"""Tokens and their log-probabilities."""


class PromptTooLong(UsageError):
    """A prompt that leaves no room for a token in the context."""


class QueueFull(PalestraError):
    """The queue has no room for another request."""


class EngineFailed(PalestraError):
    """Raised to every pending and later caller when the engine has failed; `__cause__` is the original error.

    A new error each time: one that is raised again and again keeps all the tracebacks.
    """

    def __init__(self, cause: BaseException):
        super().__init__(str(cause) if isinstance(cause, PalestraError) else f"{type(cause).__name__}: {cause}")
        self.__cause__ = cause


class TokenSink(Protocol):
    """Where the output of a request goes. It is called in the thread that calls for bursts."""

    streams: bool
    """Whether it takes chunks too."""

    def put(self, item: Chunk | Result | BaseException) -> None:
        """New tokens; all generations once they have ended; or the error that ended the request."""
        ...


class Collect:
    """Keeps what becomes of a request of `run`."""

    streams = False

    def __init__(self, done: dict[int, Result], errors: list[BaseException], place: int):
        self.done, self.errors, self.place = done, errors, place

    def put(self, item: Chunk | Result | BaseException) -> None:
        if isinstance(item, Result):
            self.done[self.place] = item
        elif isinstance(item, BaseException):
            self.errors.append(item)


@dataclass(eq=False, slots=True)
class EngineJob:
    """A request in flight."""

    id: str
    request: Request
    sink: TokenSink
    seed: int
    ends: tuple[int, ...]
    """Tokens that end a generation."""
    limit: int
    """New tokens of a generation at most."""
    keys: tuple[int, ...]
    """The prompt, with numbers of what they show in place of images' tokens: those with the same keys share pages."""
    key: int
    """Hash of the keys."""
    shift: int = 0
    """What is added to the place of a token after the images to get its rotary position."""
    guide: CompiledGuide | None = None
    started: int = 0
    """How many of the n samples have been given a row."""
    generations: dict[int, Generation] = field(default_factory=dict)
    """Those that have ended, by index."""

    looked: tuple[int, Looked] | None = None
    """The version of the weights, and what the runner has made of its images by them."""

    @property
    def sampling(self) -> Sampling:
        return self.request.sampling

    def edits(self) -> RowEdits | None:
        """What changes the scores of a new sample; None where nothing does."""
        guide = None if self.guide is None else self.guide.start(self.ends)
        return RowEdits(self.request, guide) if self.sampling.given(EDITS) else None

    def same_prompt(self, other: "EngineJob") -> bool:
        """Whether both have the same prompt."""
        return self is other or (self.key == other.key and self.keys == other.keys)


@dataclass(eq=False, slots=True)
class Sample:
    """One of a request's generations, in a row of the batch."""

    job: EngineJob
    index: int
    number: int
    """Counts all samples in the order of their first start."""
    row: int = -1
    age: int = -1
    """Counts admissions: older ones have their prompts computed first, and the youngest gives back its pages."""
    pages: list[int] = field(default_factory=list)
    """Of the cache; the first ones may be shared."""
    source: "Sample | None" = None
    """A sample with the same prompt, whose last page is copied when it has been computed."""
    text: GrowingText | None = None
    """Where it is wanted as it grows."""
    edits: RowEdits | None = None
    """What changes its scores, where the request asks for that; a function of its tokens."""
    cached: int = 0
    """How many tokens have their keys and values in its pages, or get them from the samples it shares them with."""
    active: bool = False
    """Whether tokens are being sampled."""
    ahead: int = 0
    """How many tokens, at most, are being sampled that the host has not seen."""
    shareable: bool = True
    """Whether its pages hold what the current weights compute."""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    top: list[Alternatives] = field(default_factory=list)

    @property
    def due(self) -> int:
        """How many tokens must be cached before the next is sampled: all but the last, which the decode step adds."""
        return len(self.job.request.prompt) + len(self.tokens) - 1

    @property
    def remaining(self) -> int:
        """How many tokens may still be sampled."""
        return self.job.limit - len(self.tokens)

    @property
    def most(self) -> int:
        """How many tokens prompt and generation may have."""
        return len(self.job.request.prompt) + self.job.limit

    @property
    def sequence(self) -> Sequence[int]:
        """Tokens of prompt and generation."""
        return [*self.job.request.prompt, *self.tokens] if self.tokens else self.job.request.prompt

    @property
    def keys(self) -> Sequence[int] | Joined:
        """The same by what they show."""
        return Joined(self.job.keys, self.tokens) if self.tokens else self.job.keys

    def ending(self, since: int, text: str) -> "Ending | None":
        """How it has ended, if it has, with its tokens from number `since` on, which have given `text`."""
        last, stops = self.tokens[-1], self.job.sampling.stop_ids
        if self.text is not None and self.text.stopped_by is not None:
            return Ending(self, since, text, StopReason.STOP, self.text.stopped_by)
        if last in self.job.ends:
            return Ending(self, since, text, StopReason.STOP if last in stops else StopReason.EOS, last)
        if self.edits is not None and self.edits.completed_by(self.tokens[since:]):
            return Ending(self, since, text, StopReason.STOP)
        return Ending(self, since, text, StopReason.LENGTH) if self.remaining == 0 else None

    def chunk(self, since: int, text: str, reason: StopReason | None = None) -> Chunk:
        """The tokens from number `since` on."""
        tokens, logprobs = tuple(self.tokens[since:]), tuple(self.logprobs[since:])
        versions, top = tuple(self.versions[since:]), tuple(self.top[since:])
        return Chunk(self.index, tokens, logprobs, versions, text, reason, top)


class Ending(NamedTuple):
    """How a sample has ended; its tokens from number `since` on and `text` are new."""

    sample: Sample
    since: int
    text: str
    reason: StopReason
    match: str | int | None = None
    """The stop string or token that ended it."""


def check_tokens(prompt: Sequence[int], others: Sequence[int], vocab: int) -> None:
    """Refuse an empty prompt, and tokens of it or others that the model does not have."""
    if not prompt:
        raise UsageError("the prompt is empty: it needs at least one token, such as the one that begins a text")
    named = (*prompt, *others) if others else prompt
    if not 0 <= min(named) <= max(named) < vocab:
        token = next(token for token in named if not 0 <= token < vocab)
        raise UsageError(f"token {token} is not in the model's vocabulary of {vocab}")


def checked(
    request: Request,
    sink: TokenSink,
    *,
    vocab: int,
    context: int,
    eos: frozenset[int],
    has_text: bool,
    vision: Sequence[int] | None = None,
) -> EngineJob:
    """A job for a valid request; an invalid one is refused by the name of the field. `vision`: tokens of images."""
    sampling, prompt = request.sampling, request.prompt
    if vision is not None:
        check_places(prompt, request.media, vision)
    elif request.media:
        raise UsageError(f"the prompt has {len(request.media)} images, and this model reads text only")
    if len(prompt) >= context:
        raise PromptTooLong(
            f"the prompt has {len(prompt)} tokens, but prompt and completion share a context of {context}"
        )
    bias = sampling.logit_bias or {}
    check_tokens(prompt, (*sampling.stop_ids, *bias), vocab)
    if request.n < 1:
        raise UsageError(f"n = {request.n!r}: expected at least 1")
    for name, (expected, right) in LIMITS.items():
        if not right(value := getattr(sampling, name)):
            raise UsageError(f"{name} = {value!r}: expected {expected}")
    for token, value in bias.items():
        if not -MOST_BIAS <= value <= MOST_BIAS:
            raise UsageError(f"logit_bias[{token}] = {value!r}: expected −{MOST_BIAS} to {MOST_BIAS}")
    ends = tuple(sorted({*sampling.stop_ids, *(() if sampling.ignore_eos else eos)}))
    if len(ends) > MOST_ENDS:
        raise UsageError(f"{len(ends)} end tokens: expected at most {MOST_ENDS}, the model's own included")
    if len(sampling.stop) > MOST_STOPS:
        raise UsageError(f"{len(sampling.stop)} stop strings: expected at most {MOST_STOPS}")
    for stop in sampling.stop:
        if not stop:
            raise UsageError("a stop string is empty: leave it out")
        if len(stop) > LONGEST_STOP:
            raise UsageError(f"a stop string has {len(stop)} characters: expected at most {LONGEST_STOP}")
        check_unicode(stop, "a stop string")
    if sampling.stop and not has_text:
        raise UsageError("stop strings need a tokenizer, and this engine has none: give stop_ids")
    if len(bias) > MOST_BIASED:
        raise UsageError(f"logit_bias has {len(bias)} tokens: expected at most {MOST_BIASED}")
    if sampling.guide is not None and sampling.min_new_tokens:
        raise UsageError("min_new_tokens: a guide says where a completion may end: leave it out")
    limit = min(sampling.max_new_tokens, context - len(prompt))
    if sampling.min_new_tokens > limit:  # no more than there can be, and a number that fits the rows' tensors
        request = replace(request, sampling=replace(sampling, min_new_tokens=limit))
    seed = secrets.randbits(63) if sampling.seed is None else sampling.seed
    keys, shift = prompt, 0
    if request.media:
        keys = content_keys(prompt, request.media)
        shift = int(rope_positions(len(prompt), request.media).max()) + 1 - len(prompt)
    return EngineJob(
        request.id or f"{PROCESS}-{next(NUMBERS)}", request, sink, seed, ends, limit, keys, hash(keys), shift
    )
