"""The suites: which shipped specs are run, the figure each must reach, and what SLM-Lab publishes for it."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from palestra.errors import UsageError

SHIPPED = Path(__file__).parents[2] / "examples" / "control"
"""The specs of a checkout."""
LOG_POINTS = 100  # in SLM-Lab's score


@dataclass(frozen=True)
class Entry:
    """A row of the table."""

    spec: str
    """The name of a file in the folder of specs, without its ending."""
    target: float
    """The score that the bootstrap interval must reach."""
    published: float
    """SLM-Lab's score."""
    published_frames: int
    """SLM-Lab's budget."""
    log_every: int
    """SLM-Lab's log frequency in frames: its score is the mean of its last 100 log points."""

    def window(self, frames: int) -> float:
        """The last frames that the score is the mean over: SLM-Lab's own at its budget, else a quarter of ours."""
        return LOG_POINTS * self.log_every if frames >= self.published_frames else frames / 4


@dataclass(frozen=True)
class Suite:
    """Rows that are run together."""

    name: str
    title: str
    entries: tuple[Entry, ...]
    seeds: tuple[int, ...] = (0, 1, 2, 3)


def _cartpole(spec: str, target: float, published: float) -> Entry:
    return Entry(spec, target, published, 200_000, 500)


def _classic(spec: str, target: float, published: float) -> Entry:
    return Entry(spec, target, published, 300_000, 500)


def _lunar(spec: str, target: float, published: float) -> Entry:
    return Entry(spec, target, published, 300_000, 1000)


def _mujoco(spec: str, published: float) -> Entry:
    return Entry(spec, published, published, 4_000_000, 10_000)


SUITES = {
    suite.name: suite
    for suite in (
        Suite(
            "classic",
            "Classic control",
            (
                _cartpole("ppo_cartpole", 499, 498.94),
                _cartpole("a2c_cartpole", 497, 496.68),
                _cartpole("reinforce_cartpole", 483, 483.31),
                _cartpole("sarsa_cartpole", 431, 430.95),
                _cartpole("dqn_cartpole", 400, 239.94),
                _cartpole("ddqn_per_cartpole", 452, 451.51),
                _cartpole("sac_cartpole", 406, 406.09),
                _classic("ppo_acrobot", -81, -81.28),
                _classic("dqn_acrobot", -90, -94.17),
                _classic("ppo_pendulum", -170, -174.87),
                _classic("sac_pendulum", -150, -150.97),
                _classic("crossq_pendulum", -145, -145.66),
            ),
        ),
        Suite(
            "box2d",
            "Box2D",
            (
                _lunar("ppo_lunar", 220, 183.30),
                _lunar("dqn_lunar", 220, 195.21),
                _lunar("ppo_lunar_continuous", 200, 132.58),
                _lunar("crossq_lunar_continuous", 268, 268.91),
            ),
        ),
        Suite(
            "mujoco",
            "MuJoCo",
            (
                _mujoco("ppo_inverted_pendulum", 949.94),
                _mujoco("ppo_reacher", -5.03),
                _mujoco("ppo_swimmer", 282.44),
            ),
            seeds=(0,),
        ),
        Suite("atari", "Atari", (Entry("ppo_pong", 0, 16.69, 10_000_000, 10_000),), seeds=(0,)),
    )
}


def suite(name: str) -> Suite:
    """A suite by its name."""
    if name not in SUITES:
        raise UsageError(f"there is no suite {name!r}: the suites are {', '.join(SUITES)}")
    return SUITES[name]


def chosen(entries: Sequence[Entry], only: str | None) -> list[Entry]:
    """The entries whose spec's name the regular expression finds; all without one."""
    if only is None:
        return list(entries)
    try:
        pattern = re.compile(only)
    except re.error as error:
        raise UsageError(f"--only {only!r} is not a regular expression: {error}") from error
    found = [entry for entry in entries if pattern.search(entry.spec)]
    if not found:
        raise UsageError(f"--only {only!r} finds none of {', '.join(entry.spec for entry in entries)}")
    return found


def parse_seeds(text: str) -> tuple[int, ...]:
    """ "0-3" as 0, 1, 2, 3; "0,4-5" as 0, 4, 5."""
    seeds: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:\s*-\s*(\d+))?\s*", part)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise UsageError(f"--seeds {text!r}: expected seeds such as 0-3 or 0,2,5")
        seeds += range(int(match[1]), int(match[2] or match[1]) + 1)
    return tuple(dict.fromkeys(seeds))
