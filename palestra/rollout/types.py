"""What rollouts are made of: trajectories of tokens, in groups that share a prompt."""

from dataclasses import dataclass, field
from functools import cached_property

from palestra.tasks.task import Problem, Verdict


@dataclass(frozen=True)
class Trajectory:
    """A prompt and what followed, as tokens. Index t of every array means token t, never the prediction at t."""

    tokens: tuple[int, ...]
    loss_mask: tuple[bool, ...]
    """Which tokens the model drew; not those of prompts, feedback and tools."""
    logprobs: tuple[float, ...]
    """Of the distribution each token was drawn from; 0 for tokens that were not drawn."""
    versions: tuple[int, ...]
    """The version of the weights that drew each token; -1 for tokens that were not drawn."""
    reward: float
    """What is learned from: the verdict's score, less what a workflow takes off it."""
    verdict: Verdict
    """Of the last answer."""
    stop_reason: str
    """Why the last generation ended: eos, stop, length or abort."""
    completion: str
    """What followed the prompt, for people."""
    turns: tuple[tuple[int, int], ...] = ()
    """Where each turn of the model begins and ends."""

    @property
    def drawn(self) -> int:
        """How many tokens the model drew."""
        return sum(self.loss_mask)

    @property
    def oldest(self) -> int:
        """The oldest version among its drawn tokens."""
        return min((v for v, drawn in zip(self.versions, self.loss_mask, strict=True) if drawn), default=-1)


@dataclass(frozen=True)
class Group:
    """The trajectories of one prompt. It may have fewer than were asked for: what could not be judged is not there."""

    number: int
    """Counted at admission: which prompt of the run this is."""
    problem: Problem
    version: int
    """Of the weights when it was admitted."""
    trajectories: tuple[Trajectory, ...]
    asked: int
    """How many trajectories were asked for."""
    seconds: float = field(default=0.0, compare=False)
    """From admission to its end."""

    @cached_property
    def oldest(self) -> int:
        """The oldest version among the drawn tokens; that of the admission where none was drawn."""
        return min((t.oldest for t in self.trajectories if t.drawn), default=self.version)

    @property
    def rewards(self) -> tuple[float, ...]:
        """Of its trajectories."""
        return tuple(t.reward for t in self.trajectories)
