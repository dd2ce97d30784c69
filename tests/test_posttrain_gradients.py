"""A language model small enough to write down every answer: estimators' expected gradients against the exact ones.

The policy is a table: a row of logits for every prefix. Every group of n answers that may be drawn is packed, and its
gradient counts as often as it occurs; there is no noise left to average away.
"""

from dataclasses import replace
from itertools import product
from math import comb

import pytest
import torch
from posttrain_cases import algorithm, answer, double, groups_of
from torch import Tensor

from palestra.posttrain.batch import denominator, pack, with_advantages
from palestra.posttrain.loss import token_losses
from palestra.spec.algorithm import PRESETS

END = 0
FREE = {"trust": {"type": "none"}, "kl": {"where": "none"}, "truncated": {"type": "keep"}, "scale": "none"}
PLAIN = {**FREE, "aggregation": "constant"}


class Table:
    """All answers of at most `length` tokens over a vocabulary; token 0 ends one."""

    def __init__(self, vocab: int, length: int, seed: int = 0, binary: bool = False):
        self.vocab, self.length = vocab, length
        prefixes = [p for n in range(length) for p in product(range(1, vocab), repeat=n)]
        self.row = {prefix: i for i, prefix in enumerate(prefixes)}
        ended = [(*p, END) for p in prefixes]
        self.answers = ended + list(product(range(1, vocab), repeat=length))
        self.draw = torch.Generator().manual_seed(seed)
        rewards = torch.rand(len(self.answers), generator=self.draw, dtype=torch.float64)
        self.rewards = (rewards > 0.5).double() if binary else rewards

    def logits(self) -> Tensor:
        """A policy at random."""
        return torch.randn(len(self.row), self.vocab, generator=self.draw, dtype=torch.float64)

    def scores(self, logits: Tensor, one: tuple[int, ...]) -> Tensor:
        """log π of the tokens of an answer."""
        rows = [self.row[one[:t]] for t in range(len(one))]
        return torch.log_softmax(logits, -1)[rows, list(one)]

    def probabilities(self, logits: Tensor) -> Tensor:
        """Of every answer."""
        return torch.stack([self.scores(logits, one).sum() for one in self.answers]).exp()

    def value(self, logits: Tensor) -> Tensor:
        """The expected reward."""
        return (self.probabilities(logits) * self.rewards).sum()

    def expected_after(self, logits: Tensor, prefix: tuple[int, ...]) -> float:
        """The expected reward of answers that begin so."""
        begins = torch.tensor([one[: len(prefix)] == prefix for one in self.answers])
        weights = self.probabilities(logits) * begins
        return float((weights * self.rewards).sum() / weights.sum())


def exact(function, logits: Tensor) -> Tensor:
    """The gradient of a function of logits."""
    logits = logits.clone().requires_grad_()
    return torch.autograd.grad(function(logits), logits)[0]


def expected_gradient(table, spec, policy, behavior=None, *, n=2, values=None, reference=None) -> Tensor:
    """The expectation of minus the loss' gradient over all groups of n answers drawn by `behavior`."""
    behavior = policy if behavior is None else behavior
    chosen = list(product(range(len(table.answers)), repeat=n))

    def group(places):
        ends = ["eos" if table.answers[i][-1] == END else "length" for i in places]
        return [
            answer([-1.0] * len(table.answers[i]), 0.0, stop=stop, tokens=table.answers[i])
            for i, stop in zip(places, ends, strict=True)
        ]

    batch = double(pack(groups_of(*map(group, chosen)), spec))
    flat = [table.answers[i] for places in chosen for i in places]

    def per_token(of_answer) -> Tensor:
        """(T), 0 for the prompt before each answer."""
        return torch.cat([x for one in flat for x in (torch.zeros(1, dtype=torch.float64), of_answer(one))])

    rewards = torch.stack([table.rewards[i] for places in chosen for i in places])
    batch = replace(
        batch,
        per_token={**batch.per_token, "behavior": per_token(lambda one: table.scores(behavior, one))},
        per_sequence={**batch.per_sequence, "reward": rewards},
    )
    batch = with_advantages(
        batch,
        spec,
        max_new_tokens=table.length,
        anchor=per_token(lambda one: table.scores(policy, one)) if spec.needs_anchor else None,
        reference=None if reference is None else per_token(lambda one: table.scores(reference, one)),
        values=None if values is None else per_token(values),
    )
    logits = policy.clone().requires_grad_()
    now = torch.log_softmax(logits, -1)
    entropies = -(now.exp() * now).sum(-1)
    losses = token_losses(
        spec,
        batch,
        per_token(lambda one: table.scores(logits, one)),
        per_token(lambda one: entropies[[table.row[one[:t]] for t in range(len(one))]]),
    ).losses
    drawn = table.probabilities(behavior)
    chances = torch.stack([drawn[list(places)].prod() for places in chosen])
    each = torch.zeros(len(chosen), dtype=torch.float64).index_add(
        0, batch.per_sequence["group"].long()[batch.sequence_ids], batch.per_token["weights"] * losses
    )
    rows = torch.arange(len(flat)).reshape(len(chosen), n).tolist()
    sizes = torch.tensor([denominator(batch.select(part), spec, table.length) for part in rows])
    return torch.autograd.grad(-(chances * each / sizes).sum(), logits)[0]


