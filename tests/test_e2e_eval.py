"""`palestra eval` and specs of kind `evaluate` through the real command: tables, errors, run folders, reports."""

import contextlib
import io
import json
import re
import shutil

import pytest
from eval_lab import save_model, spec_of
from tiny_lm import write_rows

from palestra.cli.show import show_evaluation
from palestra.errors import UsageError
from palestra.runs.run import Run, new_trial, open_run

ARITHMETIC = ("--task", "arithmetic", "-a", "digits=1", "--max-new-tokens", "4", "--dtype", "fp32")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("models") / "tiny")


def cells(output: str, first: str) -> dict[str, str]:
    """The row of a table by the names of its columns, which are at least two spaces apart."""
    lines = [re.split(r" {2,}", line.strip()) for line in output.splitlines()]
    (row,) = [line for line in lines if line[0] == first]
    header = next(line for line in reversed(lines[: lines.index(row)]) if line[0] in ("task", "likelihood"))
    return dict(zip(header, row, strict=True))


def test_eval_prints_a_table_and_writes_a_run(scratch, saved):
    rows = [{"query": "1+1=", "choices": ["2", "3"], "gold": 0}] * 3
    write_rows(scratch.path / "sums.jsonl", rows)
    extra = ("--samples", "4", "--k", "1,4", "--problems", "15", "--split", "train", "--likelihood", "sums.jsonl")
    result = scratch("eval", str(saved), *ARITHMETIC, *extra)
    assert result.returncode == 0, result.stderr
    task, sums = cells(result.stdout, "arithmetic"), cells(result.stdout, "sums")
    assert (task["split"], task["problems"]) == ("train", "15 of 80")
    assert {"accuracy", "95 %", "pass@1", "pass@4", "truncated", "tokens"} <= task.keys()
    assert (sums["rows"], sums["guessing"]) == ("3 of 3", "50.0 %")
    (report,) = scratch.path.glob("runs/eval_tiny/*/sessions/0/evaluation.json")
    data = json.loads(report.read_text())
    assert f"{100 * data['metrics']['eval/arithmetic/accuracy']:.1f} %" == task["accuracy"]
    assert data["tasks"]["arithmetic"]["args"]["digits"] == 1
    assert str(report.parent / "answers.jsonl") in result.stdout
    assert f"weights {data['model']['sha256'][:12]}" in result.stdout
    listed = scratch("runs")
    assert re.search(r"eval_tiny/\S+ +done", listed.stdout)
    # The report is made of the folder alone: it can be moved, and the model may be gone.
    shutil.move(scratch.path / "runs", scratch.path / "elsewhere")
    again = open_run("eval_tiny", scratch.path / "elsewhere")
    assert show(again).splitlines()[:3] == result.stdout.splitlines()[:3]


def show(run: Run) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        show_evaluation(run)
    return out.getvalue()


def test_train_runs_a_spec_of_kind_evaluate_and_shows_the_same_table(scratch, saved):
    spec = spec_of(saved, {"task": "arithmetic", "args": {"digits": 1}}, eval__problems=6)
    path = scratch.spec("scores", base=spec)
    checked = scratch.here("check", path)
    assert checked.returncode == 0, checked.stderr
    assert "estimator" not in checked.stdout
    result = scratch.here("train", path, "--quiet")
    assert result.returncode == 0, result.stderr
    assert cells(result.stdout, "arithmetic")["problems"] == "6 of 20"
    assert scratch.status("scores")["state"] == "done"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--task", "arithmetik"), "Did you mean 'arithmetic'"),
        (("--task", "arithmetic", "-a", "digit=1"), "digit"),
        (("--task", "arithmetic", "-a", "digits"), "expected KEY=VALUE"),
        (("--task", "arithmetic", "--split", "dev"), "expected one of train, test"),
        (("--task", "arithmetic", "--samples", "2", "--k", "1,4"), "expected at most samples = 2"),
        (("--task", "arithmetic", "--k", "x"), "expected whole numbers"),
        (("--task", "arithmetic", "--dtype", "int8"), "dtype"),
        ((), "expected a task"),
        (("--likelihood", "none.jsonl"), "none.jsonl"),
    ],
)  # fmt: skip
def test_eval_of_what_is_not_there_is_one_paragraph_and_no_folder(scratch, saved, arguments, message):
    result = scratch.here("eval", str(saved), *arguments)
    assert result.returncode == 2, result.stderr
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert not (scratch.path / "runs").exists()


def test_show_evaluation_of_another_run_says_what_it_is(tmp_path):
    new_trial(tmp_path, "short", seeds=[0], command=[], spec={"kind": "control"})
    with pytest.raises(UsageError, match="it is a run of kind control"):
        show_evaluation(open_run("short", tmp_path))
