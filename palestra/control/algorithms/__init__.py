"""The algorithms, by the name a spec calls them. Each is one file: what it stores, how it acts, how it learns."""

from palestra.control.algorithms.base import Algorithm
from palestra.control.algorithms.ppo import PPO

ALGORITHMS: dict[str, type[Algorithm]] = {"ppo": PPO}
