"""Offline algorithms: losses in closed form, files checked, exact resume, better than the behavior in the file."""

import gymnasium as gym
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import palestra
from palestra.control.envs.make import make_vector
from palestra.control.nets.heads import ActionHead
from palestra.control.trainer import ControlTrainer
from palestra.control.transitions import read_transitions, stored_actions
from palestra.errors import UsageError
from palestra.rl.losses import expectile_loss
from palestra.spec.load import load

torch.set_num_threads(1)

NAMES = ("bc", "td3_bc", "iql")


class Target(gym.Env):
    """One step: the action should equal the observation; the reward is minus their squared distance."""

    observation_space = gym.spaces.Box(-1, 1, (1,), np.float32)
    action_space = gym.spaces.Box(-2, 2, (1,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.wanted = self.np_random.uniform(-1, 1, 1).astype(np.float32)
        return self.wanted, {}

    def step(self, action):
        return self.wanted, -float((action[0] - self.wanted[0]) ** 2), True, False, {}


def write_file(path, rows: int = 3000) -> dict[str, np.ndarray]:
    """A behavior whose actions miss what is wanted by 0.6 on average, and now and then hardly."""
    random = np.random.default_rng(0)
    obs = random.uniform(-1, 1, (rows, 1)).astype(np.float32)
    actions = np.clip(obs + random.normal(0.6, 0.5, (rows, 1)), -2, 2).astype(np.float32)
    rewards = -((actions - obs) ** 2)[:, 0]
    columns = {"observations": obs, "actions": actions, "rewards": rewards, "next_observations": obs}
    np.savez(path, terminated=np.ones(rows, bool), **columns)
    return columns


def spec_of(name: str, path, **fields):
    data = {"kind": "control", "name": "x", "env": {"id": "object:Target", "num_envs": 1}, "net": {"hidden": [32]}}
    data |= {"algorithm": {"name": name, "data": str(path), "lr": 3e-3, "batch": 128, "horizon": 100}}
    return load({**data, "train": {"frames": 600}}, overrides=fields).spec


def learner(name: str, path, **fields) -> ControlTrainer:
    trainer = ControlTrainer(spec_of(name, path, **fields), 0, Target, make_vector, compile=False)
    trainer.begin(None)
    return trainer


def score(trainer: ControlTrainer) -> float:
    obs = np.linspace(-0.9, 0.9, 50, dtype=np.float32)[:, None]
    return float(-((trainer.policy.act(obs) - obs) ** 2).mean())


def test_iql_and_td3_bc_beat_behavior_cloning(tmp_path):
    write_file(tmp_path / "data.npz")
    scores = {}
    # A policy that reaches the bounds before its critic fits stays there: tanh is flat.
    slow = {"algorithm.lr": 3e-4, "algorithm.critic_lr": 1e-2, "net.activation": "relu", "net.hidden": [64]}
    for name, fields in {"bc": {}, "iql": {"algorithm.beta": 10.0}, "td3_bc": slow}.items():
        trainer = learner(name, tmp_path / "data.npz", **fields)
        while not trainer.done:
            trainer.improve(trainer.episodes.frame / 600)
        scores[name] = score(trainer)
        trainer.env.close()
    # Cloning gives the mean action, which misses by 0.6: -0.6² is -0.36.
    assert scores["bc"] == pytest.approx(-0.36, abs=0.1)
    assert scores["iql"] > scores["bc"] / 2
    assert scores["td3_bc"] > scores["bc"] / 2


@pytest.mark.parametrize("name", NAMES)
def test_resumed_learner_continues_bit_for_bit(tmp_path, name):
    write_file(tmp_path / "data.npz", 200)
    whole = learner(name, tmp_path / "data.npz", **{"env.normalize_obs": True})
    for _ in range(2):
        whole.improve(0.0)
    saved = whole.state()
    metrics = whole.improve(0.0)
    again = learner(name, tmp_path / "data.npz", **{"env.normalize_obs": True})
    again.begin(saved)
    assert again.improve(0.0) == metrics
    ours, theirs = whole.policy.state()["weights"], again.policy.state()["weights"]
    assert all(torch.equal(ours[weight], theirs[weight]) for weight in ours)
    write_file(tmp_path / "data.npz", 201)
    with pytest.raises(UsageError, match="not the file that this run began with"):
        learner(name, tmp_path / "data.npz", **{"env.normalize_obs": True}).begin(saved)


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=20), st.floats(0.05, 0.95))
@settings(max_examples=50)
def test_value_of_least_expectile_loss_weighs_what_is_above_and_below(numbers, expectile):
    errors = torch.tensor(numbers, dtype=torch.float64)
    expected = sum((expectile if u >= 0 else 1 - expectile) * u * u for u in numbers)
    assert float(expectile_loss(errors, expectile).sum()) == pytest.approx(expected)
    value = torch.zeros((), dtype=torch.float64)
    for _ in range(200):  # a fixed point: the expectile is the mean weighted by which side each number is on
        weights = torch.where(errors < value, 1 - expectile, expectile)
        value = (weights * errors).sum() / weights.sum()
    shifted = (value + torch.linspace(-1, 1, 21, dtype=torch.float64))[:, None]
    losses = expectile_loss(errors - shifted, expectile).sum(dim=1)
    assert losses.argmin() == 10 or torch.isclose(losses.min(), losses[10])


