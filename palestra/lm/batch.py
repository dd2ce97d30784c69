"""A batch of sequences packed into one row, and the one place where tokens are shifted to predictions."""

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from palestra.data.media import Image, rope_positions
from palestra.lm import native
from palestra.lm.attention import PackedAttention, Shared, TreeAttention, shared, spread
from palestra.lm.head import token_logprobs, weighted_logprob
from palestra.lm.layers import sent
from palestra.lm.model import Attend, ModelOutput, Transformer
from palestra.lm.vision import Seen


@dataclass(frozen=True)
class Batch:
    """Sequences end to end. Index t of every per-token array means token t, never the prediction at t.

    Lengths of a packed window's documents count as sequences: no attention crosses them.
    """

    tokens: Tensor
    """(T) int64."""
    lengths: list[int]
    """Of the B sequences; they add up to T."""
    loss_mask: Tensor
    """(T) FP32: the weight of each token's loss; 0 for prompts. The first token of a sequence is never predicted."""
    per_token: dict[str, Tensor] = field(default_factory=dict)
    """Further arrays (T), such as advantages."""
    per_sequence: dict[str, Tensor] = field(default_factory=dict)
    """Further arrays (B), such as rewards."""
    images: tuple[tuple[Image, ...], ...] = ()
    """Of each of the B sequences; empty where none has any. Their places are counted in their sequences."""
    predicted: Tensor = field(init=False, repr=False, compare=False)
    """Which tokens have a loss weight; kept, because looking for them on a GPU would wait for it."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "predicted", self.loss_mask.nonzero()[:, 0])

    @cached_property
    def shared(self) -> Shared | None:
        """What sequences begin with alike, where that is worth sparing; looked for on the host alone."""
        return shared(self._keys, self.lengths) if self.tokens.device.type == "cpu" else None

    @property
    def _keys(self) -> np.ndarray:
        """The tokens, with another number for each image in place of its own: tokens of all images are alike."""
        keys, numbers = self.tokens.numpy(), {}
        for start, image in self.pictures:
            keys = keys.copy() if not numbers else keys
            keys[start : start + image.tokens] = -1 - numbers.setdefault(image.digest, len(numbers))
        return keys

    @property
    def pictures(self) -> list[tuple[int, Image]]:
        """All images, with their places in the batch."""
        starts = np.cumsum([0, *self.lengths]).tolist()
        return [(starts[row] + image.start, image) for row, images in enumerate(self.images) for image in images]

    @classmethod
    def pack(
        cls,
        sequences: Sequence[Sequence[int] | np.ndarray],
        loss_masks: Sequence[Sequence[float] | np.ndarray] | None = None,
        per_token: Mapping[str, Sequence[Sequence[float] | np.ndarray]] | None = None,
        per_sequence: Mapping[str, Sequence[float]] | None = None,
        images: Sequence[Sequence[Image]] = (),
    ) -> "Batch":
        """Concatenate sequences; without masks every token has weight 1."""
        lengths = [len(s) for s in sequences]
        mask = np.ones(sum(lengths), np.float32) if loss_masks is None else _row(loss_masks, lengths)
        return cls.flat(
            np.concatenate([np.asarray(s, np.int64) for s in sequences] or [np.zeros(0, np.int64)]),
            lengths,
            mask,
            {name: _row(values, lengths) for name, values in (per_token or {}).items()},
            per_sequence,
            images,
        )

    @classmethod
    def flat(
        cls,
        tokens: np.ndarray,
        lengths: list[int],
        loss_mask: np.ndarray,
        per_token: Mapping[str, np.ndarray] | None = None,
        per_sequence: Mapping[str, Sequence[float] | np.ndarray] | None = None,
        images: Sequence[Sequence[Image]] = (),
    ) -> "Batch":
        """The same from arrays in which the sequences are concatenated already."""
        if min(lengths, default=0) < 1:
            raise ValueError("a batch needs sequences of at least one token")
        arrays = {"loss_mask": loss_mask, **(per_token or {})}
        for name, values in arrays.items():
            if len(values) != len(tokens):
                raise ValueError(f"expected one value of {name} for each of {len(tokens)} tokens, got {len(values)}")
        mask, *others = (torch.from_numpy(np.asarray(values, np.float32)) for values in arrays.values())
        mask[np.cumsum([0, *lengths[:-1]])] = 0.0  # the first token of a sequence is never predicted
        return cls(
            torch.from_numpy(tokens),
            lengths,
            mask,
            dict(zip(per_token or {}, others, strict=True)),
            {name: _column(values, len(lengths)) for name, values in (per_sequence or {}).items()},
            tuple(map(tuple, images)) if any(images) else (),
        )

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def cu_seqlens(self) -> Tensor:
        """Bounds of the sequences (B + 1), int32 on the batch's device."""
        return sent(torch.from_numpy(np.cumsum([0, *self.lengths], dtype=np.int32)), self.tokens.device)

    @property
    def positions(self) -> Tensor:
        """(T): each token's place in its sequence; (3, T) where there are images, in time, height and width."""
        if self.images:
            pairs = zip(self.lengths, self.images, strict=True)
            places = np.concatenate([rope_positions(n, images) for n, images in pairs], axis=1)
        else:
            places = np.concatenate([np.arange(n) for n in self.lengths])
        return sent(torch.from_numpy(places), self.tokens.device)

    @property
    def sequence_ids(self) -> Tensor:
        """(T): which sequence a token belongs to."""
        owners = np.repeat(np.arange(len(self.lengths)), self.lengths)
        return sent(torch.from_numpy(owners), self.tokens.device)

    def to(self, device: torch.device | str) -> "Batch":
        """The same on a device."""
        if self.tokens.device == torch.device(device):
            return self
        moved = copy(self)
        for name in ("tokens", "loss_mask", "predicted"):
            object.__setattr__(moved, name, sent(getattr(self, name), device))
        vars(moved)["shared"] = None if self.shared is None else self.shared.to(device)
        for name in ("per_token", "per_sequence"):
            arrays = {key: sent(t, device) for key, t in getattr(self, name).items()}
            object.__setattr__(moved, name, arrays)
        return moved

    def select(self, sequences: Sequence[int]) -> "Batch":
        """Some of the sequences, in that order."""
        if list(sequences) == list(range(len(self))):
            return self
        index = self.token_index(sequences)
        rows = torch.tensor(list(sequences), device=self.tokens.device)
        return Batch(
            self.tokens[index],
            [self.lengths[i] for i in sequences],
            self.loss_mask[index],
            {name: t[index] for name, t in self.per_token.items()},
            {name: t[rows] for name, t in self.per_sequence.items()},
            tuple(self.images[i] for i in sequences) if any(self.images[i] for i in sequences if self.images) else (),
        )

    def group_sizes(self, group: int) -> list[int]:
        """Tokens of each group of `group` consecutive sequences."""
        if len(self) % group:
            raise ValueError(f"{len(self)} sequences do not divide into groups of {group}")
        return np.add.reduceat(self.lengths, np.arange(0, len(self.lengths), group)).tolist()

    def select_groups(self, groups: Sequence[int], group: int) -> "Batch":
        """Some of the groups of `group` consecutive sequences."""
        return self.select([g * group + i for g in groups for i in range(group)])

    def token_index(self, sequences: Sequence[int]) -> Tensor:
        """Where the tokens of `select(sequences)` lie in this batch."""
        starts = np.cumsum([0, *self.lengths])
        index = np.concatenate([np.arange(starts[i], starts[i + 1]) for i in sequences])
        return torch.from_numpy(index).to(self.tokens.device)


