"""An exported policy gives the policy's own actions, from raw observations, in a process that has no Palestra."""

import subprocess
import sys

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces

import palestra
from palestra.control.algorithms import algorithm_of
from palestra.control.export import export, format_of
from palestra.control.nets.actor_critic import Recurrent
from palestra.control.nets.heads import ActionHead
from palestra.control.policy import Policy
from palestra.control.scaling import ObsScale
from palestra.errors import UsageError
from palestra.spec.load import load

torch.set_num_threads(1)

BOX = spaces.Box(np.array([-2.0, 0.0], np.float32), np.array([2.0, 5.0], np.float32))
VECTOR, IMAGE = ((3,), np.float32), ((4, 84, 84), np.uint8)
CASES = {
    "ppo discrete": ("ppo", spaces.Discrete(3, start=1), VECTOR, {}),
    "ppo box": ("ppo", BOX, VECTOR, {}),
    "ppo beta": ("ppo", BOX, VECTOR, {"algorithm.distribution": "beta"}),
    "ppo without bounds": ("ppo", spaces.Box(-np.inf, np.inf, (2,)), VECTOR, {}),
    "ppo multi_discrete": ("ppo", spaces.MultiDiscrete([2, 3]), VECTOR, {}),
    "ppo multi_binary": ("ppo", spaces.MultiBinary(3), VECTOR, {}),
    "ppo images": ("ppo", spaces.Discrete(4), IMAGE, {"net.hidden": [32], "net.shared": True}),
    "ppo matrix": ("ppo", spaces.Discrete(4), ((2, 3), np.float32), {}),
    "ppo lstm": ("ppo", BOX, VECTOR, {"net.recurrent": {"cell": "lstm", "size": 8}, "algorithm.minibatch": 512}),
    "ppo gru": ("ppo", BOX, VECTOR, {"net.recurrent": {"cell": "gru", "size": 8}, "algorithm.minibatch": 512}),
    "sac box": ("sac", BOX, VECTOR, {}),
    "sac discrete": ("sac", spaces.Discrete(3), VECTOR, {}),
    "dqn": ("dqn", spaces.Discrete(3), VECTOR, {"algorithm.dueling": True}),
    "dqn lstm": ("dqn", spaces.Discrete(3), VECTOR, {"net.recurrent": {"cell": "lstm", "size": 8}}),
    "sac gru": ("sac", BOX, VECTOR, {"net.recurrent": {"cell": "gru", "size": 8}}),
    "td3": ("td3", BOX, VECTOR, {"net.layer_norm": True}),
    "crossq": ("crossq", BOX, VECTOR, {}),
}


def policy_of(name: str, action_space: gym.Space, obs_shape: tuple[int, ...], fields: dict) -> Policy:
    """A policy whose weights and statistics of observations are random, so that all of them matter."""
    data = {"kind": "control", "name": "x", "env": {"id": "X", "normalize_obs": len(obs_shape) < 3}}
    spec = load({**data, "algorithm": {"name": name}, "train": {"frames": 1000}}, overrides=fields).spec
    torch.manual_seed(0)
    net = algorithm_of(spec).actor(spec, obs_shape, ActionHead.of(action_space))
    for parameter in net.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    for module in net.modules():
        if isinstance(module, ObsScale):
            module.update(torch.randn(50, *obs_shape) * 3 + 1)
    return Policy(obs_shape, net)


def observations(shape: tuple[int, ...], dtype: type, rows: int) -> np.ndarray:
    random = np.random.default_rng(1)
    return (
        random.integers(256, size=(rows, *shape)).astype(dtype)
        if dtype == np.uint8
        else (random.normal(1, 3, (rows, *shape)).astype(dtype))
    )


def run_file(path, inputs: list[np.ndarray]) -> list[np.ndarray]:
    if path.suffix == ".onnx":
        runtime = pytest.importorskip("onnxruntime", reason="pip install 'palestra[onnx]'")
        session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        return session.run(None, {given.name: array for given, array in zip(session.get_inputs(), inputs, strict=True)})
    out = torch.jit.load(str(path))(*map(torch.from_numpy, inputs))
    return [part.numpy(force=True) for part in (out if isinstance(out, tuple) else (out,))]


