"""The block `search:`: what it takes, and all that is wrong with a space said at once, before anything runs."""

from typing import Any

import pytest
from conftest import SHORT
from hypothesis import given
from hypothesis import strategies as st

from palestra.api import check
from palestra.spec.blocks import SearchSpec
from palestra.spec.grid import given_data, with_values
from palestra.spec.load import resolved
from palestra.spec.model import plain
from palestra.spec.validate import SpecError

ASHA = {"asha": {"grace": 512, "by": "frames"}}


def searched(space: dict[str, Any], base: dict[str, Any] = SHORT, **more: Any) -> dict[str, Any]:
    return {**base, "search": {"space": space, **more}}


def problems(spec: Any) -> dict[str, str]:
    with pytest.raises(SpecError) as raised:
        check(spec)
    return {problem.path: f"{problem.reason} {problem.hint}".strip() for problem in raised.value.problems}


def test_space_of_every_form_is_accepted_and_survives_yaml():
    space = {
        "algorithm.lr": {"loguniform": [1e-4, 1e-2]},
        "algorithm.gamma": {"uniform": [0.9, 1]},
        "algorithm.epochs": {"int": [1, 4]},
        "net.hidden": {"choice": [[16], [32, 32]]},
        "algorithm.target_kl": {"choice": [None, 0.02]},
    }
    loaded = check(searched(space, pruner=ASHA))
    assert plain(loaded.spec)["search"]["space"] == space
    assert resolved(plain(loaded.spec)) == loaded.spec


def test_bad_space_all_problems_are_told_at_once():
    space = {
        "algorithm.lrr": {"loguniform": [1e-4, 1e-2]},
        "algorithm.epochs": {"uniform": [1, 4]},
        "algorithm.gamma": {"uniform": [0.5, 1.5]},
        "algorithm.lam": {"uniform": [-0.5, 0.5]},
        "algorithm.minibatch": {"choice": [32, 48]},
        "algorithm.entropy.start": {"uniform": [0, 1]},
        "net.hidden": {"choice": [[16], "wide"]},
        "seed": {"int": [1, 4]},
    }
    base = {**SHORT, "algorithm": {**SHORT["algorithm"], "entropy": 0.01}}
    found = problems(searched(space, base))
    assert {path.removeprefix("search.space.") for path in found} == set(space)
    assert found["search.space.algorithm.lrr"] == "unknown key Did you mean 'lr'?".replace("key ", "key. ")
    assert "a whole number" in found["search.space.algorithm.epochs"]
    assert found["search.space.algorithm.gamma"].endswith("got 1.5")  # the upper end
    assert found["search.space.algorithm.lam"].endswith("got -0.5")  # the lower end
    assert "divisor of horizon × num_envs" in found["search.space.algorithm.minibatch"]
    assert "not a mapping" in found["search.space.algorithm.entropy.start"]
    assert found["search.space.net.hidden"].endswith("got 'wide'")
    assert "cannot be searched" in found["search.space.seed"]


@pytest.mark.parametrize(
    ("axis", "told"),
    [
        ({"loguniform": [0, 1]}, "above 0"),
        ({"uniform": [2, 1]}, "the smaller end first"),
        ({"uniform": [1, 1]}, "the smaller end first"),
        ({"uniform": [1]}, "two numbers"),
        ({"int": [1.5, 3]}, "a whole number"),
        ({"choice": [1]}, "at least 2"),
        ({"choice": [1, 2, 1]}, "differ from each other"),
        ({}, "exactly one of"),
        ({"uniform": [0, 1], "choice": [0, 1]}, "exactly one of"),
        ({"unform": [0, 1]}, "Did you mean 'uniform'?"),
        (3, "a mapping"),
    ],
)
def test_bad_axis_is_refused_with_what_to_do(axis, told):
    assert told in " ".join(problems(searched({"algorithm.lr": axis})).values())


