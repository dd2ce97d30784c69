"""Lessons: weights in closed form, plateaus, what unlocks and graduates, and a graph that can be walked."""

import json
import math
import random
from collections import Counter, deque

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from listed_task import prompts

from palestra.errors import UsageError
from palestra.tasks.curriculum import (
    ALPHA,
    CORRELATION,
    FLOOR,
    GRADUATED,
    LEARNED,
    WINDOW,
    Lesson,
    Lessons,
    plateau,
    weight,
)


def lesson(rates: list[float]) -> Lesson:
    made = Lesson()
    for rate in rates:
        made.observe(rate)
    return made


def flat(rates: list[float]) -> bool:
    made = lesson(rates)
    return plateau(made.rates)


def test_success_moves_a_tenth_of_the_way_to_each_rate() -> None:
    assert lesson([]).success == 0.5
    assert lesson([1.0]).success == pytest.approx(0.55)
    assert lesson([1.0] * 20).success == pytest.approx(1 - 0.5 * 0.9**20)
    assert lesson([0.3, 0.7]).success == pytest.approx(0.9 * (0.9 * 0.5 + ALPHA * 0.3) + ALPHA * 0.7)


def test_weight_is_largest_at_one_half_and_has_a_bonus_that_falls() -> None:
    assert weight(0.5, 0) == 2.0
    assert weight(0.5, 100) == 1 + math.exp(-1)
    assert weight(0.7, 100) == pytest.approx(0.84 * (1 + math.exp(-1)))
    assert weight(0.0, 0) == weight(1.0, 0) == 0.0
    assert weight(0.5, 0) > weight(0.5, 50) > weight(0.5, 500) > 1.0
    assert weight(0.5, 300) - 1 < 0.05
    assert max(range(101), key=lambda percent: weight(percent / 100, 10)) == 50
    assert weight(1.0 + 1e-16, 0) == 0.0  # never below zero


def test_weights_one_lesson_has_all() -> None:
    assert Lessons({"a": ()}, 0).weights(["a"]) == {"a": 1.0}


def test_weights_golden() -> None:
    """Of 4s(1-s) alone: 1, 0.36 and 0.36 over 1 + 1.72, all above the floor, divided by their sum."""
    made = Lessons({"half": (), "easy": (), "hard": ()}, 0)
    for name, success in (("half", 0.5), ("easy", 0.9), ("hard", 0.1)):
        made.lessons[name] = Lesson(success=success, seen=10**6)
    assert made.weights(["half", "easy", "hard"]) == pytest.approx(
        {"half": 1 / 1.72, "easy": 0.36 / 1.72, "hard": 0.36 / 1.72}
    )


def test_success_and_weights_of_the_reference() -> None:
    """The numbers of Marin's curriculum: 90, 50 and 10 of 100 right; a new lesson beside an old one."""
    assert [lesson(rates).success for rates in ([1.0], [1.0, 0.0], [1.0] * 50)] == pytest.approx(
        [0.55, 0.495, 0.997423], abs=5e-7
    )
    for level, needed in ((0.9, 16), (0.95, 22)):
        assert lesson([1.0] * (needed - 1)).success < level < lesson([1.0] * needed).success
    made = Lessons({"easy": (), "medium": (), "hard": ()}, 0)
    for name, right in (("easy", 9), ("medium", 5), ("hard", 1)):
        made.lessons[name] = lesson([float(index % 10 < right) for index in range(100)])
    assert [one.success for one in made.lessons.values()] == pytest.approx([0.84646, 0.37127, 0.05949], abs=5e-6)
    assert list(made.weights(list(made.after)).values()) == pytest.approx([0.306812, 0.551048, 0.14214], abs=5e-7)
    pair = Lessons({"new": (), "old": ()}, 0)
    assert list(pair.weights(["new", "old"]).values()) == [0.5, 0.5]
    pair.lessons["new"], pair.lessons["old"] = Lesson(success=0.5, seen=10), Lesson(success=0.5, seen=150)
    assert list(pair.weights(["new", "old"]).values()) == pytest.approx([0.60897, 0.39103], abs=5e-6)


def test_weights_floor_keeps_hopeless_lessons_alive() -> None:
    made = Lessons({"half": (), "zero": ()}, 0)
    made.lessons["half"], made.lessons["zero"] = Lesson(success=0.5, seen=10**6), Lesson(success=0.0, seen=10**6)
    # 1 over 1 + 1 is a half, and the other has the floor.
    assert made.weights(["half", "zero"]) == pytest.approx({"half": 0.5 / 0.6, "zero": FLOOR / 0.6})


