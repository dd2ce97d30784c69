"""From the data of a spec to examples by index: makes tokenizers, tokenizes texts once, holds parts out."""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np

from palestra.data.cache import cache_root
from palestra.data.encoders import ChatEncoder, Encoder, TextEncoder, cached_tokenizer, conversation, pair
from palestra.data.media import VISION_TOKENS, is_image
from palestra.data.mixture import Dataset, Mixture, Stages, permute, stream_key
from palestra.data.readers import COMPRESSED, FORMATS, Shard, numbered_rows, read_rows, shards
from palestra.data.sources import resolve
from palestra.data.steps.tokenize import build_store
from palestra.data.store import LEDGER, Documents, Example, Ledger, TokenStore, Windows
from palestra.data.tokenizers import SPECIAL_TOKENS, Tokenizer, character_tokenizer, train_bpe
from palestra.errors import UsageError
from palestra.lm.hf import written_whole
from palestra.spec.kinds.lm import ChatData, PretrainData
from palestra.spec.lm import BpeSpec
from palestra.spec.mixture import LmData, Source, TextSource

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


@dataclass(frozen=True)
class Pairs:
    """The chosen and the rejected example of each row."""

    chosen: Documents
    rejected: Documents

    def __len__(self) -> int:
        return len(self.chosen)

    def __getitem__(self, index: int) -> tuple[Example, Example]:
        return self.chosen[index], self.rejected[index]


def _cut(store: TokenStore, data: ChatData) -> Documents:
    """Every document, at most `data.context` tokens of it."""
    return Documents(store, data.context, "error" if data.over_long == "error" else "truncate")


def _usable(stores: Sequence[TokenStore], data: ChatData) -> np.ndarray:
    """The rows of which something is trained on and, where long ones are dropped, that are short enough."""
    usable = np.any([_trained(store, data.context) for store in stores], axis=0)
    if data.over_long == "drop" or any(store.images is not None for store in stores):  # an image cannot be truncated
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
    """Conversations, one an example. One of which truncation leaves nothing to train on is left out."""
    _check_template(data, tokenizer)

    def examples(source: Source) -> Made[Example]:
        store = _stored(source, ChatEncoder.load(tokenizer, format=data.format))
        rows = _usable([store], data)
        return Part(_cut(store, data), rows), [store], np.arange(len(rows))

    return _split(data, examples)


def pair_data(data: ChatData, tokenizer: Path) -> Data[tuple[Example, Example]]:
    """Preference pairs, both of which are truncated or left out together."""
    _check_template(data, tokenizer)

    def examples(source: Source) -> Made[tuple[Example, Example]]:
        load = partial(ChatEncoder.load, tokenizer, format=data.format)
        stores = [_stored(source, load(side=side)) for side in ("chosen", "rejected")]
        rows = _usable(stores, data)
        return Part(Pairs(*(_cut(store, data) for store in stores)), rows), stores, np.arange(len(rows))

    return _split(data, examples)


def mixture_of(sources: Data[Item], data: LmData, *, batch: int, steps: int, seed: int) -> Mixture[Item]:
    """The training examples in the order of a seed, enough for all steps; stages begin at their steps."""
    weights: Mapping[str, float] | Stages = sources.weights
    block = data.mix.block
    if isinstance(data, PretrainData) and data.stages:
        if any(stage.step * batch % block for stage in data.stages):
            raise UsageError(
                f"data.stages: a stage begins with a block of {block} examples; with {batch} a step, steps are "
                f"multiples of {block // np.gcd(block, batch)}. Change the steps, train.batch or data.mix.block"
            )
        stages = [(stage.step, _positive(stage.weights)) for stage in data.stages]
        stages = stages if stages[0][0] == 0 else [(0, _positive(sources.weights)), *stages]
        weights = [(step * batch, of_stage) for step, of_stage in stages]
    stop = data.mix.stop
    mixture = Mixture(sources.train, weights, seed=seed, block_size=block, stop=stop, shuffle=data.mix.shuffle)
    if not mixture.endless and len(mixture) < steps * batch:
        raise UsageError(
            f"data.mix.stop: {stop} ends the data after {len(mixture)} examples, and train.steps = {steps} of "
            f"{batch} need {steps * batch}; train for {len(mixture) // batch} steps, or use `stop: restart`"
        )
    return mixture


