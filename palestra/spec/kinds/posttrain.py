"""The spec of kind `posttrain`: reinforcement learning of language models with verifiable rewards."""

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from palestra.spec.algorithm import AlgorithmSpec
from palestra.spec.base import Every, Function
from palestra.spec.generator import GeneratorSpec
from palestra.spec.kinds.lm import ChatData
from palestra.spec.lm import ComputeSpec, LanguageModelSpec, Tuning
from palestra.spec.model import Cadence, Conflict, CountCadence, Execution, Model
from palestra.spec.schedule import warmup_conflicts
from palestra.spec.tasks import SuiteUse, TasksSpec, suite_conflicts, workflow_conflicts


class SingleTurnSpec(Model):
    """One prompt, one completion."""

    name: Literal["single_turn"]
    """Name of the workflow."""


class MultiTurnSpec(Model):
    """After a wrong completion the model gets feedback and tries again."""

    name: Literal["multi_turn"]
    """Name of the workflow."""
    turns: int = Field(default=3, ge=2)
    """Maximum number of turns."""
    feedback: str = "That is not right. Try again."
    """User message after a wrong completion."""
    discount: float = Field(default=1.0, gt=0, le=1)
    """Factor on the reward for every further turn."""


class ToolsSpec(Model):
    """The model may call tools and reads their output; only tokens it sampled are trained on."""

    name: Literal["tools"]
    """Name of the workflow."""
    tools: list[Literal["python", "calculator"]] = Field(default=["calculator"])
    """Available tools."""
    mcp: list[Annotated[str, Field(min_length=1)]] = Field(default=[])
    """MCP servers whose tools are available too: command lines, or URLs such as http://localhost:8000/mcp."""
    calls: int = Field(default=4, ge=1)
    """Maximum number of tool calls."""

    def conflicts(self) -> Iterator[Conflict]:
        if not self.tools and not self.mcp:
            yield Conflict(("tools",), "expected at least one, or servers in `mcp`")


class EnvironmentSpec(Model):
    """The model acts in an environment, turn by turn; problems of other tasks are answered in a single turn."""

    name: Literal["environment"]
    """Name of the workflow."""
    turns: int = Field(default=32, ge=1)
    """Maximum number of turns of a player."""
    tokens: int | None = Field(default=None, ge=1)
    """Maximum number of tokens of an episode, observations included; null: the model's context."""
    observation: int = Field(default=4000, ge=20)
    """Characters of an observation; of a longer one head and tail are kept, and it says how many are left out."""
    summarize: Function | None = None
    """Your own `def summarize(observation, limit) -> str`, as module:function, for every observation; null: none."""
    seconds: Execution[float] = Field(default=30.0, gt=0)
    """Time limit of an environment's turn; beyond it the episode's status is `error`."""
    workers: Execution[int] = Field(default=1, ge=1)
    """Worker processes that environments run in."""


class CustomWorkflowSpec(Model):
    """Your own workflow."""

    name: Literal["custom"]
    """Name of the workflow."""
    function: Function
    """`async def workflow(episode) -> list[Trajectory]`, as module:function."""


class CommandLimits(Model):
    """What a confined command may use, all its processes together; beyond it they are killed, and it has failed."""

    memory: int = Field(default=8192, ge=16)
    """MiB of memory, beside the 256 MiB that it may write."""
    cpu_seconds: float = Field(default=1800.0, gt=0)
    """CPU time; `seconds` is that of the clock."""
    tasks: int = Field(default=1024, ge=1)
    """Processes and threads at a time."""


class AgentSpec(Model):
    """Your own program, written against OpenAI's or Anthropic's API: it talks to the model through the gateway."""

    name: Literal["agent"]
    """Name of the workflow."""
    command: list[str] | None = Field(default=None, min_length=1)
    """Program and arguments, started once per completion; the environment has base URLs, keys and PALESTRA_PROBLEM."""
    sandbox: bool = False
    """Whether the command runs in namespaces of its own (Linux): it reads files and reaches the gateway alone."""
    limits: CommandLimits | None = None
    """What a command in the sandbox may use; null: the defaults."""
    function: Function | None = None
    """`agent(problem, url, key)`, sync or async, as module:function; runs in worker processes."""
    processes: Execution[int] = Field(default=1, ge=1)
    """Worker processes of `function`, each with many completions at once."""
    running: Execution[int] = Field(default=64, ge=1)
    """Maximum programs or calls of the function at once."""
    port: Execution[Literal["auto"] | Annotated[int, Field(ge=1, le=65535)]] = "auto"
    """Port of the gateway on 127.0.0.1; auto: a free one."""
    turns: int | None = Field(default=None, ge=1)
    """Maximum turns of the model in one completion; null: no limit."""
    tokens: int | None = Field(default=None, ge=1)
    """Maximum sampled tokens of all turns together; null: no limit. `max_new_tokens` limits each turn."""
    seconds: float = Field(default=300.0, gt=0)
    """Time limit of a program; beyond it, it is killed and its completion has status `timeout`."""
    idle_seconds: float = Field(default=120.0, gt=0)
    """Time without a request after which a session ends, with status `timeout`."""
    calls: Literal["auto", "hermes", "llama3", "mistral", "json"] = "auto"
    """Format of tool calls in the model's text; auto: what its chat template speaks of."""
    answer: Literal["message", "output"] = "message"
    """What is verified if the program returns or posts no answer: its last message, or what the command prints."""
    reward: Literal["verifier", "program", "sum"] = "verifier"
    """Reward: of the task's verifier, as posted to /reward, or the sum of both."""
    rows: Literal["branches", "turns"] = "branches"
    """A completion is one sequence per branch of its conversation, or one per turn; it weighs as one."""

    def conflicts(self) -> Iterator[Conflict]:
        """Neither a command nor a function, or both."""
        if (self.command is None) == (self.function is None):
            yield Conflict(("command",), "expected either `command` or `function`")
        if self.function is not None and self.sandbox:
            yield Conflict(("sandbox",), "expected with `command`: a function shares its worker process with others")
        if self.limits is not None and not self.sandbox:
            yield Conflict(("limits",), "expected with `sandbox: true`: a command that is not confined has no limits")
        if self.function is not None and self.answer == "output":
            yield Conflict(("answer",), "expected message: a function returns its answer")


