"""Objectives: next-token prediction, DPO and its relatives, reward models."""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Generic, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from palestra.data.mixture import Dataset, Mixture
from palestra.data.store import Example
from palestra.lm.batch import Batch, forward, score, total_logprob
from palestra.lm.engine import Loss, TrainEngine
from palestra.lm.model import Transformer
from palestra.lm.moe import router_terms
from palestra.lm.scorer import ScalarModel
from palestra.rl.losses import DpoTerms, RewardTerms, dpo_terms, reward_terms
from palestra.spec.kinds.lm import DpoLossSpec, RewardLossSpec

EVAL_BATCH = 64
"""Sequences of an evaluation that are packed together."""
Pair = tuple[Example, Example]
PairLoss = Callable[[nn.Module, Batch], Loss]
Item = TypeVar("Item")


class _Batches(Generic[Item]):
    """The batch of a step from its number alone, and an evaluation of sums over the first examples of each set."""

    group: int

    def __init__(self, mixture: Mixture[Item], evals: Mapping[str, Dataset[Item]], *, batch: int, eval_examples: int):
        self.mixture, self.evals, self.size, self.eval_examples = mixture, evals, batch, eval_examples

    def batch(self, step: int) -> Batch:
        """The examples at the step's positions of the mixture."""
        return self._pack(self.mixture.examples(np.arange(step * self.size, (step + 1) * self.size)))

    @torch.no_grad()
    def evaluate(self, engine: TrainEngine) -> dict[str, float]:
        """The metrics of all evaluation sets together, and of each where there are several."""
        metrics: dict[str, float] = {}
        total: dict[str, float] = defaultdict(float)
        for name, dataset in self.evals.items():
            sums: dict[str, float] = defaultdict(float)
            count, size = min(len(dataset), self.eval_examples), EVAL_BATCH // self.group
            for start in range(0, count, size):
                batch = self._pack([dataset[i] for i in range(start, min(start + size, count))])
                for term, value in self._sums(engine, batch).items():
                    sums[term] += value
            for term, value in sums.items():
                total[term] += value
            if len(self.evals) > 1:
                metrics |= {f"eval/{name}/{metric}": value for metric, value in self._means(sums).items()}
        return {f"eval/{metric}": value for metric, value in self._means(total).items()} | metrics if total else {}

    def _pack(self, examples: Sequence[Item]) -> Batch:
        raise NotImplementedError

    def _sums(self, engine: TrainEngine, batch: Batch) -> dict[str, float]:
        raise NotImplementedError

    def _means(self, sums: Mapping[str, float]) -> dict[str, float]:
        raise NotImplementedError


