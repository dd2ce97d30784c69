"""The kind `posttrain`: a language model trained on rewards that can be checked."""

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from palestra.data.store import Example
from palestra.data.tokenizers import Tokenizer
from palestra.errors import UsageError
from palestra.evaluate.completions import ask, evaluate_tasks, pumped
from palestra.generate.engine.engine import Engine
from palestra.generate.local import LocalGenerator
from palestra.generate.types import Sampling
from palestra.kinds.lm import check_data, summary
from palestra.kinds.measures import Suites, check_suites
from palestra.kinds.models import (
    ModelCheckpoint,
    Start,
    build_model,
    device_of,
    keep_start,
    settled,
    starting_from,
    trained_start,
    with_model,
)
from palestra.kinds.trial import Launch, run_sessions
from palestra.lm.datasets import Data, bytes_of_tokens, chat_data, mixture_of
from palestra.lm.engine import TrainEngine, compile_cache, compile_for_training
from palestra.lm.hf import empty_model
from palestra.lm.model import Transformer
from palestra.lm.objectives import NextToken
from palestra.lm.optim import Optimizer
from palestra.lm.ranks import Ranks
from palestra.posttrain.critic import Critic
from palestra.posttrain.learner import Aside, Learner
from palestra.posttrain.metrics import introduce, no_gradient, self_test
from palestra.posttrain.trainer import Learns, PosttrainParts, train
from palestra.rollout.episode import Episode, Starter, encode_problem
from palestra.rollout.event_loop import LoopThread
from palestra.rollout.executor import Executor, make_filter
from palestra.rollout.records import RolloutReplay, find_rollouts
from palestra.rollout.types import Group
from palestra.rollout.workflows import feedback_tokens, make_workflow
from palestra.runs.plot import trial_plots
from palestra.runs.recorder import load_hooks
from palestra.runs.run import Run
from palestra.runs.session import Session
from palestra.runs.store import clear_write_errors, read_json, write_json
from palestra.spec.kinds.distill import DistillSpec
from palestra.spec.kinds.posttrain import MultiTurnSpec, PosttrainSpec, SingleTurnSpec
from palestra.spec.load import resolved
from palestra.tasks.stream import Prompts
from palestra.tasks.task import Problem, Task
from palestra.tasks.verify.workers import Verifiers
from palestra.track.sinks import require_sinks

log = logging.getLogger("palestra.posttrain")

TasksKind = PosttrainSpec | DistillSpec
"""The specs of models that answer tasks to learn from it."""
MakeParts = Callable[[Any, Session, Start, Launch, ExitStack], PosttrainParts]
"""All that the loop works with, for a spec; the stack closes it."""

FIXED = ("kind", "model", "tasks.train", "tasks.mix", "tasks.pool", "optim.name", "train.prompts_per_step",
         "algorithm.baseline", "rollout.replay")  # fmt: skip
"""What checkpoints depend on."""
REPLAY = "replay.json"
LOOK_AT = 1000
"""So many prompts are looked at for one that fits."""
COUNTED = 100_000
"""Of tasks with more prompts than this the longest is not counted."""


def run(spec: PosttrainSpec, launch: Launch) -> Run:
    """Train every seed of the spec, then summarize and plot the trial."""

    def check(start: Start) -> None:
        make_filter(spec.algorithm.filters)
        _lessons(spec, start)

    return run_tasks(spec, launch, run_session, FIXED, check)


def run_session(folder: Path, launch: Launch) -> None:
    """Train the one seed whose session folder this is."""
    run_tasks_session(folder, launch, _parts)


