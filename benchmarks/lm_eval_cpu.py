"""Scores and documents a second by likelihood: our rows and our model in lm-eval beside `lm_eval --model hf`.

    palestra model convert $PALESTRA_DATA/weights_stories260K/stories260K.bin models/stories260K
    python benchmarks/lm_eval_cpu.py --model models/stories260K

Files of ARC easy, PIQA and LAMBADA (core_eval under PALESTRA_DATA), and one in the columns of HellaSwag, made from the
sentences of WikiText-2, because HellaSwag itself is not there. `ours` is what `palestra eval --likelihood` does,
`model` is `--model palestra` in lm-eval, `hf` is `--model hf` in lm-eval with the fastest of some batch sizes, by a
short trial. All take turns in one process; the best round of each counts, by the clock and by the seconds that its
threads computed, which mean something on a busy machine too.

Counted is everything from the file to the scores: reading the rows, prompts, tokens, the model, metrics. Not counted,
for none of them, are imports, weights and lm-eval's list of tasks, which are there before, the list of installed
packages that lm-eval makes at the end (seconds), and the bootstrap of standard errors.
Documents with an answer that does not fit in the context, for which lm-eval stops, are left out of all, and counted.
A JSON line for each file, then a table. On a machine that others use too, OMP_WAIT_POLICY=passive keeps threads from
spinning while they wait for each other.
"""

import argparse
import json
import logging
import math
import os
import random
import re
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import yaml
from lm_eval import evaluate
from lm_eval import tasks as lm_eval_tasks
from lm_eval.api.model import LM
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from palestra.errors import UsageError
from palestra.evaluate.likelihood import encode_item, likelihood_outcome, score_set
from palestra.evaluate.likelihood_data import load_choices
from palestra.lm_eval import PalestraLM
from palestra.spec.kinds.evaluate import LikelihoodUse

DATA = Path(os.environ.get("PALESTRA_DATA", "../shared/data"))
CHOICE = {"output_type": "multiple_choice", "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}]}
CLOZE = {"output_type": "loglikelihood", "metric_list": [{"metric": "acc"}, {"metric": "perplexity"}]}
COLUMNS = {"doc_to_choice": "choices", "doc_to_target": "gold"}
TASKS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "arc_easy": ("core_eval/arc_easy.jsonl", {"doc_to_text": "{{query}}\nAnswer:", **COLUMNS}, CHOICE),
    "piqa": ("core_eval/piqa.jsonl", {"doc_to_text": "{{query}}Answer:", **COLUMNS}, CHOICE),
    "lambada": ("core_eval/lambada_openai.jsonl", {"doc_to_text": "context", "doc_to_target": "continuation"}, CLOZE),
    "hellaswag": ("", {}, {}),
}
"""The file of a task, how its rows are read, and what lm-eval measures."""


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--model", type=Path, required=True, help="a model folder")
    arguments.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    arguments.add_argument("--limit", type=int, help="the first documents of each file; by default all")
    arguments.add_argument("--rounds", type=int, default=2)
    arguments.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32, 128], help="tried for hf")
    arguments.add_argument("--bos", choices=["true", "false"], default="true", help="BOS before each text")
    given = arguments.parse_args()
    torch.set_num_threads(given.threads)
    logging.disable(logging.WARNING)
    bos = given.bos == "true"
    mine = PalestraLM(str(given.model), dtype="float32", device="cpu", add_bos_token=bos)
    theirs = HFLM(pretrained=str(given.model), dtype="float32", device="cpu", add_bos_token=bos, batch_size=1)
    rows, left_out = [], {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        for name in given.tasks:
            left_out[name] = write_rows(folder, name, mine, bos)
            write_task(folder, name)
        manager = TaskManager(include_path=str(folder), include_defaults=False)
        for name in given.tasks:
            row = compare(folder, name, manager, mine, theirs, bos, given)
            rows.append({**row, "left_out_of_file": left_out[name]})
            print(json.dumps(rows[-1]), flush=True)
    print_table(rows)


def compare(
    folder: Path, name: str, manager: TaskManager, mine: PalestraLM, theirs: HFLM, bos: bool, given: argparse.Namespace
) -> dict[str, Any]:
    """The scores of one file three times, and how fast each was."""
    use = usage(folder / f"{name}.jsonl", name, bos).model_copy(update={"items": given.limit})

    def by_rows() -> dict[str, float]:
        choices = load_choices(use, seed=0)
        scored = score_set(mine.model, mine.tokenizer, choices)
        accuracies = likelihood_outcome(choices, scored).accuracies
        if accuracies:
            return {"acc": accuracies["sum"], "acc_norm": accuracies["character"]}
        nats = math.fsum(-row.logprobs[0] for row in scored) / len(scored)
        return {"acc": sum(bool(row.written) for row in scored) / len(scored), "perplexity": math.exp(nats)}

    def by_lm_eval(model: LM, limit: int | None = given.limit) -> dict[str, float]:
        loaded = manager.load([f"local_{name}"])
        for task in loaded["tasks"].values():
            task.set_config(key="num_fewshot", value=0)
        found = evaluate(model, loaded, limit=limit, bootstrap_iters=0, log_samples=False)
        results = found["results"][f"local_{name}"]
        return {
            key.partition(",")[0]: value for key, value in results.items() if key.endswith(",none") and "err" not in key
        }

    seconds = {}
    for batch in given.batches:
        theirs.batch_size_per_gpu = batch
        seconds[batch] = timed(lambda: by_lm_eval(theirs, 64))[1] if len(given.batches) > 1 else 0.0
    theirs.batch_size_per_gpu = min(seconds, key=seconds.__getitem__)
    ways: dict[str, Callable[[], dict[str, float]]] = {
        "ours": by_rows, "model": lambda: by_lm_eval(mine), "hf": lambda: by_lm_eval(theirs),
    }  # fmt: skip
    best: dict[str, tuple[float, float]] = {}
    scores: dict[str, dict[str, float]] = {}
    for _ in range(given.rounds):
        for way, work in ways.items():
            *took, scores[way] = timed(work)
            best[way] = tuple(map(min, took, best.get(way, took)))
    documents = len(load_choices(use, seed=0).items)
    speed, busy = ({way: documents / took[place] for way, took in best.items()} for place in (0, 1))
    about = {"task": name, "weights": given.model.name, "documents": documents, "hf_batch": theirs.batch_size}
    ratios = {f"{way}_times_hf": round(speed[way] / speed["hf"], 2) for way in ("ours", "model")}
    ratios |= {f"{way}_times_hf_by_cpu_seconds": round(busy[way] / busy["hf"], 2) for way in ("ours", "model")}
    rates = {"documents_per_s": speed, "documents_per_cpu_second": busy}
    rates = {name: {way: round(one, 1) for way, one in rate.items()} for name, rate in rates.items()}
    return {**about, **scores, **rates, **ratios}


def timed(work: Callable[[], dict[str, float]]) -> tuple[float, float, dict[str, float]]:
    start = time.perf_counter(), time.process_time()
    result = work()
    return time.perf_counter() - start[0], time.process_time() - start[1], result


def usage(path: Path, name: str, bos: bool) -> LikelihoodUse:
    """How our rows are scored as lm-eval's are."""
    use = LikelihoodUse(path=str(path), border="lm_eval", by="character", bos=bos)
    return use.model_copy(update=TASKS[name][1] if name != "lambada" else {})


def write_rows(folder: Path, name: str, mine: PalestraLM, bos: bool) -> int:
    """The rows that all read; returns how many are left out, because an answer does not fit in the context."""
    path = folder / f"{name}.jsonl"
    if name == "hellaswag":
        lines = [json.dumps(row) + "\n" for row in hellaswag_like(2000)]
    else:
        lines = [line + "\n" for line in (DATA / TASKS[name][0]).read_text().split("\n") if line]
    path.write_text("".join(lines))
    fitting = []
    for line, item in zip(lines, load_choices(usage(path, name, bos), seed=0).items, strict=True):
        with suppress(UsageError):
            encode_item(mine.tokenizer, item, mine.model.shape.context, "lm_eval", bos)
            fitting.append(line)
    path.write_text("".join(fitting))
    return len(lines) - len(fitting)


def write_task(folder: Path, name: str) -> None:
    """The task as lm-eval reads it; HellaSwag is lm-eval's own, over another file."""
    data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(folder / f"{name}.jsonl")}}}
    data |= {"dataset_name": None, "test_split": "test", "validation_split": None, "training_split": None}
    own = Path(lm_eval_tasks.__file__).parent / "hellaswag" / "hellaswag.yaml"
    _, columns, measured = TASKS[name]
    if name == "lambada":
        columns = {"doc_to_text": "{{context}}", "doc_to_target": " {{continuation}}"}
    about = {"include": str(own)} if name == "hellaswag" else {**columns, **measured}
    (folder / f"local_{name}.yaml").write_text(yaml.safe_dump({**about, "task": f"local_{name}", **data}))


