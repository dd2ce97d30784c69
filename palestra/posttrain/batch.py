"""Groups of trajectories as one packed batch, and all that an algorithm makes of it before the first gradient."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from palestra.lm.batch import Batch
from palestra.posttrain.advantages import overlong_penalty, sequence_means, token_advantages
from palestra.rl import kl
from palestra.rl.losses import LOG_RATIO_LIMIT, second_moment_mask
from palestra.rollout.types import Group, Trajectory
from palestra.spec.algorithm import AlgorithmSpec, BinaryKlMaskSpec, KlSpec, MaskSpec, TruncateSpec

CUT_OFF = ("length", "abort")
"""Reasons to stop that are not the model's own."""
ESTIMATORS = {"k1": kl.k1, "k2": kl.k2, "k3": kl.k3}


def pack(groups: Sequence[Group], algorithm: AlgorithmSpec) -> Batch:
    """The trajectories of groups end to end, those of a group together.

    The loss mask is 1 for tokens that the model drew and that are trained on. Per token: `behavior`, the
    log-probability with which it was drawn, and `versions`. Per sequence: `reward`; `group`, counted from 0;
    `truncated`, 1 where the last generation was cut off; `turn_tokens`, how long that was; and `unscored`, how many
    of its tokens have a log-probability that is no number and are not trained on.
    """
    every = [(number, one) for number, group in enumerate(groups) for one in group.trajectories]
    if not every:
        raise ValueError("a batch needs at least one trajectory")
    lengths, truncated = [len(one.tokens) for _, one in every], [one.stop_reason in CUT_OFF for _, one in every]
    logprobs = _flat((one.logprobs for _, one in every), np.float32)
    drawn, scored = _flat((one.loss_mask for _, one in every), bool), np.isfinite(logprobs)
    left_out = np.repeat([algorithm.truncated.type == "mask" and cut for cut in truncated], lengths)
    starts = np.cumsum([0, *lengths[:-1]])
    return Batch.flat(
        _flat((one.tokens for _, one in every), np.int64),
        lengths,
        drawn & scored & ~left_out,
        per_token={
            "behavior": np.where(scored, logprobs, 0.0),
            "versions": _flat((one.versions for _, one in every), np.float32),
        },
        per_sequence={
            "reward": [one.reward for _, one in every],
            "group": [number for number, _ in every],
            "truncated": truncated,
            "turn_tokens": [_last_turn(one) for _, one in every],
            "unscored": np.add.reduceat(drawn & ~scored, starts, dtype=np.int64),
        },
    )


def _flat(values: Iterable[Sequence[float]], dtype: type) -> np.ndarray:
    """Those of all trajectories end to end: one array for each would take longer than to train on short ones."""
    return np.fromiter(chain.from_iterable(values), dtype)


def with_advantages(
    batch: Batch,
    algorithm: AlgorithmSpec,
    *,
    max_new_tokens: int,
    reference: Tensor | None = None,
    values: Tensor | None = None,
    anchor: Tensor | None = None,
) -> Batch:
    """A batch of `pack` with all that the losses need. It must be whole: baselines, scales and masks are of all of it.

    `reference`, `anchor` and `values` (T) are log-probabilities by the reference model and by the policy as it is now,
    and what the critic expects before each token; each is needed where the algorithm says so. Per token it adds
    `anchor`, `advantages` and `weights`, with which losses of tokens add up to that of the batch times `denominator`;
    where they are used `reference`, `correction` (the weights anchor / behavior), `kept` (0 where the second-moment
    mask is), `values` and `returns`. Per sequence it adds `advantage`, the mean of its tokens.
    """
    given = {"reference": reference, "anchor": anchor, "values": values}
    needed = {
        "reference": algorithm.needs_reference,
        "anchor": algorithm.needs_anchor,
        "values": algorithm.baseline == "critic",
    }
    for name, needs in needed.items():
        if needs and given[name] is None:
            raise ValueError(f"{algorithm.preset} with these settings needs `{name}`, one number a token")
    trained, behavior, places = batch.loss_mask > 0, batch.per_token["behavior"], batch.sequence_ids
    now = behavior if anchor is None else anchor
    held = now if algorithm.anchor == "recomputed" else behavior
    found = token_advantages(
        algorithm,
        _shaped_rewards(batch, algorithm, max_new_tokens),
        batch.per_sequence["group"],
        places,
        trained,
        token_rewards=_kl_rewards(algorithm.kl, held, reference),
        values=values,
    )
    added = {
        "anchor": held,
        "advantages": found.advantages.to(behavior.dtype),
        "weights": _weights(batch, algorithm),
    }
    if reference is not None:
        added["reference"] = reference
    if isinstance(algorithm.correction, BinaryKlMaskSpec):
        both = torch.maximum(kl.binary_kl(held, behavior), kl.binary_kl(behavior, held))
        weights = _ratios(held - behavior).where(both <= algorithm.correction.threshold, 0.0)
        added["correction"] = weights.where(trained, 0.0)
    elif algorithm.correction.type != "none":
        added["correction"] = correction(algorithm.correction, held - behavior, places, trained, len(batch))
    if algorithm.trust.type == "m2_mask":
        stays = second_moment_mask((now - behavior)[trained], threshold=algorithm.trust.threshold)
        added["kept"] = torch.zeros_like(behavior).masked_scatter(trained, stays.to(behavior.dtype))
    if values is not None:
        added["values"], added["returns"] = values, found.returns.to(behavior.dtype)
    mean = sequence_means(added["advantages"][trained], places[trained], len(batch))
    return replace(
        batch,
        per_token={**batch.per_token, **added},
        per_sequence={**batch.per_sequence, "advantage": mean},
    )


