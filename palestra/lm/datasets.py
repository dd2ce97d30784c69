"""From the data of a spec to examples by index: tokenizers are made, texts tokenized once, parts held out."""

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np

from palestra.data.cache import cache_root
from palestra.data.encoders import ChatEncoder, Encoder, TextEncoder, cached_tokenizer, conversation, pair
from palestra.data.mixture import Dataset, Mixture, Stages, permute, stream_key
from palestra.data.readers import COMPRESSED, FORMATS, Shard, numbered_rows, read_rows, shards
from palestra.data.sources import resolve
from palestra.data.steps.tokenize import build_store
from palestra.data.store import LEDGER, Documents, Example, Ledger, TokenStore, Windows
from palestra.data.tokenizers import Tokenizer, character_tokenizer, train_bpe
from palestra.errors import UsageError
from palestra.spec.kinds.lm import ChatData, PretrainData
from palestra.spec.lm import BpeSpec, LmData, Source, TextSource

Item = TypeVar("Item")
Made = tuple[Dataset[Item], list[TokenStore], np.ndarray]
"""Examples, the stores they are read from, and the number of the document in which each example begins, ascending."""
HOLDOUT = "documents by hash"
"""How a part is held out; another rule needs another name, which refuses to resume a run that has the old part."""


@dataclass(frozen=True)
class Data(Generic[Item]):
    """What a run trains on and is evaluated on."""

    train: dict[str, Dataset[Item]]
    evals: dict[str, Dataset[Item]]
    weights: dict[str, float]
    """Of the training sources, where no stage says otherwise."""
    contents: dict[str, str]
    """What every source's tokens are made of, by its place in the spec: the same after files were moved."""


@dataclass(frozen=True)
class Part(Generic[Item]):
    """Some examples of a dataset."""

    whole: Dataset[Item]
    examples: np.ndarray
    """Their numbers in it."""

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> Item:
        if not 0 <= index < len(self):
            raise IndexError(f"example {index} of {len(self)}")
        return self.whole[int(self.examples[index])]


@dataclass(frozen=True)
class Joined:
    """Windows whose documents are not kept apart."""

    windows: Windows

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> Example:
        example = self.windows[index]
        return Example(example.tokens, np.array([len(example.tokens)]), example.loss)


class Conversations:
    """One conversation an example. One of which cutting leaves nothing to train on is left out."""

    def __init__(self, store: TokenStore, data: ChatData):
        self._documents = _cut(store, data)
        self._rows = _usable([store], data)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Example:
        if not 0 <= index < len(self):
            raise IndexError(f"conversation {index} of {len(self)}")
        return self._documents[int(self._rows[index])]


class Pairs:
    """The chosen and the rejected example of each row; a pair is cut or left out together."""

    def __init__(self, chosen: TokenStore, rejected: TokenStore, data: ChatData):
        self._chosen, self._rejected = _cut(chosen, data), _cut(rejected, data)
        self._rows = _usable([chosen, rejected], data)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> tuple[Example, Example]:
        if not 0 <= index < len(self):
            raise IndexError(f"pair {index} of {len(self)}")
        row = int(self._rows[index])
        return self._chosen[row], self._rejected[row]


def _cut(store: TokenStore, data: ChatData) -> Documents:
    """Every document, at most `data.context` tokens of it."""
    return Documents(store, data.context, "error" if data.over_long == "error" else "truncate")


def _usable(stores: Sequence[TokenStore], data: ChatData) -> np.ndarray:
    """The rows of which something is trained on and, where long ones are dropped, that are short enough."""
    usable = np.any([_trained(store, data.context) for store in stores], axis=0)
    if data.over_long == "drop":
        usable &= np.max([np.diff(store.ends, prepend=0) for store in stores], axis=0) <= data.context
    return np.flatnonzero(usable)


def _trained(store: TokenStore, context: int) -> np.ndarray:
    """Whether the first `context` tokens of each document have one that is predicted and trained on."""
    assert store.loss is not None  # chat encoders are masked
    stops = np.asarray(store.ends)
    starts = np.concatenate([[0], stops[:-1]])
    before = np.concatenate([[0], np.cumsum(store.loss)])
    return before[np.minimum(stops, starts + context)] > before[np.minimum(starts + 1, stops)]


def text_data(data: PretrainData, tokenizer: Path) -> Data[Example]:
    """Windows of plain texts."""

    def examples(source: Source) -> Made[Example]:
        assert isinstance(source, TextSource)
        store = _stored(source, TextEncoder.load(tokenizer, text_key=source.key))
        windows = Windows(store, data.context)
        documents = np.searchsorted(store.ends, np.arange(len(windows)) * data.context, side="right")
        return windows if data.documents else Joined(windows), [store], documents

    return _split(data, examples)


