"""Baselines, scales and credit: closed forms, brute force, and what other systems got wrong."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from posttrain_cases import algorithm, answer, groups_of

from palestra.posttrain.advantages import overlong_penalty, token_advantages
from palestra.posttrain.batch import pack, with_advantages
from palestra.spec.algorithm import PenalizeSpec

FREE = {"trust": {"type": "none"}, "kl": {"where": "none"}, "truncated": {"type": "keep"}}


def of_answers(rewards, groups, **changes):
    """Advantages of answers of one token each."""
    spec = algorithm("dr_grpo", aggregation="token", **{**FREE, **changes})
    count = len(rewards)
    found = token_advantages(
        spec,
        torch.tensor(rewards, dtype=torch.float64),
        torch.tensor(groups),
        torch.arange(count),
        torch.ones(count, dtype=torch.bool),
    )
    return found.advantages.tolist()


def of_groups(groups, max_new_tokens=8, values=None, reference=None, **changes):
    """Advantages (T) of packed groups, and the batch."""
    spec = algorithm(**{"preset": "dr_grpo", "aggregation": "token", **changes})
    batch = pack(groups, spec)
    batch = with_advantages(batch, spec, max_new_tokens=max_new_tokens, values=values, reference=reference)
    return batch.per_token["advantages"], batch


@pytest.mark.parametrize(
    ("baseline", "scale", "expected"),
    [
        ("none", "none", [1.0, 0.0, 0.0, 4.0]),
        ("group", "none", [2 / 3, -1 / 3, -1 / 3, 0.0]),
        ("group", "group_std", [x / np.sqrt(3) for x in (2.0, -1.0, -1.0, 0.0)]),
        ("leave_one_out", "none", [1.0, -0.5, -0.5, 0.0]),
        ("batch", "none", [-0.25, -1.25, -1.25, 2.75]),
        ("batch", "batch_std", [x / np.std([1, 0, 0, 4], ddof=1) for x in (-0.25, -1.25, -1.25, 2.75)]),
        ("group", "batch_std", [x / np.std([1, 0, 0, 4], ddof=1) for x in (2 / 3, -1 / 3, -1 / 3, 0.0)]),
        ("group", "advantage_std", [x / np.std([2, -1, -1, 0], ddof=1) for x in (2.0, -1.0, -1.0, 0.0)]),
    ],
)
def test_advantages_of_three_answers_and_one_equal_closed_form(baseline, scale, expected):
    found = of_answers([1.0, 0.0, 0.0, 4.0], [0, 0, 0, 1], baseline=baseline, scale=scale)
    assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("scale", ["group_std", "batch_std", "advantage_std"])
@pytest.mark.parametrize("baseline", ["group", "leave_one_out"])
def test_advantages_by_the_populations_deviation_are_larger_by_a_known_factor(baseline, scale):
    """AReaL, TRL and verl divide by the sample's: √(n / (n - 1)) apart."""
    rewards, groups = [1.0, 0.0, 0.0, 1.0], [0, 0, 0, 0]
    ours = of_answers(rewards, groups, baseline=baseline, scale=scale)
    other = of_answers(rewards, groups, baseline=baseline, scale=scale, std="population")
    assert other == pytest.approx([x * np.sqrt(4 / 3) for x in ours], rel=1e-5)
    assert max(map(abs, ours)) > 0.5


@pytest.mark.parametrize(
    "changes",
    [
        {"scale": "group_std"},
        {"scale": "batch_std"},
        {"scale": "advantage_std"},
        {"baseline": "batch", "scale": "batch_std"},
        {"baseline": "none", "reward_norm": "group", "advantage_norm": "batch"},
        {"baseline": "none", "reward_norm": "batch"},
    ],
)
def test_advantages_of_a_single_answer_are_zero_and_no_nan(changes):
    """A sample of one has no standard deviation."""
    assert of_answers([1.0], [0], **changes) == [0.0]


