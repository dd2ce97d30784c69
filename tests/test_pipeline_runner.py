import json
import os
import shutil
import sys

import pytest
from pipeline_runs import address, files, start
from pipeline_steps import copied, faulty, noop, noted, number, total, value

from palestra.errors import UsageError
from palestra.pipeline import Step
from palestra.pipeline.form import load_pipeline
from palestra.pipeline.graph import Graph, plan
from palestra.pipeline.outputs import Outputs, open_outputs
from palestra.pipeline.runner import PipelineFailed, run


@pytest.fixture
def outputs(tmp_path):
    return open_outputs(str(tmp_path / "prefix"))


@pytest.fixture
def journal(tmp_path):
    return tmp_path / "journal.txt"


def actions(targets, outputs, **options) -> dict[str, str]:
    graph = Graph(targets)
    return {graph.nodes[each.address].step.name: each.action for each in plan(graph, outputs, **options)}


# ---- capability 1: the dry run


def test_plan_says_what_would_happen_and_writes_nothing(outputs, tmp_path, journal):
    target = total(parts=[number(value=1), number(value=2)])
    assert actions([target], outputs) == {"number": "run", "total": "run"}
    assert not outputs.prefix.exists()
    run([number(value=1), number(value=2)], outputs)
    before = files(outputs.prefix)
    assert [(each.action, each.reason) for each in plan(Graph([target]), outputs)] == [("run", "not done yet")]
    assert actions([target, number(value=1)], outputs) == {"number": "skip", "total": "run"}
    assert files(outputs.prefix) == before


def test_plan_names_failures_their_descendants_and_owners(outputs, tmp_path):
    bad = faulty(until=tmp_path / "no")
    behind, aside = total(parts=[bad]), number(value=3)
    with pytest.raises(PipelineFailed):
        run([behind], outputs)
    lease = outputs.lease(address(aside))
    lease.acquire()
    assert actions([behind, aside], outputs) == {"faulty": "refuse", "total": "wait", "number": "wait"}
    assert actions([behind], outputs, force_failed=True) == {"faulty": "run", "total": "run"}
    reasons = [each.reason for each in plan(Graph([behind, aside]), outputs)]
    assert reasons[0].startswith("failed before (RuntimeError: no is not there)")
    assert reasons[1] == "needs faulty, which will not run"
    assert "is running it" in reasons[2]


# ---- capability 2: the graph runs, and once


def test_run_of_a_graph_fills_inputs_anywhere_and_the_second_run_does_nothing(outputs, journal):
    parts = {"a": [number(value=1)], "b": (number(value=2), (number(value=3),)), "c": {"d": number(value=4)}}
    target = total(parts=parts, journal=str(journal))
    outcome = run([target], outputs)
    assert value(outputs, target) == 10
    assert len(outcome.ran) == 5
    status = outputs.done(address(target))
    assert status["name"] == "total"
    assert status["inputs"] == [address(number(value=index)) for index in (1, 2, 3, 4)]
    assert status["identity"]["config"]["parts"]["a"] == [{"$step": address(number(value=1)), "path": ""}]
    assert not any(".partial" in path.name for path in outputs.prefix.iterdir())
    assert run([target], outputs).ran == []
    assert noted(journal) == [["total"]]


