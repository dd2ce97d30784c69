"""The replay memory against a plain list of what really happened."""

from collections import deque
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from hypothesis import given, settings
from hypothesis import strategies as st
from probe_envs import Scripted, scripted_action, sync

from palestra.control.envs.stepping import Stepper, Transition
from palestra.control.memory.replay import Replay, ReplayBatch
from palestra.spec.off_policy import PrioritizedSpec

MODES = list(AutoresetMode)
GAMMA = 0.9


def memory(capacity: int, num_envs: int, **given: Any) -> Replay:
    return Replay(capacity, num_envs, (4,), np.dtype(np.float32), (), torch.int64, gamma=GAMMA, **given)


class Truth:
    """Everything that happened, as one list of episodes' steps for each environment."""

    def __init__(self, num_envs: int, rows: int):
        self.lanes = [
            deque(maxlen=rows) for _ in range(num_envs)
        ]  # (obs, action, reward, terminated, over, next) | None

    def add(self, obs: np.ndarray, actions: np.ndarray, moved: Transition) -> None:
        finals = {} if moved.ended is None else dict(zip(moved.ended.tolist(), moved.final_obs, strict=True))
        for i, lane in enumerate(self.lanes):
            if moved.valid is not None and not moved.valid[i]:
                lane.append(None)
                continue
            over = i in finals
            following = finals[i] if over else moved.obs[i]
            row = (obs[i], int(actions[i]), float(moved.rewards[i]), bool(moved.terminated[i]), over, following)
            lane.append(tuple(x.copy() if isinstance(x, np.ndarray) else x for x in row))

    def all(self, n_step: int) -> dict[tuple, tuple]:
        """For each row that can be drawn, by its observation (they differ): action, sum, successor, discount."""
        expected = {}
        for lane in self.lanes:
            steps = list(lane)
            for t, row in enumerate(steps):
                if row is None:
                    continue
                total, k = 0.0, 0
                while True:
                    _, _, reward, terminated, over, following = steps[t + k]
                    total += GAMMA**k * reward
                    k += 1
                    if over or k == n_step or t + k == len(steps):
                        break
                expected[row[0].tobytes()] = (row[1], total, following, 0.0 if terminated else GAMMA**k)
        return expected


def filled(mode: AutoresetMode, num_envs: int, rows: int, steps: int, seed: int, longest: int, **given: Any):
    stepper = Stepper(sync(lambda: Scripted(longest), num_envs, mode))
    held, truth = memory(rows * num_envs, num_envs, **given), Truth(num_envs, rows)
    obs = stepper.reset(seed)
    for _ in range(steps):
        obs = obs.copy()
        actions = scripted_action(torch.from_numpy(obs)).numpy()
        moved = stepper.step(actions)
        held.add(obs, actions, moved)
        truth.add(obs, actions, moved)
        obs = moved.obs
    return held, truth, stepper


def every_row(held: Replay) -> ReplayBatch:
    """What can be drawn, each once."""
    flags = held.columns["flags"].flat
    places = torch.arange(held._size * held.num_envs)
    return held._batch(places[(flags[held._flat(places)] & 4) == 0], None)


def check(batch: ReplayBatch, expected: dict[tuple, tuple]) -> None:
    for i in range(len(batch.obs)):
        action, total, following, discount = expected[batch.obs[i].numpy().tobytes()]
        assert int(batch.actions[i]) == action
        assert float(batch.rewards[i]) == pytest.approx(total, rel=1e-5, abs=1e-6)
        np.testing.assert_array_equal(batch.next_obs[i].numpy(), following)
        assert float(batch.discounts[i]) == pytest.approx(discount, rel=1e-6)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(MODES),
    st.integers(1, 3),
    st.integers(2, 12),
    st.integers(1, 40),
    st.integers(0, 900),
    st.integers(1, 5),
    st.integers(1, 9),
)
def test_sample_any_ends_any_ring_is_what_happened(mode, num_envs, rows, steps, seed, n_step, longest):
    """Points 3, 4, 45, 46, 49, 60: brute force over modes, environments, ring sizes, kinds of end and n."""
    held, truth, _ = filled(mode, num_envs, rows, steps, seed, longest, n_step=n_step)
    expected = truth.all(n_step)
    assert len(held) == len(expected)
    everything = every_row(held)
    assert {row.numpy().tobytes() for row in everything.obs} == set(expected)
    check(everything, expected)
    check(held.sample(50, torch.Generator().manual_seed(seed)), expected)
    assert not (everything.next_obs[:, 3] == 1).any()  # point 3: a reset observation is nobody's successor


