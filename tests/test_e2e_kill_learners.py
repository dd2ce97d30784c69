"""Learners with memories, sequences, files and processes of their own, killed in the middle, end with equal numbers."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import fast_only, numbers
from test_e2e_kill import assert_equal_runs, finish, kill_at

import palestra

REPLAY = {"horizon": 16, "start": 64, "batch": 16, "buffer": 200, "replay_ratio": 0.25, "update_every": 2}
MAZE = {"id": "palestra.control.envs.memory:TMaze", "num_envs": 2, "vectorize": "sync"}
BITS = {"id": "palestra.control.envs.goals:BitFlip", "num_envs": 2, "vectorize": "sync", "kwargs": {"bits": 4}}
PENDULUM, CARTPOLE = {"id": "Pendulum-v1", "num_envs": 2}, {"id": "CartPole-v1", "num_envs": 2}
SEQUENCES = {**REPLAY, "batch": 32, "sequence": {"length": 8, "burn_in": 4}}
CELL = {"hidden": [16], "recurrent": {"cell": "gru", "size": 16}}
RAINBOW = {"dueling": True, "n_step": 2, "prioritized": {}, "noisy": 0.5}
LEARNERS: dict[str, dict[str, Any]] = {
    "her": {"env": BITS, "algorithm": {"name": "dqn", "her": {}, **REPLAY}},
    "recurrent_dqn": {"env": MAZE, "algorithm": {"name": "dqn", **SEQUENCES}, "net": CELL},
    "recurrent_sac": {"env": PENDULUM, "algorithm": {"name": "sac", **SEQUENCES}, "net": CELL},
    "bc": {"env": PENDULUM, "algorithm": {"name": "bc", "horizon": 32, "batch": 16}},
    "td3_bc": {"env": PENDULUM, "algorithm": {"name": "td3_bc", "horizon": 32, "batch": 16}},
    "iql": {"env": PENDULUM, "algorithm": {"name": "iql", "horizon": 32, "batch": 16}},
    "asynchronous": {
        "env": {**CARTPOLE, "num_envs": 4},
        "algorithm": {"name": "ppo", "staleness": 2, "horizon": 8, "minibatch": 16, "epochs": 1},
        "cluster": {"environments": 2},
    },
    "c51": {
        "env": CARTPOLE,
        "algorithm": {"name": "dqn", **REPLAY, **RAINBOW, "distributional": {"atoms": 11, "low": 0, "high": 100}},
    },
    "quantiles": {"env": CARTPOLE, "algorithm": {"name": "dqn", **REPLAY, "distributional": {"quantiles": 8}}},
    "tqc": {"env": PENDULUM, "algorithm": {"name": "tqc", **REPLAY}},
    "rmsprop": {"env": CARTPOLE, "algorithm": {"name": "a2c", "optimizer": "rmsprop", "critic_lr": 1e-3}},
}
STEPS = 14


def transitions(path: Path) -> str:
    """A file of noise with the sizes of Pendulum."""
    random, rows = np.random.default_rng(0), 300
    obs, following = random.normal(size=(2, rows, 3)).astype(np.float32)
    rest = {"actions": random.uniform(-2, 2, (rows, 1)), "rewards": random.normal(size=rows)}
    np.savez(path, observations=obs, next_observations=following, terminated=np.zeros(rows, bool), **rest)
    return str(path)


@pytest.mark.parametrize("name", fast_only(LEARNERS, "c51", "asynchronous"))
def test_learner_killed_in_the_middle_equals_one_that_was_not(scratch, tmp_path_factory, name):
    root = tmp_path_factory.mktemp("reference")
    given = {key: dict(block) for key, block in LEARNERS[name].items()}
    if name in ("bc", "td3_bc", "iql"):
        given["algorithm"]["data"] = transitions(root / "data.npz")
    # Whole steps: an offline algorithm counts gradient steps.
    a_step = given["algorithm"].get("horizon", 16) * (1 if "data" in given["algorithm"] else given["env"]["num_envs"])
    base = {"kind": "control", "net": {"hidden": [16]}, "train": {"frames": STEPS * a_step}}
    base |= {"eval": {"episodes": 2, "num_envs": 2}, "every": {"checkpoint": "3 steps", "eval": "5 steps"}}
    spec = scratch.spec(base={**base, **given})
    reference = numbers(palestra.run(scratch.path / spec, root=root, quiet=True).sessions[0].path)
    moments = random.Random(name)
    for first in (4, 8):  # between two checkpoints, then between two others
        kill_at(scratch, spec, first + moments.randint(0, 2), moments.uniform(0, 0.05))
    finish(scratch, spec)
    assert len(reference) == STEPS
    assert_equal_runs(scratch.rows(), reference)
