"""Groups of trajectories as one packed batch, and everything an algorithm computes of it before the first gradient."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from palestra.data.mixture import permutation
from palestra.lm.batch import Batch
from palestra.posttrain.advantages import Turns, overlong_penalty, sequence_means, token_advantages
from palestra.rl import kl
from palestra.rl.losses import LOG_RATIO_LIMIT, second_moment_mask
from palestra.rollout.types import Group, Trajectory
from palestra.spec.algorithm import AlgorithmSpec, BinaryKlMaskSpec, KlSpec, MaskSpec, TruncateSpec

TRUNCATED = ("length", "abort")
"""Stop reasons that are not the model's own."""
ESTIMATORS = {"k1": kl.k1, "k2": kl.k2, "k3": kl.k3}


def pack(groups: Sequence[Group], algorithm: AlgorithmSpec) -> Batch:
    """The trajectories of groups end to end, those of a group together.

    The loss mask is 1 for tokens that the model sampled and that are trained on. Per token: `behavior`, the
    log-probability with which it was sampled, and `versions`. Per sequence: `reward`; `group`, counted from 0;
    `truncated`, 1 if the last generation was; `turn_tokens`, its length; `turns`, how many; `unscored`, how many of its
    tokens have a non-finite log-probability and are not trained on; and `episode`, counted from 0: rows of one follow
    each other. Where the algorithm tells turns apart, per token also `turn`, its number, and `turn_reward`, on a turn's
    last token.
    """
    every = [(number, t) for number, group in enumerate(groups) for t in group.trajectories]
    if not every:
        raise ValueError("a batch needs at least one trajectory")
    lengths, truncated = [len(t.tokens) for _, t in every], [t.stop_reason in TRUNCATED for _, t in every]
    logprobs = _flat((t.logprobs for _, t in every), np.float32)
    sampled, scored = _flat((t.loss_mask for _, t in every), bool), np.isfinite(logprobs)
    left_out = np.repeat([algorithm.truncated.type == "mask" and cut for cut in truncated], lengths)
    starts = np.cumsum([0, *lengths[:-1]])
    turns = _turn_columns([t for _, t in every]) if algorithm.needs_turns else {}
    return Batch.flat(
        _flat((t.tokens for _, t in every), np.int64),
        lengths,
        sampled & scored & ~left_out,
        per_token={
            "behavior": np.where(scored, logprobs, 0.0),
            "versions": _flat((t.versions for _, t in every), np.float32),
            **turns,
        },
        per_sequence={
            "reward": [t.reward for _, t in every],
            "group": [number for number, _ in every],
            "truncated": truncated,
            "turn_tokens": [_last_turn(t) for _, t in every],
            "turns": [max(1, len(t.turns)) for _, t in every],
            "episode": np.cumsum([t.row == 0 for _, t in every]) - 1,
            "unscored": np.add.reduceat(sampled & ~scored, starts, dtype=np.int64),
        },
        images=[t.media for _, t in every],
    )


def _turn_columns(trajectories: Sequence[Trajectory]) -> dict[str, np.ndarray]:
    """The turn of each token, and the reward of a turn, except the last, on its last token."""
    numbers, rewards = [], []
    for t in trajectories:
        number, reward = np.zeros(len(t.tokens), np.float32), np.zeros(len(t.tokens), np.float32)
        for turn, (begin, end) in enumerate(t.turns):
            number[begin:end] = turn
            if turn < len(t.turns) - 1 and t.turn_rewards:
                reward[end - 1] = t.turn_rewards[turn]
        numbers.append(number)
        rewards.append(reward)
    return {"turn": np.concatenate(numbers), "turn_reward": np.concatenate(rewards)}


