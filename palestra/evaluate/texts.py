"""Bits a byte of whole texts: every token of every document scored once, in windows as long as the model reads."""

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from palestra.data.tokenizers import Tokenizer
from palestra.errors import PalestraError, UsageError
from palestra.evaluate.likelihood import Encoded, in_chunks, score_sequences
from palestra.lm.model import Transformer
from palestra.spec.kinds.evaluate import TextUse
from palestra.tasks.rows import load_rows, text_of


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


def windows(tokenizer: Tokenizer, document: str, context: int) -> list[Encoded]:
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
        found.append(Encoded(whole[first:stop], start - first, False))
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
    return in_chunks(len(texts.documents), have, lambda numbers: _score_chunk(model, tokenizer, texts, numbers), keep)


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


def _score_chunk(model: Transformer, tokenizer: Tokenizer, texts: Texts, numbers: range) -> list[TextScore]:
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
