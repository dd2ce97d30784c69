"""The critic at work: a model of its own with a scalar head, trained beside the policy."""

from typing import Any

from torch import Tensor

from palestra.lm.batch import Batch
from palestra.lm.engine import TrainEngine
from palestra.lm.model import Transformer
from palestra.lm.optim import Optimiser
from palestra.lm.ranks import Ranks
from palestra.lm.value_head import ScalarModel
from palestra.posttrain.critic import expected_by, value_averages, value_denominator, value_loss_function
from palestra.spec.algorithm import CriticSpec
from palestra.spec.kinds.posttrain import PosttrainTrain
from palestra.spec.optim import AdamWSpec
from palestra.spec.schedule import Schedule


class Critic:
    """Begins as the policy does, with a head of zeros; `lr` is the policy's, for a spec that has none."""

    def __init__(self, transformer: Transformer, spec: CriticSpec, train: PosttrainTrain, lr: Schedule):
        model = ScalarModel(transformer)
        updates = train.steps * train.minibatches * train.epochs
        optimiser = Optimiser(model, AdamWSpec(name="adamw", lr=spec.lr or lr, weight_decay=0.0), updates)
        self.engine = TrainEngine(model, optimiser, Ranks(), micro_tokens=train.micro_tokens, flops_per_token=0.0)
        self._loss = value_loss_function(spec)

    def values(self, batch: Batch) -> Tensor:
        """What it expects (T) before each trained token."""
        return expected_by(self.engine, batch)

    def learn(self, batch: Batch, progress: float) -> dict[str, float]:
        """One optimizer step on what came of a (mini)batch."""
        sums = self.engine.forward_backward(batch, self._loss, value_denominator(batch))
        told = {name: float(value) for name, value in sums.items()}
        row = {"loss": told["loss"], **value_averages(told), "grad_norm": self.engine.optim_step(progress)["grad_norm"]}
        return {f"critic/{name}": value for name, value in row.items()}

    def state(self) -> dict[str, Any]:
        """Weights and optimizer."""
        weights = {name: tensor.detach() for name, tensor in self.engine.model.state_dict().items()}
        return {"weights": weights, "engine": self.engine.state()}

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from `state()`."""
        self.engine.model.load_state_dict(state["weights"])
        self.engine.load_state(state["engine"])
