"""The step `filter`: drops documents that are too short, too long, repetitive, not prose or in other languages.

The rules for words and repetition are those of Gopher (Rae et al. 2021, https://arxiv.org/abs/2112.11446, appendix A1,
table A1), with its thresholds. Each is off where its bound is None. A document is counted under the first rule that it
breaks.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import accumulate
from pathlib import Path

from palestra.data.languages import known_languages, language_of
from palestra.data.readers import Row
from palestra.data.steps.shards import Compression, Drop, Where, map_documents
from palestra.errors import UsageError
from palestra.spec.model import Execution

GOPHER_STOP_WORDS = frozenset(("the", "be", "to", "of", "and", "that", "have", "with"))
TOP_NGRAMS = {2: 0.20, 3: 0.18, 4: 0.16}
"""The largest share of the characters that the most frequent n-gram may cover."""
DUPLICATE_NGRAMS = {5: 0.15, 6: 0.14, 7: 0.13, 8: 0.12, 9: 0.11, 10: 0.10}
"""The largest share of the characters in n-grams that occur more than once."""
BULLETS = ("•", "‣", "◦", "▪", "-", "*", "–")
WORD = re.compile(r"\S+")


@dataclass(frozen=True)
class Rules:
    """The bounds of the filter, which drops rows whose text breaks one."""

    min_words: int | None = 50
    max_words: int | None = 100_000
    min_chars: int | None = None
    max_chars: int | None = None
    mean_word_length: tuple[float, float] | None = (3.0, 10.0)
    """Characters."""
    max_symbol_ratio: float | None = 0.1
    """Number signs, or ellipses, to a word."""
    min_alphabetic_words: float | None = 0.8
    """The share of words with a letter in them."""
    min_letters: float | None = None
    """The share of letters in all characters but white space."""
    max_bullet_lines: float | None = 0.9
    max_ellipsis_lines: float | None = 0.3
    min_stop_words: int | None = 2
    """How many of Gopher's eight English stop words occur; for English only."""
    repetition: bool = True
    """Duplicate lines and paragraphs, and n-grams, by Gopher's table."""
    languages: Sequence[str] | None = None
    """Codes of ISO 639-1 such as `en`; a document in another language is left out."""

    def __call__(self, number: int, rows: Iterator[Row]) -> Iterator[Row | Drop]:
        for row in rows:
            reason = next(broken_rules(row["text"], self), None)
            yield row if reason is None else Drop(reason)


def filter_documents(
    out: Path,
    *,
    source: Where,
    min_words: int | None = Rules.min_words,
    max_words: int | None = Rules.max_words,
    min_chars: int | None = Rules.min_chars,
    max_chars: int | None = Rules.max_chars,
    mean_word_length: tuple[float, float] | None = Rules.mean_word_length,
    max_symbol_ratio: float | None = Rules.max_symbol_ratio,
    min_alphabetic_words: float | None = Rules.min_alphabetic_words,
    min_letters: float | None = Rules.min_letters,
    max_bullet_lines: float | None = Rules.max_bullet_lines,
    max_ellipsis_lines: float | None = Rules.max_ellipsis_lines,
    min_stop_words: int | None = Rules.min_stop_words,
    repetition: bool = Rules.repetition,
    languages: Sequence[str] | None = Rules.languages,
    text_key: str = "text",
    split: str | None = None,
    compression: Compression = "none",
    workers: Execution[int] = 2,
) -> None:
    """Leave out documents that break a rule; `counts.json` has how many each rule dropped."""
    given = locals()
    if languages is not None:
        known = sorted({code.partition("-")[0] for code in known_languages()})
        if unknown := sorted(set(languages) - set(known)):
            raise UsageError(f"languages: {', '.join(unknown)} are not known; known are {', '.join(known)}")
    rules = Rules(**{field.name: given[field.name] for field in fields(Rules)})
    map_documents(out, source, rules, "filter", asdict(rules), workers, text_key, split, compression)


