"""Evaluation by generation: every problem sampled and verified with the weights of one version."""

import asyncio
import hashlib
import logging
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from palestra.data.media import Image
from palestra.data.mixture import stream_key
from palestra.data.tokenizers import Tokenizer
from palestra.errors import PalestraError, UsageError
from palestra.evaluate.records import (
    EvaluationRecord,
    Mode,
    ProblemOutcome,
    VerifiedCompletion,
    outcome,
    overall,
    task_metrics,
)
from palestra.generate.engine.engine import Engine
from palestra.generate.local import LocalGenerator
from palestra.generate.types import DrivenGenerator, Generator, Sampling, StopReason
from palestra.lm.model import Transformer
from palestra.rollout.episode import Episode, Verify, Workflow, encode_media
from palestra.rollout.event_loop import LoopThread
from palestra.rollout.workflows import make_workflow, single_turn
from palestra.spec.kinds.evaluate import AnswerEval
from palestra.spec.kinds.posttrain import TaskEval
from palestra.spec.tasks import TaskUse
from palestra.tasks.task import Problem, Task

IDLE_SECONDS = 0.05  # between two polls while there is nothing to generate, as when all completions are being verified

Result = TypeVar("Result")


def pumped(
    generator: DrivenGenerator, work: Coroutine[Any, Any, Result], look: Callable[[], None] = lambda: None
) -> Result:
    """Run `work` in a background event loop while this thread drives the generator.

    `look` is called between two bursts and may raise to end it: the coroutine is then cancelled, and has ended when
    this raises.
    """
    with LoopThread("evaluate") as loop:
        future = loop.start(work)
        future.add_done_callback(lambda _: generator.wake())
        while not future.done():
            look()
            generator.work(IDLE_SECONDS)
        return future.result()


@dataclass(frozen=True)
class EvalProblem:
    """A problem and its prompt in tokens."""

    problem: Problem
    prompt: tuple[int, ...]
    media: tuple[Image, ...] = ()


@dataclass(frozen=True)
class EvalTask:
    """The problems of one task, with their prompts."""

    use: TaskUse
    stops: tuple[str, ...]
    args: Mapping[str, Any]
    """All args of the task, defaults included."""
    questions: tuple[EvalProblem, ...]
    total: int
    """How many problems the split has."""

    @property
    def label(self) -> str:
        """The name of the task in this run."""
        return self.use.label

    @property
    def chat(self) -> bool:
        """Whether the prompts are conversations."""
        return any(not isinstance(question.problem.prompt, str) for question in self.questions)

    def identity(self, tokenizer: Tokenizer) -> dict[str, Any]:
        """What makes two scores on these questions comparable; plain data."""
        digest = hashlib.sha256()
        for question in self.questions:
            digest.update(f"{question.problem.id} {question.prompt}\n".encode())
            for image in question.media:
                digest.update(image.digest)
        return {
            "task": self.use.task,
            "split": self.use.split,
            "args": dict(self.args),
            "reward": None if self.use.reward is None else self.use.reward.model_dump(mode="json"),
            "problems": len(self.questions),
            "of": self.total,
            "format": "chat" if self.chat else "plain",
            "stop": list(self.stops),
            "first_prompt": tokenizer.decode(self.questions[0].prompt, specials=True),
            "first_prompt_tokens": list(self.questions[0].prompt),
            "prompts_sha256": digest.hexdigest(),
        }


def ask(uses: Sequence[TaskUse], tasks: Mapping[str, Task], tokenizer: Tokenizer, problems: int) -> list[EvalTask]:
    """The first `problems` of each task's split, tokenized; `tasks` are by label, as `Verifiers` has them."""
    asked = []
    for use in uses:
        task, split = tasks[use.label], tasks[use.label].part(use.split)
        if not len(split):
            raise UsageError(f"the split {use.split!r} of {use.label} has no problems")
        chosen = [split[index] for index in range(min(problems, len(split)))]
        if twice := [id for id, count in Counter(problem.id for problem in chosen).items() if count > 1]:
            raise UsageError(f"{use.label}: {len(twice)} ids are shared by several problems, such as {twice[0]}")
        questions = tuple(EvalProblem(problem, *encode_media(problem, tokenizer)) for problem in chosen)
        asked.append(EvalTask(use, task.stops, task.args.model_dump(mode="json"), questions, len(split)))
    return asked


