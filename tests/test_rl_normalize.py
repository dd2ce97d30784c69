"""Normalizers: against NumPy over everything seen, masks, groups of any size, equal values, saved and loaded state."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from palestra.rl.normalize import (
    Moments,
    RewardScale,
    batch_normalize,
    group_normalize,
    group_std,
    leave_one_out,
)


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def test_moments_of_odd_batches_with_a_large_mean_equal_numpy():
    data = (1e4 + randn(100_000, 3)).float()
    moments, start = Moments.start((3,)), 0
    sizes = torch.randint(1, 5000, (200,), generator=torch.Generator().manual_seed(1)).tolist()
    for size in sizes:
        moments = moments.merged(data[start : start + size])
        start += size
    seen = data[:start].double().numpy()
    assert moments.count == len(seen)
    np.testing.assert_allclose(moments.mean, seen.mean(0), rtol=1e-12)
    np.testing.assert_allclose(moments.var, seen.var(0), rtol=1e-9)


def test_moments_of_masked_rows_equal_those_of_the_others_alone():
    data, mask = randn(6, 4, 3), randn(6, 4, seed=1) > 0
    plain = Moments.start((3,)).merged(data[mask])
    masked = Moments.start((3,)).merged(torch.where(mask.unsqueeze(-1), data, torch.nan), mask)
    masked = masked.merged(torch.full((2, 3), torch.nan), torch.zeros(2, dtype=torch.bool))
    assert all(torch.equal(a, b) for a, b in zip(masked, plain, strict=True))


def test_reward_scale_equals_loop_with_resets():
    rewards = randn(50, 3)
    ended = torch.rand((50, 3), generator=torch.Generator().manual_seed(3)) < 0.1
    valid = torch.rand((50, 3), generator=torch.Generator().manual_seed(4)) < 0.8
    running, seen = np.zeros(3), []
    for t in range(50):
        for i in range(3):
            if not valid[t, i]:
                running[i] = 0.0
                continue
            running[i] = 0.9 * running[i] + rewards[t, i].item()
            seen.append(running[i])
            if ended[t, i]:
                running[i] = 0.0
    scale = RewardScale(3, gamma=0.9)
    for part in (slice(0, 1), slice(1, 20), slice(20, 50)):
        scale.update(torch.where(valid, rewards, torch.nan)[part], ended[part], valid[part])
    np.testing.assert_allclose(scale.running, running, rtol=1e-12)
    np.testing.assert_allclose(scale.moments.var, np.var(seen), rtol=1e-10)
    np.testing.assert_allclose(scale.scale(rewards), rewards / np.std(seen), rtol=1e-6)


def test_reward_scale_constant_reward_keeps_sign_and_size():
    """Reward 1, γ 0.99: the running sums are (1 - γ^t) / (1 - γ); their mean is not subtracted from the reward."""
    scale = RewardScale(2, gamma=0.99)
    rewards = torch.ones(300, 2)
    scale.update(rewards, torch.zeros(300, 2, dtype=torch.bool))
    sums = (1 - 0.99 ** np.arange(1, 301)) / 0.01
    np.testing.assert_allclose(scale.scale(rewards), np.full((300, 2), 1 / sums.std()), rtol=1e-6)
    assert (scale.scale(-rewards) < 0).all()
    assert scale.scale(1e6 * rewards, clip=10.0).max() == 10.0


def test_reward_scale_saved_and_loaded_in_mid_episode_continues_the_same():
    whole, first, second = (RewardScale(2, gamma=0.95) for _ in range(3))
    rewards, ended = randn(40, 2), randn(40, 2, seed=1) > 1.5
    whole.update(rewards[:17], ended[:17])
    first.update(rewards[:17], ended[:17])
    second.load_state_dict(first.state_dict())
    for scale in (whole, second):
        scale.update(rewards[17:], ended[17:])
    assert all(torch.equal(second.state_dict()[key], value) for key, value in whole.state_dict().items())


def test_batch_normalize_has_mean_zero_and_population_std_one():
    x = 5 * randn(8, 16) + 100
    normalized = batch_normalize(x)
    torch.testing.assert_close(normalized, (x - x.mean()) / x.std(correction=0))
    torch.testing.assert_close(batch_normalize(x, torch.ones(8, 16, dtype=torch.bool)), normalized)
    sample = (x - x.mean()) / x.std(correction=1)
    torch.testing.assert_close(batch_normalize(x, correction=1), sample)
    torch.testing.assert_close(batch_normalize(x, torch.ones(8, 16, dtype=torch.bool), correction=1), sample)


def test_batch_normalize_padding_changes_nothing_and_comes_out_zero():
    x = randn(20)
    padded = torch.cat((x, torch.tensor([torch.nan, 1e9, -torch.inf], dtype=torch.float64)))
    normalized = batch_normalize(padded, torch.arange(23) < 20)
    torch.testing.assert_close(normalized[:20], batch_normalize(x))
    assert torch.equal(normalized[20:], torch.zeros(3, dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("count", [1, 3, 7, 1000])
def test_batch_normalize_equal_values_are_exactly_zero(dtype: torch.dtype, count: int):
    x = torch.full((count,), 0.1, dtype=dtype)
    assert torch.equal(batch_normalize(x), torch.zeros_like(x))
    assert torch.equal(batch_normalize(x, correction=1), torch.zeros_like(x))
    assert torch.equal(batch_normalize(x, torch.ones(count, dtype=torch.bool)), torch.zeros_like(x))
    assert torch.equal(batch_normalize(x, torch.zeros(count, dtype=torch.bool)), torch.zeros_like(x))


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([0.0, 1.0, 0.0], [-0.5, 1.0, -0.5]),
        ([1.0, 1.0, 1.0], [0.0, 0.0, 0.0]),
        ([0.0, 0.5, 1.0], [-0.75, 0.0, 0.75]),
        ([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], [-3.0, -1.8, -0.6, 0.6, 1.8, 3.0]),
    ],
)
def test_leave_one_out_equals_hand_numbers(rewards: list[float], expected: list[float]):
    actual = leave_one_out(torch.tensor(rewards), torch.zeros(len(rewards), dtype=torch.long))
    torch.testing.assert_close(actual, torch.tensor(expected))


@st.composite
def grouped_rewards(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    size = draw(st.integers(1, 12))
    ids = draw(st.lists(st.sampled_from([-5, 0, 3, 10**12]), min_size=size, max_size=size))
    rewards = draw(st.lists(st.sampled_from([0.0, 0.1, 0.7, 1.0, -2.0]), min_size=size, max_size=size))
    return torch.tensor(rewards, dtype=torch.float64), torch.tensor(ids)


@given(grouped_rewards(), st.randoms())
@settings(max_examples=80, deadline=None)
def test_group_baselines_partial_groups_equal_each_group_alone(batch: tuple[Tensor, Tensor], random):
    rewards, ids = batch
    centered, scaled = group_normalize(rewards, ids, scale="none"), group_normalize(rewards, ids, scale="std")
    others = leave_one_out(rewards, ids)
    sampled = group_std(rewards, ids, correction=1)
    for i, (reward, group) in enumerate(zip(rewards.tolist(), ids.tolist(), strict=True)):
        members = rewards[ids == group].numpy()
        alike = len(set(members.tolist())) == 1
        assert centered[i].item() == pytest.approx(reward - members.mean(), abs=1e-12)
        expected = 0.0 if alike else (reward - members.mean()) / (members.std() + 1e-6)
        assert scaled[i].item() == pytest.approx(expected, abs=1e-9)
        assert sampled[i].item() == pytest.approx(0.0 if alike else members.std(ddof=1), abs=1e-12)
        rest = np.delete(members, members.tolist().index(reward))
        assert others[i].item() == pytest.approx(reward - rest.mean() if len(rest) else 0.0, abs=1e-12)
        if alike:
            assert centered[i] == scaled[i] == others[i] == 0.0
    order = list(range(len(rewards)))
    random.shuffle(order)
    torch.testing.assert_close(group_normalize(rewards[order], ids[order], scale="std"), scaled[order])
    torch.testing.assert_close(leave_one_out(rewards[order], ids[order]), others[order])


def test_group_normalize_two_groups_equal_hand_numbers():
    """Population std: [0, 1] has 0.5, so ±1; float32 in, float32 out."""
    rewards, ids = torch.tensor([0.0, 10.0, 1.0, 30.0]), torch.tensor([4, 9, 4, 9])
    actual = group_normalize(rewards, ids, scale="std")
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual, torch.tensor([-1.0, -1.0, 1.0, 1.0]), atol=1e-5, rtol=0)
    assert group_normalize(rewards, ids, scale="none").tolist() == [-0.5, -10.0, 0.5, 10.0]
