"""The kind `posttrain`: RL of a language model with verifiable rewards."""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from palestra.cluster.placement import Placement
from palestra.data.store import Example
from palestra.data.tokenizers import Tokenizer
from palestra.errors import UsageError
from palestra.evaluate.completions import Evaluation, ask, evaluate_tasks, pumped
from palestra.generate.engine.engine import Engine
from palestra.generate.local import LocalGenerator
from palestra.generate.types import DrivenGenerator, Sampling
from palestra.kinds import models
from palestra.kinds.lm import check_data, summary
from palestra.kinds.measures import Suites, check_suites
from palestra.kinds.models import Start
from palestra.kinds.placed import TasksKind, open_fleet, open_placement, open_verifiers
from palestra.kinds.ranks import check_ranks, check_split, done, follow, following, joined, ranks_here, together
from palestra.kinds.trial import Launch, check_spec, device_of, in_session, run_sessions, threads_each
from palestra.lm.datasets import Data, bytes_of_tokens, chat_data, mixture_of
from palestra.lm.engine import TrainEngine, compile_cache, compile_for_training
from palestra.lm.lora import frozen_copy
from palestra.lm.model import Transformer
from palestra.lm.objectives import NextToken
from palestra.lm.optim import Optimizer
from palestra.lm.ranks import Ranks
from palestra.posttrain.critic import Critic
from palestra.posttrain.learner import AuxiliaryLoss, Learner
from palestra.posttrain.metrics import Sampled, first_samples, mismatch_bound, self_test
from palestra.posttrain.trainer import GroupLearner, PosttrainParts, RolloutParts, train
from palestra.rollout.episode import Episode, Starter, encode_problem
from palestra.rollout.event_loop import LoopThread
from palestra.rollout.executor import Executor, make_filter
from palestra.rollout.records import RolloutReplay, find_rollouts
from palestra.rollout.workflows import feedback_tokens, make_workflow
from palestra.runs.run import Run
from palestra.runs.session import Session
from palestra.runs.store import read_json, write_json
from palestra.spec.kinds.distill import DistillSpec
from palestra.spec.kinds.posttrain import MultiTurnSpec, PosttrainSpec, SingleTurnSpec
from palestra.spec.memory import after_loading
from palestra.spec.model import plain
from palestra.spec.shape import Shape
from palestra.tasks.stream import Prompts
from palestra.tasks.task import Problem, Task
from palestra.tasks.verify.workers import Verifiers

log = logging.getLogger("palestra.posttrain")

MakeLearner = Callable[[Any, Session, Start, Ranks], GroupLearner]

FIXED = ("kind", "model", "tasks.train", "tasks.mix", "tasks.pool", "optim.name", "optim.state",
         "train.prompts_per_step", "train.weights", "algorithm.baseline", "rollout.replay")  # fmt: skip
"""What checkpoints depend on."""
REPLAY = "replay.json"
SCANNED = 1000
"""Prompts to scan for the first that fits."""
COUNTED = 100_000
"""The longest prompt is not searched for in tasks with more prompts than this."""


def run(spec: PosttrainSpec, launch: Launch) -> Run:
    """Train every seed of the spec, then summarize and plot the trial."""

    def check(start: Start) -> None:
        make_filter(spec.algorithm.filters)
        _sft_data(spec, start)

    return run_tasks(spec, launch, _learner, FIXED, check)


def run_tasks(
    spec: TasksKind, launch: Launch, make_learner: MakeLearner, fixed: Sequence[str], check: Callable[[Start], object]
) -> Run:
    """Train every seed of a spec that has tasks; `check` refuses one that cannot run, before it has a folder."""
    device = device_of(spec)
    ranks = Ranks.join(device)
    check_ranks(spec, ranks, device)
    check_spec(spec)
    session = partial(in_session, partial(_run_session, make_learner))
    if not ranks.first:
        return follow(session, ranks, replace(launch, spec=plain(spec)))
    launch = models.with_model(spec, launch)
    # A spec that cannot run is refused here, before it has a folder.
    pinned = models.starting_from(spec, launch.init)
    start = models.trained_start(pinned.model, launch.root, chat=True)
    check_split(spec, start.shape)
    _context(pinned, start)
    with (
        Verifiers(spec.tasks.train, root=launch.root) as verifiers,
        Verifiers(spec.tasks.eval, root=launch.root) as held_out,
    ):
        Prompts(spec.tasks, verifiers.tasks, spec.seed)
        for uses, tasks in ((spec.tasks.train, verifiers.tasks), (spec.tasks.eval, held_out.tasks)):
            for use in uses:
                encode_problem(tasks[use.label].part(use.split)[0], start.tokenizer)
    make_workflow(spec.rollout.workflow, launch.root)
    if spec.rollout.generator is not None:
        from palestra.kinds.engines import check_engines  # needs the extra `serve`

        check_engines(spec.rollout.generator, start)
    if spec.rollout.replay is not None and launch.resume is None:
        for seed in spec.seeds:
            find_rollouts(spec.rollout.replay, launch.root, seed, spec.train.steps)
    check(start)
    check_suites(spec.suites, start, launch.root)
    models.keep_start(launch.init)
    threads = threads_each(spec, ranks_here(spec))
    trial = run_sessions(
        spec,
        launch,
        together(session, spec, ranks, threads),
        fixed=fixed,
        threads=threads,
        total=spec.train.steps,
        unit="steps",
        summary=summary,
    )
    return done(ranks, trial)


