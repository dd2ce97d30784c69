"""Evaluation by likelihood: choices between given answers, and bits per byte of whole texts."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from statistics import fmean
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from palestra.data.tokenizers import Tokenizer
from palestra.errors import PalestraError, UsageError
from palestra.evaluate.likelihood_data import Choices, Item, Option, Texts
from palestra.evaluate.records import Estimate, estimate, estimated
from palestra.lm.batch import Batch, read_states
from palestra.lm.head import chunk_rows, logits
from palestra.lm.model import Transformer
from palestra.spec.kinds.evaluate import LikelihoodUse

CHUNK = 32
"""Items or documents scored together. Always the same ones: what a row is packed with can change its last bits."""
MICRO_TOKENS = 2**14
"""Tokens in one forward pass, up to the end of a sequence."""

By = Literal["sum", "token", "byte", "character"]


@dataclass(frozen=True)
class ScoredChoice:
    """The likelihoods of an item; tuples have one entry per option."""

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
    characters: tuple[int, ...]
    """Characters of the same."""
    written: bool | None
    """Whether greedy decoding would write the answer; null where the model chooses between answers."""
    cut: bool
    """Whether the context was too long for the model and its beginning was truncated."""

    @property
    def label(self) -> str:
        """The name of its source."""
        return self.suite

    def chosen(self, by: By) -> int:
        """The option that the model finds most likely; of equals the first."""
        ones = [1] * len(self.logprobs)
        sizes = {"sum": ones, "token": self.tokens, "byte": self.bytes, "character": self.characters}[by]
        values = [logprob / size for logprob, size in zip(self.logprobs, sizes, strict=True)]
        return values.index(max(values))

    def right(self, by: By) -> bool:
        """Whether the model is right."""
        return self.written if self.written is not None else self.chosen(by) == self.gold


@dataclass(frozen=True)
class LikelihoodOutcome:
    """The results on the items of a file."""

    items: int
    accuracy: Estimate
    accuracies: dict[str, float]
    """By normalization (sum, token, byte, character); empty where there is nothing to choose from."""
    baseline: float
    """The accuracy of guessing."""
    centred: float
    """(accuracy − baseline) / (1 − baseline): 0 for guessing, 1 for always right."""
    bits_per_byte: float
    """Of the right answers."""
    cut: int
    """Items whose context was truncated."""


@dataclass(frozen=True)
class TextScore:
    """The likelihood of a document."""

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

    @property
    def label(self) -> str:
        """The name of its source."""
        return self.text


@dataclass(frozen=True)
class TextOutcome:
    """The results on the documents of a source."""

    items: int
    bits_per_byte: float
    """The bits of all documents over all their bytes."""
    loss: float
    """Nats a token."""
    tokens: int
    bytes: int


@dataclass(frozen=True)
class EncodedChoice:
    """A context with an answer, or a window of a text, as tokens."""

    tokens: list[int]
    start: int
    """The first token that is scored."""
    cut: bool


Border = Literal["answer", "common", "lm_eval"]


def encode_item(
    tokenizer: Tokenizer,
    item: Item,
    context: int,
    border: Border = "answer",
    bos: bool | None = None,
    known: Mapping[str, list[int]] | None = None,
) -> list[EncodedChoice]:
    """The options of an item as tokens, at most `context` each.

    A context and its answer are tokenized as the one text that they are: a border that the tokenizer would not make
    scores tokens that the model never saw. White space before the answer is scored with it, as in lm-eval, because most
    tokenizers join them (" yes"); so is any token that holds some of both. Answers to one context are all scored from
    the same token on, so that what one of them shares with its context is not left out for the others.

    With the border `common` it is as CORE has it: answers to one context are scored from the first token in which they
    differ, and an answer to different contexts with all the tokens that these share at the end. At least one token of
    each is scored, also of an answer that another one begins with, where CORE would take the mean of nothing.

    What is too long is truncated at its beginning, but keeps the tokens that begin every text. With the border
    `lm_eval` it is as `encode_pairs` has it. `bos` is that of `beginning`; `known` are texts whose tokens are there.
    """
    begins = beginning(tokenizer, bos)
    if border == "lm_eval":
        return encode_pairs(tokenizer, _pairs([item]), context, begins, known=known)
    whole = [_tokenized(tokenizer, option, begins) for option in item.options]
    if border == "common" and item.choice:
        sequences = [tokens for tokens, _ in whole]
        least = min(map(len, sequences)) - 1
        if item.one_context:
            first = min(_shared(sequences), least)
            whole = [(tokens, first) for tokens in sequences]
        else:
            last = max(1, min(_shared([tokens[::-1] for tokens in sequences]), least + 1 - max(1, len(begins))))
            whole = [(tokens, len(tokens) - last) for tokens in sequences]
    elif item.one_context:
        first = min(start for _, start in whole)
        same = all(tokens[:first] == whole[0][0][:first] for tokens, _ in whole)
        whole = [(tokens, first) for tokens, _ in whole] if same else whole
    return [_fitted(tokenizer, tokens, start, context, begins) for tokens, start in whole]


def beginning(tokenizer: Tokenizer, bos: bool | None) -> tuple[int, ...]:
    """The tokens before every text: the tokenizer's own, or with `bos` its BOS token, or none."""
    if bos is None:
        return tokenizer.beginning
    if bos and tokenizer.bos is None:
        raise UsageError(f"the tokenizer {tokenizer.name} has no BOS token to put before a text")
    return (tokenizer.bos,) if bos and tokenizer.bos is not None else ()


