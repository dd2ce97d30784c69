"""Tokenizers as files: Hugging Face folders, the pre-tokenizers of published families, and how tokens are spelled."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
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


def _byte_level(use_regex: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def _split(expression: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False}


# What surrounds the merges: the cuts, the normalizer, and whether a whole word in the vocabulary skips merging.
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt-2": {"cuts": [_byte_level(use_regex=True)]},
    "smollm": {"cuts": [{"type": "Digits", "individual_digits": True}, _byte_level(use_regex=True)]},
    "llama-bpe": {"cuts": [_split(_LLAMA3), _byte_level(use_regex=False)], "ignore_merges": True},
    "qwen2": {"cuts": [_split(_QWEN2), _byte_level(use_regex=False)], "normalizer": {"type": "NFC"}},
}


def byte_level_document(
    family: str, vocabulary: dict[str, int], merges: Sequence[tuple[str, str]], added: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """A tokenizer.json of byte-level BPE with the cuts of `family`."""
    if family not in FAMILIES:
        raise UsageError(f"unknown pre-tokenizer {family!r}; known are {', '.join(FAMILIES)}")
    rules = FAMILIES[family]
    model = bpe_model(vocabulary, merges, ignore_merges=rules.get("ignore_merges", False))
    cuts = {"type": "Sequence", "pretokenizers": rules["cuts"]}
    return tokenizer_document(model, added, rules.get("normalizer"), cuts, _byte_level(use_regex=True))


def tokenizer_document(
    model: dict[str, Any], added: Sequence[dict[str, Any]], normalizer: Any, pre_tokenizer: Any, decoder: Any
) -> dict[str, Any]:
    """A tokenizer.json that does nothing but normalize, cut and merge."""
    rules = {"normalizer": normalizer, "pre_tokenizer": pre_tokenizer, "post_processor": None, "decoder": decoder}
    cut = {"truncation": None, "padding": None}
    return {"version": "1.0", **cut, "added_tokens": list(added), **rules, "model": model}


def bpe_model(vocabulary: dict[str, int], merges: Sequence[tuple[str, str]], **rules: Any) -> dict[str, Any]:
    """The `model` of a tokenizer.json: merges by rank over a vocabulary; `rules` are fields of it."""
    absent = dict.fromkeys(("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix"))
    flags = dict.fromkeys(("fuse_unk", "byte_fallback", "ignore_merges"), False)
    ranked = [list(pair) for pair in merges]
    return {"type": "BPE", **absent, **flags, **rules, "vocab": vocabulary, "merges": ranked}


def added_token(content: str, number: int, *, special: bool = True) -> dict[str, Any]:
    """An entry of a tokenizer.json's `added_tokens`: a string found before the text is cut."""
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": number, "content": content, **flags, "special": special}


NAMED = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
_LISTED = ("additional_special_tokens", "extra_special_tokens")
# Vocabularies without a tokenizer.json: the files' names at Hugging Face, then at OpenAI.
_VOCABULARIES = (("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe"))
_FAMILY_OF_CLASS = {"GPT2Tokenizer": "gpt-2", "Qwen2Tokenizer": "qwen2"}


def read_folder(folder: Path) -> tuple[dict[str, Any], dict[str, Any], str | None]:
    """tokenizer.json, tokenizer_config.json and the chat template of a folder in any of the published layouts."""
    config = _json(folder / "tokenizer_config.json")
    legacy = _json(folder / "special_tokens_map.json")
    for key in (*NAMED, "additional_special_tokens"):
        if config.get(key) is None and legacy.get(key) is not None:
            config[key] = _contents(legacy[key])
    if (folder / "tokenizer.json").exists():
        document = _json(folder / "tokenizer.json")
        if "model" not in document:
            raise UsageError(f"{folder / 'tokenizer.json'} is not a Hugging Face tokenizer: it has no 'model'")
    else:
        document = _from_merges(folder, config)
    template = folder / "chat_template.jinja"
    text = template.read_text(encoding="utf-8") if template.exists() else template_in(config)
    return with_declared_tokens(document, config, folder), config, text


def template_in(config: dict[str, Any]) -> str | None:
    """The chat template inside a tokenizer_config.json: one, or the one called `default` of a list."""
    templates = config.get("chat_template")
    if isinstance(templates, list):
        return {entry["name"]: entry["template"] for entry in templates}.get("default")
    return templates


def named_tokens(config: dict[str, Any]) -> dict[str, str]:
    """The special tokens that a config names: `{"eos_token": "</s>", ...}`."""
    return {name: _contents(config[name]) for name in NAMED if config.get(name) is not None}


