"""Advantages of completions and of their tokens: the baselines and scales of an algorithm.

Batches are packed: `(T)` tokens of B sequences, `(B)` one number each. A sequence's reward is on its last *trainable*
token, whatever follows that, and credit flows back over trainable tokens only. Everything is computed in float64.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from palestra.rl.normalize import batch_normalize, group_normalize, group_std, leave_one_out
from palestra.rl.returns import discounted_returns, gae
from palestra.spec.algorithm import AlgorithmSpec, CriticSpec, PenalizeSpec

EPS = 1e-6
"""Added to standard deviations. One that is not larger is that of equal rewards, and is not divided by."""


class Turns(NamedTuple):
    """The turns of packed trajectories."""

    of_token: Tensor
    """(T) the number of each sampled token's turn."""
    rewards: Tensor
    """(T) a turn's reward on its last token; that of the last turn is what is missing to the trajectory's reward."""
    counts: Tensor
    """(B)."""


class Advantages(NamedTuple):
    """0 where a token is not trained."""

    advantages: Tensor
    """(T)."""
    returns: Tensor
    """(T) discounted returns after each token: the targets of a value model."""


def token_advantages(
    algorithm: AlgorithmSpec,
    rewards: Tensor,
    groups: Tensor,
    sequence_ids: Tensor,
    trained: Tensor,
    *,
    token_rewards: Tensor | None = None,
    values: Tensor | None = None,
    turns: Turns | None = None,
) -> Advantages:
    """From rewards (B), group ids (B), and of each token its sequence (T) and whether it is trained (T).

    `token_rewards` (T) are added, such as a KL penalty: an advantage is then of what follows the token. `values` (T)
    are a value model's before each token. A group may have any size and lie anywhere; one of a single completion has
    advantage 0. `turns` are needed where the algorithm tells them apart.
    """
    zeros = torch.zeros(len(trained), dtype=torch.float64, device=trained.device)
    index = trained.nonzero()[:, 0]
    if not len(index):
        return Advantages(zeros, zeros)
    table = None if turns is None else _turn_rewards(rewards.double(), sequence_ids, turns)
    if table is not None:
        discounts = algorithm.turns.discount ** torch.arange(table.shape[1], device=table.device)
        rewards = (table * discounts).sum(1)
    rewards, places = _normalized_rewards(algorithm, rewards.double(), groups), sequence_ids[index]
    last = torch.ones_like(places, dtype=torch.bool)
    last[:-1] = places[:-1] != places[1:]
    per_token = torch.where(last, rewards[places], 0.0)
    if token_rewards is not None:
        per_token = per_token + token_rewards[index].double()
    if table is not None and turns is not None and algorithm.turns.credit == "turn":
        own = None if token_rewards is None else token_rewards[index].double()
        known = None if values is None else values[index].double()
        at = places * table.shape[1] + turns.of_token[index].long()
        advantages, returns = _by_turns(algorithm, table, turns.counts.long(), groups, at, own, known)
    elif algorithm.critic is not None:
        assert values is not None  # `with_advantages` refuses a batch without them
        counts = torch.bincount(places, minlength=len(rewards))[places]
        advantages, returns = _with_critic(algorithm.critic, per_token, values[index].double(), last, counts)
    else:
        returns = rewards[places]  # all of it comes at the end
        if token_rewards is not None:
            never = torch.zeros_like(last)[:, None]
            returns = discounted_returns(per_token[:, None], terminated=last[:, None], truncated=never, gamma=1.0)[:, 0]
        advantages = _with_baseline(algorithm, rewards, groups, places, per_token, returns)
    of_tokens = algorithm.baseline in ("batch", "critic") and algorithm.scale == "batch_std"
    if of_tokens or algorithm.advantage_norm == "batch":  # REINFORCE++, PPO, the second stage of AReaL
        advantages = batch_normalize(advantages, eps=EPS, correction=_correction(algorithm))
    if algorithm.ratio == "sequence":  # a completion has one ratio, so it has one advantage
        advantages = sequence_means(advantages, places, len(rewards))[places]
    return Advantages(zeros.index_copy(0, index, advantages), zeros.index_copy(0, index, returns))


