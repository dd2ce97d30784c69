"""The same completions scored by lm-eval's tasks and by ours with its rules: equal, right or wrong, in any form."""

import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from tiny_lm import write_rows

from palestra.tasks.sets.ifeval import IfEval, IfEvalArgs
from palestra.tasks.sets.questions import Gsm8k, Gsm8kArgs
from palestra.tasks.task import Completion, make_task
from palestra.tasks.verify.final_answers import verify_number
from palestra.tasks.verify.lm_eval import verify_gsm8k, verify_minerva

lm_eval = pytest.importorskip("lm_eval", reason="needs the extra lm-eval")

from lm_eval.api.instance import Instance  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

TASKS = Path(lm_eval.__file__).parent / "tasks"
FORMS = (
    "#### {}", "It is {}.\n#### {}", "#### {}.", "#### ${}", "#### {} dollars", "The answer is {}.", "{}", "${}",
    "{}.00", "So {} + 1 = 9", "\\boxed{{{}}}", "#### {}\n#### 3", "{}\n", "**{}**", "no idea", "", "#### ", "...",
    "####{}", "First 12, then {}", "The answer is {}, not 5.", "-{}", "#### -{}", "{}%", "It costs {}.,",
)  # fmt: skip


def local_task(folder: Path, own: str, **fields: Any) -> Any:
    """A task of lm-eval itself, over another file."""
    name = f"local_{Path(own).stem}"
    (folder / f"{name}.yaml").write_text(yaml.safe_dump({"include": str(TASKS / own), "task": name, **fields}))
    return TaskManager(include_path=str(folder), include_defaults=False).load([name])["tasks"][name]


def data(path: str) -> dict[str, Any]:
    files = dict.fromkeys(("train", "test"), path)
    return {"dataset_path": "json", "dataset_name": None, "dataset_kwargs": {"data_files": files}}


def by_lm_eval(task: Any, completions: list[tuple[int, str]]) -> dict[str, list[dict[str, Any]]]:
    """The metrics of completions, given with the numbers of their documents, by filter."""
    documents = list(task.eval_docs)
    task._instances = [
        Instance("generate_until", documents[number], ("", {}), place, resps=[text])
        for place, (number, text) in enumerate(completions)
    ]
    task.apply_filters()
    return {
        name: [task.process_results(one.doc, [one.filtered_resps[name]]) for one in task.instances]
        for name in task.instances[0].filtered_resps
    }


def test_gsm8k_by_its_rules_scores_as_lm_eval_does(tmp_path: Path):
    draw, golds = random.Random(0), ["18", "1,250", "-3", "7.5", "0"]
    rows = [{"question": f"How many {gold}?", "answer": f"Some <<1+1=2>>steps.\n#### {gold}"} for gold in golds]
    path = write_rows(tmp_path / "train.jsonl", rows)
    said = [*golds, "1250", "18.0", "3", "19"]
    completions = [
        (number, form.replace("{{", "{").replace("}}", "}").replace("{}", draw.choice([gold, draw.choice(said)])))
        for number, gold in enumerate(golds)
        for form in FORMS * 4
    ]
    expected = by_lm_eval(local_task(tmp_path, "gsm8k/gsm8k.yaml", **data(path)), completions)
    for rule, name in (("lm_eval_strict", "strict-match"), ("lm_eval_flexible", "flexible-extract")):
        task = Gsm8k(Gsm8kArgs(source=path, rule=rule), "gsm8k")
        problems = task.problems("train")
        actual = [task.verify(problems[number], Completion(text)).score for number, text in completions]
        assert actual == [one["exact_match"] for one in expected[name]]
        assert 0.1 < sum(actual) / len(actual) < 0.9


@pytest.mark.parametrize(
    ("text", "ours", "strict", "flexible"),
    # Where our reading differs, and why: a number is a number in any spelling; what is boxed or stated is the answer.
    [
        ("The answer is 18.", 1, 0, 1),
        ("It is \\boxed{18} for 2 days", 1, 0, 0),
        ("#### 18.00", 1, 0, 0),
        ("#### 18 for 3 people", 1, 1, 0),
        ("so 17 #### 18\n#### 19", 0, 1, 0),
    ],
)
def test_our_reading_of_gsm8k_differs_where_lm_eval_compares_strings(text: str, ours: int, strict: int, flexible: int):
    assert verify_number("18", text, "flexible").score == ours
    parts = verify_gsm8k("18", text, "lm_eval_strict").parts
    assert (parts["lm_eval_strict"], parts["lm_eval_flexible"]) == (strict, flexible)


def test_minerva_by_its_rule_is_math_verify_of_the_whole_texts():
    math_verify = pytest.importorskip("math_verify")
    solutions = ["so $\\boxed{\\frac{1}{2}}$.", "Hence the value is $\\boxed{(2,5)}$", "$x=\\boxed{3\\sqrt{2}}$"]
    texts = [
        "$\\boxed{0.5}$", "The final answer is $\\frac12$. I hope it is correct.", "1/2", "$(2, 5)$", "\\boxed{(5,2)}",
        "$3\\sqrt 2$", "$\\sqrt{18}$", "4.24", "no", "", "$\\boxed{\\frac{1}{3}}$",
    ]  # fmt: skip
    scores = []
    for solution in solutions:
        for text in texts:
            expected = math_verify.verify(gold=math_verify.parse(solution), target=math_verify.parse(text))
            scores.append(verify_minerva(solution, text).score)
            assert scores[-1] == float(expected), (solution, text)
    assert 0 < sum(scores) < len(scores)


def runs(program: str) -> bool:
    """As `code_eval` of the Hub, which lm-eval takes, runs a program; that one is not there without a network."""
    return subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60).returncode == 0