def encode_pairs(
    tokenizer: Tokenizer,
    pairs: Sequence[tuple[str, str]],
    context: int,
    begins: Sequence[int],
    specials: bool = False,
    known: Mapping[str, list[int]] | None = None,
) -> list[EncodedChoice]:
    """Contexts with continuations as lm-eval tokenizes and truncates them.

    A continuation is scored after as many tokens as the context has by itself, without the white space at its end. The
    last token need not fit, because it is not read, and what is too long loses its beginning, BOS too. After no context
    at all, BOS or EOS is read. With `specials`, strings like `<|im_end|>` mean their tokens.
    """
    encoded = _texts(tokenizer, pairs) if known is None else dict(known)
    marked = (text for text in encoded if specials and any(special in text for special in tokenizer.special_strings))
    encoded |= {text: tokenizer.encode(text, specials=True) for text in marked}
    results = []
    for before, after in pairs:
        opening = begins if before else tokenizer.encode_prompt("")[-1:]
        tokens, count = encoded[before + after], len(encoded[before.rstrip()])
        if tokens[: len(opening)] != list(opening):
            tokens, count = [*opening, *tokens], count + len(opening)
        count = count if before else len(opening)
        if not 0 < count < len(tokens):
            raise UsageError(f"the answer {after!r:.80}, or what it follows, has no tokens in {tokenizer.name}")
        surplus = max(0, len(tokens) - context - 1)
        if surplus >= count:
            raise UsageError(f"an answer of {len(tokens) - count} tokens does not fit in a context of {context}")
        results.append(EncodedChoice(tokens[surplus:], count - surplus, surplus > 0))
    return results


def _pairs(items: Iterable[Item]) -> list[tuple[str, str]]:
    return [(option.context, option.answer) for item in items for option in item.options]


def _texts(tokenizer: Tokenizer, pairs: Sequence[tuple[str, str]]) -> dict[str, list[int]]:
    """The tokens of contexts alone and with their continuations; all in one call, which shares them between cores."""
    texts = list(dict.fromkeys(text for pair in pairs for text in (pair[0].rstrip(), "".join(pair))))
    return dict(zip(texts, tokenizer.encode_all(texts), strict=True))


def score_set(
    model: Transformer,
    tokenizer: Tokenizer,
    source: Choices | Texts,
    *,
    done: Iterable[ScoredChoice | TextScore] = (),
    keep: Callable[[list[Any]], None] = lambda chunk: None,
) -> list[Any]:
    """Score every item or document on the model's device: a `ScoredChoice` or a `TextScore` each, in order.

    Chunks that are complete in `done` are not scored again; `keep` gets each new one.
    """
    score: Any = _score_items if isinstance(source.use, LikelihoodUse) else _score_documents
    have = {row.item: row for row in done if row.label == source.label}
    scores: list[Any] = []
    for start in range(0, len(source.items), CHUNK):
        numbers = range(start, min(start + CHUNK, len(source.items)))
        if all(number in have for number in numbers):
            scores += [have[number] for number in numbers]
        else:
            chunk = score(model, tokenizer, source, numbers)
            keep(chunk)
            scores += chunk
    return scores


def likelihood_outcome(choices: Choices, scored: Sequence[ScoredChoice]) -> LikelihoodOutcome:
    """The results on all items of a file."""
    accuracy = estimate([float(row.right(choices.use.by)) for row in scored])
    choice = choices.items[0].choice
    guessed = fmean(1 / len(item.options) for item in choices.items) if choice else 0.0
    baseline = guessed if choices.use.baseline is None else choices.use.baseline
    nats = -math.fsum(row.logprobs[row.gold] for row in scored)
    return LikelihoodOutcome(
        items=len(scored),
        accuracy=accuracy,
        accuracies={way: fmean(row.right(way) for row in scored) for way in get_args(By)} if choice else {},
        baseline=baseline,
        centred=(accuracy.mean - baseline) / (1 - baseline),
        bits_per_byte=nats / math.log(2) / sum(row.bytes[row.gold] for row in scored),
        cut=sum(row.cut for row in scored),
    )