@given(st.lists(st.tuples(st.floats(0, 1), st.integers(0, 10**4)), min_size=1, max_size=12))
def test_weights_any_lessons_sum_to_one_and_none_starves(known: list[tuple[float, int]]) -> None:
    names = [f"l{number}" for number in range(len(known))]
    made = Lessons(dict.fromkeys(names, ()), 0)
    made.lessons = {name: Lesson(success=s, seen=n) for name, (s, n) in zip(names, known, strict=True)}
    weights = made.weights(names)
    assert sum(weights.values()) == pytest.approx(1)
    assert min(weights.values()) >= FLOOR / (1 + FLOOR * len(names)) - 1e-12


def test_choose_over_many_numbers_follows_the_weights() -> None:
    made = Lessons({"medium": (), "easy": (), "hard": ()}, 7)
    for name, success in (("medium", 0.5), ("easy", 0.8), ("hard", 0.05)):
        made.lessons[name] = Lesson(success=success, seen=200)
    weights, names = made.weights(list(made.lessons)), list(made.lessons)
    drawn = Counter(made.choose(number, names) for number in range(4000))
    assert drawn["medium"] > drawn["easy"] > drawn["hard"] > 0
    for name in names:
        assert drawn[name] / 4000 == pytest.approx(weights[name], abs=0.03)
    assert [made.choose(n, names) for n in range(50)] == [made.choose(n, names) for n in range(50)]


def test_correlation_bound_is_that_of_the_t_test() -> None:
    """By simulation: under no trend, a tenth of all windows lies beyond it."""
    generator = np.random.default_rng(0)
    values = generator.normal(size=(20_000, WINDOW))
    time = np.arange(WINDOW) - (WINDOW - 1) / 2
    away = values - values.mean(axis=1, keepdims=True)
    r = away @ time / np.sqrt((time @ time) * (away**2).sum(axis=1))
    assert np.mean(np.abs(r) >= CORRELATION) == pytest.approx(0.1, abs=0.01)
    # And in closed form: t = r·√(48 / (1 - r²)) is the 95th percentile of Student's t with 48 degrees of freedom.
    assert CORRELATION * math.sqrt((WINDOW - 2) / (1 - CORRELATION**2)) == pytest.approx(1.6772, abs=2e-3)


def test_plateau_flat_is_one_and_too_few_are_none() -> None:
    assert flat([0.5] * WINDOW)
    assert flat([0.9] * 100)
    assert flat([1.0] * 100)
    assert not flat([0.9] * (WINDOW - 1))


@pytest.mark.parametrize("slope", [0.003, 0.005, 0.01, 0.02, -0.003, -0.01])
def test_plateau_improving_or_falling_is_none(slope: float) -> None:
    start = 0.2 if slope > 0 else 0.9
    rates = [min(1.0, max(0.0, start + slope * number)) for number in range(WINDOW)]
    if start + slope * WINDOW <= 1.0:
        assert not flat(rates)
    assert not flat([start] * 30 + rates[:20])