def same(found: Tensor, wanted: Tensor) -> bool:
    return torch.allclose(found, wanted, rtol=1e-8, atol=1e-12)


def cosine(a: Tensor, b: Tensor) -> float:
    return float((a * b).sum() / (a.norm() * b.norm()))


@pytest.fixture
def table():
    return Table(vocab=3, length=2)


@pytest.fixture
def single():
    """Answers of one token."""
    return Table(vocab=5, length=1, seed=1)


@pytest.mark.parametrize("n", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("changes", "factor"),
    [
        ({"preset": "rloo"}, lambda n: 1.0),
        ({"preset": "rloo", "trust": {"type": "clip"}}, lambda n: 1.0),
        ({"preset": "dr_grpo"}, lambda n: (n - 1) / n),
        ({**PLAIN, "preset": "dr_grpo", "baseline": "none"}, lambda n: 1.0),
        ({**PLAIN, "preset": "dppo"}, lambda n: (n - 1) / n),
        ({**PLAIN, "preset": "cispo", "trust": {"type": "clipped_weight"}}, lambda n: (n - 1) / n),
        ({**PLAIN, "preset": "sapo", "trust": {"type": "soft_gate"}}, lambda n: (n - 1) / n),
    ],
)
def test_gradient_on_policy_without_length_or_std_is_unbiased(table, n, changes, factor):
    """A baseline that has the answer itself in it takes 1/n of the gradient away, and no more."""
    policy = table.logits()
    found = expected_gradient(table, algorithm(**changes), policy, n=n)
    assert same(found, factor(n) * exact(table.value, policy) / table.length)


@pytest.mark.parametrize(("preset", "factor"), [("rloo", 1.0), ("dr_grpo", 2 / 3)])
def test_gradient_on_policy_of_three_answers_of_one_token_is_unbiased(preset, factor):
    single = Table(vocab=4, length=1, seed=1)
    policy = single.logits()
    found = expected_gradient(single, algorithm(**{**PLAIN, "preset": preset}), policy, n=3)
    assert same(found, factor * exact(single.value, policy))


def test_gradient_with_means_over_answers_favours_by_length(table):
    """Dr. GRPO's finding: divided by its own length, an answer's gradient no longer points up the expected reward."""
    policy = table.logits()
    wanted = exact(table.value, policy)
    straight = expected_gradient(table, algorithm(**{**PLAIN, "preset": "dr_grpo"}), policy)
    bent = expected_gradient(table, algorithm(**{**FREE, "preset": "dr_grpo", "aggregation": "sequence"}), policy)
    assert cosine(straight, wanted) == pytest.approx(1.0, abs=1e-12)
    assert cosine(bent, wanted) < 0.999


@pytest.mark.parametrize("n", [2, 3, 4])
def test_gradient_of_grpo_with_rewards_of_0_and_1_is_the_exact_one_times_a_known_factor(n):
    """Given an answer's own reward the others are independent of it: E = (h(1) - h(0))·∇J, h(r) = E[A | r]."""
    table = Table(vocab=4, length=1, seed=3, binary=True)
    policy = table.logits()
    p = float(table.value(policy))

    def h(own):
        found = 0.0
        for k in range(n):  # right ones among the others
            mean = (k + own) / n
            std = (mean * (1 - mean) * n / (n - 1)) ** 0.5
            chance = comb(n - 1, k) * p**k * (1 - p) ** (n - 1 - k)
            found += chance * (own - mean) / (std + 1e-6) if std else 0.0
        return found

    spec = algorithm(**{**PLAIN, "preset": "grpo", "scale": "group_std"})
    found = expected_gradient(table, spec, policy, n=n)
    assert same(found, (h(1) - h(0)) * exact(table.value, policy))


