"""What a workflow works with: prompt tokens, seeds, the generator, the verifier, and the growing transcript."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from palestra.data.chat import encode_chat
from palestra.data.mixture import stream_key
from palestra.data.tokenizers import Tokenizer
from palestra.errors import UsageError
from palestra.generate.types import Generation, Generator, Request, Sampling, StopReason
from palestra.rollout.types import Trajectory
from palestra.tasks.task import Answer, Problem, Task, Verdict

Judge = Callable[[Problem, Answer], Verdict | Awaitable[Verdict]]
"""Says whether an answer to a problem is right, at once or when it is awaited."""


@dataclass(frozen=True)
class Episode:
    """One group: a problem to be answered `samples` times."""

    problem: Problem
    prompt: tuple[int, ...]
    """The problem as tokens."""
    samples: int
    seed: int
    """All that is drawn comes from it."""
    sampling: Sampling
    """How answers are drawn, with the task's stop strings."""
    generator: Generator
    judge: Judge
    tokenizer: Tokenizer
    context: int
    """The most tokens that the model reads."""

    async def generate(
        self, prompt: tuple[int, ...], *, n: int = 1, turn: int = 0, sample: int = 0
    ) -> tuple[Generation, ...]:
        """Go on from tokens; `turn` and `sample` give draws of their own."""
        sampling = replace(
            self.sampling,
            seed=stream_key(self.seed, "turn", turn, sample) >> 1,
            max_new_tokens=min(self.sampling.max_new_tokens, self.context - len(prompt)),
        )
        return (await self.generator.generate(Request(prompt, sampling, n))).generations

    async def verdict(self, generation: Generation, prompt: tuple[int, ...] | None = None) -> Verdict:
        """Of an answer that was generated."""
        return (await self.verdicts([generation], prompt))[0]

    async def verdicts(
        self, generations: Sequence[Generation], prompt: tuple[int, ...] | None = None
    ) -> Sequence[Verdict]:
        """Of several answers to one prompt; those that take time are judged at the same time."""
        asked = self.prompt if prompt is None else prompt
        text = self.tokenizer.decode(asked, specials=True)
        begun = [self.judge(self.problem, _answer(one, text, asked)) for one in generations]
        waiting = [one for one in begun if not isinstance(one, Verdict)]
        ended = iter(await asyncio.gather(*waiting) if waiting else ())
        return [one if isinstance(one, Verdict) else next(ended) for one in begun]


def _answer(generation: Generation, prompt_text: str, prompt: tuple[int, ...]) -> Answer:
    return Answer(
        text=generation.text or "",
        truncated=generation.stop_reason == StopReason.LENGTH,
        prompt_text=prompt_text,
        prompt_ids=prompt,
        completion_ids=generation.tokens,
    )


def encode_problem(problem: Problem, tokenizer: Tokenizer) -> tuple[int, ...]:
    """The tokens of a problem's prompt: plain text, or a conversation in the model's own template."""
    if isinstance(problem.prompt, str):
        return tuple(tokenizer.encode_prompt(problem.prompt))
    if tokenizer.chat_template is None:
        raise UsageError(
            f"{problem.id} is a conversation, and the model has no chat template: give it one with "
            "`model.chat_template`, or ask the task for plain text with `args: {format: plain}`"
        )
    return tuple(encode_chat(tokenizer, problem.prompt, add_generation_prompt=True).tokens)


def trajectory(prompt: tuple[int, ...], generation: Generation, verdict: Verdict) -> Trajectory:
    """A prompt and one answer to it."""
    return Trajectory(
        tokens=prompt + generation.tokens,
        loss_mask=(False,) * len(prompt) + (True,) * len(generation.tokens),
        logprobs=(0.0,) * len(prompt) + generation.logprobs,
        versions=(-1,) * len(prompt) + generation.versions,
        reward=verdict.score,
        verdict=verdict,
        stop_reason=str(generation.stop_reason),
        completion=generation.text or "",
        turns=((len(prompt), len(prompt) + len(generation.tokens)),),
    )


Workflow = Callable[[Episode], Awaitable[list[Trajectory]]]
"""From a problem to judged trajectories."""


@dataclass(frozen=True)
class Starter:
    """Begins workflows, the same for the same number: seeds come from the run's seed and the number alone."""

    tasks: Mapping[str, Task]
    workflow: Workflow
    generator: Generator
    judge: Judge
    tokenizer: Tokenizer
    sampling: Sampling
    samples: int
    seed: int
    context: int
    """The most tokens that the model reads."""
    max_prompt: int

    def __call__(self, problem: Problem, number: int, attempt: int) -> Awaitable[list[Trajectory]] | None:
        """The workflow of a problem; None where its prompt is too long."""
        episode = self.episode(problem, number, attempt)
        return None if len(episode.prompt) > self.max_prompt else self.workflow(episode)

    def episode(self, problem: Problem, number: int, attempt: int = 0) -> Episode:
        """What the workflow of a problem works with."""
        return Episode(
            problem=problem,
            prompt=encode_problem(problem, self.tokenizer),
            samples=self.samples,
            seed=stream_key(self.seed, "rollout", number, attempt),
            sampling=replace(self.sampling, stop=self.tasks[problem.task].stops),
            generator=self.generator,
            judge=self.judge,
            tokenizer=self.tokenizer,
            context=self.context,
        )


@dataclass(frozen=True)
class Transcript:
    """The arrays of a trajectory so far. What is in it is never tokenized again."""

    tokens: tuple[int, ...]
    loss_mask: tuple[bool, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    turns: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, prompt: Sequence[int]) -> "Transcript":
        """One that begins with a prompt."""
        return cls((), (), (), ()).told(prompt)

    @property
    def drawn(self) -> int:
        """How many tokens the model drew."""
        return sum(self.loss_mask)

    def told(self, tokens: Sequence[int]) -> "Transcript":
        """With tokens that the model only reads: nothing is learned from them."""
        count = len(tokens)
        return Transcript(
            self.tokens + tuple(tokens),
            self.loss_mask + (False,) * count,
            self.logprobs + (0.0,) * count,
            self.versions + (-1,) * count,
            self.turns,
        )

    def drew(self, generation: Generation) -> "Transcript":
        """With what the model drew."""
        begin, end = len(self.tokens), len(self.tokens) + len(generation.tokens)
        return Transcript(
            self.tokens + generation.tokens,
            self.loss_mask + (True,) * (end - begin),
            self.logprobs + generation.logprobs,
            self.versions + generation.versions,
            (*self.turns, (begin, end)) if begin < end else self.turns,
        )

    def trajectory(
        self, prompt: int, verdict: Verdict, reward: float, stop_reason: str, tokenizer: Tokenizer
    ) -> Trajectory:
        """The trajectory it has become; its first `prompt` tokens are the prompt."""
        return Trajectory(
            tokens=self.tokens,
            loss_mask=self.loss_mask,
            logprobs=self.logprobs,
            versions=self.versions,
            reward=reward,
            verdict=verdict,
            stop_reason=stop_reason,
            completion=tokenizer.decode(self.tokens[prompt:], specials=True, continues=True),
            turns=self.turns,
        )


async def sampled(episode: Episode, go_on: Callable[[int, Generation], Awaitable[Trajectory]]) -> list[Trajectory]:
    """Draw the first turn of all samples together, the prompt computed once; from there each goes its own way.

    `go_on` is given the number of a sample and its first turn. Where one fails the others are ended.
    """
    first = await episode.generate(episode.prompt, n=episode.samples)
    tasks = [asyncio.ensure_future(go_on(sample, drawn)) for sample, drawn in enumerate(first)]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
