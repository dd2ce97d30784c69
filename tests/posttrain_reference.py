"""The losses of all presets once more, from their papers, with loops over answers and tokens in NumPy's FP64.

Nothing is shared with the package: these functions read trajectories, not batches.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from palestra.rollout.types import Group

EPS = 1e-6


@dataclass(frozen=True)
class Row:
    """An answer: its reward, and where in the packed batch its trained tokens are."""

    reward: float
    group: int
    at: list[int]
    behavior: list[float]
    cut_off: bool
    length: int
    """Of its last turn."""
    turn_of: list[int]
    """The turn of each trained token."""
    turn_rewards: list[float]
    """Of each turn; they add up to the reward."""


def rows_of(groups: Sequence[Group]) -> list[Row]:
    """One of each answer."""
    rows, start = [], 0
    for number, group in enumerate(groups):
        for t in group.trajectories:
            at = [i for i, drawn in enumerate(t.loss_mask) if drawn and np.isfinite(t.logprobs[i])]
            rows.append(
                Row(
                    t.reward,
                    number,
                    [start + i for i in at],
                    [t.logprobs[i] for i in at],
                    t.stop_reason == "length",
                    sum(t.loss_mask[slice(*t.turns[-1])] if t.turns else t.loss_mask),
                    [next((k for k, (begin, end) in enumerate(t.turns) if begin <= i < end), 0) for i in at],
                    [*t.turn_rewards] or [0.0] * (len(t.turns) - 1) + [t.reward],
                )
            )
            start += len(t.tokens)
    return rows


def reference_loss(preset, rows, now, held, *, anchor, reference, values, max_new_tokens) -> float:
    """The loss of a batch; `now` are log-probabilities (T) by the policy, `held` the same without a gradient."""
    given = {"anchor": anchor, "reference": reference, "values": values, "max_new_tokens": max_new_tokens}
    return {
        "grpo": grpo,
        "dr_grpo": dr_grpo,
        "dapo": dapo,
        "gspo": gspo,
        "cispo": cispo,
        "rloo": rloo,
        "reinforce_pp": reinforce_pp,
        "lite_ppo": lite_ppo,
        "sapo": sapo,
        "m2po": m2po,
        "dppo": dppo,
        "scalerl": scalerl,
        "ppo": ppo,
        **{name: formula for name, (_, formula) in VARIANTS.items()},
    }[preset](rows, now, held, **given)


def grpo(rows, now, held, *, reference, **_):
    advantages = by_group(rows, lambda r, others: (r - np.mean(others)) / (std(others) + EPS))
    total = 0.0
    for row, a in zip(rows, advantages, strict=True):
        each = [
            surrogate(np.exp(now[i] - mu), a, 0.2, 0.2)
            - 0.04 * (np.exp(reference[i] - now[i]) - (reference[i] - now[i]) - 1)
            for i, mu in zip(row.at, row.behavior, strict=True)
        ]
        total += sum(each) / len(each) if each else 0.0
    return -total / answers(rows)


def dr_grpo(rows, now, held, *, max_new_tokens, **_):
    advantages = by_group(rows, lambda r, others: r - np.mean(others))
    total = sum(
        surrogate(np.exp(now[i] - mu), a, 0.2, 0.2)
        for row, a in zip(rows, advantages, strict=True)
        for i, mu in zip(row.at, row.behavior, strict=True)
    )
    return -total / (len(rows) * max_new_tokens)


def dapo(rows, now, held, *, max_new_tokens, **_):
    shaped = []
    for row in rows:
        cache = 0.2 * max_new_tokens
        over = row.length - (max_new_tokens - cache)
        punished = 1.0 if row.cut_off or over > cache else over / cache if over > 0 else 0.0
        shaped.append(row.reward - punished)
    advantages = by_group(rows, lambda r, others: (r - np.mean(others)) / (std(others) + EPS), shaped)
    total = sum(
        surrogate(np.exp(now[i] - mu), a, 0.2, 0.28)
        for row, a in zip(rows, advantages, strict=True)
        for i, mu in zip(row.at, row.behavior, strict=True)
    )
    return -total / tokens(rows)


def gspo(rows, now, held, **_):
    advantages = by_group(rows, lambda r, others: (r - np.mean(others)) / (std(others) + EPS))
    total = 0.0
    for row, a in zip(rows, advantages, strict=True):
        if row.at:
            log_ratio = sum(now[i] - mu for i, mu in zip(row.at, row.behavior, strict=True)) / len(row.at)
            total += surrogate(np.exp(log_ratio), a, 3e-4, 4e-4)
    return -total / answers(rows)


def cispo(rows, now, held, **_):
    advantages = by_group(rows, lambda r, others: (r - np.mean(others)) / (std(others) + EPS))
    total = sum(
        min(np.exp(held[i] - mu), 5.0) * a * now[i]
        for row, a in zip(rows, advantages, strict=True)
        for i, mu in zip(row.at, row.behavior, strict=True)
    )
    return -total / tokens(rows)


def rloo(rows, now, held, *, max_new_tokens, **_):
    total = 0.0
    for place, row in enumerate(rows):
        others = [r.reward for j, r in enumerate(rows) if r.group == row.group and j != place]
        a = row.reward - np.mean(others) if others else 0.0
        total += sum(np.exp(now[i] - mu) * a for i, mu in zip(row.at, row.behavior, strict=True))
    return -total / (len(rows) * max_new_tokens)


def reinforce_pp(rows, now, held, *, reference, **_):
    following = []
    for row in rows:
        for k in range(len(row.at)):
            costs = [mu - reference[i] for i, mu in zip(row.at[k:], row.behavior[k:], strict=True)]
            following.append(row.reward - 0.001 * sum(costs))
    mean, deviation = np.mean(following), std(following)
    flat = [(i, mu) for row in rows for i, mu in zip(row.at, row.behavior, strict=True)]
    total = sum(
        surrogate(np.exp(now[i] - mu), (g - mean) / (deviation + EPS), 0.2, 0.2)
        for (i, mu), g in zip(flat, following, strict=True)
    )
    return -total / tokens(rows)


def lite_ppo(rows, now, held, **_):
    deviation = std([row.reward for row in rows])
    advantages = by_group(rows, lambda r, others: (r - np.mean(others)) / (deviation + EPS))
    total = sum(
        surrogate(np.exp(now[i] - mu), a, 0.2, 0.2)
        for row, a in zip(rows, advantages, strict=True)
        for i, mu in zip(row.at, row.behavior, strict=True)
    )
    return -total / tokens(rows)


def sapo(rows, now, held, **_):
    advantages = by_group(rows, lambda r, others: (r - np.mean(others)) / (std(others) + EPS))
    total = 0.0
    for row, a in zip(rows, advantages, strict=True):
        tau = 1.0 if a > 0 else 1.05
        each = [
            4 / tau / (1 + np.exp(-tau * (np.exp(now[i] - mu) - 1))) * a
            for i, mu in zip(row.at, row.behavior, strict=True)
        ]
        total += sum(each) / len(each) if each else 0.0
    return -total / answers(rows)


def m2po(rows, now, held, *, anchor, **_):
    advantages = by_group(rows, lambda r, others: (r - np.mean(others)) / (std(others) + EPS))
    left = sorted(((anchor[i] - mu) ** 2, i) for row in rows for i, mu in zip(row.at, row.behavior, strict=True))
    while len(left) > 1 and sum(square for square, _ in left) / len(left) > 0.04:
        left.pop()
    kept = {i for _, i in left}
    total = sum(
        np.exp(now[i] - mu) * a
        for row, a in zip(rows, advantages, strict=True)
        for i, mu in zip(row.at, row.behavior, strict=True)
        if i in kept
    )
    return -total / tokens(rows)


def dppo(rows, now, held, **_):
    advantages = by_group(rows, lambda r, others: r - np.mean(others))
    total = 0.0
    for row, a in zip(rows, advantages, strict=True):
        for i, mu in zip(row.at, row.behavior, strict=True):
            moved = np.exp(held[i]) - np.exp(mu)
            if not ((a > 0 and moved > 0.2) or (a < 0 and moved < -0.2)):
                total += np.exp(now[i] - mu) * a
    return -total / tokens(rows)


def scalerl(rows, now, held, **_):
    advantages = by_group(rows, lambda r, others: r - np.mean(others))
    advantages = [a / (std(advantages) + EPS) for a in advantages]
    sums: dict[int, list[float]] = {}
    for row, a in zip(rows, advantages, strict=True):
        for i, mu in zip(row.at, row.behavior, strict=True):
            sums.setdefault(row.group, []).append(min(np.exp(held[i] - mu), 5.0) * a * now[i])
    return -float(np.mean([np.mean(each) for each in sums.values()]))


def ppo(rows, now, held, *, values, **_):
    found, flat = [], []
    for row in rows:
        expected = [values[i] for i in row.at] + [0.0]
        rewards = [0.0] * (len(row.at) - 1) + [row.reward]
        advantage, reversed_ = 0.0, []
        for k in reversed(range(len(row.at))):
            advantage = rewards[k] + 1.0 * expected[k + 1] - expected[k] + 1.0 * 1.0 * advantage
            reversed_.append(advantage)
        found += reversed_[::-1]
        flat += list(zip(row.at, row.behavior, strict=True))
    mean, deviation = np.mean(found), std(found)
    total = sum(
        surrogate(np.exp(now[i] - mu), (a - mean) / (deviation + EPS), 0.2, 0.2)
        for (i, mu), a in zip(flat, found, strict=True)
    )
    return -total / tokens(rows)


def areal_grpo(rows, now, held, *, anchor, **_):
    """Rewards normalized in each group, advantages over all tokens; anchor recomputed, weights truncated at 2."""
    normalized = by_group(rows, lambda r, others: (r - np.mean(others)) / (std(others) + EPS))
    pairs = [(zip(row.at, row.behavior, strict=True), a) for row, a in zip(rows, normalized, strict=True)]
    flat = [(i, mu, a) for each, a in pairs for i, mu in each]
    mean, deviation = np.mean([a for *_, a in flat]), std([a for *_, a in flat])
    total = sum(
        min(np.exp(anchor[i] - mu), 2.0)
        * surrogate(np.exp(now[i] - anchor[i]), (a - mean) / (deviation + EPS), 0.2, 0.2)
        for i, mu, a in flat
    )
    return -total / tokens(rows)


def kpop(rows, now, held, *, anchor, **_):
    """Tokens count only where the binary KL of the anchor and of what drew them is at most 0.1 both ways."""
    advantages = by_group(rows, lambda r, others: (r - np.mean(others)) / (std(others) + EPS))

    def divergence(p, q):
        return p * np.log(p / q) + (1 - p) * np.log((1 - p) / (1 - q))

    total = 0.0
    for row, a in zip(rows, advantages, strict=True):
        for i, mu in zip(row.at, row.behavior, strict=True):
            p, q = np.exp(anchor[i]), np.exp(mu)
            if max(divergence(p, q), divergence(q, p)) <= 0.1:
                total += p / q * surrogate(np.exp(now[i] - anchor[i]), a, 0.2, 0.28)
    return -total / tokens(rows)


def prime_rl(rows, now, held, **_):
    """DPPO with 1e-3·(log π / μ)² on every token, also on those that the mask leaves out."""
    flat = [(i, mu) for row in rows for i, mu in zip(row.at, row.behavior, strict=True)]
    return dppo(rows, now, held) + sum(1e-3 * (now[i] - mu) ** 2 for i, mu in flat) / tokens(rows)


def vapo(rows, now, held, *, values, **_):
    """PPO with λ = 1 - 1 / (0.4·n) for n tokens, rewards of each group normalized by the population's deviation."""
    normalized = by_group(rows, lambda r, others: (r - np.mean(others)) / (np.std(others) + EPS))
    return _with_lam(rows, now, values, normalized, lambda n: max(0.0, 1 - 1 / (0.4 * n)))


