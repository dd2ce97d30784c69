"""Text to token ids and back, with the exact bytes of each token; special tokens never come out of user text."""

import codecs
import copy
import hashlib
import json
import re
import secrets
import struct
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from itertools import chain, takewhile
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from palestra.data.media import PAD, PREPROCESSOR, VISION_TOKENS, PixelLimits
from palestra.data.tokenizer_files import (
    GPT4_SHORT_DIGITS,
    Spelling,
    added_token,
    bpe_model,
    byte_level_document,
    named_tokens,
    read_folder,
    template_in,
    tokenizer_document,
    with_declared_tokens,
)
from palestra.errors import UsageError

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

# The template of the tokenizers made here. Each turn is closed by a token that is trained, as encode_chat sees to.
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


# The same for images between texts, with the tokens that Qwen2.5-VL has around and in place of one.
VISION_CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}{% if message['content'] is string %}"
    "{{ message['content'] }}{% else %}{% for part in message['content'] %}{% if part['type'] == 'image' %}"
    "{{ '<|vision_start|><|image_pad|><|vision_end|>' }}{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
    "{{ '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


class Tokenizer:
    """A Hugging Face tokenizer and what a model needs to know of it.

    Inside, the special tokens have random names made with the object, in the vocabulary too. The string
    `<|im_end|>` in a text is then ordinary text, whatever the model's merges or pieces would make of it; only where
    the caller allows special strings are they replaced by these names. Tokens that were added but are
    not special (Qwen's `<think>`) are always found.
    """

    def __init__(
        self, document: dict[str, Any], config: dict[str, Any], *, name: str, chat_template: str | None = None
    ):
        self.name, self.config, self.chat_template = name, config, chat_template
        self.named_specials = named_tokens(config)
        self._serialized = json.dumps(document, ensure_ascii=False)
        added = document["added_tokens"]
        self.special_ids: frozenset[int] = frozenset(entry["id"] for entry in added if entry["special"])
        self.special_strings: tuple[str, ...] = tuple(entry["content"] for entry in added if entry["special"])
        self._added = {entry["id"]: entry["content"] for entry in added}
        nonce = secrets.token_hex(8)
        self._secret = {entry["content"]: f"\ue000{nonce}:{entry['id']}\ue001" for entry in added if entry["special"]}
        self._find_added = re.compile(_longest_first(added) or "(?!)")
        renamed = json.dumps(_renamed(document, self._secret), ensure_ascii=False)
        try:
            self._backend = tokenizers.Tokenizer.from_str(renamed)
        except Exception as error:  # the library has no narrower one
            raise UsageError(f"tokenizer {name}: its tokenizer.json is not understood: {error}") from error
        for entry in added:
            actual = self._backend.token_to_id(self._secret.get(entry["content"], entry["content"]))
            if actual != entry["id"]:
                raise UsageError(
                    f"tokenizer {name}: the added token {entry['content']!r} is listed with the id {entry['id']} but "
                    f"gets {actual}; the ids of added tokens must follow the vocabulary without gaps"
                )
        self.vocab_size = max(self._backend.get_vocab(with_added_tokens=True).values()) + 1
        self._spelling = Spelling(document.get("decoder"))
        self._pieces = _Pieces(self._spelled)
        self.bos, self.eos, self.pad = (self._named(name) for name in ("bos_token", "eos_token", "pad_token"))
        """The ids that begin a text, end one and fill up a batch, where the tokenizer has them."""
        self.pixels: PixelLimits | None = None
        """How large images are, where the model reads any."""

    @classmethod
    def load(cls, folder: Path) -> "Tokenizer":
        """Read tokenizer.json, or a vocabulary with merges, and the configs and the chat template next to it."""
        document, config, template = read_folder(Path(folder))
        tokenizer = cls(document, config, name=Path(folder).resolve().name, chat_template=template)
        if (about := Path(folder) / PREPROCESSOR).exists():
            tokenizer.pixels = PixelLimits.of(json.loads(about.read_text(encoding="utf-8")), str(about))
        return tokenizer

    def save(self, folder: Path) -> None:
        """Write a folder that `load` and transformers' AutoTokenizer read to the same ids."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "tokenizer.json").write_text(self._serialized, encoding="utf-8")
        # Any other class lets transformers 5 build its own rules over the vocabulary and pass over those in
        # tokenizer.json: SmolLM's, a GPT2Tokenizer, would lose its rule for digits.
        config = {**self.config, "tokenizer_class": "PreTrainedTokenizerFast"}
        written = json.dumps(config, ensure_ascii=False, indent=2)
        (folder / "tokenizer_config.json").write_text(written + "\n", encoding="utf-8")
        # A template in its own file goes before the one in the config, here and in transformers.
        if self.chat_template is not None and self.chat_template != template_in(self.config):
            (folder / "chat_template.jinja").write_text(self.chat_template, encoding="utf-8")
        if self.pixels is not None:
            (folder / PREPROCESSOR).write_text(json.dumps(self.pixels.config(), indent=2) + "\n", encoding="utf-8")

    def with_chat_template(self, template: str) -> "Tokenizer":
        """The same tokenizer with another chat template."""
        twin = copy.copy(self)
        twin.chat_template = template
        return twin

    def with_images(self, pixels: PixelLimits) -> "Tokenizer":
        """The same tokenizer for a model that reads images of that size."""
        if missing := [token for token in VISION_TOKENS if token not in self._secret]:
            raise UsageError(f"the tokenizer {self.name} lacks special tokens for images: {', '.join(missing)}")
        twin = copy.copy(self)
        twin.pixels = pixels
        return twin

    @cached_property
    def vision_ids(self) -> list[int]:
        """The ids of `VISION_TOKENS`, of a tokenizer for images."""
        ids = {content: id for id, content in self._added.items()}
        return [ids[token] for token in VISION_TOKENS]

    @property
    def image_pad(self) -> int | None:
        """The token that stands for an image, where the model reads any."""
        return None if self.pixels is None else self.vision_ids[1]

    @cached_property
    def beginning(self) -> tuple[int, ...]:
        """The ids that stand before every plain text the model has seen, such as Llama's BOS; often none.

        Chat templates write their own.
        """
        names = _opening(json.loads(self._serialized).get("post_processor"))
        if not names and self.config.get("add_bos_token") and self.bos is not None:
            return (self.bos,)
        ids = (self._backend.token_to_id(self._secret.get(name, name)) for name in names)
        return tuple(id for id in ids if id is not None)

    def encode_prompt(self, text: str) -> list[int]:
        """A plain text to be continued: `beginning`, then its tokens; of an empty one BOS or EOS, to begin anywhere."""
        tokens = [*self.beginning, *self.encode(text)]
        first = self.bos if self.bos is not None else self.eos
        return tokens or ([] if first is None else [first])

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of all that decides which ids a text gets, whatever order or spacing the file had."""
        document = json.loads(self._serialized)
        rules = {key: value for key, value in document.items() if key not in ("truncation", "padding")}
        return hashlib.sha256(json.dumps(rules, sort_keys=True, separators=(",", ":")).encode()).hexdigest()

    def encode(self, text: str, *, specials: bool = False) -> list[int]:
        """The ids of a text, without BOS or EOS; `specials` says whether strings like `<|im_end|>` mean their token.

        A special id never comes out of a text with `specials=False`, except the model's own for what it does not know.
        """
        return self.encode_parts([(text, True)])[0] if specials else self.encode_all([text])[0]

    def encode_all(self, texts: Iterable[str]) -> list[list[int]]:
        """The ids of many texts, on all cores; strings like `<|im_end|>` are text."""
        texts = list(texts)
        try:
            return [encoding.ids for encoding in self._backend.encode_batch_fast(texts, add_special_tokens=False)]
        except Exception as error:
            raise self._explained(texts, error) from error

    def encode_parts(self, parts: Iterable[tuple[str, bool]]) -> tuple[list[int], list[tuple[int, int]]]:
        """The ids of the parts joined into one text, and the characters of it that each id stands for.

        A part is its text and whether special strings mean their tokens in it; one that reaches over the border of
        two parts is text. Merges do not see the borders.
        """
        renamed: list[str] = []
        # Secret names are longer than what they stand for: where in the renamed text each stretch begins, and how much
        # longer the renamed text is by then.
        starts, surplus, length = [0], [0], 0
        for text, specials in parts:
            last = 0
            for match in self._find_added.finditer(text) if specials else ():
                name = self._secret.get(match[0], match[0])
                renamed += (text[last : match.start()], name)
                last = match.end()
                length += len(renamed[-2]) + len(name)
                starts.append(length)
                surplus.append(surplus[-1] + len(name) - len(match[0]))
            renamed.append(text[last:])
            length += len(renamed[-1])
        whole = "".join(renamed)
        try:
            encoding = self._backend.encode(whole, add_special_tokens=False)
        except Exception as error:
            raise self._explained([whole], error) from error

        def original(position: int) -> int:
            return position - surplus[bisect_right(starts, position) - 1]

        return encoding.ids, [(original(start), original(end)) for start, end in encoding.offsets]

    def decode(self, ids: Sequence[int], *, specials: bool = False, continues: bool = False) -> str:
        """The text of ids; special tokens are left out unless `specials`.

        The space that some tokenizers put before every text (Llama 2) is removed again, unless the ids continue a text.
        Bytes that are not UTF-8 become U+FFFD.
        """
        stream = Detokenizer(self, specials=specials, continues=continues)
        return stream.push(ids) + stream.finish()

    def piece(self, token: int) -> bytes:
        """The exact bytes of one token; none for an id that pads the model's embedding."""
        return self._pieces[token]

    def _spelled(self, token: int) -> bytes:
        if token in self._added:
            return self._added[token].encode()
        printed = self._backend.id_to_token(token)
        return b"" if printed is None else self._spelling.bytes_of(printed)

    def _named(self, which: str) -> int | None:
        content = self.named_specials.get(which)
        return None if content is None else self._backend.token_to_id(self._secret[content])

    def _explained(self, texts: Sequence[str], error: Exception) -> UsageError:
        """The library's error, in terms of the text that caused it."""
        for text in texts:
            check_unicode(text, "the text")
        if isinstance(self._backend.model, models.WordLevel):
            for name in self._secret.values():
                texts = [text.replace(name, "") for text in texts]
            known = self._backend.get_vocab()
            unknown = sorted({character for text in texts for character in text if character not in known})
            return UsageError(
                f"the tokenizer {self.name} has no token for {', '.join(map(repr, unknown))}: it knows the "
                f"{len(known) - len(self._added)} characters it was made with"
            )
        return UsageError(f"the tokenizer {self.name} cannot encode the text: {error}")


