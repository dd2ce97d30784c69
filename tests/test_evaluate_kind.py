"""The kind `evaluate`: what a run folder holds, several seeds, killed and resumed, and what a resume refuses."""

import json
import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

import eval_tasks
import pytest
from eval_lab import TOKENIZER, letters, run, save_model, session_of, spec_of
from tiny_lm import write_rows

import palestra
from palestra.errors import Interrupted, PalestraError, UsageError
from palestra.evaluate.records import read_records
from palestra.lm.hf import load_pretrained
from palestra.lm.lora import add_lora, save_peft
from palestra.runs.run import Run
from palestra.spec.kinds.evaluate import EvaluateSpec, evaluation
from palestra.spec.lm import LoraSpec
from palestra.spec.load import resolved
from palestra.spec.shape import precision

# Forked from a process that has imported torch already: a new one would take seconds to start.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["palestra.kinds.evaluate", "pytest"])

CHOICES = [{"query": f"q {i}", "choices": ["yes", "no", "maybe so"], "gold": i % 3} for i in range(70)]
WRITTEN = [{"context": f"{i}+1=", "continuation": str(i + 1)} for i in range(9)]


@pytest.fixture(autouse=True)
def _environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVAL_KILL", str(tmp_path / "kill"))
    monkeypatch.setattr(eval_tasks.Fragile, "judged", 0)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save_model(tmp_path / "model")


def report_of(found: Run, seed: int = 0) -> dict[str, Any]:
    return json.loads((session_of(found, seed) / "evaluation.json").read_text())


def answers_of(found: Run, seed: int = 0) -> list[Any]:
    """All that does not depend on the clock."""
    records = read_records(session_of(found, seed) / "answers.jsonl")
    return [
        (r.key, r.prompt, [(a.text, a.tokens, a.stop_reason, a.verdict.status) for a in r.answers]) for r in records
    ]


def suites(tmp_path: Path) -> list[dict[str, Any]]:
    return [
        {"path": write_rows(tmp_path / "choices.jsonl", CHOICES), "shots": 1, "by": "byte"},
        {"path": write_rows(tmp_path / "written.jsonl", WRITTEN), "name": "sums", "delimiter": ""},
    ]


def test_run_folder_holds_the_scores_and_all_that_they_depend_on(tmp_path, model):
    spec = spec_of(model, letters(), letters("small", size=3), likelihood=suites(tmp_path))
    found = run(tmp_path, spec)
    assert found.state == "done"
    (row,) = found.metrics()
    report = report_of(found)
    assert report["metrics"] == {key: value for key, value in row.items() if key.startswith("eval/")}
    assert row["step"] == 2 * (8 + 3) + 70 + 9
    assert {"eval/accuracy", "eval/pass@4", "eval/truncated", "eval/centred"} <= row.keys()
    assert found.summary()["eval/accuracy"] == row["eval/accuracy"]
    assert report["model"]["folder"] == str(model)
    assert "the first prompt of small, 5 tokens:\n" in (session_of(found) / "log.txt").read_text()
    assert report["model"]["dtype"] == "fp32"
    assert report["model"]["tokenizer_sha256"] == TOKENIZER.fingerprint
    decoding = {"samples": 4, "k": [1, 4], "temperature": 1.0, "max_new_tokens": 8, "top_p": 1.0, "top_k": None}
    assert decoding.items() <= report["decoding"].items()
    task = report["tasks"]["letters"]
    assert (task["task"], task["split"], task["problems"], task["of"]) == ("eval_tasks:Letters", "test", 8, 8)
    assert task["args"] == {"stop": None, "size": 8, "length": 5, "chat": False}
    assert task["stop"] == ["."]
    assert sum(task["greedy"]["statuses"].values()) == 8
    assert sum(task["samples"]["statuses"].values()) == 32
    assert task["samples"]["pass@4"]["mean"] == row["eval/letters/pass@4"]
    assert report["likelihood"]["choices"]["baseline"] == pytest.approx(1 / 3)
    assert report["likelihood"]["sums"]["accuracy"]["mean"] == row["eval/sums/accuracy"]
    keys = [key for key, *_ in answers_of(found)]
    assert keys[:4] == [
        ("letters/test/0", "greedy"), ("letters/test/0", "samples"), ("letters/test/1", "greedy"),
        ("letters/test/1", "samples"),
    ]  # fmt: skip
    assert len((session_of(found) / "likelihood.jsonl").read_text().splitlines()) == 79
    assert resolved(found.spec) == resolved(spec | {"name": "scores"})
    with pytest.raises(UsageError, match="is an evaluation: load the model that it evaluated"):
        palestra.load(found)