def _turn_rewards(rewards: Tensor, sequence_ids: Tensor, turns: Turns) -> Tensor:
    """The rewards (B, K) of all turns, 0 after the last."""
    most, last = int(turns.counts.max()), turns.counts.long() - 1
    table = rewards.new_zeros(len(rewards) * most)
    table = table.index_add(0, sequence_ids * most + turns.of_token.long(), turns.rewards.double()).view(-1, most)
    rows = torch.arange(len(rewards), device=rewards.device)
    table[rows, last] = 0.0
    table[rows, last] = rewards - table.sum(1)
    return table


def _by_turns(
    algorithm: AlgorithmSpec,
    table: Tensor,
    counts: Tensor,
    groups: Tensor,
    at: Tensor,
    token_rewards: Tensor | None,
    values: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Advantages and returns (N) of trainable tokens, equal within a turn; `at` (N) are their turns in `table` (B, K).

    A return is the discounted sum of the rewards from a turn on. Its baseline and scale are over the same turn of all
    trajectories of the group, where one that has ended has the return 0.
    """
    if token_rewards is not None:
        table = table.view(-1).index_add(0, at, token_rewards).view_as(table)
    steps = torch.arange(table.shape[1], device=table.device)
    there, last = steps < counts[:, None], steps == counts[:, None] - 1
    gamma = algorithm.turns.discount
    if algorithm.critic is not None:
        assert values is not None  # `with_advantages` refuses a batch without them
        before = values.new_zeros(table.numel()).index_copy(0, at.flip(0), values.flip(0)).view_as(table)  # the first
        following = torch.cat((before[:, 1:], before.new_zeros(len(before), 1)), 1)
        rows = (part.T for part in (table, before, following))
        never, lam = torch.zeros_like(last.T), algorithm.turns.lam
        estimated = gae(*rows, terminated=last.T, truncated=never, valid=there.T, gamma=gamma, lam=lam)
        advantages, returns = (part.T.reshape(-1)[at] for part in estimated)
        return advantages, returns
    never = torch.zeros_like(last.T)
    following = discounted_returns(table.T, terminated=last.T, truncated=never, gamma=gamma).T.reshape(-1)
    if algorithm.baseline in ("none", "batch"):
        returns = following[at]
        centered = algorithm.baseline == "batch" and algorithm.scale != "batch_std"
        return returns - returns.mean() if centered else returns, returns
    # The same turn of a group's trajectories is a group.
    ids = (groups.long()[:, None] * table.shape[1] + steps).reshape(-1)
    loo = algorithm.baseline == "leave_one_out"
    centred = leave_one_out(following, ids) if loo else group_normalize(following, ids, scale="none")
    whole = there.reshape(-1)
    if algorithm.scale in ("batch_std", "advantage_std"):
        of = (following if algorithm.scale == "batch_std" else centred)[whole]
        deviation = of.std(correction=min(_correction(algorithm), len(of) - 1)).expand_as(following)
    elif algorithm.scale == "group_std":
        deviation = group_std(following, ids, correction=_correction(algorithm))
    else:
        deviation = torch.zeros_like(following)
    return (centred / torch.where(deviation > EPS, deviation + EPS, 1.0))[at], following[at]


def sequence_means(values: Tensor, places: Tensor, sequences: int) -> Tensor:
    """The mean (B) of the values (N) of each sequence; 0 for one that has none."""
    zeros = values.new_zeros(sequences)
    counts = zeros.index_add(0, places, torch.ones_like(values))
    return zeros.index_add(0, places, values) / counts.clamp_min(1)


def overlong_penalty(spec: PenalizeSpec, tokens: Tensor, truncated: Tensor, max_new_tokens: int) -> Tensor:
    """The reward penalty, at most 0, of completions with so many tokens (B) (DAPO, Yu et al. 2025, eq. 13).

    A truncated completion gets the full `factor`, also if the model's context and not `max_new_tokens` truncated it.
    """
    buffer = spec.buffer * max_new_tokens
    over = ((tokens - (max_new_tokens - buffer)) / buffer).clamp(0.0, 1.0)
    return -spec.factor * torch.where(truncated, 1.0, over)


def _correction(algorithm: AlgorithmSpec) -> int:
    """Bessel's correction of the algorithm's variances."""
    return 1 if algorithm.std == "sample" else 0


def _normalized_rewards(algorithm: AlgorithmSpec, rewards: Tensor, groups: Tensor) -> Tensor:
    """Rewards (B) after the first stage of a normalization in two stages."""
    if algorithm.reward_norm == "group":
        return group_normalize(rewards, groups, eps=EPS, correction=_correction(algorithm))
    if algorithm.reward_norm == "batch":
        return batch_normalize(rewards, eps=EPS, correction=_correction(algorithm))
    return rewards


def _lam(critic: CriticSpec, counts: Tensor) -> float | Tensor:
    """λ, or one per token (N) from the number of trained tokens of its completion."""
    if critic.lam_strategy == "length":  # VAPO, Yue et al. 2025, eq. 9
        return (1 - 1 / (critic.lam * counts.double())).clamp_min(0.0)
    if critic.lam_strategy == "position":  # the first token gets the share lam of a reward at the end
        return critic.lam ** (1 / (counts.double() - 1).clamp_min(1.0))
    return critic.lam


def _with_critic(
    critic: CriticSpec, rewards: Tensor, values: Tensor, last: Tensor, counts: Tensor
) -> tuple[Tensor, Tensor]:
    """GAE over trainable tokens (N), of which their completion has `counts` (N), and the value targets.

    The end of a completion is the end of the episode, also if it was truncated: a bootstrap value there would reward
    completions for being long.
    """
    following = torch.cat((values[1:], values.new_zeros(1)))
    never = torch.zeros_like(last)

    def estimated(lam: float | Tensor) -> tuple[Tensor, Tensor]:
        return gae(rewards, values, following, terminated=last, truncated=never, gamma=critic.gamma, lam=lam)

    advantages, returns = estimated(_lam(critic, counts))
    return advantages, returns if critic.returns_lam is None else estimated(critic.returns_lam)[1]


def _with_baseline(
    algorithm: AlgorithmSpec, rewards: Tensor, groups: Tensor, places: Tensor, per_token: Tensor, returns: Tensor
) -> Tensor:
    """The return after each trainable token (N), minus a baseline that does not depend on it, divided by a scale."""
    if algorithm.baseline == "none":
        return returns
    if algorithm.baseline == "batch":  # REINFORCE++: over all tokens
        return returns if algorithm.scale == "batch_std" else returns - returns.mean()
    # The baseline is of whole completions: their rewards and all their token rewards.
    extra = per_token.new_zeros(len(rewards)).index_add(0, places, per_token)
    seen = torch.zeros_like(rewards, dtype=torch.bool).index_fill(0, places, True)
    totals = torch.where(seen, extra, rewards)
    if algorithm.baseline == "leave_one_out":
        centred = leave_one_out(totals, groups)
    else:
        centred = group_normalize(totals, groups, scale="none")
    # What came before a token is not its consequence. Without token rewards this adds exactly 0.
    return (centred[places] + (returns - totals[places])) / _divisor(algorithm, rewards, centred, groups)[places]


def _divisor(algorithm: AlgorithmSpec, rewards: Tensor, centred: Tensor, groups: Tensor) -> Tensor:
    """The advantage scale of each sequence (B)."""
    if algorithm.scale == "none":
        return torch.ones_like(rewards)
    if algorithm.scale == "group_std":
        deviation = group_std(rewards, groups, correction=_correction(algorithm))
    else:
        of = rewards if algorithm.scale == "batch_std" else centred
        deviation = of.std(correction=min(_correction(algorithm), len(of) - 1)).expand_as(rewards)
    return torch.where(deviation > EPS, deviation + EPS, 1.0)