@pytest.mark.parametrize("to", [".onnx", ".pt"])
@pytest.mark.parametrize("case", CASES)
def test_exported_policy_acts_as_the_policy_for_any_batch(tmp_path, case, to):
    name, space, (shape, dtype), fields = CASES[case]
    if to == ".onnx":
        pytest.importorskip("onnx", reason="pip install 'palestra[onnx]'")
    policy, path = policy_of(name, space, shape, fields), tmp_path / f"policy{to}"
    export(policy, np.dtype(dtype), path, format_of(path, None))
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    for rows in (1, 7):
        obs = observations(shape, dtype, rows)
        width = policy.net.cell.memory if isinstance(policy.net, Recurrent) else policy.net.memory
        memory = [np.zeros((rows, width), np.float32)] if width else []
        policy.reset()
        for _ in range(3):
            actions, *memory = run_file(path, [obs, *memory])
            expected = policy.act(obs)
            assert actions.dtype == expected.dtype
            np.testing.assert_allclose(actions, expected, atol=1e-5, rtol=1e-5)
            assert all(space.contains(action) for action in expected)
            obs = observations(shape, dtype, rows) * np.asarray(0.5, dtype) if dtype != np.uint8 else obs[::-1].copy()


ALONE = """
import sys
sys.modules["palestra"] = None
import gymnasium, numpy as np, onnxruntime
session = onnxruntime.InferenceSession(sys.argv[1])
env = gymnasium.make("Pendulum-v1")
obs, _ = env.reset(seed=5)
total, over = 0.0, False
while not over:
    obs, reward, terminated, over, _ = env.step(session.run(None, {"obs": obs[None]})[0][0])
    total += reward
print(total)
"""


def test_exported_run_plays_the_same_episode_without_palestra(tmp_path):
    pytest.importorskip("onnxruntime", reason="pip install 'palestra[onnx]'")
    pytest.importorskip("onnx", reason="pip install 'palestra[onnx]'")
    spec = {"kind": "control", "name": "small", "algorithm": {"name": "sac", "start": 200, "batch": 32}}
    spec |= {"env": {"id": "Pendulum-v1", "num_envs": 2, "normalize_obs": True}, "train": {"frames": 600}}
    run = palestra.run(spec, root=tmp_path, quiet=True, algorithm__horizon=100, eval__episodes=1)
    said = palestra.export(run, tmp_path / "policy.onnx")
    assert said == f"{tmp_path / 'policy.onnx'}: a batch of obs float32(3,) to action"
    done = subprocess.run([sys.executable, "-c", ALONE, tmp_path / "policy.onnx"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    policy, env, total, over = palestra.load(run), gym.make("Pendulum-v1"), 0.0, False
    obs, _ = env.reset(seed=5)
    while not over:
        obs, reward, _, over, _ = env.step(policy.act(obs))
        total += float(reward)
    assert float(done.stdout) == pytest.approx(total, abs=0.1)


def test_evaluated_run_gives_each_seed_its_interval(tmp_path):
    spec = {"kind": "control", "name": "small", "algorithm": {"name": "ppo"}, "train": {"frames": 512}}
    run = palestra.run(spec, env="CartPole-v1", root=tmp_path, quiet=True, max_session=2, eval__episodes=1)
    first, again = (palestra.evaluate_policy(run, episodes=5, seed=3) for _ in range(2))
    assert first == again
    assert [row["seed"] for row in first["seeds"]] == [0, 1]
    means = [np.mean(row["returns"]) for row in first["seeds"]]
    assert first["mean"] == pytest.approx(np.mean(means))
    assert first["interval"] == pytest.approx(1.96 * np.std(means, ddof=1) / np.sqrt(2))
    assert first["seeds"][0]["interval"] == pytest.approx(
        1.96 * np.std(first["seeds"][0]["returns"], ddof=1) / np.sqrt(5)
    )
    assert palestra.evaluate_policy(run, episodes=5, seed=4)["seeds"] != first["seeds"]


def test_file_without_a_known_ending_is_refused(tmp_path):
    with pytest.raises(UsageError, match="--to onnx, torchscript or transitions"):
        format_of(tmp_path / "policy.bin", None)
    with pytest.raises(UsageError, match="--to onnx, torchscript or transitions"):
        format_of(tmp_path / "policy.onnx", "tflite")
    assert format_of(tmp_path / "policy.bin", "onnx") == "onnx"
