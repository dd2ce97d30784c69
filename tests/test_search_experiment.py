"""Whole searches in real processes: pausing, promotion, failures, kills, and what is left in the folder."""

import csv
import json
import signal
from pathlib import Path
from typing import Any

import pytest
from conftest import Scratch, last_step, numbers, wait_until
from search_specs import BASE, SEARCH, STEPS

import palestra
from palestra.errors import UsageError
from palestra.runs.checkpoint import metas
from palestra.runs.run import Run
from palestra.runs.session import state_of
from palestra.search.experiment import Search, search
from palestra.search.results import Experiment, new_experiment
from palestra.search.study import TrialRecord, promotion
from palestra.search.trials import HOOK, Rung, trial_outcome


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Experiment:
    """A search that nobody interrupted; only to be read."""
    return search(BASE, root=tmp_path_factory.mktemp("done"), quiet=True)


def session_of(experiment: Experiment, number: int) -> Path:
    return experiment.trial(number) / "sessions" / "0"


def rungs_of(experiment: Experiment) -> dict[int, dict[str, float]]:
    return {trial["trial"]: trial["scores"] for trial in experiment.summary()["trials"]}


def test_search_done_went_by_the_promotion_rule(done):
    """The decisions, made again from nothing but the scores."""
    scores = {trial: list(by_rung.values()) for trial, by_rung in rungs_of(done).items()}
    reached: dict[int, int] = {}

    def promoted(reduction: int) -> tuple[int, int] | None:
        seen = {trial: dict(enumerate(scores[trial][:count])) for trial, count in reached.items()}
        records = [TrialRecord(trial, {}, len(of) - 1, of, "running") for trial, of in seen.items()]
        return promotion(records, reduction, maximize=True)

    while True:
        sent = promoted(2)
        if sent is None and len(reached) < len(scores):
            reached[len(reached)] = 1
            continue
        if sent is None and not any(count == 4 for count in reached.values()):  # 2, 4, 8 and 16 steps, the end
            sent = promoted(1)
        if sent is None:
            break
        reached[sent[0]] += 1
    assert reached == {trial: len(found) for trial, found in scores.items()}


def test_pruned_trial_stopped_at_its_rung_with_a_checkpoint(done):
    states = {trial["trial"]: trial["state"] for trial in done.summary()["trials"]}
    assert sorted(set(states.values())) == ["complete", "pruned"]
    for number, scores in rungs_of(done).items():
        session, level = session_of(done, number), 2 * 2 ** (len(scores) - 1)
        assert metas(session)[-1].step == last_step(session) == level
        assert state_of(session) == ("done" if states[number] == "complete" else "interrupted")
        assert numbers(session)[-1]["eval/return"] == list(scores.values())[-1]


def test_trial_paused_and_promoted_equals_one_that_ran_through(done, tmp_path):
    best = done.summary()["best"]
    assert len(rungs_of(done)[best]) == 4  # paused three times
    through = palestra.run(done.best, root=tmp_path, quiet=True)
    assert numbers(through.path / "sessions" / "0") == numbers(session_of(done, best))


def test_best_yaml_is_a_spec_without_the_search_that_names_its_seeds(done):
    text, summary = done.best.read_text(), done.summary()
    spec = palestra.check(done.best).spec
    assert spec.search is None
    assert HOOK not in spec.hooks
    values = summary["trials"][summary["best"]]["values"]
    assert spec.algorithm.lr.start == values["algorithm.lr"]
    assert spec.net.hidden == values["net.hidden"]
    assert "seeds 0." in text
    assert "not a benchmark" in text


