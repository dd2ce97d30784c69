"""From the data of a spec to examples by index: tokenizers are made, texts tokenised once, parts held out."""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np

from palestra.data.cache import cache_root
from palestra.data.chat_encoders import ChatEncoder
from palestra.data.encoders import Encoder, TextEncoder
from palestra.data.example import Documents, Example, Windows
from palestra.data.mixture import Dataset, Mixture, Stages
from palestra.data.readers import Shard, read_rows, shards
from palestra.data.sources import resolve
from palestra.data.store import TokenStore
from palestra.data.tokenise import build_store
from palestra.data.tokenizers import Tokenizer, character_tokenizer, train_bpe
from palestra.errors import UsageError
from palestra.spec.kinds.pretrain import PretrainData
from palestra.spec.kinds.sft import ChatData
from palestra.spec.lm import BpeSpec, Source, TextSource

Item = TypeVar("Item")


@dataclass(frozen=True)
class Data(Generic[Item]):
    """What a run trains on and is evaluated on."""

    train: dict[str, Dataset[Item]]
    evals: dict[str, Dataset[Item]]
    weights: dict[str, float]


@dataclass(frozen=True)
class Part(Generic[Item]):
    """The examples from `start` to before `stop` of a dataset."""

    whole: Dataset[Item]
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def __getitem__(self, index: int) -> Item:
        if not 0 <= index < len(self):
            raise IndexError(f"example {index} of {len(self)}")
        return self.whole[self.start + index]


@dataclass(frozen=True)
class Joined:
    """Windows whose documents are not kept apart."""

    windows: Windows

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> Example:
        example = self.windows[index]
        return Example(example.tokens, np.array([len(example.tokens)]), example.loss)


class Pairs:
    """The chosen and the rejected example of each row; a pair is cut or left out together."""

    def __init__(self, chosen: TokenStore, rejected: TokenStore, data: ChatData):
        sides = [Documents(store, data.context, data.over_long) for store in (chosen, rejected)]
        self._sides = sides
        self._rows = np.arange(len(sides[0]))
        if data.over_long == "drop":
            lengths = [np.diff(np.concatenate([[0], store.ends])) for store in (chosen, rejected)]
            self._sides = [Documents(store, int(max(map(max, lengths))), "truncate") for store in (chosen, rejected)]
            self._rows = np.flatnonzero(np.maximum(*lengths) <= data.context)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> tuple[Example, Example]:
        if not 0 <= index < len(self):
            raise IndexError(f"pair {index} of {len(self)}")
        row = int(self._rows[index])
        return self._sides[0][row], self._sides[1][row]


def text_data(data: PretrainData, tokenizer: Path) -> Data[Example]:
    """Windows of plain texts."""

    def examples(source: Source) -> Dataset[Example]:
        assert isinstance(source, TextSource)
        windows = Windows(_stored(source, TextEncoder.load(tokenizer, text_key=source.key)), data.context)
        return windows if data.documents else Joined(windows)

    return _split(data.train, data.eval, data.holdout, examples)


def chat_data(data: ChatData, tokenizer: Path) -> Data[Example]:
    """Conversations, one an example."""

    def examples(source: Source) -> Dataset[Example]:
        store = _stored(source, ChatEncoder.load(tokenizer, format=data.format))
        return Documents(store, data.context, data.over_long)

    return _split(data.train, data.eval, data.holdout, examples)


def pair_data(data: ChatData, tokenizer: Path) -> Data[tuple[Example, Example]]:
    """Preference pairs."""

    def examples(source: Source) -> Dataset[tuple[Example, Example]]:
        chosen = _stored(source, ChatEncoder.load(tokenizer, format=data.format, side="chosen"))
        rejected = _stored(source, ChatEncoder.load(tokenizer, format=data.format, side="rejected"))
        return Pairs(chosen, rejected, data)

    return _split(data.train, data.eval, data.holdout, examples)


def mixture_of(found: Data[Item], data: PretrainData | ChatData, *, seed: int, batch: int) -> Mixture[Item]:
    """The training examples in the order of a seed; stages begin at their steps."""
    weights: Mapping[str, float] | Stages = found.weights
    if isinstance(data, PretrainData) and data.stages:
        block = data.mix.block
        if any(stage.step * batch % block for stage in data.stages):
            raise UsageError(
                f"data.stages: a stage begins with a block of {block} examples; with {batch} a step, steps are "
                f"multiples of {block // np.gcd(block, batch)}. Change the steps, train.batch or data.mix.block"
            )
        weights = [(stage.step * batch, stage.weights) for stage in data.stages]
    mix = data.mix
    return Mixture(found.train, weights, seed=seed, block_size=mix.block, stop=mix.stop, shuffle=mix.shuffle)