def with_declared_tokens(document: dict[str, Any], config: dict[str, Any], source: Path | str) -> dict[str, Any]:
    """The document with the added tokens that only the config declares, and with all that it calls special so marked.

    transformers does the same as it loads; a config may make tokens special that tokenizer.json holds as plain text.
    """
    added = {entry["content"]: entry for entry in document.get("added_tokens", [])}
    for number, entry in config.get("added_tokens_decoder", {}).items():
        flags = {key: value for key, value in entry.items() if key in added_token("", 0)}
        added.setdefault(entry["content"], {**added_token(entry["content"], int(number), special=False), **flags})
    special = [*named_tokens(config).values()]
    for name in _LISTED:
        listed = config.get(name) or []
        special += _contents([*listed.values()] if isinstance(listed, dict) else listed)
    vocabulary = document["model"]["vocab"]
    if not isinstance(vocabulary, dict):  # Unigram: [piece, score] by id
        vocabulary = {entry[0]: index for index, entry in enumerate(vocabulary)}
    for content in special:
        if content in added:
            added[content] = {**added[content], "special": True}
        elif content in vocabulary:
            added[content] = added_token(content, vocabulary[content])
        else:
            raise UsageError(
                f"{source}: the tokenizer's config names the special token {content!r}, which has no id in its "
                "vocabulary; add it to tokenizer.json or take it out of tokenizer_config.json"
            )
    return {**document, "added_tokens": sorted(added.values(), key=lambda entry: entry["id"])}


def _from_merges(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    for vocabulary_file, merges_file in _VOCABULARIES:
        if (folder / vocabulary_file).exists() and (folder / merges_file).exists():
            break
    else:
        raise UsageError(
            f"{folder} is not a tokenizer: it has neither tokenizer.json nor "
            + " nor ".join(" with ".join(pair) for pair in _VOCABULARIES)
        )
    written = config.setdefault("tokenizer_class", "GPT2Tokenizer")
    family = _FAMILY_OF_CLASS.get(written.removesuffix("Fast"))
    if family is None:
        raise UsageError(
            f"{folder} has {vocabulary_file} and {merges_file} of a {written}, whose rules for cutting text are not in "
            f"them; give a tokenizer.json. Without one, {' and '.join(_FAMILY_OF_CLASS)} are known"
        )
    vocabulary = _json(folder / vocabulary_file)
    lines = (folder / merges_file).read_text(encoding="utf-8").replace("\r\n", "\n").split("\n")
    merges = [(left, right) for left, _, right in (line.partition(" ") for line in lines) if right]
    if lines[0].startswith("#version"):
        merges = merges[1:]
    if "<|endoftext|>" in vocabulary:
        for name in ("bos_token", "eos_token", "unk_token"):  # GPT-2's only special token is all of these
            config.setdefault(name, "<|endoftext|>")
    return byte_level_document(family, vocabulary, merges, [])


def _contents(written: Any) -> Any:
    """The strings of special tokens, each written as a string or as a record with a `content`."""
    if isinstance(written, list):
        return [_contents(entry) for entry in written]
    return written["content"] if isinstance(written, dict) else written


def _json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UsageError(f"{path} is not valid JSON: {error}") from error


_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")

# GPT-2's printable character for each byte: Latin-1 where it prints, U+0100 and on for the other 68 bytes.
_PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
_BYTES = {chr(byte): byte for byte in _PRINTABLE} | {chr(256 + index): byte for index, byte in enumerate(_OTHERS)}


class Spelling:
    """How printed tokens become bytes, as a tokenizer.json's `decoder` describes it; others are refused by name.

    Two families cover the language models: byte-level (GPT-2, Llama 3, Qwen), where each printed character is a byte,
    and SentencePiece-like (Llama 2, Mistral), where a sign stands for the space, `<0x0A>` for a byte, and the space
    put before every text is taken away again.
    """

    def __init__(self, decoder: dict[str, Any] | None) -> None:
        self.byte_level = self.byte_fallback = False
        self.replacements: list[tuple[str, str]] = []
        self.leading_spaces = 0
        """Spaces at the start of a text that are not part of it."""
        steps: list[dict[str, Any]] = (decoder or {"type": "none"}).get("decoders") or [decoder or {"type": "none"}]
        for step in steps:
            match step:
                case {"type": "ByteLevel"}:
                    self.byte_level = True
                case {"type": "ByteFallback"}:
                    self.byte_fallback = True
                case {"type": "Fuse"}:
                    pass
                case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
                    self.replacements.append((old, new))
                case {"type": "Strip", "content": " ", "start": int(start), "stop": 0}:
                    self.leading_spaces = start
                case _:
                    raise UsageError(
                        f"tokenizer.json has the decoder {step['type']!r}, whose text cannot be assembled token by "
                        "token. Supported are ByteLevel, and Replace (of a string), ByteFallback, Fuse and Strip (of "
                        "leading spaces) in a Sequence"
                    )

    def bytes_of(self, printed: str) -> bytes:
        """The bytes of one ordinary token (an added token is its own text)."""
        if self.byte_level:
            if all(character in _BYTES for character in printed):
                return bytes(_BYTES[character] for character in printed)
            return printed.encode()
        if self.byte_fallback and (byte := _BYTE_TOKEN.fullmatch(printed)):
            return bytes([int(byte[1], 16)])
        for old, new in self.replacements:
            printed = printed.replace(old, new)
        return printed.encode()
