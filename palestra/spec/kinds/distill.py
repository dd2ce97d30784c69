"""The spec of kind `distill`: a student language model trained on its own completions to match a teacher."""

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from palestra.spec.kinds.lm import ChatData
from palestra.spec.kinds.posttrain import PosttrainEvery, RolloutSpec, TaskEval
from palestra.spec.lm import ComputeSpec, LanguageModelSpec, Tuning
from palestra.spec.model import Conflict, Model
from palestra.spec.schedule import warmup_conflicts
from palestra.spec.tasks import SuiteUse, TasksSpec, suite_conflicts


class TeacherSpec(Model):
    """The teacher: another model, or the student itself with a richer prompt."""

    init: str | None = Field(default=None, min_length=1)
    """A run, a checkpoint, a Hugging Face folder, s3://… or a Hub id, with the student's tokenizer; null: itself."""
    prompt: str | None = Field(default=None, min_length=1)
    """Template of the teacher's prompt (of a conversation: the last message), with {prompt} and the row's fields."""
    refresh: int | None = Field(default=None, ge=1)
    """Self-distillation: copy the student's weights every this many steps; null keeps the initial weights."""

    def conflicts(self) -> Iterator[Conflict]:
        """No teacher, or a refresh of a separate teacher."""
        if self.init is None and self.prompt is None:
            yield Conflict(("init",), "expected a model, or `prompt` for self-distillation")
        if self.init is not None and self.refresh is not None:
            yield Conflict(("refresh",), "expected null, because `init` names another model than the student")


class PolicyLossSpec(Model):
    """Policy gradient with minus the reverse KL at each sampled token as its advantage; needs no full distributions."""

    type: Literal["policy"]
    """Type of the loss."""
    limit: float | None = Field(default=5.0, gt=0)
    """Upper bound of the importance weight of stale completions (`rollout.staleness`); null: none."""


class _Divergence(Model):
    temperature: float = Field(default=1.0, gt=0)
    """Temperature of both distributions; completions are sampled with that of `rollout`."""


class ForwardKlSpec(_Divergence):
    """KL(teacher ‖ student) over the vocabulary: mode-covering."""

    type: Literal["forward_kl"]
    """Type of the loss."""


class ReverseKlSpec(_Divergence):
    """KL(student ‖ teacher) over the vocabulary: mode-seeking."""

    type: Literal["reverse_kl"]
    """Type of the loss."""


class JsdSpec(_Divergence):
    """The generalized Jensen–Shannon divergence over the vocabulary (Agarwal et al. 2024, arXiv 2306.13649)."""

    type: Literal["jsd"]
    """Type of the loss."""
    beta: float = Field(default=0.5, gt=0, lt=1)
    """Weight β of the teacher in the mixture: towards forward KL near 0, reverse KL near 1."""


DivergenceSpec = ForwardKlSpec | ReverseKlSpec | JsdSpec
DistillLoss = Annotated[PolicyLossSpec | DivergenceSpec, Field(discriminator="type")]


class DistillTrain(ComputeSpec):
    """Length of the run and batch size."""

    steps: int = Field(ge=1)
    """Training steps; each is one optimizer step and publishes one weight version."""
    prompts_per_step: int = Field(default=16, ge=1)
    """Prompts per batch, each with a group of completions, sampled or from `data`."""


class DistillSpec(LanguageModelSpec):
    """Distillation: a student samples completions and is trained towards the teacher's distribution on them."""

    tuning: ClassVar[Tuning | None] = Tuning(lr=1e-5, lora_lr=1e-4, weight_decay=0.0)  # between sft and posttrain

    kind: Literal["distill"]
    """Kind of experiment."""
    teacher: TeacherSpec
    """The teacher."""
    tasks: TasksSpec
    """Tasks to sample from and to evaluate on."""
    rollout: RolloutSpec = RolloutSpec()
    """Sampling of completions."""
    loss: DistillLoss = JsdSpec(type="jsd")
    """Loss, a mean over tokens."""
    on_policy: float = Field(default=1.0, ge=0, le=1)
    """Fraction of the prompts completed by the student; the rest of a batch comes from `data`."""
    data: ChatData | None = None
    """Off-policy completions, as conversations; null with `on_policy: 1`."""
    train: DistillTrain
    """Length of training and computation."""
    eval: TaskEval = TaskEval()
    """Evaluation."""
    suites: list[SuiteUse] = Field(default=[])
    """Evaluation suites run during and after training, besides `tasks.eval`."""
    every: PosttrainEvery = PosttrainEvery()
    """How often to checkpoint, evaluate and log."""

    @property
    def examples(self) -> int:
        return self.train.prompts_per_step * self.rollout.group

    @property
    def answered(self) -> int:
        """Prompts per batch that the student completes."""
        return round(self.on_policy * self.train.prompts_per_step)

    @property
    def given(self) -> int:
        """Completions per batch from `data`."""
        return (self.train.prompts_per_step - self.answered) * self.rollout.group

    def conflicts(self) -> Iterator[Conflict]:
        """Missing student or teacher, off-policy completions missing or unused."""
        yield from super().conflicts()
        if self.model.init is None:
            yield Conflict(("model", "init"), "expected a trained model to start from")
        yield from suite_conflicts(self.suites, self.counts)
        for axis in ("context", "tensor", "pipeline"):
            if getattr(self.parallel, axis) > 1:
                reason = "expected 1, because the teacher's distributions need whole logits: use `shard` or `data`"
                yield Conflict(("parallel", axis), reason)
        yield from self._shares()
        yield from warmup_conflicts(self.optim, self.train.steps, "optim")

    def _shares(self) -> Iterator[Conflict]:
        """Whether the off-policy fraction exists and fits the loss and the teacher."""
        if self.on_policy == 1:
            if self.data is not None:
                yield Conflict(("data",), "expected null, because `on_policy: 1` uses no off-policy completions")
            return
        if self.data is None:
            yield Conflict(("data",), f"expected completions, because on_policy is {self.on_policy:g}")
        elif self.data.eval or self.data.holdout:
            yield Conflict(("data",), "expected neither `eval` nor `holdout`: evaluation is on tasks")
        if self.loss.type == "policy":
            yield Conflict(("on_policy",), "expected 1, because `policy` trains on the student's completions")
        if self.teacher.prompt is not None:
            yield Conflict(("on_policy",), "expected 1, because `teacher.prompt` is made of the tasks' rows")
        if self.on_policy == 0 and self.rollout.replay is not None:
            yield Conflict(("rollout", "replay"), "expected null, because `on_policy: 0` samples nothing")
        if self.on_policy > 0 and self.answered in (0, self.train.prompts_per_step):
            reason = f"expected a share of {self.train.prompts_per_step} prompts that is at least one, and not all"
            yield Conflict(("on_policy",), reason)

    def derived(self) -> dict[str, int | float | str]:
        """Completions and tokens per step and in total."""
        sampled = self.answered * self.rollout.group
        return super().derived() | {
            "completions sampled per step": sampled,
            "off-policy completions per step": self.given,
            "new tokens per step, at most": sampled * self.rollout.max_new_tokens,
            "completions in total": (sampled + self.given) * self.train.steps,
        }
