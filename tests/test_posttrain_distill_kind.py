"""The kind `distill`: what it refuses, what its runs hold, killed and resumed, and that students learn."""

import json
import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from conftest import fast_only
from distill_lab import quietly, scores, session_of, spec_of, taught, write_demonstrations
from eval_lab import save_model
from small_lm import small_model, small_tokenizer
from tiny_lm import write_rows

import palestra
from palestra.data.tokenizers import character_tokenizer
from palestra.errors import UsageError
from palestra.kinds.distill import TEACHER, check_teacher
from palestra.lm.hf import load_pretrained, save_pretrained
from palestra.rollout.records import FILE, scan
from palestra.runs.checkpoint import load as load_checkpoint
from palestra.runs.run import Run, open_run
from palestra.spec.kinds.distill import DistillSpec

# Forked from a process that has imported torch already: a new one would take seconds to start.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["palestra.kinds.distill", "pytest"])

ITSELF = {"prompt": "{answer} {prompt}"}
SHARED = {"on_policy": 0.5}
CASES: dict[str, dict[str, Any]] = {
    "given": {"loss": {"type": "jsd", "beta": 0.3}, **SHARED},
    "itself": {"loss": {"type": "reverse_kl"}, "teacher": {**ITSELF, "refresh": 3}},
    "adapters": {"loss": {"type": "policy"}, "teacher": ITSELF, "model": {"lora": {"rank": 2}}},
}


@pytest.fixture(autouse=True)
def _environment(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PALESTRA_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
    monkeypatch.setenv("PALESTRA_LAB", str(tmp_path))


def random_spec(root: Path, **changes: Any) -> dict[str, Any]:
    """Random models of characters: a student, and the teacher that it learns from."""
    student, teacher = root / "student", root / "teacher"
    if not student.exists():
        save_model(student, 0), save_model(teacher, 1)
    if "on_policy" in changes and "data" not in changes:
        path = write_demonstrations(root)
        changes["data"] = {"train": {"right": {"path": path}}, "context": 24, "format": "plain"}
    return spec_of(student, changes.pop("teacher", {"init": str(teacher)}), **changes)


def numbers(run: Run) -> list[str]:
    """The rows of metrics without the timings, as text: every digit counts."""
    return [json.dumps({k: v for k, v in row.items() if not k.startswith("time/")}) for row in run.metrics()]


def problems(root: Path, **changes: Any) -> str:
    with pytest.raises(UsageError) as caught:
        palestra.check(random_spec(root, **changes))
    return str(caught.value)


# ---- what is refused


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"teacher": {}}, "expected a model, or `prompt` for self-distillation"),
        ({"teacher": {"init": "x", "refresh": 2}}, "expected null, because `init` names another model"),
        ({"on_policy": 0.5, "data": None}, "expected completions, because on_policy is 0.5"),
        ({**SHARED, "loss": {"type": "policy"}}, "expected 1, because `policy` trains on the student's completions"),
        ({**SHARED, "teacher": ITSELF}, "expected 1, because `teacher.prompt` is made of the tasks' rows"),
        (
            {"on_policy": 0.0, "rollout": {"replay": "x"}},
            "expected null, because `on_policy: 0` samples nothing",
        ),
        ({"on_policy": 0.01}, "at least one, and not all"),
        ({"on_policy": 0.99}, "at least one, and not all"),
        ({"loss": {"type": "jsd", "beta": 1.0}}, "beta"),
        ({"model": {"init": None}}, "expected a trained model to start from"),
    ],
)
def test_spec_with_settings_that_do_not_fit_is_refused(tmp_path, changes, reason):
    assert reason in problems(tmp_path, **changes)


def test_spec_with_given_answers_that_nobody_uses_is_refused(tmp_path):
    data = {"train": {"right": {"path": "x.jsonl"}}, "context": 24, "format": "plain"}
    assert "expected null, because `on_policy: 1` uses no off-policy completions" in problems(tmp_path, data=data)


def test_spec_shares_a_batch_between_drawn_and_given_answers(tmp_path):
    spec = palestra.check(random_spec(tmp_path, on_policy=0.25)).spec
    assert isinstance(spec, DistillSpec)
    assert (spec.answered, spec.given) == (2, 24)
    assert spec.derived()["completions in total"] == 8 * 4 * 4