def chat_data(data: ChatData, tokenizer: Path) -> Data[Example]:
    """Conversations, one an example."""
    _check_template(data, tokenizer)

    def examples(source: Source) -> Made[Example]:
        store = _stored(source, ChatEncoder.load(tokenizer, format=data.format))
        found = Conversations(store, data)
        return found, [store], np.arange(len(found))

    return _split(data, examples)


def pair_data(data: ChatData, tokenizer: Path) -> Data[tuple[Example, Example]]:
    """Preference pairs."""
    _check_template(data, tokenizer)

    def examples(source: Source) -> Made[tuple[Example, Example]]:
        chosen = _stored(source, ChatEncoder.load(tokenizer, format=data.format, side="chosen"))
        rejected = _stored(source, ChatEncoder.load(tokenizer, format=data.format, side="rejected"))
        found = Pairs(chosen, rejected, data)
        return found, [chosen, rejected], np.arange(len(found))

    return _split(data, examples)


def mixture_of(found: Data[Item], data: LmData, *, batch: int, steps: int, seed: int) -> Mixture[Item]:
    """The training examples in the order of a seed, enough for all steps; stages begin at their steps."""
    weights: Mapping[str, float] | Stages = found.weights
    block = data.mix.block
    if isinstance(data, PretrainData) and data.stages:
        if any(stage.step * batch % block for stage in data.stages):
            raise UsageError(
                f"data.stages: a stage begins with a block of {block} examples; with {batch} a step, steps are "
                f"multiples of {block // np.gcd(block, batch)}. Change the steps, train.batch or data.mix.block"
            )
        stages = [(stage.step, _positive(stage.weights)) for stage in data.stages]
        stages = stages if stages[0][0] == 0 else [(0, _positive(found.weights)), *stages]
        weights = [(step * batch, of_stage) for step, of_stage in stages]
    stop = data.mix.stop
    mixture = Mixture(found.train, weights, seed=seed, block_size=block, stop=stop, shuffle=data.mix.shuffle)
    if not mixture.endless and len(mixture) < steps * batch:
        raise UsageError(
            f"data.mix.stop: {stop} ends the data after {len(mixture)} examples, and train.steps = {steps} of "
            f"{batch} need {steps * batch}; train for {len(mixture) // batch} steps, or use `stop: restart`"
        )
    return mixture


def made_tokenizer(wanted: str | BpeSpec, data: LmData, template: str | None, *, pairs: bool = False) -> Path:
    """The folder of a tokenizer: one that exists, or one made of the training texts and kept in the cache.

    `pairs` says that rows are preference pairs, not conversations.
    """
    if isinstance(wanted, str) and wanted != "characters":
        return resolve(wanted, kind="model", allow=("*.json", "*.jinja", "*.txt", "*.model"))
    sources = [data.train[name] for name in data.trained]
    files = [(_shards(source), source.key if isinstance(source, TextSource) else None) for source in sources]
    # What a chat template writes around the texts has to have tokens too.
    around = [] if isinstance(data, PretrainData) else ["system\nuser\nassistant\n", template or ""]
    identity = [repr(wanted), around, pairs, [[key, *map(str, found)] for found, key in files]]
    folder = cache_root() / "tokenizers" / _digest(identity)
    if not folder.exists():
        found_texts = (_messages(found, pairs=pairs) if key is None else _texts(found, key) for found, key in files)
        texts = chain(around, chain.from_iterable(found_texts))
        made = train_bpe(texts, wanted.bpe) if isinstance(wanted, BpeSpec) else character_tokenizer(texts)
        _save_whole(made, folder)
    return folder


def kept_tokenizer(tokenizer: Tokenizer) -> Path:
    """A folder in the cache with that tokenizer, chat template included."""
    folder = cache_root() / "tokenizers" / _digest([tokenizer.fingerprint, tokenizer.chat_template])
    if not folder.exists():
        _save_whole(tokenizer, folder)
    return folder


def bytes_of_tokens(tokenizer: Tokenizer, vocab: int) -> np.ndarray:
    """UTF-8 bytes of each token (vocab), 0 for special ones and for rows of the embedding without a token."""
    sizes = [
        0 if token in tokenizer.special_ids else len(tokenizer.piece(token)) for token in range(tokenizer.vocab_size)
    ]
    return np.pad(np.array(sizes, np.int64), (0, vocab - tokenizer.vocab_size))


def held_out(documents: np.ndarray, share: float) -> np.ndarray:
    """The examples to hold out, ascending: those of whole documents in a random order, the same for every run.

    By documents, so that little of a text is on both sides; the last one is divided, so that the share is exact.
    """
    names, numbers = np.unique(documents, return_inverse=True)
    order = permute(numbers, len(names), np.array(stream_key(0, "holdout"), np.uint64))
    return np.sort(np.argsort(order, kind="stable")[: int(len(documents) * share)])


