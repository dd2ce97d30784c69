"""The loss of a policy: a sum over trainable tokens, put together from an algorithm's parts, and sums for people."""

from collections.abc import Mapping
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
    """Of every token of a batch; 0 where nothing is trained."""

    losses: Tensor
    """(T), to be weighted and added up."""
    terms: dict[str, Tensor]
    """(T) each, without gradients: see `averages`."""


def policy_loss(algorithm: AlgorithmSpec, temperature: float) -> LossFunction:
    """The loss of batches of `with_advantages`, whose tokens were drawn at this temperature."""

    def loss(model: Transformer, batch: Batch) -> Loss:
        scored = score(model, batch, temperature=temperature)
        found = token_losses(algorithm, batch, scored.logprobs, scored.entropy)
        terms = {name: values.sum() for name, values in found.terms.items()}
        total = (batch.per_token["weights"] * found.losses).sum()
        return Loss(total, terms, router_terms(model, scored.router, batch))

    return loss


def token_losses(algorithm: AlgorithmSpec, batch: Batch, logprobs: Tensor, entropy: Tensor) -> TokenLosses:
    """Of log-probabilities and entropies (T) by the policy that is trained."""
    trained = batch.loss_mask > 0
    held = {name: torch.where(trained, batch.per_token[name], 0.0) for name in _READ if name in batch.per_token}
    logprobs, entropy = torch.where(trained, logprobs, 0.0), torch.where(trained, entropy, 0.0)
    ratio = _ratio(algorithm, batch, logprobs - held["anchor"])
    surrogate = _surrogate(algorithm, held, logprobs, ratio)
    stays = torch.ones_like(logprobs)
    for name in ("correction", "kept"):  # constants: how much of a token's loss counts
        stays = stays * held.get(name, 1.0)
    losses = surrogate.loss * stays
    now = logprobs.detach()
    weight = (now - held["behavior"]).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    terms = {
        "tokens": torch.ones_like(now),
        "policy": held["weights"] * losses.detach(),
        "ratio": ratio.detach(),
        "clipped_low": surrogate.low,
        "clipped_high": surrogate.high,
        "masked": stays == 0,
        "weight": weight,
        "weight_squared": weight.square(),
        "kl_behaviour": kl.k3(held["behavior"], now, clamp=LOG_RATIO_LIMIT),
        "entropy": entropy.detach(),
    }
    if "reference" in held:
        terms["kl_reference"] = kl.k3(now, held["reference"], clamp=LOG_RATIO_LIMIT)
    if algorithm.kl.where == "loss":
        if "reference" not in held:
            raise ValueError("a KL in the loss needs `reference`, the log-probabilities by the reference model")
        estimate = ESTIMATORS[algorithm.kl.estimator](logprobs, held["reference"], clamp=LOG_RATIO_LIMIT)
        losses = losses + algorithm.kl.coefficient * estimate
    if algorithm.log_ratio_penalty:
        moved = (logprobs - held["behavior"]).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        losses = losses + algorithm.log_ratio_penalty * moved.square()
    if algorithm.entropy:
        losses = losses - algorithm.entropy * entropy
    return TokenLosses(
        torch.where(trained, losses, 0.0),
        {name: torch.where(trained, values, 0).to(now.dtype) for name, values in terms.items()},
    )


def averages(sums: Mapping[str, Tensor | float]) -> dict[str, float]:
    """What people look at, from what an engine gives for `policy_loss` over a batch: sums, all divided by one number.

    Means over the trained tokens: `ratio` of π / anchor; `clipped_low` and `clipped_high`, the shares of tokens that
    the trust region holds; `masked`, the share that masks leave out; `kl_behaviour`, k3 of KL(behavior ‖ π);
    `entropy`; and `kl_reference`, k3 of KL(π ‖ reference). `effective_samples` is (Σw)² / Σw² of the weights
    w = π / behavior, as a share of the tokens: 1 where the tokens are the policy's own. All are 0 where nothing is
    trained. The loss, the part of it that is the policy's, and what routers say stay as they are.
    """
    found = {name: float(value) for name, value in sums.items()}
    tokens, weight, squares = (found.pop(name) for name in ("tokens", "weight", "weight_squared"))
    share = 1.0 / tokens if tokens else 0.0
    means = {name: value * share if name in _MEANS else value for name, value in found.items()}
    return {**means, "effective_samples": share * weight**2 / squares if squares else 0.0}


_MEANS = ("ratio", "clipped_low", "clipped_high", "masked", "kl_behaviour", "entropy", "kl_reference")


def _ratio(algorithm: AlgorithmSpec, batch: Batch, log_ratios: Tensor) -> Tensor:
    """π / anchor (T) of each token, or the geometric mean over its sequence's trained tokens (GSPO, eq. 7)."""
    if algorithm.ratio == "sequence":
        places = batch.sequence_ids
        log_ratios = sequence_means(log_ratios[batch.predicted], places[batch.predicted], len(batch))[places]
    return log_ratios.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def _surrogate(algorithm: AlgorithmSpec, held: Mapping[str, Tensor], logprobs: Tensor, ratio: Tensor) -> TrustTerms:
    """The policy's loss (T) by the algorithm's trust region."""
    spec, advantages = algorithm.trust, held["advantages"]
    match spec:
        case ClipSpec():
            return losses.clipped(ratio, advantages, low=spec.low, high=spec.high, dual=spec.dual)
        case ClippedWeightSpec():
            return losses.clipped_weight(logprobs, ratio, advantages, low=spec.low, high=spec.high)
        case SoftGateSpec():
            return losses.soft_gate(ratio, advantages, positive=spec.positive, negative=spec.negative)
        case TvMaskSpec():
            return losses.tv_mask(logprobs, held["anchor"], ratio, advantages, threshold=spec.threshold)
        case _:  # none, or the second-moment mask, which `with_advantages` has made
            return losses.unlimited(ratio, advantages)
