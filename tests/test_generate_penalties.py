import math

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from small_lm import VOCAB, small_model
from test_generate_engine import Listener, engine_of, prompt_of

from palestra.errors import UsageError
from palestra.generate.types import Request, Sampling
from palestra.lm.batch import Batch, forward
from palestra.lm.head import logits

MODEL = small_model(seed=2)


@torch.inference_mode()
def scores_of(tokens, model=MODEL):
    """Of the token after each, in float64."""
    return logits(forward(model, Batch.pack([tokens])).hidden, model.unembed).double()


def plain_logprobs(result, index=0, model=MODEL):
    """Log-probabilities of a generation's tokens by the definition of each penalty, over whole rows."""
    sampling, tokens = result.sampling, list(result.generations[index].tokens)
    prompt, found = list(result.prompt), []
    rows = scores_of([*prompt, *tokens], model)[len(prompt) - 1 : -1]
    for place, (row, token) in enumerate(zip(rows, tokens, strict=True)):
        counts = torch.bincount(torch.tensor(tokens[:place], dtype=torch.int64), minlength=len(row)).double()
        bias = torch.zeros(len(row), dtype=torch.float64)
        for other, value in (sampling.logit_bias or {}).items():
            bias[other] = value
        row = row + bias
        seen = torch.zeros(len(row), dtype=torch.bool)
        seen[[*prompt, *tokens[:place]]] = True
        penalized = torch.where(row > 0, row / sampling.repetition_penalty, row * sampling.repetition_penalty)
        row = torch.where(seen, penalized, row)
        row = row - sampling.frequency_penalty * counts - sampling.presence_penalty * (counts > 0)
        found.append((row / (sampling.temperature or 1)).log_softmax(-1)[token].item())
    return found


class Asked:
    """A result, and how it was asked for."""

    def __init__(self, engine, request):
        (result,) = engine.run([request])
        self.sampling, self.prompt, self.generations = request.sampling, result.prompt, result.generations


penalties = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.7, 1.0, 1.5]),
        "repetition_penalty": st.sampled_from([1.0, 0.5, 1.3, 5.0]),
        "frequency_penalty": st.sampled_from([0.0, -2.0, 0.6, 2.0]),
        "presence_penalty": st.sampled_from([0.0, -1.5, 0.8]),
        "logit_bias": st.none()
        | st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-100, 100, width=32), max_size=5),
    }
)


