"""Groups to a packed batch: what is trained, where each number lies, and what sums are weighted and divided by."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from posttrain_cases import MAX_NEW_TOKENS, algorithm, answer, double, groups_of, random_groups

from palestra.lm.batch import Batch
from palestra.posttrain.batch import correction, denominator, pack, with_advantages
from palestra.rl.losses import second_moment_mask
from palestra.spec.algorithm import PRESETS, MaskSpec, TruncateSpec

TRUNCATE = TruncateSpec(type="truncate", high=2.0)
MASK = MaskSpec(type="mask", low=0.5, high=2.0)


def filled(groups, preset="dr_grpo", **changes):
    """A batch with what a preset needs; other models say what behavior did unless told otherwise."""
    given = {name: changes.pop(name) for name in ("anchor", "reference", "values") if name in changes}
    spec = algorithm(preset, **changes)
    batch = pack(groups, spec)
    zeros = torch.zeros(len(batch.tokens))
    same = batch.per_token["behavior"]
    return with_advantages(
        batch,
        spec,
        max_new_tokens=MAX_NEW_TOKENS,
        **{"anchor": same, "reference": same, "values": zeros, **given},
    ), spec


def test_pack_index_t_means_token_t_in_every_array():
    """AReaL rolled log-probabilities by one and versions not: stale tokens were taken for fresh ones."""
    first = answer([-1.0, -2.0, None, -3.0], 1.0, prompt=2, tokens=[5, 6, 7, 8], versions=[3, 3, 3, 4])
    second = answer([-4.0], 0.0, prompt=1, tokens=[9], versions=[5])
    batch = pack(groups_of([first], [second]), algorithm())
    assert batch.tokens.tolist() == [1, 1, 5, 6, 7, 8, 1, 9]
    assert batch.lengths == [6, 2]
    assert batch.loss_mask.tolist() == [0, 0, 1, 1, 0, 1, 0, 1]
    assert batch.per_token["behavior"].tolist() == [0, 0, -1, -2, 0, -3, 0, -4]
    assert batch.per_token["versions"].tolist() == [-1, -1, 3, 3, -1, 4, -1, 5]
    assert batch.per_sequence["group"].tolist() == [0, 1]
    assert batch.per_sequence["reward"].tolist() == [1, 0]


@pytest.mark.parametrize("end", [0, 1, 2])
def test_pack_trains_the_end_of_an_answer_whatever_its_token(end):
    """rlvr-experiments made the mask from `token != pad`: where pad was the end of text, nobody learned to stop."""
    batch = pack(groups_of([answer([-1.0, -1.0], 1.0, prompt=2, tokens=[0, end])]), algorithm())
    assert batch.loss_mask.tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), float("-inf")])
def test_pack_token_without_a_finite_logprob_is_left_out_and_counted(broken):
    groups = groups_of([answer([-1.0, broken, -1.0], 1.0), answer([-1.0], 0.0)])
    batch = pack(groups, algorithm())
    assert batch.loss_mask.tolist() == [0, 1, 0, 1, 0, 1]
    assert batch.per_sequence["unscored"].tolist() == [1, 0]
    assert batch.per_token["behavior"].isfinite().all()


def test_pack_a_tools_logprob_that_is_no_number_is_not_counted():
    one = answer([-1.0, None], 1.0)
    one = replace(one, logprobs=(*one.logprobs[:-1], math.nan))
    batch = pack(groups_of([one]), algorithm())
    assert batch.per_sequence["unscored"].tolist() == [0]


def test_pack_without_a_prompt_does_not_train_the_first_token():
    batch = pack(groups_of([answer([-1.0, -1.0], 1.0, prompt=0)]), algorithm())
    assert batch.loss_mask.tolist() == [0, 1]


@pytest.mark.parametrize(("stop", "cut"), [("eos", 0), ("stop", 0), ("length", 1), ("abort", 1)])
def test_pack_truncated_is_told_by_the_reason_to_stop(stop, cut):
    batch = pack(groups_of([answer([-1.0] * 3, 1.0, stop=stop), answer([-1.0] * 9, 1.0)]), algorithm())
    assert batch.per_sequence["truncated"].tolist() == [cut, 0]


def test_pack_turn_tokens_are_those_of_the_last_turn():
    turns = ((1, 3), (4, 7))
    one = answer([-1.0, -1.0, None, -1.0, -1.0, -1.0, None], 1.0, turns=turns)
    batch = pack(groups_of([one, answer([-1.0] * 2, 0.0)]), algorithm())
    assert batch.per_sequence["turn_tokens"].tolist() == [3, 2]


def test_pack_nothing_raises():
    with pytest.raises(ValueError, match="at least one trajectory"):
        pack(groups_of([]), algorithm())


def test_pack_group_without_answers_leaves_its_number_free():
    batch = pack(groups_of([answer([-1.0], 1.0)], [], [answer([-1.0], 1.0)]), algorithm())
    assert batch.per_sequence["group"].tolist() == [0, 2]


@pytest.mark.parametrize(
    ("aggregation", "weights", "divided_by"),
    [
        ("token", [1, 1, 1, 1, 1, 1], 6),
        ("constant", [1, 1, 1, 1, 1, 1], 4 * MAX_NEW_TOKENS),
        ("sequence", [1 / 3, 1 / 3, 1 / 3, 1, 1 / 2, 1 / 2], 3),
        ("prompt", [1 / 4, 1 / 4, 1 / 4, 1 / 4, 1 / 2, 1 / 2], 2),
    ],
)
def test_weights_and_denominator_equal_by_hand(aggregation, weights, divided_by):
    """Three tokens and one for one prompt; two, and an answer of which nothing is trained, for the other."""
    groups = groups_of([answer([-1.0, None, -1, -1], 1.0), answer([-1.0], 0.0)], [answer([-1.0] * 2, 1), answer([], 0)])
    batch, spec = filled(groups, aggregation=aggregation)
    assert batch.per_token["weights"][batch.loss_mask > 0].tolist() == pytest.approx(weights)
    assert batch.per_token["weights"][batch.loss_mask == 0].abs().sum() == 0
    assert denominator(batch, spec, MAX_NEW_TOKENS) == divided_by


@pytest.mark.parametrize("aggregation", ["token", "sequence", "prompt", "constant"])
def test_weights_of_minibatches_are_those_of_the_whole(aggregation):
    """Minibatches are cut by prompts: denominators of the parts add up, and parts keep the weights of the whole."""
    batch, spec = filled(random_groups(2), aggregation=aggregation)
    groups = batch.per_sequence["group"]
    parts = [batch.select((groups % 2 == odd).nonzero()[:, 0].tolist()) for odd in (0, 1)]
    total = sum(denominator(part, spec, MAX_NEW_TOKENS) for part in parts)
    assert total == denominator(batch, spec, MAX_NEW_TOKENS)
    weights = sum(float(part.per_token["weights"].sum()) for part in parts)
    if aggregation != "constant":  # a mean: the weights of a batch add up to what they are divided by
        assert weights == pytest.approx(total)


def test_denominator_of_nothing_trained_is_one_and_not_zero():
    groups = groups_of([answer([], 1.0)])
    for aggregation in ("token", "sequence", "prompt"):
        batch, spec = filled(groups, aggregation=aggregation)
        assert denominator(batch, spec, MAX_NEW_TOKENS) == 1.0


@pytest.mark.parametrize(
    ("changes", "missing"),
    [
        ({"preset": "grpo"}, "reference"),
        ({"preset": "reinforce_pp"}, "reference"),
        ({"preset": "m2po"}, "anchor"),
        ({"preset": "grpo", "kl": {"where": "none"}, "anchor": "recomputed"}, "anchor"),
        ({"preset": "ppo"}, "values"),
    ],
)
def test_with_advantages_without_what_it_needs_raises(changes, missing):
    """AReaL took a missing reference for log-probabilities of 0, which paid every token for being unlikely."""
    spec = algorithm(**changes)
    batch = pack(groups_of([answer([-1.0], 1.0)]), spec)
    with pytest.raises(ValueError, match=missing):
        with_advantages(batch, spec, max_new_tokens=4)


@pytest.mark.parametrize("preset", PRESETS)
def test_with_advantages_leaves_its_argument_alone(preset):
    spec = algorithm(preset)
    batch = pack(random_groups(1), spec)
    before = {name: values.clone() for name, values in batch.per_token.items()}
    names = set(batch.per_token), set(batch.per_sequence)
    zeros = torch.zeros(len(batch.tokens))
    with_advantages(batch, spec, max_new_tokens=4, reference=zeros, anchor=zeros, values=zeros)
    assert (set(batch.per_token), set(batch.per_sequence)) == names
    assert all(torch.equal(batch.per_token[name], values) for name, values in before.items())


def test_with_advantages_anchor_is_what_drew_the_tokens_or_the_policy_of_now():
    groups = groups_of([answer([-1.0, -2.0], 1.0), answer([-1.0], 0.0)])
    now = torch.tensor([0.0, -1.5, -2.5, 0.0, -0.5])
    behavior, _ = filled(groups, anchor=now)
    assert torch.equal(behavior.per_token["anchor"], behavior.per_token["behavior"])
    spec = algorithm("dr_grpo", anchor="recomputed")
    recomputed = with_advantages(pack(groups, spec), spec, max_new_tokens=4, anchor=now)
    assert torch.equal(recomputed.per_token["anchor"], now)
    ratios = torch.exp(now - recomputed.per_token["behavior"]).clamp(max=2.0) * recomputed.loss_mask
    torch.testing.assert_close(recomputed.per_token["correction"], ratios)


def test_with_advantages_sequence_advantage_is_the_mean_of_its_trained_tokens():
    groups = groups_of([answer([-1.0, None, -1.0], 1.0), answer([], 0.0)])
    batch, _ = filled(groups)
    assert batch.per_sequence["advantage"].tolist() == [0.5, 0.0]


def corrected(spec, logs, lengths=None, trained=None):
    logs = torch.tensor(logs, dtype=torch.float64)
    lengths = lengths or [len(logs)]
    places = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    mask = torch.ones(len(logs), dtype=torch.bool) if trained is None else torch.tensor(trained, dtype=torch.bool)
    return correction(spec, logs, places, mask, len(lengths)).tolist()


def test_correction_truncate_caps_and_keeps_every_token():
    assert corrected(TRUNCATE, [-1.0, 0.0, 0.5, 1.0]) == pytest.approx([math.exp(-1), 1, math.exp(0.5), 2.0])


def test_correction_mask_drops_what_is_outside_and_keeps_the_bounds():
    found = corrected(MASK, [-1.0, 0.0, 0.5, 1.0])
    assert found == pytest.approx([0, 1, math.exp(0.5), 0])
    exact = MaskSpec(type="mask", low=1.0, high=1.0)
    assert corrected(exact, [0.0]) == [1.0]


@pytest.mark.parametrize(
    ("logs", "lengths", "expected"),
    [
        ([0.0, 0.5, 1.0], [3], [math.exp(0.5)] * 3),
        ([0.0, 0.6, 0.3, 0.0, 0.0], [3, 2], [math.exp(0.3)] * 3 + [1.0] * 2),
    ],
)
def test_correction_geometric_is_the_mean_of_logarithms(logs, lengths, expected):
    assert corrected(TRUNCATE.model_copy(update={"level": "geometric"}), logs, lengths) == pytest.approx(expected)


def test_correction_sequence_is_the_product_and_grows_with_length():
    product = TRUNCATE.model_copy(update={"level": "sequence", "high": 100.0})
    assert corrected(product, [0.1] * 3 + [0.1] * 6, [3, 6]) == pytest.approx([math.exp(0.3)] * 3 + [math.exp(0.6)] * 6)
    masked = MASK.model_copy(update={"level": "sequence"})
    assert corrected(masked, [0.3, 0.3, 0.3, 0.3], [2, 2]) == pytest.approx([math.exp(0.6)] * 4)
    assert corrected(masked, [0.4, 0.4, -0.4, 0.4], [2, 2]) == pytest.approx([0, 0, 1, 1])


@pytest.mark.parametrize(("level", "log"), [("token", 0.2), ("sequence", 0.4), ("geometric", 0.2)])
def test_correction_does_not_read_what_is_not_trained(level, log):
    spec = TRUNCATE.model_copy(update={"level": level})
    found = corrected(spec, [math.nan, 0.2, 50.0, 0.2, math.inf], trained=[0, 1, 0, 1, 0])
    assert found == pytest.approx([0, math.exp(log), 0, math.exp(log), 0])


def test_correction_of_ratios_without_bound_stays_finite():
    for level in ("token", "sequence", "geometric"):
        spec = TRUNCATE.model_copy(update={"level": level})
        assert np.isfinite(corrected(spec, [1e4, -1e4, 1e4])).all()


def test_correction_mask_leaves_the_denominator_as_it_was():
    groups = groups_of([answer([-1.0, -1.0], 1.0), answer([-1.0], 0.0)])
    now = torch.tensor([0.0, -0.9, -5.0, 0.0, -1.0])
    spec = algorithm("dr_grpo", aggregation="token", anchor="recomputed", correction={"type": "mask"})
    batch = with_advantages(pack(groups, spec), spec, max_new_tokens=4, anchor=now)
    assert (batch.per_token["correction"] > 0).sum() == 2
    assert denominator(batch, spec, 4) == 3


def test_second_moment_mask_drops_the_largest_until_the_mean_is_small():
    logs = torch.tensor([0.1, -1.0, 0.2, 0.3, -0.1])
    # Squares 0.01, 1, 0.04, 0.09, 0.01; all of them 0.23, without the largest 0.0375.
    assert second_moment_mask(logs, threshold=0.04).tolist() == [True, False, True, True, True]
    assert second_moment_mask(logs, threshold=0.03).tolist() == [True, False, True, False, True]
    assert second_moment_mask(logs, threshold=0.25).all()
    assert second_moment_mask(logs + 2.0, threshold=0.04).sum() == 1
    assert second_moment_mask(logs[:0], threshold=0.04).tolist() == []


def test_second_moment_mask_is_of_the_whole_batch():
    """AReaL took the mean of each micro-batch: what is dropped must not depend on who shares a forward pass."""
    quiet, loud = [answer([-1.0] * 6, 1.0) for _ in range(3)], [answer([-1.0] * 2, 0.0)]
    groups = groups_of([*quiet, *loud])
    now = torch.cat([torch.tensor([0.0] + [-1.0] * 6)] * 3 + [torch.tensor([0.0, -1.3, -1.4])])
    spec = algorithm("m2po")
    batch = with_advantages(pack(groups, spec), spec, max_new_tokens=8, anchor=now)
    assert batch.per_token["kept"].sum() == 20  # mean of squares (0.09 + 0.16) / 20, far below 0.04
    alone = with_advantages(pack(groups_of(loud), spec), spec, max_new_tokens=8, anchor=now[-3:])
    assert alone.per_token["kept"].sum() == 1
    assert torch.equal(batch.select([3]).per_token["kept"], torch.tensor([0.0, 1.0, 1.0]))


def test_with_advantages_in_double_precision_stays_there():
    spec = algorithm("grpo")
    batch = double(pack(random_groups(3), spec))
    found = with_advantages(batch, spec, max_new_tokens=4, reference=batch.per_token["behavior"])
    assert isinstance(found, Batch)
    assert {values.dtype for values in found.per_token.values()} == {torch.float64}