def test_run_stores_transitions_that_are_read_as_they_were(tmp_path):
    spec = {"kind": "control", "name": "made", "train": {"frames": 600}, "env": {"id": "Pendulum-v1", "num_envs": 3}}
    fields = {"name": "sac", "start": 300, "horizon": 100, "n_step": 3, "batch": 16, "buffer": 450}
    run = palestra.run({**spec, "algorithm": fields}, root=tmp_path, quiet=True, eval__episodes=1)
    with pytest.raises(UsageError, match=r"transitions are written as \.npz"):
        palestra.export(run, tmp_path / "data.parquet", to="transitions", which="last")
    said = palestra.export(run, tmp_path / "data.npz", to="transitions", which="last")
    assert said.endswith("450 transitions of Pendulum-v1")
    columns, _ = read_transitions(tmp_path / "data.npz")
    assert columns["actions"].shape == (450, 1)
    assert np.abs(columns["actions"]).max() <= 2
    # A step of Pendulum itself leads from each observation to its successor.
    env = gym.make("Pendulum-v1").unwrapped
    for row in range(0, 450, 37):
        cosine, sine, speed = columns["observations"][row]
        env.reset()
        env.state = np.array([np.arctan2(sine, cosine), speed])
        following, reward, _, _, _ = env.step(columns["actions"][row])
        np.testing.assert_allclose(following, columns["next_observations"][row], atol=1e-4)
        assert reward == pytest.approx(columns["rewards"][row], abs=1e-4)
    ppo = palestra.run({**spec, "algorithm": {"name": "ppo", "minibatch": 96}}, root=tmp_path, quiet=True)
    with pytest.raises(UsageError, match="has no replay memory"):
        palestra.export(ppo, tmp_path / "no.npz", to="transitions")


def test_rewards_and_flags_in_columns_of_one_are_read_as_numbers(tmp_path):
    columns = {**write_file(tmp_path / "flat.npz", 10), "terminated": np.arange(10) % 3 == 0}
    np.savez(tmp_path / "flat.npz", **columns)
    np.savez(tmp_path / "deep.npz", **{k: v[:, None] if v.ndim == 1 else v for k, v in columns.items()})
    flat, deep = (learner("iql", tmp_path / name).algorithm.memory for name in ("flat.npz", "deep.npz"))
    assert torch.equal(flat.rewards, deep.rewards)
    assert torch.equal(flat.discounts, deep.discounts)


def test_names_of_d4rl_and_missing_successors_are_read(tmp_path):
    obs = np.arange(6, dtype=np.float32)[:, None]
    columns = {"observations": obs, "actions": obs, "rewards": obs[:, 0]}
    ends = {"terminals": np.array([0, 0, 1, 0, 0, 0]), "timeouts": np.array([0, 0, 0, 0, 1, 0])}
    np.savez(tmp_path / "d4rl.npz", **columns, **ends)
    read, _ = read_transitions(tmp_path / "d4rl.npz")
    assert read["observations"][:, 0].tolist() == [0, 1, 2, 3]  # rows 4 and 5 have no successor
    assert read["next_observations"][[0, 1, 3], 0].tolist() == [1, 2, 4]
    assert read["terminated"].tolist() == [0, 0, 1, 0]
    table = {"observations": obs.tolist(), "actions": obs.tolist(), "rewards": [0.0] * 6, "terminated": [True] * 6}
    pyarrow.parquet.write_table(pyarrow.table(table), tmp_path / "rows.parquet")
    assert read_transitions(tmp_path / "rows.parquet")[0]["observations"].shape == (6, 1)