log = logging.getLogger("palestra.evaluate")

RUNNING = 256
"""Problems in flight: as many as fill the rows of an engine."""


@dataclass(frozen=True)
class Evaluation:
    """The results of an evaluation on tasks."""

    records: tuple[EvaluationRecord, ...]
    """In the order of the problems, whatever order they finished in."""
    outcomes: dict[str, dict[Mode, ProblemOutcome]]
    """By task and mode."""
    metrics: dict[str, float]
    """`eval/<task>/accuracy`, `eval/<task>/pass@8`, `eval/<task>/truncated`, …, and the means over the tasks."""


async def evaluate_tasks(
    generator: Generator,
    tokenizer: Tokenizer,
    judge: Verify,
    asked: Sequence[EvalTask],
    settings: TaskEval,
    *,
    context: int,
    max_new_tokens: int,
    seed: int,
    workflow: Workflow = single_turn,
    running: int = RUNNING,
    done: Iterable[EvaluationRecord] = (),
    keep: Callable[[EvaluationRecord], None] = lambda record: None,
) -> Evaluation:
    """Sample greedily and `settings.samples` times for every question, and verify all completions.

    It only awaits: whoever owns the device drives the generator meanwhile, and publishes no other weights until it has
    ended, which is checked. Completions depend on the seed and the problem alone, not on which others are in flight.

    Args:
        generator: Writes the completions.
        tokenizer: The model's.
        judge: `Verifiers.verify`.
        asked: What `ask` gives; it reads data, so do it before the loop is busy.
        settings: Which completions to sample; its `max_new_tokens` and `problems` are for the caller to read.
        context: The longest sequence of the model, in tokens.
        max_new_tokens: Limit of each completion.
        seed: Of all sampling.
        workflow: The one that the model is trained with.
        running: Problems in flight, at most.
        done: Records of an interrupted evaluation, taken as they are.
        keep: Called, in this loop, with every new record; for example, appends it to a file.
    """
    modes: list[Mode] = [*(["greedy"] if settings.greedy else []), *(["samples"] if settings.samples else [])]
    order = {
        (question.problem.id, mode): (questions, question, mode)
        for questions in asked
        for question in questions.questions
        for mode in modes
    }
    records = {record.key: record for record in done if record.key in order}
    todo = iter([entry for key, entry in order.items() if key not in records])
    versions: set[int] = set()

    async def worker() -> None:
        for questions, question, mode in todo:  # one iterator for all workers: a free one takes the next
            temperature = 0.0 if mode == "greedy" else settings.temperature
            episode = Episode(
                problem=question.problem,
                prompt=question.prompt,
                samples=1 if mode == "greedy" else settings.samples,
                seed=stream_key(seed, "evaluate", mode, question.problem.id),
                sampling=Sampling(temperature=temperature, max_new_tokens=max_new_tokens, stop=questions.stops),
                generator=generator,
                verify=judge,
                tokenizer=tokenizer,
                context=context,
                media=question.media,
            )
            record = await _answered(episode, questions.label, mode, workflow, versions)
            records[record.key] = record
            keep(record)

    workers = [asyncio.create_task(worker()) for _ in range(min(running, len(order)))]
    try:
        await asyncio.gather(*workers)
    except BaseException:  # also cancellation: none of the others may go on
        for task in workers:
            task.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
        raise
    return _evaluation([records[key] for key in order], asked, modes, settings.k)


