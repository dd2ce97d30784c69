"""Evaluation of a policy: whole episodes in environments of its own, a fixed number from each."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from palestra.control.envs.stepping import EnvironmentFailed, Stepper, random_allowed
from palestra.control.episodes import Episodes
from palestra.control.policy import Policy

LONGEST_EPISODE = 200_000  # steps; the longest of Gymnasium's own environments end long before


@dataclass(frozen=True)
class PolicyEvaluation:
    """Undiscounted returns and lengths of the evaluated episodes."""

    returns: np.ndarray
    lengths: np.ndarray

    def metrics(self) -> dict[str, float]:
        return {
            "eval/return": float(self.returns.mean()),
            "eval/return_std": float(self.returns.std()),
            "eval/return_min": float(self.returns.min()),
            "eval/length": float(self.lengths.mean()),
        }

    @property
    def frames(self) -> int:
        """Environment transitions of its episodes."""
        return int(self.lengths.sum())


def evaluate(
    policy: Policy, stepper: Stepper, episodes: int, seed: int, stop: Callable[[], bool] = lambda: False
) -> PolicyEvaluation | None:
    """`episodes` episodes with the most likely actions; None if `stop()` became true before their end.

    Each environment has a quota: taking the first episodes to finish, wherever, would favor short ones.
    """

    policy.reset()

    def act(obs: np.ndarray, began: np.ndarray) -> np.ndarray:
        if began.any():
            policy.reset(began)
        mask = None if stepper.mask is None else torch.from_numpy(stepper.mask)
        return policy.head.to_env(policy.greedy(torch.from_numpy(obs), mask))

    return _episodes(act, stepper, episodes, seed, stop)


def random_episodes(stepper: Stepper, episodes: int, seed: int) -> PolicyEvaluation:
    """`episodes` episodes of uniformly random allowed actions: the zero of the trial metrics."""
    space, single = stepper.env.action_space, stepper.env.single_action_space
    space.seed(seed)
    random = np.random.default_rng(seed)

    def act(obs: np.ndarray, began: np.ndarray) -> np.ndarray:
        return space.sample() if stepper.mask is None else random_allowed(stepper.mask, single, random)

    evaluation = _episodes(act, stepper, episodes, seed, lambda: False)
    assert evaluation is not None
    return evaluation


def _episodes(
    act: Callable[[np.ndarray, np.ndarray], np.ndarray],
    stepper: Stepper,
    episodes: int,
    seed: int,
    stop: Callable[[], bool],
) -> PolicyEvaluation | None:
    """Whole episodes of `act(obs, began)`; `began`, bool (N,), is True where an episode starts."""
    n = stepper.num_envs
    quota = np.full(n, episodes // n)
    quota[: episodes % n] += 1
    returns: list[list[float]] = [[] for _ in range(n)]
    lengths: list[list[int]] = [[] for _ in range(n)]
    running = Episodes(stepper)
    running.reset(seed)
    while sum(map(len, returns)) < episodes:
        if stop():
            return None
        running.step(act(running.now, running.began))
        for i, total, length in running.just_finished:
            if len(returns[i]) < quota[i]:
                returns[i].append(total)
                lengths[i].append(length)
        if running.episode_length.max() >= LONGEST_EPISODE:
            raise EnvironmentFailed(
                f"an episode of {stepper.name} did not end within {LONGEST_EPISODE:,} steps, so evaluation cannot: "
                "give the environment a time limit, for example env.kwargs: {max_episode_steps: 1000}"
            )
    return PolicyEvaluation(np.concatenate(returns), np.concatenate(lengths))
