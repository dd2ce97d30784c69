"""The training engine: gradients summed over micro-batches and ranks, divided once; then one optimizer step."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from palestra.data.store import micro_batches
from palestra.lm.attention import PackedAttention
from palestra.lm.batch import Batch, score
from palestra.lm.layers import TRITON
from palestra.lm.lora import merged_weights
from palestra.lm.model import Transformer
from palestra.lm.moe import RouterTerms, update_bias
from palestra.lm.optim import Ema, Optimizer
from palestra.lm.ranks import ALONE, Ranks, split_again
from palestra.lm.scorer import ScalarModel
from palestra.spec.lm import ComputeSpec


@dataclass(frozen=True)
class Loss:
    """What a loss function gives for some of a batch: sums, never means."""

    total: Tensor
    """The sum over tokens, sequences or pairs; the engine divides it by the whole batch's denominator."""
    terms: dict[str, Tensor]
    """Further sums for people to see, without gradients; divided by the same denominator."""
    routed: RouterTerms | None = None
    """What routers add, summed over all tokens, predicted or not; divided by the whole batch's tokens."""


Work = Callable[[Batch, float], tuple[Tensor, dict[str, Tensor]]]
"""The loss of a micro-batch, with 1, or 0 where it does not count; and what is to be known of it."""
LossFunction = Callable[[Any, Batch], Loss]
"""Of a model, a transformer or one with a scalar head, and some of a batch."""


class TrainEngine:
    """A model and its optimizer. The gradient depends neither on the split into micro-batches nor on the ranks."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        ranks: Ranks,
        *,
        micro_tokens: int,
        flops_per_token: float,
        ema: Ema | None = None,
    ):
        self.model, self.optimizer, self.ranks, self.micro_tokens, self.ema = model, optimizer, ranks, micro_tokens, ema
        self.device = next(model.parameters()).device
        self.flops_per_token = flops_per_token
        """Of a forward pass, for the share of the machine's peak."""
        self._load: Tensor | None = None

    def forward_backward(
        self,
        batch: Batch,
        loss: LossFunction,
        denominator: float,
        *,
        group: int = 1,
        between: Callable[[], object] = lambda: None,
    ) -> dict[str, Tensor]:
        """Add the gradient of (sum of losses) / denominator; the loss and its terms over the whole batch.

        `batch` is that of all ranks: each takes its share. `group` consecutive sequences belong together. `between` is
        called after each micro-batch, for others that share the device.
        """

        def work(micro: Batch, counts: float) -> tuple[Tensor, dict[str, Tensor]]:
            result = loss(self.model, micro)
            total = result.total / denominator
            means = {"loss": total, **{name: value / denominator for name, value in result.terms.items()}}
            if result.routed is not None:
                total = total + result.routed.total / len(batch.tokens)
                means |= {name: value / len(batch.tokens) for name, value in result.routed.terms.items()}
                means["load"] = result.routed.load
            return counts * total, {name: counts * value.detach() for name, value in means.items()}

        sums: dict[str, Tensor] = {}
        micros = self.ranks.micro_batches(batch, self.micro_tokens, group)
        for means in each_micro(self.transformer, micros, work, train=True):
            for name, value in means.items():
                sums[name] = sums.get(name, 0.0) + value
            between()
        load = sums.pop("load", None)
        if load is not None:
            self._load = load if self._load is None else self._load + load
        return self.ranks.sum(sums)

    @torch.no_grad()
    def losses(self, batch: Batch, loss: LossFunction, *, group: int = 1) -> dict[str, Tensor]:
        """The summed loss and its terms over a batch, without a gradient."""

        def work(micro: Batch, counts: float) -> tuple[Tensor, dict[str, Tensor]]:
            result = loss(self.model, micro)
            return result.total, {name: counts * t for name, t in {"loss": result.total, **result.terms}.items()}

        sums: dict[str, Tensor] = {}
        micros = self.ranks.micro_batches(batch, self.micro_tokens, group)
        for values in each_micro(self.transformer, micros, work, train=False):
            for name, value in values.items():
                sums[name] = sums.get(name, 0.0) + value
        return self.ranks.sum(sums)

    def optim_step(self, progress: float) -> dict[str, Any]:
        """Apply the gradient and forget it; `progress` is the fraction of the run that is done.

        What it tells may still be tensors, to read which is to wait for the device.
        """
        split_again(self.model)
        pipeline, norm = self.transformer.pipeline, None
        if pipeline is not None:
            pipeline.add_tied()
            norm = pipeline.norm(self.optimizer.parameters)
        metrics = self.optimizer.step(progress, norm)
        load, self._load = self._load, None
        if (load is None and self.ema is None) or metrics["skipped"]:
            return metrics
        if load is not None:
            update_bias(self.transformer, self.ranks.sum({"load": load})["load"])
        if self.ema is not None:
            self.ema.update(self.model)
        return metrics

    def logprobs(self, batch: Batch, *, temperature: float = 1.0) -> Tensor:
        """log p (T) of every token of `batch` that has a loss weight."""
        return logprobs(
            self.transformer, batch, micro_tokens=self.micro_tokens, temperature=temperature, ranks=self.ranks
        )

    def with_scores(self, batch: Batch, *, temperature: float = 1.0) -> Batch:
        """The batch with `trained_logprobs` and `entropy` of every token that has a loss weight, for people to see."""

        def of(micro: Batch) -> Tensor:
            scored = score(self.transformer, micro, temperature=temperature)
            return torch.stack((scored.logprobs, scored.entropy), 1)

        scores = by_token(of, self.transformer, batch, self.ranks, self.micro_tokens)
        added = dict(zip(("trained_logprobs", "entropy"), scores.unbind(1), strict=True))
        return replace(batch, per_token={**batch.per_token, **added})

    @property
    def transformer(self) -> Transformer:
        """The model, without the scalar head it may have."""
        return self.model.transformer if isinstance(self.model, ScalarModel) else cast(Transformer, self.model)

    def weights(self) -> dict[str, Tensor]:
        """The transformer's parameters, whole on every rank and with adapters merged: what `publish` takes."""
        return self.ranks.gather(merged_weights(self.transformer))

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """The moving average in place of the weights, where there is one."""
        if self.ema is None:
            yield
            return
        split_again(self.model)
        with self.ema.swapped_in(self.model):
            try:
                yield
            finally:
                split_again(self.model)

    def state(self) -> dict[str, Any]:
        """Optimizer and moving average, and the weights themselves where the average stands in the model's folder."""
        if self.ranks.size > 1:
            averaged = None if self.ema is None else self.ema.count
            skipped = int(self.optimizer.skipped)
            return {"skipped": skipped, "averaged": averaged, "shards": self.ranks.keep(self._tensors())}
        return {
            "optimiser": self.optimizer.state(),
            "ema": None if self.ema is None else self.ema.state(),
            "weights": None if self.ema is None else self.ranks.keep(self.optimizer.parameters),
        }

    def _tensors(self) -> dict[str, Tensor]:
        """All tensors of the state that this rank has."""
        columns = self.optimizer.tensors()
        if self.ema is not None:
            columns |= {"average": self.ema.average, "weights": self.optimizer.parameters}
        return {f"{column}/{name}": tensor for column, named in columns.items() for name, tensor in named.items()}

    def load_state(self, state: dict[str, Any], checkpoint: Path | None = None) -> None:
        """Continue from `state()`, of which the shards of several ranks lie in a checkpoint."""
        if "shards" in state:
            self.ranks.restore(state["shards"], self._tensors(), checkpoint)
            self.optimizer.skipped = state["skipped"]
            if self.ema is not None:
                self.ema.count = state["averaged"]
            return
        self.optimizer.load_state(state["optimiser"], partial=self.ranks.partial)
        if self.ema is not None:
            self.ema.load_state(state["ema"], partial=self.ranks.partial)
            self.ranks.scatter(state["weights"], self.model)


