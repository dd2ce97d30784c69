"""Scores of reward models: the same alone and in company, and what the model itself says."""

import random

import pytest
import torch
from small_lm import CONTEXT, small_model, small_tokenizer

from palestra.errors import UsageError
from palestra.lm.batch import Batch, forward
from palestra.lm.scorer import LANES, TOKENS, ScalarModel, Scorer

TEMPLATE = "{% for one in messages %}{{ one.content }}.{% endfor %}"


def scorer_of(**changes: object) -> Scorer:
    model = ScalarModel(small_model(**changes))
    with torch.no_grad():
        model.value.weight.copy_(torch.randn(model.value.weight.shape, generator=torch.Generator().manual_seed(1)))
    return Scorer(model, small_tokenizer().with_chat_template(TEMPLATE))


@torch.no_grad()
def said(scorer: Scorer, given: list[list[int]]) -> list[float]:
    """What the model gives for each by itself, with nothing filled up."""
    batches = [Batch.pack([tokens]) for tokens in given]
    return [float(scorer.model.scores_of(forward(scorer.model.transformer, batch), batch)) for batch in batches]


def sequences(count: int, longest: int = CONTEXT, seed: int = 0) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(50) for _ in range(draw.randint(1, longest))] for _ in range(count)]


def assert_same_in_company(scorer: Scorer, given: list[list[int]]) -> None:
    alone = [scorer.token_scores([tokens])[0] for tokens in given]
    assert scorer.token_scores(given) == alone
    assert scorer.token_scores(given[::-1]) == alone[::-1]
    assert scorer.token_scores(given[3:9]) == alone[3:9]
    assert len(set(alone)) == len(given)


EXPERTS = {"moe": {"experts": 4, "active": 2, "mlp": 16}, "mlp": None}
SHAPES = [{}, {"layers": 3, "width": 48, "heads": 3, "kv_heads": 3, "mlp": 96}, {"window": 8}, EXPERTS]


@pytest.mark.parametrize("shape", SHAPES, ids=["small", "odd", "window", "experts"])
def test_scores_in_any_company_have_the_bits_of_one_alone(shape):
    """Which answers wait together depends on the clock, and a score must not."""
    assert_same_in_company(scorer_of(**shape), sequences(40))


def test_scores_in_company_by_two_threads_have_the_bits_of_one_alone():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert_same_in_company(scorer_of(), sequences(12))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("shape", SHAPES, ids=["small", "odd", "window", "experts"])
def test_scores_are_what_the_model_says_of_the_last_token(shape):
    """What fills a sequence up, and what fills a pass up, is seen by none of the others."""
    scorer, given = scorer_of(**shape), sequences(30)
    assert scorer.token_scores(given) == pytest.approx(said(scorer, given), rel=1e-4, abs=1e-5)


def test_scores_of_lengths_at_the_edges_of_a_pass():
    scorer = scorer_of(context=2 * TOKENS)
    lengths = [1, LANES - 1, LANES, LANES + 1, TOKENS - 1, TOKENS, TOKENS + 1, 2 * TOKENS]
    draw = random.Random(2)
    given = [[draw.randrange(50) for _ in range(length)] for length in lengths]
    assert scorer.token_scores(given) == pytest.approx(said(scorer, given), rel=1e-4, abs=1e-4)
    assert scorer.token_scores([]) == []


def test_scores_of_conversations_are_those_of_each():
    scorer = scorer_of()
    asked = [[{"role": "user", "content": "a" * n}, {"role": "assistant", "content": "b"}] for n in range(1, 20)]
    assert scorer.scores(asked) == [scorer.score(messages) for messages in asked]


def test_score_of_more_than_the_model_reads_raises():
    scorer = scorer_of()
    with pytest.raises(UsageError, match=f"has {CONTEXT + 1} tokens; the reward model reads at most {CONTEXT}"):
        scorer.token_scores([[1], [1] * (CONTEXT + 1)])


def test_score_of_a_conversation_of_no_tokens_raises():
    scorer = scorer_of()
    silent = Scorer(scorer.model, scorer.tokenizer.with_chat_template("{{ '' }}"))
    with pytest.raises(UsageError, match="writes nothing"):
        silent.score([{"role": "user", "content": "a"}])
