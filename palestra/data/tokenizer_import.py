"""Tokenizers that came inside other programs' files: llama2.c's binary and the metadata of a GGUF."""

import struct
from pathlib import Path
from typing import Any

from palestra.data.pretokenizers import added_token, bpe_model, byte_level_document
from palestra.data.tokenizer_files import with_declared_tokens
from palestra.data.tokenizers import Tokenizer
from palestra.errors import UsageError

# GGUF's `tokenizer.ggml.token_type`. Normal, unused and byte tokens stay in the vocabulary as they are.
_CONTROL, _USER_DEFINED = 3, 4


def from_llama2c(path: Path, vocab_size: int) -> Tokenizer:
    """The tokenizer of a llama2.c model (`tok512.bin`), with the ids that `run.c` gives.

    The file holds the longest token's length, then a score, a length and the bytes for each token; how many there are
    stands in the model's file. run.c puts a space before the text, looks up each character (or writes its bytes), and
    merges the neighbours whose joined piece has the highest score, the leftmost first, until none is left. That is BPE
    in which every way to split a piece is a merge, ranked by the piece's score.
    """
    data = Path(path).read_bytes()
    scores: list[float] = []
    pieces: list[str] = []
    try:
        place = struct.calcsize("<i")
        for _ in range(vocab_size):
            score, length = struct.unpack_from("<fi", data, place)
            place += struct.calcsize("<fi")
            scores.append(score)
            pieces.append(data[place : place + length].decode())
            place += length
    except (struct.error, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is no llama2.c tokenizer of {vocab_size} tokens: {error}") from error
    if place != len(data):
        raise UsageError(f"{path} has more than the {vocab_size} tokens of the model it is said to belong to")
    pieces[:3] = ("<unk>", "<s>", "</s>")  # the file spells the latter two with line breaks around them
    numbers = {piece: number for number, piece in enumerate(pieces)}
    ordered = sorted(range(3, vocab_size), key=lambda number: -scores[number])
    merges = [
        (piece[:cut], piece[cut:])
        for piece in (pieces[number] for number in ordered)
        for cut in range(1, len(piece))
        if piece[:cut] in numbers and piece[cut:] in numbers
    ]
    document = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [added_token(piece, number) for number, piece in enumerate(pieces[:3])],
        "normalizer": {"type": "Prepend", "prepend": " "},
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0},
            ],
        },
        "model": bpe_model(numbers, merges, unknown="<unk>", byte_fallback=True),
    }
    config = {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "add_bos_token": True,
        "clean_up_tokenization_spaces": False,
    }
    return Tokenizer(document, config, name=Path(path).stem)


def from_gguf(fields: dict[str, Any]) -> Tokenizer:
    """The tokenizer in a GGUF's metadata, given as plain values by their keys (`tokenizer.ggml.tokens`, …)."""
    kind = fields.get("tokenizer.ggml.model")
    if kind != "gpt2":
        raise UsageError(f"the GGUF has a tokenizer of type {kind!r}; byte-level BPE ('gpt2') is supported")
    tokens: list[str] = list(fields["tokenizer.ggml.tokens"])
    types: list[int] = list(fields["tokenizer.ggml.token_type"])
    merges = [(left, right) for left, _, right in (pair.partition(" ") for pair in fields["tokenizer.ggml.merges"])]
    added = [
        added_token(token, number, special=kind_of_token == _CONTROL)
        for number, (token, kind_of_token) in enumerate(zip(tokens, types, strict=True))
        if kind_of_token in (_CONTROL, _USER_DEFINED)
    ]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    document = byte_level_document(fields.get("tokenizer.ggml.pre", "gpt-2"), vocabulary, merges, added)
    config: dict[str, Any] = {"clean_up_tokenization_spaces": False}
    for key, name in (("bos", "bos_token"), ("eos", "eos_token"), ("unknown", "unk_token"), ("padding", "pad_token")):
        if (number := fields.get(f"tokenizer.ggml.{key}_token_id")) is not None:
            config[name] = tokens[number]
    template = fields.get("tokenizer.chat_template")
    if template is not None:
        config["chat_template"] = template
    name = fields.get("general.name", "gguf")
    return Tokenizer(with_declared_tokens(document, config, name), config, name=name, chat_template=template)