def test_advantages_in_two_stages_equal_areals_by_hand():
    """Rewards by their group, then advantages by the batch: a group of one gets 0, and the mean moves it."""
    rewards, groups = [1.0, 0.0, 0.0, 4.0], [0, 0, 0, 1]
    first = np.array([2 / 3, -1 / 3, -1 / 3, 0.0]) / np.std([1, 0, 0], ddof=1)
    expected = (first - first.mean()) / np.std(first, ddof=1)
    split = of_answers(rewards, groups, baseline="none", reward_norm="group", advantage_norm="batch")
    joint = of_answers(rewards, groups, scale="group_std", advantage_norm="batch")
    assert split == pytest.approx(expected, rel=1e-5)
    assert joint == pytest.approx(expected, rel=1e-5)


def test_advantages_leave_one_out_of_six_equals_by_hand():
    found = of_answers([1.0, 2, 3, 4, 5, 6], [7] * 6, baseline="leave_one_out")
    assert found[0] == pytest.approx(1 - (2 + 3 + 4 + 5 + 6) / 5)


def test_advantages_of_groups_do_not_depend_on_where_their_answers_are():
    rewards, groups = [1.0, 0.0, 0.5, 3.0, 1.0, 2.0], [0, 0, 1, 1, 0, 1]
    order = [5, 0, 3, 1, 4, 2]
    for changes in ({"scale": "group_std"}, {"baseline": "leave_one_out"}, {"scale": "advantage_std"}):
        straight = of_answers(rewards, groups, **changes)
        mixed = of_answers([rewards[i] for i in order], [groups[i] for i in order], **changes)
        assert mixed == pytest.approx([straight[i] for i in order])


@pytest.mark.parametrize("scale", ["none", "group_std", "batch_std", "advantage_std"])
@pytest.mark.parametrize("baseline", ["group", "leave_one_out"])
def test_advantages_of_partial_groups_stay_of_the_size_of_rewards(baseline, scale):
    """AReaL: a partial group turned a reward of 1 into an advantage of 100,000 and moved all later groups."""
    rewards = [1.0, 0.0, 1.0, 1.0, 1.0, 0.0]
    whole = of_answers(rewards[1:], [1, 1, 1, 2, 2], baseline=baseline, scale=scale)
    found = of_answers(rewards, [0, 1, 1, 1, 2, 2], baseline=baseline, scale=scale)
    assert found[0] == 0.0
    assert max(map(abs, found)) < 3
    if scale in ("none", "group_std"):
        assert found[1:] == pytest.approx(whole)


@pytest.mark.parametrize(
    ("baseline", "scale"),
    [
        ("group", "group_std"),
        ("group", "batch_std"),
        ("group", "advantage_std"),
        ("leave_one_out", "group_std"),
        ("batch", "batch_std"),
    ],
)
def test_advantages_of_equal_rewards_are_exactly_zero(baseline, scale):
    """A mean of equal floats is off by its rounding, which a small deviation would blow up to a signal."""
    for reward in (0.1, 1 / 3, 1e6 + 0.1):
        assert of_answers([reward] * 7, [3] * 7, baseline=baseline, scale=scale) == [0.0] * 7


def test_advantages_rewards_that_differ_by_rounding_alone_teach_next_to_nothing():
    found = of_answers([0.3, 0.1 + 0.2], [0, 0], scale="group_std")
    assert max(map(abs, found)) < 1e-9


def test_reward_of_answer_that_ends_with_a_tool_reaches_every_drawn_token():
    """AReaL: put on the token before the last, the reward of such an answer was lost."""
    groups = groups_of([answer([-1.0, -1.0, None, -1.0, None, None], 1.0), answer([-1.0], 0.0)])
    found, batch = of_groups(groups)
    assert found.tolist() == [0, 0.5, 0.5, 0, 0.5, 0, 0, 0, -0.5]
    for changes in ({"kl": {"where": "reward", "estimator": "k1", "coefficient": 0.5}}, {"preset": "ppo"}):
        zeros = torch.zeros(len(batch.tokens))
        spec = {"preset": "dr_grpo", "baseline": "none", "scale": "none", **changes}
        spec = {**spec, "baseline": "critic"} if changes == {"preset": "ppo"} else spec
        found, _ = of_groups(groups, values=zeros, reference=batch.per_token["behavior"], **spec)
        assert found.tolist() == [0, 1, 1, 0, 1, 0, 0, 0, 0]