class NextToken(_Batches[Example]):
    """Minus the log-probability of every token with a loss weight, summed."""

    group = 1

    def __init__(
        self, mixture: Mixture[Example], evals: Mapping[str, Dataset[Example]], bytes_of: np.ndarray, **sizes: int
    ):
        super().__init__(mixture, evals, **sizes)
        self.bytes_of = torch.from_numpy(bytes_of)
        """UTF-8 bytes of each token of the vocabulary; 0 for special ones."""

    def denominator(self, batch: Batch) -> float:
        """The tokens that are predicted."""
        return float(batch.loss_mask.sum())

    def loss(self, model: Transformer, batch: Batch) -> Loss:
        """Summed negative log-likelihood, and what routers add where there are experts."""
        total, router = total_logprob(model, batch)
        return Loss(-total, {}, router_terms(model, router, batch))

    def _pack(self, examples: Sequence[Example]) -> Batch:
        return pack(examples)

    def _sums(self, engine: TrainEngine, batch: Batch) -> dict[str, float]:
        def nats(model: Transformer, micro: Batch) -> Loss:
            scored = score(model, micro, entropy=False)
            return Loss(-(scored.logprobs.double() * micro.loss_mask).sum(), {})

        predicted = batch.loss_mask > 0
        size = int(self.bytes_of[batch.tokens[predicted]].sum())
        return {"nats": float(engine.losses(batch, nats)["loss"]), "tokens": int(predicted.sum()), "bytes": size}

    def _means(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Loss a token and, where the tokens have text, bits a byte."""
        bits = {"bits_per_byte": sums["nats"] / sums["bytes"] / math.log(2)} if sums["bytes"] else {}
        return {"loss": sums["nats"] / sums["tokens"], **bits}


def pack(examples: Sequence[Example]) -> Batch:
    """Examples end to end; the segments of each are sequences of their own."""
    losses = [np.ones(len(example.tokens)) if example.loss is None else example.loss for example in examples]
    return Batch.flat(
        np.concatenate([example.tokens for example in examples], dtype=np.int64),
        np.concatenate([example.segments for example in examples]).tolist(),
        np.concatenate(losses),
        # One with images is one document.
        images=[example.images for example in examples] if any(example.images for example in examples) else (),
    )


class Preferences(_Batches[Pair]):
    """Pairs in batches, the chosen before the rejected; a loss of each pair."""

    group = 2

    def __init__(self, mixture: Mixture[Pair], evals: Mapping[str, Dataset[Pair]], loss: PairLoss, **sizes: int):
        super().__init__(mixture, evals, **sizes)
        self.loss = loss

    def denominator(self, batch: Batch) -> float:
        """The number of pairs."""
        return len(batch) / self.group

    def _pack(self, examples: Sequence[Pair]) -> Batch:
        return pack([example for pair in examples for example in pair])

    def _sums(self, engine: TrainEngine, batch: Batch) -> dict[str, float]:
        """The loss and its terms, and the number of pairs."""
        losses = engine.losses(batch, self.loss, group=self.group)
        return {"pairs": self.denominator(batch)} | {term: float(value) for term, value in losses.items()}

    def _means(self, sums: Mapping[str, float]) -> dict[str, float]:
        return {term: value / sums["pairs"] for term, value in sums.items() if term != "pairs"}


def dpo_loss(spec: DpoLossSpec, reference: Transformer) -> PairLoss:
    """Direct preference optimization against a frozen reference."""

    def loss(model: nn.Module, batch: Batch) -> Loss:
        assert isinstance(model, Transformer)
        scored = score(model, batch, entropy=False)
        with torch.no_grad():
            of_reference = _by_sequence(score(reference, batch, entropy=False).logprobs, batch, spec.averages)
        of_policy = _by_sequence(scored.logprobs, batch, spec.averages)
        terms = dpo_terms(
            *(of_policy[0::2], of_policy[1::2], of_reference[0::2], of_reference[1::2]),
            beta=spec.beta,
            loss=spec.type,
            label_smoothing=spec.label_smoothing,
        )
        return Loss(*_summed(terms), router_terms(model, scored.router, batch))

    return loss


def reward_loss(spec: RewardLossSpec) -> PairLoss:
    """Bradley–Terry: the chosen conversation scores higher."""

    def loss(model: nn.Module, batch: Batch) -> Loss:
        assert isinstance(model, ScalarModel)
        output = forward(model.transformer, batch)
        scores = model.scores_of(output, batch)
        terms = reward_terms(scores[0::2], scores[1::2], margin=spec.margin, center=spec.center)
        return Loss(*_summed(terms), router_terms(model.transformer, output.router, batch))

    return loss


def _summed(terms: DpoTerms | RewardTerms) -> tuple[Tensor, dict[str, Tensor]]:
    """The summed loss and the other sums; data have no pair of which nothing is trained on."""
    sums = {name: value.sum() for name, value in terms._asdict().items()}
    return sums.pop("loss"), sums


def _by_sequence(logprobs: Tensor, batch: Batch, average: bool) -> Tensor:
    """The log-probability of each sequence's completion (B), or its mean over the completion's tokens."""
    zeros = torch.zeros(len(batch), dtype=logprobs.dtype, device=logprobs.device)
    sums = zeros.index_add(0, batch.sequence_ids, logprobs * batch.loss_mask)
    return sums / zeros.index_add(0, batch.sequence_ids, batch.loss_mask.to(zeros)).clamp_min(1) if average else sums