def test_problems_limit_and_split_are_kept(tmp_path, model):
    found = run(tmp_path, spec_of(model, {**letters(), "split": "train"}, eval__problems=3, eval__greedy=False))
    task = report_of(found)["tasks"]["letters"]
    assert (task["problems"], task["of"], task["split"]) == (3, 8, "train")
    assert "greedy" not in task
    assert "eval/accuracy" not in found.summary()


def test_another_seed_draws_other_answers_and_chooses_the_same_greedily(tmp_path, model):
    runs = [run(tmp_path, spec_of(model, letters(), seed=seed)) for seed in (0, 1)]
    assert_seeds_differ(answers_of(runs[0], 0), answers_of(runs[1], 1))


@pytest.mark.slow
def test_two_seeds_are_evaluated_side_by_side(tmp_path, model):
    found = run(tmp_path, spec_of(model, letters(), max_session=2))
    assert_seeds_differ(answers_of(found, 0), answers_of(found, 1))
    summary = found.summary()
    assert summary["eval/accuracy_by_seed"]["0"] == summary["eval/accuracy_by_seed"]["1"]
    assert summary["eval/pass@1_by_seed"].keys() == {"0", "1"}


def assert_seeds_differ(one: list[Any], other: list[Any]) -> None:
    first, second = ({key: rest for key, *rest in answers} for answers in (one, other))
    assert first.keys() == second.keys()
    for key in first:
        assert (first[key] == second[key]) == (key[1] == "greedy"), key


def test_multi_turn_and_chat_are_evaluated_as_they_are_trained(tmp_path, model):
    chat = run(tmp_path, spec_of(model, letters("chat", chat=True)))
    report = report_of(chat)
    assert report["tasks"]["chat"]["format"] == "chat"
    assert report["tasks"]["chat"]["first_prompt"].startswith("<|im_start|>user")
    assert report["model"]["chat_template"] == TOKENIZER.chat_template
    assert set(report["model"]["end_tokens"]) == {TOKENIZER.eos, TOKENIZER.encode("<|im_end|>", specials=True)[0]}
    turns = {"name": "multi_turn", "turns": 2, "feedback": "again"}
    single, multi = (
        run(tmp_path, spec_of(model, letters(), eval__samples=0, **changes))
        for changes in ({}, {"eval__workflow": turns})
    )
    assert report_of(multi)["decoding"]["workflow"]["turns"] == 2
    assert multi.summary()["eval/letters/tokens"] > single.summary()["eval/letters/tokens"]
    assert multi.summary()["eval/accuracy"] >= single.summary()["eval/accuracy"]


def test_adapters_are_evaluated_and_told_apart_from_their_base(tmp_path, model):
    import torch

    adapted = load_pretrained(model).model
    add_lora(adapted, LoraSpec(rank=2), torch.Generator().manual_seed(0))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_b" in name:
                parameter.fill_(0.2)
    (tmp_path / "adapters").mkdir()
    save_peft(tmp_path / "adapters", adapted, str(model))
    runs = [run(tmp_path, spec_of(ref, letters(), eval__samples=0)) for ref in (model, tmp_path / "adapters")]
    hashes = [report_of(one)["model"]["sha256"] for one in runs]
    assert hashes[0] != hashes[1]
    assert answers_of(runs[0]) != answers_of(runs[1])
    other = save_model(tmp_path / "other", seed=1)
    (tmp_path / "model").rename(tmp_path / "before")
    other.rename(model)
    assert report_of(run(tmp_path, spec_of(tmp_path / "adapters", letters())))["model"]["sha256"] != hashes[1]


# ---- stopped and resumed


def child(path: str, environment: dict[str, str], spec: dict[str, Any] | None, resume: str | None) -> None:
    """Evaluate in a process of its own."""
    os.environ.update(environment)
    run(Path(path), spec, resume=resume)


def killed_at(tmp_path: Path, answer: int, spec: dict[str, Any] | None, resume: str | None = None) -> None:
    (tmp_path / "kill").write_text(str(answer))
    environment = {"EVAL_KILL": str(tmp_path / "kill"), "OMP_NUM_THREADS": "1"}
    process = PROCESSES.Process(target=child, args=(str(tmp_path), environment, spec, resume))
    process.start()
    process.join(120)
    assert process.exitcode == -signal.SIGKILL


