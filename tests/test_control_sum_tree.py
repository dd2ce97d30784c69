"""The tree of sums against plain arrays, and what prioritized replay draws."""

import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode
from hypothesis import given, settings
from hypothesis import strategies as st
from probe_envs import Scripted, sync

from palestra.control.envs.stepping import Stepper, Transition
from palestra.control.memory.replay import Replay
from palestra.control.memory.storage import SumTree
from palestra.spec.off_policy import PrioritizedSpec


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 3000), st.integers(0, 2**31 - 1))
def test_find_random_weights_is_the_search_in_the_running_sum(size, seed):
    rng = np.random.default_rng(seed)
    weights = rng.integers(0, 4, size).astype(float)  # whole numbers: sums are exact, and many weights are 0
    weights[rng.integers(size)] += 1
    tree = SumTree(size)
    order = rng.permutation(size)
    for part in np.array_split(order, 5):
        tree.set(part, rng.random(len(part)))
        tree.set(part, weights[part])
    assert tree.total == weights.sum()
    at = rng.random(500) * tree.total
    np.testing.assert_array_equal(tree.find(at), np.searchsorted(weights.cumsum(), at, side="right"))
    assert (tree.weights(tree.find(at)) > 0).all()


def test_find_at_the_very_end_never_gives_an_item_without_weight():
    tree = SumTree(2000)
    tree.set(np.arange(700), np.full(700, 0.1))
    assert tree.find(np.array([tree.total, np.nextafter(tree.total, 0), tree.total * 1.0000001])).tolist() == [699] * 3


def test_total_after_a_million_changes_is_the_sum_of_the_leaves():
    """Point 47: no drift."""
    rng = np.random.default_rng(0)
    tree, weights = SumTree(5000), np.zeros(5000)
    for _ in range(500):
        items = rng.integers(5000, size=2000)
        values = 10.0 ** rng.uniform(-8, 8, 2000)
        tree.set(items, values)
        weights[items] = values
    np.testing.assert_array_equal(tree.weights(np.arange(5000)), weights)
    assert tree.total == pytest.approx(weights.sum(), rel=1e-14)
    tree.set(np.arange(5000), 1e-9)
    assert tree.total == pytest.approx(5e-6, rel=1e-12)  # large ones that were there left nothing behind


def held(capacity: int = 64, envs: int = 2, steps: int = 32, **given) -> Replay:
    memory = Replay(
        capacity, envs, (1,), np.dtype(np.float32), (), torch.int64, gamma=0.9, prioritized=PrioritizedSpec(**given)
    )
    for i in range(steps):
        put(memory, i, envs)
    return memory


def put(memory: Replay, i: int, envs: int = 2) -> None:
    no = np.zeros(envs, bool)
    obs = np.arange(envs, dtype=np.float32)[:, None] + i * envs
    memory.add(obs, np.zeros(envs, int), Transition(obs, np.zeros(envs), no, no, None, None, None))


def test_sample_frequencies_are_the_priorities_to_the_power_of_alpha():
    """Point 47: χ² of what is drawn."""
    memory = held(alpha=0.6)
    errors = torch.linspace(0, 4, 64)
    memory.sample(8, torch.Generator().manual_seed(0), 0.4)
    memory.update_priorities(torch.arange(64), errors)
    chances = (errors.double().numpy() + 1e-6) ** 0.6
    chances /= chances.sum()
    generator = torch.Generator().manual_seed(1)
    rows = memory.sample(1, generator, 0.4, batches=20_000).rows  # batches of one are independent
    counts = np.bincount(rows.numpy(), minlength=64)
    expected = chances * 20_000
    seen = expected > 5
    assert ((counts - expected)[seen] ** 2 / expected[seen]).sum() < 64 + 5 * 128**0.5
    batch = memory.sample(32, generator, 0.4)
    weights = (len(memory) * chances[batch.rows.numpy()]) ** -0.4
    np.testing.assert_allclose(batch.weights.numpy(), weights / weights.max(), rtol=1e-5)
    assert float(batch.weights.max()) == 1.0


