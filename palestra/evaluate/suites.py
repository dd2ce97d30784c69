"""Suites: evaluations during training with one copy of the weights, their setup and their results."""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from statistics import fmean
from typing import Any

from palestra.data.cache import file_sha256
from palestra.data.tokenizers import Tokenizer
from palestra.errors import UsageError
from palestra.evaluate import likelihood
from palestra.evaluate.completions import EvalTask, Evaluation, ask, evaluate_model
from palestra.evaluate.likelihood import LikelihoodOutcome, TextOutcome, likelihood_outcome, naming, text_outcome
from palestra.evaluate.likelihood_data import Choices, Texts, load_choices, load_texts
from palestra.lm.model import Transformer
from palestra.rollout.episode import Verify
from palestra.runs.run import RESULTS
from palestra.runs.store import read_json, write_json
from palestra.spec.kinds.evaluate import EvaluateSpec
from palestra.spec.tasks import CENTRED
from palestra.tasks.task import Task
from palestra.work.redact import redacted


@dataclass(frozen=True)
class Suite:
    """A suite with its rows read and its problems tokenized."""

    label: str
    spec: EvaluateSpec
    choices: tuple[Choices, ...]
    texts: tuple[Texts, ...]
    questions: tuple[EvalTask, ...]

    def identity(self, tokenizer: Tokenizer) -> dict[str, Any]:
        """What makes two results comparable; plain data."""
        decoding = self.spec.eval.model_dump(mode="json", exclude={"problems", "verifiers"})
        setup = {
            "seed": self.spec.seed,
            "decoding": decoding if self.questions else None,
            "likelihood": {choices.label: choices.identity() for choices in self.choices},
            "texts": {texts.label: texts.identity() for texts in self.texts},
            "tasks": {questions.label: questions.identity(tokenizer) for questions in self.questions},
        }
        return json.loads(json.dumps(setup))


def open_suite(label: str, spec: EvaluateSpec, tasks: Mapping[str, Task], tokenizer: Tokenizer) -> Suite:
    """Read the data of a suite; `tasks` are by label, as `Verifiers` has them.

    Few-shot examples are sampled by the suite's seed, not by the run's: every model gets the same prompts.
    """
    with naming(f"suite {label}"):
        return Suite(
            label,
            spec,
            tuple(load_choices(use, spec.seed) for use in spec.likelihood),
            tuple(load_texts(use) for use in spec.texts),
            tuple(ask(spec.tasks, tasks, tokenizer, spec.eval.problems)),
        )


def check_suite(suite: Suite, tokenizer: Tokenizer, context: int) -> None:
    """Refuse before training what could not be scored in the middle of it.

    That is text which the tokenizer does not know, and answers that do not fit in the model's context.
    """
    for choices in suite.choices:
        # All rows, because any may be a few-shot example; without shots, because what these add is in the first item.
        bare = load_choices(choices.use.model_copy(update={"shots": 0, "items": None}), suite.spec.seed)
        for number, item in enumerate((choices.items[0], *bare.items)):
            with naming(f"suite {suite.label}: {choices.label}, row {max(1, number)}"):
                likelihood.encode_item(tokenizer, item, context, choices.use.border, choices.use.bos)
    for texts in suite.texts:
        for number, document in enumerate(texts.items, 1):
            with naming(f"suite {suite.label}: {texts.label}, document {number}"):
                likelihood.windows(tokenizer, document, context)