@given(values=penalties, length=st.integers(1, 20), seed=st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_logprobs_with_penalties_are_of_the_plain_softmax_of_each_row(values, length, seed):
    request = Request(prompt_of(length, seed), Sampling(**values, max_new_tokens=15, seed=seed), n=2)
    asked = Asked(engine_of(MODEL), request)
    for index, generation in enumerate(asked.generations):
        assert generation.logprobs == pytest.approx(plain_logprobs(asked, index), abs=2e-4)


def test_repetition_greedy_gives_the_tokens_of_transformers():
    prompt = prompt_of(12, 3)
    tokens = list(prompt)
    processor = transformers.RepetitionPenaltyLogitsProcessor(1.7)
    for _ in range(25):
        row = processor(torch.tensor([tokens]), scores_of(tokens)[-1:].float())
        tokens.append(int(row.argmax()))
    request = Request(prompt, Sampling(temperature=0.0, repetition_penalty=1.7, max_new_tokens=25))
    assert Asked(engine_of(MODEL), request).generations[0].tokens == tuple(tokens[12:])


def test_frequency_penalty_of_two_spreads_tokens_and_of_minus_two_repeats_them():
    spread, repeated = (
        Asked(engine_of(MODEL), Request(prompt_of(5), Sampling(frequency_penalty=by, max_new_tokens=60, seed=1)))
        for by in (2.0, -2.0)
    )
    assert len(set(spread.generations[0].tokens)) > 2 * len(set(repeated.generations[0].tokens))


def test_logit_bias_of_a_hundred_forces_a_token_and_of_minus_a_hundred_forbids_it():
    ask = {"max_new_tokens": 20, "seed": 4}
    assert set(Asked(engine_of(MODEL), Request((3,), Sampling(logit_bias={7: 100}, **ask))).generations[0].tokens) == {
        7
    }
    likely = Asked(engine_of(MODEL), Request((3,), Sampling(**ask))).generations[0].tokens[0]
    other = Asked(engine_of(MODEL), Request((3,), Sampling(logit_bias={likely: -100}, **ask))).generations[0]
    assert likely not in other.tokens


def test_filters_and_alternatives_are_of_the_changed_scores():
    bias = {9: 30.0, 11: 29.0}
    sampling = Sampling(logit_bias=bias, top_k=2, logprobs=5, max_new_tokens=10, seed=0)
    (result,) = engine_of(MODEL).run([Request((4, 5), sampling)])
    for top in result.generations[0].top:
        assert [token for token, _ in top] == [9, 11] or {token for token, _ in top} == {9, 11}
        assert sum(math.exp(value) for _, value in top) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("ahead", [False, True])
def test_rows_without_penalties_beside_rows_with_them_have_the_same_bits(ahead):
    free = [Request(prompt_of(3 + i, i), Sampling(seed=i, max_new_tokens=20 + i), n=2) for i in range(4)]
    held = [
        Request(prompt_of(5, 90 + i), Sampling(seed=i, max_new_tokens=7 * i + 1, presence_penalty=1.5))
        for i in range(4)
    ]
    alone = [result.generations for result in engine_of(MODEL).run(free)]
    held_alone = [result.generations for result in engine_of(MODEL).run(held)]
    engine = engine_of(MODEL, max_running=6, burst=4)
    engine._runner.ahead = ahead
    together = [
        result.generations for result in engine.run([one for pair in zip(free, held, strict=True) for one in pair])
    ]
    assert together[::2] == alone
    assert together[1::2] == held_alone


def test_a_row_that_is_preempted_and_computed_again_keeps_its_penalties():
    requests = [
        Request(prompt_of(30, i), Sampling(temperature=0.0, max_new_tokens=60, frequency_penalty=0.9)) for i in range(6)
    ]
    roomy = engine_of(MODEL, exact=False).run(requests)
    tight = engine_of(MODEL, exact=False, kv_bytes=8 * 2 * 2 * 2 * 32 * 8 * 4)
    results = tight.run(requests)
    assert tight.metrics()["preemptions"] > 0
    assert [r.generations[0].tokens for r in results] == [r.generations[0].tokens for r in roomy]


def test_new_weights_in_the_middle_keep_the_penalties():
    other = small_model(seed=3)
    engine, mine = engine_of(MODEL), Listener()
    request = Request(prompt_of(6), Sampling(max_new_tokens=30, repetition_penalty=2.0, seed=5))
    engine.submit(request, mine)
    for _ in range(10):
        engine.burst()
    engine.publish(other.state_dict(), 1, keep_cache=False)
    while mine.result is None:
        engine.burst()
    generation = mine.result.generations[0]
    switch = generation.versions.index(1)
    assert 0 < switch < 29
    mine.result.__dict__["sampling"] = request.sampling
    before, after = plain_logprobs(mine.result, model=MODEL), plain_logprobs(mine.result, model=other)
    assert list(generation.logprobs) == pytest.approx(before[:switch] + after[switch:], abs=2e-4)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"presence_penalty": 2.1}, "presence_penalty = 2.1: expected −2 to 2"),
        ({"frequency_penalty": math.nan}, "frequency_penalty = nan: expected −2 to 2"),
        ({"repetition_penalty": 0.0}, "repetition_penalty = 0.0: expected 0.01 to 100"),
        ({"logit_bias": {3: 101.0}}, r"logit_bias\[3\] = 101.0: expected −100 to 100"),
        ({"logit_bias": {VOCAB: 1.0}}, f"token {VOCAB} is not in the model's vocabulary"),
        ({"logit_bias": dict.fromkeys(range(VOCAB), math.inf)}, "expected −100 to 100"),
    ],
)
def test_values_out_of_range_are_refused_by_name(values, message):
    with pytest.raises(UsageError, match=message):
        engine_of(MODEL).run([Request((3,), Sampling(**values))])