def test_sample_by_priority_is_stratified_in_every_batch():
    memory = held()
    memory.sample(8, torch.Generator().manual_seed(0), 0.4)
    memory.update_priorities(torch.arange(64), torch.linspace(0.5, 5, 64))
    many = memory.sample(16, torch.Generator().manual_seed(3), 0.7, batches=5)
    assert many.obs.shape == (5 * 16, 1)
    assert many.weights.view(5, 16).max(dim=1).values.tolist() == [1.0] * 5
    priorities = memory.tree.weights(np.arange(64))
    above = priorities.cumsum() / priorities.sum() * 16  # item i lies from above[i - 1] to above[i] in units of parts
    for rows, weights in zip(many.rows.numpy().reshape(5, 16), many.weights.numpy().reshape(5, 16), strict=True):
        below = np.where(rows == 0, 0.0, above[rows - 1])
        assert (below <= np.arange(16) + 1).all()
        assert (above[rows] >= np.arange(16)).all()
        expected = (len(memory) * priorities[rows] / priorities.sum()) ** -0.7
        np.testing.assert_allclose(weights, expected / expected.max(), rtol=1e-5)


def test_weights_beta_one_makes_the_mean_unbiased():
    """Point 47: E[w x] / E[w] is the plain mean over the memory."""
    memory = held()
    memory.sample(8, torch.Generator().manual_seed(0), 1.0)
    memory.update_priorities(torch.arange(64), torch.linspace(0.5, 5, 64))
    batch = memory.sample(200_000, torch.Generator().manual_seed(2), 1.0)
    x = batch.obs[:, 0].double() ** 2
    plain = float((torch.arange(64.0).double() ** 2).mean())
    assert float((batch.weights * x).sum() / batch.weights.sum()) == pytest.approx(plain, rel=1e-2)
    assert float(x.mean()) > 1.2 * plain


def test_add_new_transitions_get_the_highest_priority_so_far():
    memory = held(capacity=128)
    generator = torch.Generator().manual_seed(0)
    memory.sample(4, generator, 0.4)
    memory.update_priorities(torch.arange(64), torch.cat([torch.full((63,), 1e-3), torch.tensor([7.0])]))
    put(memory, 32)
    memory.sample(4, generator, 0.4)
    tree = memory.tree
    assert tree.weights(np.array([64, 65])).tolist() == [tree.weights(np.array([63]))[0]] * 2


def test_update_priorities_of_overwritten_rows_is_ignored():
    """Point 47: what was drawn may be gone when its error is known."""
    memory = held(capacity=64, steps=40)
    generator = torch.Generator().manual_seed(0)
    batch = memory.sample(64, generator, 0.4)
    for i in range(40, 56):
        put(memory, i)
    memory.sample(1, generator, 0.4)
    before = memory.tree.state()[0].reshape(-1)
    memory.update_priorities(batch.rows, torch.full((64,), 100.0))
    after = memory.tree.state()[0].reshape(-1)
    oldest = (56 - 32) * 2
    changed = {int(row) % (33 * 2) for row in batch.rows if row >= oldest}
    assert set(np.flatnonzero(before != after).tolist()) == changed
    assert 0 < len(changed) < len(set(batch.rows.tolist()))
    assert int((after > 0).sum()) == len(memory) == 64


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_sample_prioritized_rows_that_left_and_dummy_steps_are_never_drawn(mode):
    stepper = Stepper(sync(lambda: Scripted(3), 3, mode))
    memory = Replay(
        30, 3, (4,), np.dtype(np.float32), (), torch.int64, gamma=0.9, n_step=2, prioritized=PrioritizedSpec()
    )
    obs, generator = stepper.reset(1), torch.Generator().manual_seed(3)
    for _ in range(60):
        moved = stepper.step(np.zeros(3, int))
        memory.add(obs, np.zeros(3, int), moved)
        obs = moved.obs.copy()
        batch = memory.sample(20, generator, 0.5)
        memory.update_priorities(batch.rows, batch.rewards)
        assert int(batch.rows.min()) >= (memory.added - memory._size) * 3
        assert int(batch.rows.max()) < memory.added * 3
        assert not (memory.columns["flags"].flat[batch.rows % (memory.ring * 3)] & 4).any()
    memory.sample(1, generator, 0.5)
    assert int((memory.tree.levels[0] > 0).sum()) == len(memory)
