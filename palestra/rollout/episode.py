"""What a workflow works with: a problem, the model that answers it and the judge of its answers."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

from palestra.data.chat import encode_chat
from palestra.data.shuffle import stream_key
from palestra.data.tokenizers import Tokenizer
from palestra.errors import UsageError
from palestra.generate.types import Generation, Generator, Request, Sampling, StopReason
from palestra.rollout.types import Trajectory
from palestra.tasks.types import Answer, Problem, Verdict

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
