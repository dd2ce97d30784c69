"""The interface of a workflow: prompt tokens, seeds, the generator, the verifier, and the growing transcript."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from palestra.data.chat import encode_chat
from palestra.data.media import Image
from palestra.data.mixture import stream_key
from palestra.data.tokenizers import Tokenizer
from palestra.errors import UsageError
from palestra.generate.types import RESHAPES, Generation, Generator, Request, Sampling, StopReason
from palestra.rollout.types import Trajectory
from palestra.tasks.task import Completion, Problem, Task, Verdict

Result = TypeVar("Result")
Verify = Callable[[Problem, Completion], Verdict | Awaitable[Verdict]]
"""The verdict on a completion, at once or to be awaited."""


@dataclass(frozen=True)
class Episode:
    """One group: a problem with `samples` completions."""

    problem: Problem
    prompt: tuple[int, ...]
    """The problem as tokens."""
    samples: int
    seed: int
    """All randomness of the episode comes from it."""
    sampling: Sampling
    """With the task's stop strings."""
    generator: Generator
    verify: Verify
    tokenizer: Tokenizer
    context: int
    """The most tokens that the model reads."""
    trained: bool = False
    """Whether its trajectories are trained on."""
    media: tuple[Image, ...] = ()
    """The images of the prompt; longer prompts that begin with it have them too."""

    async def generate(
        self, prompt: tuple[int, ...], *, n: int = 1, turn: int = 0, sample: int = 0
    ) -> tuple[Generation, ...]:
        """Continue from tokens; each pair of `turn` and `sample` has a seed of its own."""
        if self.trained and (given := self.sampling.given(RESHAPES)):
            raise UsageError(
                f"{', '.join(given)}: the trainer computes log-probabilities at the rollout's temperature alone, and "
                "would train on another distribution than was sampled from: leave it out"
            )
        limit = min(self.sampling.max_new_tokens, self.context - len(prompt))
        seed = stream_key(self.seed, "turn", turn, sample) >> 1
        sampling = replace(self.sampling, seed=seed, max_new_tokens=limit)
        return (await self.generator.generate(Request(prompt, sampling, n, media=self.media))).generations

    async def verdict(self, generation: Generation, prompt: tuple[int, ...] | None = None) -> Verdict:
        """The verdict on a completion."""
        return (await self.verdicts([generation], prompt))[0]

    async def verdicts(
        self, generations: Sequence[Generation], prompt: tuple[int, ...] | None = None
    ) -> Sequence[Verdict]:
        """The verdicts on several completions of one prompt; those that take time are awaited together."""
        prompt = self.prompt if prompt is None else prompt
        text = self.tokenizer.decode(prompt, specials=True)
        begun = []
        for one in generations:
            completion = Completion(one.text or "", one.stop_reason == StopReason.LENGTH, text, prompt, one.tokens)
            begun.append(self.verify(self.problem, completion))
        pending = [verdict for verdict in begun if not isinstance(verdict, Verdict)]
        ended = iter(await asyncio.gather(*pending) if pending else ())
        return [verdict if isinstance(verdict, Verdict) else next(ended) for verdict in begun]


def encode_problem(problem: Problem, tokenizer: Tokenizer) -> tuple[int, ...]:
    """The tokens of a problem's prompt: plain text, or a conversation in the model's own template."""
    return encode_media(problem, tokenizer)[0]


def encode_media(problem: Problem, tokenizer: Tokenizer) -> tuple[tuple[int, ...], tuple[Image, ...]]:
    """The same, with the images that are in it."""
    if isinstance(problem.prompt, str):
        return tuple(tokenizer.encode_prompt(problem.prompt)), ()
    if tokenizer.chat_template is None:
        raise UsageError(
            f"{problem.id} is a conversation, and the model has no chat template: give it one with "
            "`model.chat_template`, or ask the task for plain text with `args: {format: plain}`"
        )
    try:
        encoded = encode_chat(tokenizer, problem.prompt, add_generation_prompt=True)
    except UsageError as error:
        raise UsageError(f"{problem.id}: {error}") from error
    return tuple(encoded.tokens), encoded.images


Workflow = Callable[[Episode], Awaitable[list[Trajectory]]]
"""From a problem to verified trajectories."""