def test_data_set_that_minari_wrote_is_read_and_learned_from(tmp_path, monkeypatch):
    minari = pytest.importorskip("minari", reason="pip install 'palestra[minari]'")
    pytest.importorskip("h5py")
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    env, buffers = gym.make("CartPole-v1", max_episode_steps=15), []  # some episodes terminate, some are truncated
    env.action_space.seed(0)
    for seed in range(8):
        steps, shown = [], [env.reset(seed=seed)[0]]
        while not steps or not (steps[-1][2] or steps[-1][3]):
            action = env.action_space.sample()
            obs, *rest, _ = env.step(action)
            steps.append((action, *rest))
            shown.append(obs)
        buffers.append(
            minari.data_collector.EpisodeBuffer(seed, None, None, shown, *map(list, zip(*steps, strict=True)))
        )
    written = minari.create_dataset_from_buffers("palestra/test-v0", buffers, env="CartPole-v1")
    episodes = list(written.iterate_episodes())
    folder = tmp_path / "palestra" / "test-v0"
    read, sha256 = read_transitions(folder)
    assert sha256 == read_transitions(folder / "data" / "main_data.hdf5")[1]
    for name, column in (
        ("observations", [episode.observations[:-1] for episode in episodes]),
        ("next_observations", [episode.observations[1:] for episode in episodes]),
        ("actions", [episode.actions for episode in episodes]),
        ("rewards", [episode.rewards for episode in episodes]),
        ("terminated", [episode.terminations for episode in episodes]),
    ):
        np.testing.assert_array_equal(read[name], np.concatenate(column))
    assert 0 < read["terminated"].sum() < len(episodes)
    data = {"kind": "control", "env": {"id": "CartPole-v1"}, "algorithm": {"name": "bc", "data": str(folder)}}
    run = palestra.run({**data, "name": "x", "train": {"frames": 500}}, root=tmp_path, quiet=True, eval__episodes=1)
    assert np.isfinite(run.metrics()[-1]["eval/return"])


def test_hdf5_of_d4rl_is_read_and_what_is_no_array_of_numbers_refused(tmp_path):
    h5py = pytest.importorskip("h5py")
    obs = np.arange(4, dtype=np.float32)[:, None]
    with h5py.File(tmp_path / "d4rl.hdf5", "w") as file:
        for name, column in {
            "observations": obs,
            "actions": obs,
            "rewards": obs[:, 0],
            "terminals": [0, 1, 0, 1],
        }.items():
            file[name] = column
        file["metadata/algorithm"] = "SAC"
    assert read_transitions(tmp_path / "d4rl.hdf5")[0]["next_observations"][[0, 2], 0].tolist() == [1, 3]
    for name, seen, message in (
        ("dict", {"observations/position": obs}, "observations of episode_0 are not an array of numbers"),
        ("cut", {"observations": obs}, "episode_0 has 4 observations and 4 rewards"),
    ):
        with h5py.File(tmp_path / f"{name}.hdf5", "w") as file:
            for part, column in {**seen, "actions": obs, "rewards": obs[:, 0], "terminations": obs[:, 0] > 2}.items():
                file[f"episode_0/{part}"] = column
        with pytest.raises(UsageError, match=message):
            read_transitions(tmp_path / f"{name}.hdf5")
    (tmp_path / "text.hdf5").write_text("no")
    with pytest.raises(UsageError, match=r"not a file of transitions \(\.npz, \.parquet or \.hdf5\)"):
        read_transitions(tmp_path / "text.hdf5")


def test_bad_files_are_refused_with_what_is_wrong(tmp_path):
    columns = write_file(tmp_path / "good.npz", 10)
    for name, changed, message in (
        ("short", {"rewards": np.zeros(9)}, "columns of one length"),
        ("nan", {"rewards": np.full(10, np.nan)}, "rewards has numbers that are not finite"),
        ("wide", {"observations": np.zeros((10, 2))}, r"shape \(2,\), the environment's \(1,\)"),
        ("after", {"next_observations": np.zeros((10, 2))}, r"next_observations have the shape \(2,\)"),
        ("acts", {"actions": np.zeros((10, 3))}, r"actions have the shape \(3,\)"),
        ("pairs", {"rewards": np.zeros((10, 2))}, r"rewards has the shape \(10, 2\): expected one number a row"),
        ("words", {"rewards": np.array(["much"] * 10)}, "rewards has entries that are missing, or not numbers"),
    ):
        np.savez(tmp_path / f"{name}.npz", terminated=np.ones(10), **{**columns, **changed})
        with pytest.raises(UsageError, match=message):
            learner("bc", tmp_path / f"{name}.npz")
    np.savez(tmp_path / "none.npz", **columns)
    with pytest.raises(UsageError, match="has no column terminated"):
        learner("bc", tmp_path / "none.npz")
    with pytest.raises(UsageError, match="palestra export RUN --to transitions"):
        learner("bc", tmp_path / "missing.npz")
    head = ActionHead.of(gym.spaces.Discrete(3, start=1))
    assert stored_actions(np.array([1, 3]), head, tmp_path).tolist() == [0, 2]
    for outside in (np.array([0]), np.array([1.5])):
        with pytest.raises(UsageError, match="outside of the environment's action space"):
            stored_actions(outside, head, tmp_path)
