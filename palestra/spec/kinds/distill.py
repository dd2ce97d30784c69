"""The spec of kind `distill`: a language model that learns from what a teacher says of its own answers."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from palestra.spec.base import Conflict
from palestra.spec.kinds.lm import ChatData
from palestra.spec.kinds.posttrain import PosttrainEvery, RolloutSpec, TaskEval
from palestra.spec.lm import ComputeSpec, LanguageModelSpec, Tuning
from palestra.spec.model import Model
from palestra.spec.schedule import warmup_problems
from palestra.spec.tasks import SuiteUse, TasksSpec, suite_conflicts


class TeacherSpec(Model):
    """Whom the student learns from: another model, or itself with more to read."""

    init: str | None = Field(default=None, min_length=1)
    """A run, a checkpoint, a Hugging Face folder, s3://… or a Hub id, with the student's tokenizer; null: itself."""
    prompt: str | None = Field(default=None, min_length=1)
    """What it reads for the prompt (of a conversation the last message), with {prompt} and the row's fields in it."""
    refresh: int | None = Field(default=None, ge=1)
    """A student that teaches itself: take over its weights every so many steps; null keeps those of the start."""

    def reasons(self) -> list[Conflict]:
        """A student cannot teach itself what it knows; another model stays as it is."""
        found = []
        if self.init is None and self.prompt is None:
            found.append(Conflict(("init",), "expected a model, or `prompt` for a student that teaches itself"))
        if self.init is not None and self.refresh is not None:
            found.append(Conflict(("refresh",), "expected null, because `init` names another model than the student"))
        return found


class PolicyLossSpec(Model):
    """Minus the reverse KL at each drawn token as its advantage: needs only the teacher's word on that token."""

    type: Literal["policy"]
    """The loss."""
    limit: float | None = Field(default=5.0, gt=0)
    """Weights of answers by older weights (`rollout.staleness`) are at most this; null sets no limit."""


class _Divergence(Model):
    temperature: float = Field(default=1.0, gt=0)
    """The temperature of both distributions; answers are drawn with that of `rollout`."""


class ForwardKlSpec(_Divergence):
    """KL(teacher ‖ student) over the whole vocabulary: the student covers all that the teacher may say."""

    type: Literal["forward_kl"]
    """The loss."""


class ReverseKlSpec(_Divergence):
    """KL(student ‖ teacher) over the whole vocabulary: the student says only what the teacher may say."""

    type: Literal["reverse_kl"]
    """The loss."""


class JsdSpec(_Divergence):
    """The generalized Jensen–Shannon divergence over the whole vocabulary (Agarwal et al. 2024, arXiv 2306.13649)."""

    type: Literal["jsd"]
    """The loss."""
    beta: float = Field(default=0.5, gt=0, lt=1)
    """The teacher's share in the mixture (β): like the forward KL near 0, like the reverse KL near 1."""


DivergenceSpec = ForwardKlSpec | ReverseKlSpec | JsdSpec
DistillLoss = Annotated[PolicyLossSpec | DivergenceSpec, Field(discriminator="type")]


class DistillTrain(ComputeSpec):
    """How many batches, and of how many prompts."""

    steps: int = Field(ge=1)
    """Batches; each makes one optimizer step and one version of the weights."""
    prompts_per_step: int = Field(default=16, ge=1)
    """Prompts in a batch, each with its group of answers, whoever gave them."""


class DistillSpec(LanguageModelSpec):
    """Distillation: a student answers, a teacher reads it, and the student moves towards what the teacher would say."""

    tuning: ClassVar[Tuning | None] = Tuning(lr=1e-5, lora_lr=1e-4, weight_decay=0.0)  # between sft and posttrain

    kind: Literal["distill"]
    """The kind of experiment."""
    teacher: TeacherSpec
    """Whom it learns from."""
    tasks: TasksSpec
    """What it answers, and what it is evaluated on."""
    rollout: RolloutSpec = RolloutSpec()
    """How answers are made."""
    loss: DistillLoss = JsdSpec(type="jsd")
    """What is made smaller, a mean over tokens."""
    on_policy: float = Field(default=1.0, ge=0, le=1)
    """The share of the prompts that the student answers itself; the rest of a batch are answers from `data`."""
    data: ChatData | None = None
    """Given answers, as conversations; null where the student answers all prompts."""
    train: DistillTrain
    """How long and how to train."""
    eval: TaskEval = TaskEval()
    """How to evaluate."""
    suites: list[SuiteUse] = Field(default=[])
    """What it is measured with during training and after it, besides `tasks.eval`."""
    every: PosttrainEvery = PosttrainEvery()
    """How often to checkpoint, evaluate and log."""

    @property
    def answered(self) -> int:
        """Prompts of a batch that the student answers."""
        return round(self.on_policy * self.train.prompts_per_step)

    @property
    def given(self) -> int:
        """Answers of a batch that come from `data`."""
        return (self.train.prompts_per_step - self.answered) * self.rollout.group

    def conflicts(self) -> list[Conflict]:
        """A student that is not trained, a teacher that is not there, given answers that are missing or not used."""
        found = super().conflicts()
        if self.model.init is None:
            found.append(Conflict(("model", "init"), "expected a trained model to start from"))
        found += [Conflict(("teacher", *path), reason) for path, reason in self.teacher.reasons()]
        found += [Conflict(("tasks", *path), reason) for path, reason in self.tasks.problems()]
        found += [Conflict(("eval", *path), reason) for path, reason in self.eval.reasons()]
        found += suite_conflicts(self.suites, self.counts)
        if self.data is not None:
            found += [Conflict(("data", *path), reason) for path, reason in self.data.problems()]
        found += self._shares()
        return found + [Conflict(("optim", *p), why) for p, why in warmup_problems(self.optim, self.train.steps)]

    def _shares(self) -> list[Conflict]:
        """Whether the share of given answers is one that there is, and that the loss and the teacher can do with."""
        if self.on_policy == 1:
            unused = "expected null, because `on_policy: 1` uses no given answers"
            return [] if self.data is None else [Conflict(("data",), unused)]
        found = []
        if self.data is None:
            found.append(Conflict(("data",), f"expected given answers, because on_policy is {self.on_policy:g}"))
        elif self.data.eval or self.data.holdout:
            found.append(Conflict(("data",), "expected neither `eval` nor `holdout`: evaluation is on tasks"))
        if self.loss.type == "policy":
            found.append(Conflict(("on_policy",), "expected 1, because `policy` learns from the student's own answers"))
        if self.teacher.prompt is not None:
            found.append(Conflict(("on_policy",), "expected 1, because `teacher.prompt` is made of the tasks' rows"))
        if self.on_policy == 0 and self.rollout.replay is not None:
            found.append(Conflict(("rollout", "replay"), "expected null, because `on_policy: 0` takes none of it"))
        if self.on_policy > 0 and self.answered in (0, self.train.prompts_per_step):
            reason = f"expected a share of {self.train.prompts_per_step} prompts that is at least one, and not all"
            found.append(Conflict(("on_policy",), reason))
        return found

    def derived(self) -> dict[str, int | float | str]:
        """Answers and tokens of a step, and of the run."""
        drawn = self.answered * self.rollout.group
        return super().derived() | {
            "answers drawn per step": drawn,
            "answers given per step": self.given,
            "new tokens per step, at most": drawn * self.rollout.max_new_tokens,
            "answers in all": (drawn + self.given) * self.train.steps,
        }
