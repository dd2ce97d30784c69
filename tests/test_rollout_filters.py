"""Which groups are left out and why: equal rewards, lengths, the user's own function and what it can do wrong."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rollout_groups import group, trajectory

from palestra.errors import PalestraError, UsageError
from palestra.rollout.executor import make_filter
from palestra.rollout.types import Group
from palestra.spec.algorithm import FiltersSpec

USERS = """
def easy(group):
    return sum(group.rewards) < 2

def broken(group):
    return group.nonsense

def careless(group):
    return len(group.rewards)

nothing = 3
"""


def reason(one: Group, **spec: Any) -> str | None:
    return make_filter(FiltersSpec(**spec))(one)


def lengths(*drawn: int) -> Group:
    """Of answers with so many drawn tokens; those of tools and prompts do not count."""
    tool = (False, True, False)
    made = [
        trajectory(float(place), drawn=count) if count != 1 else trajectory(float(place), 1, 2, loss_mask=tool)
        for place, count in enumerate(drawn)
    ]
    return group([0.0] * len(drawn), trajectories=tuple(made))


@pytest.fixture
def users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """A module beside the command, under a name of its own."""
    name = f"users_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(USERS)
    monkeypatch.chdir(tmp_path)
    return lambda function: f"{name}:{function}"


@given(st.lists(st.floats(-10, 10), min_size=1, max_size=8))
def test_zero_variance_takes_out_exactly_the_groups_whose_rewards_are_the_same(rewards: list[float]) -> None:
    same = all(abs(a - b) <= 1e-6 for a in rewards for b in rewards)
    assert reason(group(rewards), zero_variance=True) == ("zero_variance" if same else None)
    assert reason(group(rewards)) is None


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([1.0, 1.0], "zero_variance"),
        ([0.1 + 0.2, 0.3], "zero_variance"),
        ([0.0, 0.00001], None),
        ([1.0], "zero_variance"),  # what is left of a partial group has nothing to be compared with
    ],
)
def test_zero_variance_lets_rounding_pass(rewards: list[float], expected: str | None) -> None:
    assert reason(group(rewards, asked=8), zero_variance=True) == expected


@pytest.mark.parametrize(
    ("drawn", "spec", "expected"),
    [
        ((2, 5), {"min_tokens": 2, "max_tokens": 5}, None),
        ((2, 5), {"min_tokens": 3}, "too_short"),
        ((2, 5), {"max_tokens": 4}, "too_long"),
        ((1, 5), {"min_tokens": 2}, "too_short"),
        ((1, 5), {"min_tokens": 1}, None),
        ((0, 5), {"min_tokens": 1}, "too_short"),
    ],
)
def test_length_of_any_answer_out_of_bounds_takes_the_group_out(
    drawn: tuple[int, ...], spec: dict[str, int], expected: str | None
) -> None:
    assert reason(lengths(*drawn), **spec) == expected


def test_reason_of_several_is_the_first(users: Callable[[str], str]) -> None:
    everything = {"zero_variance": True, "min_tokens": 9, "function": users("broken")}
    assert reason(group([1.0, 1.0]), **everything) == "zero_variance"
    assert reason(group([1.0, 0.0]), **everything) == "too_short"


def test_function_of_the_user_keeps_what_it_says_true_of(users: Callable[[str], str]) -> None:
    keep = make_filter(FiltersSpec(function=users("easy")))
    assert [keep(group(rewards)) for rewards in ([1.0, 0.0], [1.0, 1.0])] == [None, "easy"]


def test_function_of_the_user_that_raises_is_named_with_the_problem(users: Callable[[str], str]) -> None:
    expected = r":broken, called with sums/train/3 \(number 3\), raised AttributeError: .*nonsense"
    with pytest.raises(PalestraError, match=expected) as raised:
        reason(group([1.0], 3), function=users("broken"))
    assert isinstance(raised.value.__cause__, AttributeError)


def test_function_of_the_user_that_returns_no_bool_is_refused(users: Callable[[str], str]) -> None:
    with pytest.raises(PalestraError, match="returned 2: expected True"):
        reason(group([1.0, 0.0]), function=users("careless"))


@pytest.mark.parametrize(("name", "why"), [("missing", "has no function 'missing'"), ("nothing", "has no function")])
def test_function_that_is_not_there_is_refused_when_the_filter_is_made(
    users: Callable[[str], str], name: str, why: str
) -> None:
    with pytest.raises(UsageError, match=f"algorithm.filters.function: .* {why}"):
        make_filter(FiltersSpec(function=users(name)))


def test_module_that_is_not_there_is_refused_when_the_filter_is_made() -> None:
    with pytest.raises(UsageError, match=r"algorithm\.filters\.function: no_such_module cannot be imported"):
        make_filter(FiltersSpec(function="no_such_module:keep"))
