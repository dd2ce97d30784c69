"""Losses of preferences: closed forms, gradients derived by hand, symmetries, optima, extremes."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from palestra.rl.losses import dpo_terms, reward_terms

LOSSES = ["sigmoid", "ipo", "hinge"]
NUMBERS = st.floats(-50, 50)
BETAS = st.floats(0.01, 2)


def pair(*numbers: float) -> tuple[Tensor, ...]:
    return tuple(torch.tensor([number], dtype=torch.float64) for number in numbers)


def sigma(x: float) -> float:
    return 1 / (1 + math.exp(-x))


@pytest.mark.parametrize(
    ("loss", "smoothing", "expected"),
    [
        ("sigmoid", 0.0, -math.log(sigma(0.6))),
        ("sigmoid", 0.2, -0.8 * math.log(sigma(0.6)) - 0.2 * math.log(sigma(-0.6))),
        ("ipo", 0.0, (3.0 - 2.5) ** 2),
        ("hinge", 0.0, 0.4),
    ],
)
def test_dpo_known_pair_equals_the_formula(loss, smoothing, expected):
    # log(π / reference) is 1 for the chosen and -2 for the rejected answer: Δ = 3, βΔ = 0.6.
    terms = dpo_terms(*pair(-5, -9, -6, -7), beta=0.2, loss=loss, label_smoothing=smoothing)
    assert terms.loss.item() == pytest.approx(expected, rel=1e-12)
    assert [t.item() for t in terms[1:]] == pytest.approx([0.2, -0.4, 0.6, 1.0])


@pytest.mark.parametrize(("loss", "expected"), [("sigmoid", math.log(2)), ("ipo", 25.0), ("hinge", 1.0)])
def test_dpo_policy_that_is_the_reference_has_no_margin(loss, expected):
    terms = dpo_terms(*pair(-3, -8, -3, -8), beta=0.1, loss=loss)
    assert terms.loss.item() == pytest.approx(expected)
    assert [t.item() for t in terms[1:]] == [0.0, 0.0, 0.0, 0.5]


@pytest.mark.parametrize(("loss", "smoothing"), [("sigmoid", 0.0), ("sigmoid", 0.3), ("ipo", 0.0), ("hinge", 0.0)])
@settings(deadline=None)
@given(chosen=NUMBERS, rejected=NUMBERS, reference_chosen=NUMBERS, reference_rejected=NUMBERS, beta=BETAS)
def test_dpo_gradient_equals_the_derivation(
    loss, smoothing, chosen, rejected, reference_chosen, reference_rejected, beta
):
    inputs = pair(chosen, rejected, reference_chosen, reference_rejected)
    for tensor in inputs[:2]:
        tensor.requires_grad_()
    dpo_terms(*inputs, beta=beta, loss=loss, label_smoothing=smoothing).loss.sum().backward()
    delta = (chosen - reference_chosen) - (rejected - reference_rejected)
    if loss == "sigmoid":
        expected = -(1 - smoothing) * beta * sigma(-beta * delta) + smoothing * beta * sigma(beta * delta)
    elif loss == "ipo":
        expected = 2 * (delta - 1 / (2 * beta))
    else:
        expected = -beta if beta * delta < 1 else 0.0
    assert inputs[0].grad.item() == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert inputs[1].grad.item() == pytest.approx(-expected, rel=1e-9, abs=1e-12)


@settings(deadline=None)
@given(numbers=st.tuples(*[NUMBERS] * 4), beta=BETAS, smoothing=st.floats(0, 0.49))
def test_dpo_answers_exchanged_mirror_each_other(numbers, beta, smoothing):
    a, b, c, d = pair(*numbers)
    one, other = (dpo_terms(*x, beta=beta, label_smoothing=smoothing) for x in ((a, b, c, d), (b, a, d, c)))
    assert torch.equal(one.margin, -other.margin)
    assert (one.accuracy + other.accuracy).item() == 1
    assert torch.equal(one.chosen_reward, other.rejected_reward)
    # -log σ(x) + log σ(-x) = -x
    torch.testing.assert_close(one.loss - other.loss, -(1 - 2 * smoothing) * one.margin, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("loss", LOSSES)
@settings(deadline=None)
@given(numbers=st.tuples(*[st.integers(-50, 50)] * 4), shift=st.integers(-50, 50), beta=BETAS)
def test_dpo_policy_and_reference_moved_together_changes_nothing(loss, numbers, shift, beta):
    chosen, rejected, reference_chosen, reference_rejected = pair(*numbers)
    moved = (chosen + shift, rejected, reference_chosen + shift, reference_rejected)
    both = (chosen + shift, rejected + shift, reference_chosen, reference_rejected)
    terms = dpo_terms(chosen, rejected, reference_chosen, reference_rejected, beta=beta, loss=loss)
    assert all(map(torch.equal, terms, dpo_terms(*moved, beta=beta, loss=loss)))
    assert torch.equal(terms.loss, dpo_terms(*both, beta=beta, loss=loss).loss)


@pytest.mark.parametrize(
    ("loss", "smoothing", "best"), [("sigmoid", 0.1, math.log(9) / 0.5), ("ipo", 0.0, 1.0), ("hinge", 0.0, 2.0)]
)
def test_dpo_gradient_turns_at_the_known_optimum(loss, smoothing, best):
    # Conservative DPO wants σ(βΔ) = 1 - ε, IPO Δ = 1 / (2β), and the hinge is content from βΔ = 1 on.
    delta = torch.tensor([best - 1e-6, best, best + 1e-6], dtype=torch.float64, requires_grad=True)
    zeros = torch.zeros(3, dtype=torch.float64)
    terms = dpo_terms(delta, zeros, zeros, zeros, beta=0.5, loss=loss, label_smoothing=smoothing)
    (gradient,) = torch.autograd.grad(terms.loss.sum(), delta)
    before, at, after = gradient.tolist()
    assert before < 0 <= after
    assert at == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("margin", [-1e6, 1e6])
def test_dpo_extreme_margins_stay_finite(loss, margin):
    chosen = torch.tensor([margin], requires_grad=True)
    zero = torch.zeros(1)
    terms = dpo_terms(chosen, zero, zero, zero, beta=0.1, loss=loss)
    terms.loss.sum().backward()
    assert all(torch.isfinite(t).all() for t in (*terms, chosen.grad))
    if loss == "sigmoid":
        assert terms.loss.item() == pytest.approx(0.0 if margin > 0 else 1e5)
        assert chosen.grad.item() == pytest.approx(0.0 if margin > 0 else -0.1)


def test_dpo_only_the_loss_carries_a_gradient():
    chosen, *others = pair(1.0, 2.0, 3.0, 4.0)
    terms = dpo_terms(chosen.requires_grad_(), *others, beta=0.1)
    assert [t.requires_grad for t in terms] == [True, False, False, False, False]


def test_dpo_unknown_loss_raises():
    with pytest.raises(ValueError, match="'cubic'"):
        dpo_terms(*pair(1, 2, 3, 4), beta=0.1, loss="cubic")


@settings(deadline=None)
@given(chosen=NUMBERS, rejected=NUMBERS, margin=st.floats(0, 5), center=st.floats(0, 1))
def test_reward_loss_and_gradient_equal_the_derivation(chosen, rejected, margin, center):
    a, b = (t.requires_grad_() for t in pair(chosen, rejected))
    terms = reward_terms(a, b, margin=margin, center=center)
    terms.loss.sum().backward()
    lead = chosen - rejected - margin
    expected = math.log1p(math.exp(-lead)) + center * (chosen + rejected) ** 2
    assert terms.loss.item() == pytest.approx(expected, rel=1e-9)
    pull = 2 * center * (chosen + rejected)
    assert a.grad.item() == pytest.approx(-sigma(-lead) + pull, rel=1e-9, abs=1e-12)
    assert b.grad.item() == pytest.approx(sigma(-lead) + pull, rel=1e-9, abs=1e-12)
    assert terms.margin.item() == chosen - rejected
    assert terms.accuracy.item() == (0.5 if chosen == rejected else float(chosen > rejected))


def test_reward_without_centre_does_not_see_a_common_shift_and_with_it_prefers_zero():
    free, held = (reward_terms(*pair(102, 101), center=c).loss.item() for c in (0.0, 0.1))
    assert free == pytest.approx(reward_terms(*pair(2, 1)).loss.item())
    assert held > reward_terms(*pair(0.5, -0.5), center=0.1).loss.item() == pytest.approx(free)


def test_reward_margin_of_each_pair_may_differ():
    chosen, rejected = torch.tensor([1.0, 1.0]), torch.tensor([0.0, 0.0])
    loss = reward_terms(chosen, rejected, margin=torch.tensor([0.0, 1.0])).loss
    torch.testing.assert_close(loss, torch.tensor([-math.log(sigma(1)), math.log(2)]))


def test_reward_extreme_scores_stay_finite():
    chosen = torch.tensor([-1e6, 1e6], requires_grad=True)
    loss = reward_terms(chosen, torch.zeros(2)).loss
    loss.sum().backward()
    assert loss.tolist() == [1e6, 0.0]
    assert chosen.grad.tolist() == [-1.0, 0.0]