@pytest.mark.parametrize(
    "given", ["file", "folder", *(pytest.param(name, marks=pytest.mark.slow) for name in ("pattern", "a bare name"))]
)
def test_step_that_reads_a_file_runs_again_when_its_content_changes_alone(
    outputs, journal, tmp_path, monkeypatch, given
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PALESTRA_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "books" / "one.txt"
    file.parent.mkdir()
    source = {"file": file, "folder": "books/", "pattern": "books/*.txt", "a bare name": "books"}[given]

    def copy() -> str:
        target = copied(source=[source], journal=str(journal))
        run([target], outputs)
        return (outputs.path(address(target)) / "one.txt").read_text()

    for text in ("old", "new"):  # of one length
        file.write_text(text)
        old = file.stat().st_mtime_ns - 10_000_000_000
        os.utime(file, ns=(old, old))
        assert copy() == text
        os.utime(file)  # the same bytes, another time
        assert copy() == text
    assert len(noted(journal)) == 2
    (tmp_path / "books" / "two.txt").write_text("more")
    copy()
    assert len(noted(journal)) == (2 if given == "file" else 3)


def test_hash_of_a_file_that_did_not_change_is_kept_and_of_one_that_did_is_not(tmp_path, monkeypatch):
    monkeypatch.setenv("PALESTRA_CACHE", str(tmp_path / "cache"))
    files = sys.modules["palestra.pipeline.step"]  # which the function of that name hides
    monkeypatch.setattr(files, "RECENT_NS", 0)
    read = []
    monkeypatch.setattr(files, "file_sha256", lambda path: read.append(path.name) or path.read_text())
    for name in ("a.txt", "b.txt"):
        (tmp_path / "data").mkdir(exist_ok=True)
        (tmp_path / "data" / name).write_text(name)
    first = address(copied(source=[tmp_path / "data"]))
    assert address(copied(source=[tmp_path / "data"])) == first
    assert read == ["a.txt", "b.txt"]
    (tmp_path / "data" / "a.txt").write_text("other than before")
    assert address(copied(source=[tmp_path / "data"])) != first
    assert read == ["a.txt", "b.txt", "a.txt"]


def test_text_that_is_no_path_counts_as_it_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "words").mkdir()
    for text in ("/", "..", "1.0", "no/such.txt", "https://host/x", "words", "a\0/b", "*/", "[x/"):
        assert Graph([copied(source=[], version=text)]).nodes.popitem()[1].identity["config"]["version"] == text


def test_run_steps_in_parallel_up_to_the_limit(outputs, journal):
    targets = [number(value=index, seconds=1.0) for index in range(4)]
    run([noop(index=0)], outputs)
    seen = set()

    def watch(outcome):
        seen.add(sum(state == "running" for state in outcome.states.values()))

    run(targets, outputs, max_parallel=3, watch=watch)
    assert max(seen) == 3
    with pytest.raises(UsageError, match="at least 1"):
        run(targets, outputs, max_parallel=0)


def test_a_thousand_done_steps_are_looked_up_and_none_runs(outputs):
    targets = [noop(index=index) for index in range(1000)]
    graph = Graph(targets)
    for name in graph.targets:
        outputs.path(name).mkdir(parents=True)
        (outputs.path(name) / "status.json").write_text(json.dumps({"address": name, "name": "noop"}))
    joined = total(parts=targets)
    assert run(targets, outputs).ran == []
    assert all(each.action == "skip" for each in plan(Graph(targets), outputs))
    assert len(plan(Graph([joined]), outputs)) == 1


# ---- capability 3: what changes an address


def test_changed_literal_runs_that_step_and_its_descendants_alone(outputs, journal):
    def pipeline(middle: int, seconds: float):
        left, right = number(value=1, seconds=seconds), number(value=middle, seconds=seconds)
        return total(parts=[total(parts=[left, right]), left])

    assert len(run([pipeline(2, 0.0)], outputs).ran) == 4
    assert run([pipeline(2, 0.01)], outputs).ran == []
    assert sorted(each.rpartition("-")[0] for each in run([pipeline(3, 0.0)], outputs).ran) == [
        "number",
        "total",
        "total",
    ]


def test_cached_result_is_used_though_its_inputs_are_gone(outputs, journal):
    source = number(value=1, journal=str(journal))
    middle = total(parts=[source])
    run([middle], outputs)
    shutil.rmtree(outputs.path(address(source)))
    target = total(parts=[middle, number(value=5)])
    run([target], outputs)
    assert value(outputs, target) == 6
    assert len(noted(journal)) == 1


