"""The spec of kind `posttrain`: reinforcement learning of language models with rewards that can be checked."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from palestra.spec.algorithm import AlgorithmSpec
from palestra.spec.base import Conflict, Every, Function
from palestra.spec.kinds.lm import ChatData
from palestra.spec.lm import ComputeSpec, LanguageModelSpec, Tuning
from palestra.spec.model import Cadence, CountCadence, Execution, Model
from palestra.spec.schedule import warmup_problems
from palestra.spec.tasks import SuiteUse, TasksSpec, suite_conflicts


class SingleTurnSpec(Model):
    """One prompt, one answer."""

    name: Literal["single_turn"]
    """The workflow."""


class MultiTurnSpec(Model):
    """After a wrong answer the model is told so and tries again."""

    name: Literal["multi_turn"]
    """The workflow."""
    turns: int = Field(default=3, ge=2)
    """How often it answers at most."""
    feedback: str = "That is not right. Try again."
    """What it is told."""
    discount: float = Field(default=1.0, gt=0, le=1)
    """The reward is multiplied by this for every further turn."""


class ToolsSpec(Model):
    """The model may call tools, whose output it reads; only what it wrote itself is trained."""

    name: Literal["tools"]
    """The workflow."""
    tools: list[Literal["python", "calculator"]] = Field(default=["calculator"], min_length=1)
    """The tools there are."""
    calls: int = Field(default=4, ge=1)
    """How often it may call them."""


class CustomWorkflowSpec(Model):
    """Your own workflow."""

    name: Literal["custom"]
    """The workflow."""
    function: Function
    """`async def workflow(episode) -> list[Trajectory]`, as module:function."""


WorkflowSpec = Annotated[SingleTurnSpec | MultiTurnSpec | ToolsSpec | CustomWorkflowSpec, Field(discriminator="name")]


class RolloutSpec(Model):
    """How answers are made: how many, how long, how old they may get."""

    group: int = Field(default=8, ge=1)
    """Answers to each prompt."""
    max_new_tokens: int = Field(default=256, ge=1)
    """The most the model writes in one turn."""
    temperature: float = Field(default=1.0, gt=0)
    """The temperature answers are drawn with, and scored with in training."""
    workflow: WorkflowSpec = SingleTurnSpec(name="single_turn")
    """What happens between a prompt and its reward."""
    staleness: int = Field(default=0, ge=0)
    """How many versions of the weights an answer may be behind when it is trained on; 0 is the synchronous loop."""
    on_stale: Literal["wait", "drop"] = "wait"
    """Before answers get too old: wait for them, or train without them and ask their prompts again."""
    keep_cache: bool = True
    """Answers that are under way when the weights change go on from what they have cached, or compute it again."""
    running: int | None = Field(default=None, ge=1)
    """Prompts at work at the same time at most; null sets no limit besides staleness."""
    failures: int = Field(default=0, ge=0)
    """Prompts that may fail with an error before the run does."""
    timeout_seconds: float = Field(default=3600.0, gt=0)
    """The longest that a prompt's workflow may take; then it is cancelled, and another prompt takes its place."""
    verify_seconds: Execution[float] = Field(default=10.0, gt=0)
    """The longest that the verifier of a completion may take in a process of its own; then the status is `timeout`."""
    on_timeout: Literal["zero", "exclude"] = "zero"
    """Completions with the status `timeout` have reward 0, or are left out of their group like verifier errors."""
    max_filtered_batches: int | None = Field(default=10, ge=1)
    """End the run with an error after so many batches of groups without one to train on; null goes on sampling."""
    max_prompt_tokens: int | None = Field(default=None, ge=1)
    """Longer prompts are left out and counted; null leaves out those that leave no room for an answer."""
    record: Execution[bool] = True
    """Write every answer with its verdict to rollouts.jsonl, for people (`palestra rollouts RUN`) and for replay."""
    verifiers: Execution[int | None] = Field(default=None, ge=1)
    """Processes that judge answers where judging can hang; null takes one a core, at most 16."""
    replay: str | None = Field(default=None, min_length=1)
    """Train on the rollouts of another run, step for step: the run, or its rollouts.jsonl; null generates."""


class PosttrainTrain(ComputeSpec):
    """How many batches, of what, in how many optimizer steps."""

    steps: int = Field(ge=1)
    """Batches; each makes one version of the weights."""
    prompts_per_step: int = Field(default=16, ge=1)
    """Prompts in a batch, each with its group of answers."""
    minibatches: int = Field(default=1, ge=1)
    """Optimizer steps a batch is split into, by prompts."""
    epochs: int = Field(default=1, ge=1)
    """Passes over a batch."""


