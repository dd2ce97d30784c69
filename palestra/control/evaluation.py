"""Evaluation of a policy: whole episodes in environments of its own, a fixed number from each."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from palestra.control.envs.stepping import EnvironmentFailed, Stepper
from palestra.control.policy import Policy, as_input

LONGEST_EPISODE = 200_000  # steps; the longest of Gymnasium's own environments end long before


@dataclass(frozen=True)
class Evaluation:
    """Undiscounted returns and lengths of the evaluated episodes."""

    returns: np.ndarray
    lengths: np.ndarray

    def metrics(self) -> dict[str, float]:
        """What a row of metrics says of it."""
        return {
            "eval/return": float(self.returns.mean()),
            "eval/return_std": float(self.returns.std()),
            "eval/return_min": float(self.returns.min()),
            "eval/length": float(self.lengths.mean()),
        }


def evaluate(
    policy: Policy, stepper: Stepper, episodes: int, seed: int, stop: Callable[[], bool] = lambda: False
) -> Evaluation | None:
    """`episodes` episodes with the most likely actions; None if `stop` said so in the middle of them.

    Each environment has a quota: taking the first episodes to finish, wherever, would favour short ones.
    """

    def act(obs: np.ndarray) -> np.ndarray:
        return policy.head.to_env(policy.greedy(torch.from_numpy(obs)))

    return _episodes(act, stepper, episodes, seed, stop)


def random_episodes(stepper: Stepper, episodes: int, seed: int) -> Evaluation:
    """`episodes` episodes of uniformly random actions: the zero of the trial metrics."""
    space = stepper.env.action_space
    space.seed(seed)
    evaluation = _episodes(lambda obs: space.sample(), stepper, episodes, seed, lambda: False)
    assert evaluation is not None
    return evaluation


def _episodes(
    act: Callable[[np.ndarray], np.ndarray], stepper: Stepper, episodes: int, seed: int, stop: Callable[[], bool]
) -> Evaluation | None:
    n = stepper.num_envs
    quota = np.full(n, episodes // n)
    quota[: episodes % n] += 1
    running_return, running_length = np.zeros(n), np.zeros(n, np.int64)
    returns: list[list[float]] = [[] for _ in range(n)]
    lengths: list[list[int]] = [[] for _ in range(n)]
    missing = episodes
    obs = stepper.reset(seed)
    while missing:
        if stop():
            return None
        transition = stepper.step(act(as_input(obs)))
        obs = transition.obs
        running_return += transition.rewards
        running_length += 1 if transition.valid is None else transition.valid
        for i in () if transition.ended is None else transition.ended:
            if len(returns[i]) < quota[i]:
                returns[i].append(running_return[i])
                lengths[i].append(running_length[i])
                missing -= 1
            running_return[i] = running_length[i] = 0
        if running_length.max() >= LONGEST_EPISODE:
            raise EnvironmentFailed(
                f"an episode of {stepper.name} did not end within {LONGEST_EPISODE:,} steps, so evaluation cannot: "
                "give the environment a time limit, for example env.kwargs: {max_episode_steps: 1000}"
            )
    return Evaluation(np.concatenate(returns), np.concatenate(lengths))
