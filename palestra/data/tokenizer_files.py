"""A Hugging Face tokenizer folder, read into one document and one config."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from palestra.data.pretokenizers import added_token, byte_level_document
from palestra.errors import UsageError

NAMED = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
_LISTED = ("additional_special_tokens", "extra_special_tokens")
# Vocabularies without a tokenizer.json: the files' names at Hugging Face, then at OpenAI.
_VOCABULARIES = (("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe"))
_FAMILY_OF_CLASS = {"GPT2Tokenizer": "gpt-2", "Qwen2Tokenizer": "qwen2"}


@dataclass(frozen=True)
class TokenizerFiles:
    """What a folder says of a tokenizer: tokenizer.json, tokenizer_config.json and the chat template beside them."""

    document: dict[str, Any]
    config: dict[str, Any]
    chat_template: str | None


def read_folder(folder: Path) -> TokenizerFiles:
    """Read a tokenizer folder of any of the published layouts."""
    config = _json(folder / "tokenizer_config.json")
    legacy = _json(folder / "special_tokens_map.json")
    for key in (*NAMED, "additional_special_tokens"):
        if config.get(key) is None and legacy.get(key) is not None:
            config[key] = _contents(legacy[key])
    if (folder / "tokenizer.json").exists():
        document = _json(folder / "tokenizer.json")
        if "model" not in document:
            raise UsageError(f"{folder / 'tokenizer.json'} is no Hugging Face tokenizer: it has no 'model'")
    else:
        document = _from_merges(folder, config)
    template = folder / "chat_template.jinja"
    written = template.read_text(encoding="utf-8") if template.exists() else template_in(config)
    return TokenizerFiles(with_declared_tokens(document, config, folder), config, written)


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
    vocabulary = model_vocabulary(document)
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


def model_vocabulary(document: dict[str, Any]) -> dict[str, int]:
    """The ids of a tokenizer.json's model, without its added tokens."""
    entries = document["model"]["vocab"]
    if isinstance(entries, dict):
        return entries
    return {entry[0]: index for index, entry in enumerate(entries)}  # Unigram: [piece, score] by id


def _from_merges(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    for vocabulary_file, merges_file in _VOCABULARIES:
        if (folder / vocabulary_file).exists() and (folder / merges_file).exists():
            break
    else:
        raise UsageError(
            f"{folder} holds no tokenizer: it has neither tokenizer.json nor "
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
