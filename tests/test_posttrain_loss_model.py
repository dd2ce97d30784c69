"""Losses of a real transformer through the engine: micro-batches, minibatches, temperatures, experts."""

from dataclasses import replace
from math import exp, isfinite

import pytest
import torch
from conftest import fast_only
from posttrain_cases import MAX_NEW_TOKENS, algorithm, answer, groups_of, random_groups
from small_lm import VOCAB, small_model

from palestra.lm.engine import TrainEngine
from palestra.lm.optim import Optimizer
from palestra.lm.ranks import Ranks
from palestra.posttrain.batch import denominator, informative, pack, with_advantages
from palestra.posttrain.loss import averages, policy_loss
from palestra.spec.algorithm import PRESETS
from palestra.spec.lm import AdamWSpec

EXPERTS = {"moe": {"experts": 4, "active": 2, "mlp": 16, "balance": 0.1, "z_loss": 0.01}}


def engine_of(model, micro_tokens=10**6):
    optimizer = Optimizer(model, AdamWSpec(name="adamw"), 10)
    return TrainEngine(model, optimizer, Ranks(), micro_tokens=micro_tokens, flops_per_token=1.0)


def trained_model(**changes):
    return small_model(deviation=0.15, **changes).requires_grad_(True)


def drawn_by(model, groups, temperature=1.0):
    """The groups with the log-probabilities that the model gives their tokens, where they are numbers."""
    batch = pack(groups, algorithm())
    found = engine_of(model).logprobs(batch, temperature=temperature).tolist()
    start, done = 0, []
    for group in groups:
        answers = []
        for one in group.trajectories:
            own = zip(found[start : start + len(one.tokens)], one.logprobs, strict=True)
            start += len(one.tokens)
            answers.append(replace(one, logprobs=tuple(x if isfinite(y) else y for x, y in own)))
        done.append(replace(group, trajectories=tuple(answers)))
    return done


def ready(spec, groups, model, temperature=1.0):
    batch = pack(groups, spec)
    scores = engine_of(model).logprobs(batch, temperature=temperature)
    zeros = torch.zeros(len(batch.tokens))
    return with_advantages(
        batch, spec, max_new_tokens=MAX_NEW_TOKENS, anchor=scores, reference=scores - 0.1, values=zeros
    )


def gradients(spec, batches, denominators, *, micro_tokens, temperature=1.0, **changes):
    """The summed gradient of batches and what the loss tells of them."""
    model = trained_model(**changes)
    engine = engine_of(model, micro_tokens)
    rows = [
        engine.forward_backward(batch, policy_loss(spec, temperature), size)
        for batch, size in zip(batches, denominators, strict=True)
    ]
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return found, {name: sum(float(row[name]) for row in rows) for name in rows[0]}


@pytest.mark.parametrize("preset", PRESETS)
def test_gradient_of_any_micro_batches_and_minibatches_is_that_of_the_whole(preset):
    spec = algorithm(preset)
    batch = ready(spec, random_groups(7, vocab=VOCAB), trained_model())
    size = denominator(batch, spec, MAX_NEW_TOKENS)
    whole, told = gradients(spec, [batch], [size], micro_tokens=10**6)
    assert max(float(g.abs().max()) for g in whole.values()) > 1e-5
    group = batch.per_sequence["group"]
    halves = [batch.select((group % 2 == odd).nonzero()[:, 0].tolist()) for odd in (0, 1)]
    for batches, micro in (([batch], 1), ([batch], 40), (halves, 25)):
        found, other = gradients(spec, batches, [size] * len(batches), micro_tokens=micro)
        assert set(found) == set(whole)
        for name, gradient in whole.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-3, atol=2e-6)
        # What is told is of all micro-batches, not of the last.
        assert averages(other) == pytest.approx(averages(told), rel=1e-4, abs=1e-5)
    assert told["entropy"] > 0


@pytest.mark.parametrize("preset", PRESETS)
def test_sequences_without_an_advantage_are_left_out_and_the_gradient_stays(preset):
    spec = algorithm(preset)
    groups = random_groups(7, vocab=VOCAB)
    groups[1:6:2] = [
        replace(group, trajectories=tuple(replace(one, reward=1.0) for one in group.trajectories))
        for group in groups[1:6:2]
    ]
    batch = ready(spec, groups, trained_model())
    part, size = informative(batch, spec), denominator(batch, spec, MAX_NEW_TOKENS)
    if preset in ("dr_grpo", "dapo"):
        assert len(part) < len(batch)
    whole, told = gradients(spec, [batch], [size], micro_tokens=10**6)
    found, other = gradients(spec, [part], [size], micro_tokens=40)
    for name, gradient in whole.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-3, atol=2e-6)
    assert other["loss"] == pytest.approx(told["loss"], rel=1e-4, abs=1e-6)