def position(rows, now, held, *, values, **_):
    """PPO with λ = 0.5^(1 / (n - 1)) for n tokens, rewards of the batch normalized."""
    rewards = [row.reward for row in rows]
    normalized = [(r - np.mean(rewards)) / (np.std(rewards) + EPS) for r in rewards]
    return _with_lam(rows, now, values, normalized, lambda n: 0.5 ** (1 / max(1, n - 1)))


def _with_lam(rows, now, values, rewards, lam) -> float:
    total = 0.0
    for row, reward in zip(rows, rewards, strict=True):
        expected, advantage = [values[i] for i in row.at] + [0.0], 0.0
        for k in reversed(range(len(row.at))):
            own = reward if k == len(row.at) - 1 else 0.0
            advantage = own + expected[k + 1] - expected[k] + lam(len(row.at)) * advantage
            total += surrogate(np.exp(now[row.at[k]] - row.behavior[k]), advantage, 0.2, 0.2)
    return -total / tokens(rows)


def follows(row: Row, turn: int, discount: float) -> float:
    """The discounted rewards from a turn on; 0 after the last one."""
    return sum(discount ** (j - turn) * r for j, r in enumerate(row.turn_rewards) if j >= turn)


def turn_grpo(rows, now, held, **_):
    """GRPO with an advantage for every turn: its return against those of the group at the same turn; γ = 0.5."""
    total = 0.0
    for row in rows:
        for i, mu, k in zip(row.at, row.behavior, row.turn_of, strict=True):
            others = [follows(other, k, 0.5) for other in rows if other.group == row.group]
            spread = std(others) if len(others) > 1 else 0.0
            a = (follows(row, k, 0.5) - np.mean(others)) / (spread + EPS) if max(others) > min(others) else 0.0
            total += surrogate(np.exp(now[i] - mu), a, 0.2, 0.2)
    return -total / tokens(rows)


