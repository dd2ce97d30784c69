"""The protocol of an environment with text actions, and the base class of tasks that are played in one.

An environment is reset with a seed, then takes one action after the other. It may have several players: a `Turn` says
whose turn it is. The workflow `environment` plays it; `palestra.tasks.environments.host` runs it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Literal, Protocol

from pydantic import Field

from palestra.data.mixture import stream_key
from palestra.errors import PalestraError, UsageError
from palestra.spec.imports import load_named
from palestra.tasks.task import Completion, Problem, Task, TaskArgs, Verdict

SELF, RANDOM = "self", "random"
ROW = "environment"
"""The field of a problem's row with everything that the workflow needs."""
PLAYED = {"config", "instruction", "opponent", "success", "unfinished", "sparse"}
"""Of its args."""


@dataclass(frozen=True)
class Turn:
    """What an environment says after a reset or an action."""

    observation: str = ""
    """What the player whose turn it is has not read yet, its own actions left out."""
    rewards: Mapping[int, float] = field(default_factory=dict)
    """By player, of the last action; missing means 0."""
    done: bool = False
    player: int = 0
    """Whose turn it is."""
    players: int = 1
    parts: Mapping[str, float] = field(default_factory=dict)
    """Numbers for the verdict, such as `invalid`; `<player>/<name>` is of one player alone."""


class Busy(PalestraError):
    """An environment that cannot begin yet, because others hold what it needs: it is asked again."""


class Environment(Protocol):
    """An environment with text actions. It may block and crash: it runs in a process of its own."""

    def reset(self, seed: int, problem: Problem) -> Turn:
        """Begin an episode; the same seed gives the same one, given the same actions."""
        ...

    def step(self, action: str) -> Turn:
        """Act as the player whose turn it is; an invalid action is the environment's to answer."""
        ...

    def close(self) -> None:
        """Free what the episode holds."""
        ...


ENVIRONMENTS: dict[str, str] = {
    "textarena": "palestra.tasks.environments.textarena:Game",
    "gymnasium": "palestra.tasks.environments.gymnasium:TextEnv",
    "openenv": "palestra.tasks.environments.openenv:Client",
}
"""Environments by the source that precedes their name; `environment` is followed by your own `module:Class`."""


def environment_maker(name: str) -> Callable[..., Environment]:
    """What makes the environment `<source>:<name>` of its options; everything that it needs is imported."""
    source, _, rest = name.partition(":")
    made = load_named(rest if source == ROW else ENVIRONMENTS[source], "task", "class")
    getattr(made, "warm_up", lambda: None)()
    return made if source == ROW else partial(made, rest)


class EnvironmentArgs(TaskArgs):
    """Args of every task that is played in an environment."""

    environment: str = Field(min_length=1)
    """Its name after the source: `textarena:Nim-v0` says it already."""
    config: dict[str, Any] = Field(default={})
    """Options of the environment, such as {max_turns: 4}; see its documentation."""
    seed: int = Field(default=0, ge=0)
    """Of the episodes' seeds."""
    size: int = Field(default=1000, ge=1)
    """Episodes with different seeds in each split."""
    format: Literal["plain", "chat"] = "plain"
    """Observations as lines of a text to continue, or as the user's messages in a conversation."""
    instruction: str = ""
    """Text before the first observation."""
    opponent: str = Field(default=SELF, min_length=1)
    """The other players: self, random, a model (a run, a checkpoint or a folder), or module:function."""
    success: float = 1.0
    """An episode whose rewards add up to at least this counts as correct."""
    unfinished: float = 0.0
    """Reward of an episode that a limit of the workflow ends."""
    sparse: bool = False
    """Reward 1 for success and 0 for none, at the end, in place of the environment's rewards."""


class EnvironmentTask(Task[EnvironmentArgs]):
    """Episodes of one environment. Each problem is a seed; the first observation is the prompt."""

    Args = EnvironmentArgs
    source: ClassVar[str] = ROW
    """What precedes the environment's name in that of the task."""
    workflow = named = "environment"

    @property
    def stops(self) -> tuple[str, ...]:
        """In plain text an action is a line."""
        if self.args.stop is not None:
            return tuple(self.args.stop)
        return ("\n",) if self.args.format == "plain" else ()

    def problems(self, split: str) -> Sequence[Problem]:
        """One episode for each seed."""
        self.check_split(split)
        return [self._problem(split, number) for number in range(self.args.size)]

    def verify(self, problem: Problem, completion: Completion) -> Verdict:
        """The rewards are the environment's."""
        raise UsageError(f"{self.name} is played and not answered: expected rollout.workflow = {{name: environment}}")

    def _problem(self, split: str, number: int) -> Problem:
        args = self.args
        row = {"name": f"{self.source}:{args.environment}", "number": number, **args.model_dump(include=PLAYED)}
        row["seed"] = stream_key(args.seed, "environment", split, number) % 2**31
        text = args.instruction or "\n"  # which every tokenizer that can play knows; the workflow has the real prompt
        prompt = text if args.format == "plain" else ({"role": "user", "content": text},)
        return Problem(self.id(split, number), prompt, {ROW: row})


class OwnEnvironment(EnvironmentTask):
    """Your own environment, as `environment:module:Class`."""