def hellaswag_like(count: int) -> list[dict[str, Any]]:
    """Sentences of WikiText-2, each with the one that follows it and three from elsewhere.

    None has `<unk>`, which is text in our rows, and a special token in lm-eval for a tokenizer that has it.
    """
    text = (DATA / "wikitext2" / "test.txt").read_text()
    sentences = [
        one.strip() for one in re.split(r"(?<= \.) ", text) if 20 < len(one) < 200 and not set("=<") & set(one)
    ]
    draw, rows = random.Random(0), []
    for place in draw.sample(range(len(sentences) - 3), min(count, len(sentences) - 3)):
        endings, label = [sentences[place + 2], *draw.sample(sentences, 3)], draw.randrange(4)
        endings[0], endings[label] = endings[label], endings[0]
        first, second = sentences[place : place + 2]
        rows.append({"activity_label": "Reading", "ctx_a": first, "ctx_b": second, "endings": endings, "label": label})
    return rows


def print_table(rows: list[dict[str, Any]]) -> None:
    print("\n| file | metric | ours | model | hf | difference | documents/s: ours | model | hf | times hf | by CPU s |")
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    for row in rows:
        fast = " | ".join(str(row["documents_per_s"][way]) for way in ("ours", "model", "hf"))
        for metric, value in row["hf"].items():
            ours, model = row["ours"][metric], row["model"][metric]
            largest = max(abs(ours - value), abs(model - value))
            scores = f"{ours:.4f} | {model:.4f} | {value:.4f} | {largest:.1g}"
            times = f"{row['ours_times_hf']} / {row['model_times_hf']}"
            times += f" | {row['ours_times_hf_by_cpu_seconds']} / {row['model_times_hf_by_cpu_seconds']}"
            print(f"| {row['task']} | {metric} | {scores} | {fast} | {times} |")


if __name__ == "__main__":
    main()