def run_tasks(
    spec: TasksKind,
    launch: Launch,
    session: Callable[[Path, Launch], None],
    fixed: Sequence[str],
    check: Callable[[Start], object] = lambda start: None,
) -> Run:
    """Train every seed of a spec that has tasks; `check` finds out whether it can run, before it has a folder."""
    device_of(spec)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UsageError(f"kind {spec.kind} trains in one process: start it without torchrun")
    load_hooks(spec.hooks)
    require_sinks(spec.track.sinks)
    launch = with_model(spec, launch)
    # A spec that cannot run ends here, before it has a folder.
    meant = starting_from(spec, launch.init)
    start = trained_start(meant.model, launch.root, chat=True)
    _context(meant, start)
    with (
        Verifiers(spec.tasks.train, root=launch.root) as judges,
        Verifiers(spec.tasks.eval, root=launch.root) as held_out,
    ):
        Prompts(spec.tasks, judges.tasks, spec.seed)
        for uses, tasks in ((spec.tasks.train, judges.tasks), (spec.tasks.eval, held_out.tasks)):
            for use in uses:
                encode_problem(tasks[use.label].problems(use.split)[0], start.tokenizer)
    make_workflow(spec.rollout.workflow)
    if spec.rollout.replay is not None and launch.resume is None:
        for seed in spec.seeds:
            find_rollouts(spec.rollout.replay, launch.root, seed, spec.train.steps)
    check(start)
    check_suites(spec.suites, start, launch.root)
    keep_start(launch.init)
    cuda = device_of(spec).type == "cuda"
    trial = run_sessions(
        spec,
        launch,
        session,
        fixed=fixed,
        threads=spec.threads or max(1, (os.cpu_count() or 1) // (1 if cuda else spec.max_session)),
        total=spec.train.steps,
        unit="steps",
    )
    trial.trial.write_summary(summary(trial))
    with clear_write_errors(trial.path):
        trial_plots(trial)
    return trial


def run_tasks_session(folder: Path, launch: Launch, make_parts: MakeParts) -> None:
    """Train one seed of a spec that has tasks."""
    session = Session.open(folder)
    spec = resolved(launch.spec)
    assert isinstance(spec, PosttrainSpec | DistillSpec)
    threads = torch.get_num_threads()
    torch.set_num_threads(session.manifest["threads"])
    try:
        with session, compile_cache(spec.train.compile_cache), ExitStack() as stack:
            spec = settled(spec, session, launch.init)
            start = trained_start(spec.model, launch.root, chat=True)
            train(spec, session, make_parts(spec, session, start, launch, stack), show=launch.show)
    finally:
        torch.set_num_threads(threads)


def _parts(spec: PosttrainSpec, session: Session, start: Start, launch: Launch, stack: ExitStack) -> PosttrainParts:
    model = build_model(spec, start, session.seed, device_of(spec))
    lessons = _lessons(spec, start)
    if lessons is not None:
        check_data(session, lessons, start)
    learner = _learner(spec, start, model, session.seed, lessons)
    prompts, chosen = spec.train.prompts_per_step, make_filter(spec.algorithm.filters)
    parts = assemble(spec, session, start, launch, stack, learner, prompts=prompts, filter=chosen)
    # Without a comparison within groups, equal rewards teach too.
    return parts if spec.algorithm.needs_group else replace(parts, silence=no_gradient)


def assemble(
    spec: TasksKind,
    session: Session,
    start: Start,
    launch: Launch,
    stack: ExitStack,
    learner: Learns,
    *,
    prompts: int,
    filter: Callable[[Group], str | None] = lambda group: None,
) -> PosttrainParts:
    """All that the loop works with, `prompts` of them answered in a batch; `stack` closes it."""
    seed = session.seed
    judges, held_out = (
        stack.enter_context(
            Verifiers(uses, workers=spec.rollout.verifiers, timeout=spec.rollout.verify_seconds, root=launch.root)
        )
        for uses in (spec.tasks.train, spec.tasks.eval)
    )
    # After the judges, so that it ends before them: what it runs may be judging.
    loop = stack.enter_context(LoopThread())
    asked = ask(spec.tasks.eval, held_out.tasks, start.tokenizer, spec.eval.problems)
    context, max_prompt = _context(spec, start, judges.tasks)
    longest = max((len(question.prompt) for each in asked for question in each.questions), default=0)
    new = spec.eval.max_new_tokens or spec.rollout.max_new_tokens
    eval_context = max(context, min(start.shape.context, longest + new))
    writer = _writer(spec, start, learner.engine, eval_context)
    generator = LocalGenerator(writer, drive="caller")
    starter = Starter(
        tasks=judges.tasks,
        workflow=make_workflow(spec.rollout.workflow),
        generator=generator,
        verify=judges.begin,
        tokenizer=start.tokenizer,
        sampling=Sampling(temperature=spec.rollout.temperature, max_new_tokens=spec.rollout.max_new_tokens),
        samples=spec.rollout.group,
        seed=seed,
        context=context,
        max_prompt=max_prompt,
    )
    executor = _replay(spec, session, start, launch.root) or Executor(
        Prompts(spec.tasks, judges.tasks, seed),
        starter,
        loop=loop,
        batch=prompts,
        samples=spec.rollout.group,
        staleness=spec.rollout.staleness,
        on_stale=spec.rollout.on_stale,
        running=spec.rollout.running,
        failures=spec.rollout.failures,
        total=spec.train.steps * prompts,
        timeout=spec.rollout.timeout_seconds,
        on_timeout=spec.rollout.on_timeout,
        max_filtered=spec.rollout.max_filtered_batches,
        filter=filter,
    )
    if isinstance(executor, Executor):
        executor.wake = generator.wake
    first = _first(spec, judges, starter)

    def evaluate(look: Callable[[], None]) -> dict[str, float]:
        if not asked:
            return {}
        work = evaluate_tasks(
            generator,
            start.tokenizer,
            held_out.verify,
            asked,
            spec.eval,
            context=eval_context,
            max_new_tokens=new,
            seed=seed,
            workflow=starter.workflow,
        )
        return pumped(generator, work, look).metrics

    def begin() -> dict[str, float]:
        if isinstance(executor, RolloutReplay):  # there is no generator to compare with
            log.info("the rollouts are those of %s: none are generated", executor.path)
            return {}
        introduce(first, start.tokenizer)
        return self_test(first, writer, learner.engine)

    keeper = ModelCheckpoint(learner.engine.transformer, start, Ranks())
    suites = Suites(spec.suites, learner.engine, start, session, launch.root, stack)
    return PosttrainParts(learner, executor, writer, generator, keeper, evaluate, suites, loop, begin)


def _lessons(spec: PosttrainSpec, start: Start) -> Data[Example] | None:
    """The conversations that are trained on beside the rewards."""
    if spec.sft is None:
        return None
    if spec.sft.data.context > start.shape.context:
        raise UsageError(
            f"sft.data.context: {spec.sft.data.context} tokens are more than the {start.shape.context} that the model "
            "reads"
        )
    return chat_data(spec.sft.data, start.tokenizer_folder)


def _first(spec: TasksKind, judges: Verifiers, starter: Starter) -> Episode:
    """The first problem of the first task whose prompt is not too long."""
    use = spec.tasks.train[0]
    problems = judges.tasks[use.label].problems(use.split)
    found = (starter.episode(problems[index], 0) for index in range(min(len(problems), LOOK_AT)))
    first = next((episode for episode in found if len(episode.prompt) <= starter.max_prompt), None)
    if first is None:
        raise UsageError(
            f"the first prompts of {use.label} (as many as {LOOK_AT}) have more than {starter.max_prompt} tokens: "
            "raise rollout.max_prompt_tokens, lower rollout.max_new_tokens, or take a model that reads more"
        )
    return first


def _learner(
    spec: PosttrainSpec, start: Start, model: Transformer, seed: int, lessons: Data[Example] | None
) -> Learner:
    algorithm, device = spec.algorithm, model.embed.device
    frozen = deepcopy(model).requires_grad_(False).to(model.dtype) if algorithm.needs_reference else None
    critic = None if algorithm.critic is None else Critic(deepcopy(model), algorithm, spec.train)
    compile_for_training(model, spec.train, device)
    updates = spec.train.steps * spec.train.minibatches * spec.train.epochs
    engine = TrainEngine(
        model,
        Optimizer(model, spec.optim, updates),
        Ranks(),
        micro_tokens=spec.train.micro_tokens,
        flops_per_token=start.shape.flops_per_token(spec.rollout.max_new_tokens),
    )
    aside = None
    if spec.sft is not None and lessons is not None:
        mixture = mixture_of(lessons, spec.sft.data, batch=spec.sft.batch, steps=updates, seed=seed)
        bytes_of = bytes_of_tokens(start.tokenizer, start.shape.vocab or 0)
        aside = Aside(NextToken(mixture, {}, bytes_of, batch=spec.sft.batch, eval_examples=1), spec.sft.weight)
    return Learner(spec, engine, seed=seed, reference=frozen, critic=critic, aside=aside)


def _writer(spec: TasksKind, start: Start, engine: TrainEngine, context: int) -> Engine:
    """The engine that generates, with weights of its own in the precision of the arithmetic."""
    dtype, device = engine.transformer.dtype, engine.device
    model = empty_model(start.shape, dtype, dtype, device)
    model.load_state_dict(engine.weights())
    rollout, prompts = spec.rollout, spec.train.prompts_per_step
    rows = min(rollout.running or prompts * (rollout.staleness + 1), prompts * (rollout.staleness + 1)) * rollout.group
    rows = max(rows, min(256, rows * 2)) if spec.tasks.eval else rows
    most = 1024 if device.type == "cuda" else 512
    return Engine(
        model,
        eos=frozenset(start.eos),
        tokenizer=start.tokenizer,
        dtype=dtype,
        device=device,
        context=context,
        kv_bytes=_room_for_keys(engine),
        max_running=min(rows, most),
        max_waiting=2**20,
    )


def _room_for_keys(engine: TrainEngine) -> int | None:
    """What generation may take of a GPU: half of what gradients and Adam's moments will leave. None for the CPU."""
    if engine.device.type != "cuda":
        return None
    trained = sum(p.numel() for p in engine.model.parameters() if p.requires_grad)
    free = torch.cuda.mem_get_info(engine.device)[0]
    return max(free - 12 * trained, free // 4) // 2


def _replay(spec: TasksKind, session: Session, start: Start, root: Path) -> RolloutReplay | None:
    """The rollouts of another run, if the spec asks for them; their file is written down at the first start."""
    if spec.rollout.replay is None:
        return None
    pinned = session.path / REPLAY
    if not pinned.exists():
        found = find_rollouts(spec.rollout.replay, root, session.seed, spec.train.steps)
        write_json(pinned, {"rollouts": str(found)})
    return RolloutReplay(Path(read_json(pinned)["rollouts"]), start.shape.vocab or 0)


def _context(spec: TasksKind, start: Start, tasks: Mapping[str, Task] | None = None) -> tuple[int, int]:
    """The most tokens of a rollout, for which the KV cache has room in every row, and the longest prompt.

    Without `max_prompt_tokens` the longest prompt of `tasks` is counted, where they are given and not too many.
    """
    rollout, reads = spec.rollout, start.shape.context
    if rollout.max_new_tokens >= reads:
        raise UsageError(
            f"rollout.max_new_tokens: {rollout.max_new_tokens} leave no room for a prompt: the model reads {reads}"
        )
    most = rollout.max_prompt_tokens
    if most is None and tasks is not None:
        most = longest_prompt([tasks[use.label].problems(use.split) for use in spec.tasks.train], start.tokenizer)
    longest = min(most or reads, reads - rollout.max_new_tokens)
    further = _further_turns(spec, start, tasks)
    context = reads if most is None or further is None else min(longest + rollout.max_new_tokens + further, reads)
    if tasks is not None and rollout.max_prompt_tokens is None:
        log.info("longest prompt: %s tokens; KV cache: %d tokens a row", most or "not counted", context)
    return context, longest


def longest_prompt(tasks: Sequence[Sequence[Problem]], tokenizer: Tokenizer) -> int | None:
    """Tokens of the longest prompt of some tasks; None where they have too many to count."""
    if sum(map(len, tasks)) > COUNTED:
        return None
    return max((len(encode_problem(problem, tokenizer)) for problem in chain(*tasks)), default=0)


def _further_turns(spec: TasksKind, start: Start, tasks: Mapping[str, Task] | None) -> int | None:
    """The most tokens of a rollout after its first turn; None where its workflow sets no bound."""
    workflow = spec.rollout.workflow
    if isinstance(workflow, SingleTurnSpec):
        return 0
    if not isinstance(workflow, MultiTurnSpec) or tasks is None:
        return None
    between = 0
    for use in spec.tasks.train:
        first = tasks[use.label].problems(use.split)[0]
        told = [feedback_tokens(first, start.tokenizer, workflow.feedback, turn) for turn in range(1, workflow.turns)]
        between = max(between, sum(map(len, told)))
    return between + (workflow.turns - 1) * spec.rollout.max_new_tokens
