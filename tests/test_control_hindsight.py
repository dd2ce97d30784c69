"""Hindsight replay: goals of the same episode's future, their rewards, what is refused, and a resume."""

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from probe_envs import Walk, learner_on, sync
from pydantic import ValidationError

from palestra.control.envs.goals import BitFlip, goals_of
from palestra.control.envs.make import make_single, make_vector
from palestra.control.envs.stepping import Stepper
from palestra.control.evaluation import evaluate
from palestra.control.memory.hindsight import HindsightReplay
from palestra.errors import UsageError
from palestra.spec.kinds.control import EnvSpec

torch.set_num_threads(1)

SMALL: dict[str, Any] = {"horizon": 24, "start": 24, "batch": 16, "buffer": 60, "replay_ratio": 1}


class Line(gym.Env):
    """Counts its steps over all episodes, so that an achieved goal says which step it was reached by."""

    palestra_state = ("at", "count", "length", "goal")

    def __init__(self, longest: int = 6, terminates: bool = False):
        goal = spaces.Box(-np.inf, np.inf, (1,), np.float32)
        self.observation_space = spaces.Dict({"observation": goal, "achieved_goal": goal, "desired_goal": goal})
        self.action_space = spaces.Box(-1, 1, (1,), np.float32)
        self.longest, self.at, self.count, self.length, self.goal = longest, 0, 0.0, 0, -1.0
        if terminates:
            self.compute_terminated = lambda achieved, desired, info: (achieved == desired)[..., 0]

    def compute_reward(self, achieved: np.ndarray, desired: np.ndarray, info: Any) -> np.ndarray:
        return -np.abs(achieved - desired)[..., 0]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[dict, dict]:
        super().reset(seed=seed)
        self.count = 1000.0 * (seed % 7) if seed is not None else self.count
        self.at, self.length, self.count = 0, int(self.np_random.integers(1, self.longest + 1)), self.count + 1
        return self._show(), {}

    def step(self, action: Any) -> tuple[dict, float, bool, bool, dict]:
        self.at, self.count = self.at + 1, self.count + 1
        reward = float(self.compute_reward(np.array([self.count]), np.array([self.goal]), {}))
        return self._show(), reward, False, self.at == self.length, {}

    def _show(self) -> dict[str, np.ndarray]:
        now = np.array([self.count], np.float32)
        return {"observation": now, "achieved_goal": now, "desired_goal": np.array([self.goal], np.float32)}


def line(count: int = 3, **given: Any) -> Any:
    return make_vector(EnvSpec(id="object:Line", vectorize="sync"), count, lambda: Line(**given))


def filled(steps: int = 2, her: dict[str, Any] | None = None, **given: Any) -> Any:
    learner = learner_on(line(**given), "sac", net={"hidden": [8]}, her=her or {}, **SMALL)
    for _ in range(steps):
        learner.step(0.0)
    assert isinstance(learner.memory, HindsightReplay)
    return learner


def episodes_of(memory: HindsightReplay) -> dict[tuple[int, int], list[float]]:
    """What was reached after each stored row to the end of its episode, found by walking from row to row."""
    reached = {}
    numbers = range(memory.added - min(memory.added, memory.rows), memory.added)
    for env in range(memory.num_envs):
        for number in numbers:
            goals, row = [], number
            while True:
                flat = torch.tensor([row % memory.ring * memory.num_envs + env])
                flags = memory.columns["flags"].take(flat)
                goals.append(float(memory._after(flat, flags)[0, 0]))
                row += 1
                if flags & 1 or row == memory.added:
                    break
            reached[number, env] = goals
    return reached


@pytest.mark.parametrize("strategy", ["future", "final"])
def test_sample_relabeled_goals_are_reached_later_in_the_same_episode(strategy):
    memory = filled(her={"strategy": strategy}).memory
    reached, seen = episodes_of(memory), {}
    generator = torch.Generator().manual_seed(0)
    batch = memory.sample(4000, generator)
    achieved, desired, observed = batch.next_obs[:, 0], batch.next_obs[:, 1], batch.obs[:, 2]
    torch.testing.assert_close(batch.obs[:, 1], desired)  # of both observations
    torch.testing.assert_close(batch.rewards, -(achieved - desired).abs())
    relabeled = desired != -1
    assert float(relabeled.float().mean()) == pytest.approx(0.8, abs=0.03)
    for row, goal, obs in zip(batch.rows.tolist(), desired.tolist(), observed.tolist(), strict=True):
        goals = reached[divmod(row, memory.num_envs)]
        assert goals[0] == obs + 1
        if goal != -1:
            assert goal in goals if strategy == "future" else goal == goals[-1]
            seen.setdefault(row, set()).add(goal)
    if strategy == "future":  # every later one
        assert all(seen[row] == set(reached[divmod(row, memory.num_envs)]) for row in seen)


def test_sample_future_goals_are_uniform():
    memory = filled(1, longest=30).memory
    row, goals = max(((key, goals) for key, goals in episodes_of(memory).items()), key=lambda item: len(item[1]))
    batch = memory.sample(60_000, torch.Generator().manual_seed(1))
    mine = batch.next_obs[(batch.rows == row[0] * memory.num_envs + row[1]) & (batch.next_obs[:, 1] != -1), 1]
    counts = torch.stack([(mine == goal).sum() for goal in goals]).double()
    expected = len(mine) / len(goals)
    assert len(goals) > 3
    assert float(((counts - expected) ** 2 / expected).sum()) < len(goals) + 5 * np.sqrt(2 * len(goals))  # χ²


