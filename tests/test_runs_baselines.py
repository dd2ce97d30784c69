"""Reference scores: which are comparable, what they say, how they are kept and shown."""

import json
from pathlib import Path

import pytest

from palestra.errors import UsageError
from palestra.runs.baselines import FILE, SHIPPED, Score, references, scores


def report(accuracy: float = 0.7, problems: int = 1319, shots: int = 0) -> dict:
    share = {"mean": accuracy, "problems": problems, "error": 0.01, "interval": [0.6, 0.8]}
    metrics = {"exact_match,strict-match": [0.5914, 0.0135], "perplexity": [12.0, None]}
    return {
        "model": {"init": "mine"},
        "tasks": {"words": {"task": "gsm8k", "args": {"shots": shots}, "greedy": {"accuracy": share}}},
        "likelihood": {"arc_easy": {"accuracy": share, "items": 200, "shots": 10}},
        "lm_eval": {"gsm8k": {"metrics": metrics, "documents": 1319, "shots": 4}},
    }


def test_scores_are_the_shares_of_a_report():
    found = [(one.task, one.metric, one.shots, one.problems) for one in scores(report())]
    assert found == [
        ("gsm8k", "accuracy", 0, 1319),
        ("arc_easy", "accuracy", 10, 200),
        ("gsm8k", "exact_match,strict-match", 4, 1319),
    ]


def test_shipped_references_are_found_by_task_metric_and_shots(tmp_path: Path):
    mine, _, of_lm_eval = scores(report())
    assert [one.value for one in references(mine, tmp_path)] == [0.6277, 0.1433]
    assert [one.value for one in references(of_lm_eval, tmp_path)] == [0.5914, 0.5944]
    assert references(next(scores(report(shots=3))), tmp_path) == []
    assert len(set(SHIPPED.read_text().splitlines())) == len(SHIPPED.read_text().splitlines())


@pytest.mark.parametrize(
    ("here", "problems", "words"),
    # 0.6277 of 1319 has a standard error of 1.33 points; the difference of two such shares reaches 3.7 at 95 %.
    [
        (0.70, 1319, "higher"),
        (0.64, 1319, "within"),
        (0.66, 1319, "within"),
        (0.55, 1319, "lower"),
        (0.70, 50, "within"),
    ],
)
def test_a_difference_counts_only_beyond_the_noise_of_both(here: float, problems: int, words: str, tmp_path: Path):
    (score, *_) = scores(report(here, problems))
    assert score.beside(references(score, tmp_path)[0]).startswith(words)


def test_none_of_four_is_not_certain(tmp_path: Path):
    (score, *_) = scores(report(0.0, 4))
    assert [score.beside(one).partition(" ")[0] for one in references(score, tmp_path)] == ["lower", "within"]


def test_lines_in_a_runs_folder_are_references_there_alone(tmp_path: Path):
    (score, *_) = scores(report(0.72))
    line = {"model": "first try", "task": "gsm8k", "metric": "accuracy", "value": 0.7, "problems": 1319}
    (tmp_path / FILE).write_text(json.dumps(line) + "\n")
    assert [one.model for one in references(score, tmp_path)][-1] == "first try"
    assert score.beside(references(score, tmp_path)[-1]).startswith("within")
    assert len(references(score, tmp_path / "other")) == 2


@pytest.mark.parametrize(
    "line", ["[]", "{", '{"model": "a", "task": "b", "metric": "c", "value": 62.77}', '{"model": "a"}']
)
def test_a_line_that_is_no_score_is_an_error_with_its_place(tmp_path: Path, line: str):
    (tmp_path / FILE).write_text(
        json.dumps({"model": "a", "task": "b", "metric": "c", "value": 0.5}) + "\n" + line + "\n"
    )
    with pytest.raises(UsageError, match=r"baselines\.jsonl:2 is not a reference score"):
        references(Score("m", "t", "accuracy", 0.5), tmp_path)
