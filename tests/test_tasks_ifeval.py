"""IFEval as a task: Google's and AllenAI's rows, strict and loose readings, rows that cannot be judged."""

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from palestra.errors import UsageError
from palestra.spec.tasks import TaskUse
from palestra.tasks.task import Completion, Problem, Status, Verdict, make_task
from palestra.tasks.verify.instructions import BadInstruction, instructions_of, variants
from palestra.tasks.verify.workers import Verifiers

DATA = Path(__file__).parents[1] / os.environ.get("PALESTRA_DATA", "../shared/data")
NULLS = dict.fromkeys(
    ("N", "quantifier", "end_phrase", "keyword_list", "word", "forbidden_words", "letter", "i", "first_word",
     "postscript_marker", "options", "section_splitter", "original_prompt")
)  # fmt: skip


def google(*instructions: tuple[str, dict[str, Any]], prompt: str = "Write.") -> dict[str, Any]:
    return {
        "key": 7,
        "prompt": prompt,
        "instruction_id_list": [name for name, _ in instructions],
        "kwargs": [arguments for _, arguments in instructions],
    }


def judged(row: dict[str, Any], text: str, **args: Any) -> Verdict:
    task = make_task("ifeval", args)
    return task.verify(Problem("ifeval/test/7", "Write.", row), Completion(text))


NO_COMMA, QUOTED = ("punctuation:no_comma", {}), ("startend:quotation", {})
TWO_WORDS = ("length_constraints:number_words", {"num_words": 3, "relation": "less than"})


def test_judge_all_followed_is_correct():
    verdict = judged(google(NO_COMMA, QUOTED), '"no comma here"')
    assert (verdict.score, verdict.status, verdict.note) == (1.0, Status.CORRECT, "")
    assert verdict.parts == {"prompt_strict": 1.0, "prompt_loose": 1.0, "inst_strict": 1.0, "inst_loose": 1.0}


def test_judge_some_followed_gives_shares_and_names_the_rest():
    verdict = judged(google(NO_COMMA, QUOTED, TWO_WORDS), '"a, b"')
    assert (verdict.score, verdict.status) == (0.0, Status.WRONG)
    shares = {"prompt_strict": 0.0, "prompt_loose": 0.0, "inst_strict": 2 / 3, "inst_loose": 2 / 3}
    assert verdict.parts == pytest.approx(shares)
    assert verdict.note == "not followed: punctuation:no_comma"


@pytest.mark.parametrize(
    ("score", "expected", "status"),
    [
        ("prompt_strict", 0.0, Status.WRONG),
        ("inst_strict", 0.5, Status.WRONG),
        ("prompt_loose", 1.0, Status.CORRECT),
        ("inst_loose", 1.0, Status.CORRECT),
    ],
)
def test_judge_score_is_the_part_that_the_args_name(score: str, expected: float, status: Status):
    verdict = judged(google(NO_COMMA, QUOTED), 'Sure:\n"no comma here"', score=score)
    assert (verdict.score, verdict.status) == (expected, status)
    assert verdict.parts["prompt_strict"] == 0.0
    assert verdict.parts["prompt_loose"] == 1.0


@pytest.mark.parametrize("text", ["", "  \n "])
def test_judge_blank_answer_follows_nothing(text: str):
    """Although it has no comma."""
    verdict = judged(google(NO_COMMA), text)
    assert (verdict.score, verdict.status) == (0.0, Status.UNPARSABLE)
    assert set(verdict.parts.values()) == {0.0}


@pytest.mark.parametrize(
    ("text", "reading"),
    [
        ("quote", False),
        ('"quote"', True),
        ('Here:\n"quote"', True),
        ('"quote"\nBye', True),
        ('Here:\n"quote"\nBye', True),
        ('*"quote"*', True),
        ('Here:\n*"quote"*', True),
        ('**"quote"**\nBye', True),
        ('Here:\n**"quote"**\nBye', True),
        ('Here:\nand here:\n"quote"', False),
    ],
)
def test_judge_loose_leaves_out_first_line_last_line_and_asterisks(text: str, reading: bool):
    assert judged(google(QUOTED), text).parts["prompt_loose"] == float(reading)


