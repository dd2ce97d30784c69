"""The suites: shipped specs, their seeds, and the scores that SLM-Lab publishes."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from palestra.errors import UsageError

CHECKOUT = Path(__file__).parents[2]
SHIPPED = CHECKOUT / "examples" / "control"
"""The specs of a checkout."""
SEEDS = tuple(range(100, 110))
"""Those of the table; tuning uses seeds from 1000 on."""
LOG_POINTS = 100  # in SLM-Lab's score


@dataclass(frozen=True)
class Entry:
    """A row of the table."""

    spec: str
    """The name of the spec."""
    published: float
    """SLM-Lab's score."""
    differs: str
    """How our algorithm differs from SLM-Lab's, beyond hyperparameters."""
    published_frames: int
    """SLM-Lab's budget."""
    log_every: int
    """SLM-Lab's log frequency in frames: its score is the mean of its last 100 log points."""
    seeds: tuple[int, ...] = SEEDS
    """All ten where a seed takes less than ten minutes."""
    file: str | None = None
    """The file that holds the spec among others, without its suffix; None: one of its own."""

    def source(self, folder: Path) -> Path:
        """The spec as one gives it to a command: `FILE.yaml`, or `FILE.yaml:NAME` in a file of several."""
        return folder / (f"{self.spec}.yaml" if self.file is None else f"{self.file}.yaml:{self.spec}")

    def window(self, frames: int) -> float:
        """The last frames that the score averages: SLM-Lab's own at its budget, else a quarter of ours."""
        return LOG_POINTS * self.log_every if frames >= self.published_frames else frames / 4


@dataclass(frozen=True)
class BenchSuite:
    """Rows that are run together."""

    title: str
    entries: tuple[Entry, ...]


_cartpole = partial(Entry, published_frames=200_000, log_every=500)
_classic = partial(Entry, published_frames=300_000, log_every=500)
_lunar = partial(Entry, published_frames=300_000, log_every=1000)
_mujoco = partial(Entry, published_frames=4_000_000, log_every=10_000)
FEW = SEEDS[:4]  # of rows that take longer than ten minutes per seed
_MUJOCO = {  # SLM-Lab's score and its budget in millions of frames, by PPO, SAC and CrossQ
    "ant": ((2138.28, 10), (4942.91, 2), (4517.00, 3)),
    "half_cheetah": ((6240.68, 10), (9815.16, 4), (8616.52, 4)),
    "hopper": ((1653.74, 4), (1416.52, 3), (1168.53, 3)),
    "humanoid": ((2661.26, 10), (1989.65, 1), (1755.29, 2)),
    "humanoid_standup": ((150104.59, 4), (137357.00, 1), (150912.66, 2)),
    "inverted_double_pendulum": ((8383.76, 10), (9032.67, 2), (8027.38, 2)),
    "inverted_pendulum": (None, (928.43, 2), (877.83, 7)),
    "pusher": ((-49.59, 4), (-43.00, 1), (-37.08, 2)),
    "reacher": (None, (-6.31, 1), (-5.65, 2)),
    "swimmer": (None, (301.34, 2), (221.12, 3)),
    "walker2d": ((4378.62, 10), (3123.66, 3), (4389.62, 7)),
}


_ATARI = {  # SLM-Lab's scores of 10 million frames, by PPO and A2C
    "pong": (16.69, 10.17),
    "breakout": (326.47, 273.0),
    "boxing": (92.18, 1.80),
    "freeway": (32.42, 23.13),
    "qbert": (15460.48, 12619.0),
    "space_invaders": (892.49, 784.0),
    "beam_rider": (2761.75, 2767.0),
    "seaquest": (1775.14, 850.0),
    "ms_pacman": (2330.74, 2110.0),
    "enduro": (986.46, 681.0),
}


def _atari_rows() -> Iterator[Entry]:
    for game, scores in _ATARI.items():
        for algorithm, published in zip(("ppo", "a2c"), scores, strict=True):
            yield Entry(f"{algorithm}_{game}", published, "–", 10_000_000, 10_000, FEW, "atari")


def _mujoco_rows() -> Iterator[Entry]:
    for environment, rows in _MUJOCO.items():
        for algorithm, row in zip(("ppo", "sac", "crossq"), rows, strict=True):
            if row is not None:  # PPO's others are in files of their own
                differs = "–" if algorithm == "ppo" else "more gradient steps per frame"
                about = (differs, row[1] * 1_000_000, 10_000, FEW, "mujoco")
                yield Entry(f"{algorithm}_{environment}", row[0], *about)