def test_killed_twice_and_resumed_it_judges_what_is_left_and_ends_with_the_same_numbers(tmp_path, model):
    spec = spec_of(model, letters("fragile", "Fragile", size=40), likelihood=suites(tmp_path))
    whole = run(tmp_path, spec, name="whole")
    expected = eval_tasks.Fragile.judged
    assert expected == 40 * 5
    killed_at(tmp_path, 61, spec)
    (folder,) = (tmp_path / "runs/scores").glob("*/sessions/0")
    done = read_records(folder / "answers.jsonl")
    assert 0 < sum(len(record.answers) for record in done) < 61
    assert palestra.open_run("scores", tmp_path / "runs").state == "killed"
    scored = (folder / "likelihood.jsonl").read_text()
    assert scored == (session_of(whole) / "likelihood.jsonl").read_text()
    (folder / "likelihood.jsonl").write_text("".join(scored.splitlines(keepends=True)[:45])[:-9])  # in a chunk of 32
    killed_at(tmp_path, 90, None, "scores")
    more = read_records(folder / "answers.jsonl")
    assert {record.key for record in done} < {record.key for record in more}
    eval_tasks.Fragile.judged = 0
    resumed = run(tmp_path, resume="scores")
    assert eval_tasks.Fragile.judged == expected - sum(len(record.answers) for record in more)
    assert (folder / "likelihood.jsonl").read_text() == scored
    assert resumed.state == "done"
    assert answers_of(resumed) == answers_of(whole)
    assert report_of(resumed)["metrics"] == report_of(whole)["metrics"]
    assert len(resumed.metrics()) == 1
    # Nothing is left to do, and nothing is done.
    again = run(tmp_path, resume="scores")
    assert eval_tasks.Fragile.judged == expected - sum(len(record.answers) for record in more)
    assert again.metrics() == resumed.metrics()


def test_answers_that_could_not_be_judged_are_asked_again_by_a_resume(tmp_path, model):
    spec = spec_of(model, letters("fragile", "Fragile", size=40), eval__samples=0)
    (tmp_path / "kill.fail").touch()
    killed_at(tmp_path, 30, spec)
    (path,) = (tmp_path / "runs/scores").glob("*/sessions/0/answers.jsonl")
    assert any(record.failed for record in read_records(path))
    (tmp_path / "kill.fail").unlink()
    found = run(tmp_path, resume="scores")
    assert report_of(found)["metrics"]["eval/fragile/error"] == 0
    assert len(read_records(path)) == 40


def test_stop_signal_saves_and_a_resume_goes_on(tmp_path, model, monkeypatch):
    spec = spec_of(model, letters("fragile", "Fragile", size=60), eval__samples=0, eval__max_new_tokens=30)
    judge = eval_tasks.Letters.verify

    def stopping(self, problem, answer):
        if eval_tasks.Fragile.judged == 20:
            os.kill(os.getpid(), signal.SIGTERM)
        return judge(self, problem, answer)

    monkeypatch.setattr("palestra.evaluate.completions.ROWS", {"cpu": 8, "cuda": 8})
    with monkeypatch.context() as patch:
        patch.setattr(eval_tasks.Letters, "verify", stopping)
        with pytest.raises(Interrupted, match=r"of 60 with everything saved; continue with: palestra train --resume"):
            run(tmp_path, spec)
    stopped = palestra.open_run("scores", tmp_path / "runs")
    assert stopped.state == "interrupted"
    done = len(read_records(session_of(stopped) / "answers.jsonl"))
    assert 19 <= done < 60
    resumed = run(tmp_path, resume="scores")
    assert answers_of(resumed) == answers_of(run(tmp_path, spec, name="whole"))


def test_resume_refuses_another_model_and_other_rows(tmp_path, model):
    spec = spec_of(model, letters("fragile", "Fragile", size=20), likelihood=suites(tmp_path))
    killed_at(tmp_path, 30, spec)
    write_rows(tmp_path / "written.jsonl", WRITTEN[:5])
    with pytest.raises(UsageError, match=r"likelihood.sums is not what .* was started with"):
        run(tmp_path, resume="scores")
    write_rows(tmp_path / "written.jsonl", WRITTEN)
    model.rename(tmp_path / "before")
    save_model(model, seed=1)
    with pytest.raises(UsageError, match=r"model.sha256 is not what .* was started with"):
        run(tmp_path, resume="scores")
    with pytest.raises(UsageError, match=r"do not fit a spec changed like this:\n.*eval\.max_new_tokens"):
        run(tmp_path, resume="scores", overrides=["eval.max_new_tokens=9"], allow=["eval"])