def test_gradient_with_the_batchs_mean_of_answers_of_one_token_loses_its_share(single):
    """REINFORCE++: the batch's mean has every answer in it."""
    policy = single.logits()
    spec = algorithm(**{**PLAIN, "preset": "reinforce_pp"})
    gradients = []
    for n in (2, 3):  # one group is the batch here, so groups are taken one by one
        chances, total = single.probabilities(policy), 0.0
        for places in product(range(len(single.answers)), repeat=n):
            part = [answer([-1.0], 0.0, tokens=single.answers[i]) for i in places]
            batch = double(pack(groups_of(part), spec))
            batch = replace(batch, per_sequence={**batch.per_sequence, "reward": single.rewards[list(places)]})
            batch = with_advantages(batch, spec, max_new_tokens=1)
            advantages = batch.per_token["advantages"][batch.loss_mask > 0]
            slopes = torch.stack(
                [exact(lambda x, i=i: single.scores(x, single.answers[i]).sum(), policy) for i in places]
            )
            total = total + chances[list(places)].prod() * (advantages[:, None, None] * slopes).mean(0)
        gradients.append(total)
    wanted = exact(single.value, policy)
    assert same(gradients[0], wanted / 2)
    assert same(gradients[1], wanted * 2 / 3)


@pytest.mark.parametrize("lam", [1.0, 0.4, 0.0])
def test_gradient_with_a_critic_that_is_right_is_unbiased_for_every_lambda(table, lam):
    policy = table.logits()
    right = {prefix: table.expected_after(policy, prefix) for prefix in table.row}
    spec = algorithm(**{**PLAIN, "preset": "ppo", "critic": {"lam": lam}})

    def values(one):
        return torch.tensor([right[one[:t]] for t in range(len(one))], dtype=torch.float64)

    found = expected_gradient(table, spec, policy, values=values)
    assert same(found, exact(table.value, policy) / table.length)


def test_gradient_with_a_critic_that_is_wrong_is_unbiased_at_lambda_one_unless_it_peeks(table):
    policy = table.logits()
    wrong = {prefix: float(i) for i, prefix in enumerate([*table.row, *table.answers])}
    spec = algorithm(**{**PLAIN, "preset": "ppo"})

    def before(one):
        return torch.tensor([wrong[one[:t]] for t in range(len(one))], dtype=torch.float64)

    def after(one):  # one token too far: the baseline knows the token that it is the baseline of
        return torch.tensor([wrong[one[: t + 1]] for t in range(len(one))], dtype=torch.float64)

    wanted = exact(table.value, policy) / table.length
    assert same(expected_gradient(table, spec, policy, values=before), wanted)
    assert not same(expected_gradient(table, spec, policy, values=after), wanted)


@pytest.mark.parametrize("baseline", ["none", "leave_one_out"])
def test_gradient_with_k1_in_the_reward_is_that_of_the_penalized_objective(table, baseline):
    """Of J - β·KL(π ‖ reference) over whole answers, with what follows each token as its return."""
    policy, reference = table.logits(), table.logits()
    kl = {"where": "reward", "estimator": "k1", "coefficient": 0.3}
    spec = algorithm(**{**PLAIN, "preset": "rloo", "baseline": baseline, "kl": kl})

    def objective(logits):
        chances = table.probabilities(logits)
        return table.value(logits) - 0.3 * (chances * (chances / table.probabilities(reference)).log()).sum()

    found = expected_gradient(table, spec, policy, reference=reference)
    assert same(found, exact(objective, policy) / table.length)


@pytest.mark.parametrize(("estimator", "forward"), [("k2", False), ("k3", True)])
def test_gradient_of_kl_in_the_loss_is_that_of_one_direction(single, estimator, forward):
    """k2 pulls along KL(π ‖ reference), k3 along KL(reference ‖ π)."""
    policy, reference = single.logits(), single.logits()
    kl = {"where": "loss", "estimator": estimator, "coefficient": 0.3}
    spec = algorithm(**{**PLAIN, "preset": "rloo", "kl": kl})

    def objective(logits):
        p, q = single.probabilities(logits), single.probabilities(reference)
        return single.value(logits) - 0.3 * ((q * (q / p).log()) if forward else (p * (p / q).log())).sum()

    found = expected_gradient(single, spec, policy, reference=reference)
    assert same(found, exact(objective, policy))


