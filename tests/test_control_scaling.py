"""Scales of observations and rewards: points 9 and 16 to 20 and 23 of the list of pitfalls."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from palestra.control.scaling import ObsScale, Rewards, obs_scale
from palestra.spec.kinds.control import EnvSpec


def env(**given) -> EnvSpec:
    return EnvSpec(id="CartPole-v1", **given)


def test_obs_scale_of_odd_batches_with_mean_1e4_equals_numpy():  # point 19
    rng = np.random.default_rng(0)
    data = (1e4 + rng.standard_normal((100_000, 3)) * [1.0, 0.1, 10.0]).astype(np.float32)
    scale = ObsScale((3,), clip=10.0)
    at = 0
    while at < len(data):
        size = int(rng.integers(1, 5000))
        scale.update(torch.from_numpy(data[at : at + size]))
        at += size
    exact = data.astype(np.float64)
    np.testing.assert_allclose(scale.mean, exact.mean(0), rtol=1e-12)
    np.testing.assert_allclose(scale.var, exact.var(0), rtol=1e-7)
    assert scale.count == len(data)
    expected = (exact[:50] - exact.mean(0)) / np.sqrt(exact.var(0) + 1e-8)
    np.testing.assert_allclose(scale(torch.from_numpy(data[:50])), expected, atol=1e-5)


def test_obs_scale_clips_what_it_gives_and_not_what_it_learns_from():  # point 19
    scale = ObsScale((1,), clip=2.0)
    scale.update(torch.tensor([[0.0]] * 99 + [[1000.0]]))
    assert scale.mean.item() == pytest.approx(10.0)
    assert scale(torch.tensor([[1000.0], [-1e6]])).tolist() == [[2.0], [-2.0]]


def test_obs_scale_dummy_rows_leave_no_trace():
    valid = torch.tensor([[True, False], [True, True]])
    obs = torch.tensor([[[1.0], [1e9]], [[2.0], [3.0]]])
    scale = ObsScale((1,), clip=10.0)
    scale.update(obs, valid)
    assert (scale.mean.item(), scale.count.item()) == (pytest.approx(2.0), 3.0)


def test_obs_scale_acting_and_evaluating_freeze_it_and_weights_carry_it():  # point 16
    scale = ObsScale((2,), clip=10.0)
    scale.update(torch.randn(50, 2, generator=torch.Generator().manual_seed(0)) * 3 + 1)
    before = {name: value.clone() for name, value in scale.state_dict().items()}
    obs = torch.randn(8, 2)
    first = scale(obs)
    for mode in (True, False):
        scale.train(mode)
        assert torch.equal(scale(obs), first)
    assert all(torch.equal(value, before[name]) for name, value in scale.state_dict().items())
    other = ObsScale((2,), clip=10.0)
    other.load_state_dict(scale.state_dict())
    assert torch.equal(other(obs), first)


def test_obs_scale_buffers_keep_their_memory_so_graphs_and_views_see_updates():  # points 18, 66
    scale = ObsScale((1,), clip=10.0)
    stored = torch.tensor([[4.0]])  # raw, in a memory
    pointer = scale.mean.data_ptr()
    before = scale(stored).item()
    scale.update(torch.tensor([[4.0], [6.0]]))
    assert scale.mean.data_ptr() == pointer
    assert before == pytest.approx(4.0)
    assert scale(stored).item() == pytest.approx(-1.0)


def test_obs_scale_before_any_update_gives_observations_as_they_are():
    obs = torch.tensor([[0.5, -3.0]])
    torch.testing.assert_close(ObsScale((2,), clip=10.0)(obs), obs)


def test_obs_scale_of_bytes_gives_single_precision():  # point 23: floats come out, so nothing divides by 255 after it
    scale = ObsScale((1, 2, 2), clip=10.0)
    white = torch.full((3, 1, 2, 2), 255, dtype=torch.uint8)
    scale.update(torch.cat([white, torch.zeros_like(white)]))
    assert scale(white).dtype == torch.float32
    torch.testing.assert_close(scale(white), torch.ones(3, 1, 2, 2))


def test_obs_scale_only_where_asked_for():
    assert obs_scale(env(), (4,)) is None
    made = obs_scale(env(normalize_obs=True, clip_obs=3.0), (4,))
    assert made is not None
    assert made.clip == 3.0


@settings(deadline=None, max_examples=40)
@given(
    seed=st.integers(0, 2**31),
    steps=st.lists(st.integers(1, 6), min_size=1, max_size=5),
    envs=st.integers(1, 4),
    gamma=st.sampled_from([0.0, 0.9, 0.99]),
)
def test_rewards_scale_equals_std_of_running_sums_by_hand(seed, steps, envs, gamma):  # point 20
    rng = np.random.default_rng(seed)
    rewards = Rewards(env(normalize_reward=True), envs, gamma)
    running, seen, scaled = np.zeros(envs), [], torch.zeros(0)
    for block in steps:
        raw = rng.standard_normal((block, envs)) + 0.5
        ended, valid = rng.random((block, envs)) < 0.3, rng.random((block, envs)) < 0.8
        for t in range(block):
            for n in range(envs):
                if not valid[t, n]:  # the dummy step after an end: nothing came before it
                    running[n] = 0.0
                    continue
                running[n] = gamma * running[n] + raw[t, n]
                seen.append(running[n])
                running[n] = 0.0 if ended[t, n] else running[n]
        scaled = rewards.learned(torch.from_numpy(raw), torch.from_numpy(ended), torch.from_numpy(valid))
        std = np.sqrt((np.var(seen) if seen else 1.0) + 1e-8)
        np.testing.assert_allclose(scaled, raw / std, rtol=1e-9)
        assert np.array_equal(np.sign(scaled.numpy()), np.sign(raw))  # the mean is never subtracted


def test_rewards_constant_1_scale_is_std_of_the_running_sum():  # point 20
    rewards = Rewards(env(normalize_reward=True), 1, 0.99)
    ones = torch.ones(2000, 1)
    scaled = rewards.learned(ones, torch.zeros(2000, 1, dtype=torch.bool))
    sums = (1 - 0.99 ** np.arange(1, 2001)) / (1 - 0.99)
    np.testing.assert_allclose(scaled, 1 / np.std(sums), rtol=1e-5)


def test_rewards_clip_alone_clips_each_reward_before_sums():
    rewards = Rewards(env(clip_reward=1.0), 2, 0.99)
    raw = np.array([5.0, -0.5])
    assert rewards.storable(raw).tolist() == [1.0, -0.5]
    assert raw.tolist() == [5.0, -0.5]  # logged returns add up the raw ones
    assert rewards.scaled(torch.tensor([1.9])).tolist() == pytest.approx([1.9])  # a sum of clipped ones stays
    assert rewards.learned(torch.tensor([[5.0, -0.5]]), torch.zeros(1, 2, dtype=torch.bool)).tolist() == [[1.0, -0.5]]


def test_rewards_normalized_and_clipped_are_stored_raw_and_clipped_after_scaling():  # point 18
    rewards = Rewards(env(normalize_reward=True, clip_reward=2.0), 1, 0.0)
    assert rewards.storable(torch.tensor([50.0])).item() == 50.0
    rewards.update(torch.tensor([[10.0], [-10.0]]), torch.zeros(2, 1, dtype=torch.bool))
    assert rewards.scaled(torch.tensor([15.0, 50.0, -50.0])).tolist() == pytest.approx([1.5, 2.0, -2.0])
    assert rewards.scaled(torch.tensor([10.0])).dtype == torch.float32


def test_rewards_neither_asked_for_gives_the_same_tensor():
    rewards = Rewards(env(), 1, 0.9)
    raw = torch.tensor([[7.0]])
    assert rewards.learned(raw, torch.zeros(1, 1, dtype=torch.bool)) is raw
    assert rewards.state() == {}


def test_rewards_saved_and_loaded_goes_on_with_equal_bits():  # point 62
    blocks = torch.randn(4, 5, 3, dtype=torch.float64)
    ends = torch.rand(4, 5, 3) < 0.2
    one, other = (Rewards(env(normalize_reward=True), 3, 0.9) for _ in range(2))
    for raw, ended in zip(blocks[:2], ends[:2], strict=True):
        one.learned(raw, ended)
    other.load_state(one.state())
    for raw, ended in zip(blocks[2:], ends[2:], strict=True):
        assert torch.equal(one.learned(raw, ended), other.learned(raw, ended))


def test_rewards_cut_rows_begin_their_returns_at_zero():
    rewards = Rewards(env(normalize_reward=True), 2, 0.9)
    rewards.update(torch.ones(1, 2), torch.zeros(1, 2, dtype=torch.bool))
    rewards.cut(np.array([True, False]))
    assert rewards.state()["running"].tolist() == [0.0, 1.0]