class _Pieces(dict[int, bytes]):
    """What is asked for the first time is computed; all else is found at the speed of a dict."""

    def __init__(self, compute: Callable[[int], bytes]):
        self._compute = compute

    def __missing__(self, token: int) -> bytes:
        self[token] = piece = self._compute(token)
        return piece


class Detokenizer:
    """Streaming `decode`: never half a character, and all pushes together are `decode` of all ids."""

    def __init__(self, tokenizer: Tokenizer, *, specials: bool = False, continues: bool = False):
        self._pieces = tokenizer._pieces
        self._left_out = frozenset() if specials else tokenizer.special_ids
        self._spaces = 0 if continues else tokenizer._spelling.leading_spaces
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Iterable[int]) -> str:
        """The text that is complete with these ids."""
        pieces, left_out = self._pieces, self._left_out
        data = b"".join([pieces[token] for token in ids if token not in left_out])
        while self._spaces and data:
            self._spaces = self._spaces - 1 if data[0] == 0x20 else 0
            data = data.removeprefix(b" ")
        return self._utf8.decode(data)

    def finish(self) -> str:
        """The rest at the end: U+FFFD for an incomplete character."""
        return self._utf8.decode(b"", final=True)


def check_unicode(text: str, what: str) -> None:
    """Refuse a text that UTF-8 cannot spell."""
    if lone := re.search("[\ud800-\udfff]", text):
        raise UsageError(f"{what} is not valid Unicode: character {lone.start()} is half a surrogate pair")


