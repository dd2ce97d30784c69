"""Evaluation of a policy: whole episodes in environments of its own, a fixed number from each."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from palestra.control.envs.stepping import EnvironmentFailed, Stepper, random_allowed
from palestra.control.policy import Policy, as_input

LONGEST_EPISODE = 200_000  # steps; the longest of Gymnasium's own environments end long before


@dataclass(frozen=True)
class PolicyEvaluation:
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

    @property
    def frames(self) -> int:
        """Environment transitions of its episodes."""
        return int(self.lengths.sum())


def evaluate(
    policy: Policy, stepper: Stepper, episodes: int, seed: int, stop: Callable[[], bool] = lambda: False
) -> PolicyEvaluation | None:
    """`episodes` episodes with the most likely actions; None if `stop` said so in the middle of them.

    Each environment has a quota: taking the first episodes to finish, wherever, would favor short ones.
    """

    policy.reset()

    def act(obs: np.ndarray, began: np.ndarray | None) -> np.ndarray:
        if began is not None:
            policy.reset(began)
        mask = None if stepper.mask is None else torch.from_numpy(stepper.mask)
        return policy.head.to_env(policy.greedy(torch.from_numpy(obs), mask))

    return _episodes(act, stepper, episodes, seed, stop)


def random_episodes(stepper: Stepper, episodes: int, seed: int) -> PolicyEvaluation:
    """`episodes` episodes of actions drawn uniformly from what is allowed: the zero of the trial metrics."""
    space, single = stepper.env.action_space, stepper.env.single_action_space
    space.seed(seed)
    random = np.random.default_rng(seed)

    def act(obs: np.ndarray, began: np.ndarray | None) -> np.ndarray:
        return space.sample() if stepper.mask is None else random_allowed(stepper.mask, single, random)

    evaluation = _episodes(act, stepper, episodes, seed, lambda: False)
    assert evaluation is not None
    return evaluation


def _episodes(
    act: Callable[[np.ndarray, np.ndarray | None], np.ndarray],
    stepper: Stepper,
    episodes: int,
    seed: int,
    stop: Callable[[], bool],
) -> PolicyEvaluation | None:
    """Whole episodes of `act(obs, began)`; `began`, bool (N,), says where an episode begins, None where none does."""
    n = stepper.num_envs
    quota = np.full(n, episodes // n)
    quota[: episodes % n] += 1
    running_return, running_length = np.zeros(n), np.zeros(n, np.int64)
    returns: list[list[float]] = [[] for _ in range(n)]
    lengths: list[list[int]] = [[] for _ in range(n)]
    missing = episodes
    obs, began = stepper.reset(seed), None
    while missing:
        if stop():
            return None
        transition = stepper.step(act(as_input(obs), began))
        obs = transition.obs
        began = transition.terminated | transition.truncated if transition.ended is not None else None
        if transition.valid is not None:  # the step after a dummy one is an episode's first
            began = ~transition.valid if began is None else began | ~transition.valid
        running_return += transition.rewards
        running_length += 1 if transition.valid is None else transition.valid
        for i in () if stepper.over is None else stepper.over:
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
    return PolicyEvaluation(np.concatenate(returns), np.concatenate(lengths))
