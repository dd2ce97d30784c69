"""The parts of a loss by hand: trust regions, KL, entropy, ratios of sequences, and what is told beside the loss."""

import math
from dataclasses import replace

import pytest
import torch
from posttrain_cases import MAX_NEW_TOKENS, algorithm, answer, groups_of, random_case

from palestra.posttrain.batch import denominator, pack, with_advantages
from palestra.posttrain.loss import averages, token_losses
from palestra.rl import losses as trust
from palestra.rl.losses import ppo_policy_terms

ONE = torch.ones(1, dtype=torch.float64)


def of_ratio(function, ratio, advantage, **settings):
    """Loss, slope in log π, and whether it was held below or above, at one ratio."""
    logprob = torch.tensor([math.log(ratio)], dtype=torch.float64, requires_grad=True)
    terms = function(logprob.exp(), advantage * ONE, **settings)
    terms.loss.sum().backward()
    return terms.loss.item(), logprob.grad.item(), terms.low.item(), terms.high.item()


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope", "low", "high"),
    [
        (1.0, 1.0, -1.0, -1.0, False, False),
        (1.25, 1.0, -1.25, -1.25, False, False),
        (1.5, 1.0, -1.28, 0.0, False, True),
        (0.5, 1.0, -0.5, -0.5, False, False),
        (0.5, -1.0, 0.8, 0.0, True, False),
        (2.0, -1.0, 2.0, 2.0, False, False),
        (4.0, -1.0, 3.0, 0.0, False, True),
        (4.0, 1.0, -1.28, 0.0, False, True),
    ],
)
def test_clipped_with_dual_equals_table(ratio, advantage, loss, slope, low, high):
    found = of_ratio(trust.clipped, ratio, advantage, low=0.2, high=0.28, dual=3.0)
    assert found == (pytest.approx(loss), pytest.approx(slope), low, high)


def test_clipped_equals_the_surrogate_of_control():
    draw = torch.Generator().manual_seed(0)
    logprobs, old, advantages = (torch.randn(256, generator=draw, dtype=torch.float64) for _ in range(3))
    terms = trust.clipped((logprobs - old).exp(), advantages, low=0.2, high=0.3)
    expected = ppo_policy_terms(logprobs, old, advantages, clip_low=0.2, clip_high=0.3)
    torch.testing.assert_close(terms.loss, expected.loss)
    assert terms.low.any()
    assert terms.high.any()
    assert not (terms.low & terms.high).any()


def test_unlimited_is_the_ratio_times_the_advantage():
    assert of_ratio(trust.unlimited, 7.0, -2.0) == (pytest.approx(14.0), pytest.approx(14.0), False, False)


@pytest.mark.parametrize(
    ("ratio", "weight", "low", "high"), [(0.1, 0.5, True, False), (1.0, 1.0, False, False), (9.0, 5.0, False, True)]
)
def test_clipped_weight_never_stops_the_gradient(ratio, weight, low, high):
    logprob = torch.tensor([-2.0], dtype=torch.float64, requires_grad=True)
    terms = trust.clipped_weight(logprob, ratio * ONE, -3.0 * ONE, low=0.5, high=5.0)
    terms.loss.sum().backward()
    assert terms.loss.item() == pytest.approx(weight * 3.0 * -2.0)
    assert logprob.grad.item() == pytest.approx(weight * 3.0)
    assert (terms.low.item(), terms.high.item()) == (low, high)


def test_soft_gate_at_ratio_one_has_value_two_over_tau_and_the_gradient_of_the_policy():
    for tau in (0.5, 1.0, 2.0):
        loss, slope, *_ = of_ratio(trust.soft_gate, 1.0, 1.0, positive=tau, negative=9.0)
        assert loss == pytest.approx(-2.0 / tau)
        assert slope == pytest.approx(-1.0)
        assert of_ratio(trust.soft_gate, 1.0, -1.0, positive=9.0, negative=tau)[1] == pytest.approx(1.0)