@given(st.text(alphabet="ab*\n ", max_size=30))
def test_variants_are_the_eight_texts_of_the_paper(text: str):
    lines = text.split("\n")
    cut = ["\n".join(lines[first : len(lines) - last]) for first in (0, 1) for last in (0, 1)]
    expected = {text, *(one.strip() for one in cut[1:])}
    expected |= {one.replace("*", "") for one in expected}
    found = variants(text)
    assert set(found) == expected
    assert len(found) == len(set(found)) <= 8
    assert found[0] == text


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (google(("punctuation:no_coma", {})), "unknown instruction 'punctuation:no_coma'. Did you mean"),
        (google(("count:word_count_range", {})), "unknown instruction 'count:word_count_range'"),
        (google(("keywords:existence", {})), "keywords:existence: keywords: Field required"),
        (google(("keywords:existence", {"keywords": ["a"], "keyword": "b"})), "keyword: Extra inputs"),
        (google(("keywords:existence", {"keywords": []})), "at least 1 item"),
        (
            google(("length_constraints:number_words", {"num_words": 3, "relation": "about"})),
            "'at least' or 'less than'",
        ),
        (google(("length_constraints:number_words", {"num_words": 2.5, "relation": "at least"})), "num_words"),
        (
            google(("keywords:letter_frequency", {"letter": "ab", "let_frequency": 1, "let_relation": "at least"})),
            "letter",
        ),
        (google(("language:response_language", {"language": "english"})), "expected the code of a language, one of af"),
        (google(), "has no instruction"),
        ({**google(NO_COMMA), "kwargs": []}, "two lists of the same length"),
        ({**google(NO_COMMA), "kwargs": None}, "two lists of the same length"),
        ({**google(NO_COMMA), "kwargs": [3]}, "expected its arguments as a record, got 3"),
        ({"prompt": "x"}, "the row has prompt"),
        ({"ground_truth": "{oops"}, "not valid JSON"),
        ({"ground_truth": json.dumps({"N": 5})}, "`func_name`"),
        ({"ground_truth": json.dumps({"func_name": "unknown_function"})}, "unknown instruction 'unknown_function'"),
        ({"ground_truth": {"func_name": "verify_keyword_frequency", "word": "a"}}, "N: Field required"),
        ({"ground_truth": {"func_name": "validate_word_constraint", "N": 3, "quantifier": "some"}}, "quantifier"),
        ({"ground_truth": "[]"}, "has no instruction"),
        ({"ground_truth": [["validate_lowercase"]]}, "`func_name`"),
    ],
)
def test_judge_row_that_cannot_be_judged_is_an_error_not_a_zero(row: dict[str, Any], reason: str):
    verdict = judged(row, "an answer")
    assert verdict.status == Status.ERROR
    assert reason in verdict.note
    with pytest.raises(BadInstruction):
        instructions_of(row)


def test_ground_truth_as_text_record_and_list_are_the_same():
    truth = {**NULLS, "func_name": "validate_lowercase"}
    for given_as in (json.dumps(truth), truth, [truth]):
        assert judged({"ground_truth": given_as}, "hello world").score == 1.0
        assert judged({"ground_truth": given_as}, "Hello World").score == 0.0


def test_ground_truth_with_several_functions_wants_all():
    row = {"ground_truth": [{"func_name": "validate_lowercase"}, {"func_name": "validate_no_commas"}]}
    assert judged(row, "hello world").score == 1.0
    assert judged(row, "hello, world").parts["inst_strict"] == 0.5


def test_numbers_that_went_through_a_table_are_numbers():
    row = google(("length_constraints:number_words", {"num_words": 3.0, "relation": "at least", "keywords": None}))
    assert judged(row, "one two three").score == 1.0
    assert judged(row, "one two").score == 0.0


def write(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


ALLEN = {
    "messages": [{"role": "user", "content": "Describe IPv6.\n\n In all lowercase letters."}],
    "ground_truth": json.dumps({**NULLS, "func_name": "validate_lowercase"}),
    "dataset": "ifeval",
    "constraint_type": "All Lowercase",
}


def test_problems_of_both_kinds_of_rows(tmp_path: Path):
    source = write(tmp_path / "rows.jsonl", google(NO_COMMA), ALLEN)
    chat = make_task("ifeval", {"source": source}, "follow").problems("test")
    assert [problem.id for problem in chat] == ["follow/test/7", "follow/test/1"]
    assert chat[0].prompt == ({"role": "user", "content": "Write."},)
    assert chat[1].prompt == tuple(ALLEN["messages"])
    plain = make_task("ifeval", {"source": source, "format": "plain"}).problems("train")
    assert [problem.prompt for problem in plain] == ["Write.\n\n", "Describe IPv6.\n\n In all lowercase letters.\n\n"]


def test_problems_of_a_conversation_end_with_the_users_last_turn(tmp_path: Path):
    turns = [("system", "Be kind."), ("user", "Hi"), ("assistant", "Hello"), ("user", "Go on"), ("assistant", "no")]
    messages = [{"role": role, "content": content, "name": None} for role, content in turns]
    source = write(tmp_path / "rows.jsonl", {**ALLEN, "messages": messages})
    (problem,) = make_task("ifeval", {"source": source}).problems("train")
    assert problem.prompt == tuple({"role": role, "content": content} for role, content in turns[:-1])


def test_problems_with_a_system_prompt_have_it_first(tmp_path: Path):
    own = {**ALLEN, "messages": [{"role": "system", "content": "Be kind."}, *ALLEN["messages"]]}
    source = write(tmp_path / "rows.jsonl", google(NO_COMMA), own)
    for problem in make_task("ifeval", {"source": source, "system": "Obey."}).problems("test"):
        assert [one["role"] for one in problem.prompt] == ["system", "user"]
        assert problem.prompt[0]["content"] == "Obey."
    plain = make_task("ifeval", {"source": source, "system": "Obey.", "format": "plain"}).problems("test")
    assert plain[0].prompt == "Obey.\n\nWrite.\n\n"
    assert make_task("ifeval", {"source": source}).problems("test")[1].prompt == tuple(own["messages"])


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (google(("punctuation:no_coma", {})), "row 2: unknown instruction"),
        ({**ALLEN, "messages": [{"role": "system", "content": "x"}]}, "a message of the user"),
        ({**ALLEN, "messages": ["x"]}, "expected a `prompt`, or `messages`"),
        ({**google(NO_COMMA), "prompt": None}, "expected a `prompt`, or `messages`"),
    ],
)
def test_problems_with_a_row_that_cannot_be_judged_fail_before_the_run(tmp_path: Path, row: dict, reason: str):
    source = write(tmp_path / "rows.jsonl", google(NO_COMMA), row)
    with pytest.raises(UsageError, match=reason):
        make_task("ifeval", {"source": source}, "mine").problems("test")