def _run_session(make_learner: MakeLearner, session: Session, spec: TasksKind, launch: Launch) -> None:
    ranks = joined(spec, device_of(spec))
    with ExitStack() as stack:
        stack.enter_context(session if ranks.first else following(session.path, ranks.rank))
        stack.enter_context(compile_cache(spec.train.compile_cache))
        spec = ranks.from_first(models.settled(spec, session, launch.init) if ranks.first else None)
        start = models.trained_start(spec.model, launch.root, chat=True)
        learner = make_learner(spec, session, start, ranks)
        keeper = models.ModelCheckpoint(learner.engine.transformer, start, ranks)
        suites = Suites(spec.suites, learner.engine, start, session, launch.root, stack)
        weights = learner.engine.weights()
        if ranks.first:
            rollout, evaluate, sample = _rollout(spec, session, start, launch, stack, learner.engine, weights)
        else:
            rollout, evaluate, sample = None, _elsewhere, _elsewhere
        replayed = spec.rollout.replay is not None
        test = (lambda: {}) if replayed else partial(self_test, sample, learner.engine, mismatch_bound(spec))
        parts = PosttrainParts(learner, rollout, keeper, evaluate, suites, test)
        train(spec, session, parts, show=launch.show)


def _elsewhere(*_: object) -> Any:
    raise AssertionError("the first rank generates, and sends what it has measured")


def _rollout(
    spec: TasksKind,
    session: Session,
    start: Start,
    launch: Launch,
    stack: ExitStack,
    engine: TrainEngine,
    weights: dict[str, torch.Tensor],
) -> tuple[RolloutParts, Callable[[Callable[[], None]], Evaluation], Callable[[], Sampled]]:
    """What makes completions, evaluates them and samples for the self-test; `stack` closes it."""
    prompts = spec.answered if isinstance(spec, DistillSpec) else spec.train.prompts_per_step
    chosen = make_filter(spec.algorithm.filters) if isinstance(spec, PosttrainSpec) else lambda group: None
    seed = session.seed
    placement = open_placement(spec, session, launch, stack)
    verifiers, held_out = open_verifiers(spec, launch, placement, stack)
    # After the verifiers, so that it ends before them: its tasks may be waiting for one.
    loop = stack.enter_context(LoopThread())
    questions = ask(spec.tasks.eval, held_out.tasks, start.tokenizer, spec.eval.problems)
    context, max_prompt = _context(spec, start, verifiers.tasks)
    longest = max((len(question.prompt) for task in questions for question in task.questions), default=0)
    new = spec.eval.max_new_tokens or spec.rollout.max_new_tokens
    eval_context = max(context, min(start.shape.context, longest + new))
    generator = _generator(spec, session, start, launch, placement, stack, engine, weights, eval_context)
    starter = Starter(
        tasks=verifiers.tasks,
        workflow=make_workflow(spec.rollout.workflow, launch.root),
        generator=generator,
        verify=verifiers.begin,
        tokenizer=start.tokenizer,
        sampling=Sampling(temperature=spec.rollout.temperature, max_new_tokens=spec.rollout.max_new_tokens),
        samples=spec.rollout.group,
        seed=seed,
        context=context,
        max_prompt=max_prompt,
    )
    executor = _replay(spec, session, start, launch.root) or Executor(
        Prompts(spec.tasks, verifiers.tasks, seed),
        starter,
        spec.rollout,
        loop=loop,
        batch=prompts,
        total=spec.train.steps * prompts,
        filter=chosen,
    )
    if isinstance(executor, Executor):
        executor.wake = generator.wake
    first = _first(spec, verifiers, starter)
    if isinstance(executor, RolloutReplay):  # there is no generator to compare with
        log.info("the rollouts are those of %s: none are generated", executor.path)

    def evaluate(look: Callable[[], None]) -> Evaluation:
        if not questions:
            return Evaluation((), {}, {})
        work = evaluate_tasks(
            generator,
            start.tokenizer,
            held_out.verify,
            questions,
            spec.eval,
            context=eval_context,
            max_new_tokens=new,
            seed=seed,
            workflow=starter.workflow,
        )
        return pumped(generator, work, look)

    return RolloutParts(executor, generator, loop), evaluate, partial(first_samples, first, generator)


