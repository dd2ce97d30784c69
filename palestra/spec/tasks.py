"""Tasks and suites in a spec: which, with what args, how mixed, what verifies, and evaluations beside training."""

import re
from collections import Counter
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, ValidationError

from palestra.errors import UsageError
from palestra.spec.base import Conflict, Function, Name
from palestra.spec.model import Cadence, CountCadence, Model

if TYPE_CHECKING:
    from palestra.spec.kinds.evaluate import EvaluateSpec


class JudgeSpec(Model):
    """A language model that judges answers."""

    model: str = Field(min_length=1)
    """A run, a checkpoint, a folder, or the URL of a server that speaks OpenAI's protocol."""
    prompt: str | None = None
    """What it is asked, with {prompt}, {completion} and the row's fields; null asks for a score from 0 to 1."""
    max_new_tokens: int = Field(default=16, ge=1)
    """The most it writes."""


class RewardSpec(Model):
    """What judges answers in place of the task; exactly one of these."""

    function: Function | None = None
    """Your own function, as module:function: `def reward(prompt, completion, **row) -> float | Verdict`."""
    judge: JudgeSpec | None = None
    """A language model."""
    model: str | None = Field(default=None, min_length=1)
    """A trained reward model: a run, a checkpoint or a folder."""

    def problems(self) -> list[Conflict]:
        """Whether it is exactly one."""
        given = [name for name in type(self).model_fields if getattr(self, name) is not None]
        if len(given) != 1:
            return [Conflict((), "expected exactly one of function, judge and model")]
        return []


class TaskUse(Model):
    """A task with its args."""

    task: str = Field(min_length=1)
    """The task: a name such as gsm8k, or your own as module:Class."""
    name: Name | None = None
    """What it is called in this run; null takes the task's name. Two uses of a task need two names."""
    args: dict[str, Any] = Field(default={})
    """What the task is told; each task documents its own."""
    split: str = Field(default="test", min_length=1)
    """Which of its splits."""
    reward: RewardSpec | None = None
    """What judges answers; null means the task itself."""

    @property
    def label(self) -> str:
        """What it is called in this run."""
        return self.name or self.task.rpartition(":")[2]

    def problems(self) -> list[Conflict]:
        """A task that is not there, args that it does not take, a split that it has not."""
        found = [] if self.reward is None else [Conflict(("reward", *p), why) for p, why in self.reward.problems()]
        # By name, because tasks build on specs.
        registry = import_module("palestra.tasks.task")
        try:
            task = registry.task_type(self.task)
        except UsageError as error:
            return [*found, Conflict(("task",), str(error))]
        try:
            task.Args.model_validate(self.args)
        except ValidationError as error:
            known = ", ".join(task.Args.model_fields)
            for problem in error.errors():
                why = problem["msg"][0].lower() + problem["msg"][1:]
                hint = f" (it has {known})" if problem["type"] == "extra_forbidden" else ""
                found.append(Conflict(("args", *problem["loc"]), why + hint))
            return found
        if self.split not in task.splits:
            found.append(Conflict(("split",), f"expected one of {', '.join(task.splits)}, which {self.task} has"))
        return found


class TrainTask(TaskUse):
    """A task to train on."""

    split: str = Field(default="train", min_length=1)
    """Which of its splits."""
    weight: float = Field(default=1.0, gt=0)
    """Its share of the prompts, relative to the others, where they are mixed by weight."""
    count: int | None = Field(default=None, ge=1)
    """How many of its prompts at most, from the first of its order; null means all."""
    order: str | None = Field(default=None, min_length=1)
    """A file of prompt ids, one a line, local or s3://…: those prompts in this order; null draws them at random."""
    after: list[Name] = Field(default=[])
    """For `mix: lessons`: names of the lessons that must be learned before this one begins."""


class PoolSpec(Model):
    """Prompts drawn by how often they are solved."""

    low: float = Field(default=0.2, ge=0, le=1)
    """Prompts solved less often than this are hard."""
    high: float = Field(default=0.8, ge=0, le=1)
    """Prompts solved more often than this are easy; those between are favored."""
    outside: float = Field(default=0.2, ge=0, le=1)
    """The weight of easy and hard prompts, relative to those between and to those not tried yet."""
    drop: float | None = Field(default=1.0, ge=0, le=1)
    """Prompts solved at least this often are not drawn again; null drops none."""


