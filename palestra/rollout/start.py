"""How the workflow of a problem begins: its prompt as tokens, its seed, its sampling."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace

from palestra.data.shuffle import stream_key
from palestra.data.tokenizers import Tokenizer
from palestra.generate.types import Generator, Sampling
from palestra.rollout.episode import Episode, Judge, encode_problem
from palestra.rollout.types import Trajectory
from palestra.tasks.task import Task
from palestra.tasks.types import Problem

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