SUITES = {
    "classic": BenchSuite(
        "Classic control",
        (
            _cartpole("ppo_cartpole", 498.94, "–"),
            _cartpole("a2c_cartpole", 496.68, "normalized observations, rewards and advantages"),
            _cartpole("reinforce_cartpole", 483.31, "–"),
            _cartpole("sarsa_cartpole", 430.95, "SARSA(λ), ε-greedy (Boltzmann there), normalized observations"),
            _cartpole("dqn_cartpole", 239.94, "4-step returns, layer norm, ε-greedy (Boltzmann there)"),
            _cartpole("ddqn_per_cartpole", 451.51, "4-step returns, layer norm, ε-greedy (Boltzmann there)"),
            _cartpole("sac_cartpole", 406.09, "4-step returns, layer norm"),
            _cartpole("crossq_cartpole", 334.59, "4-step returns"),
            _classic("ppo_acrobot", -81.28, "normalized observations and rewards"),
            _classic("dqn_acrobot", -94.17, "4-step returns, ε-greedy (Boltzmann there)"),
            _classic("ddqn_per_acrobot", -83.92, "4-step returns, ε-greedy (Boltzmann there)", file="acrobot"),
            _classic("a2c_acrobot", -83.99, "normalized observations, rewards and advantages", file="acrobot"),
            _classic("sac_acrobot", -92.60, "4-step returns, layer norm", file="acrobot"),
            _classic("crossq_acrobot", -103.13, "4-step returns, held random actions", file="acrobot"),
            _classic("a2c_pendulum", -820.74, "normalized observations, rewards and advantages"),
            _classic("ppo_pendulum", -174.87, "normalized observations and rewards"),
            _classic("sac_pendulum", -150.97, "–"),
            _classic("crossq_pendulum", -145.66, "–"),
        ),
    ),
    "box2d": BenchSuite(
        "Box2D",
        (
            _lunar("ppo_lunar", 183.30, "normalized rewards"),
            _lunar("dqn_lunar", 195.21, "dueling, 3-step returns, single frames (stacked there)", seeds=FEW),
            _lunar("ddqn_per_lunar", 265.90, "dueling, 5-step returns", file="lunar", seeds=FEW),
            _lunar("a2c_lunar", 27.38, "normalized observations, rewards and advantages", file="lunar"),
            _lunar("sac_lunar", 106.17, "3-step returns, layer norm, α by a schedule", file="lunar", seeds=FEW),
            _lunar("crossq_lunar", 139.21, "3-step returns, fixed α", file="lunar", seeds=FEW),
            _lunar("a2c_lunar_continuous", -76.81, "normalized observations, rewards and advantages", file="lunar"),
            _lunar("sac_lunar_continuous", 125.00, "–", file="lunar", seeds=FEW),
            _lunar("ppo_lunar_continuous", 132.58, "normalized rewards"),
            _lunar("crossq_lunar_continuous", 268.91, "–", seeds=FEW),
        ),
    ),
    "mujoco": BenchSuite(
        "MuJoCo",
        (
            _mujoco("ppo_inverted_pendulum", 949.94, "rewards as they are (normalized there)"),
            _mujoco("ppo_reacher", -5.03, "–"),
            _mujoco("ppo_swimmer", 282.44, "–", seeds=FEW),
            *_mujoco_rows(),
        ),
    ),
    "atari": BenchSuite("Atari", tuple(_atari_rows())),
}


def entries(suite: str | None, only: str | None = None) -> list[Entry]:
    """The entries of a suite, or of all, whose spec's name matches the regular expression."""
    if suite is not None and suite not in SUITES:
        raise UsageError(f"no suite {suite!r}: the suites are {', '.join(SUITES)}")
    every = [entry for name, of in SUITES.items() if suite in (None, name) for entry in of.entries]
    try:
        matching = [entry for entry in every if re.search(only or "", entry.spec)]
    except re.error as error:
        raise UsageError(f"--only {only!r} is not a regular expression: {error}") from error
    if not matching:
        raise UsageError(f"--only {only!r} matches none of {', '.join(entry.spec for entry in every)}")
    return matching


def parse_seeds(text: str) -> tuple[int, ...]:
    """ "0-3" as 0, 1, 2, 3; "0,4-5" as 0, 4, 5."""
    seeds: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:\s*-\s*(\d+))?\s*", part)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise UsageError(f"--seeds {text!r}: expected seeds such as 0-3 or 0,2,5")
        seeds += range(int(match[1]), int(match[2] or match[1]) + 1)
    return tuple(dict.fromkeys(seeds))
