"""Text to token ids and back: Hugging Face tokenizers in which special tokens never come out of user text."""

import codecs
import copy
import hashlib
import json
import re
import secrets
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import chain, takewhile
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from palestra.data.pieces import read_spelling
from palestra.data.pretokenizers import GPT4_SHORT_DIGITS
from palestra.data.tokenizer_files import named_tokens, read_folder, template_in, with_declared_tokens
from palestra.errors import UsageError

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

# The template of the tokenizers made here. Each turn is closed by a token that is trained, as encode_chat sees to.
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


class Tokenizer:
    """A Hugging Face tokenizer and what a model needs to know of it.

    Inside, the special tokens go by secret names drawn when the object is made, in the vocabulary too. The string
    `<|im_end|>` in a text is then ordinary text, whatever the model's merges or pieces would make of it; only where
    the caller says that special strings count are they replaced by their secret names. Tokens that were added but are
    not special (Qwen's `<think>`) are always found.
    """

    def __init__(
        self, document: dict[str, Any], config: dict[str, Any], *, name: str, chat_template: str | None = None
    ):
        self.name = name
        self.config = config
        self.chat_template = chat_template
        self.named_specials = named_tokens(config)
        self._serialised = json.dumps(document, ensure_ascii=False)
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
            given = self._backend.token_to_id(self._secret.get(entry["content"], entry["content"]))
            if given != entry["id"]:
                raise UsageError(
                    f"tokenizer {name}: the added token {entry['content']!r} is said to have the id {entry['id']} but "
                    f"gets {given}; the ids of added tokens must follow the vocabulary without gaps"
                )
        self.vocab_size = max(self._backend.get_vocab(with_added_tokens=True).values()) + 1
        self._spelling = read_spelling(document.get("decoder"))
        self._pieces: dict[int, bytes] = {}

    @classmethod
    def load(cls, folder: Path) -> "Tokenizer":
        """Read tokenizer.json, or a vocabulary with merges, and the configs and the chat template beside it."""
        files = read_folder(Path(folder))
        return cls(files.document, files.config, name=Path(folder).resolve().name, chat_template=files.chat_template)

    def save(self, folder: Path) -> None:
        """Write a folder that `load` and transformers' AutoTokenizer read to the same ids."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "tokenizer.json").write_text(self._serialised, encoding="utf-8")
        # Any other class lets transformers 5 build its own rules over the vocabulary and pass over those in
        # tokenizer.json: SmolLM's, a GPT2Tokenizer, would lose its rule for digits.
        config = {**self.config, "tokenizer_class": "PreTrainedTokenizerFast"}
        written = json.dumps(config, ensure_ascii=False, indent=2)
        (folder / "tokenizer_config.json").write_text(written + "\n", encoding="utf-8")
        # A template in its own file goes before the one in the config, here and in transformers.
        if self.chat_template is not None and self.chat_template != template_in(self.config):
            (folder / "chat_template.jinja").write_text(self.chat_template, encoding="utf-8")

    def with_chat_template(self, template: str) -> "Tokenizer":
        """The same tokenizer with another chat template."""
        twin = copy.copy(self)
        twin.chat_template = template
        return twin

    @property
    def bos(self) -> int | None:
        """The id that begins a text, where the tokenizer has one."""
        return self._named("bos_token")

    @cached_property
    def beginning(self) -> tuple[int, ...]:
        """The ids that stand before every plain text the model has seen, such as Llama's BOS; often none.

        Chat templates write their own.
        """
        names = _opening(json.loads(self._serialised).get("post_processor"))
        if not names and self.config.get("add_bos_token") and self.bos is not None:
            return (self.bos,)
        ids = (self._backend.token_to_id(self._secret.get(name, name)) for name in names)
        return tuple(id for id in ids if id is not None)

    def encode_prompt(self, text: str) -> list[int]:
        """A plain text to be continued: `beginning`, then its tokens; of an empty one BOS or EOS, to begin anywhere."""
        tokens = [*self.beginning, *self.encode(text)]
        first = self.bos if self.bos is not None else self.eos
        return tokens or ([] if first is None else [first])

    @property
    def eos(self) -> int | None:
        """The id that ends a text, where the tokenizer has one."""
        return self._named("eos_token")

    @property
    def pad(self) -> int | None:
        """The id that fills up a batch, where the tokenizer has one."""
        return self._named("pad_token")

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of all that decides which ids a text gets, whatever order or spacing the file had."""
        document = json.loads(self._serialised)
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
            return [found.ids for found in self._backend.encode_batch_fast(texts, add_special_tokens=False)]
        except Exception as error:
            raise self._explained(texts, error) from error

    def encode_parts(self, parts: Iterable[tuple[str, bool]]) -> tuple[list[int], list[tuple[int, int]]]:
        """The ids of the parts joined into one text, and the characters of it that each id stands for.

        A part is its text and whether special strings mean their tokens in it; one that reaches over the border of
        two parts is text. Merges do not see the borders.
        """
        renamed: list[str] = []
        # Secret names are longer than what they stand for: where in the renamed text each stretch begins, and how much
        # longer the renamed text has become by then.
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
            found = self._backend.encode(whole, add_special_tokens=False)
        except Exception as error:
            raise self._explained([whole], error) from error

        def original(position: int) -> int:
            return position - surplus[bisect_right(starts, position) - 1]

        return found.ids, [(original(start), original(end)) for start, end in found.offsets]

    def decode(self, ids: Sequence[int], *, specials: bool = False, continues: bool = False) -> str:
        """The text of ids; special tokens are left out unless `specials`.

        Tokenizers that put a space before every text (Llama 2) lose it again here, unless the ids are said to
        continue a text. Bytes that are no UTF-8 become U+FFFD.
        """
        stream = Detokenizer(self, specials=specials, continues=continues)
        return stream.push(ids) + stream.finish()

    def piece(self, token: int) -> bytes:
        """The exact bytes of one token; none for an id that pads the model's embedding."""
        if token not in self._pieces:
            printed = self._backend.id_to_token(token)
            if token in self._added:
                self._pieces[token] = self._added[token].encode()
            else:
                self._pieces[token] = b"" if printed is None else self._spelling.bytes_of(printed)
        return self._pieces[token]

    def _named(self, which: str) -> int | None:
        content = self.named_specials.get(which)
        return None if content is None else self._backend.token_to_id(self._secret[content])

    def _explained(self, texts: Sequence[str], error: Exception) -> UsageError:
        """The library's error, in terms of the text that caused it."""
        for text in texts:
            if lone := re.search("[\ud800-\udfff]", text):
                return UsageError(f"the text is no valid Unicode: character {lone.start()} is half a surrogate pair")
        if isinstance(self._backend.model, models.WordLevel):
            known = self._backend.get_vocab()
            unknown = sorted({c for text in texts for c in self._without_specials(text) if c not in known})
            return UsageError(
                f"the tokenizer {self.name} has no token for {', '.join(map(repr, unknown))}: it knows the "
                f"{len(known) - len(self._added)} characters it was made with"
            )
        return UsageError(f"the tokenizer {self.name} cannot encode the text: {error}")

    def _without_specials(self, text: str) -> str:
        for name in self._secret.values():
            text = text.replace(name, "")
        return text


