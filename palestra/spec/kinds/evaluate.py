"""The spec of kind `evaluate`: accuracy of sampled completions and likelihood of given ones."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field

from palestra.errors import UsageError
from palestra.spec.base import Every, ExperimentSpec, Name
from palestra.spec.generator import GeneratorSpec
from palestra.spec.kinds.posttrain import SingleTurnSpec, TaskEval, WorkflowSpec
from palestra.spec.mixture import TextSource
from palestra.spec.model import Conflict, Execution, Model
from palestra.spec.shape import described
from palestra.spec.tasks import TaskUse


class EvaluatedModel(Model):
    """A trained model and its chat template."""

    init: str = Field(min_length=1)
    """A run, a checkpoint, a Hugging Face folder, s3://… or a Hub id."""
    chat_template: str | None = None
    """Jinja chat template in place of the tokenizer's own; null keeps it."""


class LikelihoodUse(Model):
    """Rows with given answers, scored by how likely the model finds these after their question.

    Without the `doc_to_…` fields a row has `query`, `choices` and `gold`; `context_options`, `continuation` and
    `gold`; or `context` and `continuation`, which the model must write itself, token by token, to be right.
    """

    path: str = Field(min_length=1)
    """A file of rows (JSONL, JSON, Parquet, Arrow), also under PALESTRA_DATA, at s3://… or on the Hub."""
    name: Name | None = None
    """Name in this run; null: the file's stem."""
    items: int | None = Field(default=None, ge=1)
    """Maximum rows, the first ones; null: all."""
    shots: int = Field(default=0, ge=0)
    """Few-shot examples before each question."""
    delimiter: str = " "
    """Text between question and answer."""
    by: Literal["sum", "token", "byte", "character"] = "token"
    """Score of a choice: its log-probability, or the mean over its tokens, bytes or characters."""
    border: Literal["answer", "common", "lm_eval"] = "answer"
    """Scored tokens: the choice's; as in CORE, from the first that differs between choices; or as in lm-eval."""
    bos: bool | None = None
    """Whether BOS stands before each text; null: as the tokenizer says."""
    baseline: float | None = Field(default=None, ge=0, lt=1)
    """Accuracy of random guessing, for the centered accuracy; null: 1 / number of choices, 0 without choices."""
    doc_to_text: str | None = Field(default=None, min_length=1)
    """As in lm-eval: the column with the question, or a Jinja template of a row."""
    doc_to_choice: str | list[str] | None = None
    """As in lm-eval: the column with the choices, a template that gives a list, or a list of templates."""
    doc_to_target: str | None = Field(default=None, min_length=1)
    """As in lm-eval: the column, or a template, with the right choice or its number, or the text to be written."""

    @property
    def label(self) -> str:
        """Name in this run."""
        return self.name or self.path.rstrip("/").rpartition("/")[2].partition(".")[0]

    def conflicts(self) -> Iterator[Conflict]:
        """Incomplete templates."""
        if self.doc_to_text is None and (self.doc_to_choice is not None or self.doc_to_target is not None):
            yield Conflict(("doc_to_text",), "expected one, because another `doc_to_…` is given")
        if self.doc_to_text is not None and self.doc_to_target is None:
            yield Conflict(("doc_to_target",), "expected one, because `doc_to_text` is given")


class TextUse(TextSource):
    """Texts scored in bits per byte; a relative path may be under PALESTRA_DATA."""

    name: Name | None = None
    """Name in this run; null: the file's stem."""
    items: int | None = Field(default=None, ge=1)
    """Maximum documents, the first ones; null: all."""

    @property
    def label(self) -> str:
        """Name in this run."""
        return self.name or self.path.rstrip("/").rpartition("/")[2].partition(".")[0]


LM_EVAL = "lm_eval:"
"""What a task of lm-eval begins with where tasks are given by name."""


class LmEvalUse(Model):
    """A task, group or tag of lm-eval, scored by its own filters and metrics (extra `lm-eval`)."""

    task: str = Field(min_length=1)
    """Its name in lm-eval, such as arc_easy."""
    tasks: str | None = Field(default=None, min_length=1)
    """A folder with YAML files of tasks, or one of these; null: lm-eval's own."""
    shots: int | None = Field(default=None, ge=0)
    """Few-shot examples; null: as the task says."""
    chat: bool = False
    """Ask in a conversation, with the chat template."""
    bos: bool | None = None
    """Whether BOS stands before each text; null: as the tokenizer says."""
    unsafe_code: bool = False
    """Let lm-eval run code of the model in this process, without a sandbox, where a task does so."""

    @property
    def label(self) -> str:
        """Name in this run."""
        return self.task


class AnswerEval(TaskEval):
    """Evaluation on tasks."""

    problems: int = Field(default=1_000_000, ge=1)
    """Maximum problems per task, the first of its split; the default covers every finite split."""
    max_new_tokens: int = Field(default=512, ge=1)
    """Maximum new tokens; truncated completions are counted."""
    workflow: WorkflowSpec = SingleTurnSpec(name="single_turn")
    """From a prompt to a verdict."""
    verifiers: Execution[int | None] = Field(default=None, ge=1)
    """Worker processes for verifiers that may hang; null: one per core, at most 16."""


class TokenPrice(Model):
    """What a million tokens cost."""

    prompt: float = Field(ge=0)
    """Of prompts."""
    completion: float = Field(ge=0)
    """Of completions."""