def _generator(
    spec: TasksKind,
    session: Session,
    start: Start,
    launch: Launch,
    placement: Placement | None,
    stack: ExitStack,
    engine: TrainEngine,
    weights: dict[str, torch.Tensor],
    context: int,
) -> DrivenGenerator:
    """The engine in this process, engines in others, or servers of other programs."""
    if spec.rollout.generator is not None:
        from palestra.kinds.engines import open_engines  # needs the extra `serve`

        return open_engines(spec.rollout.generator, session, start, stack, context=context, weights=weights)
    settings = _engine_settings(spec, start.shape, engine, context)
    if placement is not None and spec.cluster.generators:
        return open_fleet(spec, session, launch, placement, stack, **settings)
    model = models.model_copy(start, engine, weights, settings["dtype"])
    writer = Engine(model, eos=frozenset(start.eos), tokenizer=start.tokenizer, device=engine.device, **settings)
    return LocalGenerator(writer, drive="caller")


def _sft_data(spec: PosttrainSpec, start: Start) -> Data[Example] | None:
    """The conversations of the auxiliary SFT loss."""
    if spec.sft is None:
        return None
    models.check_context("sft.data.context", spec.sft.data.context, start, "the model")
    return chat_data(spec.sft.data, start.tokenizer_folder)


def _first(spec: TasksKind, verifiers: Verifiers, starter: Starter) -> Episode:
    """The first problem of the first task whose prompt is not too long."""
    use = spec.tasks.train[0]
    problems = verifiers.tasks[use.label].part(use.split)
    episodes = (starter.episode(problems[index], 0) for index in range(min(len(problems), SCANNED)))
    first = next((episode for episode in episodes if len(episode.prompt) <= starter.max_prompt), None)
    if first is None:
        raise UsageError(
            f"the first prompts of {use.label} (as many as {SCANNED}) have more than {starter.max_prompt} tokens: "
            "raise rollout.max_prompt_tokens, lower rollout.max_new_tokens, or use a model with a longer context"
        )
    return first


def train_engine(
    spec: TasksKind, start: Start, model: Transformer, updates: int, seed: int, ranks: Ranks
) -> TrainEngine:
    """The engine that trains the model in so many optimizer steps."""
    ranks.shard(model)
    compile_for_training(model, spec.train, device_of(spec))
    # Its plans are for one shape, take 60 ms each, and no two batches of completions have the same.
    torch.backends.cuda.enable_cudnn_sdp(False)
    return TrainEngine(
        model,
        Optimizer(model, spec.optim, updates, models.rounding_seed(spec, seed)),
        ranks,
        micro_tokens=spec.train.micro_tokens,
        flops_per_token=start.shape.flops_per_token(spec.rollout.max_new_tokens),
    )


def _learner(spec: PosttrainSpec, session: Session, start: Start, ranks: Ranks) -> Learner:
    algorithm, seed = spec.algorithm, session.seed
    model, examples = models.build_model(spec, start, seed, device_of(spec), ranks), _sft_data(spec, start)
    if examples is not None and ranks.first:
        check_data(session, examples, start)
    frozen = frozen_copy(model) if algorithm.needs_reference else None
    if frozen is not None:
        ranks.shard(frozen)
    critic = None if algorithm.critic is None else Critic(deepcopy(model), algorithm, spec.train, ranks, seed)
    updates = spec.train.steps * spec.train.minibatches * spec.train.epochs
    engine = train_engine(spec, start, model, updates, seed, ranks)
    auxiliary = None
    if spec.sft is not None and examples is not None:
        mixture = mixture_of(examples, spec.sft.data, batch=spec.sft.batch, steps=updates, seed=seed)
        bytes_of = bytes_of_tokens(start.tokenizer, start.shape.vocab or 0)
        objective = NextToken(mixture, {}, bytes_of, batch=spec.sft.batch, eval_examples=1)
        auxiliary = AuxiliaryLoss(objective, spec.sft.weight)
    return Learner(spec, engine, seed=seed, reference=frozen, critic=critic, auxiliary=auxiliary)


