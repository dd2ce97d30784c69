"""Large memories: rows in files beside the checkpoints, written once, exact after a kill at any instant."""

import copy

import numpy as np
import pytest
import torch
from conftest import fast_only
from gymnasium.vector import AutoresetMode
from probe_envs import Scripted, sync

from palestra.control.envs.stepping import Stepper
from palestra.control.memory import replay
from palestra.control.memory import storage as shards
from palestra.control.memory.replay import Replay
from palestra.control.memory.storage import DamagedShard
from palestra.spec.off_policy import PrioritizedSpec


@pytest.fixture(autouse=True)
def small_limit(monkeypatch):
    monkeypatch.setattr(replay, "LIMIT", 1000)


def memory() -> Replay:
    made = Replay(
        200, 2, (4,), np.dtype(np.float32), (), torch.int64, gamma=0.9, n_step=2, prioritized=PrioritizedSpec()
    )
    made.shard_rows = 8
    return made


class Life:
    """Adds, draws and changes priorities, the same way from the same state."""

    def __init__(self, mode: AutoresetMode):
        self.stepper = Stepper(sync(lambda: Scripted(5), 2, mode))
        self.obs = self.stepper.reset(4)
        self.moves = []

    def move(self, number: int):
        while len(self.moves) <= number:
            moved = self.stepper.step(np.zeros(2, int))
            self.moves.append((self.obs, moved._replace(obs=moved.obs.copy())))
            self.obs = moved.obs.copy()
        return self.moves[number]

    def live(self, held: Replay, until: int) -> list:
        drawn = []
        while held.added < until:
            obs, moved = self.move(held.added)
            held.add(obs, np.zeros(2, int), moved)
            batch = held.sample(5, torch.Generator().manual_seed(held.added), beta=0.5)
            held.update_priorities(batch.rows, batch.rewards)
            drawn += [part.clone() for part in batch if part is not None]
        return drawn


def same(a: list, b: list) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("mode", fast_only(AutoresetMode, AutoresetMode.NEXT_STEP))
def test_state_in_shards_any_checkpoint_continues_exactly(mode, tmp_path):
    life, held = Life(mode), memory()
    for at in (3, 8, 9, 17, 60, 100, 101, 102, 130, 310):  # before the ring is full, at its seam, after many rounds
        life.live(held, at)
        state = copy.deepcopy(held.state(tmp_path))
        again = memory()
        again.load_state(state, tmp_path)
        saved = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
        going = memory()
        going.load_state(copy.deepcopy(state), tmp_path)
        plain = memory()
        plain.load_state(held.state())  # without files
        expected = life.live(plain, at + 30)
        assert same(life.live(again, at + 30), expected)
        assert same(life.live(held, at + 30), expected)
        assert {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == saved
        held = going


def test_state_in_shards_files_are_written_once_and_old_ones_go(tmp_path):
    life, held = Life(AutoresetMode.SAME_STEP), memory()
    life.live(held, 90)
    held.state(tmp_path)
    first = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert len(first) == 89 // 8
    life.live(held, 100)
    held.state(tmp_path)
    second = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert all(second[name] == time for name, time in first.items())
    for at in (300, 320, 340):
        life.live(held, at)
        held.state(tmp_path)
    assert len(list(tmp_path.iterdir())) <= 101 // 8 + 4


def test_load_state_older_checkpoint_after_a_newer_one_was_cut_off_is_exact(tmp_path):
    """Killed after files were written and before the checkpoint that needs them was."""
    life, held = Life(AutoresetMode.NEXT_STEP), memory()
    life.live(held, 150)
    state = copy.deepcopy(held.state(tmp_path))
    expected = life.live(held, 200)
    held.state(tmp_path)  # the checkpoint with this state is never completed
    again = memory()
    again.load_state(state, tmp_path)
    assert same(life.live(again, 200), expected)
    later = copy.deepcopy(again.state(tmp_path))
    third = memory()
    third.load_state(later, tmp_path)
    assert same(life.live(third, 260), life.live(again, 260))


def test_load_state_file_missing_or_changed_is_named(tmp_path):
    life, held = Life(AutoresetMode.SAME_STEP), memory()
    life.live(held, 150)
    state = held.state(tmp_path)
    victim = sorted(tmp_path.iterdir())[3]
    content = victim.read_bytes()
    victim.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(DamagedShard, match=rf"{victim.name} is damaged"):
        memory().load_state(state, tmp_path)
    victim.unlink()
    with pytest.raises(DamagedShard, match=rf"{victim.name} is missing"):
        memory().load_state(state, tmp_path)


def test_state_small_memory_is_wholly_in_the_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setattr(replay, "LIMIT", shards.LIMIT)
    life, held = Life(AutoresetMode.SAME_STEP), memory()
    life.live(held, 150)
    assert held.state(tmp_path)["shards"] == []
    assert not list(tmp_path.iterdir())