@dataclass(frozen=True)
class Scored:
    """The model's scores of a batch's tokens; 0 where the loss mask is."""

    logprobs: Tensor
    """(T) FP32."""
    entropy: Tensor
    """(T) FP32."""
    hidden: Tensor
    """(N, D): the states that the N tokens of `Batch.predicted` were predicted from."""
    router: Tensor | None
    """Router logits (L, T, E) of a mixture of experts."""


@torch.no_grad()
def read_states(model: Transformer, batch: Batch, asked: Tensor) -> Tensor:
    """The hidden states (N, D) of some tokens of a packed batch, to read: by our own attention where there is a kernel.

    They differ from those of `forward`, with which one trains, by rounding.
    """
    if model.layout is not None or not native.available(batch.tokens.new_empty(1, dtype=model.dtype)):
        return forward(model, batch).hidden[asked]
    shared, tokens, positions, seen = _inputs(model, batch)
    wanted, back = (asked if shared is None else shared.place[asked]).unique(return_inverse=True)
    attend = TreeAttention(batch.lengths, shared, wanted, len(model.layers) - 1)
    if model.shape.moe is not None:  # its routers count all tokens
        return model(tokens, positions, attend).hidden[asked]
    return model(tokens, positions, attend, wanted, seen).hidden[back]


def forward(model: Transformer, batch: Batch) -> ModelOutput:
    """Hidden states of a packed batch."""
    output, shared, count = _computed(model, batch)
    if model.layout is not None:
        output = output._replace(hidden=model.layout.all_tokens(output.hidden, count))
    return output if shared is None else output._replace(hidden=spread(output.hidden, shared.place))