class Detokenizer:
    """Text out of ids as they come: never half a character, and all pushes together are `decode` of all ids."""

    def __init__(self, tokenizer: Tokenizer, *, specials: bool = False, continues: bool = False):
        self._piece = tokenizer.piece
        self._left_out = frozenset() if specials else tokenizer.special_ids
        self._spaces = 0 if continues else tokenizer._spelling.leading_spaces
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Iterable[int]) -> str:
        """The text that these ids make certain."""
        data = b"".join(self._piece(token) for token in ids if token not in self._left_out)
        while self._spaces and data:
            self._spaces = self._spaces - 1 if data[0] == 0x20 else 0
            data = data.removeprefix(b" ")
        return self._utf8.decode(data)

    def finish(self) -> str:
        """What is left when no more ids come: U+FFFD for a character that never became whole."""
        return self._utf8.decode(b"", final=True)


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
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(GPT4_SHORT_DIGITS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
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


def character_tokenizer(texts: str | Iterable[str]) -> Tokenizer:
    """One id for each character that occurs in the texts, sorted, then the special tokens.

    A character that it was not made with is an error that names it.
    """
    alphabet = sorted(set(chain.from_iterable(texts)))
    vocabulary = {token: number for number, token in enumerate([*alphabet, *SPECIAL_TOKENS])}
    # No token stands for the unknown: the library then refuses a character it does not know.
    backend = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="\ue000no such token"))
    backend.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens(list(SPECIAL_TOKENS))
    return _made(backend, SPECIAL_TOKENS, f"characters-{len(alphabet)}")


def _made(backend: tokenizers.Tokenizer, special_tokens: Sequence[str], name: str) -> Tokenizer:
    config = {
        "bos_token": special_tokens[0],
        "eos_token": special_tokens[0],
        # No pad token: one that is also EOS makes collators that mask padding leave EOS untrained.
        "additional_special_tokens": list(special_tokens),
        "clean_up_tokenization_spaces": False,
    }
    if {"<|im_start|>", "<|im_end|>"}.issubset(special_tokens):
        config["chat_template"] = CHATML
    document = with_declared_tokens(json.loads(backend.to_str()), config, name)
    return Tokenizer(document, config, name=name, chat_template=template_in(config))


def _opening(processor: dict[str, Any] | None) -> list[str]:
    """The special tokens that a post-processor of the `tokenizers` library puts before a text."""
    if processor is None:
        return []
    if processor["type"] == "Sequence":
        return [name for one in processor["processors"] for name in _opening(one)]
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