def test_kl_reward_is_what_follows_a_token_by_hand():
    """k1 of tokens that are likelier now than for the reference costs; only this token and later ones count."""
    groups = groups_of([answer([-1.0, -2.0, None, -0.5], 1.0)])
    reference = torch.tensor([9.0, -1.5, -2.5, 9.0, -0.25])
    kl = {"where": "reward", "estimator": "k1", "coefficient": 0.1}
    found, _ = of_groups(groups, baseline="none", kl=kl, reference=reference)
    costs = [0.1 * 0.5, 0.1 * 0.5, 0.1 * -0.25]
    assert found.tolist() == pytest.approx([0, 1 - sum(costs), 1 - sum(costs[1:]), 0, 1 - costs[2]])


def test_kl_reward_in_a_group_is_compared_with_whole_answers():
    groups = groups_of([answer([-1.0, -1.0], 1.0), answer([-1.0], 0.0)])
    reference = torch.tensor([0.0, -2.0, -3.0, 0.0, -1.0])
    kl = {"where": "reward", "estimator": "k1", "coefficient": 0.1}
    found, _ = of_groups(groups, kl=kl, reference=reference)
    totals = [1 - 0.1 - 0.2, 0.0]
    mean = sum(totals) / 2
    assert found.tolist() == pytest.approx([0, totals[0] - mean, 1 - 0.2 - mean, 0, totals[1] - mean])


def test_kl_reward_of_a_group_of_one_is_not_divided_by_its_deviation():
    groups = groups_of([answer([-1.0, -1.0], 1.0)], [answer([-1.0], 0.0), answer([-2.0], 1.0)])
    reference = torch.full((7,), -1.5)
    kl = {"where": "reward", "estimator": "k1", "coefficient": 0.1}
    found, _ = of_groups(groups, scale="group_std", kl=kl, reference=reference)
    assert found.abs().max() < 2.0


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.9, 0.95), (1.0, 0.0), (0.5, 1.0)])
def test_critic_advantages_equal_a_loop_over_trained_tokens(gamma, lam):
    """Tokens of tools are no steps: no discount, no value, and credit passes over them."""
    logprobs = [[-1.0, None, None, -1.0, -1.0, None], [-1.0], [None, -1.0, -1.0]]
    rewards = [1.0, 0.5, -1.0]
    groups = groups_of([answer(x, r, prompt=2) for x, r in zip(logprobs, rewards, strict=True)])
    values = torch.rand(sum(len(x) + 2 for x in logprobs), generator=torch.Generator().manual_seed(0))
    critic = {"gamma": gamma, "lam": lam}
    found, batch = of_groups(groups, preset="ppo", scale="none", critic=critic, values=values)
    start = 0
    for x, reward in zip(logprobs, rewards, strict=True):
        at = [start + 2 + i for i, y in enumerate(x) if y is not None]
        advantage = 0.0
        for k in reversed(range(len(at))):
            last = k == len(at) - 1
            following = 0.0 if last else values[at[k + 1]].item()
            delta = (reward if last else 0.0) + gamma * following - values[at[k]].item()
            advantage = delta + gamma * lam * (0.0 if last else advantage)
            assert found[at[k]].item() == pytest.approx(advantage, abs=1e-6)
            target = advantage + values[at[k]].item()
            assert batch.per_token["returns"][at[k]].item() == pytest.approx(target, abs=1e-6)
        start += len(x) + 2
    assert found[batch.loss_mask == 0].abs().sum() == 0