class TasksSpec(Model):
    """What to train on and what to evaluate on."""

    train: list[TrainTask] = Field(min_length=1)
    """The tasks to train on."""
    eval: list[TaskUse] = Field(default=[])
    """The tasks to evaluate on."""
    mix: Literal["weighted", "sequential", "lessons"] = "weighted"
    """By weight; one task after the other; or lessons that unlock each other (`after`) as they are learned."""
    pool: PoolSpec | None = None
    """Draw prompts by how often they are solved; null draws all of them once an epoch."""

    def problems(self) -> list[Conflict]:
        """What each has, names used twice, lessons that are not there."""
        found = []
        for where, uses in (("train", self.train), ("eval", self.eval)):
            seen: set[str] = set()
            for place, use in enumerate(uses):
                found += [Conflict((where, place, *path), reason) for path, reason in use.problems()]
                if use.label in seen:
                    reason = f"expected another name: two tasks are called '{use.label}'"
                    found.append(Conflict((where, place, "name"), reason))
                seen.add(use.label)
        labels = {use.label for use in self.train}
        for place, use in enumerate(self.train):
            for other in use.after:
                if other not in labels or other == use.label:
                    reason = f"expected the name of another task of this list, got '{other}'"
                    found.append(Conflict(("train", place, "after"), reason))
            if use.after and self.mix != "lessons":
                found.append(Conflict(("train", place, "after"), "expected none, because `mix` is not lessons"))
            if self.pool is not None and use.order is not None:
                found.append(Conflict(("train", place, "order"), "expected null, because `pool` chooses the prompts"))
        if self.pool is not None and self.pool.low > self.pool.high:
            found.append(Conflict(("pool", "low"), f"expected at most pool.high = {self.pool.high}"))
        return found


EVERY = Cadence(500, "steps")
"""When a suite runs during training unless its spec says otherwise."""
CENTRED = "centred"
"""The mean of a suite's centred accuracies stands under this name among its tasks."""

_ANSWER = "\nAnswer: "


def _core(file: str, **settings: Any) -> dict[str, Any]:
    return {"path": f"core_eval/{file}.jsonl", "border": "common", **settings}


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
}
"""What a suite of a name consists of: blocks of a spec of kind `evaluate`."""


class SuiteUse(Model):
    """A suite that a model is measured with during its training or after it.

    It never changes what is trained: the weights are copied, and what is drawn comes from the suite's own seed.
    """

    suite: str = Field(min_length=1)
    """A file with a spec of kind `evaluate`, whose `model`, `dtype` and `device` do not count here; or `core`."""
    name: Name | None = None
    """What it is called in metrics and results.json; null takes the file's stem."""
    mode: Literal["during", "after", "both"] = "both"
    """Measure every so often, the weights of the last step, or both."""
    every: CountCadence | None = None
    """How often during training; null is every 500 steps."""
    limit: int | None = Field(default=None, ge=1)
    """Rows, documents and problems of each of its tasks at most, from the first; null takes those of the suite."""

    @property
    def label(self) -> str:
        """What it is called in this run."""
        last = self.suite.rpartition("/")[2]
        file, _, chosen = last.partition(":")
        return self.name or chosen or re.sub(r"\.(ya?ml|json)$", "", file)

    @property
    def cadence(self) -> Cadence | None:
        """How often during training; None where it is not measured then."""
        return None if self.mode == "after" else self.every or EVERY


def suite_conflicts(uses: Sequence[SuiteUse], counts: Sequence[str]) -> list[Conflict]:
    """Names that nobody knows, one for two, cadences that do nothing or in units that the kind does not count."""
    found, labels = [], Counter(use.label for use in uses)
    for place, use in enumerate(uses):
        at = ("suites", place)
        if use.suite not in SUITES and not re.search(r"\.(ya?ml|json)(:[^/]*)?$", use.suite):
            known = ", ".join(SUITES)
            found.append(Conflict((*at, "suite"), f"expected a file of kind evaluate such as mine.yaml, or {known}"))
        if use.mode == "after" and use.every is not None:
            found.append(Conflict((*at, "every"), "expected null, because `mode: after` measures once"))
        if use.cadence is not None and use.cadence.unit not in counts:
            reason = f"expected {' or '.join(counts)}, which this kind counts; got '{use.cadence}'"
            found.append(Conflict((*at, "every"), reason))
        if labels[use.label] > 1:
            reason = f"expected another name: {labels[use.label]} suites are called '{use.label}'"
            found.append(Conflict((*at, "name"), reason))
    return found


def suite_spec(use: SuiteUse) -> "EvaluateSpec":
    """What a suite consists of, with its limit; a file is read now."""
    # Here, because specs of kinds build on this module.
    from palestra.spec.kinds.evaluate import EvaluatedModel, EvaluateSpec
    from palestra.spec.load import load, resolved

    if use.suite in SUITES:
        spec = resolved({"kind": "evaluate", "name": use.suite, "model": {"init": use.suite}, **SUITES[use.suite]})
    else:
        spec = load(use.suite).spec
    if not isinstance(spec, EvaluateSpec):
        raise UsageError(f"the suite {use.suite} is a spec of kind {spec.kind}, expected one of kind evaluate")
    tasks = [one.label for one in (*spec.tasks, *spec.likelihood, *spec.texts)]
    if CENTRED in tasks:
        raise UsageError(f"the suite {use.suite} has a task called '{CENTRED}', which is the mean over its tasks")
    # Whose weights it is about is the run's to say.
    spec = spec.model_copy(update={"model": EvaluatedModel(init="the model that is trained")})
    if use.limit is None:
        return spec
    most = use.limit
    return spec.model_copy(
        update={
            "likelihood": [_limited(one, "items", most) for one in spec.likelihood],
            "texts": [_limited(one, "items", most) for one in spec.texts],
            "eval": _limited(spec.eval, "problems", most),
        }
    )


def _limited(model: Any, field: str, most: int) -> Any:
    return model.model_copy(update={field: min(most, getattr(model, field) or most)})