WorkflowSpec = Annotated[
    SingleTurnSpec | MultiTurnSpec | ToolsSpec | EnvironmentSpec | AgentSpec | CustomWorkflowSpec,
    Field(discriminator="name"),
]


class RolloutSpec(Model):
    """How completions are sampled: how many, how long, how stale."""

    group: int = Field(default=8, ge=1)
    """Completions per prompt (group size)."""
    max_new_tokens: int = Field(default=256, ge=1)
    """Maximum new tokens per turn."""
    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature; training scores completions with the same."""
    workflow: WorkflowSpec = SingleTurnSpec(name="single_turn")
    """From a prompt to a scored trajectory: one turn, several, with tools, in an environment, or your own."""
    staleness: int = Field(default=0, ge=0)
    """Maximum staleness: weight versions a completion may be behind when trained on; 0 is the synchronous loop."""
    on_stale: Literal["wait", "drop"] = "wait"
    """Completions about to exceed the staleness: wait for them, or drop them and requeue their prompts."""
    keep_cache: bool = True
    """On a weight update, completions in flight continue from their KV cache; false recomputes it."""
    running: int | None = Field(default=None, ge=1)
    """Maximum prompts in flight; null: limited by staleness alone."""
    failures: int = Field(default=0, ge=0)
    """Number of prompts that may fail with an error before the run fails."""
    timeout_seconds: float = Field(default=3600.0, gt=0)
    """Time limit of a prompt's workflow; beyond it, it is cancelled and another prompt takes its place."""
    verify_seconds: Execution[float] = Field(default=10.0, gt=0)
    """Time limit of verifying one completion in a worker process; beyond it the status is `timeout`."""
    on_timeout: Literal["zero", "exclude"] = "zero"
    """Completions with status `timeout` get reward 0, or are excluded from their group like verifier errors."""
    max_filtered_batches: int | None = Field(default=10, ge=1)
    """Fail after this many consecutive batches in which every group was filtered out; null: never."""
    max_prompt_tokens: int | None = Field(default=None, ge=1)
    """Longer prompts are skipped and counted; null skips those that leave no room for a completion."""
    record: Execution[bool | Literal["tokens"]] = True
    """Write every completion to rollouts.jsonl; `tokens`: also entropy and trainer's log-probability of each token."""
    verifiers: Execution[int | None] = Field(default=None, ge=1)
    """Worker processes for verifiers that may hang; null: one per core, at most 16."""
    replay: str | None = Field(default=None, min_length=1)
    """Train on the recorded rollouts of another run, step by step: the run or its rollouts.jsonl; null: sample."""
    generator: GeneratorSpec | None = None
    """Another program that samples the completions, such as a vLLM server; null: the engine in this process."""

    def conflicts(self) -> Iterator[Conflict]:
        """A generator that cannot be trained with."""
        if self.generator is not None and self.generator.engine == "openai":
            reason = (
                "expected vllm, sglang or palestra: OpenAI's protocol has no token log-probabilities and new weights"
            )
            yield Conflict(("generator", "engine"), f"{reason}; it is for kind evaluate")


class PosttrainTrain(ComputeSpec):
    """Length of the run, batch size and optimizer steps."""

    steps: int = Field(ge=1)
    """Training steps; each trains on one batch and publishes one weight version."""
    prompts_per_step: int = Field(default=16, ge=1)
    """Prompts per batch, each with a group of completions."""
    minibatches: int = Field(default=1, ge=1)
    """Minibatches (optimizer steps) per epoch over the batch, split by prompts."""
    epochs: int = Field(default=1, ge=1)
    """Epochs over each batch."""