def score(model: Transformer, batch: Batch, *, temperature: float = 1.0, entropy: bool = True) -> Scored:
    """log p of every token with a loss weight, given those before it. The one place with the shift by one."""
    output, shared, count = _computed(model, batch)
    asked = batch.predicted  # never the first of a sequence, so asked - 1 is in the same sequence
    before = asked - 1 if shared is None else shared.place[asked - 1]
    if model.layout is not None:  # this rank's are scored here, the others' elsewhere
        mine, before = model.layout.places(before, count)
        asked = asked[mine]
    hidden = spread(output.hidden if model.vocabulary is None else model.vocabulary.hidden(output.hidden), before)
    if model.vocabulary is None:
        scores = token_logprobs(hidden, model.unembed, batch.tokens[asked], temperature, entropy=entropy)
    else:
        scores = model.vocabulary.token_logprobs(hidden, model.unembed, batch.tokens[asked], temperature, entropy)
    zeros = scores[0].new_zeros(len(batch.tokens))
    logprobs, entropies = (zeros.index_copy(0, asked, values) for values in scores)
    if model.layout is not None:
        logprobs, entropies = model.layout.joined(logprobs), model.layout.joined(entropies)
    return Scored(logprobs, entropies, hidden, output.router)


def total_logprob(model: Transformer, batch: Batch) -> tuple[Tensor, Tensor | None]:
    """Σ loss weight · log p over the tokens, and the router's logits where there are experts.

    What `score` would give, with the head computed once: the gradient of every token is known beforehand.
    """
    if model.layout is not None or model.vocabulary is not None:
        scored = score(model, batch, entropy=False)
        return (scored.logprobs * batch.loss_mask).sum(), scored.router
    output, shared, _ = _computed(model, batch)
    asked = batch.predicted
    before = asked - 1 if shared is None else shared.place[asked - 1]
    hidden, targets, weights = spread(output.hidden, before), batch.tokens[asked], batch.loss_mask[asked]
    return weighted_logprob(hidden, model.unembed, targets, weights), output.router


def _computed(model: Transformer, batch: Batch) -> tuple[ModelOutput, Shared | None, int]:
    """The output for the tokens that are computed, but with the router logits of all; and how many these are."""
    output, shared, count = run_layers(model, batch), _shared(model, batch), computed(model, batch)
    if model.layout is not None and output.router is not None:
        router = model.layout.all_tokens(output.router.transpose(0, 1), count).transpose(0, 1)
        output = output._replace(router=router)
    return output, shared, count


def run_layers(model: Transformer, batch: Batch) -> ModelOutput:
    """The output for the tokens that are computed; where they are spread over ranks, for this rank's."""
    layout, count = model.layout, computed(model, batch)
    shared, tokens, positions, seen = _inputs(model, batch)
    attend: Attend = PackedAttention(batch.cu_seqlens, batch.lengths, shared)
    if layout is not None:
        attend, tokens, positions = layout.attend(attend, count), layout.own(tokens), layout.own(positions)
    return model(tokens, positions, attend, seen=seen)


def _inputs(model: Transformer, batch: Batch) -> tuple[Shared | None, Tensor, Tensor, Seen | None]:
    """The tokens that are computed, their positions, and the images among them."""
    shared, seen = _shared(model, batch), _seen(batch)
    if shared is None:
        return None, batch.tokens, batch.positions, seen
    if seen is not None:
        places = shared.place[seen.places]
        own = shared.first[places] == seen.places  # once, where one token stands for several: gradients are added
        seen = Seen(seen.images, places[own], seen.rows[own])
    return shared, batch.tokens[shared.first], batch.positions[..., shared.first], seen


def _seen(batch: Batch) -> Seen | None:
    """The images of a batch, each once: completions of one prompt see the same."""
    pictures = batch.pictures
    if not pictures:
        return None
    unique: dict[bytes, tuple[Image, int]] = {}
    rows, count = [], 0
    for _, image in pictures:
        if image.digest not in unique:
            unique[image.digest] = image, count
            count += image.tokens
        first = unique[image.digest][1]
        rows.append(np.arange(first, first + image.tokens))
    places = np.concatenate([np.arange(start, start + image.tokens) for start, image in pictures])
    both = sent(torch.from_numpy(np.stack([places, np.concatenate(rows)])), batch.tokens.device)
    return Seen([image for image, _ in unique.values()], both[0], both[1])


def computed(model: Transformer, batch: Batch) -> int:
    """How many tokens are computed: each, or those of `batch.shared`."""
    shared = _shared(model, batch)
    return len(batch.tokens) if shared is None else len(shared.first)


def _shared(model: Transformer, batch: Batch) -> Shared | None:
    """Routers of experts count tokens, so theirs are all computed."""
    return batch.shared if model.shape.moe is None else None


def _row(values: Sequence[Sequence[float] | np.ndarray], lengths: list[int]) -> np.ndarray:
    if [len(v) for v in values] != lengths:
        raise ValueError(f"expected one value a token: lengths {lengths}, got {[len(v) for v in values]}")
    return np.concatenate([np.asarray(v, np.float32) for v in values])


def _column(values: Sequence[float] | np.ndarray, sequences: int) -> Tensor:
    if len(values) != sequences:
        raise ValueError(f"expected one value a sequence: {sequences}, got {len(values)}")
    return torch.from_numpy(np.asarray(values, np.float32))
