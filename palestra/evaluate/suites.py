"""Suites: evaluations beside training with one copy of the weights, their setup and their results."""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import fmean
from typing import Any

from palestra.data.tokenizers import Tokenizer
from palestra.errors import UsageError
from palestra.evaluate.choices import Suite, load_suite
from palestra.evaluate.completions import ROWS, Evaluation, Questions, answering_engine, ask, evaluate_tasks, pumped
from palestra.evaluate.likelihood import (
    LikelihoodOutcome,
    TextOutcome,
    Texts,
    encode_item,
    likelihood_outcome,
    load_texts,
    score_suite,
    score_texts,
    text_outcome,
    windows,
)
from palestra.generate.local import LocalGenerator
from palestra.lm.model import Transformer
from palestra.rollout.episode import Judge
from palestra.rollout.workflows import make_workflow
from palestra.runs.run import RESULTS
from palestra.runs.store import read_json, write_json
from palestra.spec.kinds.evaluate import EvaluateSpec
from palestra.spec.tasks import CENTRED
from palestra.tasks.task import Task
from palestra.work.redact import redacted


@dataclass(frozen=True)
class Opened:
    """A suite with its rows read and its problems tokenized."""

    label: str
    spec: EvaluateSpec
    choices: tuple[Suite, ...]
    texts: tuple[Texts, ...]
    questions: tuple[Questions, ...]

    def identity(self, tokenizer: Tokenizer) -> dict[str, Any]:
        """What makes a result comparable with another; plain data."""
        decoding = self.spec.eval.model_dump(mode="json", exclude={"problems", "verifiers"})
        found = {
            "seed": self.spec.seed,
            "decoding": decoding if self.questions else None,
            "likelihood": {one.label: one.identity() for one in self.choices},
            "texts": {one.label: one.identity() for one in self.texts},
            "tasks": {one.label: one.identity(tokenizer) for one in self.questions},
        }
        return json.loads(json.dumps(found))


def open_suite(label: str, spec: EvaluateSpec, tasks: Mapping[str, Task], tokenizer: Tokenizer) -> Opened:
    """Read all that a suite asks; `tasks` are by label, as `Judges` has them.

    Examples before a question are drawn by the suite's seed, not by the run's: every model is asked the same.
    """
    try:
        return Opened(
            label,
            spec,
            tuple(load_suite(use, spec.seed) for use in spec.likelihood),
            tuple(load_texts(use) for use in spec.texts),
            tuple(ask(spec.tasks, tasks, tokenizer, spec.eval.problems)),
        )
    except UsageError as error:
        raise UsageError(f"suite {label}: {error}") from error


def check_suite(suite: Opened, tokenizer: Tokenizer, context: int) -> None:
    """Refuse now what could not be scored in the middle of training.

    That is text which the tokenizer does not know, and answers that do not fit in the model's context.
    """
    for asked in suite.choices:
        # All rows, because any may stand before a question; alone, because there they say nothing new but what ends
        # them, which the first question has.
        bare = load_suite(asked.use.model_copy(update={"shots": 0, "items": None}), suite.spec.seed)
        for number, item in enumerate((asked.items[0], *bare.items)):
            try:
                encode_item(tokenizer, item, context, asked.use.border)
            except UsageError as error:
                raise UsageError(f"suite {suite.label}: {asked.label}, row {max(1, number)}: {error}") from error
    for texts in suite.texts:
        for number, document in enumerate(texts.documents):
            try:
                windows(tokenizer, document, context)
            except UsageError as error:
                raise UsageError(f"suite {suite.label}: {texts.label}, document {number + 1}: {error}") from error


