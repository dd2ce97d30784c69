"""Searches, pipelines, speedruns and benchmarks in the web view; where values of a spec came from."""

import json
import shutil
from pathlib import Path

import pytest
from view_runs import View, demo_folder  # noqa: F401

from palestra.spec.load import load
from palestra.view.others import importance


@pytest.fixture
def view(demo_folder: Path, tmp_path: Path) -> View:  # noqa: F811
    shutil.copytree(demo_folder, tmp_path / "runs")
    return View(tmp_path / "runs")


def trials(*rows: tuple[dict, float | None]) -> list[dict]:
    return [{"values": values, "score": score} for values, score in rows]


def test_importance_is_all_of_the_field_that_decides():
    rows = [({"lr": n / 100, "net": "ab"[n % 2]}, float(n)) for n in range(20)]
    shares = importance(trials(*rows, ({"lr": 1.0, "net": "a"}, None)))
    assert 0.9 < shares["lr"] <= 1.0
    assert shares["net"] < 0.05
    by_choice = importance(trials(*(({"net": "ab"[n % 2]}, float(n % 2)) for n in range(20))))
    assert by_choice == {"net": pytest.approx(1.0)}
    assert importance(trials(({"x": 1}, 1.0))) == importance([]) == {}


def test_searches_pipelines_and_benchmarks_are_found(view: View):
    search = view.root / "find_lr" / "20260101T000000-abcd"
    search.mkdir(parents=True)
    spec = {"kind": "control", "name": "find_lr"}
    (search / "search.json").write_text(json.dumps({"name": "find_lr", "id": "x", "created": "now", "spec": spec}))
    rows = [{"trial": n, "values": {"lr": n}, "score": n, "state": "complete"} for n in range(12)]
    (search / "summary.json").write_text(json.dumps({"metric": "return", "best": 11, "trials": rows}))
    shutil.copytree(view.root / view.run("demo_cartpole"), search / "trials" / "3")
    pipeline = view.root / "outputs"
    for step in ("clean-0a1b", ".steps/clean-0a1b"):
        (pipeline / step).mkdir(parents=True)
    (pipeline / "clean-0a1b" / "counts.json").write_text('{"rows_in": 9, "dropped": {"short": 2}}')
    (pipeline / ".steps" / "clean-0a1b" / "log.txt").write_text("went well\n")
    steps = [{"name": "clean", "address": address, "state": "done"} for address in ("clean-0a1b", "../../secret")]
    (pipeline / "report-corpus.json").write_text(json.dumps({"name": "corpus", "steps": steps}))
    (view.root / "speedrun.json").write_text('{"runs": 3}')
    answer = View(view.root).get("others")
    by_name = {one["name"]: one for one in answer["searches"] + answer["pipelines"]}
    assert by_name["find_lr"]["importance"]["lr"] > 0.85
    step, other = by_name["corpus"]["steps"]
    assert (step["counts"]["dropped"], step["log"]) == ({"short": 2}, "went well\n")
    assert "log" not in other
    assert "is not a submission" in answer["damaged"][0]
    assert "find_lr/20260101T000000-abcd/trials/3" in [row["run"] for row in View(view.root).get("runs")["runs"]]


def test_benchmarks_of_this_repository_are_shown(tmp_path: Path):
    shutil.copy(Path(__file__).parent.parent / "docs" / "benchmarks.jsonl", tmp_path)
    rows = View(tmp_path).get("others")["benchmarks"]
    assert {row["spec"] for row in rows} >= {"ppo_cartpole"}
    assert all(row["low"] <= row["IQM"] <= row["high"] for row in rows)


def test_given_has_the_origin_of_every_value_that_is_no_default(tmp_path: Path):
    (tmp_path / "spec.yaml").write_text(
        "kind: control\nenv: {id: CartPole-v1}\nalgorithm:\n  name: ppo\ntrain: {frames: 1e3}\n"
    )
    given = load(str(tmp_path / "spec.yaml"), overrides=["algorithm.lr=0.5"]).given()
    assert given["env.id"].endswith("spec.yaml:2")
    assert given["algorithm.lr"] == "override"
    assert "seed" not in given