def test_batch_in_which_nothing_has_an_advantage_keeps_one_sequence():
    batch = ready(algorithm("dapo"), random_groups(3, vocab=VOCAB), trained_model())
    zeros = replace(batch, per_token={**batch.per_token, "advantages": torch.zeros(len(batch.tokens))})
    assert len(informative(zeros, algorithm("dapo"))) == 1


def test_gradient_of_experts_does_not_depend_on_micro_batches():
    spec = algorithm("dr_grpo")
    batch = ready(spec, random_groups(7, vocab=VOCAB), trained_model(**EXPERTS))
    size = denominator(batch, spec, MAX_NEW_TOKENS)
    whole, told = gradients(spec, [batch], [size], micro_tokens=10**6, **EXPERTS)
    found, _ = gradients(spec, [batch], [size], micro_tokens=30, **EXPERTS)
    assert told["router/balance"] > 0
    for name, gradient in whole.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-3, atol=2e-6)


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
def test_ratio_of_own_tokens_is_one_at_the_temperature_they_were_drawn_with(temperature):
    """Others scored at another temperature than they drew with, or with other micro-batches than their old scores."""
    model = trained_model()
    groups = drawn_by(model, random_groups(5, vocab=VOCAB), temperature)
    spec = algorithm("dr_grpo")
    batch = ready(spec, groups, model, temperature)
    _, told = gradients(spec, [batch], [1.0], micro_tokens=20, temperature=temperature)
    told = averages(told)
    assert told["ratio"] == pytest.approx(1.0, abs=1e-5)
    assert told["kl_behaviour"] == pytest.approx(0.0, abs=1e-9)
    assert told["effective_samples"] == pytest.approx(1.0, abs=1e-6)
    _, other = gradients(spec, [batch], [1.0], micro_tokens=20, temperature=temperature + 0.3)
    assert averages(other)["kl_behaviour"] > 1e-3


def test_gradient_where_nothing_is_trained_is_zero_and_finite():
    spec = algorithm("dr_grpo")
    groups = groups_of([answer([], 1.0, prompt=3), answer([None, None], 0.0)])
    batch = ready(spec, groups, trained_model())
    found, told = gradients(spec, [batch], [denominator(batch, spec, MAX_NEW_TOKENS)], micro_tokens=10**6)
    assert told["loss"] == 0.0
    assert all(g.abs().sum() == 0 for g in found.values())


@pytest.mark.parametrize("preset", fast_only(PRESETS, "grpo", "gspo", "ppo"))
def test_learning_from_two_answers_makes_the_better_one_likelier(preset):
    """Twenty steps on one pair: the chosen answer gains on the other, with every preset."""
    model = trained_model()
    better = answer([-1.0] * 3, 1.0, prompt=2, tokens=[5, 6, 7])
    worse = answer([-1.0] * 3, 0.0, prompt=2, tokens=[8, 9, 10])
    spec = algorithm(preset)
    engine = engine_of(model)
    gaps = []
    for _ in range(20):
        groups = drawn_by(model, groups_of([better, worse]))  # as if both were drawn anew
        batch = ready(spec, groups, model)
        scores = engine.logprobs(batch)
        gaps.append(float(scores[:5].sum() - scores[5:].sum()))
        engine.forward_backward(batch, policy_loss(spec, 1.0), denominator(batch, spec, MAX_NEW_TOKENS))
        engine.optim_step(0.0)
    assert gaps[-1] > gaps[0] + 1.0


def test_mismatch_is_the_k3_of_tokens_of_this_version_alone():
    model, spec = trained_model(), algorithm()
    groups = drawn_by(model, random_groups(3))
    batch = ready(spec, groups, model)
    fresh = (torch.arange(len(batch.tokens)) % 2).float()
    moved = batch.per_token["behavior"] - 0.3 * fresh  # those of this version are sampled with other probabilities
    per_token = {**batch.per_token, "behavior": moved, "anchor": moved, "fresh": fresh}
    weight = denominator(batch, spec, MAX_NEW_TOKENS)
    sums = engine_of(model).forward_backward(replace(batch, per_token=per_token), policy_loss(spec, 1.0), weight)
    row = averages(sums)
    assert row["mismatch"] == pytest.approx(exp(0.3) - 1 - 0.3, rel=1e-4)
    assert row["kl_behaviour"] < row["mismatch"]
    assert "mismatch" not in averages({**sums, "fresh": 0.0})
