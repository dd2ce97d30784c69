"""A conversation as it grows, token by token: what the model drew, and what was put in between."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from palestra.data.tokenizers import Tokenizer
from palestra.generate.types import Generation
from palestra.rollout.episode import Episode
from palestra.rollout.types import Trajectory
from palestra.tasks.types import Verdict


@dataclass(frozen=True)
class Transcript:
    """The arrays of a trajectory so far. What is in it is never tokenised again."""

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
