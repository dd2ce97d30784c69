"""The algorithms, one file each, by their name in a spec."""

from palestra.control.algorithms.ppo import PPO

ALGORITHMS = {"ppo": PPO}