def token_texts(tokens: Sequence[int], tokenizer: Tokenizer) -> tuple[list[str], dict[int, str]]:
    """The text of each token. A character that several tokens share is at its last; their bytes are in hex by index."""
    decoder, texts, joined = codecs.getincrementaldecoder("utf-8")("replace"), [], {}
    for index, token in enumerate(tokens):
        piece, (waiting, _) = tokenizer.piece(token), decoder.getstate()
        texts.append(decoder.decode(piece))
        if waiting or decoder.getstate()[0]:
            joined[index] = piece.hex(" ")
    if texts:
        texts[-1] += decoder.decode(b"", final=True)
    return texts, joined


def train_bpe(texts: Iterable[str], vocab_size: int, *, special_tokens: Sequence[str] = SPECIAL_TOKENS) -> Tokenizer:
    """A byte-level BPE trained on texts, special tokens first; every text is made of its tokens.

    The first special token ends a text. A small corpus may not have enough pairs for all of `vocab_size`.
    """
    smallest = 256 + len(special_tokens)
    if vocab_size < smallest:
        raise UsageError(
            f"a byte-level vocabulary of {vocab_size} is too small: bytes and special tokens take {smallest}"
        )
    backend = tokenizers.Tokenizer(models.BPE())
    words = pre_tokenizers.Split(tokenizers.Regex(GPT4_SHORT_DIGITS), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([words, byte_level])
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        show_progress=False,
        special_tokens=list(special_tokens),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    backend.train_from_iterator(texts, trainer)
    return _made(backend, special_tokens, f"bpe-{backend.get_vocab_size()}")


def character_tokenizer(texts: str | Iterable[str], special_tokens: Sequence[str] = SPECIAL_TOKENS) -> Tokenizer:
    """One id for each character that occurs in the texts, sorted, then the special tokens.

    A character that it was not made with is an error that names it.
    """
    alphabet = sorted(set(chain.from_iterable(texts)))
    vocabulary = {token: number for number, token in enumerate([*alphabet, *special_tokens])}
    # No token stands for the unknown: the library then refuses a character it does not know.
    backend = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="\ue000no such token"))
    backend.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens(list(special_tokens))
    return _made(backend, special_tokens, f"characters-{len(alphabet)}")