def test_problems_from_parquet_have_nulls_for_what_other_rows_are_told(tmp_path: Path):
    rows = [google(("keywords:existence", {"keywords": ["tea"]}), NO_COMMA), google(TWO_WORDS)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    task = make_task("ifeval", {"source": str(tmp_path / "rows.parquet")})
    first, second = task.problems("test")
    assert first.row["kwargs"][1]["keywords"] is None
    assert task.verify(first, Completion("Tea is good")).score == 1.0
    assert task.verify(second, Completion("Tea is good")).score == 0.0


def test_problems_to_train_on_are_not_googles(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    (tmp_path / "ifeval").mkdir()
    write(tmp_path / "ifeval" / "input_data.jsonl", google(NO_COMMA))
    (tmp_path / "RLVR-IFeval" / "data").mkdir(parents=True)
    table = pyarrow.Table.from_pylist([ALLEN])
    pyarrow.parquet.write_table(table, tmp_path / "RLVR-IFeval" / "data" / "train-00000-of-00001.parquet")
    monkeypatch.setenv("PALESTRA_DATA", str(tmp_path))
    task = make_task("ifeval")
    assert "instruction_id_list" in task.problems("test")[0].row
    assert [problem.row["ground_truth"] for problem in task.problems("train")] == [ALLEN["ground_truth"]]


def test_judges_give_verdicts_from_other_processes_with_their_parts():
    with Verifiers([TaskUse(task="ifeval")], workers=1, timeout=60) as judges:
        problem = Problem("ifeval/test/7", "Write.", google(("language:response_language", {"language": "de"})))
        right, wrong = (
            asyncio.run(judges.verify(problem, Completion(text)))
            for text in ("Ich gehe heute mit dem Hund in den Wald.", "I walk the dog in the woods today.")
        )
        assert (right.status, wrong.status) == (Status.CORRECT, Status.WRONG)
        assert wrong.parts["inst_loose"] == 0.0


@pytest.fixture(scope="module")
def real() -> list[Problem]:
    path = DATA / "ifeval" / "input_data.jsonl"
    if not path.exists():
        pytest.skip("needs ifeval under PALESTRA_DATA")
    return list(make_task("ifeval", {"source": str(path)}).problems("test"))


def test_real_rows_are_541_prompts_with_834_instructions_of_25_kinds(real: list[Problem]):
    named = [one.name for problem in real for one in instructions_of(problem.row)]
    assert (len(real), len({problem.id for problem in real}), len(named), len(set(named))) == (541, 541, 834, 25)


def test_real_rows_of_prompts_to_repeat_accept_the_repetition_alone(real: list[Problem]):
    """What is to be repeated is the request without the part that asks for it."""
    task = make_task("ifeval", {"score": "inst_strict"})
    count = 0
    for problem in real:
        for name, arguments in zip(problem.row["instruction_id_list"], problem.row["kwargs"], strict=True):
            if name == "combination:repeat_prompt":
                one = {**problem.row, "instruction_id_list": [name], "kwargs": [arguments]}
                asked = arguments["prompt_to_repeat"]
                assert (
                    task.verify(Problem(problem.id, problem.prompt, one), Completion(f"{asked}\nSo be it.")).score
                    == 1.0
                )
                assert task.verify(Problem(problem.id, problem.prompt, one), Completion(f"Yes. {asked}")).score == 0.0
                count += 1
    assert count == 41
