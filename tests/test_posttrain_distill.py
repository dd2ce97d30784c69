"""What a student learns from a teacher: losses against whole logits, the exact gradient, and who reads what."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from posttrain_cases import answer, groups_of
from small_lm import VOCAB, small_model, small_tokenizer
from test_lm_head import Largest
from torch import Tensor

from palestra.data.store import Example
from palestra.errors import PalestraError, UsageError
from palestra.lm import head
from palestra.lm.batch import Batch, forward
from palestra.lm.engine import TrainEngine
from palestra.lm.model import Transformer
from palestra.lm.optim import Optimizer
from palestra.lm.ranks import Ranks
from palestra.posttrain.distill import (
    Teacher,
    divergence_loss,
    divergence_of,
    given_lessons,
    own_lessons,
    policy_loss,
    policy_terms,
    privileged,
    token_divergences,
    with_teacher,
)
from palestra.rl import kl as divergence
from palestra.rollout.types import Group
from palestra.spec.kinds.distill import ForwardKlSpec, JsdSpec, PolicyLossSpec, ReverseKlSpec
from palestra.spec.lm import AdamWSpec
from palestra.tasks.task import Problem

LOSSES = {
    "forward_kl": ForwardKlSpec(type="forward_kl"),
    "reverse_kl": ReverseKlSpec(type="reverse_kl"),
    "jsd": JsdSpec(type="jsd", beta=0.3),
    "warm": JsdSpec(type="jsd", temperature=2.5),
    "cold": ForwardKlSpec(type="forward_kl", temperature=0.4),
}
TOKENS, ROWS = 13, 29


def states(dtype=torch.float64, teacher_rows: int = ROWS) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states and matrices of a student and of a wider teacher."""
    draw = torch.Generator().manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=draw, dtype=torch.float64).to(dtype)

    return (
        normal(TOKENS, 6).requires_grad_(),
        normal(ROWS, 6).requires_grad_(),
        normal(TOKENS, 9),
        normal(teacher_rows, 9),
    )


def plain(spec, student, unembed, taught, teacher) -> Tensor:
    """The divergences (T) of all logits at once."""
    rows = min(len(unembed), len(teacher))
    log_p, log_q = (
        (h @ u[:rows].t() / spec.temperature).log_softmax(-1) for h, u in ((student, unembed), (taught, teacher))
    )
    return divergence_of(spec).value(log_p, log_q)


def with_gradients(spec, given, function) -> list[Tensor]:
    """The divergences, and the gradients of a sum that weights every token differently."""
    found = function(spec, *given)
    weights = torch.linspace(-1, 2, len(found)).to(found)
    return [found, *torch.autograd.grad((weights * found).sum(), given[:2])]


def ours(spec, *given) -> Tensor:
    return token_divergences(*given, divergence_of(spec), spec.temperature)[0]


