"""Leaks: scored problems that are in the training data of the model's run, or of the run that it started from."""

import logging
import random
from pathlib import Path
from string import printable
from typing import Any

from eval_lab import letters, run, save_model
from eval_lab import spec_of as evaluation_of
from test_evaluate_kind import CHOICES
from tiny_lm import SHAPE, spec_of, write_rows

import palestra
from palestra.evaluate.leaks import leaked, shown
from palestra.tasks.task import Problem, make_task

WORDS = (
    "alpha",
    "beta",
    "gamma",
    "delta",
    "red",
    "green",
    "blue",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
)


def sentence(seed: int, words: int = 30) -> str:
    return " ".join(random.Random(seed).choices(WORDS, k=words))


def test_text_of_which_a_document_has_most_ngrams_leaks_whatever_its_case_and_punctuation():
    texts = [(f"t/{i}", sentence(i)) for i in range(4)] + [("short", sentence(9, 12))]
    first, second, third = (sentence(i) for i in range(3))
    documents = [
        f"Before it. {first.upper().replace(' ', ', ')}! And after it.",
        " ".join(second.split()[:20]),  # 8 of 18 n-grams
        " ".join(third.split()[:26]),  # 14 of 18
        sentence(9, 12),
    ]
    assert leaked(texts, documents) == {"t/0", "t/2"}
    assert leaked(texts, []) == leaked([], documents) == set()


def test_shown_texts_are_those_of_the_row_without_template_and_worked_examples(tmp_path):
    rows = [{"question": sentence(i), "answer": str(i)} for i in range(5)]
    for split in ("train", "test"):
        write_rows(tmp_path / f"{split}.jsonl", rows if split == "test" else rows[:2])
    for form in ("plain", "chat"):
        problem = make_task("answers", {"source": str(tmp_path), "shots": 2, "format": form}).problems("test")[4]
        assert sentence(0) in problem.text
        assert [text for text in shown(problem) if len(text) > 5] == [sentence(4)]
    assert shown(Problem("a/test/0", "1 + 1 = ", {"left": 1, "right": "two"})) == []


def warned(caplog: Any, spec: dict[str, Any], root: Path) -> list[str]:
    caplog.clear()
    with caplog.at_level(logging.INFO, "palestra.evaluate"):
        run(root, spec)
    return [r.message for r in caplog.records if "the data of the run" in r.message or "not compared" in r.message]


def test_evaluation_warns_of_problems_in_the_data_of_the_run_and_of_the_one_before_it(tmp_path, caplog):
    questions = [{"question": sentence(i), "answer": str(i)} for i in range(10)]
    write_rows(tmp_path / "test.jsonl", questions)
    write_rows(tmp_path / "train.jsonl", [{"question": sentence(i), "answer": "1"} for i in (8, 20, 21)])
    pretrained = [{"text": f"page {i}: {sentence(i)} and so on {printable}"} for i in (3, 4, 5, 30)]
    write_rows(tmp_path / "text.jsonl", pretrained)
    write_rows(tmp_path / "rows.jsonl", [{"query": sentence(i), "choices": ["one", "two"], "gold": 0} for i in (4, 40)])
    shape, task = {**SHAPE, "context": 256}, {"task": "answers", "args": {"source": str(tmp_path), "format": "plain"}}
    first = spec_of("pretrain", tmp_path, name="first", model__shape=shape, train__steps=1, data__holdout=0.0)
    palestra.run(first, root=tmp_path / "runs", quiet=True)
    second: dict[str, Any] = {
        "kind": "posttrain", "name": "second", "model": {"init": "first"},
        "tasks": {"train": [{**task, "split": "train"}]},
        "rollout": {"group": 2, "max_new_tokens": 4}, "train": {"steps": 1, "prompts_per_step": 2}, "device": "cpu",
        "algorithm": {"preset": "dr_grpo"},
    }  # fmt: skip
    palestra.run(second, root=tmp_path / "runs", quiet=True)
    use = {"path": str(tmp_path / "rows.jsonl"), "shots": 1}
    spec = evaluation_of("second", {**task, "split": "test"}, likelihood=[use], eval__samples=0)
    said = warned(caplog, spec, tmp_path)
    say_little = ": the score says little"
    assert said == [
        f"answers: 1 of 10 problems (10.0 %) are in the data of the run second, such as answers/test/8{say_little}",
        f"answers: 3 of 10 problems (30.0 %) are in the data of the run first, such as answers/test/3{say_little}",
        f"rows: 1 of 2 problems (50.0 %) are in the data of the run first, such as rows/0{say_little}",
    ]
    (tmp_path / "text.jsonl").unlink()
    (only, gone) = warned(caplog, spec, tmp_path)
    assert "of the run second" in only
    assert gone.startswith(f"problems are not compared with all of {tmp_path}/text.jsonl")


def test_model_that_is_not_of_a_run_is_not_compared(tmp_path, caplog):
    write_rows(tmp_path / "choices.jsonl", CHOICES[:4])
    model = save_model(tmp_path / "sessions" / "model")
    spec = evaluation_of(model, letters(), likelihood=[{"path": str(tmp_path / "choices.jsonl")}], eval__samples=0)
    assert warned(caplog, spec, tmp_path) == []
