"""Beginnings that sequences have in common are computed once, and nothing else changes."""

import copy
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lm_cases import VARIANTS, gradients, make

from palestra.lm import native
from palestra.lm.attention import Shared, TreeAttention, shared, spread
from palestra.lm.batch import Batch, forward, read_states, score


def groups(prompts: int, answers: int, prompt: int, longest: int, seed: int = 0) -> list[list[int]]:
    """Answers of different lengths to shared prompts."""
    rng, found = random.Random(seed), []
    for _ in range(prompts):
        start = [rng.randrange(50) for _ in range(prompt)]
        for _ in range(answers):
            found.append(start + [rng.randrange(50) for _ in range(rng.randint(1, longest))])
    return found


def whole(batch: Batch) -> Batch:
    """The same batch, all of whose tokens are computed."""
    other = copy.copy(batch)
    object.__setattr__(other, "shared", None)
    return other


@settings(max_examples=200, deadline=None)
@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=6), min_size=1, max_size=8))
def test_tokens_after_the_same_beginning_as_a_neighbours_are_one(texts):
    flat, lengths = np.concatenate(texts), [len(text) for text in texts]

    found = shared(flat, lengths)

    # By hand: a token of the sequence before stands for it if all up to it are the same.
    expected, numbers = [], {}
    for i, text in enumerate(texts):
        for t in range(len(text)):
            alike = i > 0 and texts[i - 1][: t + 1] == text[: t + 1]
            numbers[i, t] = numbers[i - 1, t] if alike else max(numbers.values(), default=-1) + 1
            expected.append(numbers[i, t])
    if max(expected) + 1 > 0.8 * len(flat):
        assert found is None
        return
    assert found is not None
    assert found.place.tolist() == expected
    assert found.place[found.first].tolist() == list(range(max(expected) + 1))


def test_nothing_is_shared_where_it_would_spare_little():
    rng = random.Random(0)
    texts = [[1, *(rng.randrange(2, 50) for _ in range(20))] for _ in range(4)]

    assert Batch.pack(texts).shared is None  # they all begin with one token
    assert Batch.pack(texts[:1]).shared is None


@pytest.mark.parametrize("longest", [1, 9])
@pytest.mark.parametrize("variant", [name for name in VARIANTS if name != "experts"])
def test_scores_and_gradients_are_those_of_whole_sequences(variant, longest):
    model = make(VARIANTS[variant]).double()
    model.dtype = torch.float64
    texts = groups(3, 4, 8, longest)
    batch = Batch.pack(texts, [[0] * 8 + [1] * (len(text) - 8) for text in texts])
    assert batch.shared is not None
    assert len(batch.shared.first) < 0.7 * len(batch.tokens)

    found, expected = score(model, batch), score(model, whole(batch))

    torch.testing.assert_close(found.logprobs, expected.logprobs, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(found.entropy, expected.entropy, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(found.hidden, expected.hidden, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(
        forward(model, batch).hidden, forward(model, whole(batch)).hidden, rtol=1e-10, atol=1e-12
    )
    for name, gradient in gradients(model, [batch]).items():
        torch.testing.assert_close(gradient, gradients(model, [whole(batch)])[name], rtol=1e-8, atol=1e-11)


@pytest.mark.parametrize("variant", VARIANTS)
@given(seed=st.integers(0, 10**6), alone=st.booleans())
@settings(max_examples=20, deadline=None)
def test_trees_of_sequences_attend_as_whole_sequences_do(variant, seed, alone):
    rng = random.Random(seed)
    texts: list[list[int]] = []
    for _ in range(rng.randint(2, 8)):
        texts += groups(1, rng.randint(1, 5), rng.randint(1, 9), 9, seed=rng.randrange(99))
    # Beginnings of beginnings, and sequences that begin another one, as options in order have them.
    texts += [[*text[: rng.randint(1, len(text))], rng.randrange(3)] for text in texts for _ in range(2)]
    batch, model = Batch.pack(sorted(texts)), make(VARIANTS[variant])
    assert batch.shared is not None
    exact = copy.deepcopy(model).double()
    exact.dtype = torch.float64

    asked = torch.tensor(rng.choices(range(len(batch.tokens)), k=rng.randint(1, 40)))

    found = read_states(model, whole(batch) if alone else batch, asked)

    with torch.no_grad():
        expected = forward(exact, whole(batch)).hidden[asked]
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(native.library() is None, reason="no C++ compiler")
def test_every_token_that_is_computed_attends_once():
    texts = sorted([*groups(2, 4, 30, 3), [1, 2, 3], [1, 2, 3], [1, 2, 3, 4]])
    batch = Batch.pack(texts)
    assert batch.shared is not None

    tree = TreeAttention(batch.lengths, batch.shared, torch.tensor([5, 7]), last=3)

    def asked(bounds: list[list[int]]) -> list[int]:
        ends = [(sum(tree._ranges[end - 1].tolist()), count) for _, end, count in bounds]
        return [token for end, count in ends for token in range(end - count, end)]

    assert asked(tree._bounds.tolist()) == list(range(len(batch.shared.first)))
    assert len(tree._bounds) < len(texts)  # one of the equal ones is enough
    last = asked(tree._last_bounds.tolist())
    assert {5, 7} <= set(last)
    assert len(last) < len(batch.shared.first) / 2  # only up to the end of a sequence


def test_prompts_that_are_predicted_too_get_every_answers_gradient():
    model, texts = make(VARIANTS["llama"]).double(), groups(2, 3, 6, 4)
    model.dtype = torch.float64
    batch = Batch.pack(texts)  # the loss of a prompt's tokens counts once for each answer

    found, expected = gradients(model, [batch]), gradients(model, [whole(batch)])

    assert batch.shared is not None
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-8, atol=1e-11)


def test_experts_see_every_token_because_their_loads_are_counted():
    model, batch = make(VARIANTS["experts"]), Batch.pack(groups(2, 4, 8, 3))
    assert batch.shared is not None

    router = score(model, batch).router

    assert router is not None
    assert router.shape[1] == len(batch.tokens)


def test_sums_of_many_small_gradients_are_not_rounded_on_the_way():
    x = torch.zeros(1, 4, dtype=torch.bfloat16, requires_grad=True)

    spread(x, torch.zeros(600, dtype=torch.long)).backward(torch.ones(600, 4, dtype=torch.bfloat16))

    assert x.grad is not None
    assert x.grad[0].tolist() == [600.0] * 4  # added up in bf16 it would stay at 256


def test_a_batch_that_moves_takes_it_along():
    batch = Batch.pack(groups(2, 4, 8, 3))

    moved = batch.to("meta")

    assert isinstance(moved.shared, Shared)
    assert moved.shared.place.device.type == "meta"