def test_teacher_with_another_tokenizer_is_refused_by_name_before_there_is_a_folder(tmp_path):
    other = character_tokenizer("0123456789")
    model = small_model(vocab=other.vocab_size)
    save_pretrained(tmp_path / "other", model, tokenizer=other, eos=[other.eos or 0])
    spec = random_spec(tmp_path, teacher={"init": str(tmp_path / "other")})
    with pytest.raises(UsageError, match=r"teacher.init: .*/other has another tokenizer than the student"):
        quietly(spec, tmp_path)
    assert not (tmp_path / "runs").exists()


def test_teacher_without_a_tokenizer_is_refused(tmp_path):
    save_pretrained(tmp_path / "bare", small_model(), tokenizer=None, eos=[0])
    with pytest.raises(UsageError, match="has no tokenizer to compare"):
        check_teacher(tmp_path / "bare", small_tokenizer())


def test_teachers_prompt_with_an_unknown_field_is_refused_before_there_is_a_folder(tmp_path):
    with pytest.raises(UsageError, match=r"reverse/train/\S+ has no field \{hint\}"):
        quietly(random_spec(tmp_path, teacher={"prompt": "{hint} {prompt}"}), tmp_path)
    assert not (tmp_path / "runs").exists()


# ---- runs


def test_run_writes_metrics_rollouts_and_the_teacher_that_was_meant(tmp_path):
    run = quietly(random_spec(tmp_path, loss={"type": "reverse_kl"}), tmp_path)
    assert run.state == "done"
    rows = [row for row in run.metrics() if "loss" in row]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    for row in rows:
        assert row["loss"] > 0.1  # two random models
        assert row["kl_teacher"] == pytest.approx(row["loss"], abs=1.0)  # the same, from one token for each place
        assert row["entropy"] > 0
        assert row["unread"] == 0.0
    pinned = json.loads((session_of(run) / TEACHER).read_text())
    assert pinned["model"] == str(tmp_path / "teacher")
    records = list(scan(session_of(run) / FILE))
    assert len(records) == 4 * 8
    advantages = [a for record in records[:8] for each in record.advantages for a in each if a]
    assert -sum(advantages) / len(advantages) == pytest.approx(rows[0]["kl_teacher"], rel=1e-5)


def test_run_on_given_answers_alone_draws_none(tmp_path):
    run = quietly(random_spec(tmp_path, on_policy=0.0, loss={"type": "forward_kl"}), tmp_path)
    rows = [row for row in run.metrics() if "loss" in row]
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert "reward" not in rows[0]
    assert rows[-1]["tokens"] == 0
    assert (session_of(run) / FILE).read_text() == ""
    assert len(scores(run)) == 3  # before, in the middle, at the end


@pytest.mark.parametrize("loss", fast_only(["policy", "jsd"], "policy"))
def test_run_with_answers_of_older_weights_takes_all_its_steps(tmp_path, loss):
    run = quietly(random_spec(tmp_path, loss={"type": loss}, rollout={"staleness": 1}), tmp_path)
    assert run.metrics()[-1]["step"] == 4
    assert run.metrics()[-1]["fate/trained"] == 32


def test_run_on_the_answers_of_another_run_draws_none_and_has_its_numbers(tmp_path):
    first = quietly(random_spec(tmp_path, name="first"), tmp_path)
    again = quietly(random_spec(tmp_path, name="again", rollout={"replay": "first"}), tmp_path)
    losses = [[row["loss"] for row in run.metrics() if "loss" in row] for run in (first, again)]
    assert losses[0] == losses[1]


@pytest.mark.parametrize("seed", fast_only([0, 1], 0))
def test_run_of_a_random_student_comes_nearer_to_a_random_teacher(tmp_path, seed):
    spec = random_spec(tmp_path, seed=seed, train={"steps": 12}, optim={"lr": 1e-2}, every={"eval": None})
    losses = [row["loss"] for row in quietly(spec, tmp_path).metrics() if "loss" in row]
    assert sum(losses[-3:]) / 3 < 0.7 * losses[0]


def test_run_with_a_refreshed_self_keeps_its_teacher_in_the_checkpoint(tmp_path):
    """Only a refreshed teacher is in the checkpoint, with the weights of the step it was refreshed at."""
    run = quietly(random_spec(tmp_path, **CASES["itself"], every={"checkpoint": "1 steps"}), tmp_path)
    folders = {int(path.name.split("_")[1]): path for path in (session_of(run) / "checkpoints").iterdir()}

    def teacher(step: int) -> Any:
        return load_checkpoint(folders[step]).state["learner"]["teacher"]["embed"]

    def student(step: int) -> Any:
        return load_pretrained(folders[step] / "model").model.embed

    assert (teacher(3) == load_pretrained(tmp_path / "student").model.embed).all()
    assert (teacher(4) == student(3)).all()
    assert not (student(4) == student(3)).all()
    frozen = quietly(random_spec(tmp_path, name="frozen", teacher=ITSELF), tmp_path)
    assert load_checkpoint(frozen.checkpoint("last")).state["learner"]["teacher"] is None