@settings(max_examples=25)
@given(st.sampled_from(list(LOSSES)), st.integers(1, 30 * ROWS), st.sampled_from([ROWS - 5, ROWS, ROWS + 7]))
def test_token_divergences_of_any_chunk_size_are_those_of_whole_logits_with_gradients(name, elements, teacher_rows):
    """Also where the matrices have other numbers of rows: only tokens that both have are compared, renormalized."""
    given = states(teacher_rows=teacher_rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(head, "CHUNK_ELEMENTS", elements)
        found = with_gradients(LOSSES[name], given, ours)
    for mine, wanted in zip(found, with_gradients(LOSSES[name], given, plain), strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", LOSSES)
def test_token_divergences_pass_gradcheck_and_send_nothing_to_the_teacher(name, monkeypatch):
    monkeypatch.setattr(head, "CHUNK_ELEMENTS", 6 * ROWS)
    student, unembed, taught, teacher = states()
    taught.requires_grad_(), teacher.requires_grad_()
    assert torch.autograd.gradcheck(
        lambda h, u: ours(LOSSES[name], h, u, taught, teacher), (student, unembed), fast_mode=True
    )
    ours(LOSSES[name], student, unembed, taught, teacher).sum().backward()
    assert taught.grad is None
    assert teacher.grad is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_token_divergences_in_lower_precision_are_summed_in_fp32(dtype):
    given = states(dtype)
    found, entropies = token_divergences(*given, divergence_of(LOSSES["jsd"]))
    assert found.dtype == entropies.dtype == torch.float32
    exact = plain(LOSSES["jsd"], *(x.double() for x in given))
    torch.testing.assert_close(found.double(), exact, rtol=1e-4, atol=1e-5)
    gradients = torch.autograd.grad(found.sum(), given[:2])
    assert [g.dtype for g in gradients] == [dtype, dtype]
    wide = [x.detach().double().requires_grad_() for x in given]
    wanted = torch.autograd.grad(plain(LOSSES["jsd"], *wide).sum(), wide[:2])
    limit = 1e-5 if dtype == torch.float32 else 0.02
    for mine, theirs in zip(gradients, wanted, strict=True):
        assert (mine.double() - theirs).norm() <= limit * theirs.norm()


def test_token_divergences_never_hold_more_than_a_chunk_of_logits(monkeypatch):
    vocab, tokens = 1000, 64
    monkeypatch.setattr(head, "CHUNK_ELEMENTS", 8 * vocab)
    draw = torch.Generator().manual_seed(1)
    student, taught = (torch.randn(tokens, 4, generator=draw) for _ in range(2))
    unembed, teacher = (torch.randn(vocab, 4, generator=draw) for _ in range(2))
    student.requires_grad_(), unembed.requires_grad_()
    with Largest() as largest:
        token_divergences(student, unembed, taught, teacher, divergence_of(LOSSES["jsd"]))[0].sum().backward()
    assert largest.elements <= 4 * vocab < tokens * vocab


# ---- the policy gradient


def test_policy_gradient_of_every_token_by_its_chance_is_that_of_the_exact_reverse_kl():
    draw = torch.Generator().manual_seed(2)
    student, teacher, behavior = (torch.randn(9, generator=draw, dtype=torch.float64).log_softmax(0) for _ in range(3))

    def expected(drawn: Tensor, limit: float | None) -> tuple[Tensor, Tensor]:
        """The expectations of value and gradient over one token of `drawn`."""
        logits = student.clone().requires_grad_()
        terms = policy_terms(logits.log_softmax(0), drawn, teacher, limit)
        total = (drawn.exp() * terms).sum()
        return total.detach(), torch.autograd.grad(total, logits)[0]

    logits = student.clone().requires_grad_()
    exact = divergence.reverse_kl(logits.log_softmax(0), teacher)
    (wanted,) = torch.autograd.grad(exact, logits)
    for drawn, limit in ((student, 5.0), (student, 1.0), (behavior, None)):
        value, gradient = expected(drawn, limit)
        assert value.item() == pytest.approx(exact.item(), rel=1e-10)
        torch.testing.assert_close(gradient, wanted, rtol=1e-9, atol=1e-12)
    one = student.clone().requires_grad_()
    terms = policy_terms(one, behavior, teacher, None)
    # Nothing flows through the advantage: the slope in log π is the term itself, draw by draw.
    torch.testing.assert_close(torch.autograd.grad(terms.sum(), one)[0], terms.detach())
    bent = expected(behavior, 0.5)[1]  # bounded weights are no longer exact
    assert (bent - wanted).norm() > 0.05 * wanted.norm()


def test_policy_loss_of_a_transformer_over_all_answers_of_one_token_has_the_exact_gradient():
    """Through packing, the teacher's reading and the head: all 64 answers, each as often as it is drawn."""
    model, teacher = small_model(1, deviation=0.1).requires_grad_(), Teacher(small_model(2), small_tokenizer())
    prompt = (5, 9, 4)
    whole = Batch.pack([prompt])

    def last(of: Transformer) -> Tensor:
        return (forward(of, whole).hidden[-1:] @ of.unembed.t()).log_softmax(-1)[0]

    exact = divergence.reverse_kl(last(model), last(teacher.model))
    wanted = torch.autograd.grad(exact, list(model.parameters()))
    chances = last(model).detach()
    answers = [answer([float(chances[y])], 0.0, prompt=3, tokens=[y]) for y in range(VOCAB)]
    answers = [replace(one, tokens=(*prompt, one.tokens[-1])) for one in answers]
    loss = policy_loss(PolicyLossSpec(type="policy"), 1.0)
    total: Tensor | float = 0.0
    for one, chance in zip(answers, chances.exp(), strict=True):
        batch = with_teacher(own_lessons(groups_of([one]), teacher), teacher, **READ, hidden=False)
        total = total + chance * loss(model, batch).total
    assert isinstance(total, Tensor)
    assert total.item() == pytest.approx(exact.item(), rel=1e-4)
    for mine, theirs in zip(torch.autograd.grad(total, list(model.parameters())), wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-5)


# ---- batches: who reads what

READ = {"micro_tokens": 40, "temperature": 1.0}


def problem(text: str = "ab", **row: object) -> Problem:
    return Problem("test/train/0", text, row)


def group(*answers, text: str = "ab", **row: object) -> Group:
    return Group(0, problem(text, **row), 0, tuple(answers), len(answers))


def mixed_lessons(teacher: Teacher) -> tuple[list[Group], list]:
    """Own answers with tokens of tools between, one without tokens, one with a number that is none; a given one."""
    groups = [
        group(
            answer([-1.0, None, None, -2.0], 1.0, prompt=2, tokens=[7, 8, 9, 10], turns=((2, 3), (5, 6))),
            answer([-0.5, float("nan"), -3.0], 0.0, prompt=2, tokens=[3, 4, 5]),
        ),
        group(answer([], 0.0, prompt=4), answer([-1.5], 0.0, prompt=4, tokens=[11])),
    ]
    example = Example(np.array([6, 7, 8, 9], np.int32), np.array([4]), np.array([False, False, True, True]))
    return groups, own_lessons(groups, teacher) + given_lessons([example])


def test_batch_has_the_teachers_word_on_each_trained_token_beside_the_students():
    teacher = Teacher(small_model(2, width=48), small_tokenizer())
    groups, lessons = mixed_lessons(teacher)
    batch = with_teacher(lessons, teacher, **READ, hidden=True)
    every = [one for group in groups for one in group.trajectories]
    assert batch.lengths == [len(one.tokens) for one in every] + [4]
    trained = [False, False, True, False, False, True] + [False, False, True, False, True] + [False] * 4
    trained += [False] * 4 + [True] + [False, False, True, True]
    assert (batch.loss_mask > 0).tolist() == trained
    assert batch.per_token["own"].tolist() == [float(x) for x in trained[:-4]] + [0.0] * 4
    start = 0
    for tokens in [*(one.tokens for one in every), (6, 7, 8, 9)]:
        output = forward(teacher.model, Batch.pack([tokens])).hidden
        log_q = (output @ teacher.model.unembed.t()).log_softmax(-1)
        for t in range(len(tokens)):
            if trained[start + t]:
                said = batch.per_token["teacher"][start + t].item()
                assert said == pytest.approx(log_q[t - 1, tokens[t]].item(), abs=1e-4)
                torch.testing.assert_close(batch.per_token["hidden"][start + t], output[t - 1], rtol=1e-4, atol=1e-5)
            else:
                assert batch.per_token["hidden"][start + t].abs().sum() == 0
        start += len(tokens)
    own = batch.per_token["own"] > 0
    apart = batch.per_token["teacher"] - batch.per_token["behavior"]
    assert torch.equal(batch.per_token["advantages"], torch.where(own, apart, 0.0))


@pytest.mark.parametrize("name", ["policy", *LOSSES])
def test_gradient_does_not_depend_on_the_split_into_micro_batches(name):
    teacher = Teacher(small_model(2), small_tokenizer())
    _, lessons = mixed_lessons(teacher)
    lessons = lessons[:-1] if name == "policy" else lessons
    found = []
    for micro in (4, 1000):
        model = small_model(1, deviation=0.1).requires_grad_()
        loss = policy_loss(PolicyLossSpec(type="policy"), 1.0) if name == "policy" else None
        loss = loss or divergence_loss(LOSSES[name], teacher.model)
        batch = with_teacher(lessons, teacher, micro_tokens=micro, temperature=1.0, hidden=name != "policy")
        engine = TrainEngine(
            model, Optimizer(model, AdamWSpec(name="adamw"), 1), Ranks(), micro_tokens=micro, flops_per_token=1.0
        )
        sums = engine.forward_backward(batch, loss, float(len(batch.predicted)))
        found.append([sums["loss"], sums["entropy"], *(p.grad.clone() for p in model.parameters())])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("name", LOSSES)
def test_loss_is_zero_with_no_gradient_where_the_student_is_the_teacher(name):
    model = small_model(1).requires_grad_()
    teacher = Teacher(small_model(1), small_tokenizer())
    _, lessons = mixed_lessons(teacher)
    batch = with_teacher(lessons, teacher, **READ, hidden=True)
    total = divergence_loss(LOSSES[name], teacher.model)(model, batch).total
    assert total.item() == pytest.approx(0.0, abs=1e-5)
    assert all(g.abs().max() < 1e-4 for g in torch.autograd.grad(total, list(model.parameters())))


# ---- privileged prompts


def test_privileged_prompt_is_filled_from_the_row_in_one_pass():
    found = privileged(problem("2+2=", answer="4 {prompt}", parts=[1, "é"]), "A: {answer} {parts}\\frac{1}{2} {prompt}")
    assert found.prompt == 'A: 4 {prompt} [1, "é"]\\frac{1}{2} 2+2='


def test_privileged_prompt_of_a_conversation_is_its_last_message():
    asked = Problem("t/train/0", ({"role": "system", "content": "Add."}, {"role": "user", "content": "2+2?"}), {"a": 4})
    found = privileged(asked, "{prompt} It is {a}.")
    assert found.prompt == ({"role": "system", "content": "Add."}, {"role": "user", "content": "2+2? It is 4."})


def test_privileged_prompt_with_a_field_that_is_not_there_is_refused_by_name():
    with pytest.raises(UsageError, match=r"test/train/0 has no field \{answr\}; it has answer, prompt"):
        privileged(problem(answer="4"), "{answr} {prompt}")


def test_teacher_with_a_privileged_prompt_scores_the_same_answer_after_it():
    tokenizer = small_tokenizer()
    teacher = Teacher(small_model(2), tokenizer, prompt="ba {answer} {prompt}")
    prompt = tuple(tokenizer.encode_prompt("ab"))
    one = replace(
        answer([-1.0, -1.0], 0.0, tokens=[5, 6]),
        tokens=(*prompt, 5, 6),
        loss_mask=(False,) * len(prompt) + (True, True),
        logprobs=(0.0,) * len(prompt) + (-1.0, -1.0),
    )
    batch = with_teacher(own_lessons([group(one, answer="cd")], teacher), teacher, **READ, hidden=True)
    read = [*tokenizer.encode_prompt("ba cd ab"), 5, 6]
    output = forward(teacher.model, Batch.pack([read])).hidden[-3:-1]
    log_q = (output @ teacher.model.unembed.t()).log_softmax(-1)
    torch.testing.assert_close(batch.per_token["teacher"][-2:], log_q[[0, 1], [5, 6]], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(batch.per_token["hidden"][-2:], output, rtol=1e-4, atol=1e-5)
    assert batch.tokens.tolist() == list(one.tokens)


def test_answers_that_the_teacher_cannot_read_are_left_out_and_counted():
    teacher = Teacher(small_model(2, context=6, vocab=32), small_tokenizer())
    short = answer([-1.0], 0.0, tokens=[5])
    long, unknown = answer([-1.0] * 6, 0.0, tokens=[5] * 6), answer([-1.0], 0.0, tokens=[40])
    batch = with_teacher(own_lessons([group(short, long, unknown)], teacher), teacher, **READ, hidden=True)
    assert batch.per_sequence["unread"].tolist() == [0.0, 1.0, 1.0]
    assert batch.loss_mask.tolist() == [0.0, 1.0] + [0.0] * 9
    assert batch.per_token["own"].tolist() == batch.loss_mask.tolist()
    with pytest.raises(PalestraError, match="can read none of the 2 completions"):
        with_teacher(own_lessons([group(long, unknown)], teacher), teacher, **READ, hidden=True)
