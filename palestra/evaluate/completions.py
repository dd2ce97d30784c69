"""Evaluation by generation: every problem sampled and verified with the weights of one version."""

import asyncio
import hashlib
import logging
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from palestra.data.mixture import stream_key
from palestra.data.tokenizers import Tokenizer
from palestra.errors import PalestraError, UsageError
from palestra.evaluate.records import EvaluationRecord, Judged, Mode, ProblemOutcome, outcome, overall, task_metrics
from palestra.generate.engine.engine import Engine
from palestra.generate.local import LocalGenerator
from palestra.generate.types import Generator, Sampling, StopReason
from palestra.lm.model import Transformer
from palestra.rollout.episode import Episode, Verify, Workflow, encode_problem
from palestra.rollout.event_loop import LoopThread
from palestra.rollout.workflows import single_turn
from palestra.spec.kinds.evaluate import AnswerEval
from palestra.spec.kinds.posttrain import TaskEval
from palestra.spec.tasks import TaskUse
from palestra.tasks.task import Problem, Task

IDLE_SECONDS = 0.05  # between two looks while there is nothing to generate, as when all answers are being judged

Result = TypeVar("Result")


def pumped(
    generator: LocalGenerator, work: Coroutine[Any, Any, Result], look: Callable[[], None] = lambda: None
) -> Result:
    """Run `work` to its end; the generator is one with `drive="caller"`.

    `look` is called between two bursts and may raise to end it all: the coroutine is then cancelled, and has ended
    when this raises.
    """
    with LoopThread("evaluate") as loop:
        future = loop.start(work)
        future.add_done_callback(lambda _: generator.wake())
        while not future.done():
            look()
            generator.work(IDLE_SECONDS)
        return future.result()


@dataclass(frozen=True)
class Question:
    """A problem, with its prompt as the model reads it."""

    problem: Problem
    prompt: tuple[int, ...]


@dataclass(frozen=True)
class Questions:
    """What is asked of one task."""

    use: TaskUse
    stops: tuple[str, ...]
    args: Mapping[str, Any]
    """All args of the task, defaults included."""
    questions: tuple[Question, ...]
    total: int
    """How many problems the split has."""

    @property
    def label(self) -> str:
        """The name of the task in this run."""
        return self.use.label

    @property
    def chat(self) -> bool:
        """Whether the model is asked in conversations."""
        return any(not isinstance(question.problem.prompt, str) for question in self.questions)

    def identity(self, tokenizer: Tokenizer) -> dict[str, Any]:
        """What makes a score on these questions comparable with another; plain data."""
        digest = hashlib.sha256()
        for question in self.questions:
            digest.update(f"{question.problem.id} {question.prompt}\n".encode())
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


def ask(uses: Sequence[TaskUse], tasks: Mapping[str, Task], tokenizer: Tokenizer, problems: int) -> list[Questions]:
    """The first `problems` of each task's split, ready to be asked; `tasks` are by label, as `Verifiers` has them."""
    return [_asked(use, tasks[use.label], tokenizer, problems) for use in uses]


def _asked(use: TaskUse, task: Task, tokenizer: Tokenizer, problems: int) -> Questions:
    found = task.problems(use.split)
    total = len(found)
    if not total:
        raise UsageError(f"the split {use.split!r} of {use.label} has no problems")
    chosen = [found[index] for index in range(min(problems, total))]
    twice = [id for id, count in Counter(problem.id for problem in chosen).items() if count > 1]
    if twice:
        raise UsageError(f"{len(twice)} ids of {use.label} stand for several problems each, {twice[0]} is one of them")
    questions = tuple(Question(problem, encode_problem(problem, tokenizer)) for problem in chosen)
    return Questions(use, task.stops, task.args.model_dump(mode="json"), questions, total)


log = logging.getLogger("palestra.evaluate")

RUNNING = 256
"""Problems at work at the same time: as many as fill the rows of an engine."""


@dataclass(frozen=True)
class Evaluation:
    """What came of an evaluation on tasks."""

    records: tuple[EvaluationRecord, ...]
    """In the order of the problems, whatever order they were answered in."""
    outcomes: dict[str, dict[Mode, ProblemOutcome]]
    """By task and mode."""
    metrics: dict[str, float]
    """`eval/<task>/accuracy`, `eval/<task>/pass@8`, `eval/<task>/truncated`, …, and the means over the tasks."""