def test_soft_gate_fades_on_both_sides_and_sooner_with_a_larger_tau():
    def slope(ratio, tau):
        return -of_ratio(trust.soft_gate, ratio, 1.0, positive=tau, negative=tau)[1] / ratio

    assert slope(1.0, 1.0) > slope(2.0, 1.0) > slope(4.0, 1.0) > 0
    assert slope(1.0, 1.0) > slope(0.5, 1.0) > 0
    assert slope(2.0, 3.0) < slope(2.0, 1.0)


@pytest.mark.parametrize(
    ("now", "before", "advantage", "kept"),
    [
        (0.75, 0.5, 1.0, False),
        (0.75, 0.5, -1.0, True),
        (0.25, 0.5, -1.0, False),
        (0.25, 0.5, 1.0, True),
        (0.69, 0.5, 1.0, True),
        (0.01, 0.0001, 1.0, True),  # a ratio of 100, and hardly any probability has moved
    ],
)
def test_tv_mask_drops_tokens_whose_probability_moved_the_way_they_are_pushed(now, before, advantage, kept):
    logprob = torch.tensor([math.log(now)], dtype=torch.float64, requires_grad=True)
    anchor = torch.tensor([math.log(before)], dtype=torch.float64)
    ratio = (logprob - anchor).exp()
    terms = trust.tv_mask(logprob, anchor, ratio, advantage * ONE, threshold=0.2)
    terms.loss.sum().backward()
    expected = -advantage * now / before if kept else 0.0
    assert terms.loss.item() == pytest.approx(expected)
    assert logprob.grad.item() == pytest.approx(expected)
    assert (terms.low | terms.high).item() is not kept


def sums_of(groups, now, *, entropy=None, max_new_tokens=MAX_NEW_TOKENS, changes=None, **given):
    """Loss of a batch and the means of what is told, of log-probabilities (T)."""
    spec = algorithm(**(changes or {}))
    batch = with_advantages(pack(groups, spec), spec, max_new_tokens=max_new_tokens, **given)
    now = torch.tensor(now, dtype=torch.float32, requires_grad=True)
    found = token_losses(spec, batch, now, torch.zeros(len(now)) if entropy is None else torch.tensor(entropy))
    loss = (batch.per_token["weights"] * found.losses).sum() / denominator(batch, spec, max_new_tokens)
    loss.backward()
    return loss.item(), now.grad.tolist(), averages({name: values.sum() for name, values in found.terms.items()})


NONE = {"preset": "dr_grpo", "baseline": "none", "scale": "none", "trust": {"type": "none"}}


@pytest.mark.parametrize(("lengths", "moves"), [([4, 4], [0.5, 1.0]), ([3, 5, 4], [0.2, -0.3, 0.0])])
def test_sequence_ratio_is_the_geometric_mean_over_each_answer(lengths, moves):
    groups = groups_of([answer([-2.0] * n, 1.0) for n in lengths])
    now = [x for n, move in zip(lengths, moves, strict=True) for x in [9.0] + [-2.0 + move] * n]
    spec = {**NONE, "preset": "gspo"}
    loss, slopes, told = sums_of(groups, now, changes=spec)
    assert loss == pytest.approx(-sum(map(math.exp, moves)) / len(moves), rel=1e-5)
    expected = sum(n * math.exp(move) for n, move in zip(lengths, moves, strict=True)) / sum(lengths)
    assert told["ratio"] == pytest.approx(expected, rel=1e-5)
    # d s / d log π of a token is s / n, and there are n of them.
    assert slopes[1] == pytest.approx(-math.exp(moves[0]) / lengths[0] / len(moves), rel=1e-5)


