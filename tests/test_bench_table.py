"""`palestra bench`: what is run, what may enter the table, and a page that comes from the file of results alone."""

import json
import shutil
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import mdformat
import pytest
import yaml
from conftest import SHORT

from palestra.bench.results import BenchRecord, BenchResult, append, find, identity, machine_of, measure, read, shipped
from palestra.bench.run import bench, plan
from palestra.bench.suites import SEEDS, SHIPPED, SUITES, Entry, entries, parse_seeds
from palestra.bench.table import COLUMNS, HISTORY, markdown_table, verdict, write_page
from palestra.control.trial_metrics import score
from palestra.errors import UsageError
from palestra.runs.lease import Lease, kept
from palestra.runs.store import LocalStore

TINY = SHORT | {"train": {"frames": 6 * 128}, "every": {"checkpoint": "2 steps", "eval": None}}


def write_spec(folder: Path, name: str = "ppo_cartpole", **changes: object) -> Path:
    folder.mkdir(exist_ok=True)
    data = {key: value for key, value in {**TINY, **changes}.items() if key != "name"}
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(data))
    return folder


def rows_of(page: str, columns: tuple[str, ...] = COLUMNS) -> dict[str, dict[str, str]]:
    """The cells of a page, by spec and column."""
    lines = [line.strip("|").split("|") for line in page.splitlines() if line.startswith("| `")]
    cells = [[cell.strip() for cell in line] for line in lines]
    return {line[0].strip("`"): dict(zip(columns, line, strict=True)) for line in cells if len(line) == len(columns)}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Three seeds of one spec, run by the command from a commit without changes."""
    from conftest import Scratch

    scratch = Scratch(tmp_path_factory.mktemp("bench"))
    write_spec(scratch.path / "specs")
    (scratch.path / ".gitignore").write_text("runs/\n")
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "specs"]):
        identity = ["-c", "user.name=x", "-c", "user.email=x@y"]
        subprocess.run(["git", *identity, *command], cwd=scratch.path, check=True)
    arguments = ("bench", "classic", "--only", "ppo_c", "--specs", "specs")
    done = scratch(*arguments, "--seeds", "100-102,1000")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(": done (") == 4
    assert "4 seeds; incomplete (SLM-Lab 498.94)" in done.stdout
    assert {path.name for path in scratch.path.iterdir()} == {".git", ".gitignore", "specs", "runs"}
    done = scratch(*arguments, "--seeds", "100-102,1000", "--table", "--out", "page.md")
    assert done.returncode == 0, done.stderr
    return scratch.path


def copied(finished: Path, tmp_path: Path) -> Path:
    shutil.copytree(finished, tmp_path / "copy")
    return tmp_path / "copy"


def measured(folder: Path) -> list[BenchRecord]:
    return measure(SUITES["classic"].entries[0], folder / "specs", folder / "runs/bench", SEEDS)


def test_bench_row_has_the_score_of_each_seed_by_the_formula(finished):
    spec = shipped(finished / "specs", SUITES["classic"].entries[0])
    assert spec is not None
    (record,) = read(finished / "page.jsonl")
    assert [record] == measured(finished)
    assert sorted(record.scores) == [100, 101, 102]  # a seed of tuning never enters the table
    done = find(finished / "runs/bench", spec).done
    for seed, value in record.scores.items():
        lines = [json.loads(line) for line in (done[seed] / "metrics.jsonl").read_text().splitlines()]
        by_hand = [line["return"] for line in lines if "return" in line and line["frame"] > 768 * 3 / 4]
        assert value == pytest.approx(sum(by_hand) / len(by_hand))
        summary = json.loads((done[seed].parent.parent / "summary.json").read_text())
        assert value == pytest.approx(summary["total_reward_ma"])
    cells, result = rows_of((finished / "page.md").read_text())["ppo_cartpole"], BenchResult((record,))
    assert cells["seeds"] == "100–102"
    assert float(cells["mean"]) == pytest.approx(result.mean, abs=0.005)
    assert float(cells["IQM"]) == pytest.approx(result.iqm, abs=0.005)
    assert (cells["verdict"], cells["SLM-Lab"], cells["SLM-Lab's frames"]) == ("incomplete", "498.94", "200,000")
    assert (cells["frames"], cells["window"], cells["environment"]) == ("768", "192", "CartPole-v1")
    assert cells["spec hash"].strip("`") == identity(spec)[:8]
    assert record.commit is not None
    assert cells["commit"].strip("`") == record.commit[:8]
    assert cells["date"] == record.date
    assert (finished / f"plots/ppo_cartpole_{identity(spec)[:8]}.png").stat().st_size > 1000


def test_bench_page_lists_every_row_also_those_not_run_and_is_formatted(finished):
    page = (finished / "page.md").read_text()
    rows = rows_of(page)
    assert list(rows) == [entry.spec for one in SUITES.values() for entry in one.entries]
    assert rows["ppo_pong"]["mean"] == "no spec"
    assert mdformat.text(page, extensions={"gfm"}) == page


def test_bench_page_needs_the_file_of_results_alone_and_a_seed_is_entered_once(finished, tmp_path):
    copy = copied(finished, tmp_path)
    before, records = (copy / "page.md").read_text(), measured(copy)
    line = json.loads((copy / "page.jsonl").read_text())
    del line["settings"]["every"]["log"]  # as if it had been recorded before there was such a field
    (copy / "page.jsonl").write_text(json.dumps(line | {"hash": "of then"}) + "\n")
    append(copy / "page.jsonl", [replace(record, scores={100: 500.0}) for record in records], print)
    shutil.rmtree(copy / "runs")
    write_page(copy / "page.md", copy / "specs", copy / "runs/bench")
    assert (copy / "page.md").read_text() == before


def test_bench_results_of_a_changed_spec_stand_in_the_history(finished, tmp_path):
    copy = copied(finished, tmp_path)
    old = rows_of((copy / "page.md").read_text())["ppo_cartpole"]
    # What is not of the run changes nothing: seeds, and what a search would vary.
    space = {"space": {"algorithm.gamma": {"uniform": [0.9, 0.99]}}}
    write_spec(copy / "specs", seed=5, max_session=2, search=space)
    assert measured(copy) == measured(finished)
    write_spec(copy / "specs", algorithm={**TINY["algorithm"], "gamma": 0.9})
    assert measured(copy) == []
    write_page(copy / "page.md", copy / "specs", copy / "runs/bench")
    page = (copy / "page.md").read_text()
    assert rows_of(page)["ppo_cartpole"]["mean"] == "not run"
    past = rows_of(page, HISTORY)["ppo_cartpole"]
    assert [past[key] for key in ("mean", "spec hash", "commit")] == [
        old[key] for key in ("mean", "spec hash", "commit")
    ]
    assert mdformat.text(page, extensions={"gfm"}) == page


@pytest.mark.parametrize(
    ("git", "said"),
    [
        (None, "seed 100, 101, 102: not entered in the table"),
        ({"commit": "012345", "dirty": True, "untracked": ["palestra/new.py"]}, "not from a clean commit"),
        ({"commit": "012345", "dirty": True, "untracked": ["docs/benchmarks.jsonl"]}, None),
    ],
)
def test_bench_run_from_a_commit_with_changes_is_refused_with_a_sentence(finished, tmp_path, git, said):
    copy = copied(finished, tmp_path)
    for path in copy.glob("runs/bench/ppo_cartpole/*/sessions/*/manifest.json"):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"git": git}))
    told: list[str] = []
    append(copy / "other.jsonl", measured(copy), told.append)
    assert len(read(copy / "other.jsonl")) == (said is None)
    assert [said in line for line in told] == ([] if said is None else [True])


def test_bench_broken_line_of_results_names_file_and_line(tmp_path):
    (tmp_path / "page.jsonl").write_text('{"spec": "x"}\n')
    with pytest.raises(UsageError, match=r"page\.jsonl:1 is not a line of benchmark results"):
        read(tmp_path / "page.jsonl")


@pytest.mark.parametrize(
    ("scores", "expected"),
    [
        ([500.0] * 10, "above"),
        ([400.0] * 10, "below"),
        ([499.0] * 9 + [300.0], "tied"),  # the IQM reaches the figure, the mean does not
        ([440.0] * 6 + [600.0] * 4, "tied"),  # the mean does, less than two standard errors above
        ([490.0] * 8 + [500.0] * 2, "below"),
        ([500.0] * 9, "incomplete"),
    ],
)
def test_verdict_needs_mean_and_iqm_and_two_standard_errors(scores, expected):
    entry = Entry("x", 499.5, "–", 200_000, 500)
    record = BenchRecord("x", "h", "e", 1, 1, dict(enumerate(scores)), "c", "m", "2026-01-01", {})
    assert verdict(entry, BenchResult((record,))) == expected


@pytest.mark.parametrize(("scores", "expected"), [([500.0], "–"), ([500.0, 500.0], "0.00"), ([499.0, 501.0], "1.00")])
def test_standard_error_of_one_seed_is_a_dash(scores, expected):
    record = BenchRecord("x", "h", "e", 1, 1, dict(enumerate(scores)), "c", "m", "2026-01-01", {})
    assert BenchResult((record,)).spread == expected


def test_a_run_on_a_gpu_is_of_the_same_spec_and_says_which_gpu():
    spec = shipped(SHIPPED, entries("classic", "ppo_c")[0])
    assert spec is not None
    assert identity(spec.model_copy(update={"device": "cuda"})) == identity(spec)
    manifest = {"os": "Linux-x86_64", "cpu": "Xeon", "cores": 16, "gpu": "NVIDIA H200", "spec": {"device": "cuda"}}
    assert machine_of(manifest) == "NVIDIA H200, Xeon (x86_64, 16 cores)"
    assert machine_of(manifest | {"spec": {"device": "auto"}}) == "Xeon (x86_64, 16 cores)"


def test_bench_plan_runs_what_is_missing_and_resumes_what_was_begun(finished, tmp_path):
    copy = copied(finished, tmp_path)
    (status,) = copy.glob("runs/bench/ppo_cartpole/*/sessions/101/status.json")
    status.write_text(json.dumps(json.loads(status.read_text()) | {"state": "interrupted"}))
    (record,) = measured(copy)
    assert sorted(record.scores) == [100, 102]  # an unfinished seed does not count
    told: list[str] = []
    chosen, source = entries("classic", "ppo_c"), copy / "specs/ppo_cartpole.yaml"
    jobs = plan(chosen, [100, 101, 105], copy / "specs", copy / "runs/bench", told.append)
    trial = status.parents[2]
    new = {"root": copy / "runs/bench", "spec": source, "overrides": {"seed": 105, "max_session": 1}}
    assert [(job.name, *job.args[1:]) for job in jobs] == [
        ("ppo_cartpole seed 101", (101,), {"root": copy / "runs/bench", "resume": trial}),
        ("ppo_cartpole seed 105", (105,), new),
    ]
    assert told == ["ppo_cartpole: seed 100 done"]
    (gpu,) = plan(chosen, [105], copy / "specs", copy / "runs/bench", told.append, "cuda")
    assert gpu.args[-1]["overrides"]["device"] == "cuda"
    every = plan(chosen, None, copy / "specs", copy / "runs/bench", told.append)
    assert [int(job.name.split()[-1]) for job in every] == [101, *range(103, 110)]


def test_bench_leaves_a_seed_that_another_bench_has_taken_since_the_plan(finished, tmp_path):
    copy = copied(finished, tmp_path)
    runs, chosen = copy / "runs/bench", entries("classic", "ppo_c")

    def planned() -> Any:
        (item,) = plan(chosen, [105], copy / "specs", runs, lambda line: None)
        return item

    def made() -> int:
        return len(list(runs.glob("ppo_cartpole/*/sessions/105")))

    first, second = planned(), planned()
    holder = Lease(LocalStore(runs / "logs"), "ppo_cartpole_105.lease.json")
    with kept(holder):  # it runs there
        second.function(*second.args)
        assert made() == 0
    first.function(*first.args)
    assert made() == 1
    second.function(*second.args)  # it has run there
    assert made() == 1


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
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert any(line.startswith("ppo_cartpole mean") for line in lines)
    assert "a2c_cartpole not run" in lines


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "give a suite"),
        ({"suite": "clasic"}, "the suites are classic, box2d"),
        ({"suite": "classic", "seeds": "3-0"}, "expected seeds"),
        ({"suite": "classic", "only": "("}, "regular expression"),
        ({"suite": "classic", "only": "nothing"}, "matches none"),
        ({"suite": "classic"}, "--specs"),
    ],
)
def test_bench_bad_arguments_are_usage_errors(tmp_path, given, said):
    settings = {"suite": None, "seeds": None, "only": None, "parallel": 1, "hours": None}
    settings |= {"table_only": False, "tell": print}
    places = {"on": None, "device": None, "out": tmp_path / "page.md", "specs": tmp_path, "root": tmp_path / "runs"}
    with pytest.raises(UsageError, match=said):
        bench(**{**settings, **places, **given})


def test_window_is_slm_labs_own_at_its_budget_and_a_quarter_of_a_smaller_one():
    entry = Entry("x", 0, "–", 300_000, 1000)
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
    assert [e.spec for e in entries("box2d", "ppo_.*continuous|crossq_.*continuous")] == [
        "ppo_lunar_continuous",
        "crossq_lunar_continuous",
    ]


def test_markdown_table_is_what_the_formatter_leaves():
    text = markdown_table(("a", "bb"), [("–", "x"), ("long cell", "λ")])
    assert mdformat.text(text, extensions={"gfm"}) == text


def test_every_row_of_the_suites_has_a_shipped_spec_of_its_name_and_no_hash_is_twice():
    specs = [shipped(SHIPPED, entry) for entry in entries(None)]
    assert [spec.name for spec in specs if spec is not None] == [entry.spec for entry in entries(None)]
    assert len({identity(spec) for spec in specs if spec is not None}) == len(specs)