def measure(
    suite: Opened,
    model: Transformer,
    tokenizer: Tokenizer,
    judge: Judge,
    *,
    eos: Iterable[int],
    look: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Every number of a suite by a model that nobody changes meanwhile; plain data: `tasks`, and their mean `centred`.

    Each task has its `value` (accuracy; of texts, bits a byte), its `type`, and all that is behind it. `look` is called
    now and then and may raise to end it all.
    """
    found: dict[str, Any] = {}
    for one in suite.choices:
        outcome = likelihood_outcome(one, score_suite(model, tokenizer, one, keep=lambda _: look()))
        found[one.label] = {"type": "likelihood", "value": outcome.accuracy.mean, **outcome.plain()}
    for texts in suite.texts:
        of_texts = text_outcome(texts, score_texts(model, tokenizer, texts, keep=lambda _: look()))
        found[texts.label] = {"type": "texts", "value": of_texts.bits_per_byte, **of_texts.plain()}
    if suite.questions:
        for label, modes in _answered(suite, model, tokenizer, judge, eos, look).outcomes.items():
            accuracy = modes[next(iter(modes))].accuracy.mean  # greedy answers, else drawn ones
            plain = {mode: one.plain() for mode, one in modes.items()}
            found[label] = {"type": "task", "value": accuracy, CENTRED: accuracy, **plain}
    centred = [task[CENTRED] for task in found.values() if CENTRED in task]
    result = {"tasks": found, **({CENTRED: fmean(centred)} if centred else {})}
    return json.loads(json.dumps(result))


def suite_metrics(label: str, result: Mapping[str, Any]) -> dict[str, float]:
    """`suite/<name>/<task>`, and their mean `suite/<name>/centred`."""
    named = {task: float(found["value"]) for task, found in result["tasks"].items()}
    named |= {CENTRED: float(result[CENTRED])} if CENTRED in result else {}
    return {f"suite/{label}/{task}": value for task, value in named.items()}


def begin_results(folder: Path, setups: Mapping[str, Mapping[str, Any]]) -> None:
    """Write down what is asked, or refuse to go on asking something else than a session began with."""
    if not setups:
        return
    path = folder / RESULTS
    before: dict[str, Any] = read_json(path)["suites"] if path.exists() else {}
    for label, setup in setups.items():
        if label in before and before[label]["setup"] != setup:
            then = before[label]["setup"]
            changed = [
                f"{block}.{one}"
                for block in ("likelihood", "texts", "tasks")
                for one in {**then[block], **setup[block]}
                if then[block].get(one) != setup[block].get(one)
            ]
            what = ", ".join(changed) or "the seed or the decoding"
            raise UsageError(
                f"suite {label}: {what} is not what {folder} was started with: its results would be of two things. "
                "Restore the files as they were, give the suite another name, or start a new run"
            )
    new = {label: {"setup": dict(setup), "rows": []} for label, setup in setups.items() if label not in before}
    write_json(path, {"suites": before | new})


def add_result(folder: Path, label: str, counters: Mapping[str, int], result: Mapping[str, Any]) -> None:
    """A row more; those of this step or later ones are of a process that was killed, and are measured again."""
    found = read_json(folder / RESULTS)
    suite = found["suites"][label]
    earlier = [row for row in suite["rows"] if row["step"] < counters["steps"]]
    suite["rows"] = [*earlier, {"step": counters["steps"], "tokens": counters["tokens"], **result}]
    write_json(folder / RESULTS, found)


def _answered(
    suite: Opened,
    model: Transformer,
    tokenizer: Tokenizer,
    judge: Judge,
    eos: Iterable[int],
    look: Callable[[], None],
) -> Evaluation:
    settings, device = suite.spec.eval, model.embed.device
    engine = answering_engine(model, tokenizer, eos, suite.questions, settings, device=device)
    generator = LocalGenerator(engine, drive="caller")
    work = evaluate_tasks(
        generator,
        tokenizer,
        judge,
        suite.questions,
        settings,
        context=engine.context,
        max_new_tokens=settings.max_new_tokens,
        seed=suite.spec.seed,
        workflow=make_workflow(settings.workflow),
        running=ROWS[device.type],
    )
    return pumped(generator, work, look)


SETUP, REPORT = "setup.json", "evaluation.json"


def files_sha256(paths: Iterable[Path]) -> str:
    """One SHA-256 of the contents of files."""
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def settled(folder: Path, now: Mapping[str, Any]) -> dict[str, Any]:
    """Refuse to go on with another model or other questions than a session began with, which is written down then."""
    path = folder / SETUP
    if not path.exists():
        write_json(path, redacted(now))
    before, same = read_json(path), redacted(json.loads(json.dumps(now)))
    for what in ("model", "tasks", "likelihood", "texts"):
        keys = {**before[what], **same[what]}
        changed = [key for key in keys if before[what].get(key) != same[what].get(key)]
        if changed:
            raise UsageError(
                f"{what}: {' and '.join(changed)} is not what {folder} was started with: the score would be of two "
                "things. Restore the files as they were, or start a new run"
            )
    return json.loads(json.dumps(now))


def write_report(
    folder: Path,
    setup: Mapping[str, Any],
    evaluation: Evaluation,
    scores: Mapping[str, LikelihoodOutcome],
    texts: Mapping[str, TextOutcome],
    metrics: Mapping[str, float],
) -> None:
    """evaluation.json: the setup, and beside each task and file what came of it."""
    tasks = {
        label: {**setup["tasks"][label], **{mode: one.plain() for mode, one in modes.items()}}
        for label, modes in evaluation.outcomes.items()
    }
    likelihood = {label: {**setup["likelihood"][label], **one.plain()} for label, one in scores.items()}
    report = {
        "palestra": _version(),
        **setup,
        "tasks": tasks,
        "likelihood": likelihood,
        "texts": {label: {**setup["texts"][label], **one.plain()} for label, one in texts.items()},
        "metrics": dict(metrics),
    }
    write_json(folder / REPORT, redacted(report))


def _version() -> str | None:
    """Of the package that is installed; None where its code is used without."""
    try:
        return version("palestra")
    except PackageNotFoundError:
        return None