def test_judge_that_fails_on_everything_fails_the_run(tmp_path, model):
    with pytest.raises(PalestraError, match="the verifier of broken failed on all 8 completions"):
        run(tmp_path, spec_of(model, letters("broken", "Broken"), eval__samples=0))
    assert palestra.open_run("scores", tmp_path / "runs").state == "failed"


# ---- refused before there is a folder


def test_what_cannot_be_evaluated_leaves_no_folder(tmp_path, model):
    for spec, message in (
        (spec_of(tmp_path / "none", letters()), "none"),
        (spec_of(model, letters(size=0)), "has no problems"),
        (spec_of(model, likelihood=[{"path": str(tmp_path / "none.jsonl")}]), r"none\.jsonl"),
        (spec_of(model, letters(), device="cuda"), "torch sees no GPU"),
        (spec_of(model, letters(), hooks=["eval_tasks:nothing"]), "nothing"),
    ):
        with pytest.raises(PalestraError, match=message):
            run(tmp_path, spec)
    assert not (tmp_path / "runs").exists()


def problems(spec: dict[str, Any]) -> str:
    with pytest.raises(UsageError) as caught:
        palestra.check(spec)
    return str(caught.value)


def test_spec_names_every_problem_at_once(tmp_path):
    said = problems(
        spec_of(
            "m",
            letters(),
            letters(size="x"),
            {"task": "arithmetik"},
            {"task": "arithmetic", "split": "dev"},
            eval__k=[0, 9],
            likelihood=[{"path": "a.jsonl", "doc_to_choice": "x"}, {"path": "b/letters.jsonl"}],
            every={"log": "5 steps"},
        )
    )
    for expected in (
        "tasks.0.name: expected another name: 3 of them are called 'letters'",
        "tasks.1.args.size: ",
        "unknown task 'arithmetik'. Did you mean 'arithmetic'?",
        "tasks.3.split: expected one of train, test",
        "eval.k: expected at most samples = 4",
        "eval.k: expected numbers from 1",
        "likelihood.0.doc_to_text: expected one",
        "likelihood.1.name: expected another name",
        "every: expected nothing",
    ):
        assert expected in said, said
    assert "expected a task, or rows in `likelihood`" in problems(spec_of("m"))
    assert "eval.samples: expected at least 1" in problems(spec_of("m", letters(), eval__greedy=False, eval__samples=0))


def test_resolved_spec_is_accepted_again(tmp_path):
    spec = palestra.check(spec_of("m", letters(), likelihood=[{"path": "a.jsonl"}])).spec
    assert isinstance(spec, EvaluateSpec)
    assert resolved(spec.model_dump(mode="json")) == spec
    assert spec.likelihood[0].label == "a"


# ---- without a spec file


def test_evaluation_without_a_file_is_the_same_as_the_spec(tmp_path, model):
    expected = run(tmp_path, spec_of(model, {"task": "eval_tasks:Letters", "args": {"size": 5}}))
    settings = {"samples": 4, "max_new_tokens": 8, "problems": None, "temperature": None}
    found = run(tmp_path, evaluation(model, tasks=["eval_tasks:Letters"], args={"size": 5}, dtype="fp32", **settings))
    assert found.name == "eval_model"
    assert answers_of(found) == answers_of(expected)
    assert report_of(found)["decoding"]["k"] == [1, 4]
    mine = {"tasks": [letters("mine", size=2)], "likelihood": suites(tmp_path)[1:], "seed": 7, "name": "mine"}
    seeded = run(tmp_path, evaluation(model, **mine))
    assert (seeded.name, seeded.seeds, report_of(seeded, 7)["tasks"]["mine"]["problems"]) == ("mine", [7], 2)
    assert report_of(seeded, 7)["model"]["dtype"] == precision("auto", "cpu")
    assert r"args.sizes" in problems(evaluation(model, tasks=["eval_tasks:Letters"], args={"sizes": 5}))


def test_hook_sees_the_row_and_adds_to_it(tmp_path, model):
    found = run(tmp_path, spec_of(model, letters(), eval__samples=0, hooks=["eval_tasks:noted"]))
    (row,) = found.metrics()
    assert row["noted"] == row["eval/accuracy"]


def test_small_model_of_the_lab_answers_right_and_wrong(tmp_path, model):
    """Else the tests above could not fail."""
    metrics = run(tmp_path, spec_of(model, letters(size=30))).summary()
    assert 0.1 < metrics["eval/accuracy"] < 0.9
    assert 0 < metrics["eval/letters/samples/truncated"] < 1
