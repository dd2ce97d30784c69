"""Tasks and evaluation suites in a spec: their args, mixture, rewards and cadence."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, ValidationError

from palestra.errors import UsageError
from palestra.spec.base import Function, Name
from palestra.spec.model import Cadence, Conflict, CountCadence, Model

if TYPE_CHECKING:
    from palestra.spec.kinds.evaluate import EvaluateSpec


class JudgeSpec(Model):
    """A language model that scores completions (LLM as a judge)."""

    model: str = Field(min_length=1)
    """A run, a checkpoint, a folder, or the URL of a server that speaks OpenAI's protocol."""
    prompt: str | None = None
    """Its prompt, with {prompt}, {completion} and the row's fields; null asks for a score from 0 to 1."""
    max_new_tokens: int = Field(default=16, ge=1)
    """Maximum new tokens."""


class RewardSpec(Model):
    """The reward in place of the task's verifier; exactly one of these."""

    function: Function | None = None
    """Your own function, as module:function: `def reward(prompt, completion, **row) -> float | Verdict`."""
    judge: JudgeSpec | None = None
    """A language model."""
    model: str | None = Field(default=None, min_length=1)
    """A trained reward model: a run, a checkpoint or a folder."""

    def conflicts(self) -> Iterator[Conflict]:
        """None or several of the three."""
        given = [name for name in type(self).model_fields if getattr(self, name) is not None]
        if len(given) != 1:
            yield Conflict((), "expected exactly one of function, judge and model")


class TaskUse(Model):
    """A task with its args."""

    task: str = Field(min_length=1)
    """The task: a name such as gsm8k or textarena:Nim-v0 (`palestra tasks` lists them), or your own as module:Class."""
    name: Name | None = None
    """Its name in this run; null: the task's. Two uses of one task need two names."""
    args: dict[str, Any] = Field(default={})
    """Arguments of the task; each task documents its own."""
    split: str = Field(default="test", min_length=1)
    """Split of the task; `train[:1000]` and `train[-500:]` are its first and last rows."""
    reward: RewardSpec | None = None
    """Reward; null: the task's own verifier."""

    @property
    def label(self) -> str:
        """Its name in this run."""
        last = self.task.partition("://")[2] or self.task.rpartition(":")[2]
        return self.name or re.sub(r"[^\w.-]+", "_", last).strip("_")

    def conflicts(self) -> Iterator[Conflict]:
        """Unknown task, args or split."""
        # By name, because tasks build on specs.
        registry = import_module("palestra.tasks.task")
        try:
            task = registry.task_type(self.task)
        except UsageError as error:
            yield Conflict(("task",), str(error))
            return
        try:
            task.Args.model_validate(registry.task_args(self.task, self.args))
        except ValidationError as error:
            known = ", ".join(task.Args.model_fields)
            for problem in error.errors():
                why = problem["msg"][0].lower() + problem["msg"][1:]
                hint = f" (it has {known})" if problem["type"] == "extra_forbidden" else ""
                yield Conflict(("args", *problem["loc"]), why + hint)
        if registry.split_rows(self.split)[0] not in task.splits:
            yield Conflict(("split",), f"expected one of {', '.join(task.splits)}, which {self.task} has")


class TrainTask(TaskUse):
    """A task to train on."""

    split: str = Field(default="train", min_length=1)
    """Split of the task; `train[:-500]` are all rows but the last 500."""
    weight: float = Field(default=1.0, gt=0)
    """Relative weight in the mixture (`mix: weighted`)."""
    count: int | None = Field(default=None, ge=1)
    """Maximum number of prompts, the first of its order; null: all."""
    order: str | None = Field(default=None, min_length=1)
    """File of prompt ids, one per line, local or s3://…: those prompts in this order; null: shuffled."""
    after: list[Name] = Field(default=[])
    """For `mix: lessons`: names of the lessons that must be learned before this one starts."""