@dataclass(frozen=True)
class Starter:
    """Starts workflows, reproducibly: seeds depend on the run's seed, the prompt's number and the attempt alone."""

    tasks: Mapping[str, Task]
    workflow: Workflow
    generator: Generator
    verify: Verify
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
        return None if len(episode.prompt) > self.max_prompt else _with_media(self.workflow(episode), episode.media)

    def episode(self, problem: Problem, number: int, attempt: int = 0) -> Episode:
        """The episode of a problem."""
        prompt, media = encode_media(problem, self.tokenizer)
        return Episode(
            problem,
            prompt=prompt,
            media=media,
            samples=self.samples,
            seed=stream_key(self.seed, "rollout", number, attempt),
            sampling=replace(self.sampling, stop=self.tasks[problem.task].stops),
            generator=self.generator,
            verify=self.verify,
            tokenizer=self.tokenizer,
            context=self.context,
            trained=True,
        )


async def _with_media(work: Awaitable[list[Trajectory]], media: tuple[Image, ...]) -> list[Trajectory]:
    """Trajectories, which begin with the prompt, with its images, unless a workflow has said which they have."""
    done = await work
    return [replace(one, media=media) if media and not one.media else one for one in done]


@dataclass(frozen=True)
class Transcript:
    """The arrays of a trajectory so far. Its tokens are never decoded and encoded again."""

    tokens: tuple[int, ...] = ()
    loss_mask: tuple[bool, ...] = ()
    logprobs: tuple[float, ...] = ()
    versions: tuple[int, ...] = ()
    turns: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, prompt: Sequence[int]) -> "Transcript":
        """One that begins with a prompt."""
        return cls().with_context(prompt)

    @property
    def sampled(self) -> int:
        """How many tokens the model sampled."""
        return sum(self.loss_mask)

    def with_context(self, tokens: Sequence[int]) -> "Transcript":
        """With tokens that the model only reads: nothing is learned from them."""
        return self._with(tuple(tokens), False, (0.0,) * len(tokens), (-1,) * len(tokens))

    def with_sampled(self, generation: Generation) -> "Transcript":
        """With a turn that the model sampled."""
        longer = self._with(generation.tokens, True, generation.logprobs, generation.versions)
        turn = (len(self.tokens), len(longer.tokens))
        return replace(longer, turns=(*self.turns, turn)) if generation.tokens else longer

    def _with(
        self, tokens: tuple[int, ...], sampled: bool, logprobs: tuple[float, ...], versions: tuple[int, ...]
    ) -> "Transcript":
        mask = self.loss_mask + (sampled,) * len(tokens)
        return Transcript(self.tokens + tokens, mask, self.logprobs + logprobs, self.versions + versions, self.turns)

    def trajectory(
        self, prompt: int, verdict: Verdict, reward: float, stop_reason: str, tokenizer: Tokenizer
    ) -> Trajectory:
        """The finished trajectory; its first `prompt` tokens are the prompt."""
        completion = tokenizer.decode(self.tokens[prompt:], specials=True, continues=True)
        return Trajectory(**vars(self), reward=reward, verdict=verdict, stop_reason=stop_reason, completion=completion)


def trajectory(prompt: tuple[int, ...], generation: Generation, verdict: Verdict) -> Trajectory:
    """A prompt with one completion."""
    transcript = Transcript.of(prompt).with_sampled(generation)
    arrays = vars(replace(transcript, turns=((len(prompt), len(transcript.tokens)),)))
    stop_reason, text = str(generation.stop_reason), generation.text or ""
    return Trajectory(**arrays, reward=verdict.score, verdict=verdict, stop_reason=stop_reason, completion=text)


async def sampled(episode: Episode, go_on: Callable[[int, Generation], Awaitable[Trajectory]]) -> list[Trajectory]:
    """Sample the first turn of all samples together, so that the prompt is computed once, then continue each.

    `go_on` gets the number of a sample and its first turn. Where one fails the others are cancelled.
    """
    first = await episode.generate(episode.prompt, n=episode.samples)
    return await together(go_on(sample, generation) for sample, generation in enumerate(first))


async def together(work: Iterable[Awaitable[Result]]) -> list[Result]:
    """The results of all; where one fails the others are cancelled."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
