"""Next-token prediction: the objective of pretraining and of supervised fine-tuning."""

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from palestra.data.example import Example
from palestra.data.mixture import Dataset, Mixture
from palestra.lm.batch import Batch, Scored, score
from palestra.lm.engine import Loss, TrainEngine
from palestra.lm.model import Transformer
from palestra.lm.moe import router_terms

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
