"""Evaluation by likelihood: choices between given completions, and bits per byte of whole texts."""

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from palestra.data.store import micro_batches
from palestra.data.tokenizers import Tokenizer
from palestra.errors import PalestraError, UsageError
from palestra.evaluate.choices import Item, Option, Suite
from palestra.evaluate.records import Estimate, estimate
from palestra.lm.batch import Batch, score
from palestra.lm.head import chunk_rows, logits
from palestra.lm.model import Transformer
from palestra.spec.kinds.evaluate import TextUse
from palestra.tasks.dataset import load_rows, text_of

CHUNK = 32
"""Items or documents scored together. Always the same ones: what a row is packed with can change its last bits."""
MICRO_TOKENS = 2**14
"""Tokens in one forward pass at most (one longer sequence goes alone)."""

By = Literal["sum", "token", "byte"]
Score = TypeVar("Score")


@dataclass(frozen=True)
class ScoredChoice:
    """What the model says of an item; one entry an option."""

    suite: str
    """The name of its file in this run."""
    item: int
    """Its number in the file, from 0."""
    gold: int
    logprobs: tuple[float, ...]
    """log p of each answer after its context."""
    tokens: tuple[int, ...]
    """Tokens that were scored."""
    bytes: tuple[int, ...]
    """UTF-8 bytes of each answer, or of the tokens that were scored where only what differs is."""
    written: bool | None
    """Whether the model would write the answer, token by token; null where it chooses between answers."""
    cut: bool
    """Whether the context was too long for the model and lost its beginning."""

    @classmethod
    def read(cls, row: Mapping[str, Any]) -> "ScoredChoice":
        """From a line of JSON."""
        values: dict[str, Any] = {**row, **{name: tuple(row[name]) for name in ("logprobs", "tokens", "bytes")}}
        return cls(**values)

    def chosen(self, by: By) -> int:
        """The option that the model finds most likely; of equals the first."""
        sizes = {"sum": [1] * len(self.logprobs), "token": self.tokens, "byte": self.bytes}[by]
        values = [logprob / size for logprob, size in zip(self.logprobs, sizes, strict=True)]
        return values.index(max(values))

    def right(self, by: By) -> bool:
        """Whether the model is right."""
        return self.written if self.written is not None else self.chosen(by) == self.gold


@dataclass(frozen=True)
class LikelihoodOutcome:
    """What the items of a file came to."""

    items: int
    accuracy: Estimate
    accuracies: dict[str, float]
    """By each way of choosing; empty where there is nothing to choose from."""
    baseline: float
    """The accuracy of guessing."""
    centred: float
    """(accuracy − baseline) / (1 − baseline): 0 for guessing, 1 for always right."""
    bits_per_byte: float
    """Of the right answers."""
    cut: int
    """Items whose context lost its beginning."""

    def plain(self) -> dict[str, Any]:
        """The same as JSON has it."""
        return asdict(self)


@dataclass(frozen=True)
class EncodedChoice:
    """A context with an answer, as tokens."""

    tokens: list[int]
    start: int
    """The first token that is scored."""
    cut: bool


Border = Literal["answer", "common"]


def encode_item(tokenizer: Tokenizer, item: Item, context: int, border: Border = "answer") -> list[EncodedChoice]:
    """The options of an item as tokens, at most `context` each.

    A context and its answer are tokenized as the one text that they are: a border that the tokenizer would not make
    scores tokens that the model never saw. White space before the answer is scored with it, as in lm-eval, because most
    tokenizers join them (" yes"); so is any token that holds some of both. Answers to one context are all scored from
    the same token on, so that what one of them shares with its context is not left out for the others.

    With the border `common` it is as CORE has it: answers to one context are scored from the first token in which they
    differ, and an answer to different contexts with all the tokens that these share at the end. At least one token of
    each is scored, also of an answer that another one begins with, where CORE would take the mean of nothing.

    What is too long loses its beginning, but not the tokens that begin every text.
    """
    whole = [_tokenized(tokenizer, option) for option in item.options]
    if border == "common" and item.choice:
        sequences, begins = [tokens for tokens, _ in whole], max(1, len(tokenizer.beginning))
        least = min(map(len, sequences)) - 1
        if item.one_context:
            first = min(_shared(sequences), least)
            whole = [(tokens, first) for tokens in sequences]
        else:
            last = max(1, min(_shared([tokens[::-1] for tokens in sequences]), least + 1 - begins))
            whole = [(tokens, len(tokens) - last) for tokens in sequences]
    elif item.one_context:
        first = min(start for _, start in whole)
        same = all(tokens[:first] == whole[0][0][:first] for tokens, _ in whole)
        whole = [(tokens, first) for tokens, _ in whole] if same else whole
    return [_fitted(tokenizer, tokens, start, context) for tokens, start in whole]