def likelihood_metrics(outcomes: Mapping[str, LikelihoodOutcome | TextOutcome]) -> dict[str, float]:
    """The numbers of all files and sources, `eval/<name>/…`; the means of centred accuracies and of texts' bits."""
    metrics: dict[str, float] = {}
    means: dict[str, list[float]] = {}
    for name, outcome in outcomes.items():
        if isinstance(outcome, TextOutcome):
            named, mean = {"bits_per_byte": outcome.bits_per_byte, "loss": outcome.loss}, "bits_per_byte"
        else:
            named, mean = estimated("accuracy", outcome.accuracy), "centred"
            named |= {f"accuracy_{way}": value for way, value in outcome.accuracies.items()}
            named |= {"centred": outcome.centred, "bits_per_byte": outcome.bits_per_byte}
            named["cut"] = outcome.cut / outcome.items
        metrics |= {f"eval/{name}/{key}": value for key, value in named.items()}
        means.setdefault(mean, []).append(named[mean])
    return metrics | {f"eval/{mean}": fmean(values) for mean, values in means.items()}


def _shared(sequences: Sequence[Sequence[int]]) -> int:
    """How many tokens all sequences have in common at their beginning."""
    return next(
        (i for i, some in enumerate(zip(*sequences, strict=False)) if len(set(some)) > 1), min(map(len, sequences))
    )


def _tokenized(tokenizer: Tokenizer, option: Option, begins: Sequence[int]) -> tuple[list[int], int]:
    """The tokens of context and answer, and which of them is the first with some of the answer."""
    tokens, places = tokenizer.encode_parts([(option.context + option.answer, False)])
    border = len(option.context.rstrip())
    start = next((index for index, (_, end) in enumerate(places) if end > border), None)
    if start is None:
        raise UsageError(f"the answer {option.answer!r:.80} has no tokens in the tokenizer {tokenizer.name}")
    return [*begins, *tokens], start + len(begins)


def _fitted(
    tokenizer: Tokenizer, tokens: list[int], start: int, context: int, beginning: Sequence[int]
) -> EncodedChoice:
    if start == 0:  # there is nothing before the answer: it begins a text
        before = tokenizer.encode_prompt("")
        if not before:
            raise UsageError(
                f"an answer has no context, and the tokenizer {tokenizer.name} has no token that begins a text"
            )
        tokens, start = [*before, *tokens], len(before)
    begins = len(beginning)
    surplus = len(tokens) - context
    if surplus <= 0:
        return EncodedChoice(tokens, start, False)
    if start - surplus < max(1, begins):
        raise UsageError(
            f"an answer of {len(tokens) - start} tokens leaves no room for a token before it in a context of {context}"
        )
    return EncodedChoice(tokens[:begins] + tokens[begins + surplus :], start - surplus, True)


@contextmanager
def naming(where: str) -> Iterator[None]:
    """Put the place at the front of a `UsageError`."""
    try:
        yield
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from error


def _score_items(model: Transformer, tokenizer: Tokenizer, choices: Choices, numbers: range) -> list[ScoredChoice]:
    items, encoded, use = [choices.items[number] for number in numbers], [], choices.use
    with naming(choices.label):
        known = _texts(tokenizer, _pairs(items)) if use.border == "lm_eval" else None
    for number, item in zip(numbers, items, strict=True):
        with naming(f"{choices.label}, item {number}"):
            encoded.append(encode_item(tokenizer, item, model.shape.context, use.border, use.bos, known))
    results = []
    scores = iter(score_sequences(model, [option for options in encoded for option in options]))
    for number, item, options in zip(numbers, items, encoded, strict=True):
        scored = [next(scores) for _ in options]
        logprobs = tuple(logprob for logprob, _ in scored)
        if not all(map(math.isfinite, logprobs)):
            raise PalestraError(f"{choices.label}, item {number}: the model gives non-finite log-probabilities")
        tokens = tuple(len(option.tokens) - option.start for option in options)
        answers, cut = _answers(tokenizer, choices, item, options), any(option.cut for option in options)
        sizes = tuple(max(1, len(answer)) for answer in answers)
        characters = tuple(max(1, len(answer.decode(errors="replace"))) for answer in answers)
        sized = (logprobs, tokens, sizes, characters, None if item.choice else scored[0][1], cut)
        results.append(ScoredChoice(choices.label, number, item.gold, *sized))
    return results


def _answers(tokenizer: Tokenizer, choices: Choices, item: Item, options: Sequence[EncodedChoice]) -> list[bytes]:
    """Each answer as UTF-8; where only what differs is scored, the tokens that are."""
    if choices.use.border != "common" or not item.choice:
        return [option.answer.encode() for option in item.options]
    return [b"".join(tokenizer.piece(token) for token in one.tokens[one.start :]) for one in options]


