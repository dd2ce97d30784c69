"""Leaks: scored problems that are in the data which the model's runs were trained on, by n-grams of words."""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from palestra.data.duplicates import ngram_hashes, word_hashes
from palestra.data.readers import read_rows, shards
from palestra.data.steps.decontaminate import indexed, strings
from palestra.errors import PalestraError
from palestra.evaluate.completions import EvalTask
from palestra.evaluate.likelihood_data import Choices, load_choices
from palestra.runs.run import Run
from palestra.runs.store import read_json
from palestra.spec.tasks import TaskUse
from palestra.tasks.task import Problem, make_task

N, OVERLAP = 13, 0.7
"""Words of an n-gram, and the share of a problem's n-grams that one training document has."""
CHARACTERS, PROBLEMS = 2**24, 20_000
"""Training texts of a run that are read at most, and problems of a task."""

log = logging.getLogger("palestra.evaluate")


def leaks(asked: Sequence[EvalTask], choices: Sequence[Choices], model: Path) -> Iterator[str]:
    """A sentence for each task or file of which problems are in the training data of the model's run, where known.

    A run is known by the folder of its checkpoint, and its data by its spec, as far as its files are here; so are the
    runs that it started from.
    """
    problems: dict[str, dict[str, list[str]]] = {
        task.label: {one.problem.id: shown(one.problem) for one in task.questions}
        for task in asked
        if task.use.split != "train"
    }
    for source in choices:
        plain = load_choices(source.use.model_copy(update={"shots": 0}), 0)
        contexts = (item.options[0].context for item in plain.items)
        problems[source.label] = {f"{source.label}/{number}": [text] for number, text in enumerate(contexts)}
    texts = [(id, text) for by_id in problems.values() for id, found in by_id.items() for text in found]
    run = run_of(model)
    while run is not None:
        found = leaked(texts, trained_texts(run.spec)) if texts else set()
        for label, by_id in problems.items():
            if ids := [id for id in by_id if id in found]:
                share = f"{len(ids):,} of {len(by_id):,} problems ({100 * len(ids) / len(by_id):.1f} %)"
                yield f"{label}: {share} are in the data of the run {run.name}, such as {ids[0]}: the score says little"
        init = run.sessions[0].path / "init.json"
        run = run_of(Path(read_json(init)["model"])) if init.exists() else None


def shown(problem: Problem) -> list[str]:
    """The texts of a problem's row that its prompt has: the question, without its template and worked examples."""
    return [text for _, text in strings(problem.row, "") if text.strip() and text.strip() in problem.text]


def leaked(texts: Iterable[tuple[str, str]], documents: Iterable[str]) -> set[str]:
    """The ids of texts of which a document has most n-grams; texts of fewer than 13 words are not compared."""
    index, _ = indexed(texts, N)
    hit = np.zeros(len(index.places), bool)
    for document in documents:
        places, shared, _ = index.hits(np.unique(ngram_hashes(word_hashes(document), N)))
        hit[places[shared >= OVERLAP * index.sizes[places]]] = True
    return {index.places[place] for place in np.flatnonzero(hit)}


def run_of(model: Path) -> Run | None:
    """The session whose checkpoint a model's folder is in."""
    folder = next((one for one in model.absolute().parents if one.parent.name == "sessions"), None)
    return Run(folder) if folder is not None and (folder / "manifest.json").is_file() else None


def trained_texts(spec: Mapping[str, Any]) -> Iterator[str]:
    """What a run of this spec was trained on: the texts of its tasks' problems, and of its data."""
    left = CHARACTERS
    for use in (spec.get("tasks") or {}).get("train") or ():
        for text in _known(_of_task(use), use["task"]):
            yield text
    blocks = [spec.get("data"), (spec.get("sft") or {}).get("data")]
    for source in (source for block in blocks if block for source in block["train"].values()):
        for text in _known(_of_files(source), source["path"]):
            yield text[:left]
            left -= len(text)
            if left <= 0:
                return


def _of_task(use: Mapping[str, Any]) -> Iterator[str]:
    known = TaskUse.model_validate({name: use[name] for name in ("task", "name", "args", "split") if name in use})
    problems = make_task(known.task, known.args, known.label).part(known.split)
    return ("\n".join(shown(problems[place])) for place in islice(range(len(problems)), PROBLEMS))


def _of_files(source: Mapping[str, Any]) -> Iterator[str]:
    for shard in shards(Path(source["path"]).expanduser(), split=source.get("split")):
        for row in read_rows(shard):
            yield "\n".join(text for _, text in strings(row, ""))


def _known(texts: Iterable[str], where: str) -> Iterator[str]:
    """The texts, as far as they are still there."""
    try:
        yield from texts
    except (PalestraError, OSError) as error:
        log.info("problems are not compared with all of %s, which the model was trained on: %s", where, error)