def score_suite(
    model: Transformer,
    tokenizer: Tokenizer,
    suite: Suite,
    *,
    done: Iterable[ScoredChoice] = (),
    keep: Callable[[Sequence[ScoredChoice]], None] = lambda found: None,
) -> list[ScoredChoice]:
    """Score every item, with the model where it lies. `done` is taken as it is where all of a chunk is in it."""
    have = {one.item: one for one in done if one.suite == suite.label}
    return in_chunks(len(suite.items), have, lambda numbers: _score_chunk(model, tokenizer, suite, numbers), keep)


def in_chunks(
    count: int, have: Mapping[int, Score], score: Callable[[range], list[Score]], keep: Callable[[list[Score]], None]
) -> list[Score]:
    """Score so many things, numbered from 0. A chunk that is there whole is taken from `have`; others are kept."""
    found: list[Score] = []
    for start in range(0, count, CHUNK):
        numbers = range(start, min(start + CHUNK, count))
        if all(number in have for number in numbers):
            found += [have[number] for number in numbers]
            continue
        chunk = score(numbers)
        keep(chunk)
        found += chunk
    return found


def likelihood_outcome(suite: Suite, scored: Sequence[ScoredChoice]) -> LikelihoodOutcome:
    """Of all items of a file."""
    accuracy = estimate([float(one.right(suite.use.by)) for one in scored])
    choice = suite.items[0].choice
    guessed = fmean(1 / len(item.options) for item in suite.items) if choice else 0.0
    baseline = guessed if suite.use.baseline is None else suite.use.baseline
    ways: tuple[By, ...] = ("sum", "token", "byte")
    nats = -math.fsum(one.logprobs[one.gold] for one in scored)
    return LikelihoodOutcome(
        items=len(scored),
        accuracy=accuracy,
        accuracies={way: fmean(one.right(way) for one in scored) for way in ways} if choice else {},
        baseline=baseline,
        centred=(accuracy.mean - baseline) / (1 - baseline),
        bits_per_byte=nats / math.log(2) / sum(one.bytes[one.gold] for one in scored),
        cut=sum(one.cut for one in scored),
    )


def likelihood_metrics(outcomes: dict[str, LikelihoodOutcome]) -> dict[str, float]:
    """The numbers of all files, `eval/<name>/…`, and the mean of their centred accuracies."""
    found: dict[str, float] = {}
    for name, one in outcomes.items():
        error = {} if one.accuracy.error is None else {"accuracy_se": one.accuracy.error}
        ways = {f"accuracy_{way}": value for way, value in one.accuracies.items()}
        named = {"accuracy": one.accuracy.mean, **error, **ways, "centred": one.centred}
        named |= {"bits_per_byte": one.bits_per_byte, "cut": one.cut / one.items}
        found |= {f"eval/{name}/{key}": value for key, value in named.items()}
    return found | ({"eval/centred": fmean(one.centred for one in outcomes.values())} if outcomes else {})


def _shared(sequences: Sequence[Sequence[int]]) -> int:
    """How many tokens all sequences have in common at their beginning."""
    return next(
        (i for i, some in enumerate(zip(*sequences, strict=False)) if len(set(some)) > 1), min(map(len, sequences))
    )


def _tokenized(tokenizer: Tokenizer, option: Option) -> tuple[list[int], int]:
    """The tokens of context and answer, and which of them is the first with some of the answer."""
    tokens, places = tokenizer.encode_parts([(option.context + option.answer, False)])
    border = len(option.context.rstrip())
    start = next((index for index, (_, end) in enumerate(places) if end > border), None)
    if start is None:
        raise UsageError(f"the answer {option.answer!r:.80} has no tokens in the tokenizer {tokenizer.name}")
    return [*tokenizer.beginning, *tokens], start + len(tokenizer.beginning)


def _fitted(tokenizer: Tokenizer, tokens: list[int], start: int, context: int) -> EncodedChoice:
    if start == 0:  # there is nothing before the answer: it begins a text
        tokens, start = [*tokenizer.encode_prompt(""), *tokens], len(tokenizer.encode_prompt(""))
        if start == 0:
            raise UsageError(
                f"an answer has no context, and the tokenizer {tokenizer.name} has no token that begins a text"
            )
    begins = len(tokenizer.beginning)
    surplus = len(tokens) - context
    if surplus <= 0:
        return EncodedChoice(tokens, start, False)
    if start - surplus < max(1, begins):
        raise UsageError(
            f"an answer of {len(tokens) - start} tokens leaves no room for a token before it in a context of {context}"
        )
    return EncodedChoice(tokens[:begins] + tokens[begins + surplus :], start - surplus, True)


