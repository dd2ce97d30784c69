"""Completions that look broken: text that repeats itself, or that is garbled, with the reason in words."""

import unicodedata
import zlib
from collections import Counter

LONG = 120  # characters; what is shorter repeats itself by chance
LOOKED_AT = 1 << 14
RATIO = 0.12  # compressed to raw; English prose is at 0.4 to 0.6, code at 0.2 and more
NGRAM, SHARE = 8, 0.5  # words, and the share of n-grams that occur again
STRANGE = 0.05  # of all characters
SCRIPTS = 4  # of letters, each with at least this share:
SCRIPT_SHARE = 0.08


def flags(text: str) -> dict[str, str]:
    """`repeated` and `garbled`, where they apply, with the reason."""
    text = text[:LOOKED_AT]
    reasons = {"repeated": _repeated(text), "garbled": _garbled(text)}
    return {name: reason for name, reason in reasons.items() if reason is not None}


def _repeated(text: str) -> str | None:
    if len(text) < LONG:
        return None
    raw = text.encode(errors="replace")
    ratio = len(zlib.compress(raw, 1)) / len(raw)
    if ratio < RATIO:
        return f"compresses to {ratio:.0%} of its size"
    words = text.split()
    grams = Counter(tuple(words[at : at + NGRAM]) for at in range(len(words) - NGRAM + 1))
    again = sum(count for count in grams.values() if count > 1)
    share = again / grams.total() if len(words) > 2 * NGRAM else 0.0
    return f"{share:.0%} of its {NGRAM}-word sequences occur more than once" if share > SHARE else None


def _garbled(text: str) -> str | None:
    if not text:
        return None
    strange = sum(c == "\ufffd" or (unicodedata.category(c) in ("Cc", "Co", "Cn") and c not in "\n\r\t") for c in text)
    if strange / len(text) > STRANGE:
        return f"{strange} of {len(text)} characters are control or replacement characters"
    letters = [c for c in text if c.isalpha()]
    scripts = Counter("LATIN" if c < "\u0250" else unicodedata.name(c, "?").partition(" ")[0] for c in letters)
    mixed = [name for name, count in scripts.items() if count > SCRIPT_SHARE * len(letters)]
    return f"mixes {len(mixed)} scripts ({', '.join(sorted(mixed)).lower()})" if len(mixed) >= SCRIPTS else None