def test_plateau_noise_that_moves_the_average_is_none() -> None:
    assert not flat([0.0] * 25 + [1.0] * 25 + [0.0] * 25 + [1.0] * 25)
    assert not flat([float(number // 10 % 2) for number in range(100)])


def test_plateau_noise_of_single_answers_around_a_steady_level_is_one() -> None:
    """By the variation of single rates a lesson at 85 % would never be at a plateau, and nothing after it begin."""
    found = 0
    for seed in range(40):
        dice = random.Random(seed)
        rates = [sum(dice.random() < 0.85 for _ in range(8)) / 8 for _ in range(200)]
        found += flat(rates)
    assert found > 25  # all but the tenth that chance calls a trend, and a few


@pytest.mark.parametrize(
    "after",
    [{"a": ["b"], "b": ["a"]}, {"a": ["a"]}, {"a": [], "b": ["a", "d"], "c": ["b"], "d": ["c"]}],
)
def test_lessons_cycle_is_an_error_that_shows_it(after: dict[str, list[str]]) -> None:
    with pytest.raises(UsageError, match=r"wait for each other.*: (\w)( after \w)* after \1$"):
        Lessons(after, 0)


def test_lessons_diamond_is_no_cycle() -> None:
    made = Lessons({"d": ["b", "c"], "b": ["a"], "c": ["a"], "a": []}, 0)
    assert made.open(["d", "b", "c", "a"]) == ["a"]


def test_unlock_progressive_waits_for_threshold_and_plateau() -> None:
    made = Lessons({"a": [], "b": ["a"]}, 0)
    for number in range(49):
        made.observe("a", 0.018 * number)
        assert made.open(["a", "b"]) == ["a"]
    for _ in range(WINDOW - 1):
        made.observe("a", 0.9)
        assert made.open(["a", "b"]) == ["a"]  # some of the rise is still in the window
    made.observe("a", 0.9)
    assert made.open(["a", "b"]) == ["a", "b"]
    for _ in range(60):  # forgetting it does not lock what was unlocked
        made.observe("a", 0.0)
    assert made.open(["a", "b"]) == ["a", "b"]


def test_unlock_plateau_below_the_threshold_does_not() -> None:
    made = Lessons({"a": [], "b": ["a"]}, 0)
    for _ in range(300):
        made.observe("a", LEARNED - 0.02)
    assert made.open(["a", "b"]) == ["a"]


def test_unlock_several_wants_all_of_them() -> None:
    made = Lessons({"a": [], "b": [], "c": ["a", "b"]}, 0)
    for _ in range(80):
        made.observe("a", 0.9)
    assert made.open(["a", "b", "c"]) == ["a", "b"]
    for _ in range(80):
        made.observe("b", 0.9)
    assert made.open(["a", "b", "c"]) == ["a", "b", "c"]


def test_graduate_all_solved_is_reached() -> None:
    """A moving average from ½ never is 1.0: a threshold of 1 could not be met."""
    assert 0.999999 < lesson([1.0] * 2000).success < 1.0
    assert lesson([1.0] * WINDOW).graduated
    assert not lesson([1.0] * (WINDOW - 1)).graduated


def test_graduate_needs_a_plateau_and_the_threshold() -> None:
    assert not lesson([0.3 + 0.014 * number for number in range(WINDOW)]).graduated
    steady = lesson([(LEARNED + GRADUATED) / 2] * 200)
    assert steady.learned
    assert not steady.graduated


def test_graduate_is_not_drawn_until_all_have() -> None:
    made = Lessons({"a": [], "b": ["a"]}, 0)
    for _ in range(60):
        made.observe("a", 1.0)
    assert made.weights(["a", "b"]) == {"b": 1.0}
    assert {made.choose(number, ["a", "b"]) for number in range(100)} == {"b"}
    for _ in range(60):
        made.observe("b", 1.0)
    assert set(made.weights(["a", "b"])) == {"a", "b"}


@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(0, 1)), max_size=200))
def test_state_comes_back(seen: list[tuple[str, float]]) -> None:
    after = {"a": [], "b": ["a"], "c": []}
    made, again = Lessons(after, 3), Lessons(after, 3)
    for name, rate in seen:
        made.observe(name, rate)
    saved = made.state()
    again.load_state(json.loads(json.dumps(saved, sort_keys=True)))
    assert again.metrics(list("abc")) == made.metrics(list("abc"))
    made.observe("a", 1.0)
    again.observe("a", 1.0)
    assert again.state() == made.state()
    assert saved["a"]["seen"] == made.state()["a"]["seen"] - 1  # a copy
    assert isinstance(again.lessons["a"].rates, deque)
    assert again.lessons["a"].rates.maxlen == WINDOW


def test_prompts_lessons_go_from_the_first_to_the_last() -> None:
    """A pupil who learns a lesson by doing it, and needs what comes before."""
    uses = [
        {"name": "three", "size": 300, "after": ["two"]},
        {"name": "one", "size": 300},
        {"name": "two", "size": 300, "after": ["one"]},
    ]
    made = prompts(uses, 5, mix="lessons")
    done: Counter[str] = Counter()
    first: dict[str, int] = {}
    for number in range(900):
        problem = made.sample(number)
        done[problem.task] += 1
        first.setdefault(problem.task, number)
        made.observe(problem, [float(done[problem.task] > 40)] * 4)
    assert first["one"] == 0
    assert WINDOW < first["two"] < first["three"] < 400
    metrics = made.metrics()
    assert [metrics[f"lessons/{name}/graduated"] for name in ("one", "two", "three")] == [1, 1, 1]
    assert metrics["lessons/three/unlocked"] == 1
    assert sum(metrics[f"lessons/{name}/share"] for name in ("one", "two", "three")) == pytest.approx(1)