class PoolSpec(Model):
    """Sampling of prompts by their solve rate."""

    low: float = Field(default=0.2, ge=0, le=1)
    """Prompts with a lower solve rate are hard."""
    high: float = Field(default=0.8, ge=0, le=1)
    """Prompts with a higher solve rate are easy; those between are preferred."""
    outside: float = Field(default=0.2, ge=0, le=1)
    """Weight of easy and hard prompts relative to those between and to untried ones."""
    drop: float | None = Field(default=1.0, ge=0, le=1)
    """Prompts with at least this solve rate are not sampled again; null: none are dropped."""

    def conflicts(self) -> Iterator[Conflict]:
        if self.low > self.high:
            yield Conflict(("low",), f"expected at most pool.high = {self.high}")


def workflow_conflicts(uses: Sequence[TaskUse], workflow: str) -> Iterator[Conflict]:
    """A workflow that one of the tasks cannot do with."""
    registry = import_module("palestra.tasks.task")
    for use in uses:
        with suppress(UsageError):  # of an unknown task, which is a conflict of its own
            needed = registry.task_type(use.task).workflow
            if needed is not None and workflow not in (needed, "custom", "agent"):
                reason = f"expected name: {needed}, because {use.task} is played and not answered"
                yield Conflict(("rollout", "workflow"), reason)
                return


class TasksSpec(Model):
    """Tasks to train on and to evaluate on."""

    train: list[TrainTask] = Field(min_length=1)
    """The tasks to train on."""
    eval: list[TaskUse] = Field(default=[])
    """The tasks to evaluate on."""
    mix: Literal["weighted", "sequential", "lessons"] = "weighted"
    """Mixed by weight; one task after the other; or a curriculum of lessons that unlock each other (`after`)."""
    pool: PoolSpec | None = None
    """Sample prompts by solve rate; null: every prompt once per epoch."""

    def conflicts(self) -> Iterator[Conflict]:
        """Problems of each task, duplicate names, unknown lessons."""
        for where, uses in (("train", self.train), ("eval", self.eval)):
            seen: set[str] = set()
            for place, use in enumerate(uses):
                if use.label in seen:
                    yield Conflict((where, place, "name"), f"expected another name: two tasks are called '{use.label}'")
                seen.add(use.label)
        labels = {use.label for use in self.train}
        for place, use in enumerate(self.train):
            for other in use.after:
                if other not in labels or other == use.label:
                    reason = f"expected the name of another task of this list, got '{other}'"
                    yield Conflict(("train", place, "after"), reason)
            if use.after and self.mix != "lessons":
                yield Conflict(("train", place, "after"), "expected none, because `mix` is not lessons")
            if self.pool is not None and use.order is not None:
                yield Conflict(("train", place, "order"), "expected null, because `pool` chooses the prompts")


EVERY = Cadence(500, "steps")
"""Default cadence of a suite during training."""
CENTRED = "centred"
"""Name of the mean of a suite's centered accuracies, beside its tasks."""

_ANSWER = "\nAnswer: "


def _core(file: str, **settings: Any) -> dict[str, Any]:
    return {"path": f"core_eval/{file}.jsonl", "border": "common", **settings}


_MMLU = {
    "doc_to_text": "The following are multiple choice questions (with answers) about {{subject|replace('_', ' ')}}.\n\n"
    "{{question | trim}}\n{% for text in choices %}{{'ABCD'[loop.index0]}}. {{text}}\n{% endfor %}Answer:",
    "doc_to_choice": ["A", "B", "C", "D"],
    "doc_to_target": "answer",
}
"""The prompt of lm-eval's tasks mmlu_…, without shots."""
SUITES: dict[str, dict[str, Any]] = {
    # Files of llm-foundry's evaluation suite, with the shots and delimiters of CORE (Li et al. 2024, arXiv 2406.11794).
    "core": {
        "likelihood": [
            _core("arc_easy", shots=10, delimiter=_ANSWER),
            _core("arc_challenge", shots=10, delimiter=_ANSWER),
            _core("boolq", shots=10, delimiter=_ANSWER, baseline=0.62),  # six in ten answers are yes
            _core("piqa", shots=10, delimiter=_ANSWER),
            _core("commonsense_qa", shots=10),
            _core("copa"),
            _core("openbook_qa"),
            _core("winograd_wsc"),
            _core("winogrande"),
            _core("lambada_openai"),
            _core("bigbench_operators", shots=10),
            _core("bigbench_dyck_languages", shots=10),
            _core("bigbench_repeat_copy_logic", shots=10),
        ]
    },
    # Not in `core`, so that its mean does not depend on which files are there.
    "hellaswag": {"likelihood": [{"path": "hellaswag.jsonl", "border": "lm_eval", "by": "character"}]},
    "mmlu": {"likelihood": [{"path": "mmlu.jsonl", "border": "lm_eval", "by": "sum", **_MMLU}]},
}
"""Built-in suites: blocks of a spec of kind `evaluate`."""