def trajectory_rloo(rows, now, held, *, max_new_tokens, **_):
    """RLOO of the discounted sum of the turns' rewards; γ = 0.5."""
    total = 0.0
    for place, row in enumerate(rows):
        others = [follows(r, 0, 0.5) for j, r in enumerate(rows) if r.group == row.group and j != place]
        a = follows(row, 0, 0.5) - np.mean(others) if others else 0.0
        total += sum(np.exp(now[i] - mu) * a for i, mu in zip(row.at, row.behavior, strict=True))
    return -total / (len(rows) * max_new_tokens)


def turn_ppo(rows, now, held, *, values, **_):
    """PPO with GAE over turns, γ = 0.5 and λ = 0.25; the value before a turn is that of its first trained token."""
    total = 0.0
    for row in rows:
        before = [0.0] * (len(row.turn_rewards) + 1)
        for i, k in reversed(list(zip(row.at, row.turn_of, strict=True))):
            before[k] = values[i]
        advantages, following = {}, 0.0
        for k in reversed(range(len(row.turn_rewards))):
            following = row.turn_rewards[k] + 0.5 * before[k + 1] - before[k] + 0.5 * 0.25 * following
            advantages[k] = following
        for i, mu, k in zip(row.at, row.behavior, row.turn_of, strict=True):
            total += surrogate(np.exp(now[i] - mu), advantages[k], 0.2, 0.2)
    return -total / tokens(rows)