def test_input_that_vanishes_in_the_run_fails_with_its_name(outputs):
    source = number(value=1)
    run([source], outputs)
    target = total(parts=[source, number(value=2, seconds=0.5)])

    def watch(outcome):
        shutil.rmtree(outputs.path(address(source)), ignore_errors=True)

    with pytest.raises(PipelineFailed, match=rf"{address(source)} is missing or incomplete"):
        run([target], outputs, watch=watch)


# ---- capability 5: --only, and outputs that are not waited for


def test_only_runs_what_fits_and_what_it_lacks(outputs):
    left, right = number(value=1).named("left"), number(value=2).named("right")
    target = total(parts=[left, right]).named("target")
    assert run([target], outputs, only=["^left$"]).ran == [address(left)]
    assert run([target], outputs, only=["targ", "left"]).ran == [address(right), address(target)]
    with pytest.raises(UsageError, match="'nothing' matches no step; there are left, right, target"):
        run([target], outputs, only=["nothing"])
    with pytest.raises(UsageError, match="not a regular expression"):
        run([target], outputs, only=["("])


def read_if_there(out, where):
    (out / "value.txt").write_text(str(where.exists()))


def test_unawaited_input_is_run_only_when_asked_for_or_needed_otherwise(outputs):
    parent = number(value=1)
    child = Step("child", read_if_there, {"where": parent.unawaited("value.txt")})
    assert run([child], outputs).ran == [address(child)]
    assert (outputs.path(address(child)) / "value.txt").read_text() == "False"
    assert address(child) != address(Step("child", read_if_there, {"where": number(value=2).unawaited("value.txt")}))
    assert run([child], outputs, only=["number"]).ran == [address(parent)]
    other = Step("other", read_if_there, {"where": parent.unawaited("value.txt")})
    assert run([other], outputs).ran == [address(other)]
    assert (outputs.path(address(other)) / "value.txt").read_text() == "True"
    needing = total(parts=[number(value=9)])
    both = Step("both", read_if_there, {"where": number(value=9).unawaited(), "also": 1})
    with pytest.raises(PipelineFailed):  # `also` is no parameter; what it does not wait for runs all the same
        run([both, needing], outputs)
    assert value(outputs, needing) == 9


# ---- capability 6: many processes on one prefix


def test_four_processes_on_one_prefix_run_a_step_once(outputs, journal):
    processes = [start(outputs.prefix, "number", journal) for _ in range(4)]
    for process in processes:
        _, said = process.communicate(timeout=120)
        assert process.returncode == 0, said
    assert noted(journal) == [["number", "7"]]
    assert value(outputs, number(value=7)) == 7


def test_earlier_gives_done_steps_of_that_very_name_newest_first(outputs):
    for index in (1, 2):
        run([number(value=index), number(value=index).named("number-two")], outputs)
    found = [status["identity"]["config"]["value"] for status in outputs.earlier("number")]
    assert found == [2, 1]


def test_prefix_as_a_file_url_is_the_folder(tmp_path):
    assert open_outputs(f"file://{tmp_path}/a").prefix == Outputs(tmp_path / "a").prefix


def test_step_gets_the_resources_it_asks_for_and_its_address_does_not_depend_on_them(tmp_path):
    """Also those of a file: `resources:` is for whoever executes the step."""
    steps = {"one": {"use": "pipeline_steps:telling", "with": {"variable": "OMP_NUM_THREADS"}}}
    asked = {"one": {**steps["one"], "resources": {"cores": 3, "memory_gb": 0.5}}}
    plain, large = (load_pipeline({"kind": "pipeline", "name": "p", "steps": each}) for each in (steps, asked))
    assert address(plain.steps[0]) == address(large.steps[0])
    outputs = open_outputs(str(tmp_path / "out"))
    run(large.steps, outputs, max_parallel=1)
    assert b"python: 3" in outputs.read_log(address(large.steps[0]))