class EvaluateSpec(ExperimentSpec):
    """Evaluation of a language model."""

    counts: ClassVar[tuple[str, ...]] = ("steps",)

    kind: Literal["evaluate"]
    """Kind of experiment."""
    model: EvaluatedModel
    """Model to evaluate."""
    tasks: list[TaskUse] = Field(default=[])
    """Tasks, evaluated by sampled completions."""
    eval: AnswerEval = AnswerEval()
    """Evaluation on tasks."""
    likelihood: list[LikelihoodUse] = Field(default=[])
    """Multiple-choice and cloze rows, evaluated by likelihood."""
    texts: list[TextUse] = Field(default=[])
    """Texts, evaluated in bits per byte."""
    lm_eval: list[LmEvalUse] = Field(default=[])
    """Tasks of lm-eval."""
    dtype: Literal["auto", "bf16", "fp32", "fp16"] = "auto"
    """Precision of weights and compute; auto: what the device computes fast."""
    generator: GeneratorSpec | None = None
    """Servers that complete the tasks with what they serve; prompts are of `model`'s tokenizer. Null: this process."""
    price: Execution[TokenPrice | None] = None
    """What the servers' tokens cost, for the cost of the evaluation; null: none is given."""

    def conflicts(self) -> Iterator[Conflict]:
        """Nothing to evaluate, duplicate names, conflicting settings."""
        named = {"tasks": self.tasks, "likelihood": self.likelihood, "texts": self.texts, "lm_eval": self.lm_eval}
        if not any(named.values()):
            yield Conflict(("tasks",), "expected a task, or rows in `likelihood`, or `texts`, or `lm_eval`")
        labels = Counter(use.label for uses in named.values() for use in uses)
        for where, uses in named.items():
            for place, use in enumerate(uses):
                if labels[use.label] > 1:
                    reason = f"expected another name: {labels[use.label]} of them are called '{use.label}'"
                    yield Conflict((where, place, "name"), reason)
        if self.generator is not None and not self.tasks:
            yield Conflict(("generator",), "expected null, because there are no tasks to complete")
        if self.generator is not None and self.lm_eval:
            yield Conflict(("lm_eval",), "expected none, because `generator` completes the tasks elsewhere")
        if self.generator is None and self.price is not None:
            yield Conflict(("price",), "expected null, because no `generator` is paid")
        if self.every != Every():
            reason = "expected nothing: completions are saved at once, and there is one row of metrics"
            yield Conflict(("every",), reason)

    def derived(self) -> dict[str, int | float | str]:
        """Compute precision."""
        return {"precision": described(self.dtype, self.device)}


def evaluation(
    model: str | Path,
    *,
    tasks: Sequence[str | Mapping[str, Any]] = (),
    likelihood: Sequence[str | Mapping[str, Any]] = (),
    split: str | None = None,
    args: Mapping[str, Any] | None = None,
    name: str | None = None,
    seed: int = 0,
    dtype: str = "auto",
    device: str = "auto",
    server: str | None = None,
    served_model: str | None = None,
    api_key_env: str | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """The spec of an evaluation as plain data.

    Args:
        model: A run, a checkpoint, a Hugging Face folder, s3://… or a Hub id.
        tasks: Names of tasks, those of lm-eval as `lm_eval:<name>`, or uses of tasks as a spec has them.
        likelihood: Files of rows with given answers, or uses of them as a spec has them.
        split: Of the tasks that are given by name, but for lm-eval's; null takes their default.
        args: For the tasks that are given by name.
        name: The folder under runs/; by default `eval_` and the last part of the model's name.
        seed: Seed of sampling.
        dtype: fp32, bf16 or fp16; auto is what the device computes fast.
        device: cpu or cuda; auto takes the GPU where there is one.
        server: The URL of a server of OpenAI's protocol that completes the tasks; null: this process.
        served_model: The model's name there; null: the only one.
        api_key_env: The environment variable with the server's key; null: none.
        settings: Those of `eval`, such as `problems=200, samples=8, k=[1, 8]`; null leaves the default, which for k is
            1 and all of the samples.
    """
    uses = [use for use in tasks if not isinstance(use, str) or not use.startswith(LM_EVAL)]
    lm_eval = [use.removeprefix(LM_EVAL) for use in tasks if isinstance(use, str) and use.startswith(LM_EVAL)]
    named = {"args": dict(args or {}), **({} if split is None else {"split": split})}
    chosen = {key: value for key, value in settings.items() if value is not None}
    if chosen.get("samples"):
        chosen.setdefault("k", sorted({1, chosen["samples"]}))
    about = {"model": served_model, "api_key_env": api_key_env}
    if server is None and (given := [key for key, value in about.items() if value is not None]):
        raise UsageError(f"{' and '.join(given)}: of a server, whose URL is missing")
    elsewhere = {} if server is None else {"engine": "openai", "url": server.rstrip("/").removesuffix("/v1"), **about}
    return {
        "kind": "evaluate",
        "name": name or "eval_" + (re.sub(r"[^A-Za-z0-9._-]+", "_", Path(model).name) or "model"),
        "seed": seed,
        "model": {"init": str(model)},
        "tasks": [{"task": use, **named} if isinstance(use, str) else dict(use) for use in uses],
        "likelihood": [{"path": use} if isinstance(use, str) else dict(use) for use in likelihood],
        "lm_eval": [{"task": task, **(args or {})} for task in lm_eval],
        "eval": chosen,
        "dtype": dtype,
        "device": device,
        **({"generator": elsewhere} if elsewhere else {}),
    }
