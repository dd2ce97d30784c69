"""Objectives: next-token prediction, DPO and its relatives, reward models."""

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from palestra.data.mixture import Dataset, Mixture
from palestra.data.store import Example
from palestra.lm.batch import Batch, Scored, forward, score
from palestra.lm.engine import Loss, TrainEngine
from palestra.lm.model import Transformer
from palestra.lm.moe import router_terms
from palestra.lm.scorer import ScalarModel
from palestra.rl.preference import DpoTerms, RewardTerms, dpo_terms, reward_terms
from palestra.spec.kinds.lm import DpoLossSpec, RewardLossSpec

EVAL_BATCH = 64


class NextToken:
    """Minus the log-probability of every token with a loss weight, summed."""

    group = 1

    def __init__(
        self,
        mixture: Mixture[Example],
        evals: Mapping[str, Dataset[Example]],
        bytes_of: np.ndarray,
        *,
        batch: int,
        eval_examples: int,
    ):
        self.mixture, self.evals, self.size, self.eval_examples = mixture, evals, batch, eval_examples
        self.bytes_of = torch.from_numpy(bytes_of)
        """UTF-8 bytes of each token of the vocabulary; 0 for special ones."""

    def batch(self, step: int) -> Batch:
        """The examples at the step's positions of the mixture."""
        return pack(self.mixture.examples(np.arange(step * self.size, (step + 1) * self.size)))

    def denominator(self, batch: Batch) -> float:
        """The tokens that are predicted."""
        return float(batch.loss_mask.sum())

    def loss(self, model: Transformer, batch: Batch) -> Loss:
        """Summed negative log-likelihood, and what routers add where there are experts."""
        scored = score(model, batch, entropy=False)
        total = -(scored.logprobs * batch.loss_mask).sum()
        return Loss(total, {}, router_terms(model, scored.router, batch))

    @torch.no_grad()
    def evaluate(self, engine: TrainEngine) -> dict[str, float]:
        """Loss a token and bits a byte of each evaluation set and of all together."""
        found: dict[str, float] = {}
        sums = torch.zeros(3, dtype=torch.float64)
        for name, dataset in self.evals.items():
            of_set = self._sums(engine, dataset)
            sums += of_set
            if len(self.evals) > 1:
                found |= {f"eval/{name}/{metric}": value for metric, value in _rates(of_set).items()}
        return {f"eval/{metric}": value for metric, value in _rates(sums).items()} | found if self.evals else {}

    def _sums(self, engine: TrainEngine, dataset: Dataset[Example]) -> torch.Tensor:
        """Nats, tokens and bytes (3) over the first examples of a set."""
        sums = torch.zeros(3, dtype=torch.float64)
        count = min(len(dataset), self.eval_examples)
        for start in range(0, count, EVAL_BATCH):
            batch = pack([dataset[i] for i in range(start, min(start + EVAL_BATCH, count))])
            nats = torch.zeros((), dtype=torch.float64)
            for micro, counts in engine.ranks.micro_batches(batch, engine.micro_tokens, self.group):
                scored: Scored = score(engine.transformer, micro.to(engine.device), entropy=False)
                nats -= counts * (scored.logprobs.double() * micro.loss_mask.to(engine.device)).sum().cpu()
            predicted = batch.loss_mask > 0
            size = self.bytes_of[batch.tokens[predicted]].sum()
            sums += torch.stack([engine.ranks.sum({"nats": nats})["nats"], predicted.sum(), size])
        return sums


def pack(examples: Sequence[Example]) -> Batch:
    """Examples end to end; the segments of each are sequences of their own."""
    tokens, masks = [], []
    for example in examples:
        ends = np.cumsum(example.segments)
        tokens += np.split(example.tokens, ends[:-1])
        loss = np.ones(len(example.tokens), bool) if example.loss is None else example.loss
        masks += np.split(loss, ends[:-1])
    return Batch.pack(tokens, masks)


def _rates(sums: torch.Tensor) -> dict[str, float]:
    nats, tokens, size = sums.tolist()
    rates = {"loss": nats / tokens}
    if size:
        rates["bits_per_byte"] = nats / size / math.log(2)
    return rates


Pair = tuple[Example, Example]
PairLoss = Callable[[nn.Module, Batch], Loss]
EVAL_PAIRS = 32


class Preferences:
    """Pairs in batches, the chosen before the rejected; a loss of each pair."""

    group = 2

    def __init__(
        self,
        mixture: Mixture[Pair],
        evals: Mapping[str, Dataset[Pair]],
        loss: PairLoss,
        *,
        batch: int,
        eval_examples: int,
    ):
        self.mixture, self.evals, self.loss, self.size, self.eval_examples = mixture, evals, loss, batch, eval_examples

    def batch(self, step: int) -> Batch:
        """The pairs at the step's positions of the mixture."""
        return pack_pairs(self.mixture.examples(np.arange(step * self.size, (step + 1) * self.size)))

    def denominator(self, batch: Batch) -> float:
        """The number of pairs."""
        return len(batch) / self.group

    @torch.no_grad()
    def evaluate(self, engine: TrainEngine) -> dict[str, float]:
        """The mean loss and its terms over the pairs of each evaluation set and of all together."""
        found: dict[str, float] = {}
        totals: dict[str, float] = {}
        pairs = 0
        for name, dataset in self.evals.items():
            count = min(len(dataset), self.eval_examples)
            sums = self._sums(engine, dataset, count)
            totals = {term: totals.get(term, 0.0) + value for term, value in sums.items()}
            pairs += count
            if len(self.evals) > 1:
                found |= {f"eval/{name}/{term}": value / count for term, value in sums.items()}
        return {f"eval/{term}": value / pairs for term, value in totals.items()} | found

    def _sums(self, engine: TrainEngine, dataset: Dataset[Pair], count: int) -> dict[str, float]:
        """The loss and its terms, summed over the first pairs of a set."""
        sums: dict[str, float] = {}
        for start in range(0, count, EVAL_PAIRS):
            batch = pack_pairs([dataset[i] for i in range(start, min(start + EVAL_PAIRS, count))])
            for term, value in engine.losses(batch, self.loss, group=self.group).items():
                sums[term] = sums.get(term, 0.0) + float(value)
        return sums


def pack_pairs(pairs: Sequence[Pair]) -> Batch:
    """Chosen, rejected, chosen, rejected, …"""
    return pack([example for both in pairs for example in both])


def dpo_loss(spec: DpoLossSpec, reference: Transformer) -> PairLoss:
    """Direct preference optimization against a frozen reference."""

    def loss(model: nn.Module, batch: Batch) -> Loss:
        assert isinstance(model, Transformer)
        scored = score(model, batch, entropy=False)
        with torch.no_grad():
            held = _by_sequence(score(reference, batch, entropy=False).logprobs, batch, spec.averages)
        answers = _by_sequence(scored.logprobs, batch, spec.averages)
        terms = dpo_terms(
            answers[0::2],
            answers[1::2],
            held[0::2],
            held[1::2],
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