def test_gradient_of_the_entropy_bonus_is_that_of_the_entropy(single):
    policy = single.logits()
    spec = algorithm(**{**PLAIN, "preset": "rloo", "entropy": 0.2})

    def objective(logits):
        p = single.probabilities(logits)
        return single.value(logits) - 0.2 * (p * p.log()).sum()

    assert same(expected_gradient(single, spec, policy), exact(objective, policy))


WIDE = {"type": "truncate", "high": 1e9}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"trust": {"type": "clipped_weight", "high": 1e9}},
        {"trust": {"type": "tv_mask", "threshold": 1.0}},
        {"ratio": "sequence", "aggregation": "sequence"},
        {"anchor": "recomputed", "correction": WIDE},
        {"anchor": "recomputed", "correction": {**WIDE, "level": "sequence"}},
        {"anchor": "recomputed", "correction": {"type": "mask", "low": 0.0, "high": 1e9}},
    ],
)
def test_gradient_of_anothers_tokens_is_exact_with_its_weights(single, changes):
    """Answers of one token that another policy drew: importance weights make up for it, wherever they stand."""
    policy, behavior = single.logits(), single.logits()
    spec = algorithm(**{**PLAIN, "preset": "rloo", **changes})
    found = expected_gradient(single, spec, policy, behavior)
    assert same(found, exact(single.value, policy))


@pytest.mark.parametrize(
    "changes",
    [
        {"anchor": "recomputed", "correction": {"type": "none"}},
        {"anchor": "recomputed"},  # truncated at 2
        {"trust": {"type": "clip"}},
    ],
)
def test_gradient_of_anothers_tokens_is_bent_without_all_of_the_weights(single, changes):
    policy, behavior = single.logits(), single.logits()
    spec = algorithm(**{**PLAIN, "preset": "rloo", **changes})
    found, wanted = expected_gradient(single, spec, policy, behavior), exact(single.value, policy)
    assert (found - wanted).norm() > 0.02 * wanted.norm()


def test_gradient_of_anothers_longer_answers_is_exact_with_weights_of_whole_answers(table):
    """A token's own ratio does not know that what came before it was unlikely; the product over the answer does."""
    policy, behavior = table.logits(), table.logits()
    whole = {"anchor": "recomputed", "correction": {**WIDE, "level": "sequence"}}
    wanted = exact(table.value, policy) / table.length
    found = expected_gradient(table, algorithm(**{**PLAIN, "preset": "rloo", **whole}), policy, behavior)
    assert same(found, wanted)
    by_token = expected_gradient(table, algorithm(**{**PLAIN, "preset": "rloo"}), policy, behavior)
    assert cosine(by_token, wanted) < 0.999


@pytest.mark.parametrize("preset", PRESETS)
def test_learning_three_tokens_by_chance_reaches_nearly_all_of_the_reward(preset):
    """Vocabulary 8, three tokens, a reward for each that is right: every preset climbs from 1/8 to above 0.95."""
    spec = algorithm(preset, filters={"zero_variance": False})
    draw = torch.Generator().manual_seed(0)
    logits = torch.zeros(3, 8, dtype=torch.float64, requires_grad=True)
    wanted = torch.tensor([3, 0, 6])
    adam = torch.optim.Adam([logits], lr=0.3)
    reference = torch.log_softmax(logits.detach(), -1)
    steps = torch.arange(3)
    for _ in range(45):
        before = torch.log_softmax(logits.detach(), -1)
        tokens = torch.stack([torch.multinomial(row.exp(), 64, True, generator=draw) for row in before], 1)
        hits = (tokens == wanted).double().mean(1).tolist()
        answers = [
            answer(before[steps, one].tolist(), hit, tokens=one.tolist()) for one, hit in zip(tokens, hits, strict=True)
        ]
        batch = double(pack(groups_of(*(answers[i : i + 8] for i in range(0, 64, 8))), spec))

        def flat(table, tokens=tokens):
            return torch.cat([torch.zeros(64, 1, dtype=torch.float64), table[steps, tokens]], 1).flatten()

        batch = with_advantages(
            batch, spec, max_new_tokens=4, anchor=flat(before), reference=flat(reference), values=flat(before) * 0
        )
        now = torch.log_softmax(logits, -1)
        entropy = flat(-(now.exp() * now).sum(-1)[:, None].expand(3, 8))
        losses = token_losses(spec, batch, flat(now), entropy).losses
        adam.zero_grad()
        ((batch.per_token["weights"] * losses).sum() / denominator(batch, spec, 4)).backward()
        adam.step()
    chances = torch.log_softmax(logits.detach(), -1).exp()[steps, wanted]
    assert chances.mean() > 0.95