def _flat(values: Iterable[Sequence[float]], dtype: type) -> np.ndarray:
    """All trajectories end to end: one array for each would take longer than training on short ones."""
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
    """A batch of `pack` with everything the losses need; whole, as baselines, scales and masks are over all of it.

    `reference`, `anchor` and `values` (T) are log-probabilities by the reference model and by the policy as it is now,
    and what the critic expects before each token; each is needed where the algorithm says so. Per token it adds
    `anchor`, `advantages` and `weights`, with which losses of tokens add up to that of the batch times `denominator`;
    where they are used `reference`, `correction` (the weights anchor / behavior), `kept` (0 where the second-moment
    mask is), `values` and `returns`. Per sequence it adds `advantage`, the mean of its tokens.
    """
    needed = {
        "reference": (algorithm.needs_reference, reference),
        "anchor": (algorithm.needs_anchor, anchor),
        "values": (algorithm.baseline == "critic", values),
    }
    for name, (needs, numbers) in needed.items():
        if needs and numbers is None:
            raise ValueError(f"{algorithm.preset} with these settings needs `{name}`, one number per token")
    trained, behavior, places = batch.loss_mask > 0, batch.per_token["behavior"], batch.sequence_ids
    episodes, first = batch.per_sequence["episode"].long(), _first_rows(batch)
    now = behavior if anchor is None else anchor
    anchored = now if algorithm.anchor == "recomputed" else behavior
    advantages, returns = token_advantages(
        algorithm,
        _shaped_rewards(batch, algorithm, max_new_tokens)[first],
        batch.per_sequence["group"][first],
        episodes[places],
        trained,
        token_rewards=_kl_rewards(algorithm.kl, anchored, reference),
        values=values,
        turns=_turns(batch, algorithm),
    )
    added = {"anchor": anchored, "advantages": advantages.to(behavior.dtype), "weights": _weights(batch, algorithm)}
    if reference is not None:
        added["reference"] = reference
    if isinstance(algorithm.correction, BinaryKlMaskSpec):
        both = torch.maximum(kl.binary_kl(anchored, behavior), kl.binary_kl(behavior, anchored))
        weights = _ratios(anchored - behavior).where(both <= algorithm.correction.threshold, 0.0)
        added["correction"] = weights.where(trained, 0.0)
    elif algorithm.correction.type != "none":
        added["correction"] = correction(algorithm.correction, anchored - behavior, places, trained, len(batch))
    if algorithm.trust.type == "m2_mask":
        stays = second_moment_mask((now - behavior)[trained], threshold=algorithm.trust.threshold)
        added["kept"] = torch.zeros_like(behavior).masked_scatter(trained, stays.to(behavior.dtype))
    if values is not None:
        added["values"], added["returns"] = values, returns.to(behavior.dtype)
    mean = {"advantage": sequence_means(added["advantages"][trained], places[trained], len(batch))}
    return replace(batch, per_token={**batch.per_token, **added}, per_sequence={**batch.per_sequence, **mean})


def shuffled_rewards(batch: Batch, key: int) -> Batch:
    """A batch of `pack` with its rewards permuted across episodes, by a key: a negative control."""
    rewards = batch.per_sequence["reward"][_first_rows(batch)]
    order = permutation(len(rewards), key)
    reward = rewards[order.tolist()][batch.per_sequence["episode"].long()]
    # A shuffled reward belongs to no turn: all of it is the last one's.
    per_token = {name: 0 * column if name == "turn_reward" else column for name, column in batch.per_token.items()}
    return replace(batch, per_token=per_token, per_sequence={**batch.per_sequence, "reward": reward})


def informative(batch: Batch, algorithm: AlgorithmSpec) -> Batch:
    """The batch without sequences that add exactly 0 to its loss: late in training half of the groups are solved.

    At least one stays. Metrics of tokens are then over those that are left; the `denominator` is that of the whole.
    """
    if algorithm.kl.where == "loss" or algorithm.log_ratio_penalty or algorithm.entropy:  # every token adds to these
        return batch
    advantages = torch.where(batch.loss_mask > 0, batch.per_token["advantages"], 0.0)
    adds = advantages.new_zeros(len(batch)).index_add(0, batch.sequence_ids, advantages.abs()) > 0
    return batch.select(adds.nonzero()[:, 0].tolist() or [0])


