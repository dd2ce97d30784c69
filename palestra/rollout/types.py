"""Trajectories of tokens, and groups of them that share a prompt."""

from dataclasses import dataclass, field
from functools import cached_property
from itertools import compress

from palestra.data.media import Image
from palestra.tasks.task import Problem, Verdict


@dataclass(frozen=True)
class Trajectory:
    """A prompt and its continuation, as tokens. Index t of every array means token t, never the prediction at t."""

    tokens: tuple[int, ...]
    loss_mask: tuple[bool, ...]
    """Which tokens the model sampled; not those of prompts, feedback and tool results."""
    logprobs: tuple[float, ...]
    """Under the distribution that each token was sampled from; 0 for the others."""
    versions: tuple[int, ...]
    """The version of the weights that sampled each token; -1 for the others."""
    reward: float
    """What is learned from: the verdict's score, or what a workflow makes of it."""
    verdict: Verdict
    """Of the last turn."""
    stop_reason: str
    """Why the last generation ended: eos, stop, length or abort."""
    completion: str
    """The text after the prompt, for people."""
    turns: tuple[tuple[int, int], ...] = ()
    """Begin and end of each turn of the model."""
    turn_rewards: tuple[float, ...] = ()
    """The reward of each turn, of which `reward` is the sum; empty where only the whole has one."""
    media: tuple[Image, ...] = ()
    """The images that its tokens of images stand for, in order."""
    row: int = 0
    """Its place among the rows of one episode, which follow each other and share the reward; most have one."""

    @property
    def sampled(self) -> int:
        """How many tokens the model sampled."""
        return sum(self.loss_mask)

    @property
    def oldest(self) -> int:
        """The oldest version among its sampled tokens."""
        return min(compress(self.versions, self.loss_mask), default=-1)


@dataclass(frozen=True)
class Group:
    """The trajectories of one prompt: fewer than requested where some could not be verified."""

    number: int
    """The prompt's number in the run, given at admission."""
    problem: Problem
    version: int
    """Of the weights at admission."""
    trajectories: tuple[Trajectory, ...]
    asked: int
    """How many trajectories were requested."""
    seconds: float = field(default=0.0, compare=False)
    """From admission to the end of its workflow."""

    @cached_property
    def oldest(self) -> int:
        """The oldest version among the sampled tokens; that of the admission where none was sampled."""
        return min((t.oldest for t in self.trajectories if t.sampled), default=self.version)

    @property
    def episodes(self) -> tuple[Trajectory, ...]:
        """The first row of each episode, which has its end."""
        return tuple(t for t in self.trajectories if t.row == 0)

    @property
    def rewards(self) -> tuple[float, ...]:
        return tuple(t.reward for t in self.episodes)