@torch.no_grad()
def score_sequences(model: Transformer, sequences: Sequence[EncodedChoice]) -> list[tuple[float, bool]]:
    """For each sequence: log p of its scored tokens, and whether greedy decoding would write each of them.

    The last token of a sequence is predicted and not read. Sequences are taken in the order of their tokens: what
    neighbors begin with alike, such as a context with several answers, is computed once.
    """
    scores = [(0.0, False)] * len(sequences)
    order = sorted(range(len(sequences)), key=lambda place: sequences[place].tokens)
    before = np.cumsum([len(sequences[place].tokens) for place in order]) // MICRO_TOKENS
    for _, run in groupby(zip(order, before, strict=True), key=itemgetter(1)):
        part = [place for place, _ in run]
        some = [sequences[place] for place in part]
        batch = Batch.pack([one.tokens[:-1] for one in some])
        ends = np.cumsum(batch.lengths)
        scored = [len(one.tokens) - one.start for one in some]
        rows = np.concatenate([np.arange(end - count, end) for end, count in zip(ends, scored, strict=True)])
        targets = torch.tensor([token for one in some for token in one.tokens[one.start :]])
        device = model.embed.device
        hidden = read_states(model, batch.to(device), torch.from_numpy(rows).to(device))
        logprobs, greedy = _predicted(model, hidden, targets.to(device))
        bounds = zip(part, logprobs.cpu().double().split(scored), greedy.cpu().split(scored), strict=True)
        for place, of_tokens, best in bounds:
            scores[place] = float(of_tokens.sum()), bool(best.all())
    return scores


def _predicted(model: Transformer, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """log p of each target after its hidden state, and whether it is the most likely token."""
    logprobs, greedy = [], []
    rows = chunk_rows(len(model.unembed), hidden.device)
    for states, wanted in zip(hidden.split(rows), targets.split(rows), strict=True):
        values = logits(states, model.unembed)
        logprobs.append(values.gather(1, wanted[:, None])[:, 0] - values.logsumexp(1))
        greedy.append(values.argmax(1) == wanted)
    return torch.cat(logprobs), torch.cat(greedy)


def windows(tokenizer: Tokenizer, document: str, context: int) -> list[EncodedChoice]:
    """A document as sequences of at most `context` tokens, each token scored in one of them.

    The first begins as every text does (with the tokens that begin one, else BOS or EOS); each other one begins with
    the last token of the one before it. Where the tokenizer has no token that begins a text, the document's first is
    not scored.
    """
    if context < 2:
        raise UsageError(f"bits per byte need a context of at least 2 tokens, the model reads {context}")
    before = tokenizer.encode_prompt("")
    if len(before) >= context:
        raise UsageError(f"the {len(before)} tokens that begin every text leave no room in a context of {context}")
    tokens, start, first, cut = [*before, *tokenizer.encode(document)], max(1, len(before)), 0, []
    while start < len(tokens):
        stop = min(first + context, len(tokens))
        cut.append(EncodedChoice(tokens[first:stop], start - first, False))
        first, start = stop - 1, stop
    return cut


def text_outcome(texts: Texts, scored: Sequence[TextScore]) -> TextOutcome:
    """Of all documents of a source: sums over sums, so that a long document counts for its length."""
    nats = -math.fsum(row.logprob for row in scored)
    size, tokens = sum(row.bytes for row in scored), sum(row.tokens for row in scored)
    if not size:
        raise UsageError(f"{texts.use.path}: no document has a token after its first, so there is nothing to score")
    return TextOutcome(len(scored), nats / math.log(2) / size, nats / tokens, tokens, size)


def _score_documents(model: Transformer, tokenizer: Tokenizer, texts: Texts, numbers: range) -> list[TextScore]:
    documents = [texts.items[number] for number in numbers]
    cut = [windows(tokenizer, document, model.shape.context) for document in documents]
    begins, scores = bool(tokenizer.encode_prompt("")), []
    logprobs = iter(score_sequences(model, [window for windows in cut for window in windows]))
    for number, document, some in zip(numbers, documents, cut, strict=True):
        logprob = math.fsum(next(logprobs)[0] for _ in some)
        if not math.isfinite(logprob):
            raise PalestraError(f"{texts.label}, document {number}: the model gives non-finite log-probabilities")
        # The bytes of a first token that nothing comes before are not predicted.
        unscored = 0 if begins else len(tokenizer.piece(tokenizer.encode(document)[0]))
        size, tokens = len(document.encode()) - unscored, sum(len(one.tokens) - one.start for one in some)
        scores.append(TextScore(texts.label, number, logprob, tokens, size, len(some)))
    return scores