def _encoded(tokenizer: Tokenizer, suite: Suite, number: int, context: int) -> list[EncodedChoice]:
    try:
        return encode_item(tokenizer, suite.items[number], context, suite.use.border)
    except UsageError as error:
        raise UsageError(f"{suite.label}, item {number}: {error}") from error


@torch.no_grad()
def _score_chunk(model: Transformer, tokenizer: Tokenizer, suite: Suite, numbers: range) -> list[ScoredChoice]:
    items = [suite.items[number] for number in numbers]
    encoded = [_encoded(tokenizer, suite, number, model.shape.context) for number in numbers]
    flat = [one for options in encoded for one in options]
    sums, written = score_sequences(model, flat, greedy=not items[0].choice)
    results, place = [], 0
    for number, item, options in zip(numbers, items, encoded, strict=True):
        logprobs = tuple(sums[place : place + len(options)])
        if not all(map(math.isfinite, logprobs)):
            raise PalestraError(f"{suite.label}, item {number}: the model gives log-probabilities that are no numbers")
        results.append(
            ScoredChoice(
                suite=suite.label,
                item=number,
                gold=item.gold,
                logprobs=logprobs,
                tokens=tuple(len(one.tokens) - one.start for one in options),
                bytes=_sizes(tokenizer, suite, item, options),
                written=None if item.choice else written[place],
                cut=any(one.cut for one in options),
            )
        )
        place += len(options)
    return results


def _sizes(tokenizer: Tokenizer, suite: Suite, item: Item, options: Sequence[EncodedChoice]) -> tuple[int, ...]:
    """UTF-8 bytes of each answer; where only what differs is scored, of the tokens that are."""
    if suite.use.border == "answer" or not item.choice:
        return tuple(len(option.answer.encode()) for option in item.options)
    scored = (b"".join(tokenizer.piece(token) for token in one.tokens[one.start :]) for one in options)
    return tuple(max(1, len(piece)) for piece in scored)


@torch.no_grad()
def score_sequences(
    model: Transformer, sequences: Sequence[EncodedChoice], *, greedy: bool = False
) -> tuple[list[float], list[bool]]:
    """log p of the scored tokens of each sequence, and if `greedy` whether each of them is the most likely one."""
    sums, written = [0.0] * len(sequences), [False] * len(sequences)
    masks = [[float(place >= one.start) for place in range(len(one.tokens))] for one in sequences]
    batch = Batch.pack([one.tokens for one in sequences], masks)
    for part in micro_batches(batch.lengths, max(MICRO_TOKENS, max(batch.lengths))):
        micro = batch.select(part).to(model.embed.device)
        scored = score(model, micro, entropy=False)
        best = _most_likely(model, scored.hidden, micro) if greedy else micro.loss_mask.bool()
        asked = micro.loss_mask.bool()
        bounds = zip(part, scored.logprobs.split(micro.lengths), (best | ~asked).split(micro.lengths), strict=True)
        for place, logprobs, right in bounds:
            sums[place], written[place] = float(logprobs.double().sum()), bool(right.all())
    return sums, written


def _most_likely(model: Transformer, hidden: Tensor, batch: Batch) -> Tensor:
    """(T): whether a scored token is the one that greedy decoding would draw there; `hidden` is that of `Scored`."""
    found = torch.zeros(len(batch.tokens), dtype=torch.bool, device=hidden.device)
    rows = chunk_rows(len(model.unembed), hidden.device)
    for some, states in zip(batch.predicted.split(rows), hidden.split(rows), strict=True):
        found[some] = logits(states, model.unembed).argmax(-1) == batch.tokens[some]
    return found


@dataclass(frozen=True)
class Texts:
    """The documents of one source."""

    use: TextUse
    documents: tuple[str, ...]
    total: int
    """How many the source has."""

    @property
    def label(self) -> str:
        """Its name in this run."""
        return self.use.label

    def identity(self) -> dict[str, Any]:
        """What makes a score on these texts comparable with another; plain data."""
        digest = hashlib.sha256()
        for document in self.documents:
            digest.update(hashlib.sha256(document.encode()).digest())
        use = self.use.model_dump(mode="json", exclude={"name", "items"})
        return {**use, "items": len(self.documents), "of": self.total, "items_sha256": digest.hexdigest()}


@dataclass(frozen=True)
class TextScore:
    """What the model says of a document."""

    text: str
    """The name of its source in this run."""
    item: int
    """Its number in the source, from 0."""
    logprob: float
    tokens: int
    """Tokens that were scored."""
    bytes: int
    """UTF-8 bytes of these."""
    windows: int

    @classmethod
    def read(cls, row: Mapping[str, Any]) -> "TextScore":
        """From a line of JSON."""
        return cls(**row)