async def _answered(
    episode: Episode, label: str, mode: Mode, workflow: Workflow, versions: set[int]
) -> EvaluationRecord:
    name, prompt = episode.problem.id, episode.prompt
    known = (name, label, mode, episode.tokenizer.decode(prompt, specials=True), len(prompt))
    if len(prompt) >= episode.context:
        log.warning(
            "%s: a prompt of %d tokens leaves no room for a completion in a context of %d and counts as wrong",
            name,
            len(prompt),
            episode.context,
        )
        return EvaluationRecord(*known, answers=())
    trajectories = [one for one in await workflow(episode) if one.row == 0]
    if len(trajectories) != episode.samples:
        raise PalestraError(
            f"{name}: the workflow returned {len(trajectories)} of {episode.samples} completions; an evaluation needs "
            "all of them, or its score would be over a selection"
        )
    for trajectory in trajectories:
        if trajectory.stop_reason == StopReason.ABORT:
            raise PalestraError(f"{name}: the generator aborted a completion: evaluate again")
        versions |= {v for v, sampled in zip(trajectory.versions, trajectory.loss_mask, strict=True) if sampled}
    if len(versions) > 1:
        raise PalestraError(
            f"weights were published during an evaluation: its completions are of versions {sorted(versions)}, so the "
            "score belongs to none of them. Publish when the evaluation has ended"
        )
    verified = (VerifiedCompletion(one.completion, one.sampled, one.stop_reason, one.verdict) for one in trajectories)
    further = sum(begin for one in trajectories for begin, _ in one.turns[1:])
    return EvaluationRecord(*known, answers=tuple(verified), further_tokens=further)


def _evaluation(
    records: list[EvaluationRecord], asked: Sequence[EvalTask], modes: Sequence[Mode], k: Sequence[int]
) -> Evaluation:
    outcomes: dict[str, dict[Mode, ProblemOutcome]] = {}
    metrics: dict[str, float] = {}
    for label in (questions.label for questions in asked):
        outcomes[label] = {}
        for mode in modes:
            mine = [record for record in records if record.task == label and record.mode == mode]
            _check_judged(label, mine)
            outcomes[label][mode] = outcome(mine, k if mode == "samples" else ())
        metrics |= task_metrics(label, outcomes[label].get("greedy"), outcomes[label].get("samples"))
    return Evaluation(tuple(records), outcomes, metrics | (overall(metrics, list(outcomes)) if outcomes else {}))


def _check_judged(label: str, records: Sequence[EvaluationRecord]) -> None:
    """A verifier that fails on every completion is broken, and 0 % would be wrong; single failures are logged."""
    answers = [answer for record in records for answer in record.answers]
    failed = [answer for answer in answers if answer.verdict.status == "error"]
    if failed and len(failed) == len(answers):
        note = failed[0].verdict.note or "no reason given"
        raise PalestraError(f"the verifier of {label} failed on all {len(answers)} completions: {note}")
    if failed:
        log.warning(
            "%s: the verifier failed on %d of %d completions, which count as wrong; the first: %s",
            label,
            len(failed),
            len(answers),
            failed[0].verdict.note,
        )


ROWS = {"cuda": 1024, "cpu": 256}
"""Completions in flight."""


def evaluate_model(
    model: Transformer,
    tokenizer: Tokenizer,
    eos: Iterable[int],
    judge: Verify,
    asked: Sequence[EvalTask],
    settings: AnswerEval,
    *,
    device: torch.device,
    seed: int,
    dtype: torch.dtype | None = None,
    done: Iterable[EvaluationRecord] = (),
    keep: Callable[[EvaluationRecord], None] = lambda record: None,
    look: Callable[[], None] = lambda: None,
) -> Evaluation:
    """`evaluate_tasks` by an engine with a copy of the model on the device; `look` is that of `pumped`."""
    context, rows = model.shape.context, ROWS[device.type]
    if settings.workflow.name == "single_turn":
        prompts = [len(question.prompt) for questions in asked for question in questions.questions]
        longest = max((length for length in prompts if length < context), default=0)
        context = min(context, longest + settings.max_new_tokens)
    engine = Engine(
        model, eos=frozenset(eos), tokenizer=tokenizer, dtype=dtype, device=device, context=context, max_running=rows
    )
    generator = LocalGenerator(engine, drive="caller")
    work = evaluate_tasks(
        generator,
        tokenizer,
        judge,
        asked,
        settings,
        context=engine.context,
        max_new_tokens=settings.max_new_tokens,
        seed=seed,
        workflow=make_workflow(settings.workflow),
        running=rows,
        done=done,
        keep=keep,
    )
    return pumped(generator, work, look)