def test_sample_ring_of_ten_after_thirty_five_steps_only_gives_true_transitions():
    """Point 45, in its own words: 3 environments, a ring of 10, 35 steps with ends."""
    held, truth, _ = filled(AutoresetMode.SAME_STEP, 3, 10, 35, 5, 6)
    batch = held.sample(2000, torch.Generator().manual_seed(0))
    check(batch, truth.all(1))
    assert len({row.numpy().tobytes() for row in batch.obs}) == len(held) == 30  # point 49: all of them and no other


@pytest.mark.parametrize("mode", MODES)
def test_sample_dummy_steps_are_never_drawn(mode):
    """Point 4: rows that can be drawn are the steps of the episodes, no more."""
    held, truth, _ = filled(mode, 4, 100, 100, 3, 3)
    lengths = sum(row is not None for lane in truth.lanes for row in lane)
    assert len(held) == lengths
    assert (mode is AutoresetMode.NEXT_STEP) == (lengths < 400)
    seen = held.sample(20_000, torch.Generator().manual_seed(1)).rows
    assert len(seen.unique()) == lengths
    counts = seen.unique(return_counts=True)[1].double()
    mean = 20_000 / lengths
    assert float(((counts - mean) ** 2 / mean).sum()) < lengths + 6 * (2 * lengths) ** 0.5  # χ² of a uniform draw


def test_sample_truncated_episode_is_not_terminal():
    """Point 60: a truncated end bootstraps, a terminated one does not."""
    held = memory(64, 1)
    obs = np.zeros((1, 4), np.float32)
    for i in range(10):
        final = np.full((1, 4), i, np.float32)
        over = np.array([0])
        terminated, truncated = np.array([i % 2 == 0]), np.array([i % 2 == 1])
        held.add(obs + i, np.zeros(1, int), Transition(obs, np.ones(1), terminated, truncated, None, over, final))
    batch = every_row(held)
    assert batch.discounts.tolist() == pytest.approx([0.0, GAMMA] * 5)
    assert batch.next_obs[:, 0].tolist() == list(range(10))


def test_sample_of_several_batches_is_the_same_as_one_large():
    held, truth, _ = filled(AutoresetMode.NEXT_STEP, 2, 20, 50, 1, 6, n_step=3)
    many = held.sample(8, torch.Generator().manual_seed(7), batches=4)
    one = held.sample(32, torch.Generator().manual_seed(7))
    assert many.obs.shape == (32, 4)
    assert many.weights is None
    for a, b in zip(many, one, strict=True):
        assert a is b is None or torch.equal(a, b)
    check(one, truth.all(3))


@settings(max_examples=20, deadline=None)
@given(st.sampled_from(MODES), st.integers(1, 30), st.integers(0, 30), st.booleans(), st.integers(1, 3))
def test_state_round_trip_goes_on_alike(mode, before, after, prioritized, n_step):
    """Checkpoints hold the memory exactly, whatever is drawn, changed and added later."""
    given = {"n_step": n_step, "prioritized": PrioritizedSpec() if prioritized else None}
    held, _, stepper = filled(mode, 2, 8, before, 3, 5, **given)
    generator = torch.Generator().manual_seed(2)

    def go(held: Replay, obs: np.ndarray, moves: list) -> list:
        out = []
        generator.manual_seed(9)
        for actions, moved in moves:
            held.add(obs, actions, moved)
            batch = held.sample(6, generator, beta=0.5)
            if prioritized:
                held.update_priorities(batch.rows, batch.rewards)
            out.append(batch)
            obs = moved.obs.copy()
        return out

    if prioritized:
        batch = held.sample(4, generator, beta=0.5)
        held.update_priorities(batch.rows, batch.rewards + 2)
    again = memory(16, 2, **given)
    state = held.state()
    again.load_state(state)
    obs = np.zeros((2, 4), np.float32)
    moves = []
    for _ in range(after):
        actions = np.zeros(2, int)
        moved = stepper.step(actions)
        moves.append((actions, moved._replace(obs=moved.obs.copy())))
    first, second = go(held, obs, moves), go(again, obs, moves)
    for one, other in zip(first, second, strict=True):
        for a, b in zip(one, other, strict=True):
            assert a is b is None or torch.equal(a, b)
    third = memory(16, 2, **given)
    third.load_state(state)  # what went on afterwards did not change the state that was taken
    assert third.added == before