def _engine_settings(spec: TasksKind, shape: Shape, engine: TrainEngine, context: int) -> dict[str, Any]:
    """Of the engine that generates, with its own copy of the weights in the compute dtype."""
    rollout, prompts = spec.rollout, spec.train.prompts_per_step
    rows = min(rollout.running or prompts * (rollout.staleness + 1), prompts * (rollout.staleness + 1)) * rollout.group
    rows = max(rows, min(256, rows * 2)) if spec.tasks.eval else rows
    cuda = engine.device.type == "cuda"
    return {
        "dtype": engine.transformer.dtype,
        "context": context,
        "kv_bytes": room_for_keys(spec, shape, torch.cuda.mem_get_info(engine.device)[0]) if cuda else None,
        "max_running": min(rows, 1024 if cuda else 512),
        "max_waiting": 2**20,
    }


def room_for_keys(spec: TasksKind, shape: Shape, free: int) -> int:
    """KV cache bytes on a GPU with so many free when the models are loaded: most of what training leaves.

    Predictions are right to a tenth. Never less than an eighth: what a cache needs at least is checked when it is made.
    """
    return max(int(0.9 * (free - 1.1 * after_loading(spec, shape, "cuda"))), free // 8)


def _replay(spec: TasksKind, session: Session, start: Start, root: Path) -> RolloutReplay | None:
    """The recorded rollouts that `rollout.replay` names; their file is pinned at the first start."""
    if spec.rollout.replay is None:
        return None
    pinned = session.path / REPLAY
    if not pinned.exists():
        write_json(pinned, {"rollouts": str(find_rollouts(spec.rollout.replay, root, session.seed, spec.train.steps))})
    return RolloutReplay(Path(read_json(pinned)["rollouts"]), start.shape.vocab or 0)


def _context(spec: TasksKind, start: Start, tasks: Mapping[str, Task] | None = None) -> tuple[int, int]:
    """The most tokens of a rollout and of a prompt.

    Without `max_prompt_tokens` the longest prompt of `tasks` is searched for, unless there are too many.
    """
    rollout, new, reads = spec.rollout, spec.rollout.max_new_tokens, start.shape.context
    if new >= reads:
        raise UsageError(f"rollout.max_new_tokens: {new} leave no room for a prompt: the model's context is {reads}")
    most = rollout.max_prompt_tokens
    if most is None and tasks is not None:
        most = longest_prompt([tasks[use.label].part(use.split) for use in spec.tasks.train], start.tokenizer)
    longest, further = min(most or reads, reads - new), _further_turns(spec, start, tasks)
    context = reads if most is None or further is None else min(longest + new + further, reads)
    if tasks is not None and rollout.max_prompt_tokens is None:
        log.info("longest prompt: %s tokens; a sequence has at most %d", most or "not counted", context)
    return context, longest


def longest_prompt(tasks: Sequence[Sequence[Problem]], tokenizer: Tokenizer) -> int | None:
    """Tokens of the longest prompt; None if there are too many prompts to search."""
    if sum(map(len, tasks)) > COUNTED:
        return None
    return max((len(encode_problem(problem, tokenizer)) for problem in chain(*tasks)), default=0)


def _further_turns(spec: TasksKind, start: Start, tasks: Mapping[str, Task] | None) -> int | None:
    """The most tokens of a rollout after its first turn; None if its workflow sets no bound."""
    workflow = spec.rollout.workflow
    if isinstance(workflow, SingleTurnSpec):
        return 0
    if not isinstance(workflow, MultiTurnSpec) or tasks is None:
        return None
    between = 0
    for use in spec.tasks.train:
        first = tasks[use.label].part(use.split)[0]
        feedback = partial(feedback_tokens, first, start.tokenizer, workflow.feedback)
        between = max(between, sum(len(feedback(turn)) for turn in range(1, workflow.turns)))
    return between + (workflow.turns - 1) * spec.rollout.max_new_tokens