class SftAside(Model):
    """Auxiliary SFT loss on conversations, against forgetting."""

    data: ChatData
    """The conversations."""
    weight: float = Field(gt=0)
    """Weight of the SFT loss (a token mean), added to the algorithm's."""
    batch: int = Field(default=8, ge=1)
    """Conversations per step."""


class TaskEval(Model):
    """Evaluation on tasks."""

    problems: int = Field(default=256, ge=1)
    """Maximum problems per task, the first of its split."""
    greedy: bool = True
    """Evaluate greedy decoding."""
    samples: int = Field(default=0, ge=0)
    """Completions sampled per problem for pass@k; 0: none."""
    k: list[int] = Field(default=[1])
    """Values of k of the pass@k to report, estimated from `samples` completions."""
    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature of `samples`."""
    max_new_tokens: int | None = Field(default=None, ge=1)
    """Maximum new tokens; null: that of `rollout`."""

    def conflicts(self) -> Iterator[Conflict]:
        """Too few samples for pass@k, or nothing to evaluate."""
        if self.samples and max(self.k, default=1) > self.samples:
            yield Conflict(("k",), f"expected at most samples = {self.samples}")
        if min(self.k, default=1) < 1:
            yield Conflict(("k",), "expected numbers from 1")
        if not self.greedy and not self.samples:
            yield Conflict(("samples",), "expected at least 1, because `greedy` is false")


class PosttrainEvery(Every):
    """Cadences; a step is one batch and one weight version."""

    eval: CountCadence | None = Cadence(20, "steps")
    """When to evaluate besides before the first step and at the end; null: only then."""
    log: Execution[CountCadence] = Cadence(1, "steps")
    """When to write a row of metrics."""


class PosttrainSpec(LanguageModelSpec):
    """Reinforcement learning with verifiable rewards: sample completions, verify them, reinforce the good ones."""

    tuning: ClassVar[Tuning | None] = Tuning(lr=1e-6, lora_lr=1e-5, weight_decay=0.01)  # as verl

    kind: Literal["posttrain"]
    """Kind of experiment."""
    tasks: TasksSpec
    """Tasks to train and evaluate on."""
    rollout: RolloutSpec = RolloutSpec()
    """Sampling of completions."""
    algorithm: AlgorithmSpec
    """Advantages and loss."""
    train: PosttrainTrain
    """Length of training and computation."""
    control: Literal["shuffled_rewards"] | None = None
    """Negative control that must not learn: rewards are shuffled across the batch's completions; null: off."""
    sft: SftAside | None = None
    """Auxiliary SFT loss; null: none."""
    eval: TaskEval = TaskEval()
    """Evaluation."""
    suites: list[SuiteUse] = Field(default=[])
    """Evaluation suites run during and after training, besides `tasks.eval`."""
    every: PosttrainEvery = PosttrainEvery()
    """How often to checkpoint, evaluate and log."""

    @property
    def examples(self) -> int:
        return self.train.prompts_per_step * self.rollout.group

    def conflicts(self) -> Iterator[Conflict]:
        """Missing model, unknown tasks, conflicting settings."""
        yield from super().conflicts()
        if self.model.init is None:
            yield Conflict(("model", "init"), "expected a trained model to start from")
        yield from suite_conflicts(self.suites, self.counts)
        yield from workflow_conflicts([*self.tasks.train, *self.tasks.eval], self.rollout.workflow.name)
        if self.algorithm.needs_turns and self.rollout.workflow.name == "agent":
            reason = "expected the defaults: an agent's conversations may fork, and their reward is of the whole"
            yield Conflict(("algorithm", "turns"), reason)
        if self.sft is not None and (self.sft.data.eval or self.sft.data.holdout):
            yield Conflict(("sft", "data"), "expected neither `eval` nor `holdout`: evaluation is on tasks")
        if self.train.minibatches > self.train.prompts_per_step:
            reason = f"expected at most train.prompts_per_step = {self.train.prompts_per_step}"
            yield Conflict(("train", "minibatches"), reason)
        if self.rollout.group == 1 and self.algorithm.needs_group:
            reason = f"expected at least 2, because {self.algorithm.preset} compares completions of one prompt"
            yield Conflict(("rollout", "group"), reason)
        if self.parallel.schedule == "zero_bubble" and self.algorithm.critic is not None:
            yield Conflict(("parallel", "schedule"), "expected 1f1b or interleaved, because of the value model's head")
        updates = self.train.steps * self.train.minibatches * self.train.epochs
        yield from warmup_conflicts(self.optim, updates, "optim")

    def derived(self) -> dict[str, int | float | str]:
        """Completions and tokens per step and in total."""
        return super().derived() | {
            "completions per step": self.examples,
            "new tokens per step, at most": self.examples * self.rollout.max_new_tokens,
            "completions in total": self.examples * self.train.steps,
        }
