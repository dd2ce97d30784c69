"""The workflow of most tasks: one prompt, one answer, judged."""

from palestra.rollout.episode import Episode, trajectory
from palestra.rollout.types import Trajectory


async def single_turn(episode: Episode) -> list[Trajectory]:
    """Answer the problem `samples` times; the prompt is computed once for all."""
    answers = await episode.generate(episode.prompt, n=episode.samples)
    verdicts = await episode.verdicts(answers)
    return [trajectory(episode.prompt, *pair) for pair in zip(answers, verdicts, strict=True)]