CODE = (
    "def add(a, b):\n    return a + b\n", "def add(a, b):\n    return a - b\n",
    "```python\ndef add(a, b):\n    return a + b\n```", "def add(a, b):\n    return a + b\n[DONE]\nnot code",
    "Here it is:\ndef add(a, b):\n    return a + b\n", "",
)  # fmt: skip


def test_mbpp_by_its_rule_runs_the_whole_completion(tmp_path: Path):
    tests = ["assert add(1, 2) == 3", "assert add(0, 0) == 0"]
    row = {"task_id": 11, "text": "Add.", "code": CODE[0], "test_list": tests, "test_setup_code": ""}
    path = write_rows(tmp_path / "mbpp.jsonl", [row])
    verdicts = {}
    for rule in ("lm_eval", None):
        task = make_task("mbpp", {"source": path, "rule": rule, "sandbox": "weak"})
        (problem,) = task.problems("test")
        verdicts[rule] = [task.verify(problem, Completion(text)).score for text in CODE]
    expected = [runs(text.partition("[DONE]")[0] + "\n" + "\n".join(tests)) for text in CODE]
    assert verdicts["lm_eval"] == [float(one) for one in expected] == [1, 0, 0, 1, 0, 0]
    assert verdicts[None] == [1, 0, 1, 1, 1, 0]


def test_humaneval_by_its_rule_runs_prompt_and_completion(tmp_path: Path):
    prompt = 'def add(a, b):\n    """Add."""\n'
    test = "def check(candidate):\n    assert candidate(1, 2) == 3\n"
    row = {"task_id": "HumanEval/0", "prompt": prompt, "test": test, "entry_point": "add", "canonical_solution": ""}
    path = write_rows(tmp_path / "HumanEval.jsonl", [row])
    right, fenced = "    return a + b\n", "```python\n    return a + b\n```"
    texts = [right, "    return a - b\n", f"{right}\nprint(1", fenced]
    verdicts = {}
    for rule in ("lm_eval", None):
        task = make_task("humaneval", {"source": path, "rule": rule, "sandbox": "weak"})
        (problem,) = task.problems("test")
        verdicts[rule] = [task.verify(problem, Completion(text)).score for text in texts]
    expected = [runs(f"{prompt}{text.partition(chr(10) + 'print')[0]}\n{test}\ncheck(add)") for text in texts]
    assert verdicts["lm_eval"] == [float(one) for one in expected] == [1, 0, 1, 0]
    assert verdicts[None] == [1, 0, 1, 1]


TEXTS = (
    "", "hello there", "HELLO THERE", "Hello, there", "* one\n* two\n* three", "<<A title>>\nSome *words* here",
    "P.S. bye", '{"a": 1}', "```json\n{\"a\": 1}\n```", '"quoted"', "first\n***\nsecond", "My answer is yes.",
    "[name] and [place]", "one\n\ntwo\n\nthree", "word " * 120, "SECTION 1\na\nSECTION 2\nb", "hello ******\nworld",
    "Is there anything else I can help with?",
)  # fmt: skip
INSTRUCTIONS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("punctuation:no_comma", {}),
    ("change_case:english_lowercase", {}),
    ("detectable_format:number_bullet_lists", {"num_bullets": 3}),
    ("detectable_format:title", {}),
    ("detectable_format:json_format", {}),
    ("detectable_format:constrained_response", {}),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 1}),
    ("detectable_format:multiple_sections", {"section_spliter": "SECTION", "num_sections": 2}),
    ("detectable_content:number_placeholders", {"num_placeholders": 2}),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}),
    ("startend:quotation", {}),
    ("startend:end_checker", {"end_phrase": "Is there anything else I can help with?"}),
    ("keywords:existence", {"keywords": ["hello"]}),
    ("keywords:forbidden_words", {"forbidden_words": ["there"]}),
    ("keywords:frequency", {"keyword": "word", "frequency": 3, "relation": "at least"}),
    ("keywords:letter_frequency", {"letter": "e", "let_frequency": 2, "let_relation": "at least"}),
    ("length_constraints:number_words", {"num_words": 100, "relation": "at least"}),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}),
    ("combination:two_responses", {}),
)
"""Those that need no data of NLTK."""


def test_ifeval_scores_as_lm_eval_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("immutabledict")
    draw, rows = random.Random(0), []
    for key in range(40):
        some = draw.sample(INSTRUCTIONS, draw.randint(1, 3))
        names, values = [name for name, _ in some], [dict(arguments) for _, arguments in some]
        rows.append({"key": key, "prompt": f"Say {key}.", "instruction_id_list": names, "kwargs": values})
    path = write_rows(tmp_path / "input_data.jsonl", rows)
    try:
        from lm_eval.tasks.ifeval.utils import process_results
    except LookupError as error:  # it loads NLTK's sentence splitter when it is imported
        pytest.skip(f"lm-eval's ifeval needs NLTK's data: {error}")
    # Theirs guesses the language of short texts by other random numbers each time; ours always by these.
    monkeypatch.setattr("langdetect.DetectorFactory.seed", 0)
    task = IfEval(IfEvalArgs(source=path), "ifeval")
    followed = []
    for problem, row in zip(task.problems("test"), rows, strict=True):
        for text in TEXTS:
            expected, verdict = process_results(row, [text]), task.verify(problem, Completion(text))
            followed.append(expected["prompt_level_strict_acc"])
            assert verdict.parts["prompt_strict"] == expected["prompt_level_strict_acc"], (row, text)
            assert verdict.parts["prompt_loose"] == expected["prompt_level_loose_acc"], (row, text)
            strict = expected["inst_level_strict_acc"]
            assert verdict.parts["inst_strict"] == pytest.approx(sum(strict) / len(strict)), (row, text)
    assert 0 < sum(followed) < len(followed)