@dataclass(frozen=True)
class TextOutcome:
    """What the documents of a source came to."""

    items: int
    bits_per_byte: float
    """The bits of all documents over all their bytes."""
    loss: float
    """Nats a token."""
    tokens: int
    bytes: int

    def plain(self) -> dict[str, Any]:
        """The same as JSON has it."""
        return asdict(self)


def load_texts(use: TextUse) -> Texts:
    """Read the documents of a source; empty ones have nothing to score and are left out."""
    rows = load_rows(
        use.path, default=use.path, files=(f"{use.label}.*", "*.jsonl", "*.parquet", "*.txt"), split=use.split
    )
    found = [text_of(row, use.key, number, use.path) for number, row in enumerate(rows)]
    documents = [document for document in found if document]
    if not documents:
        raise UsageError(f"{use.path} has no texts")
    return Texts(use, tuple(documents[: use.items]), len(documents))


def windows(tokenizer: Tokenizer, document: str, context: int) -> list[EncodedChoice]:
    """A document as sequences of at most `context` tokens, each token scored in one of them.

    The first begins as every text does (with the tokens that begin one, else BOS or EOS); each other one begins with
    the last token of the one before it. Where the tokenizer has no token that begins a text, the document's first is
    not scored.
    """
    if context < 2:
        raise UsageError(f"bits a byte need a context of at least 2 tokens, the model reads {context}")
    tokens, before = tokenizer.encode(document), tokenizer.encode_prompt("")
    whole, start, found = [*before, *tokens], max(1, len(before)), []
    if len(before) >= context:
        raise UsageError(f"the {len(before)} tokens that begin every text leave no room in a context of {context}")
    first = 0
    while start < len(whole):
        stop = min(first + context, len(whole))
        found.append(EncodedChoice(whole[first:stop], start - first, False))
        first, start = stop - 1, stop
    return found


def score_texts(
    model: Transformer,
    tokenizer: Tokenizer,
    texts: Texts,
    *,
    done: Iterable[TextScore] = (),
    keep: Callable[[Sequence[TextScore]], None] = lambda found: None,
) -> list[TextScore]:
    """Score every document, with the model where it lies. `done` is taken as it is where all of a chunk is in it."""
    have = {one.item: one for one in done if one.text == texts.label}
    return in_chunks(len(texts.documents), have, lambda numbers: _score_windows(model, tokenizer, texts, numbers), keep)


def text_outcome(texts: Texts, scored: Sequence[TextScore]) -> TextOutcome:
    """Of all documents of a source: sums over sums, so that a long document counts for its length."""
    nats, size, tokens = (
        -math.fsum(one.logprob for one in scored),
        sum(one.bytes for one in scored),
        sum(one.tokens for one in scored),
    )
    if not size:
        raise UsageError(f"{texts.use.path}: there is no token after the first of a document, and so nothing to score")
    return TextOutcome(len(scored), nats / math.log(2) / size, nats / tokens, tokens, size)


def text_metrics(outcomes: Mapping[str, TextOutcome]) -> dict[str, float]:
    """The numbers of all sources, `eval/<name>/…`, and the mean of their bits a byte."""
    found: dict[str, float] = {}
    for name, one in outcomes.items():
        found |= {f"eval/{name}/bits_per_byte": one.bits_per_byte, f"eval/{name}/loss": one.loss}
    rates = [one.bits_per_byte for one in outcomes.values()]
    return found | ({"eval/bits_per_byte": fmean(rates)} if rates else {})


def _score_windows(model: Transformer, tokenizer: Tokenizer, texts: Texts, numbers: range) -> list[TextScore]:
    cut = [windows(tokenizer, texts.documents[number], model.shape.context) for number in numbers]
    flat = [one for some in cut for one in some]
    sums = iter(score_sequences(model, flat)[0] if flat else [])
    begins, found = bool(tokenizer.encode_prompt("")), []
    for number, some in zip(numbers, cut, strict=True):
        document = texts.documents[number]
        logprob = math.fsum(next(sums) for _ in some)
        if not math.isfinite(logprob):
            raise PalestraError(
                f"{texts.label}, document {number}: the model gives log-probabilities that are no numbers"
            )
        # The bytes of a first token that nothing comes before are not predicted.
        unscored = 0 if begins else len(tokenizer.piece(tokenizer.encode(document)[0]))
        size, tokens = len(document.encode()) - unscored, sum(len(one.tokens) - one.start for one in some)
        found.append(TextScore(texts.label, number, logprob, tokens, size, len(some)))
    return found