def train(root: str, environment: dict[str, str], spec: dict[str, Any]) -> None:
    """Train in a process of its own."""
    os.environ.update(environment)
    quietly(spec, Path(root))


@pytest.mark.parametrize("case", fast_only(CASES, "given", "itself"))
def test_run_killed_and_resumed_gives_the_numbers_of_one_that_was_not(tmp_path, case):
    spec = random_spec(tmp_path, **CASES[case], train={"steps": 6}, hooks=["lm_hooks:end"])
    reference = quietly({**spec, "name": "reference"}, tmp_path)
    (tmp_path / "kill").write_text("5")  # after the checkpoint at step 4, between two refreshes of a teacher
    environment = {name: os.environ[name] for name in ("PALESTRA_CACHE", "PALESTRA_LAB")} | {"OMP_NUM_THREADS": "1"}
    process = PROCESSES.Process(target=train, args=(str(tmp_path), environment, {**spec, "name": "killed"}))
    process.start()
    process.join(120)
    assert process.exitcode == -signal.SIGKILL
    killed = open_run("killed", tmp_path / "runs")
    assert killed.state == "killed"
    quietly(None, tmp_path, resume="killed")
    assert killed.state == "done"
    assert numbers(killed) == numbers(reference)


def test_run_resumed_with_a_changed_teacher_is_refused(tmp_path):
    quietly(random_spec(tmp_path), tmp_path)
    with pytest.raises(UsageError, match="teacher"):
        quietly(None, tmp_path, resume="distilled", overrides=['teacher.init="elsewhere"'])


# ---- learning, with teachers that know


@pytest.fixture(scope="module")
def school(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A teacher of a reverse task, and a smaller student that has seen little of it."""
    root = tmp_path_factory.mktemp("school")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PALESTRA_CACHE", str(root / "cache"))
        taught(root, "teacher", 300)
        taught(root, "student", 60, width=32)
    return root


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("loss", ["policy", "forward_kl", "reverse_kl", "jsd", "given"])
def test_student_of_a_teacher_that_knows_answers_what_it_has_never_seen(school, loss, seed):
    changes: dict[str, Any] = {"loss": {"type": "jsd" if loss == "given" else loss}}
    if loss == "given":
        right = {"right": {"path": write_demonstrations(school)}}
        changes |= {"on_policy": 0.5, "data": {"train": right, "context": 24, "format": "plain"}}
    steps = 160 if loss == "policy" else 80
    spec = spec_of(
        "student",
        {"init": "teacher"},
        name=f"{loss}_{seed}",
        seed=seed,
        train={"steps": steps, "prompts_per_step": 16},
        every={"eval": None, "checkpoint": "5 minutes"},
        **changes,
    )
    found = scores(quietly(spec, school))
    assert found[0] < 0.4
    assert found[-1] > found[0] + 0.4


@pytest.mark.slow
@pytest.mark.parametrize("refresh", [None, 20])
@pytest.mark.parametrize("seed", [0, 1])
def test_student_that_teaches_itself_with_the_answer_in_sight_learns_to_do_without(tmp_path, refresh, seed):
    """It has learned to copy an answer that stands before the question, and to be wrong two times in three without."""
    rows = [json.loads(line) for line in Path(write_demonstrations(tmp_path)).read_text().splitlines()]
    seen = [{**row, "prompt": f"{row['completion']} {row['prompt']}"} for row in rows]
    wrong = [{**row, "completion": row["completion"][::-1]} for row in rows]
    data = write_rows(tmp_path / "lessons.jsonl", [*seen * 3, *rows, *wrong * 2])
    model = taught(tmp_path, "copies", 120, seed, data=data)
    spec = spec_of(
        model.path,
        {**ITSELF, "refresh": refresh},
        seed=seed,
        train={"steps": 40, "prompts_per_step": 16},
        optim={"lr": 1e-3},
        every={"eval": None, "checkpoint": "5 minutes"},
    )
    found = scores(quietly(spec, tmp_path))
    assert found[0] < 0.5
    assert found[-1] > found[0] + 0.4