class SuiteUse(Model):
    """An evaluation suite, run during or after training.

    It does not affect training: the weights are copied, and sampling uses the suite's own seed.
    """

    suite: str = Field(min_length=1)
    """File with a spec of kind `evaluate` (its `model`, `dtype` and `device` are ignored), or `core`."""
    name: Name | None = None
    """Its name in metrics and results.json; null: the file's stem."""
    mode: Literal["during", "after", "both"] = "both"
    """Evaluate periodically during training, once after it, or both."""
    every: CountCadence | None = None
    """Cadence during training; null: every 500 steps."""
    limit: int | None = Field(default=None, ge=1)
    """Maximum rows, documents and problems per task, the first ones; null: the suite's."""

    @property
    def label(self) -> str:
        """Its name in this run."""
        last = self.suite.rpartition("/")[2]
        file, _, chosen = last.partition(":")
        return self.name or chosen or re.sub(r"\.(ya?ml|json)$", "", file)

    @property
    def cadence(self) -> Cadence | None:
        """Cadence during training; None if it only runs after it."""
        return None if self.mode == "after" else self.every or EVERY


def suite_conflicts(uses: Sequence[SuiteUse], counts: Sequence[str]) -> Iterator[Conflict]:
    """Unknown or duplicate names, cadences that never fire, units this kind does not count."""
    labels = Counter(use.label for use in uses)
    for place, use in enumerate(uses):
        at = ("suites", place)
        if use.suite not in SUITES and not re.search(r"\.(ya?ml|json)(:[^/]*)?$", use.suite):
            known = ", ".join(SUITES)
            yield Conflict((*at, "suite"), f"expected a file of kind evaluate such as mine.yaml, or {known}")
        if use.mode == "after" and use.every is not None:
            yield Conflict((*at, "every"), "expected null, because `mode: after` evaluates once")
        if use.cadence is not None and use.cadence.unit not in counts:
            reason = f"expected {' or '.join(counts)}, which this kind counts; got '{use.cadence}'"
            yield Conflict((*at, "every"), reason)
        if labels[use.label] > 1:
            yield Conflict((*at, "name"), f"expected another name: {labels[use.label]} suites are called '{use.label}'")


def suite_spec(use: SuiteUse) -> "EvaluateSpec":
    """The spec of a suite with its limit applied; a file is read now."""
    # Here, because specs of kinds build on this module.
    from palestra.spec.kinds.evaluate import EvaluatedModel, EvaluateSpec
    from palestra.spec.load import load, resolved

    if use.suite in SUITES:
        spec = resolved({"kind": "evaluate", "name": use.suite, "model": {"init": use.suite}, **SUITES[use.suite]})
    else:
        spec = load(use.suite).spec
    if not isinstance(spec, EvaluateSpec):
        raise UsageError(f"the suite {use.suite} is a spec of kind {spec.kind}, expected one of kind evaluate")
    if spec.lm_eval:
        raise UsageError(f"the suite {use.suite} has tasks of lm-eval, which evaluate a finished model: palestra eval")
    tasks = [use.label for use in (*spec.tasks, *spec.likelihood, *spec.texts)]
    if CENTRED in tasks:
        raise UsageError(f"the suite {use.suite} has a task called '{CENTRED}', which is the mean over its tasks")
    # The weights come from the run.
    spec = spec.model_copy(update={"model": EvaluatedModel(init="the model that is trained")})
    if use.limit is None:
        return spec
    most = use.limit
    return spec.model_copy(
        update={
            "likelihood": [_limited(part, "items", most) for part in spec.likelihood],
            "texts": [_limited(part, "items", most) for part in spec.texts],
            "eval": _limited(spec.eval, "problems", most),
        }
    )


def _limited(model: Any, field: str, most: int) -> Any:
    return model.model_copy(update={field: min(most, getattr(model, field) or most)})