def test_problem_of_a_space_names_file_and_line(tmp_path):
    path = tmp_path / "spec.yaml"
    path.write_text(
        "kind: control\nenv: {id: CartPole-v1}\nalgorithm: {name: ppo}\ntrain: {frames: 1e4}\n"
        "search:\n  space:\n    algorithm.gamma: {uniform: [0.9, 2]}\n"
    )
    with pytest.raises(SpecError, match=r"spec.yaml:7  search.space.algorithm.gamma: expected .* at most 1, got 2.0"):
        check(path)


def test_choice_that_fits_only_with_another_field_is_accepted():
    space = {"algorithm.minibatch": {"choice": [32, 256]}, "algorithm.horizon": {"choice": [32, 64]}}
    check(searched(space))  # 256 does not divide 4 × 32, and divides 4 × 64
    assert "fits no values" in problems(searched({"algorithm.minibatch": {"choice": [32, 256]}})).popitem()[1]


def test_key_inside_another_is_refused():
    found = problems(searched({"algorithm": {"choice": [{"name": "ppo"}, {"name": "ppo", "lr": 1e-3}]},
                               "algorithm.lr": {"uniform": [0, 1]}}))  # fmt: skip
    assert list(found) == ["search.space.algorithm.lr"]


@pytest.mark.parametrize(
    ("more", "path", "told"),
    [
        ({"metric": "return"}, "search.direction", "maximize"),
        ({"pruner": {"asha": {"grace": 10**6, "by": "frames"}}}, "search.pruner.asha.grace", "fewer than"),
        ({"pruner": {"asha": {"grace": 10, "by": "tokens"}}}, "search.pruner.asha.by", "steps or frames"),
        ({"pruner": {"asha": {"grace": 10, "reduction": 1}}}, "search.pruner.asha.reduction", "at least 2"),
        ({"sampler": "tp"}, "search.sampler", "Did you mean 'tpe'?"),
        ({"trials": 0}, "search.trials", "at least 1"),
    ],
)
def test_bad_search_is_refused_with_what_to_do(more, path, told):
    assert told in problems(searched({"algorithm.lr": {"uniform": [0, 1]}}, **more))[path]


@pytest.mark.parametrize("when", [None, "auto"])
def test_asha_without_evaluations_at_known_frames_is_refused(when):
    base = {**SHORT, "every": {"eval": when}}
    assert "every.eval" in problems(searched({"algorithm.lr": {"uniform": [0, 1]}}, base, pruner=ASHA)).popitem()[1]


def test_goal_is_that_of_the_kind_unless_it_is_named():
    def goal(kind: str, **more: Any) -> tuple[str, str]:
        space = {"a": {"uniform": [0, 1]}}
        return SearchSpec.model_validate({"space": space, **more}).goal(kind)

    assert goal("control") == ("eval/return", "maximize")
    assert goal("sft") == ("eval/loss", "minimize")
    assert goal("control", metric="return", direction="minimize") == ("return", "minimize")
    with pytest.raises(ValueError, match="evaluate"):
        goal("evaluate")


@given(st.floats(-1, 2), st.floats(-1, 2))
def test_range_is_accepted_exactly_when_both_ends_are_in_bounds(a, b):
    low, high = sorted((a, b))
    spec = searched({"algorithm.gamma": {"uniform": [low, high]}})
    if 0 <= low < high <= 1:
        check(spec)
    else:
        assert set(problems(spec)) == {"search.space.algorithm.gamma"}


def test_values_are_laid_over_what_was_given_and_not_over_defaults():
    base = {**SHORT, "algorithm": {"name": "ppo"}}
    spec = check(searched({"algorithm.name": {"choice": ["ppo", "a2c"]}}, base)).spec  # a2c has no minibatch
    data = with_values(given_data(spec), {"algorithm.name": "a2c", "net.hidden": [8]})
    assert data["algorithm"] == {"name": "a2c"}
    assert data["net"] == {"hidden": [8]}
    assert "search" not in data