def test_critic_answer_that_was_cut_off_is_not_bootstrapped():
    """The value after the last token would pay answers for being long."""
    cut, ended = (groups_of([answer([-1.0, -1.0], 0.0, stop=stop)]) for stop in ("length", "eos"))
    values = torch.tensor([0.0, 0.5, 0.9])
    settings = {"preset": "ppo", "scale": "none", "values": values}
    assert of_groups(cut, **settings)[0].tolist() == of_groups(ended, **settings)[0].tolist()
    assert of_groups(cut, **settings)[0].tolist() == pytest.approx([0.0, -0.5, -0.9])


def test_critic_batch_std_centres_and_scales_all_tokens():
    groups = groups_of([answer([-1.0, -1.0, None], 1.0), answer([-1.0], 0.0)])
    values = torch.tensor([0.0, 0.3, 0.6, 0.0, 0.0, 0.2])
    found, batch = of_groups(groups, preset="ppo", values=values)
    raw = np.array([1 - 0.3, 1 - 0.6, -0.2])
    trained = found[batch.loss_mask > 0].numpy()
    np.testing.assert_allclose(trained, (raw - raw.mean()) / raw.std(ddof=1), rtol=1e-5)


@pytest.mark.parametrize("returns_lam", [None, 0.5, 1.0])
@pytest.mark.parametrize(("strategy", "lam"), [("constant", 0.9), ("length", 0.6), ("position", 0.25)])
def test_critic_lam_of_each_answer_and_of_returns_equal_a_loop(strategy, lam, returns_lam):
    logprobs, rewards = [[-1.0, None, -1.0, -1.0, -1.0], [-1.0], [-1.0, -1.0]], [1.0, 0.5, -1.0]
    groups = groups_of([answer(x, r) for x, r in zip(logprobs, rewards, strict=True)])
    values = torch.rand(sum(len(x) + 1 for x in logprobs), generator=torch.Generator().manual_seed(0))
    critic = {"lam": lam, "lam_strategy": strategy, "returns_lam": returns_lam}
    found, batch = of_groups(groups, preset="ppo", scale="none", critic=critic, values=values)
    start = 0
    for x, reward in zip(logprobs, rewards, strict=True):
        at = [start + 1 + i for i, y in enumerate(x) if y is not None]
        n = len(at)
        own = {"constant": lam, "length": max(0, 1 - 1 / (lam * n)), "position": lam ** (1 / max(1, n - 1))}[strategy]
        advantage = target = 0.0
        for k in reversed(range(n)):
            following = 0.0 if k == n - 1 else values[at[k + 1]].item()
            delta = (reward if k == n - 1 else 0.0) + following - values[at[k]].item()
            advantage = delta + own * advantage
            target = delta + (own if returns_lam is None else returns_lam) * target
            assert found[at[k]].item() == pytest.approx(advantage, abs=1e-6)
            assert batch.per_token["returns"][at[k]].item() == pytest.approx(target + values[at[k]].item(), abs=1e-6)
        start += len(x) + 1


def test_sequence_ratio_takes_the_mean_of_an_answers_advantages():
    """AReaL's golden: [1, 2, 3, 4] and four times ½ at ratio 1 give a loss of -1.5."""
    spec = algorithm("gspo", scale="none", baseline="none")
    places, trained = torch.tensor([0] * 5 + [1] * 5), torch.tensor([1, 1, 1, 1, 0] * 2, dtype=torch.bool)
    extra = torch.tensor([-1.0, -1, -1, 4, 99, 0, 0, 0, 0, 99])
    found = token_advantages(
        spec, torch.tensor([0.0, 0.5]), torch.zeros(2), places, trained, token_rewards=extra
    ).advantages
    assert found.tolist() == [2.5] * 4 + [0] + [0.5] * 4 + [0]


