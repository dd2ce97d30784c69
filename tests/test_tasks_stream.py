"""Which prompt is number n: shares, passes, turns, and a resume that goes on with the same prompts."""

import json
from collections import Counter
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from listed_task import draw, prompts

from palestra.errors import PalestraError, UsageError
from palestra.runs.tree import flatten, unflatten
from palestra.spec.tasks import TasksSpec
from palestra.tasks.stream import Prompts, Shares
from palestra.tasks.task import make_task

TWO = [{"name": "a", "size": 7, "weight": 0.75}, {"name": "b", "size": 5, "weight": 0.25}]


def stream(spec: TasksSpec, seed: int = 0) -> Prompts:
    return Prompts(spec, {use.label: make_task(use.task, use.args, use.label) for use in spec.train}, seed)


@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=7))
@settings(max_examples=60)
def test_shares_after_any_draw_are_within_one_of_the_weights(weights: list[float]) -> None:
    labels = [f"t{number}" for number in range(len(weights))]
    shares = Shares(dict(zip(labels, weights, strict=True)))
    parts = [Fraction(weight) / sum(map(Fraction, weights)) for weight in weights]
    counts: Counter[str] = Counter()
    for number in range(300):
        counts[shares.choose(number, labels)] += 1
        assert all(abs(counts[label] - part * (number + 1)) < 1 for label, part in zip(labels, parts, strict=True))


def test_shares_simple_weights_are_exact_in_every_period() -> None:
    shares = Shares({"a": 0.75, "b": 0.25})
    drawn = [shares.choose(number, ["a", "b"]) for number in range(40)]
    assert all(drawn[start : start + 4].count("a") == 3 for start in range(0, 40, 4))


def test_shares_tasks_that_drop_out_leave_the_others_in_proportion() -> None:
    shares = Shares({"a": 1, "b": 2, "c": 3})
    for number in range(100):
        shares.choose(number, ["a", "b", "c"])
    later = Counter(shares.choose(number, ["a", "c"]) for number in range(40))
    assert later == {"a": 10, "c": 30}


def test_weighted_each_prompt_once_a_pass_and_reshuffled() -> None:
    drawn = draw(prompts(TWO), range(200))
    for name, size in (("a", 7), ("b", 5)):
        theirs = [id for id in drawn if id.startswith(name)]
        passes = [theirs[start : start + size] for start in range(0, len(theirs) - size, size)]
        assert all(sorted(one) == sorted(f"{name}{row}" for row in range(size)) for one in passes)
        assert len({tuple(one) for one in passes}) > 1


def test_weighted_small_task_begins_again_and_weights_stay() -> None:
    """The other way, a task that runs out gives its share away without a word, and the end is of one task alone."""
    drawn = draw(prompts([{"name": "few", "size": 3}, {"name": "many", "size": 1000}]), range(400))
    for start in range(0, 400, 20):
        assert sum(id.startswith("few") for id in drawn[start : start + 20]) == 10


def test_weighted_two_uses_of_one_task_are_two() -> None:
    """Keyed by the task's name they would collapse into one."""
    train = [
        {"task": "arithmetic", "name": "easy", "args": {"digits": 1}, "weight": 1},
        {"task": "arithmetic", "name": "hard", "args": {"digits": 4}, "weight": 3},
    ]
    drawn = [
        stream_prompt.id for stream_prompt in map(stream(TasksSpec.model_validate({"train": train})).sample, range(80))
    ]
    assert Counter(id.split("/")[0] for id in drawn) == {"easy": 20, "hard": 60}
    assert all(len(id.split("/")[2]) == (3 if id.startswith("easy") else 9) for id in drawn)


def test_draw_seed_changes_the_order_and_nothing_else_does() -> None:
    one, again, other = (
        draw(prompts(TWO, 1), range(48)),
        draw(prompts(TWO, 1), range(48)),
        draw(prompts(TWO, 2), range(48)),
    )
    assert one == again
    assert one != other
    assert [id[0] for id in one] == [id[0] for id in other]


def test_draw_same_task_under_other_names_has_other_orders() -> None:
    drawn = draw(prompts([{"name": "a", "size": 50}, {"name": "b", "size": 50}]), range(100))
    assert [id[1:] for id in drawn if id[0] == "a"] != [id[1:] for id in drawn if id[0] == "b"]


@pytest.mark.parametrize("mix", ["weighted", "sequential", "lessons"])
def test_draw_out_of_order_is_an_error(mix: str) -> None:
    made = prompts(TWO, mix=mix)
    made.sample(0)
    for number in (0, 2, -1):
        with pytest.raises(PalestraError, match="expected prompt 1"):
            made.sample(number)


def test_sequential_one_after_the_other_then_again() -> None:
    made = prompts([{"name": "b", "size": 4}, {"name": "a", "size": 3, "weight": 100}], mix="sequential")
    drawn = draw(made, range(28))
    assert "".join(id[0] for id in drawn) == "bbbbaaa" * 4
    rounds = [drawn[start : start + 7] for start in range(0, 28, 7)]
    assert all(sorted(one) == sorted(["b0", "b1", "b2", "b3", "a0", "a1", "a2"]) for one in rounds)
    assert len(set(map(tuple, rounds))) > 1


@pytest.mark.parametrize("mix", ["weighted", "sequential"])
def test_count_takes_the_first_prompts(mix: str) -> None:
    made = prompts([{"name": "a", "size": 50, "count": 3}, {"name": "b", "size": 2, "count": 9}], mix=mix)
    assert set(draw(made, range(60))) == {"a0", "a1", "a2", "b0", "b1"}


