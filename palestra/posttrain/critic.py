"""The value model of post-training: its predictions before each token, and its loss."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from palestra.lm.batch import Batch, forward
from palestra.lm.engine import Loss, LossFunction, TrainEngine, by_token
from palestra.lm.model import ModelOutput, Transformer
from palestra.lm.moe import router_terms
from palestra.lm.optim import Optimizer
from palestra.lm.ranks import ALONE, Ranks
from palestra.lm.scorer import ScalarModel
from palestra.posttrain.loss import token_means
from palestra.rl.losses import value_loss
from palestra.spec.algorithm import AlgorithmSpec, CriticSpec
from palestra.spec.kinds.posttrain import PosttrainTrain
from palestra.spec.lm import AdamWSpec


class Critic:
    """A separate model with a value head, and its optimizer."""

    def __init__(
        self,
        transformer: Transformer,
        algorithm: AlgorithmSpec,
        train: PosttrainTrain,
        ranks: Ranks = ALONE,
        seed: int | None = None,
    ):
        """`seed` is that of the rounding of weights in bf16."""
        if algorithm.critic is None:
            raise ValueError(f"{algorithm.preset} with `baseline: {algorithm.baseline}` has no critic")
        model = ScalarModel(transformer)
        ranks.shard(model)
        updates = train.steps * train.minibatches * train.epochs
        optim = AdamWSpec(name="adamw", lr=algorithm.critic.lr, weight_decay=0.0)
        self._loss = value_loss_function(algorithm.critic)
        self.engine = TrainEngine(
            model,
            Optimizer(model, optim, updates, seed),
            ranks,
            micro_tokens=train.micro_tokens,
            flops_per_token=transformer.shape.flops_per_token(transformer.shape.context),
        )

    def values(self, batch: Batch) -> Tensor:
        """Its values (T) before each trained token of a batch, for `with_advantages`."""
        engine, model = self.engine, self.engine.model
        assert isinstance(model, ScalarModel)
        return by_token(
            lambda micro: expected(model, micro)[0], model.transformer, batch, engine.ranks, engine.micro_tokens
        )

    def learn(self, batch: Batch, progress: float) -> dict[str, float]:
        """One optimizer step on a (mini)batch of `with_advantages`; its metrics, under critic/."""
        sums = self.engine.forward_backward(batch, self._loss, value_denominator(batch))
        stepped = self.engine.optim_step(progress)
        row = value_averages(sums) | {name: float(value) for name, value in stepped.items()}
        return {f"critic/{name}": value for name, value in row.items()}

    def state(self) -> dict[str, Any]:
        """Its weights and its optimizer's state."""
        return {"model": self.engine.ranks.keep(self.engine.model.state_dict()), "engine": self.engine.state()}

    def load_state(self, state: dict[str, Any], checkpoint: Path | None = None) -> None:
        """Continue from `state()`, of which the shards of several ranks lie in a checkpoint."""
        self.engine.ranks.restore(state["model"], self.engine.model.state_dict(), checkpoint)
        self.engine.load_state(state["engine"], checkpoint)


def expected(model: ScalarModel, batch: Batch) -> tuple[Tensor, ModelOutput]:
    """The values (T) before each trained token, 0 elsewhere; and the transformer's output.

    Before token t it has read tokens up to t - 1. A value after t knows t: as a baseline for t it would cancel the
    difference that t made.
    """
    output = forward(model.transformer, batch)
    predicted = batch.predicted  # never the first of a sequence
    values = model.value(output.hidden.index_select(0, predicted - 1))
    return values.new_zeros(len(batch.tokens)).index_copy(0, predicted, values), output


def value_loss_function(critic: CriticSpec) -> LossFunction:
    """Squared errors, summed over trained tokens, for batches of `with_advantages`; divide by `value_denominator`."""

    def loss(model: ScalarModel, batch: Batch) -> Loss:
        values, output = expected(model, batch)
        trained = batch.loss_mask > 0
        returns, before = (torch.where(trained, batch.per_token[name], 0.0) for name in ("returns", "values"))
        losses = critic.coefficient * torch.where(trained, value_loss(values, returns, before, critic.clip), 0.0)
        now = values.detach()
        clipped = torch.zeros_like(trained) if critic.clip is None else (now - before).abs() > critic.clip
        terms = {
            "tokens": trained,
            "value": now,
            "return": returns,
            "return_squared": returns.square(),
            "error": returns - now,
            "error_squared": (returns - now).square(),
            "clipped": clipped,
        }
        sums = {name: torch.where(trained, term, 0).to(now.dtype).sum() for name, term in terms.items()}
        return Loss(losses.sum(), sums, router_terms(model.transformer, output.router, batch))

    return loss


def value_denominator(batch: Batch) -> float:
    """The divisor of the sum of a (mini)batch's value losses: its trained tokens, at least 1."""
    return max(1.0, float(len(batch.predicted)))


def value_averages(sums: Mapping[str, Tensor | float]) -> dict[str, float]:
    """Metrics from what an engine returns for `value_loss_function`: sums, all divided by one number.

    Means over the trained tokens of `value` and `return`, the share `clipped`, and `explained`: how much of the
    returns' variance the values explain, 1 being all of it and 0 that of the best constant, or if there is none.
    The loss and router metrics stay as they are.
    """
    row = token_means(sums, ("value", "return", "return_squared", "error", "error_squared", "clipped"))
    squares = row.pop("return_squared")
    variance, unexplained = squares - row["return"] ** 2, row.pop("error_squared") - row.pop("error") ** 2
    varied = variance > 1e-6 * squares  # less is the rounding of equal returns
    return {**row, "explained": 1.0 - unexplained / variance if varied else 0.0}