def _made(backend: tokenizers.Tokenizer, special_tokens: Sequence[str], name: str) -> Tokenizer:
    config = {
        "bos_token": special_tokens[0],
        "eos_token": special_tokens[0],
        # No pad token: one that is also EOS makes collators that mask padding leave EOS untrained.
        "additional_special_tokens": list(special_tokens),
        "clean_up_tokenization_spaces": False,
    }
    if {"<|im_start|>", "<|im_end|>"}.issubset(special_tokens):
        config["chat_template"] = VISION_CHATML if PAD in special_tokens else CHATML
    document = with_declared_tokens(json.loads(backend.to_str()), config, name)
    return Tokenizer(document, config, name=name, chat_template=template_in(config))


def _opening(processor: dict[str, Any] | None) -> list[str]:
    """The special tokens that a post-processor of the `tokenizers` library puts before a text."""
    if processor is None:
        return []
    if processor["type"] == "Sequence":
        return [name for part in processor["processors"] for name in _opening(part)]
    if processor["type"] != "TemplateProcessing":
        return []
    pieces = takewhile(lambda piece: "SpecialToken" in piece, processor["single"])
    return [processor["special_tokens"][piece["SpecialToken"]["id"]]["tokens"][0] for piece in pieces]


def _longest_first(added: Sequence[dict[str, Any]]) -> str:
    """Alternatives in the order in which the library prefers them: leftmost, then longest."""
    bounded = {True: r"(?<!\w){}(?!\w)", False: "{}"}
    ordered = sorted(added, key=lambda entry: len(entry["content"]), reverse=True)
    return "|".join(bounded[entry["single_word"]].replace("{}", re.escape(entry["content"])) for entry in ordered)


