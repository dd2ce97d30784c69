import math

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from palestra.generate.engine.sampler import Needs, Settings, sample, uniform

INF = float("inf")


def rows(batch, **values):
    """Settings in which only the given values do something."""
    plain = {"temperature": 1.0, "top_k": 2**40, "top_p": 1.0, "min_p": 0.0, "seed": 0, "sampled": 0, "minimum": 0}
    types = {"temperature": torch.float32, "top_p": torch.float32, "min_p": torch.float32}
    filled = {
        name: torch.as_tensor(values.get(name, value), dtype=types.get(name, torch.int64)).expand(batch).clone()
        for name, value in plain.items()
    }
    return Settings(**filled, ends=torch.as_tensor(values.get("ends", [[-1]])).expand(batch, -1))


def distribution(scores, needs=None, **values):
    """Log-probabilities (V) that the sampler draws from, by asking for all alternatives."""
    needs = needs or Needs(top=scores.shape[-1])
    found = sample(scores[None], rows(1, **values), needs)
    return torch.full_like(scores, -INF).scatter(0, found.top_tokens[0], found.top_logprobs[0])


def peers(scores, temperature, top_k, top_p, min_p):
    """The same by transformers' processors."""
    steps = [transformers.TemperatureLogitsWarper(temperature)]
    if top_k is not None:
        steps.append(transformers.TopKLogitsWarper(top_k))
    if top_p < 1:
        steps.append(transformers.TopPLogitsWarper(top_p))
    if min_p > 0:
        steps.append(transformers.MinPLogitsWarper(min_p))
    for step in steps:
        scores = step(None, scores)
    return scores.log_softmax(-1)


@given(
    seed=st.integers(0, 10**6),
    temperature=st.floats(0.2, 3),
    top_k=st.none() | st.integers(1, 60),
    top_p=st.sampled_from([1.0, 0.95, 0.7, 0.3, 0.01]),
    min_p=st.sampled_from([0.0, 0.05, 0.3, 1.0]),
)
@settings(max_examples=150, deadline=None)
def test_filters_any_combination_give_the_distribution_of_transformers(seed, temperature, top_k, top_p, min_p):
    scores = torch.randn(50, generator=torch.Generator().manual_seed(seed)) * 3
    ours = distribution(scores, temperature=temperature, top_k=top_k or 2**40, top_p=top_p, min_p=min_p)
    theirs = peers(scores[None], temperature, top_k, top_p, min_p)[0]
    assert torch.equal(ours > -INF, theirs > -INF)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_filters_of_other_rows_leave_a_row_bit_for_bit():
    scores = torch.randn(3, 1000, generator=torch.Generator().manual_seed(0))
    plain = Needs(greedy=False, tempered=False, filtered=False, min_tokens=False, top=1000)
    alone = sample(scores[:1], rows(1, seed=[5]), plain)
    among = sample(scores, rows(3, seed=[5, 6, 7], top_k=[2**40, 3, 9], top_p=[1.0, 0.5, 1.0]), Needs(top=1000))
    assert torch.equal(alone.tokens, among.tokens[:1])
    assert torch.equal(alone.logprobs, among.logprobs[:1])
    assert torch.equal(alone.top_logprobs, among.top_logprobs[:1])


@pytest.mark.parametrize("values", [{}, {"temperature": 0.5}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.1}])
def test_draws_many_follow_the_distribution_and_report_its_logprobs(values):
    scores = torch.randn(12, generator=torch.Generator().manual_seed(3)) * 1.5
    expected, count = distribution(scores, **values), 20_000
    drawn = sample(scores.expand(count, -1), rows(count, sampled=torch.arange(count), seed=11, **values), Needs())
    torch.testing.assert_close(drawn.logprobs, expected[drawn.tokens], rtol=1e-5, atol=1e-5)
    possible = expected > -INF
    observed = drawn.tokens.bincount(minlength=12)[possible].double()
    wanted = expected[possible].double().exp() * count
    assert observed.sum() == count
    chi_square = ((observed - wanted) ** 2 / wanted).sum().item()
    freedom = int(possible.sum()) - 1
    assert chi_square < freedom + 5 * math.sqrt(2 * freedom) + 5


@given(u=st.sampled_from([0.0, 2.0**-53, 0.5, 1 - 2.0**-53]), seed=st.integers(0, 1000), heat=st.floats(0.01, 2))
@settings(max_examples=100, deadline=None)
def test_draw_at_any_number_never_gives_a_token_of_probability_zero(u, seed, heat):
    from palestra.generate.engine import sampler

    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(200, generator=generator) * 30 / heat
    scores[torch.rand(200, generator=generator) < 0.5] = -INF
    scores[7] = 1.0
    probabilities = scores.softmax(-1)[None]
    token = sampler._inverse_cdf(probabilities, torch.tensor([u], dtype=torch.float64))
    assert probabilities[0, token] > 0