def made_tokenizer(
    wanted: str | BpeSpec, data: LmData, template: str | None, *, pairs: bool = False, images: bool = False
) -> Path:
    """The folder of a tokenizer: one that exists, or one made of the training texts and kept in the cache.

    `pairs` says that rows are preference pairs, not conversations; `images`, that it needs tokens for those.
    """
    if isinstance(wanted, str) and wanted != "characters":
        return resolve(wanted, kind="model", allow=("*.json", "*.jinja", "*.txt", "*.model"))
    sources = [data.train[name] for name in data.trained]
    files = [(_shards(source), source.key if isinstance(source, TextSource) else None) for source in sources]
    # What a chat template writes around the texts has to have tokens too.
    around = [] if isinstance(data, PretrainData) else ["system\nuser\nassistant\n", template or ""]
    identity = [repr(wanted), around, pairs, [[key, *map(str, paths)] for paths, key in files], *["images"] * images]
    special = (*SPECIAL_TOKENS, *(VISION_TOKENS if images else ()))
    folder = cache_root() / "tokenizers" / _digest(identity)
    if not folder.exists():
        parts = (_messages(paths, pairs=pairs) if key is None else _texts(paths, key) for paths, key in files)
        texts = chain(around, chain.from_iterable(parts))
        bpe = isinstance(wanted, BpeSpec)
        made = train_bpe(texts, wanted.bpe, special_tokens=special) if bpe else character_tokenizer(texts, special)
        _save_whole(made, folder)
    return folder


def kept_tokenizer(tokenizer: Tokenizer) -> Path:
    """A folder in the cache with that tokenizer, chat template included."""
    limits = [] if tokenizer.pixels is None else [tokenizer.pixels.config()]
    folder = cache_root() / "tokenizers" / _digest([tokenizer.fingerprint, tokenizer.chat_template, *limits])
    if not folder.exists():
        _save_whole(tokenizer, folder)
    return folder


def bytes_of_tokens(tokenizer: Tokenizer, vocab: int) -> np.ndarray:
    """UTF-8 bytes of each token (vocab), 0 for special ones and for rows of the embedding without a token."""
    tokens, special = range(tokenizer.vocab_size), tokenizer.special_ids
    sizes = [0 if token in special else len(tokenizer.piece(token)) for token in tokens]
    return np.pad(np.array(sizes, np.int64), (0, vocab - len(tokens)))


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
        holdout = held_out(documents, data.holdout)
        if not len(holdout):
            raise UsageError(
                f"data.holdout: {data.holdout:g} of the {len(whole)} examples of {name!r} is none; hold out more"
            )
        trained[name] = Part(whole, np.setdiff1d(np.arange(len(whole)), holdout, assume_unique=True))
        evaluated[name] = Part(whole, holdout)
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
            "model.chat_template, or use `format: plain` for a prompt and its completion"
        )


def _stored(source: Source, encoder: Encoder) -> TokenStore:
    """The tokens of a source; those that the data step `tokenize` has made are taken as they are."""
    made = Path(source.path).expanduser()
    if (made / LEDGER).is_file():
        wanted = Ledger(encoder.tokenizer, encoder.fingerprint, encoder.vocab_size, encoder.masked, encoder.recipe)
        store = TokenStore.open(made)
        store.ledger.check_recipe(wanted, made)
        return store
    files = _shards(source)
    identity = [encoder.fingerprint, encoder.recipe, [str(shard) for shard in files]]
    return build_store(cache_root() / "tokens" / _digest(identity), files, encoder, workers=_workers(files))


def _shards(source: Source) -> list[Shard]:
    """Local files and patterns as they are; names of datasets through the cache."""
    path = os.path.expanduser(source.path)
    known = any(mark in path for mark in "*?[") or "://" in path or os.path.exists(path)
    if not known and Path(path).suffix in (*FORMATS, *COMPRESSED):  # not a name on the Hub
        raise UsageError(f"data: there is no file {path} in {Path.cwd()}")
    split = source.split if isinstance(source, TextSource) else None
    return shards(path if known else resolve(path, kind="dataset"), split=split)


def _workers(files: list[Shard]) -> int:
    """Processes are worth their start only for many megabytes."""
    return 1 if sum(shard.size for shard in files) < 50e6 else min(len(files), os.cpu_count() or 1)


def _texts(files: Iterable[Shard], key: str) -> Iterator[str]:
    for shard in files:
        for row in read_rows(shard, text_key=key):
            yield from _strings(row.get(key, row))


def _messages(files: Iterable[Shard], *, pairs: bool) -> Iterator[str]:
    """What conversations, or both of each pair, say."""
    for shard in files:
        for number, row in numbered_rows(shard):
            try:
                yield from _strings(pair(row) if pairs else conversation(row))
            except UsageError as error:
                raise UsageError(f"{shard.place(number)}: {error}") from error


def _save_whole(tokenizer: Tokenizer, folder: Path) -> None:
    """Killed at any moment, the cache has all of a tokenizer or none of it; of two that make it one is kept."""
    try:
        with written_whole(folder) as part:
            tokenizer.save(part)
    except (OSError, UsageError):
        if not folder.exists():
            raise


def _strings(value: Any) -> Iterator[str]:
    """All texts inside a row: a conversation has them at several places."""
    if isinstance(value, str):
        yield value
    elif is_image(value):
        return
    elif isinstance(value, Mapping | list | tuple):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from _strings(part)


def _digest(identity: Any) -> str:
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]