def test_sample_terminated_is_asked_of_the_environment_where_it_knows():
    memory = filled(terminates=True).memory
    batch = memory.sample(500, torch.Generator().manual_seed(0))
    there = batch.next_obs[:, 0] == batch.next_obs[:, 1]
    assert there.any()
    torch.testing.assert_close(batch.discounts, torch.where(there, 0.0, 0.99))
    memory = filled().memory
    assert (memory.sample(500, torch.Generator().manual_seed(0)).discounts == np.float32(0.99)).all()


def test_sample_clipped_rewards_are_clipped_when_relabeled():
    learner = learner_on(line(), "sac", net={"hidden": [8]}, given={"clip_reward": 0.5}, her={}, **SMALL)
    learner.step(0.0)
    rewards = learner.memory.sample(300, torch.Generator().manual_seed(0)).rewards
    assert float(rewards.min()) == -0.5


@pytest.mark.parametrize("name", ["dqn", "sac", "td3", "crossq"])
def test_state_round_trip_continues_identically(name):
    def made() -> Any:
        if name == "dqn":
            env = make_vector(EnvSpec(id="object:B", vectorize="sync"), 3, lambda: BitFlip(4))
            return learner_on(env, name, net={"hidden": [8]}, her={}, prioritized={}, **SMALL)
        return learner_on(line(), name, net={"hidden": [8]}, her={}, given={"normalize_obs": True}, **SMALL)

    going = made()
    for _ in range(2):  # the buffer is full, its oldest rows gone, episodes are running
        going.step(0.0)
    state, generator = going.state(), going.generator.get_state()
    resumed = made()
    resumed.load_state(state)
    resumed.generator.set_state(generator)
    numbers = np.arange(going.memory.added - going.memory.rows, going.memory.added) % going.memory.ring
    np.testing.assert_array_equal(resumed.memory.until[numbers], going.memory.until[numbers])
    assert [resumed.step(0.0) for _ in range(2)] == [going.step(0.0) for _ in range(2)]


def test_cut_ends_the_goals_of_the_episode():
    memory = filled(longest=50).memory
    before = memory.sample(400, torch.Generator().manual_seed(0))
    memory.cut(np.array([True, False, False]))
    assert memory.until[(memory.added - 1) % memory.ring, 0] == memory.added - 1
    assert memory.began[0] == memory.added
    torch.testing.assert_close(memory.sample(400, torch.Generator().manual_seed(0)).next_obs, before.next_obs)


def test_environment_without_goals_is_refused_and_says_what_they_are():
    with pytest.raises(UsageError, match=r"is not a goal environment.*compute_reward"):
        learner_on(sync(lambda: Walk([1.0]), 2, AutoresetMode.SAME_STEP), "dqn", her={})


def test_reward_that_takes_no_batches_is_refused():
    class Single(Line):
        def compute_reward(self, achieved: np.ndarray, desired: np.ndarray, info: Any) -> Any:
            return -float(np.abs(achieved - desired).sum())

    env = make_vector(EnvSpec(id="object:S", vectorize="sync"), 2, Single)
    learner = learner_on(env, "sac", net={"hidden": [8]}, her={}, **SMALL)
    with pytest.raises(UsageError, match="compute_reward gave an array of shape"):
        learner.step(0.0)


@pytest.mark.parametrize(
    ("given", "says"), [({"algorithm": {"n_step": 2}}, "expected 1"), ({"given": {"frame_stack": 2}}, "expected null")]
)
def test_spec_that_hindsight_cannot_relabel_is_refused(given, says):
    with pytest.raises(ValidationError, match=says):
        learner_on(line(), "sac", her={}, given=given.get("given"), **given.get("algorithm", {}))


def test_bit_flip_rewards_ends_and_goals():
    env = BitFlip(5)
    obs, _ = env.reset(seed=0)
    wrong = np.flatnonzero(obs["observation"] != obs["desired_goal"])
    for i, bit in enumerate(wrong):
        obs, reward, terminated, truncated, _ = env.step(bit)
        assert (reward, terminated, truncated) == ((0.0, True, False) if i == len(wrong) - 1 else (-1.0, False, False))
    env.reset(seed=0)
    assert [env.step(0 if i % 2 else wrong[0])[3] for i in range(5)] == [False] * 4 + [True]
    batch = env.compute_reward(np.eye(5), np.eye(5)[[0, 1, 3, 2, 4]], {})
    assert batch.tolist() == [0, 0, -1, -1, 0]
    with pytest.raises(UsageError, match="at least 1"):
        BitFlip(0)


def test_bit_flip_with_hindsight_is_learned():
    env = make_vector(EnvSpec(id="object:B", vectorize="sync"), 8, lambda: BitFlip(6))
    given = {"horizon": 64, "start": 200, "batch": 64, "buffer": 20_000, "tau": 0.02, "replay_ratio": 0.25}
    learner = learner_on(env, "dqn", net={"hidden": [64], "activation": "relu"}, her={}, frames=6000, **given)
    for i in range(10):
        learner.step(i / 10)
    test = make_vector(EnvSpec(id="object:B", vectorize="sync"), 8, lambda: BitFlip(6))
    assert evaluate(learner.policy, Stepper(test), 40, seed=1).returns.mean() > -3  # always 6 without, 2.1 at best


def test_goals_of_an_environment_in_processes_are_known():
    env = make_vector(EnvSpec(id="object:Line", vectorize="async"), 2, Line)
    try:
        learner = learner_on(env, "sac", net={"hidden": [8]}, her={}, **SMALL)
        assert np.isfinite(list(learner.step(0.0).values())).all()
    finally:
        env.close()
    assert goals_of(make_single(EnvSpec(id="CartPole-v1"))) is None
