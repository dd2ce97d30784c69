import json
import os
import signal

import pytest
from pipeline_runs import address, files, lines_in, start
from pipeline_steps import counting, faulty, noted, number, third_time, total, value

from palestra.pipeline import Step
from palestra.pipeline.graph import Graph, plan
from palestra.pipeline.outputs import open_outputs
from palestra.pipeline.runner import PipelineFailed, run
from palestra.runs.store import write_json


@pytest.fixture
def outputs(tmp_path):
    return open_outputs(str(tmp_path / "prefix"))


@pytest.fixture
def journal(tmp_path):
    return tmp_path / "journal.txt"


def test_failed_step_stops_its_descendants_alone_and_is_refused_until_forced(outputs, tmp_path, journal):
    until = tmp_path / "good"
    bad, aside = faulty(until=until, journal=str(journal)), total(parts=[number(value=1)])
    target = total(parts=[total(parts=[bad]), aside])
    with pytest.raises(PipelineFailed, match=r"1 step failed \(2 that need it did not run\)") as caught:
        run([target], outputs)
    assert "RuntimeError: good is not there" in str(caught.value)
    assert value(outputs, aside) == 1
    attempt = outputs.attempt(address(bad))
    assert attempt["state"] == "failed"
    assert "faulty" in attempt["traceback"]
    assert outputs.done(address(bad)) is None
    until.touch()
    with pytest.raises(PipelineFailed, match=r"failed before .*--force-failed"):
        run([target], outputs)
    assert len(noted(journal)) == 1
    run([target], outputs, force_failed=True)
    assert value(outputs, target) == 2
    assert len(noted(journal)) == 2


def test_forced_step_that_fails_again_is_tried_once(outputs, tmp_path, journal):
    bad = faulty(until=tmp_path / "no", journal=str(journal))
    for count in (1, 2):
        with pytest.raises(PipelineFailed, match="no is not there"):
            run([bad], outputs, force_failed=True)
        assert len(noted(journal)) == count


def test_step_with_retries_is_tried_again_after_one_and_two_seconds(outputs, journal):
    run([third_time(journal=str(journal))], outputs)
    times = [float(line[0]) for line in noted(journal)]
    assert len(times) == 3
    assert times[1] - times[0] >= 1.0
    assert times[2] - times[1] >= 2.0
    assert outputs.done(address(third_time(journal="")))["tries"] == 3


def test_step_that_dies_fails_and_the_others_go_on(outputs):
    dying = Step("dying", die, {})
    with pytest.raises(PipelineFailed, match=r"dying.*killed by SIGKILL"):
        run([dying, number(value=1), number(value=2)], outputs)
    assert value(outputs, number(value=1)) == 1
    assert value(outputs, number(value=2)) == 2


def die(out):
    os.kill(os.getpid(), signal.SIGKILL)


def test_killed_runner_leaves_a_step_that_the_next_goes_on_with(outputs, journal):
    first = start(outputs.prefix, "counting", journal)
    lines_in(journal, 5)
    first.kill()
    first.communicate()
    target = counting(upto=60, journal=str(journal), seconds=0.0)
    assert outputs.done(address(target)) is None
    assert [(each.action, each.reason) for each in plan(Graph([target]), outputs)] == [
        ("run", "not done yet: its process died")
    ]
    run([target], outputs)
    counted = [int(line[0]) for line in noted(journal)]
    assert sorted(set(counted)) == list(range(60))
    assert len(counted) <= 61  # what the kill hit is counted twice, nothing else
    assert len(files(outputs.path(address(target)))) == 61


@pytest.mark.parametrize("number_of_signal", [signal.SIGINT, signal.SIGTERM])
def test_stopped_runner_notes_it_keeps_what_is_there_and_frees_the_step(outputs, journal, number_of_signal):
    process = start(outputs.prefix, "slow", journal)
    lines_in(journal, 1)
    process.send_signal(number_of_signal)
    _, said = process.communicate(timeout=60)
    assert process.returncode != 0
    assert "the pipeline was interrupted" in said
    (partial,) = outputs.prefix.glob("slow-*.partial-*")
    name = partial.name.partition(".partial")[0]
    assert (partial / "half.txt").read_text() == "half"
    assert outputs.attempt(name)["state"] == "stopped"
    assert outputs.lease(name).holder() is None
    assert outputs.done(name) is None


def test_half_commit_is_finished_and_its_step_not_run_again(outputs, journal):
    target = number(value=1, journal=str(journal))
    run([target], outputs)
    outputs.path(address(target)).rename(
        outputs.partial(address(target), "attempt")
    )  # as if killed between status and name
    assert outputs.done(address(target)) is None
    (planned,) = plan(Graph([target]), outputs)
    assert planned.reason == "done before, except for the final rename of its folder"
    run([target], outputs)
    assert value(outputs, target) == 1
    assert len(noted(journal)) == 1


def write_status(out, fails):
    (out / "status.json").write_text(json.dumps({"state": "running"}))
    if fails:
        raise RuntimeError("half way")


def test_status_that_a_step_wrote_itself_is_neither_done_nor_accepted(outputs):
    with pytest.raises(PipelineFailed, match="half way"):
        run([Step("own", write_status, {"fails": True}, resumes=True)], outputs)
    with pytest.raises(PipelineFailed, match="that name is reserved"):
        run([Step("own", write_status, {"fails": False})], outputs)
    assert not list(outputs.prefix.glob("own-*/status.json")) or not outputs.earlier("own")


def test_folder_in_the_way_of_an_output_is_told_before_the_work_and_kept(outputs, journal):
    target = number(value=1, journal=str(journal))
    (outputs.path(address(target)) / "mine").mkdir(parents=True)
    with pytest.raises(PipelineFailed, match="is in the way of a step's output"):
        run([target, number(value=2)], outputs)
    assert (outputs.path(address(target)) / "mine").is_dir()
    assert not noted(journal)
    assert value(outputs, number(value=2)) == 2


def test_lease_that_is_taken_over_ends_the_step_here_and_waits_for_the_other(outputs, journal):
    """As after a suspension: another machine has taken the step over, finishes it, and ours is not committed."""
    target = number(value=1, seconds=30.0)
    name = address(target)
    stolen = False

    def watch(outcome):
        nonlocal stolen
        if not stolen and outcome.states[name] == "running":
            found = json.loads(outputs.steps.get(f"{name}/lease.json"))
            outputs.steps.put(
                f"{name}/lease.json", json.dumps(found | {"machine": "elsewhere", "token": "other"}).encode()
            )
            stolen = True
        if stolen and outcome.states[name] == "elsewhere":
            outputs.path(name).mkdir(exist_ok=True)
            (outputs.path(name) / "value.txt").write_text("other")
            write_json(outputs.path(name) / "status.json", {"address": name, "name": "number", "finished": ""})

    outcome = run([target], outputs, watch=watch)
    assert outcome.states == {name: "done"}
    assert (outputs.path(name) / "value.txt").read_text() == "other"


def test_runner_that_waits_for_another_takes_its_failure_over(outputs, tmp_path):
    bad = faulty(until=tmp_path / "no")
    lease = outputs.lease(address(bad))
    lease.acquire()

    def watch(outcome):
        if outcome.states[address(bad)] == "elsewhere":
            outputs.write_attempt(address(bad), {"state": "failed", "error": "of the other", "traceback": ""})
            lease.release()

    with pytest.raises(PipelineFailed, match="of the other"):
        run([bad], outputs, force_failed=True, watch=watch)