async def evaluate_tasks(
    generator: Generator,
    tokenizer: Tokenizer,
    judge: Verify,
    asked: Sequence[Questions],
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
    """Answer every question greedily and `settings.samples` times, and judge all of it.

    It only awaits: whoever owns the device lets the generator work meanwhile, and publishes no other weights until it
    has ended, which is checked. What is drawn depends on the seed and the problem alone, not on which others are asked
    or when. Records in `done` are taken as they are; `keep` is called, in this loop, with every new one.

    Args:
        generator: What answers.
        tokenizer: The model's.
        judge: `Verifiers.verify`.
        asked: What `palestra.evaluate.completions.ask` gives; it reads data, so do it before the loop is busy.
        settings: Which answers to make; its `max_new_tokens` and `problems` are for the caller to read.
        context: The most tokens that the model reads.
        max_new_tokens: The most that it writes.
        seed: All that is drawn comes from it.
        workflow: The one that the model is trained with.
        running: Problems at work at the same time, at most.
        done: What an evaluation that was cut short has left.
        keep: For example, appends to a file.
    """
    modes: list[Mode] = [*(["greedy"] if settings.greedy else []), *(["samples"] if settings.samples else [])]
    order = {
        (question.problem.id, mode): (questions, question, mode)
        for questions in asked
        for question in questions.questions
        for mode in modes
    }
    found = {record.key: record for record in done if record.key in order}
    todo = iter([one for key, one in order.items() if key not in found])
    versions: set[int] = set()

    async def answer() -> None:
        for questions, question, mode in todo:  # one list for all: who is free takes the next
            sampling = Sampling(
                temperature=0.0 if mode == "greedy" else settings.temperature,
                max_new_tokens=max_new_tokens,
                stop=questions.stops,
            )
            episode = Episode(
                problem=question.problem,
                prompt=question.prompt,
                samples=1 if mode == "greedy" else settings.samples,
                seed=stream_key(seed, "evaluate", mode, question.problem.id),
                sampling=sampling,
                generator=generator,
                verify=judge,
                tokenizer=tokenizer,
                context=context,
            )
            record = await _answered(episode, questions, question, mode, workflow, versions)
            found[record.key] = record
            keep(record)

    await _all([asyncio.create_task(answer()) for _ in range(min(running, len(order)))])
    return _evaluation([found[key] for key in order], asked, modes, settings.k)


async def _answered(
    episode: Episode,
    questions: Questions,
    question: Question,
    mode: Mode,
    workflow: Workflow,
    versions: set[int],
) -> EvaluationRecord:
    shown = episode.tokenizer.decode(question.prompt, specials=True)
    known = (question.problem.id, questions.label, mode, shown, len(question.prompt))
    if len(question.prompt) >= episode.context:
        log.warning(
            "%s has %d tokens, which leave no room for an answer in a context of %d: it counts as wrong",
            question.problem.id,
            len(question.prompt),
            episode.context,
        )
        return EvaluationRecord(*known, answers=())
    trajectories = await workflow(episode)
    if len(trajectories) != episode.samples:
        raise PalestraError(
            f"{question.problem.id}: the workflow gave {len(trajectories)} of {episode.samples} answers; an "
            "evaluation needs all of them, or the rest would be a choice"
        )
    for one in trajectories:
        if one.stop_reason == StopReason.ABORT:
            raise PalestraError(f"an answer to {question.problem.id} was broken off by the generator: evaluate again")
        versions |= {v for v, drawn in zip(one.versions, one.loss_mask, strict=True) if drawn}
    if len(versions) > 1:
        raise PalestraError(
            f"weights were published in the middle of an evaluation: answers are of the versions {sorted(versions)}, "
            "and a score of them would be of no model. Publish when the evaluation has ended"
        )
    return EvaluationRecord(*known, answers=tuple(Judged.of(one) for one in trajectories))


async def _all(tasks: list[asyncio.Task[None]]) -> None:
    """Wait for all; where one fails, or this is cancelled, nothing of the others is left at work."""
    try:
        await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


def _evaluation(
    records: list[EvaluationRecord], asked: Sequence[Questions], modes: Sequence[Mode], k: Sequence[int]
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
    """A judge that fails on everything is broken, and 0 % would be a lie; one that fails at times is told of."""
    answers = [answer for record in records for answer in record.answers]
    failed = [answer for answer in answers if answer.verdict.status == "error"]
    if failed and len(failed) == len(answers):
        raise PalestraError(
            f"the judge of {label} failed on all of its {len(answers)} answers: {failed[0].verdict.note or 'no reason'}"
        )
    if failed:
        log.warning(
            "%s: %d of %d answers could not be judged, which counts as wrong; the first: %s",
            label,
            len(failed),
            len(answers),
            failed[0].verdict.note,
        )


ROWS = {"cuda": 1024, "cpu": 256}
"""Answers that are written at the same time."""


def answering_engine(
    model: Transformer,
    tokenizer: Tokenizer,
    eos: Iterable[int],
    asked: Sequence[Questions],
    settings: AnswerEval,
    *,
    device: torch.device,
    dtype: torch.dtype | None = None,
) -> Engine:
    """An engine with a copy of the model on the device."""
    reads = model.shape.context
    prompts = [len(one.prompt) for questions in asked for one in questions.questions]
    longest = max((length for length in prompts if length < reads), default=0)
    single = settings.workflow.name == "single_turn"
    return Engine(
        model,
        eos=frozenset(eos),
        tokenizer=tokenizer,
        dtype=dtype,
        device=device,
        context=min(reads, longest + settings.max_new_tokens) if single else reads,
        max_running=ROWS[device.type],
    )