class SftAside(Model):
    """Conversations trained on beside the rewards, so that the model does not forget them."""

    data: ChatData
    """The conversations."""
    weight: float = Field(gt=0)
    """The weight of their loss, a mean over tokens, beside that of the algorithm."""
    batch: int = Field(default=8, ge=1)
    """Conversations in a step."""


class TaskEval(Model):
    """Evaluation on tasks."""

    problems: int = Field(default=256, ge=1)
    """Problems of each task at most, from the first of its split."""
    greedy: bool = True
    """Score the most likely answer."""
    samples: int = Field(default=0, ge=0)
    """Answers drawn for each problem, for pass@k; 0 draws none."""
    k: list[int] = Field(default=[1])
    """Which pass@k to report, from `samples` answers."""
    temperature: float = Field(default=1.0, gt=0)
    """The temperature they are drawn with."""
    max_new_tokens: int | None = Field(default=None, ge=1)
    """The most it writes; null takes that of `rollout`."""

    def reasons(self) -> list[Conflict]:
        """Whether there are enough answers for pass@k, and anything to evaluate."""
        found = []
        if self.samples and max(self.k, default=1) > self.samples:
            found.append(Conflict(("k",), f"expected at most samples = {self.samples}"))
        if min(self.k, default=1) < 1:
            found.append(Conflict(("k",), "expected numbers from 1"))
        if not self.greedy and not self.samples:
            found.append(Conflict(("samples",), "expected at least 1, because `greedy` is false"))
        return found


class PosttrainEvery(Every):
    """How often things happen; a step is one batch and one version of the weights."""

    eval: CountCadence | None = Cadence(20, "steps")
    """When to evaluate besides before the first step and at the end; null evaluates only then."""
    log: Execution[CountCadence] = Cadence(1, "steps")
    """When to write a row of metrics."""


class PosttrainSpec(LanguageModelSpec):
    """Reinforcement learning with verifiable rewards: draw answers, judge them, make the good ones more likely."""

    tuning: ClassVar[Tuning | None] = Tuning(lr=1e-6, lora_lr=1e-5, weight_decay=0.01)  # as verl

    kind: Literal["posttrain"]
    """The kind of experiment."""
    tasks: TasksSpec
    """What to train and evaluate on."""
    rollout: RolloutSpec = RolloutSpec()
    """How answers are made."""
    algorithm: AlgorithmSpec
    """What is learned from them."""
    train: PosttrainTrain
    """How long and how to train."""
    control: Literal["shuffled_rewards"] | None = None
    """A run that must not learn, to compare with: rewards dealt out at random among a batch's answers; null is none."""
    sft: SftAside | None = None
    """Conversations trained on beside the rewards; null trains on rewards alone."""
    eval: TaskEval = TaskEval()
    """How to evaluate."""
    suites: list[SuiteUse] = Field(default=[])
    """What it is measured with during training and after it, besides `tasks.eval`."""
    every: PosttrainEvery = PosttrainEvery()
    """How often to checkpoint, evaluate and log."""

    def conflicts(self) -> list[Conflict]:
        """A model that is not trained, tasks that are not there, settings that do not fit together."""
        found = super().conflicts()
        if self.model.init is None:
            found.append(Conflict(("model", "init"), "expected a trained model to start from"))
        found += [Conflict(("tasks", *path), reason) for path, reason in self.tasks.problems()]
        found += [Conflict(("eval", *path), reason) for path, reason in self.eval.reasons()]
        found += suite_conflicts(self.suites, self.counts)
        found += [Conflict(("algorithm", *path), reason) for path, reason in self.algorithm.problems()]
        if self.sft is not None:
            found += [Conflict(("sft", "data", *path), reason) for path, reason in self.sft.data.problems()]
            if self.sft.data.eval or self.sft.data.holdout:
                reason = "expected neither `eval` nor `holdout`: evaluation is on tasks"
                found.append(Conflict(("sft", "data"), reason))
        if self.train.minibatches > self.train.prompts_per_step:
            reason = f"expected at most train.prompts_per_step = {self.train.prompts_per_step}"
            found.append(Conflict(("train", "minibatches"), reason))
        if self.rollout.group == 1 and self.algorithm.needs_group:
            reason = f"expected at least 2, because {self.algorithm.preset} compares answers to one prompt"
            found.append(Conflict(("rollout", "group"), reason))
        updates = self.train.steps * self.train.minibatches * self.train.epochs
        found += [Conflict(("optim", *path), reason) for path, reason in warmup_problems(self.optim, updates)]
        return found

    def derived(self) -> dict[str, int | float | str]:
        """Answers and tokens of a step, and of the run."""
        answers = self.train.prompts_per_step * self.rollout.group
        return super().derived() | {
            "answers per step": answers,
            "new tokens per step, at most": answers * self.rollout.max_new_tokens,
            "answers in all": answers * self.train.steps,
        }