def test_cut_environments_restarted_outside_of_a_step_end_there():
    """After a resume that could not restore an environment no window reaches from the old episode into the new one."""
    held = memory(40, 2, n_step=3)
    flat = np.zeros(2, bool)

    def step(first: float) -> None:
        shown = np.array([[first, 0, 0, 0], [first + 50, 0, 0, 0]], np.float32)
        held.add(shown, np.zeros(2, int), Transition(shown + 1, np.ones(2), flat, flat, None, None, None))

    step(0)
    step(1)
    held.cut(np.array([False, True]))
    step(20)
    step(21)
    batch = every_row(held)
    columns = (batch.obs[:, 0], batch.next_obs[:, 0], batch.discounts)
    result = {int(o): (int(n), round(float(d), 4)) for o, n, d in zip(*columns, strict=True)}
    assert result[50] == (52, 0.81)
    assert result[51] == (52, 0.9)
    assert result[70] == (72, 0.81)
    assert result[0][0] == 21  # the other environment went on


class Counting(gym.Env):
    """Images whose pixels say which episode and step they are of."""

    observation_space = spaces.Box(0, 255, (2, 2), np.uint8)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:
            self.number, self.episode = seed, 0
        self.at, self.length, self.episode = 0, int(self.np_random.integers(1, 9)), self.episode + 1
        return self._show(), {}

    def step(self, action):
        self.at += 1
        return self._show(), 1.0, self.at == self.length and self.episode % 2 == 0, self.at == self.length, {}

    def _show(self):
        return np.array([[self.number, self.at], [self.episode, 1]], np.uint8)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("padding", ["reset", "zero"])
@pytest.mark.parametrize("n_step", [1, 3])
def test_sample_stacked_frames_rebuilt_stack_is_the_original(mode, padding, n_step):
    """Point 50: single frames are stored, and stacks come back bit for bit, at starts, ends and the ring's seam."""
    make = lambda: gym.wrappers.FrameStackObservation(Counting(), 4, padding_type=padding)  # noqa: E731
    stepper = Stepper(sync(make, 3, mode))
    held = Replay(3 * 40, 3, (4, 2, 2), np.dtype(np.uint8), (), torch.int64, gamma=GAMMA, frame_stack=4, n_step=n_step)
    truth = Truth(3, 40)
    obs = stepper.reset(11)
    for t in range(150):
        obs = obs.copy()
        moved = stepper.step(np.zeros(3, int))
        held.add(obs, np.zeros(3, int), moved)
        truth.add(obs, np.zeros(3, int), moved)
        obs = moved.obs
        if t in (2, 30, 45, 90, 149):
            expected = truth.all(n_step)
            batch = every_row(held)
            assert batch.obs.dtype == torch.uint8
            for i in range(len(batch.obs)):
                _, _, following, discount = expected[batch.obs[i].numpy().tobytes()]
                np.testing.assert_array_equal(batch.next_obs[i].numpy(), following)
                assert float(batch.discounts[i]) == pytest.approx(discount)
    assert held.columns["obs"].tensor.numel() == (40 + 4) * 3 * 4  # one frame a row, not four
    assert held.starts.used < 150
    again = Replay(120, 3, (4, 2, 2), np.dtype(np.uint8), (), torch.int64, gamma=GAMMA, frame_stack=4, n_step=n_step)
    again.load_state(held.state())
    assert torch.equal(every_row(again).obs, every_row(held).obs)


def test_finals_slots_are_used_again():
    held, _, _ = filled(AutoresetMode.SAME_STEP, 2, 10, 400, 3, 3)
    ends = int((held.columns["final"].tensor > 0).sum())
    assert held.finals.used - len(held.finals.free) == ends
    assert held.finals.used < 30


def test_state_of_hundreds_of_ends_is_taken_back_at_once():
    """Ends come one by one while it fills, and all together from a checkpoint."""
    held, truth, _ = filled(AutoresetMode.SAME_STEP, 2, 600, 590, 3, 3)
    assert held.finals.used > 256
    again = memory(1200, 2)
    again.load_state(held.state())
    check(every_row(again), truth.all(1))


def test_add_observations_of_the_environment_that_change_later_stay():
    """Point 13: environments may give the same array again."""
    held = memory(10, 1)
    shared = np.zeros((1, 4), np.float32)
    no = np.zeros(1, bool)
    for i in range(4):
        before = shared.copy()
        shared[:] = i + 1
        held.add(before, np.zeros(1, int), Transition(shared, np.zeros(1), no, no, None, None, None))
    batch = every_row(held)
    assert batch.obs[:, 0].tolist() == [0, 1, 2, 3]
    assert batch.next_obs[:, 0].tolist() == [1, 2, 3, 4]