def test_count_sequential_is_the_length_of_a_turn() -> None:
    made = prompts([{"name": "a", "size": 50, "count": 3}, {"name": "b", "size": 2}], mix="sequential")
    assert "".join(id[0] for id in draw(made, range(10))) == "aaabbaaabb"


MIXES: list[dict[str, Any]] = [
    {"mix": "weighted"},
    {"mix": "sequential"},
    {"mix": "lessons"},
    {"mix": "weighted", "pool": {}},
    {"mix": "sequential", "pool": {"outside": 0.5, "drop": None}},
    {"mix": "lessons", "pool": {"drop": None}},
]


@given(
    how=st.sampled_from(MIXES),
    seed=st.integers(0, 2**32),
    scores=st.lists(st.sampled_from([0.0, 0.25, 0.5, 0.75]), min_size=1, max_size=20),
    at=st.integers(0, 40),
)
@settings(max_examples=30)
def test_state_taken_at_any_time_goes_on_with_the_same_prompts(
    how: dict[str, Any], seed: int, scores: list[float], at: int
) -> None:
    def step(made: Prompts, number: int) -> str:
        problem = made.sample(number)
        rate = scores[number % len(scores)]
        made.observe(problem, [1.0] * int(4 * rate) + [0.0] * int(4 - 4 * rate))
        return problem.id

    whole = prompts(TWO, seed, **how)
    before = [step(whole, number) for number in range(at)]
    saved = whole.state()
    text = json.dumps(saved, sort_keys=True)
    after = [step(whole, number) for number in range(at, 80)]
    assert json.dumps(saved, sort_keys=True) == text  # a copy, which later draws do not change

    again = prompts(TWO, seed, **how)
    assert [step(again, number) for number in range(at)] == before
    again.state()
    assert [step(again, number) for number in range(at, 80)] == after  # taking the state changed nothing

    for state in (json.loads(text), _through_a_checkpoint(saved)):
        resumed = prompts(TWO, seed, **how)
        resumed.load_state(state)
        assert [step(resumed, number) for number in range(at, 80)] == after
        assert resumed.metrics() == whole.metrics()


def _through_a_checkpoint(state: dict[str, Any]) -> dict[str, Any]:
    tree, leaves = flatten(state)
    assert not leaves
    return unflatten(json.loads(json.dumps(tree)), {})


def test_load_state_other_tasks_or_sizes_is_an_error() -> None:
    saved = prompts(TWO).state()
    with pytest.raises(PalestraError, match="the tasks are a and were a, b"):
        prompts(TWO[:1]).load_state(saved)
    with pytest.raises(PalestraError, match="b has 6 prompts and had 5"):
        prompts([TWO[0], {**TWO[1], "size": 6}]).load_state(saved)


def test_find_gives_the_problem_of_an_id() -> None:
    train = [
        {"task": "arithmetic", "args": {"digits": 3}},
        {"task": "sort", "name": "order.1", "args": {"length": 20}},
        {"task": "countdown", "args": {"size": 50}},
    ]
    made = stream(TasksSpec.model_validate({"train": train}))
    for number in range(30):
        problem = made.sample(number)
        assert made.find(problem.id) == problem


@pytest.mark.parametrize(
    "id", ["a/train/7", "a/test/1", "a/train/", "a", "", "c/train/1", "arithmetic/train/12+34", "arithmetic/test/1+1"]
)
def test_find_unknown_id_is_an_error(id: str) -> None:
    with pytest.raises(PalestraError):
        prompts(TWO).find(id)
    with pytest.raises(PalestraError):
        stream(TasksSpec.model_validate({"train": [{"task": "arithmetic", "args": {"digits": 1}}]})).find(id)


def test_observe_unknown_problem_is_an_error() -> None:
    problem = prompts([{"name": "c"}]).sample(0)
    with pytest.raises(PalestraError, match="of none of the tasks a, b"):
        prompts(TWO).observe(problem, [1.0])


def test_observe_no_scores_changes_nothing() -> None:
    """A group of which no answer could be judged says nothing of its prompt."""
    made = prompts(TWO, mix="lessons", pool={})
    problem = made.sample(0)
    before = made.state()
    made.observe(problem, [])
    assert made.state() == before


def test_metrics_say_passes_and_shares() -> None:
    made = prompts(TWO)
    draw(made, range(28))
    assert made.metrics() == {
        "prompts/a/passes": 3.0,
        "prompts/a/share": 0.75,
        "prompts/b/passes": 1.4,
        "prompts/b/share": 0.25,
    }


def test_prompts_two_tasks_of_one_name_is_an_error() -> None:
    with pytest.raises(UsageError, match="two tasks to train on are called 'a'"):
        prompts([{"name": "a"}, {"name": "a"}])


def test_prompts_empty_split_is_an_error() -> None:
    with pytest.raises(UsageError, match="the split 'train' of a has no problems"):
        prompts([{"name": "a", "size": 0}])


def test_draw_huge_task_needs_no_list() -> None:
    spec = {"train": [{"task": "reverse", "args": {"length": 40, "alphabet": "abcdefghijklmnopqrstuvwxyz"}}]}
    made = stream(TasksSpec.model_validate(spec))
    ids = [made.sample(number).id for number in range(200)]
    assert len(set(ids)) == 200
    assert made.find(ids[7]).id == ids[7]