def denominator(batch: Batch, algorithm: AlgorithmSpec, max_new_tokens: int) -> float:
    """What the sum of a (mini)batch's losses is divided by.

    Tokens, sequences and prompts count where something of them is trained. The constant counts all sequences: it must
    not depend on what they hold. At least 1, because nothing divided by nothing is nothing.
    """
    trained = batch.loss_mask > 0
    if algorithm.aggregation == "token":
        return max(1.0, float(trained.sum()))
    if algorithm.aggregation == "constant":
        return float(len(batch) * max_new_tokens)
    sequences = torch.unique(batch.sequence_ids[trained])
    if algorithm.aggregation == "sequence":
        return max(1.0, float(len(sequences)))
    return max(1.0, float(len(torch.unique(batch.per_sequence["group"][sequences]))))


def correction(
    spec: TruncateSpec | MaskSpec, log_ratios: Tensor, places: Tensor, trained: Tensor, sequences: int
) -> Tensor:
    """The weights (T) of anchor / behavior, whose logarithms are given, for tokens of so many sequences; 0 elsewhere.

    Left out is left out of the sum alone: the denominator stays, so that a batch of which little is left moves less.
    """
    logs = torch.where(trained, log_ratios, 0.0)
    if spec.level != "token":
        means = sequence_means(logs[trained], places[trained], sequences)
        counts = logs.new_zeros(sequences).index_add(0, places[trained], torch.ones_like(logs[trained]))
        logs = (means if spec.level == "geometric" else means * counts)[places]
    ratios = _ratios(logs)
    if isinstance(spec, TruncateSpec):
        found = ratios.clamp(max=spec.high)
    else:
        found = torch.where((ratios >= spec.low) & (ratios <= spec.high), ratios, 0.0)
    return torch.where(trained, found, 0.0)


def _ratios(logs: Tensor) -> Tensor:
    return logs.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def _shaped_rewards(batch: Batch, algorithm: AlgorithmSpec, max_new_tokens: int) -> Tensor:
    """Rewards (B) less what answers lose for being cut off."""
    rewards = batch.per_sequence["reward"].double()
    if algorithm.truncated.type != "penalize":
        return rewards
    tokens, truncated = batch.per_sequence["turn_tokens"].double(), batch.per_sequence["truncated"] > 0
    return rewards + overlong_penalty(algorithm.truncated, tokens, truncated, max_new_tokens)


def _kl_rewards(spec: KlSpec, logprobs: Tensor, reference: Tensor | None) -> Tensor | None:
    """What each token (T) loses for being unlike the reference."""
    if spec.where != "reward" or reference is None:
        return None
    return -spec.coefficient * ESTIMATORS[spec.estimator](logprobs, reference, clamp=LOG_RATIO_LIMIT)


def _weights(batch: Batch, algorithm: AlgorithmSpec) -> Tensor:
    """What each token's loss (T) counts in the sum that `denominator` divides."""
    if algorithm.aggregation in ("token", "constant"):
        return batch.loss_mask
    owners = batch.sequence_ids
    if algorithm.aggregation == "prompt":
        owners = batch.per_sequence["group"].long()[owners]
    tokens = batch.loss_mask.new_zeros(int(owners.max()) + 1).index_add(0, owners, batch.loss_mask)
    return batch.loss_mask / tokens.clamp_min(1)[owners]


def _last_turn(trajectory: Trajectory) -> int:
    """How many tokens the last generation has."""
    begin, end = trajectory.turns[-1] if trajectory.turns else (0, len(trajectory.tokens))
    return sum(trajectory.loss_mask[begin:end])