def _renamed(document: dict[str, Any], secret: dict[str, str]) -> dict[str, Any]:
    """The document with special tokens under secret names, where no text can reach them, and with nothing automatic."""
    model = dict(document["model"])
    vocabulary = model["vocab"]
    if isinstance(vocabulary, dict):
        model["vocab"] = {secret.get(token, token): number for token, number in vocabulary.items()}
    else:  # Unigram
        model["vocab"] = [[secret.get(token, token), score] for token, score in vocabulary]
    if "merges" in model:
        pairs = (pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"])
        model["merges"] = [
            [left, right] for left, right in pairs if secret.keys().isdisjoint((left, right, left + right))
        ]
    if model.get("unk_token") in secret:
        model["unk_token"] = secret[model["unk_token"]]
    added = [
        {**entry, "content": secret[entry["content"]], "normalized": False, "single_word": False}
        if entry["special"]
        else entry
        for entry in document["added_tokens"]
    ]
    nothing = {"truncation": None, "padding": None, "post_processor": None}
    return {**document, "model": model, "added_tokens": added, **nothing}


# GGUF's `tokenizer.ggml.token_type`. Normal, unused and byte tokens stay in the vocabulary as they are.
_CONTROL, _USER_DEFINED = 3, 4


def from_llama2c(path: Path, vocab_size: int) -> Tokenizer:
    """The tokenizer of a llama2.c model (`tok512.bin`), with the ids that `run.c` gives.

    The file holds the longest token's length, then a score, a length and the bytes for each token; how many there are
    stands in the model's file. run.c puts a space before the text, looks up each character (or writes its bytes), and
    merges the neighbors whose joined piece has the highest score, the leftmost first, until none is left. That is BPE
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
        raise UsageError(f"{path} is not a llama2.c tokenizer of {vocab_size} tokens: {error}") from error
    if place != len(data):
        raise UsageError(f"{path} has more than {vocab_size} tokens, the vocabulary of its model")
    pieces[:3] = ("<unk>", "<s>", "</s>")  # the file spells the latter two with line breaks around them
    numbers = {piece: number for number, piece in enumerate(pieces)}
    ordered = sorted(range(3, vocab_size), key=lambda number: -scores[number])
    merges = [
        (piece[:cut], piece[cut:])
        for piece in (pieces[number] for number in ordered)
        for cut in range(1, len(piece))
        if piece[:cut] in numbers and piece[cut:] in numbers
    ]
    model = bpe_model(numbers, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    added = [added_token(piece, number) for number, piece in enumerate(pieces[:3])]
    space, strip = {"type": "Prepend", "prepend": " "}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    decoder = {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}, strip]}
    document = tokenizer_document(model, added, space, None, decoder)
    config = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    config |= {"add_bos_token": True, "clean_up_tokenization_spaces": False}
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
        added_token(token, number, special=type == _CONTROL)
        for number, (token, type) in enumerate(zip(tokens, types, strict=True))
        if type in (_CONTROL, _USER_DEFINED)
    ]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    document = byte_level_document(fields.get("tokenizer.ggml.pre", "gpt-2"), vocabulary, merges, added)
    config: dict[str, Any] = {"clean_up_tokenization_spaces": False}
    for key, name in (("bos", "bos_token"), ("eos", "eos_token"), ("unknown", "unk_token"), ("padding", "pad_token")):
        if (number := fields.get(f"tokenizer.ggml.{key}_token_id")) is not None:
            config[name] = tokens[number]
    if (template := fields.get("tokenizer.chat_template")) is not None:
        config["chat_template"] = template
    name = fields.get("general.name", "gguf")
    return Tokenizer(with_declared_tokens(document, config, name), config, name=name, chat_template=template)