def test_folder_has_table_plots_and_cost(done):
    summary = done.summary()
    with (done.path / "trials.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["state"] for row in rows] == [trial["state"] for trial in summary["trials"]]
    assert [float(row["eval/return"]) for row in rows] == [trial["score"] for trial in summary["trials"]]
    steps = [last_step(session_of(done, number)) for number in range(5)]
    assert [int(row["steps"]) for row in rows] == steps
    assert (summary["counted"], summary["counted_if_all_ran"]) == (sum(steps), 5 * STEPS)
    for name in ("parallel_coordinates", "importance", "best_so_far"):
        assert (done.path / "plots" / f"{name}.png").read_bytes()[:4] == b"\x89PNG"
    trial = Run(done.trial(0))
    assert (trial.seeds, trial.spec["threads"]) == ([0], 1)
    assert trial.name == "short"


def finish(scratch: Scratch, *arguments: str) -> Experiment:
    result = scratch("search", *arguments, "--quiet")
    assert result.returncode == 0, result.stderr
    (folder,) = scratch.path.glob("runs/short/*")
    return Experiment(folder)


def begin(scratch: Scratch, number: int, step: int, *arguments: str) -> Any:
    """Start or continue the search, and wait until that trial is at that step."""
    process = scratch.start("search", *arguments, "--quiet")
    session = f"runs/short/*/trials/{number}/sessions/0"
    wait_until(lambda: any(last_step(path) >= step for path in scratch.path.glob(session)), process)
    return process


def assert_same(found: Experiment, reference: Experiment) -> None:
    assert (found.path / "trials.csv").read_text() == (reference.path / "trials.csv").read_text()
    assert found.summary() == reference.summary()
    for number in range(SEARCH["trials"]):
        assert numbers(session_of(found, number)) == numbers(session_of(reference, number))


def test_search_killed_in_the_middle_continues_to_the_same_trials(scratch, done):
    spec = scratch.spec(base=BASE)
    process = begin(scratch, 1, 1, spec)
    process.kill()
    process.communicate()
    found = finish(scratch, "--resume", "short")
    assert_same(found, done)


@pytest.mark.slow
def test_search_killed_and_stopped_at_many_moments_continues_to_the_same_trials(scratch, done):
    arguments = [scratch.spec(base=BASE)]
    for number, step, how in ((0, 0, 9), (0, 2, 9), (1, 3, 15), (2, 1, 9), (3, 2, 2), (4, 1, 9)):
        process = begin(scratch, number, step, *arguments)
        process.send_signal(how)
        _, err = process.communicate(timeout=60)
        if how != signal.SIGKILL:
            assert process.returncode == 130, err
            assert "continue with: palestra search --resume " in err
        arguments = ["--resume", "short"]
    assert_same(finish(scratch, *arguments), done)


def test_score_that_is_not_a_number_makes_a_failure(done, tmp_path):
    session = tmp_path / "sessions" / "0"
    session.mkdir(parents=True)
    source = session_of(done, done.summary()["best"])
    for name in ("manifest.json", "status.json"):
        (session / name).write_bytes((source / name).read_bytes())
    (tmp_path / "trial.json").write_text(json.dumps({"seeds": [0], "name": "short", "id": "x", "spec": {}}))
    for value, state in (("7.5", "complete"), ("NaN", "failed"), ("Infinity", "failed"), ("null", "failed")):
        (session / "metrics.jsonl").write_text(f'{{"step": 1, "frame": 128, "eval/return": {value}}}\n')
        ended = trial_outcome(tmp_path, Rung("eval/return", "steps", 2))
        assert (ended.state, ended.score) == (state, 7.5 if state == "complete" else None)
    assert trial_outcome(tmp_path, Rung("eval/loss", "steps", 2)).state == "failed"  # nobody wrote it


@pytest.mark.slow
def test_finished_search_is_continued_with_more_trials_and_keeps_the_best(scratch, done):
    spec = scratch.spec(base={**BASE, "search": {**SEARCH, "trials": 2}})
    first = finish(scratch, spec)
    before = [trial["values"] for trial in first.summary()["trials"]]
    result = scratch("search", "--resume", str(first.path), "search.trials=3", "--keep", "1")
    assert result.returncode == 0, result.stderr
    summary = first.summary()
    assert [trial["values"] for trial in summary["trials"]][:2] == before
    assert len(summary["trials"]) == 3
    assert summary["trials"][2]["values"] == done.summary()["trials"][2]["values"]
    kept = [number for number in range(3) if metas(session_of(first, number))]
    assert kept == [summary["best"]]
    assert f"*{summary['best']}" in result.stdout
    assert str(first.path / "best.yaml") in result.stdout
    changed = scratch("search", "--resume", str(first.path), "search.seed=7")
    assert changed.returncode == 2
    assert "search.seed: 0 → 7" in changed.stderr


def test_draws_that_do_not_fit_together_are_drawn_again(tmp_path):
    space = {
        "algorithm.minibatch": {"choice": [32, 256]},
        "algorithm.horizon": {"choice": [32, 64]},  # 4 × 32 is no multiple of 256
    }
    spec = palestra.check({**BASE, "search": {"space": space, "sampler": "random"}}).spec
    assert spec.search is not None
    made = Search(new_experiment(tmp_path, spec, []), spec, spec.search, show=False)
    drawn = [tuple(made.new(number).values.values()) for number in range(8)]
    assert set(drawn) == {(32, 32), (32, 64), (256, 64)}
    assert [record.number for record in made.study.records()] == list(range(8))  # what was refused left no trace


def test_bad_search_ends_with_2_before_there_is_a_folder(scratch):
    bad = {
        **BASE,
        "search": {**SEARCH, "space": {"algorithm.lrr": {"uniform": [0, 1]}, "algorithm.lam": {"uniform": [0, 2]}}},
    }
    result = scratch("search", scratch.spec(base=bad))
    assert result.returncode == 2
    assert "algorithm.lrr: unknown key" in result.stderr
    assert "algorithm.lam: expected" in result.stderr
    assert not (scratch.path / "runs").exists()
    without = {key: value for key, value in BASE.items() if key != "search"}
    with pytest.raises(UsageError, match="has no block 'search'"):
        search(without, root=scratch.path / "runs")
    with pytest.raises(UsageError, match="no search 'nowhere'"):
        search(resume="nowhere", root=scratch.path / "runs")
    assert not (scratch.path / "runs").exists()
