"""The study: what is stored comes back after the process is gone, and the sampler learns from it."""

from pathlib import Path
from statistics import fmean

import pytest

from palestra.search.plots import importances
from palestra.search.results import ranked
from palestra.search.study import Study, TrialRecord
from palestra.spec.blocks import SearchSpec

SPACE = {
    "a.x": {"uniform": [-3, 3]},
    "a.rate": {"loguniform": [1e-3, 1]},
    "n": {"int": [1, 8]},
    "c": {"choice": [[1], {"k": 2}, None, "text"]},
}


def study(folder: Path, direction: str = "maximize", **more: object) -> Study:
    search = SearchSpec.model_validate({"space": SPACE, "pruner": {"asha": {"grace": 1}}, **more})
    return Study(folder, search, "maximize" if direction == "maximize" else "minimize")


@pytest.mark.parametrize("sampler", ["random", "tpe", "cmaes"])
def test_proposals_are_within_the_space_and_follow_from_seed_number_and_attempt(tmp_path, sampler):
    made = study(tmp_path, sampler=sampler, seed=3)
    for number in range(2):
        values, trial = made.propose(number)
        assert values == study(tmp_path, sampler=sampler, seed=3).propose(number)[0]  # in another process too
        assert values != made.propose(number, attempt=1)[0]
        assert values != study(tmp_path, sampler=sampler, seed=4).propose(number)[0]
        assert -3 <= values["a.x"] <= 3
        assert 1e-3 <= values["a.rate"] <= 1
        assert values["n"] in range(1, 9)
        assert values["c"] in SPACE["c"]["choice"]
        made.add(trial)
        made.report(number, 0, values["a.x"])
        made.complete(number, values["a.x"])


def test_stored_trials_come_back_with_values_rungs_scores_and_states(tmp_path):
    made = study(tmp_path)
    proposals = []
    for number in range(4):
        values, trial = made.propose(number)
        proposals.append(values)
        made.add(trial)
    for number in range(3):
        made.report(number, 0, 10.0 + number)
    made.send(1, 1)
    made.report(1, 1, 20.0)
    made.complete(1, 20.0)
    made.fail(2, "the door is stuck")
    made.prune(0)
    records = study(tmp_path).records()
    assert [record.values for record in records] == proposals
    assert [record.state for record in records] == ["pruned", "complete", "failed", "running"]
    assert [record.score for record in records] == [10.0, 20.0, None, None]  # a failure is no score, least of all 0
    assert [record.rung for record in records] == [0, 1, 0, 0]
    assert records[1].scores == {0: 11.0, 1: 20.0}
    assert records[2].reason == "the door is stuck"


@pytest.mark.parametrize(
    ("sampler", "direction"),
    [("tpe", "maximize"), pytest.param("tpe", "minimize", marks=pytest.mark.slow), ("cmaes", "minimize")],
)
def test_sampler_learns_from_paused_trials_alone(tmp_path, sampler, direction):
    made, sign = study(tmp_path, direction, sampler=sampler), 1 if direction == "maximize" else -1
    distances = []
    for number in range(22):  # the first 10 of TPE are random
        values, trial = made.propose(number)
        distance = abs(values["a.x"] - 1)
        made.add(trial)
        made.report(number, 0, -sign * distance**2)  # and never told to be complete or pruned
        distances.append(distance)
    # Of uniform draws it would be (4² + 2²) / 2 / 6 = 1.67 in the mean.
    assert fmean(distances[14:]) < 1.2


def record(number: int, score: float | None, state: str = "complete", rung: int = 0, **values: object) -> TrialRecord:
    return TrialRecord(number, values, rung, {} if score is None else {0: score}, state, score)


def test_ranking_puts_complete_before_pruned_and_leaves_failures_out():
    records = [
        record(0, 9.0, "pruned", rung=0),
        record(1, 5.0, "complete", rung=2),
        record(2, None, "failed"),
        record(3, 8.0, "pruned", rung=1),
        record(4, 7.0, "complete", rung=2),
        record(5, 7.0, "complete", rung=2),
    ]
    assert [one.number for one in ranked(records, maximize=True)] == [4, 5, 1, 3, 0]
    assert [one.number for one in ranked(records, maximize=False)] == [1, 4, 5, 3, 0]


def test_importance_of_known_dependence_is_its_closed_form():
    space = SearchSpec.model_validate({"space": {"x": {"uniform": [0, 9]}, "c": {"choice": ["a", "b"]}}}).space
    rising = [record(i, float(i) ** 3, x=9.0 - i, c="a" if i < 2 else "b") for i in range(4)]
    found = importances(space, rising)
    assert found["x"] == pytest.approx(1)  # ranks: any monotone dependence is perfect
    assert found["c"] == pytest.approx((4 / 5) ** 0.5)  # ranks 1 2 | 3 4: between 4 · 1², all 2 · (1.5² + 0.5²)
    alike = [record(i, 1.0, x=float(i), c="a") for i in range(4)]
    assert importances(space, alike) == {"x": 0.0, "c": 0.0}