def test_sequence_ratio_ignores_prompts_and_tools():
    """What is not trained leaked into the mean of a system that divided by the padded length."""
    inside = groups_of([answer([-1.0, None, None, -1.0, None], 1.0, prompt=3)])
    plain = groups_of([answer([-1.0, -1.0], 1.0)])
    spec = {**NONE, "preset": "gspo"}
    one = sums_of(inside, [7.0, 7, 7, -0.5, 9, -9, -0.9, 9], changes=spec)
    other = sums_of(plain, [7.0, -0.5, -0.9], changes=spec)
    assert one[0] == pytest.approx(other[0])
    assert one[2] == pytest.approx(other[2])


def test_sequence_ratio_clips_whole_answers():
    groups = groups_of([answer([-1.0, -1.0], 1.0), answer([-1.0, -1.0], 0.0)])
    _, slopes, told = sums_of(groups, [0.0, -0.9, -1.0, 0.0, -1.1, -1.0], changes={"preset": "gspo"})
    assert slopes == [0.0] * 6
    assert (told["clipped_high"], told["clipped_low"]) == (0.5, 0.5)


@pytest.mark.parametrize(
    ("estimator", "value", "slope"),
    # x = log reference - log π = 0.5: k2 is x²/2 with slope -x, k3 is exp(x) - 1 - x with slope 1 - exp(x).
    [("k2", 0.125, -0.5), ("k3", math.exp(0.5) - 1.5, 1 - math.exp(0.5))],
)
def test_kl_in_the_loss_has_the_value_and_direction_of_the_golden(estimator, value, slope):
    """rlvr-experiments flipped this sign in a refactoring and ran so for a week. A token that the reference finds
    likelier must become likelier: its slope is negative."""
    groups = groups_of([answer([-1.0], 0.0)])
    kl = {"where": "loss", "estimator": estimator, "coefficient": 0.1}
    reference = torch.tensor([0.0, -0.5])
    changes = {**NONE, "aggregation": "token", "kl": kl}
    loss, slopes, told = sums_of(groups, [0.0, -1.0], changes=changes, reference=reference)
    assert loss == pytest.approx(0.1 * value, rel=1e-5)
    assert slopes == pytest.approx([0.0, 0.1 * slope], rel=1e-5)
    assert told["kl_reference"] == pytest.approx(math.exp(0.5) - 1.5, rel=1e-5)


def test_kl_in_the_loss_of_the_reference_itself_is_zero():
    groups = groups_of([answer([-1.0, -2.0], 0.0)])
    kl = {"where": "loss", "estimator": "k3", "coefficient": 0.1}
    now = [0.0, -1.0, -2.0]
    loss, slopes, _ = sums_of(groups, now, changes={**NONE, "kl": kl}, reference=torch.tensor(now))
    assert loss == 0.0
    assert slopes == [0.0] * 3


def test_kl_in_the_loss_without_a_reference_raises():
    spec = algorithm("grpo")
    case = random_case(spec, 0)
    without = {name: values for name, values in case.batch.per_token.items() if name != "reference"}
    with pytest.raises(ValueError, match="reference"):
        token_losses(spec, replace(case.batch, per_token=without), case.now, case.entropy)


def test_kl_in_the_reward_is_not_in_the_loss_a_second_time():
    groups = groups_of([answer([-1.0], 0.0)])
    kl = {"where": "reward", "estimator": "k1", "coefficient": 0.5}
    changes = {**NONE, "aggregation": "token", "kl": kl}
    loss, _, _ = sums_of(groups, [0.0, -1.0], changes=changes, reference=torch.tensor([0.0, -3.0]))
    assert loss == pytest.approx(0.5 * 2.0)  # an advantage of -1, at ratio 1


def test_entropy_is_what_is_maximized():
    groups = groups_of([answer([-1.0, None, -1.0], 0.0)])
    changes = {**NONE, "aggregation": "token", "entropy": 0.01}
    loss, _, told = sums_of(groups, [0.0, -1.0, 0.0, -1.0], entropy=[5.0, 1.0, 5.0, 2.0], changes=changes)
    assert loss == pytest.approx(-0.01 * 1.5)
    assert told["entropy"] == pytest.approx(1.5)