@pytest.mark.parametrize(
    ("tokens", "cut", "expected"),
    [(60, 0, 0.0), (80, 0, 0.0), (90, 0, -1.0), (95, 0, -1.5), (100, 0, -2.0), (100, 1, -2.0), (30, 1, -2.0)],
)
def test_overlong_penalty_grows_over_the_buffer(tokens, cut, expected):
    """An answer that ended by itself loses nothing before the buffer, however long the others are; one that was cut
    off loses all, also where the context cut it after few tokens."""
    spec = PenalizeSpec(type="penalize", buffer=0.2, factor=2.0)
    found = overlong_penalty(spec, torch.tensor([float(tokens)]), torch.tensor([cut > 0]), 100)
    assert found.item() == pytest.approx(expected)


def test_truncated_the_longest_answer_of_a_batch_keeps_its_reward_if_it_ended():
    """AReaL: whoever was as long as the padded batch counted as cut off, so the longest answer always did."""
    groups = groups_of([answer([-1.0] * 4, 1.0), answer([-1.0], 0.0)])
    for truncated in ({"type": "penalize", "buffer": 0.2, "factor": 1.0}, {"type": "mask"}):
        found, _ = of_groups(groups, max_new_tokens=8, truncated=truncated)
        assert found.tolist() == [0] + [0.5] * 4 + [0, -0.5]


def test_truncated_answer_that_is_masked_counts_in_its_groups_baseline():
    groups = groups_of([answer([-1.0], 1.0), answer([-1.0], 0.0, stop="length"), answer([-1.0], 0.0, stop="abort")])
    found, batch = of_groups(groups, truncated={"type": "mask"})
    assert found.tolist() == pytest.approx([0, 2 / 3, 0, 0, 0, 0])
    assert batch.loss_mask.tolist() == [0, 1, 0, 0, 0, 0]


def test_truncated_answer_that_is_penalized_is_compared_with_what_it_has_left():
    groups = groups_of([answer([-1.0], 1.0, stop="length"), answer([-1.0], 1.0)])
    found, batch = of_groups(groups, truncated={"type": "penalize", "buffer": 0.5, "factor": 1.0})
    assert found.tolist() == [0, -0.5, 0, 0.5]
    assert batch.per_sequence["reward"].tolist() == [1.0, 1.0]  # what the judge said stays


def test_advantages_nothing_trained_are_zero():
    groups = groups_of([answer([None, None], 1.0), answer([], 0.0)])
    for preset in ("dr_grpo", "ppo", "gspo", "reinforce_pp"):
        kl = {} if preset == "ppo" else {"kl": {"where": "none"}}
        kind = {"aggregation": "sequence"} if preset == "gspo" else {}
        found, _ = of_groups(groups, preset=preset, values=torch.zeros(4), **kl, **kind)
        assert found.tolist() == [0, 0, 0, 0]


@given(
    st.lists(st.tuples(st.integers(0, 3), st.floats(-5, 5)), min_size=1, max_size=12),
    st.sampled_from(["group", "leave_one_out"]),
    st.sampled_from(["none", "group_std"]),
)
def test_advantages_of_each_group_add_up_to_zero(pairs, baseline, scale):
    groups, rewards = [g for g, _ in pairs], [r for _, r in pairs]
    found = of_answers(rewards, groups, baseline=baseline, scale=scale)
    for group in set(groups):
        assert sum(a for a, g in zip(found, groups, strict=True) if g == group) == pytest.approx(0, abs=1e-6)


@given(st.lists(st.floats(-5, 5), min_size=2, max_size=8), st.floats(-10, 10))
def test_advantages_do_not_change_when_all_rewards_of_a_group_move(rewards, by):
    for changes in ({"scale": "group_std"}, {"baseline": "leave_one_out"}):
        if np.std(rewards) < 1e-3:
            continue
        moved = of_answers([r + by for r in rewards], [0] * len(rewards), **changes)
        assert moved == pytest.approx(of_answers(rewards, [0] * len(rewards), **changes), rel=1e-6, abs=1e-6)
