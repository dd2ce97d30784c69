"""Prompts equal to lm-eval's, text for text, over the real data: ours with `prompt: lm_eval`, its from its own YAML."""

import ast
import json
import os
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import yaml
from tiny_lm import write_rows

from palestra.errors import UsageError
from palestra.tasks.task import make_task

lm_eval = pytest.importorskip("lm_eval", reason="needs the extra lm-eval")

from lm_eval.api.task import ConfigurableTask  # noqa: E402

TASKS = Path(lm_eval.__file__).parent / "tasks"
DATA = Path(__file__).parents[1] / os.environ.get("PALESTRA_DATA", "../shared/data")
SEED = 1234  # lm-eval's default
PROMPTS = 40


def function(path: Path, name: str) -> Any:
    """A function of its module that makes prompts; the module itself imports what is not here, such as ANTLR 4.11."""
    (node,) = [one for one in ast.parse(path.read_text()).body if getattr(one, "name", "") == name]
    names: dict[str, Any] = {}
    exec(compile(ast.Module([node], []), str(path), "exec"), names)
    return names[name]


def own_task(name: str, files: dict[str, str]) -> ConfigurableTask:
    """A task as its YAML has it, over local files, without what scores completions."""
    path = TASKS / f"{name}.yaml"
    loader = type("Loader", (yaml.SafeLoader,), {})
    module = path.parent / "utils.py"
    prompts = {"doc_to_text", "list_fewshot_samples"}
    loader.add_constructor(
        "!function",
        lambda _, node: function(module, used) if (used := node.value.partition(".")[2]) in prompts else None,
    )
    config = yaml.load(path.read_text(), loader)
    for scoring in ("metric_list", "filter_list", "process_results", "tag", "unsafe_code"):
        config.pop(scoring, None)
    if "process_docs" in config:  # adds the answers, which are in no prompt
        config["process_docs"] = lambda rows: rows.add_column("answer", [""] * len(rows))
    config |= {"dataset_path": "json", "dataset_name": None, "dataset_kwargs": {"data_files": files}}
    task = ConfigurableTask(config={**config, "metric_list": [{"metric": "exact_match"}]})
    task.set_fewshot_seed(SEED)
    return task


def prompts(task: ConfigurableTask, shots: int, documents: int = PROMPTS) -> list[str]:
    return [str(task.fewshot_context(doc, shots)) for doc in islice(task.eval_docs, documents)]


def found(path: str) -> str:
    if not (DATA / path).exists():
        pytest.skip(f"needs {path} under PALESTRA_DATA")
    return str(DATA / path)


def ours(name: str, args: dict[str, Any], split: str = "test") -> tuple[list[str], Any]:
    task = make_task(name, {"format": "plain", **args})
    return [str(one.prompt) for one in islice(task.problems(split), PROMPTS)], task


@pytest.mark.parametrize("shots", [0, 4, 8])
def test_gsm8k(shots: int) -> None:
    files = {split: found(f"gsm8k/{split}.jsonl") for split in ("train", "test")}
    theirs = own_task("gsm8k/gsm8k", files)
    mine, task = ours("gsm8k", {"source": str(DATA / "gsm8k"), "prompt": "lm_eval", "shots": shots})
    assert mine == prompts(theirs, shots)
    assert mine[0].count("Question: ") == shots + 1
    assert list(task.stops) == theirs.config.generation_kwargs["until"]
    if shots:  # each prompt has other examples
        assert mine[0].split("\n\n")[0] != mine[1].split("\n\n")[0]


@pytest.mark.parametrize("shots", [0, 4])
def test_minerva_math(shots: int) -> None:
    subject = "algebra"
    files = {split: found(f"math/hendrycks_math_{subject}_{split}.json") for split in ("train", "test")}
    theirs = own_task("minerva_math/minerva_math_algebra", files)
    mine, task = ours(
        "math", {"subjects": [subject], "prompt": "lm_eval", "shots": shots, "source": str(DATA / "math")}
    )
    assert mine == prompts(theirs, shots)
    assert list(task.stops) == theirs.config.generation_kwargs["until"]


def test_minerva_math_has_four_examples() -> None:
    found("math")
    with pytest.raises(UsageError, match="has 4 worked examples, not 5"):
        ours("math", {"prompt": "lm_eval", "shots": 5, "source": str(DATA / "math")})


@pytest.mark.parametrize("shots", [0, 3])
def test_mbpp(tmp_path: Path, shots: int) -> None:
    rows = [json.loads(line) for line in Path(found("mbpp/mbpp.jsonl")).read_text().splitlines()]
    test = write_rows(tmp_path / "test.jsonl", [row for row in rows if 11 <= row["task_id"] <= 510])
    theirs = own_task("mbpp/mbpp", {"test": test})
    mine, task = ours("mbpp", {"few_shot": shots, "source": str(DATA / "mbpp")})
    assert mine == prompts(theirs, shots)
    assert list(task.stops) == theirs.config.generation_kwargs["until"]


def test_humaneval() -> None:
    theirs = own_task("humaneval/humaneval", {"test": found("humaneval/HumanEval.jsonl")})
    mine, task = ours("humaneval", {"source": str(DATA / "humaneval")})
    assert mine == prompts(theirs, 0)
    assert list(task.stops) == theirs.config.generation_kwargs["until"]


def test_ifeval() -> None:
    theirs = own_task("ifeval/ifeval", {"train": found("ifeval/input_data.jsonl")})
    mine, task = ours("ifeval", {"source": str(DATA / "ifeval/input_data.jsonl"), "prompt": "lm_eval"})
    assert mine == prompts(theirs, 0)
    assert list(task.stops) == theirs.config.generation_kwargs["until"]


def test_conversations_have_the_same_texts_as_its_turns() -> None:
    files = {split: found(f"gsm8k/{split}.jsonl") for split in ("train", "test")}
    theirs = own_task("gsm8k/gsm8k", files)
    task = make_task("gsm8k", {"source": str(DATA / "gsm8k"), "prompt": "lm_eval", "shots": 2})
    messages: list[list[dict[str, str]]] = []

    def render(history: list[dict[str, str]], **_: Any) -> str:
        messages.append(history)
        return ""

    for doc in islice(theirs.eval_docs, PROMPTS):
        theirs.fewshot_context(doc, 2, apply_chat_template=True, fewshot_as_multiturn=True, chat_template=render)
    assert [list(one.prompt) for one in islice(task.problems("test"), PROMPTS)] == messages
