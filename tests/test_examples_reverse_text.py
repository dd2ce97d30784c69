"""The example of reversed text: its sentences, its reward, and that a tiny model learns by both of its specs."""

from hypothesis import given
from hypothesis import strategies as st

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
