"""Divergences against closed forms, torch.distributions and autograd, in float64 and at the edges of float32."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributions import Categorical, kl_divergence

from palestra.rl import kl as divergence

BETAS = (0.1, 0.5, 0.9)
MEASURES = {
    "forward": (divergence.forward_kl, divergence.forward_kl_slope),
    "reverse": (divergence.reverse_kl, divergence.reverse_kl_slope),
    **{
        f"jsd {beta}": (
            lambda p, q, beta=beta: divergence.jensen_shannon(p, q, beta),
            lambda p, q, beta=beta: divergence.jensen_shannon_slope(p, q, beta),
        )
        for beta in BETAS
    },
}


def pair(seed: int = 0, rows: int = 7, size: int = 11, spread: float = 3.0) -> tuple[Tensor, Tensor]:
    """Logits of a student and a teacher, in float64."""
    draw = torch.Generator().manual_seed(seed)
    student, teacher = (torch.randn(rows, size, generator=draw, dtype=torch.float64) * spread for _ in range(2))
    return student, teacher


def logs(logits: Tensor) -> Tensor:
    return logits.log_softmax(-1)


def by_definition(student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    """JSD(β) as the paper writes it, by torch.distributions."""
    p, q = Categorical(logits=student), Categorical(logits=teacher)
    middle = Categorical(probs=beta * q.probs + (1 - beta) * p.probs)
    return beta * kl_divergence(q, middle) + (1 - beta) * kl_divergence(p, middle)


@given(st.integers(0, 1000), st.integers(2, 40), st.sampled_from([0.1, 1.0, 6.0]))
def test_divergences_of_random_logits_are_those_of_torch_distributions(seed, size, spread):
    student, teacher = pair(seed, 3, size, spread)
    p, q = Categorical(logits=student), Categorical(logits=teacher)
    close = {"rtol": 1e-9, "atol": 1e-12}
    torch.testing.assert_close(divergence.forward_kl(logs(student), logs(teacher)), kl_divergence(q, p), **close)
    torch.testing.assert_close(divergence.reverse_kl(logs(student), logs(teacher)), kl_divergence(p, q), **close)
    for beta in BETAS:
        found = divergence.jensen_shannon(logs(student), logs(teacher), beta)
        torch.testing.assert_close(found, by_definition(student, teacher, beta), **close)


def test_divergences_of_two_coins_are_the_numbers_one_writes_down():
    student, teacher = (torch.tensor([x], dtype=torch.float64).log() for x in ([0.5, 0.5], [0.8, 0.2]))
    forward = 0.8 * math.log(1.6) + 0.2 * math.log(0.4)
    reverse = 0.5 * math.log(0.5 / 0.8) + 0.5 * math.log(0.5 / 0.2)
    half = 0.5 * (0.8 * math.log(0.8 / 0.65) + 0.2 * math.log(0.2 / 0.35))
    half += 0.5 * (0.5 * math.log(0.5 / 0.65) + 0.5 * math.log(0.5 / 0.35))
    assert divergence.forward_kl(student, teacher).item() == pytest.approx(forward, rel=1e-12)
    assert divergence.reverse_kl(student, teacher).item() == pytest.approx(reverse, rel=1e-12)
    assert divergence.jensen_shannon(student, teacher, 0.5).item() == pytest.approx(half, rel=1e-12)


@pytest.mark.parametrize("name", MEASURES)
def test_slope_in_the_students_logits_is_that_of_autograd(name):
    value, slope = MEASURES[name]
    student, teacher = pair()
    student.requires_grad_()
    (wanted,) = torch.autograd.grad(value(logs(student), logs(teacher)).sum(), student)
    torch.testing.assert_close(slope(logs(student.detach()), logs(teacher)), wanted, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", MEASURES)
def test_divergence_of_a_student_that_equals_its_teacher_is_zero_with_no_slope(name):
    value, slope = MEASURES[name]
    student, _ = pair()
    assert value(logs(student), logs(student)).abs().max() < 1e-14
    assert slope(logs(student), logs(student)).abs().max() < 1e-14


@given(st.integers(0, 1000), st.sampled_from([0.02, *BETAS, 0.98]))
def test_jsd_is_within_zero_and_log_two_and_turns_with_beta(seed, beta):
    student, teacher = map(logs, pair(seed))
    found = divergence.jensen_shannon(student, teacher, beta)
    assert ((found >= 0) & (found <= math.log(2))).all()
    torch.testing.assert_close(found, divergence.jensen_shannon(teacher, student, 1 - beta), rtol=1e-9, atol=1e-12)


def test_jsd_at_the_ends_of_beta_becomes_either_kl_with_its_slope():
    student, teacher = map(logs, pair(spread=1.0))
    small = 1e-6
    close = {"rtol": 1e-4, "atol": 1e-6}
    near, far = (divergence.jensen_shannon(student, teacher, beta) / small for beta in (small, 1 - small))
    torch.testing.assert_close(near, divergence.forward_kl(student, teacher), **close)
    torch.testing.assert_close(far, divergence.reverse_kl(student, teacher), **close)
    near, far = (divergence.jensen_shannon_slope(student, teacher, beta) / small for beta in (small, 1 - small))
    torch.testing.assert_close(near, divergence.forward_kl_slope(student, teacher), **close)
    torch.testing.assert_close(far, divergence.reverse_kl_slope(student, teacher), **close)


@pytest.mark.parametrize("name", MEASURES)
def test_probabilities_that_round_to_zero_in_float32_leave_finite_numbers(name):
    """Logarithms of what underflows: both probabilities are 0 in float32, and neither is in logarithms."""
    value, slope = MEASURES[name]
    student = logs(torch.tensor([[0.0, -300.0, -310.0, 5.0]]))
    teacher = logs(torch.tensor([[1.0, -320.0, -300.0, -2.0]]))
    assert (student.exp() == 0).any()
    assert (teacher.exp() == 0).any()
    found = value(student, teacher)
    assert torch.isfinite(divergence.log_mixture(student, teacher, 0.5)).all()
    assert torch.isfinite(found).all()
    assert torch.isfinite(slope(student, teacher)).all()
    torch.testing.assert_close(found.double(), value(student.double(), teacher.double()), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["forward", "jsd 0.5"])
def test_tokens_that_a_teacher_never_says_add_nothing_of_the_teachers(name):
    value, slope = MEASURES[name]
    student = logs(torch.tensor([[0.0, 1.0, 2.0]]).double())
    teacher = logs(torch.tensor([[0.5, -torch.inf, 1.0]]).double())
    assert torch.isfinite(value(student, teacher)).all()
    assert torch.isfinite(slope(student, teacher)).all()
    assert divergence.reverse_kl(student, teacher).item() == math.inf


@pytest.mark.parametrize("name", MEASURES)
def test_tokens_that_neither_says_change_nothing(name):
    value, slope = MEASURES[name]
    student, teacher = pair(size=5)
    never = torch.full((len(student), 1), -torch.inf, dtype=torch.float64)
    wider = [logs(torch.cat([x, never], -1)) for x in (student, teacher)]
    torch.testing.assert_close(value(*wider), value(logs(student), logs(teacher)))
    torch.testing.assert_close(slope(*wider)[:, :-1], slope(logs(student), logs(teacher)))


@pytest.mark.parametrize("beta", [0.0, 1.0, -0.1])
def test_mixture_without_one_of_the_two_is_refused(beta):
    student, teacher = map(logs, pair())
    with pytest.raises(ValueError, match="between 0 and 1"):
        divergence.jensen_shannon(student, teacher, beta)