def logprobs(
    model: Transformer, batch: Batch, *, micro_tokens: int, temperature: float = 1.0, ranks: Ranks = ALONE
) -> Tensor:
    """log p (T) by a model of every token of `batch` that has a loss weight, where the batch lies."""

    def of(micro: Batch) -> Tensor:
        return score(model, micro, temperature=temperature, entropy=False).logprobs

    return by_token(of, model, batch, ranks, micro_tokens)


@torch.no_grad()
def by_token(
    of: Callable[[Batch], Tensor], model: Transformer, batch: Batch, ranks: Ranks, micro_tokens: int
) -> Tensor:
    """Numbers for every token, (T) or (T, k), which `of` computes with the model for some sequences; on all ranks."""
    parts = micro_batches(batch.lengths, max(micro_tokens, max(batch.lengths)))
    mine, most = ranks.share_of(parts)
    micros = [(batch.select(part), 1.0) for part in mine]
    micros += [(batch.select(parts[0]), 0.0)] * (most - len(mine))
    results = list(each_micro(model, micros, lambda micro, _: ((v := of(micro)).sum(), {"values": v}), train=False))
    values = torch.zeros((len(batch.tokens), *results[0]["values"].shape[1:]), device=batch.tokens.device)
    for part, result in zip(mine, results, strict=False):
        values[batch.token_index(part)] = result["values"].to(values.device)
    return ranks.sum({"": values})[""].to(values.dtype) if ranks.size > 1 else values


def each_micro(
    model: Transformer, micros: Sequence[tuple[Batch, float]], work: Work, *, train: bool
) -> Iterator[dict[str, Tensor]]:
    """Do the work of each micro-batch, and with `train` the backward pass of its loss; what it tells of each."""
    device = next(model.parameters()).device
    moved = ((micro.to(device), counts) for micro, counts in micros)
    if model.pipeline is not None:
        yield from model.pipeline.run(list(moved), work, train=train)
        return
    for micro, counts in moved:
        loss, told = work(micro, counts)
        if train:
            loss.backward()
        yield told


CACHE = "TORCHINDUCTOR_CACHE_DIR"
STEPS_THAT_PAY = 200
"""Compiling a block takes about 20 seconds, and saves a third of a step on a GPU."""


def compile_for_training(model: Transformer, spec: ComputeSpec, device: torch.device) -> None:
    """Compile each block in place, if the spec asks for it or it pays; blocks of one form share the code."""
    pays = device.type == "cuda" and TRITON and spec.steps >= STEPS_THAT_PAY
    if spec.compile == "off" or (spec.compile == "auto" and not pays):
        return
    # Without this each block's number would compile it again.
    torch._dynamo.config.allow_unspec_int_on_nn_module = True
    # Lengths differ from batch to batch: it would be compiled again for each. As a decorator it would import
    # torch._dynamo, 6 s on a slow core, in every process that only reads a model.
    PackedAttention._blocks = torch.compiler.disable(PackedAttention._blocks)
    for block in model.layers:
        block.compile()


@contextmanager
def compile_cache(folder: str | None) -> Iterator[None]:
    """Keep compiled code in a folder meanwhile: torch compiles when a block is first called. None leaves it be."""
    before = os.environ.get(CACHE)
    if folder is not None:
        os.environ[CACHE] = os.path.abspath(folder)
    try:
        yield
    finally:
        os.environ.pop(CACHE, None)
        if before is not None:
            os.environ[CACHE] = before