def test_draw_peaked_distribution_gives_the_peak_for_all_numbers():
    scores = torch.full((1000, 500), -200.0)
    scores[:, 321] = 0.0
    drawn = sample(scores, rows(1000, sampled=torch.arange(1000)), Needs())
    assert (drawn.tokens == 321).all()
    assert (drawn.logprobs == 0).all()


def test_temperature_zero_takes_the_likeliest_with_its_logprob_at_one():
    scores = torch.randn(4, 30, generator=torch.Generator().manual_seed(1))
    for needs in (Needs(), Needs(tempered=False, filtered=False)):
        drawn = sample(scores, rows(4, temperature=[0.0, 0.0, 1.0, 0.0]), needs)
        greedy = torch.tensor([0, 1, 3])
        assert torch.equal(drawn.tokens[greedy], scores.argmax(-1)[greedy])
        torch.testing.assert_close(drawn.logprobs[greedy], scores.log_softmax(-1).amax(-1)[greedy])


def test_needs_that_all_rows_share_change_no_bit():
    scores = torch.randn(3, 100, generator=torch.Generator().manual_seed(1))
    for values, needs in (
        ({"temperature": 0.0}, Needs(stochastic=False, tempered=False, filtered=False, min_tokens=False)),
        ({"temperature": 1.0}, Needs(greedy=False, tempered=False, filtered=False, min_tokens=False)),
        ({"temperature": 0.7}, Needs(greedy=False, filtered=False, min_tokens=False)),
    ):
        less, more = (
            sample(scores, rows(3, seed=[1, 2, 3], **values), needs),
            sample(scores, rows(3, seed=[1, 2, 3], **values), Needs()),
        )
        assert torch.equal(less.tokens, more.tokens)
        assert torch.equal(less.logprobs, more.logprobs)


def test_draw_of_a_given_number_is_the_token_of_the_running_sum():
    generator = torch.Generator().manual_seed(0)
    for size in (1, 63, 64, 65, 300):
        probabilities = torch.randn(200, size, generator=generator).mul(3).softmax(-1)
        u = torch.rand(200, generator=generator, dtype=torch.float64)
        from palestra.generate.engine import sampler

        found = sampler._inverse_cdf(probabilities, u)
        until = probabilities.double().cumsum(-1)
        goal = u * until[:, -1]
        before = torch.where(found > 0, until.gather(1, (found - 1).clamp(min=0)[:, None])[:, 0], 0.0)
        assert (before <= goal + 1e-6).all()
        assert (until.gather(1, found[:, None])[:, 0] > goal - 1e-6).all()


def test_minimum_not_reached_makes_end_tokens_impossible():
    scores = torch.randn(2, 10, generator=torch.Generator().manual_seed(2))
    scores[:, [4, 0]] = 20.0
    ends = [[0, 4, 0, 0], [0, 4, 0, 0]]
    found = sample(scores, rows(2, minimum=[3, 3], sampled=[2, 3], ends=ends), Needs(top=10))
    early = dict(zip(found.top_tokens[0].tolist(), found.top_logprobs[0].tolist(), strict=True))
    assert early[0] == early[4] == -INF
    assert sum(map(math.exp, early.values())) == pytest.approx(1, abs=1e-5)
    assert found.tokens[0] not in (0, 4)
    assert found.tokens[1] in (0, 4)
    without = sample(scores, rows(2, minimum=3), Needs())
    assert set(without.tokens.tolist()) <= {0, 4}  # no end tokens: nothing to hold back


def test_uniform_is_splitmix_of_seed_and_draw():
    mask = 2**64 - 1

    def splitmix(x):
        x = (x + 0x9E3779B97F4A7C15) & mask
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
        return x ^ (x >> 31)

    for seed in (0, 1, -1, 2**62 + 12345, -(2**63)):
        for draw in (0, 1, 1000):
            bits = splitmix(splitmix(seed & mask) ^ draw)
            found = uniform(torch.tensor([seed] * 20), torch.tensor([draw] * 20))
            assert found.tolist() == [(bits >> 11) * 2.0**-53] * 20


def test_uniform_over_draws_and_over_seeds_is_even_and_uncorrelated():
    count = 100_000
    for numbers in (
        uniform(torch.full((count,), 7), torch.arange(count)),
        uniform(torch.arange(count), torch.zeros(count, dtype=torch.int64)),
    ):
        deciles = (numbers * 10).long().bincount(minlength=10).double()
        assert ((deciles - count / 10) ** 2 / (count / 10)).sum() < 30  # 9 degrees of freedom
        centred = numbers - 0.5
        assert abs((centred[1:] * centred[:-1]).mean() * 12) < 0.02
