"""Tasks of reasoning-gym: the same problems in every process, and its own answers score."""

import asyncio
import json

import pytest

from palestra.errors import UsageError
from palestra.spec.tasks import TaskUse
from palestra.tasks.sets.reasoning_gym import _entries
from palestra.tasks.task import Completion, Status, Task, make_task
from palestra.tasks.verify.workers import Verifiers

pytest.importorskip("reasoning_gym", reason="needs the extra reasoning-gym")


def gym(task: str = "leg_counting", **args: object) -> Task:
    return make_task("reasoning_gym", {"task": task, "size": 200, **args}, "gym")


# A process that imports the package takes seconds: what needs another one than that of leg_counting is mostly slow.
# word_ladder and polynomial_multiplication iterate over sets; rearc's scorer compares tuples; entries of knights_knaves
# hold texts of NumPy.
@pytest.mark.parametrize(
    "task",
    [
        "leg_counting",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("word_ladder", "polynomial_multiplication", "rearc")),
        pytest.param("knights_knaves", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("format", ["plain", "chat"])
def test_judge_its_own_answers_are_correct(task: str, format: str) -> None:
    made = gym(task, format=format)
    for split in made.splits:
        for problem in made.problems(split):
            verdict = made.verify(problem, Completion(problem.row["solution"]))
            assert (verdict.status, verdict.score) == (Status.CORRECT, 1.0)
            assert json.loads(json.dumps(problem.row)) == problem.row


def test_problems_splits_are_disjoint_and_ids_differ() -> None:
    made = gym()
    train, test = made.problems("train"), made.problems("test")
    assert 5 < len(test) < 50
    assert len(train) + len(test) == 200
    assert len({problem.id.split("/")[2] for problem in [*train, *test]}) == 200


@pytest.mark.slow
def test_problems_asked_twice_are_there_once() -> None:
    made = gym(size=60, config={"min_animals": 1, "max_animals": 1, "max_instances": 1})
    prompts = [problem.prompt for split in made.splits for problem in made.problems(split)]
    assert len(set(prompts)) == len(prompts) < 60


@pytest.mark.slow
def test_problems_seed_changes_them_and_config_is_read() -> None:
    one, other = (gym(seed=seed).problems("train")[0] for seed in (1, 2))
    assert one.prompt != other.prompt
    small = gym(config={"min_animals": 1, "max_animals": 1}).problems("train")
    assert all(", " not in str(problem.prompt).split("if you have")[1] for problem in small)


def test_ids_are_the_same_in_all_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a fixed hash seed this task makes other problems in each process."""
    said = []
    for seed in ("1", "2"):
        monkeypatch.setenv("PYTHONHASHSEED", seed)
        monkeypatch.setattr("palestra.tasks.sets.reasoning_gym._entries", _entries.__wrapped__)  # made anew
        said.append([problem.id for problem in gym("word_ladder", size=20).problems("train")])
    assert said[0] == said[1]
    assert len(said[0]) > 10


@pytest.mark.parametrize(
    ("format", "text", "status"),
    [
        ("plain", "{}", Status.CORRECT),
        ("plain", " {}\n", Status.CORRECT),
        ("plain", "I think: <answer> {} </answer>", Status.CORRECT),
        ("plain", "<answer>1</answer> <answer>{}</answer>", Status.CORRECT),
        ("plain", "{}0", Status.WRONG),
        ("plain", "", Status.UNPARSABLE),
        ("chat", "So it is <answer>{}</answer>.", Status.CORRECT),
        ("chat", "<answer>{}0</answer>", Status.WRONG),
        ("chat", "{}", Status.UNPARSABLE),
        ("chat", "<answer></answer>", Status.UNPARSABLE),
    ],
)
def test_judge_reads_the_answer(format: str, text: str, status: Status) -> None:
    made = gym(format=format)
    problem = made.problems("train")[0]
    verdict = made.verify(problem, Completion(text.format(problem.row["answer"])))
    assert (verdict.status, verdict.score) == (status, float(status == Status.CORRECT))


def test_judge_partial_takes_the_score_of_the_package() -> None:
    dense, plain = gym(partial=True), gym()
    problem = plain.problems("train")[0]
    right = Completion(f"It is {problem.row['answer']}")  # which it scores by the share of the text that is the answer
    score = len(problem.row["answer"]) / len(right.text)
    assert dense.verify(problem, right).score == pytest.approx(score)
    assert plain.verify(problem, right).score == 0.0
    assert plain.verify(problem, right).parts == {"score": pytest.approx(score)}
    assert dense.verify(problem, right).status == Status.WRONG


def test_stops_plain_answers_end_with_an_empty_line() -> None:
    assert gym().stops == ("\n\n",)
    assert gym(format="chat").stops == ()
    assert gym(format="chat", stop=["</answer>"]).stops == ("</answer>",)


def test_problems_of_an_unknown_task_say_which_there_are() -> None:
    made = gym("leg_countin")
    with pytest.raises(UsageError, match=r"cannot make problems of 'leg_countin': .* Did you mean 'leg_counting'"):
        made.problems("train")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "said"),
    [({"legs": 3}, "unexpected keyword argument 'legs'"), ({"min_animals": 0}, "AssertionError")],
)
def test_problems_config_that_does_not_fit_says_why(config: dict, said: str) -> None:
    made = gym(config=config)
    with pytest.raises(UsageError, match=said):
        made.problems("train")


@pytest.mark.slow
def test_problems_too_few_for_a_split_is_an_error() -> None:
    made = gym(size=1)
    with pytest.raises(UsageError, match="none of 1 problems of leg_counting is in the split 'test'; make more"):
        made.problems("test")


def test_args_need_a_task() -> None:
    (problem,) = TaskUse(task="reasoning_gym").all_conflicts()
    assert problem.path == ("args", "task")


@pytest.mark.slow
def test_judge_in_a_process_of_its_own_says_the_same() -> None:
    use = TaskUse(task="reasoning_gym", name="gym", args={"task": "leg_counting", "size": 200})
    problem = gym().problems("train")[0]
    with Verifiers([use], workers=1) as judges:
        right = asyncio.run(judges.verify(problem, Completion(problem.row["solution"])))
        wrong = asyncio.run(judges.verify(problem, Completion("1")))
    assert (right.status, wrong.status) == (Status.CORRECT, Status.WRONG)
    assert right.seconds < 5  # the package is loaded before the clock starts