def _split(data: LmData, examples: Callable[[Source], Made[Item]]) -> Data[Item]:
    """The training sources without what is held out of them, and all that is evaluated on."""
    trained: dict[str, Dataset[Item]] = {}
    evaluated: dict[str, Dataset[Item]] = {}
    contents: dict[str, str] = {}
    for part, name, source in data.sources:
        place = f"data.{part}.{name}"
        whole, stores, documents = examples(source)
        contents[place] = _digest([_content(store) for store in stores])
        if len(whole) == 0:
            raise UsageError(f"{place}: {source.path} has no example for data.context = {data.context} tokens")
        if part == "eval" or name not in data.trained:
            evaluated[name] = whole
            continue
        if not data.holdout:
            trained[name] = whole
            continue
        held = held_out(documents, data.holdout)
        if not len(held):
            raise UsageError(
                f"data.holdout: {data.holdout:g} of the {len(whole)} examples of {name!r} is none; hold out more"
            )
        trained[name] = Part(whole, np.setdiff1d(np.arange(len(whole)), held, assume_unique=True))
        evaluated[name] = Part(whole, held)
        contents[place] = _digest([contents[place], HOLDOUT])
    return Data(trained, evaluated, {name: data.weights[name] for name in trained}, contents)


def _content(store: TokenStore) -> list[Any]:
    """The recipe and the files of a store, by their checksums where they are local."""
    files = [[record.checksum or record.shard.stamp, record.shard.split] for record in store.ledger.shards]
    return [store.ledger.fingerprint, store.ledger.recipe, files]


def _positive(weights: Mapping[str, float]) -> dict[str, float]:
    return {name: weight for name, weight in weights.items() if weight > 0}


def _check_template(data: ChatData, tokenizer: Path) -> None:
    if data.format == "chat" and cached_tokenizer(str(tokenizer)).chat_template is None:
        raise UsageError(
            f"data.format: the tokenizer in {tokenizer} has no chat template to write conversations with; give one as "
            "model.chat_template, or use `format: plain` for a prompt and its answer"
        )


def _stored(source: Source, encoder: Encoder) -> TokenStore:
    """The tokens of a source; those that the data step `tokenize` has made are taken as they are."""
    made = Path(source.path).expanduser()
    if (made / LEDGER).is_file():
        wanted = Ledger(encoder.tokenizer, encoder.fingerprint, encoder.vocab_size, encoder.masked, encoder.recipe)
        store = TokenStore.open(made)
        store.ledger.check_recipe(wanted, made)
        return store
    found = _shards(source)
    identity = [encoder.fingerprint, encoder.recipe, [str(shard) for shard in found]]
    return build_store(cache_root() / "tokens" / _digest(identity), found, encoder, workers=_workers(found))


def _shards(source: Source) -> list[Shard]:
    """Local files and patterns as they are; names of datasets through the cache."""
    path = os.path.expanduser(source.path)
    known = any(mark in path for mark in "*?[") or "://" in path or os.path.exists(path)
    if not known and Path(path).suffix in (*FORMATS, *COMPRESSED):  # not a name on the Hub
        raise UsageError(f"data: there is no file {path} in {Path.cwd()}")
    split = source.split if isinstance(source, TextSource) else None
    return shards(path if known else resolve(path, kind="dataset"), split=split)


def _workers(found: list[Shard]) -> int:
    """Processes are worth their start only for many megabytes."""
    size = sum(shard.size for shard in found)
    return 1 if size < 50e6 else min(len(found), os.cpu_count() or 1)


def _texts(found: Iterable[Shard], key: str) -> Iterator[str]:
    for shard in found:
        for row in read_rows(shard, text_key=key):
            yield from _strings(row.get(key, row))


def _messages(found: Iterable[Shard], *, pairs: bool) -> Iterator[str]:
    """What conversations, or both of each pair, say."""
    for shard in found:
        for number, row in numbered_rows(shard):
            try:
                yield from _strings(pair(row) if pairs else conversation(row))
            except UsageError as error:
                raise UsageError(f"{shard.place(number)}: {error}") from error


def _save_whole(tokenizer: Tokenizer, folder: Path) -> None:
    """Killed at any moment, the cache has all of a tokenizer or none of it; of two that make it one is kept."""
    part = folder.with_name(f".{folder.name}.part-{uuid.uuid4().hex[:8]}")
    try:
        tokenizer.save(part)
        part.rename(folder)
    except OSError:
        if not folder.exists():
            raise
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _strings(value: Any) -> Iterator[str]:
    """All texts inside a row: a conversation has them at several places."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from _strings(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _strings(one)


def _digest(identity: Any) -> str:
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]