def broken_rules(text: str, rules: Rules) -> Iterator[str]:
    """The rules that a text breaks, cheap ones first; each is checked when the generator comes to it."""
    words = WORD.findall(text)
    for what, count, least, most in (
        ("words", len(words), rules.min_words, rules.max_words),
        ("characters", len(text), rules.min_chars, rules.max_chars),
    ):
        if least is not None and count < least:
            yield f"fewer than {least} {what}"
        if most is not None and count > most:
            yield f"more than {most} {what}"
    if not words:
        yield "no words"
        return
    characters = sum(map(len, words))
    shortest, longest = rules.mean_word_length or (0, math.inf)
    if not shortest <= characters / len(words) <= longest:
        yield "mean word length"
    symbols = max(text.count("#"), text.count("...") + text.count("…"))
    if rules.max_symbol_ratio is not None and symbols > rules.max_symbol_ratio * len(words):
        yield "symbols"
    if rules.min_alphabetic_words is not None:
        alphabetic = sum(any(map(str.isalpha, word)) for word in words)
        if alphabetic < rules.min_alphabetic_words * len(words):
            yield "words without letters"
    if rules.min_letters is not None and sum(map(str.isalpha, text)) < rules.min_letters * characters:
        yield "share of letters"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    bullets = sum(line.startswith(BULLETS) for line in lines)
    if rules.max_bullet_lines is not None and bullets > rules.max_bullet_lines * len(lines):
        yield "bullet lines"
    ellipses = sum(line.endswith(("...", "…")) for line in lines)
    if rules.max_ellipsis_lines is not None and ellipses > rules.max_ellipsis_lines * len(lines):
        yield "ellipsis lines"
    if rules.min_stop_words is not None:
        stop_words = GOPHER_STOP_WORDS.intersection(word.strip(".,;:!?\"'()").lower() for word in words)
        if len(stop_words) < rules.min_stop_words:
            yield "stop words"
    if rules.repetition and (reason := repeated(text, words)) is not None:
        yield reason
    if rules.languages is not None:
        language = (language_of(text) or "unknown").partition("-")[0]
        if language not in rules.languages:
            yield f"language {language}"


def repeated(text: str, words: Sequence[str]) -> str | None:
    """Which of Gopher's bounds on repetition a text breaks."""
    for name, parts in (("lines", text.split("\n")), ("paragraphs", re.split(r"\n\s*\n", text))):
        parts = [part.strip() for part in parts if part.strip()]
        seen: set[str] = set()
        again = [part for part in parts if part in seen or seen.add(part)]
        if len(again) > 0.3 * len(parts):
            return f"duplicate {name}"
        if sum(map(len, again)) > 0.2 * len(text):
            return f"characters in duplicate {name}"
    if not words:
        return None
    lengths = [len(word) for word in words]
    total = sum(lengths)
    before = [0, *accumulate(lengths)]
    # Words as numbers: tuples of small numbers are compared and hashed faster than tuples of texts.
    numbers: dict[str, int] = {}
    ids = [numbers.setdefault(word, len(numbers)) for word in words]
    for n, most in TOP_NGRAMS.items():
        grams = Counter(zip(*(ids[i:] for i in range(n)), strict=False))
        count = max(grams.values(), default=0)
        if count > 1:
            # Of those that are equally frequent, the longest.
            spellings = list(numbers)
            longest = max(sum(len(spellings[i]) for i in gram) for gram, c in grams.items() if c == count)
            if count * longest > most * total:
                return f"top {n}-gram"
    for n, most in DUPLICATE_NGRAMS.items():
        if duplicate_characters(ids, before, n) > most * total:
            return f"duplicate {n}-grams"
    return None


def duplicate_characters(ids: Sequence[int], before: Sequence[int], n: int) -> int:
    """Characters of words inside an n-gram that occurred before, each counted once."""
    seen: set[tuple[int, ...]] = set()
    covered, end = 0, 0
    for start, gram in enumerate(zip(*(ids[i:] for i in range(n)), strict=False)):
        if gram in seen:
            covered += before[start + n] - before[max(start, end)]
            end = start + n
        else:
            seen.add(gram)
    return covered
