"""How text is cut into words before BPE: the byte-level families of published tokenizers, by llama.cpp's names."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from palestra.errors import UsageError

# The expressions are part of the published models: a vocabulary is only right with the one it was trained with.
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
# GPT-4's with digits in groups of two, which wastes less of a small vocabulary on numbers (nanochat's tokenizer).
GPT4_SHORT_DIGITS = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,2}| ?[^\s\p{L}\p{N}]++[\r\n]*"
    r"|\s*[\r\n]|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class Family:
    """What surrounds the merges: the cuts, the normalizer, and whether a whole word in the vocabulary skips merging."""

    steps: tuple[dict[str, Any], ...]
    normalizer: dict[str, Any] | None = None
    ignore_merges: bool = False


def _byte_level(use_regex: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def _split(expression: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False}


FAMILIES = {
    "gpt-2": Family((_byte_level(use_regex=True),)),
    "smollm": Family(({"type": "Digits", "individual_digits": True}, _byte_level(use_regex=True))),
    "llama-bpe": Family((_split(_LLAMA3), _byte_level(use_regex=False)), ignore_merges=True),
    "qwen2": Family((_split(_QWEN2), _byte_level(use_regex=False)), normalizer={"type": "NFC"}),
}


def byte_level_document(
    family: str, vocabulary: dict[str, int], merges: Sequence[tuple[str, str]], added: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """A tokenizer.json of byte-level BPE with the cuts of `family`."""
    if family not in FAMILIES:
        raise UsageError(f"unknown pre-tokenizer {family!r}; known are {', '.join(FAMILIES)}")
    rules = FAMILIES[family]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": list(added),
        "normalizer": rules.normalizer,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": list(rules.steps)},
        "post_processor": None,
        "decoder": _byte_level(use_regex=True),
        "model": bpe_model(vocabulary, merges, ignore_merges=rules.ignore_merges),
    }


def bpe_model(
    vocabulary: dict[str, int],
    merges: Sequence[tuple[str, str]],
    *,
    unknown: str | None = None,
    byte_fallback: bool = False,
    ignore_merges: bool = False,
) -> dict[str, Any]:
    """The `model` of a tokenizer.json: merges by rank over a vocabulary."""
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": unknown,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": unknown is not None,
        "byte_fallback": byte_fallback,
        "ignore_merges": ignore_merges,
        "vocab": vocabulary,
        "merges": [list(pair) for pair in merges],
    }


def added_token(content: str, number: int, *, special: bool = True) -> dict[str, Any]:
    """An entry of a tokenizer.json's `added_tokens`: a string found before the text is cut."""
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": number, "content": content, **flags, "special": special}
