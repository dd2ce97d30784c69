"""Guided decoding by llguidance: which tokens keep a completion within its JSON schema, regex, choices or grammar."""

import json
import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from palestra.data.tokenizers import Tokenizer, check_unicode
from palestra.errors import UsageError, needs_extra
from palestra.generate.types import Guide

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MOST_COMPILED = 64
"""Guides that are remembered: anybody may send others to a server."""
LONGEST_GUIDE = 2**16
"""Characters of a guide."""
# All tokens that spell what must come are allowed, and not only those that its own tokenizer would choose.
OPTIONS = '\n%llguidance {"no_forcing": true}'
# A space, or a line break and an indentation. Without a bound a model may never stop to write them.
WHITESPACE = {"whitespace_pattern": r"[ ]?|\n[ \t]{0,32}"}


class GuideFailed(UsageError):
    """A completion that its guide does not let go on. Only its own request fails."""


class GuideMatcher:
    """How far a completion has come within its guide, and which tokens may follow."""

    def __init__(self, matcher: "LLMatcher", vocab: int, ends: Sequence[int]):
        """`ends` may be sampled once the completion is complete, and only then."""
        self._matcher, self._vocab, self._ends = matcher, vocab, list(ends)
        self.allowed, self.complete = self._next()
        """(V) bool; and whether nothing can follow."""

    def push(self, tokens: Sequence[int]) -> None:
        """Tokens that were sampled."""
        self._matcher.consume_tokens(list(tokens))
        self.allowed, self.complete = self._next()

    def _next(self) -> tuple[np.ndarray, bool]:
        matcher = self._matcher
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        allowed = np.unpackbits(bits, count=self._vocab, bitorder="little").view(bool)
        accepts, complete, error = (
            matcher.is_accepting(),
            matcher.is_stopped() or not allowed.any(),
            matcher.get_error(),
        )
        if error and not error.startswith("NoExtension"):
            raise GuideFailed(f"the guide is too complex to follow: {_reason(error)}")
        allowed[self._ends] = accepts
        if not accepts and (complete or not allowed.any()):
            ending = "" if complete else ", but for those that end it: give other end tokens"
            raise GuideFailed(f"no token of the model continues the completion as its guide asks for{ending}")
        return allowed, complete


@dataclass(frozen=True)
class CompiledGuide:
    """A guide at its beginning, for a vocabulary."""

    matcher: "LLMatcher"
    vocab: int

    def start(self, ends: Sequence[int]) -> GuideMatcher:
        """The guide of a new completion, which may end with one of `ends`."""
        return GuideMatcher(self.matcher.deep_copy(), self.vocab, ends)


class Guides:
    """Compiles guides for a tokenizer. Any thread may call it."""

    def __init__(self, tokenizer: Tokenizer, vocab: int):
        self._tokenizer, self._vocab = tokenizer, vocab
        self._pieces: LLTokenizer | None = None
        """The vocabulary as llguidance reads it, once a guide needs it."""
        self._compiled: dict[str, CompiledGuide] = {}
        self._lock = threading.Lock()

    def compiled(self, guide: Guide) -> CompiledGuide:
        """A guide, from memory or compiled, which may take a second. An invalid one is refused."""
        grammar = _lark(guide)
        if len(grammar) > LONGEST_GUIDE:
            raise UsageError(f"the guide has {len(grammar):,} characters: expected at most {LONGEST_GUIDE:,}")
        with self._lock:
            if grammar not in self._compiled:
                if len(self._compiled) == MOST_COMPILED:
                    self._compiled.clear()
                self._compiled[grammar] = self._compile(grammar, _kind(guide))
            return self._compiled[grammar]

    def _compile(self, grammar: str, kind: str) -> CompiledGuide:
        from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

        if self._pieces is None:
            self._pieces = LLTokenizer(TokenizerWrapper(_Vocabulary(self._tokenizer, self._vocab)), self._vocab + 1)
        matcher = LLMatcher(self._pieces, grammar, log_level=0)
        if matcher.is_error():
            raise UsageError(f"the guide's {kind} is invalid: {_reason(matcher.get_error())}")
        compiled = CompiledGuide(matcher, self._vocab)
        if compiled.start(()).complete:
            raise UsageError(f"the guide's {kind} allows nothing but the empty text")
        return compiled


class _Vocabulary:
    """What llguidance asks a tokenizer for. It encodes no text, for nothing is forced.

    It gets an end token of its own, which no model has: a request says which end its completions.
    """

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab: int):
        self.tokens = [*map(tokenizer.piece, range(vocab)), b"<end>"]
        self.eos_token_id = vocab
        self.special_token_ids = [*sorted(token for token in tokenizer.special_ids if token < vocab), vocab]

    def __call__(self, text: str) -> list[int]:
        return []


def _kind(guide: Guide) -> str:
    return next(name for name, value in vars(guide).items() if value is not None)


def _lark(guide: Guide) -> str:
    """A guide as a grammar of llguidance."""
    with needs_extra("Guided decoding", "guided"):
        from llguidance import regex_to_lark
    if guide.json is not None:
        return f"start: %json {json.dumps({'x-guidance': WHITESPACE, **guide.json})}{OPTIONS}"
    if guide.grammar is not None:
        return guide.grammar + OPTIONS
    check_unicode(guide.regex or "", "the guide's regex")
    # As one expression: a rule with thousands of choices is too complex for its parser.
    regex = guide.regex if guide.regex is not None else "|".join(map(_literal, guide.choice or ()))
    if re.search(r"(?<!\\)(\\\\)*\\\Z", regex):  # which would be dropped
        raise UsageError("the guide's regex is invalid: it ends in the middle of an escape")
    return f"start: /{regex_to_lark(regex, 'd')}/{OPTIONS}"


def _literal(text: str) -> str:
    return "".join(letter if letter.isalnum() else f"\\x{{{ord(letter):x}}}" for letter in text)


def _reason(message: str) -> str:
    """What is wrong, of a message that goes on with all of the grammar and its state."""
    reason = re.search(r"(?m)^error: (.*)|failed to compile JSON schema: (.*)", message)
    return next(filter(None, reason.groups())) if reason else message.partition("\n")[0].removeprefix("at ")
