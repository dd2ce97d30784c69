"""`palestra bench`: what is run, what is kept, and a table that comes from run folders alone."""

import json
import shutil
import signal
import time
from pathlib import Path

import mdformat
import pytest
import yaml
from conftest import SHORT

from palestra.bench.finished import Shipped, find
from palestra.bench.run import Job, bench, plan
from palestra.bench.suites import SUITES, Entry, chosen, parse_seeds, suite
from palestra.bench.table import COLUMNS, collect, markdown_table, write_page
from palestra.control.trial_metrics import score
from palestra.errors import UsageError

TINY = SHORT | {"train": {"frames": 6 * 128}, "every": {"checkpoint": "2 steps", "eval": None}}


def write_spec(folder: Path, name: str = "ppo_cartpole", **changes: object) -> Path:
    folder.mkdir(exist_ok=True)
    data = {key: value for key, value in {**TINY, **changes}.items() if key != "name"}
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(data))
    return folder


def rows_of(page: str) -> dict[str, dict[str, str]]:
    """The cells of a page, by spec and column."""
    lines = [line.strip("|").split("|") for line in page.splitlines() if line.startswith("| `")]
    cells = [[cell.strip() for cell in line] for line in lines]
    return {line[0].strip("`"): dict(zip(COLUMNS, line, strict=True)) for line in cells}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Three seeds of one spec, run by the command."""
    from conftest import Scratch

    scratch = Scratch(tmp_path_factory.mktemp("bench"))
    write_spec(scratch.path / "specs")
    done = scratch("bench", "classic", "--only", "ppo_c", "--seeds", "0-2", "--specs", "specs", "--out", "page.md")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(": done (") == 3
    return scratch.path


def copied(finished: Path, tmp_path: Path) -> Path:
    shutil.copytree(finished, tmp_path / "copy")
    return tmp_path / "copy"


def test_bench_row_has_the_score_of_each_seed_by_the_formula(finished):
    shipped = Shipped.read(finished / "specs", "ppo_cartpole")
    assert shipped is not None
    row = collect(SUITES["classic"], finished / "specs", finished / "runs/bench", [0, 1, 2])[0]
    assert row.result is not None
    for seed, path in find(finished / "runs/bench", "ppo_cartpole", shipped.hash).done.items():
        lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
        by_hand = [line["return"] for line in lines if "return" in line and line["frame"] > 768 * 3 / 4]
        assert row.result.scores[seed] == pytest.approx(sum(by_hand) / len(by_hand))
        summary = json.loads((path.parent.parent / "summary.json").read_text())
        assert row.result.scores[seed] == pytest.approx(summary["total_reward_ma"])
    cells = rows_of((finished / "page.md").read_text())["ppo_cartpole"]
    assert cells["seeds"] == "0–2"
    assert float(cells["score"]) == pytest.approx(row.result.mean, abs=0.005)
    assert float(cells["IQM"]) == pytest.approx(row.result.iqm, abs=0.005)
    assert (cells["target"], cells["reached"], cells["SLM-Lab"]) == ("499", "no", "498.94")
    assert (cells["frames"], cells["window"], cells["environment"]) == ("768", "192", "CartPole-v1")
    assert cells["spec hash"].strip("`") == shipped.hash[:8]
    assert float(cells["frames/s"].replace(",", "")) > 0
    assert (finished / "plots/ppo_cartpole.png").stat().st_size > 1000


def test_bench_page_lists_every_row_also_those_not_run_and_is_formatted(finished):
    page = (finished / "page.md").read_text()
    rows = rows_of(page)
    assert list(rows) == [entry.spec for one in SUITES.values() for entry in one.entries]
    assert rows["ppo_pong"]["score"] == "no spec"
    assert mdformat.text(page, extensions={"gfm"}) == page


def test_bench_seeds_that_are_done_are_kept_and_missing_ones_are_said(finished, tmp_path):
    copy = copied(finished, tmp_path)
    rows = write_page(copy / "page.md", copy / "specs", copy / "runs/bench")
    cells = rows_of((copy / "page.md").read_text())["ppo_cartpole"]
    assert cells["seeds"] == "0–2, 3 missing"
    assert rows["classic"][0].missing == [3]


def test_bench_run_of_another_version_of_the_spec_does_not_count(finished, tmp_path):
    copy = copied(finished, tmp_path)
    write_spec(copy / "specs", algorithm={**TINY["algorithm"], "gamma": 0.9})
    row = collect(SUITES["classic"], copy / "specs", copy / "runs/bench")[0]
    assert (row.result, row.note, row.stale) == (None, "not run since the spec changed", 3)
    # What is not of the run changes nothing: seeds, and what a search would vary.
    space = {"space": {"algorithm.gamma": {"uniform": [0.9, 0.99]}}}
    write_spec(copy / "specs", seed=5, max_session=2, search=space)
    row = collect(SUITES["classic"], copy / "specs", copy / "runs/bench")[0]
    assert row.result is not None
    assert sorted(row.result.scores) == [0, 1, 2]


def test_bench_unfinished_seed_does_not_count(finished, tmp_path):
    copy = copied(finished, tmp_path)
    (status,) = copy.glob("runs/bench/ppo_cartpole/*/sessions/1/status.json")
    status.write_text(json.dumps(json.loads(status.read_text()) | {"state": "interrupted"}))
    row = collect(SUITES["classic"], copy / "specs", copy / "runs/bench")[0]
    assert row.missing == [1, 3]


def test_bench_plan_runs_what_is_missing_and_resumes_what_was_begun(finished, tmp_path):
    copy = copied(finished, tmp_path)
    (status,) = copy.glob("runs/bench/ppo_cartpole/*/sessions/1/status.json")
    status.write_text(json.dumps(json.loads(status.read_text()) | {"state": "interrupted"}))
    told: list[str] = []
    jobs = plan(chosen(suite("classic").entries, "ppo_c"), [0, 1, 5], copy / "specs", copy / "runs/bench", told.append)
    source = copy / "specs/ppo_cartpole.yaml"
    trial = status.parents[2]
    assert jobs == [Job("ppo_cartpole", (5,), source, None), Job("ppo_cartpole", (1,), source, trial)]
    assert told == ["ppo_cartpole: seed 0 done"]


@pytest.mark.slow
def test_bench_stopped_in_the_middle_continues_its_run(scratch):
    write_spec(scratch.path / "specs", train={"frames": 200 * 128})
    arguments = ("bench", "classic", "--only", "ppo_c", "--seeds", "0", "--specs", "specs", "--out", "page.md")
    process = scratch.start(*arguments)
    deadline = time.monotonic() + 120
    while not list(scratch.path.glob("runs/bench/*/*/sessions/0/checkpoints/step_*/meta.json")):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=120)
    assert process.returncode == 130, told
    again = scratch(*arguments)
    assert again.returncode == 0, again.stderr
    (trial,) = scratch.path.glob("runs/bench/ppo_cartpole/*/trial.json")  # the same run, not another one
    frames = [json.loads(line)["frame"] for line in (trial.parent / "sessions/0/metrics.jsonl").open()]
    assert frames == list(range(128, 200 * 128 + 1, 128))
    assert "resumed at step" in (trial.parent / "sessions/0/log.txt").read_text()


@pytest.mark.slow
def test_bench_a_run_that_fails_leaves_the_others_and_the_table(scratch):
    write_spec(scratch.path / "specs")
    write_spec(scratch.path / "specs", "a2c_cartpole", env={"id": "NoSuch-v1"})
    done = scratch("bench", "classic", "--only", "ppo_c|a2c_c", "--seeds", "0", "--specs", "specs", "--out", "page.md")
    assert done.returncode == 1
    assert "a2c_cartpole seed 0" in done.stderr
    assert "NoSuch-v1" in done.stderr
    cells = rows_of((scratch.path / "page.md").read_text())
    assert cells["ppo_cartpole"]["seeds"].startswith("0")
    assert cells["a2c_cartpole"]["score"] == "not run"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "give a suite"),
        ({"suite": "clasic"}, "the suites are classic, box2d"),
        ({"suite": "classic", "seeds": "3-0"}, "expected seeds"),
        ({"suite": "classic", "only": "("}, "regular expression"),
        ({"suite": "classic", "only": "nothing"}, "finds none"),
        ({"suite": "classic"}, "--specs"),
    ],
)
def test_bench_bad_arguments_are_usage_errors(tmp_path, given, said):
    settings = {"suite": None, "seeds": None, "only": None, "parallel": 1, "run_nothing": False, "tell": print}
    places = {"out": tmp_path / "page.md", "specs": tmp_path, "root": tmp_path / "runs"}
    with pytest.raises(UsageError, match=said):
        bench(**{**settings, **places, **given})


def test_window_is_slm_labs_own_at_its_budget_and_a_quarter_of_a_smaller_one():
    entry = Entry("x", 0, 0, 300_000, 1000)
    assert entry.window(300_000) == 100_000
    assert entry.window(60_000) == 15_000
    assert score(range(6), [10, 20, 30, 40, 50, 60], entry.window(60)) == 4.5


def test_parse_seeds_ranges_and_lists():
    assert parse_seeds("0-3") == (0, 1, 2, 3)
    assert parse_seeds("7") == (7,)
    assert parse_seeds("0, 4-5,0") == (0, 4, 5)
    for wrong in ("", "a", "3-1", "1-", "-1"):
        with pytest.raises(UsageError):
            parse_seeds(wrong)


def test_chosen_entries_are_those_whose_name_is_found():
    assert [e.spec for e in chosen(suite("box2d").entries, "continuous")] == [
        "ppo_lunar_continuous",
        "crossq_lunar_continuous",
    ]


def test_markdown_table_is_what_the_formatter_leaves():
    text = markdown_table(("a", "bb"), [("–", "x"), ("long cell", "λ")])
    assert mdformat.text(text, extensions={"gfm"}) == text
