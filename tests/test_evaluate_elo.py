"""Elo ratings against the closed form of two players, and of three in a row."""

import math

import pytest

from palestra.evaluate.elo import PRIOR, elo


def test_two_players_have_the_difference_of_their_points():
    results = [("a", "b", 1.0)] * 70 + [("b", "a", 1.0)] * 20 + [("a", "b", 0.5)] * 10
    won, lost = 75 + PRIOR, 25 + PRIOR
    assert elo(results, "b") == pytest.approx({"a": 400 * math.log10(won / lost), "b": 0.0})


def test_likelihood_of_three_players_has_no_slope_at_the_ratings():
    results = [("a", "b", 1.0)] * 6 + [("a", "b", 0.0)] * 3 + [("b", "c", 1.0)] * 5 + [("c", "b", 0.5)] * 2
    results += [("c", "a", 1.0)] * 1
    ratings = elo(results, "a")
    counts = [*results, *[(*pair, score) for pair in (("a", "b"), ("b", "c"), ("c", "a")) for score in (0.5,)]]

    def likelihood(ratings):
        total = 0.0
        for one, other, score in counts:
            chance = 1 / (1 + 10 ** ((ratings[other] - ratings[one]) / 400))
            total += score * math.log(chance) + (1 - score) * math.log(1 - chance)
        return total

    for name in "abc":
        up, down = ratings | {name: ratings[name] + 0.01}, ratings | {name: ratings[name] - 0.01}
        assert (likelihood(up) - likelihood(down)) / 0.02 == pytest.approx(0.0, abs=1e-6)


def test_player_that_never_lost_has_a_rating():
    assert 0 < elo([("a", "b", 1.0)] * 10, "b")["a"] < 1000


@pytest.mark.parametrize("result", [("a", "a", 1.0), ("a", "b", 2.0)])
def test_result_that_is_none_is_refused(result):
    with pytest.raises(ValueError, match="expected two players"):
        elo([result], "a")