def made_tokenizer(wanted: str | BpeSpec, sources: Mapping[str, TextSource] | Mapping[str, Source]) -> Path:
    """The folder of a tokenizer: one that exists, or one made of the training texts and kept in the cache."""
    if isinstance(wanted, str) and wanted != "characters":
        return resolve(wanted, kind="model", allow=("*.json", "*.jinja", "*.txt", "*.model"))
    files = {name: _shards(source) for name, source in sources.items() if source.weight > 0}
    identity = [repr(wanted), [[str(one) for one in found] for found in files.values()]]
    folder = cache_root() / "tokenizers" / _digest(identity)
    if (folder / "tokenizer.json").exists():
        return folder
    texts = (text for name, found in files.items() for text in _texts(found, getattr(sources[name], "key", "text")))
    made = train_bpe(texts, wanted.bpe) if isinstance(wanted, BpeSpec) else character_tokenizer(texts)
    made.save(folder)
    return folder


def kept_tokenizer(tokenizer: Tokenizer) -> Path:
    """A folder in the cache with that tokenizer, chat template included."""
    folder = cache_root() / "tokenizers" / _digest([tokenizer.fingerprint, tokenizer.chat_template])
    if not (folder / "tokenizer.json").exists():
        tokenizer.save(folder)
    return folder


def bytes_of_tokens(tokenizer: Tokenizer, vocab: int) -> np.ndarray:
    """UTF-8 bytes of each token (vocab), 0 for special ones and for rows of the embedding without a token."""
    sizes = [
        0 if token in tokenizer.special_ids else len(tokenizer.piece(token)) for token in range(tokenizer.vocab_size)
    ]
    return np.pad(np.array(sizes, np.int64), (0, vocab - tokenizer.vocab_size))


def _split(
    train: Mapping[str, Source],
    evals: Mapping[str, Source],
    holdout: float,
    examples: Callable[[Source], Dataset[Item]],
) -> Data[Item]:
    """The training sources without what is held out of them, and all that is evaluated on."""
    trained: dict[str, Dataset[Item]] = {}
    evaluated: dict[str, Dataset[Item]] = {}
    for name, source in train.items():
        whole = examples(source)
        if source.weight == 0:
            evaluated[name] = whole
            continue
        held = int(len(whole) * holdout)
        if holdout and not held:
            raise UsageError(
                f"data.holdout: {holdout:g} of the {len(whole)} examples of {name!r} is none; hold out more"
            )
        trained[name] = Part(whole, 0, len(whole) - held)
        if held:
            evaluated[name] = Part(whole, len(whole) - held, len(whole))
        if len(trained[name]) == 0:
            raise UsageError(f"data.train.{name}: {source.path} has no example of data.context tokens")
    evaluated |= {name: examples(source) for name, source in evals.items()}
    return Data(trained, evaluated, {name: train[name].weight for name in trained})


def _stored(source: Source, encoder: Encoder) -> TokenStore:
    found = _shards(source)
    identity = [encoder.fingerprint, encoder.recipe, [str(shard) for shard in found]]
    return build_store(cache_root() / "tokens" / _digest(identity), found, encoder, workers=_workers(found))


def _shards(source: Source) -> list[Shard]:
    """Local files and patterns as they are; names of datasets through the cache."""
    known = any(mark in source.path for mark in "*?[") or "://" in source.path or os.path.exists(source.path)
    split = source.split if isinstance(source, TextSource) else None
    return shards(source.path if known else resolve(source.path, kind="dataset"), split=split)


def _workers(found: list[Shard]) -> int:
    """Processes are worth their start only for many megabytes."""
    size = sum(shard.size for shard in found)
    return 1 if size < 50e6 else min(len(found), os.cpu_count() or 1)


def _texts(found: Iterable[Shard], key: str) -> Iterator[str]:
    for shard in found:
        for row in read_rows(shard, text_key=key):
            yield from _strings(row.get(key, row))


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