def test_correction_weighs_the_policys_part_alone():
    groups = groups_of([answer([-1.0], 1.0)])
    kl = {"where": "loss", "estimator": "k2", "coefficient": 1.0}
    base = {**NONE, "aggregation": "token", "kl": kl, "anchor": "recomputed"}
    given = {"anchor": torch.tensor([0.0, -0.8]), "reference": torch.tensor([0.0, -1.7])}
    for spec, weight in (({"type": "none"}, 1.0), ({"type": "truncate"}, math.exp(0.2)), ({"type": "mask"}, 1.0)):
        spec = {**spec, "low": 1.0, "high": 1.0} if spec["type"] == "mask" else spec
        expected = 0.0 if spec["type"] == "mask" else weight
        loss, _, told = sums_of(groups, [0.0, -0.7], changes={**base, "correction": spec}, **given)
        assert loss == pytest.approx(-expected * math.exp(0.1) + 0.5, rel=1e-5)
        assert told["masked"] == (spec["type"] == "mask")


def test_averages_equal_by_hand():
    groups = groups_of([answer([-1.0, -1.0, None], 1.0), answer([-1.0, -1.0], 0.0)])
    moves = [0.5, 0.0, -0.5, 0.1]
    now = [0.0, -0.5, -1.0, 0.0, 0.0, -1.5, -0.9]
    changes = {"preset": "dr_grpo", "aggregation": "token"}
    _, _, told = sums_of(groups, now, entropy=[9.0, 1.0, 2.0, 9.0, 9.0, 3.0, 4.0], changes=changes)
    ratios = [math.exp(move) for move in moves]
    assert told["ratio"] == pytest.approx(sum(ratios) / 4)
    assert told["clipped_high"] == 0.25
    assert told["clipped_low"] == 0.25
    assert told["masked"] == 0.0
    assert told["entropy"] == pytest.approx(2.5)
    assert told["kl_behaviour"] == pytest.approx(sum(r - 1 - m for r, m in zip(ratios, moves, strict=True)) / 4)
    assert told["effective_samples"] == pytest.approx(sum(ratios) ** 2 / (4 * sum(r * r for r in ratios)))
    assert "kl_reference" not in told


def test_averages_do_not_depend_on_what_the_sums_were_divided_by():
    case = random_case(algorithm("grpo"), 1)
    found = token_losses(algorithm("grpo"), case.batch, case.now, case.entropy)
    sums = {name: values.sum() for name, values in found.terms.items() if name != "policy"}
    assert averages({name: value / 7 for name, value in sums.items()}) == pytest.approx(averages(sums))


def test_averages_of_nothing_trained_are_zero():
    groups = groups_of([answer([], 1.0)])
    loss, _, told = sums_of(groups, [0.0], changes=NONE)
    assert loss == 0.0
    assert set(told.values()) == {0.0}
    assert "ratio" in told


@pytest.mark.parametrize("preset", ["grpo", "gspo", "cispo", "sapo", "dppo", "m2po", "rloo"])
@pytest.mark.parametrize("move", [300.0, -300.0])
def test_loss_of_ratios_without_bound_stays_finite(preset, move):
    """exp overflows at 88 in FP32, and infinity times the gradient 0 of a clip is no number."""
    groups = groups_of([answer([-400.0], 1.0), answer([-400.0], 0.0), answer([-1.0], 0.0)])
    now = [0.0, -400.0 + move, 0.0, -400.0 + move, 0.0, -1.0]
    same = torch.tensor([0.0, -400.0, 0.0, -400.0, 0.0, -1.0])
    given = {"anchor": same, "reference": same}
    loss, slopes, told = sums_of(groups, now, changes={"preset": preset}, **given)
    assert math.isfinite(loss)
    assert all(map(math.isfinite, slopes))
    assert all(map(math.isfinite, told.values()))