def measure(
    suite: Suite,
    model: Transformer,
    tokenizer: Tokenizer,
    judge: Verify,
    *,
    eos: Iterable[int],
    look: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """All results of a suite with fixed weights, as plain data: `tasks`, and the mean of their centred values.

    Each task has its `value` (accuracy; of texts, bits per byte), its `type`, and the details. `look` is called now and
    then and may raise to end it.
    """
    tasks: dict[str, Any] = {}
    for choices in suite.choices:
        scored = likelihood_outcome(choices, likelihood.score_set(model, tokenizer, choices, keep=lambda _: look()))
        tasks[choices.label] = {"type": "likelihood", "value": scored.accuracy.mean, **asdict(scored)}
    for texts in suite.texts:
        of_texts = text_outcome(texts, likelihood.score_set(model, tokenizer, texts, keep=lambda _: look()))
        tasks[texts.label] = {"type": "texts", "value": of_texts.bits_per_byte, **asdict(of_texts)}
    if suite.questions:
        settings, device = suite.spec.eval, model.embed.device
        evaluation = evaluate_model(
            model, tokenizer, eos, judge, suite.questions, settings, device=device, seed=suite.spec.seed, look=look
        )
        for label, modes in evaluation.outcomes.items():
            accuracy = modes[next(iter(modes))].accuracy.mean  # greedy, else sampled
            plain = {mode: outcome.plain() for mode, outcome in modes.items()}
            tasks[label] = {"type": "task", "value": accuracy, CENTRED: accuracy, **plain}
    centred = [task[CENTRED] for task in tasks.values() if CENTRED in task]
    return json.loads(json.dumps({"tasks": tasks, **({CENTRED: fmean(centred)} if centred else {})}))


def suite_metrics(label: str, result: Mapping[str, Any]) -> dict[str, float]:
    """`suite/<name>/<task>`, and their mean `suite/<name>/centred`."""
    named = {task: float(details["value"]) for task, details in result["tasks"].items()}
    named |= {CENTRED: float(result[CENTRED])} if CENTRED in result else {}
    return {f"suite/{label}/{task}": value for task, value in named.items()}


def _changed(before: Mapping[str, Any], now: Mapping[str, Any], blocks: Sequence[str]) -> list[str]:
    """What differs between two setups, as `block.name`."""
    return [
        f"{block}.{name}"
        for block in blocks
        for name in {**before[block], **now[block]}
        if before[block].get(name) != now[block].get(name)
    ]


def begin_results(folder: Path, setups: Mapping[str, Mapping[str, Any]]) -> None:
    """Write the setups of a session's suites, or refuse others than it began with."""
    if not setups:
        return
    path = folder / RESULTS
    before: dict[str, Any] = read_json(path)["suites"] if path.exists() else {}
    for label, setup in setups.items():
        if label in before and before[label]["setup"] != setup:
            changed = _changed(before[label]["setup"], setup, ("likelihood", "texts", "tasks"))
            raise UsageError(
                f"suite {label}: {', '.join(changed) or 'the seed or the decoding'} is not what {folder} was started "
                "with, so its results would not be comparable. Restore the files as they were, give the suite another "
                "name, or start a new run"
            )
    new = {label: {"setup": dict(setup), "rows": []} for label, setup in setups.items() if label not in before}
    write_json(path, {"suites": before | new})


def add_result(folder: Path, label: str, counters: Mapping[str, int], result: Mapping[str, Any]) -> None:
    """Add a row; those of this step or later are of a process that was killed, and are measured again."""
    results = read_json(folder / RESULTS)
    suite = results["suites"][label]
    earlier = [row for row in suite["rows"] if row["step"] < counters["steps"]]
    suite["rows"] = [*earlier, {"step": counters["steps"], "tokens": counters["tokens"], **result}]
    write_json(folder / RESULTS, results)


SETUP, REPORT = "setup.json", "evaluation.json"


def files_sha256(paths: Iterable[Path]) -> str:
    """One SHA-256 of the contents of files."""
    return hashlib.sha256(b"".join(bytes.fromhex(file_sha256(path)) for path in paths)).hexdigest()


def check_setup(folder: Path, now: Mapping[str, Any]) -> dict[str, Any]:
    """Write the setup of a new session; refuse another model or other questions in one that is resumed."""
    path = folder / SETUP
    if not path.exists():
        write_json(path, redacted(now))
    plain = json.loads(json.dumps(now))
    if changed := _changed(read_json(path), redacted(plain), ("model", "tasks", "likelihood", "texts")):
        raise UsageError(
            f"{' and '.join(changed)} is not what {folder} was started with, so the score would mix two setups. "
            "Restore the files as they were, or start a new run"
        )
    return plain


def write_report(
    folder: Path,
    setup: Mapping[str, Any],
    evaluation: Evaluation,
    scores: Mapping[str, LikelihoodOutcome],
    texts: Mapping[str, TextOutcome],
    metrics: Mapping[str, float],
) -> None:
    """evaluation.json: the setup, with the results of each task and file."""
    tasks = {label: {mode: one.plain() for mode, one in modes.items()} for label, modes in evaluation.outcomes.items()}
    results: dict[str, Mapping[str, Mapping[Any, Any]]] = {
        "tasks": tasks,
        "likelihood": {label: asdict(outcome) for label, outcome in scores.items()},
        "texts": {label: asdict(outcome) for label, outcome in texts.items()},
    }
    joined = {
        block: {label: {**setup[block][label], **outcome} for label, outcome in of_block.items()}
        for block, of_block in results.items()
    }
    release = import_module("palestra").__version__  # by name: the package's root names the API, which is above
    write_json(folder / REPORT, redacted({"palestra": release, **setup, **joined, "metrics": dict(metrics)}))
