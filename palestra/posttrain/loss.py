"""The policy loss: a sum over trainable tokens, composed from an algorithm's parts, and sums for its metrics."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from palestra.lm.batch import Batch, score
from palestra.lm.engine import Loss, LossFunction
from palestra.lm.model import Transformer
from palestra.lm.moe import router_terms
from palestra.posttrain.advantages import sequence_means
from palestra.posttrain.batch import ESTIMATORS
from palestra.rl import kl, losses
from palestra.rl.losses import LOG_RATIO_LIMIT, TrustTerms
from palestra.spec.algorithm import AlgorithmSpec, ClippedWeightSpec, ClipSpec, SoftGateSpec, TvMaskSpec

_READ = ("anchor", "behavior", "advantages", "weights", "correction", "kept", "reference")


class TokenLosses(NamedTuple):
    """Of every token of a batch; 0 where it is not trained."""

    losses: Tensor
    """(T), to be weighted and summed."""
    terms: dict[str, Tensor]
    """(T) each, without gradients: see `averages`."""


def policy_loss(algorithm: AlgorithmSpec, temperature: float) -> LossFunction:
    """The loss of batches of `with_advantages`, whose tokens were sampled at this temperature."""

    def loss(model: Transformer, batch: Batch) -> Loss:
        scored = score(model, batch, temperature=temperature)
        tokens = token_losses(algorithm, batch, scored.logprobs, scored.entropy)
        terms = {name: values.sum() for name, values in tokens.terms.items()}
        total = (batch.per_token["weights"] * tokens.losses).sum()
        return Loss(total, terms, router_terms(model, scored.router, batch))

    return loss


def token_losses(algorithm: AlgorithmSpec, batch: Batch, logprobs: Tensor, entropy: Tensor) -> TokenLosses:
    """Of log-probabilities and entropies (T) by the policy that is trained."""
    trained = batch.loss_mask > 0
    inputs = {name: torch.where(trained, batch.per_token[name], 0.0) for name in _READ if name in batch.per_token}
    logprobs, entropy = torch.where(trained, logprobs, 0.0), torch.where(trained, entropy, 0.0)
    ratio = _ratio(algorithm, batch, logprobs - inputs["anchor"])
    surrogate = _surrogate(algorithm, inputs, logprobs, ratio)
    # Constants: how much of a token's loss counts.
    stays = torch.ones_like(logprobs) * inputs.get("correction", 1.0) * inputs.get("kept", 1.0)
    losses = surrogate.loss * stays
    now = logprobs.detach()
    weight = (now - inputs["behavior"]).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    terms = {
        "tokens": torch.ones_like(now),
        "policy": inputs["weights"] * losses.detach(),
        "ratio": ratio.detach(),
        "clipped_low": surrogate.low,
        "clipped_high": surrogate.high,
        "masked": stays == 0,
        "weight": weight,
        "weight_squared": weight.square(),
        "kl_behaviour": kl.k3(inputs["behavior"], now, clamp=LOG_RATIO_LIMIT),
        "entropy": entropy.detach(),
    }
    if "fresh" in batch.per_token:
        terms["fresh"] = batch.per_token["fresh"]
        terms["mismatch"] = terms["kl_behaviour"] * terms["fresh"]
    if "reference" in inputs:
        terms["kl_reference"] = kl.k3(now, inputs["reference"], clamp=LOG_RATIO_LIMIT)
    if algorithm.kl.where == "loss":
        if "reference" not in inputs:
            raise ValueError("a KL in the loss needs `reference`, the log-probabilities by the reference model")
        estimate = ESTIMATORS[algorithm.kl.estimator](logprobs, inputs["reference"], clamp=LOG_RATIO_LIMIT)
        losses = losses + algorithm.kl.coefficient * estimate
    if algorithm.log_ratio_penalty:
        moved = (logprobs - inputs["behavior"]).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        losses = losses + algorithm.log_ratio_penalty * moved.square()
    if algorithm.entropy:
        losses = losses - algorithm.entropy * entropy
    terms = {name: torch.where(trained, values, 0).to(now.dtype) for name, values in terms.items()}
    return TokenLosses(torch.where(trained, losses, 0.0), terms)


def averages(sums: Mapping[str, Tensor | float]) -> dict[str, float]:
    """Metrics from what an engine returns for `policy_loss` over a batch: sums, all divided by one number.

    Means over the trained tokens: `ratio` of π / anchor; `clipped_low` and `clipped_high`, the shares of tokens that
    the trust region clips; `masked`, the share that masks leave out; `kl_behaviour`, k3 of KL(behavior ‖ π);
    `entropy`; `kl_reference`, k3 of KL(π ‖ reference); and `mismatch`, `kl_behaviour` of the `fresh` tokens alone,
    whose weights were those of this step, if there are any. `effective_samples` is (Σw)² / Σw² of the weights
    w = π / behavior, as a share of the tokens: 1 on-policy. All are 0 where nothing is trained. The loss, its policy
    part and router metrics stay as they are.
    """
    row = token_means(sums, _MEANS)
    weight, squares = row.pop("weight"), row.pop("weight_squared")
    if fresh := row.pop("fresh", 0.0):
        row["mismatch"] /= fresh
    else:
        row.pop("mismatch", None)
    return {**row, "effective_samples": weight**2 / squares if squares else 0.0}


_MEANS = (
    "ratio", "clipped_low", "clipped_high", "masked", "weight", "weight_squared", "kl_behaviour", "entropy",
    "kl_reference",
)  # fmt: skip


def token_means(sums: Mapping[str, Tensor | float], names: Sequence[str]) -> dict[str, float]:
    """The sums with those of the names divided by the number of `tokens`; 0 where nothing is trained."""
    row = {name: float(value) for name, value in sums.items()}
    tokens = row.pop("tokens")
    return {name: value / (tokens or math.inf) if name in names else value for name, value in row.items()}


def _ratio(algorithm: AlgorithmSpec, batch: Batch, log_ratios: Tensor) -> Tensor:
    """π / anchor (T) of each token, or the geometric mean over its sequence's trained tokens (GSPO, eq. 7)."""
    if algorithm.ratio == "sequence":
        places = batch.sequence_ids
        log_ratios = sequence_means(log_ratios[batch.predicted], places[batch.predicted], len(batch))[places]
    return log_ratios.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def _surrogate(algorithm: AlgorithmSpec, inputs: Mapping[str, Tensor], logprobs: Tensor, ratio: Tensor) -> TrustTerms:
    """The policy's loss (T) by the algorithm's trust region."""
    spec, advantages = algorithm.trust, inputs["advantages"]
    match spec:
        case ClipSpec():
            return losses.clipped(ratio, advantages, low=spec.low, high=spec.high, dual=spec.dual)
        case ClippedWeightSpec():
            return losses.clipped_weight(logprobs, ratio, advantages, low=spec.low, high=spec.high)
        case SoftGateSpec():
            return losses.soft_gate(ratio, advantages, positive=spec.positive, negative=spec.negative)
        case TvMaskSpec():
            return losses.tv_mask(logprobs, inputs["anchor"], ratio, advantages, threshold=spec.threshold)
        case _:  # none, or the second-moment mask, which `with_advantages` has made
            return losses.unlimited(ratio, advantages)
