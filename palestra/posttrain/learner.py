"""RL on rollout groups: the batch with its advantages, and the optimizer steps on it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from palestra.data.mixture import permutation, stream_key
from palestra.lm.batch import Batch
from palestra.lm.engine import TrainEngine, logprobs
from palestra.lm.model import Transformer
from palestra.lm.objectives import NextToken
from palestra.posttrain.batch import denominator, informative, pack, shuffled_rewards, with_advantages
from palestra.posttrain.critic import Critic
from palestra.posttrain.loss import averages, policy_loss
from palestra.posttrain.metrics import equal_rewards
from palestra.rollout.types import Group
from palestra.spec.kinds.posttrain import PosttrainSpec


@dataclass(frozen=True)
class AuxiliaryLoss:
    """SFT examples that every optimizer step also trains on."""

    objective: NextToken
    weight: float


class Learner:
    """Turns rollout groups into optimizer steps."""

    def __init__(
        self,
        spec: PosttrainSpec,
        engine: TrainEngine,
        *,
        seed: int,
        reference: Transformer | None = None,
        critic: Critic | None = None,
        auxiliary: AuxiliaryLoss | None = None,
    ):
        self.spec, self.engine, self.seed = spec, engine, seed
        self.reference, self.critic, self.auxiliary = reference, critic, auxiliary
        self._loss = policy_loss(spec.algorithm, spec.rollout.temperature)

    def prepare(self, groups: Sequence[Group], step: int) -> Batch:
        """The groups packed, with everything the loss needs of each token."""
        spec, batch = self.spec, pack(groups, self.spec.algorithm)
        if spec.control == "shuffled_rewards":
            batch = shuffled_rewards(batch, stream_key(self.seed, "control", step))
        temperature, micro = spec.rollout.temperature, spec.train.micro_tokens
        anchor = self.engine.logprobs(batch, temperature=temperature) if spec.algorithm.needs_anchor else None
        reference = None
        if self.reference is not None:
            ranks = self.engine.ranks
            reference = logprobs(self.reference, batch, micro_tokens=micro, temperature=temperature, ranks=ranks)
        values = None if self.critic is None else self.critic.values(batch)
        fresh = (batch.per_token["versions"] == step).float()
        batch = replace(batch, per_token={**batch.per_token, "fresh": fresh})
        return with_advantages(
            batch,
            spec.algorithm,
            max_new_tokens=spec.rollout.max_new_tokens,
            anchor=anchor,
            reference=reference,
            values=values,
        )

    def learn(self, batch: Batch, step: int, between: Callable[[], object]) -> dict[str, float]:
        """Every optimizer step on a batch; the metrics are means over them."""
        train, rows = self.spec.train, []
        for epoch in range(train.epochs):
            for place, part in enumerate(self._minibatches(batch, step, epoch)):
                update = (step * train.epochs + epoch) * train.minibatches + place
                rows.append(self._update(part, update, between))
        means = {name: fmean(row[name] for row in rows if name in row) for name in rows[-1] if name != "mismatch"}
        return means | {name: rows[0][name] for name in ("mismatch",) if name in rows[0]}  # later weights are others

    def _update(self, batch: Batch, update: int, between: Callable[[], object]) -> dict[str, float]:
        train = self.spec.train
        progress = update / (train.steps * train.minibatches * train.epochs)
        weight = denominator(batch, self.spec.algorithm, max_new_tokens=self.spec.rollout.max_new_tokens)
        experts = self.engine.transformer.shape.moe is not None  # whose routers learn from every token
        trained = batch if experts else informative(batch, self.spec.algorithm)
        sums = self.engine.forward_backward(trained, self._loss, weight, between=between)
        lesson = {}
        if self.auxiliary is not None:
            objective, share = self.auxiliary.objective, self.auxiliary.weight
            examples = objective.batch(update)
            told = self.engine.forward_backward(examples, objective.loss, objective.denominator(examples) / share)
            lesson = {"sft/loss": told["loss"] / share}
        stepped = self.engine.optim_step(progress)  # before anything is read: to read is to wait for the device
        row = {"loss": float(sums["loss"]), **averages(sums)}
        row |= {name: float(value) for name, value in (lesson | stepped).items()}
        if self.critic is not None:
            row |= self.critic.learn(batch, progress)
        return row

    def _minibatches(self, batch: Batch, step: int, epoch: int) -> list[Batch]:
        """The batch split by prompts, which are shuffled every epoch."""
        parts = self.spec.train.minibatches
        if parts == 1:
            return [batch]
        group = batch.per_sequence["group"].long().tolist()
        prompts = sorted(set(group))
        parts = min(parts, len(prompts))
        order = permutation(len(prompts), stream_key(self.seed, "minibatches", step, epoch))
        place = {prompts[prompt]: i * parts // len(prompts) for i, prompt in enumerate(order.tolist())}
        return [batch.select([i for i, g in enumerate(group) if place[g] == part]) for part in range(parts)]

    def why_no_gradient(self, groups: Sequence[Group], row: dict[str, float]) -> str | None:
        # Without a comparison within groups, equal rewards teach too.
        if self.spec.algorithm.needs_group and (why := equal_rewards(groups)) is not None:
            return why
        zero = row.get("grad_norm") == 0.0
        return "the gradient is 0: every token is masked or clipped, or every advantage is 0" if zero else None

    def state(self) -> dict[str, Any]:
        """Optimizers, and the value model whole."""
        return {"engine": self.engine.state(), "critic": None if self.critic is None else self.critic.state()}

    def load_state(self, state: dict[str, Any], checkpoint: Path | None = None) -> None:
        """Continue from `state()`; the policy's own weights are in the checkpoint's model."""
        self.engine.load_state(state["engine"], checkpoint)
        if self.critic is not None:
            self.critic.load_state(state["critic"], checkpoint)
