"""The example of reversed text: its sentences, its reward, and that a tiny model learns by both of its specs."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean

import pytest
from example_specs import ROOT
from hypothesis import given
from hypothesis import strategies as st

import palestra
from examples.posttrain.reverse_text.sentences import ReverseText
from palestra.tasks.task import Completion, Problem, Status, TaskArgs

TASK = ReverseText(TaskArgs(), "reverse_text")


def reward(text: str, answer: str) -> tuple[float, Status]:
    verdict = TASK.verify(Problem("reverse_text/test/0", "", {"answer": answer}), Completion(text))
    return verdict.score, verdict.status


def test_sentences_are_asked_for_backwards_and_held_out_ones_are_others():
    train, test = ({problem.row["answer"][::-1] for problem in TASK.problems(split)} for split in ("train", "test"))
    assert (len(train), len(test), len(train & test)) == (4000, 200, 0)
    assert all(problem.text.endswith(problem.row["answer"][::-1]) for problem in TASK.problems("test"))
    assert TASK.problems("test") == TASK.problems("test")


@given(st.text("abc ", min_size=1, max_size=20).filter(lambda text: text == text.strip() != ""))
def test_reward_is_one_for_the_answer_alone(answer):
    assert reward(f" {answer}\n", answer) == (1.0, Status.CORRECT)
    assert reward(answer + "z", answer) == (2 * len(answer) / (2 * len(answer) + 1), Status.WRONG)
    assert reward("", answer) == reward("xyz", answer) == (0.0, Status.WRONG)


def test_reward_of_another_sentence_is_far_from_the_gate():
    """Else a model would earn it by writing any sentence."""
    answers = [problem.row["answer"] for problem in TASK.problems("test")]
    scores = [reward(other, answer)[0] for other, answer in zip(answers[1:], answers[:-1], strict=True)]
    assert sum(scores) / len(scores) < 0.4


HERE = "examples/posttrain/reverse_text"
ONE_CORE = {"device": "cpu", "threads": 1, "train__precision": "fp32", "every__eval": None}
NEW_MODEL = {
    "tokenizer": "characters",
    "chat_template": "{% for one in messages %}{{ one.content.split('\n')[-1] + '<|im_end|>' }}{% endfor %}",
    "shape": {"layers": 1, "width": 64, "heads": 4, "mlp": 192, "context": 160, "qk_norm": "head"},
}


@pytest.fixture(scope="module")
def lessons(tmp_path_factory) -> Iterator[Path]:
    """A tiny model of characters, after a few lessons of lessons.py, in a folder to train in."""
    folder = tmp_path_factory.mktemp("reverse_text")
    (folder / "examples").symlink_to(ROOT / "examples")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, f"{HERE}/lessons.py"], check=True, cwd=folder, env=environment)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        optim = {"name": "muon", "lr": 0.02, "adam_lr": 5e-3, "weight_decay": 0}
        small = {"train__steps": 20, "train__batch": 8, "data__context": 160, "model": NEW_MODEL, "optim": optim}
        yield palestra.run(f"{HERE}/sft.yaml", seed=1000, quiet=True, **ONE_CORE, **small).path


@pytest.mark.parametrize("seed", [1000, 1001])
def test_reward_rises_from_what_few_lessons_taught(lessons, seed):
    small = {"train__steps": 10, "train__prompts_per_step": 8, "rollout__group": 8, "optim__lr": 2e-3}
    run = palestra.run(f"{HERE}/rl.yaml", variables={"model": str(lessons)}, seed=seed, quiet=True, **ONE_CORE, **small)
    rewards = [row["reward"] for row in run.metrics(seed) if "reward" in row]
    assert 0.1 < rewards[0] < 0.3
    assert fmean(rewards[-5:]) > fmean(rewards[:2]) + 0.015