def denominator(batch: Batch, algorithm: AlgorithmSpec, max_new_tokens: int) -> float:
    """The divisor of the sum of a (mini)batch's losses.

    Tokens, episodes and prompts count if anything of them is trained. The constant counts all episodes: it must not
    depend on their contents. At least 1, so that an empty sum stays 0. An episode of several rows is one completion.
    """
    trained = batch.loss_mask > 0
    if algorithm.aggregation == "token":
        return max(1.0, float(trained.sum()))
    if algorithm.aggregation == "constant":
        return float(len(_first_rows(batch)) * max_new_tokens)
    sequences = torch.unique(batch.sequence_ids[trained])
    if algorithm.aggregation == "sequence":
        return max(1.0, float(len(torch.unique(batch.per_sequence["episode"][sequences]))))
    return max(1.0, float(len(torch.unique(batch.per_sequence["group"][sequences]))))


def correction(
    spec: TruncateSpec | MaskSpec, log_ratios: Tensor, places: Tensor, trained: Tensor, sequences: int
) -> Tensor:
    """The importance weights (T) anchor / behavior from their logarithms; 0 where a token is not trained.

    Masked tokens leave the sum and not the denominator, so that a batch of which little is left has a smaller step.
    """
    logs = torch.where(trained, log_ratios, 0.0)
    if spec.level != "token":
        means = sequence_means(logs[trained], places[trained], sequences)
        counts = logs.new_zeros(sequences).index_add(0, places[trained], torch.ones_like(logs[trained]))
        logs = (means if spec.level == "geometric" else means * counts)[places]
    ratios = _ratios(logs)
    if isinstance(spec, TruncateSpec):
        weights = ratios.clamp(max=spec.high)
    else:
        weights = torch.where((ratios >= spec.low) & (ratios <= spec.high), ratios, 0.0)
    return torch.where(trained, weights, 0.0)


def _ratios(logs: Tensor) -> Tensor:
    return logs.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def _shaped_rewards(batch: Batch, algorithm: AlgorithmSpec, max_new_tokens: int) -> Tensor:
    """Rewards (B) with the penalty for overlong completions."""
    rewards = batch.per_sequence["reward"].double()
    if algorithm.truncated.type != "penalize":
        return rewards
    tokens, truncated = batch.per_sequence["turn_tokens"].double(), batch.per_sequence["truncated"] > 0
    return rewards + overlong_penalty(algorithm.truncated, tokens, truncated, max_new_tokens)


def _turns(batch: Batch, algorithm: AlgorithmSpec) -> Turns | None:
    if not algorithm.needs_turns:
        return None
    return Turns(batch.per_token["turn"], batch.per_token["turn_reward"], batch.per_sequence["turns"])


def _kl_rewards(spec: KlSpec, logprobs: Tensor, reference: Tensor | None) -> Tensor | None:
    """The KL penalty of each token (T)."""
    if spec.where != "reward" or reference is None:
        return None
    return -spec.coefficient * ESTIMATORS[spec.estimator](logprobs, reference, clamp=LOG_RATIO_LIMIT)


def _weights(batch: Batch, algorithm: AlgorithmSpec) -> Tensor:
    """The weight of each token's loss (T) in the sum that `denominator` divides."""
    if algorithm.aggregation in ("token", "constant"):
        return batch.loss_mask
    owners = batch.per_sequence["group" if algorithm.aggregation == "prompt" else "episode"].long()[batch.sequence_ids]
    tokens = batch.loss_mask.new_zeros(int(owners.max()) + 1).index_add(0, owners, batch.loss_mask)
    return batch.loss_mask / tokens.clamp_min(1)[owners]


def _first_rows(batch: Batch) -> Tensor:
    """The index of the first row of each episode: an episode of several rows has one reward and one baseline."""
    episodes = batch.per_sequence["episode"]
    return torch.cat((torch.ones_like(episodes[:1], dtype=torch.bool), episodes[1:] != episodes[:-1])).nonzero()[:, 0]


def _last_turn(trajectory: Trajectory) -> int:
    """Sampled tokens of the last turn."""
    begin, end = trajectory.turns[-1] if trajectory.turns else (0, len(trajectory.tokens))
    return sum(trajectory.loss_mask[begin:end])