PPO = {"preset": "ppo", "scale": "none", "std": "population"}
VARIANTS = {
    "areal_grpo": (
        {
            "preset": "grpo",
            "kl": {"where": "none"},
            "aggregation": "token",
            "anchor": "recomputed",
            "baseline": "none",
            "scale": "none",
            "reward_norm": "group",
            "advantage_norm": "batch",
        },
        areal_grpo,
    ),
    "kpop": (
        {
            "preset": "dapo",
            "truncated": {"type": "keep"},
            "anchor": "recomputed",
            "correction": {"type": "binary_kl"},
        },
        kpop,
    ),
    "prime_rl": ({"preset": "dppo", "log_ratio_penalty": 1e-3}, prime_rl),
    "vapo": ({**PPO, "reward_norm": "group", "critic": {"lam": 0.4, "lam_strategy": "length"}}, vapo),
    "turn_grpo": (
        {
            "preset": "grpo",
            "kl": {"where": "none"},
            "aggregation": "token",
            "turns": {"credit": "turn", "discount": 0.5},
        },
        turn_grpo,
    ),
    "trajectory_rloo": ({"preset": "rloo", "turns": {"discount": 0.5}}, trajectory_rloo),
    "turn_ppo": ({**PPO, "turns": {"credit": "turn", "discount": 0.5, "lam": 0.25}}, turn_ppo),
    "position": ({**PPO, "reward_norm": "batch", "critic": {"lam": 0.5, "lam_strategy": "position"}}, position),
}
"""What is no preset of ours and can be said: its record, its formula."""


def std(values) -> float:
    """Of a sample: n - 1."""
    return float(np.std(values, ddof=1))


def surrogate(ratio: float, advantage: float, low: float, high: float) -> float:
    """PPO's, to be maximized."""
    return min(ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage)


def by_group(rows, formula, rewards=None) -> list[float]:
    """formula(reward, all rewards of its group) of each row."""
    rewards = [row.reward for row in rows] if rewards is None else rewards
    found = []
    for row, reward in zip(rows, rewards, strict=True):
        others = [r for other, r in zip(rows, rewards, strict=True) if other.group == row.group]
        found.append(formula(reward, others) if max(others) > min(others) else 0.0)
    return found


def tokens(rows) -> int:
    """Trained tokens of a batch."""
    return sum(len(row.at) for row in rows)


def answers(rows) -> int:
    """Answers of which a token is trained."""
    return sum(bool(row.at) for row in rows)
