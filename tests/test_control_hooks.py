"""Hooks after steps and episodes, videos during training, components of rewards; each also through a resume."""

import json
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from conftest import SHORT as LONGER
from PIL import Image

import palestra
from palestra.errors import Interrupted, UsageError
from palestra.runs.recorder import HookFailed
from palestra.spec.load import load, spec_hash
from palestra.spec.validate import SpecError

SHORT = {**LONGER, "train": {"frames": 10 * 128}, "every": {"eval": None}}
SEEN: list[Any] = []
OWN = "test_control_hooks"


def on_step(step: Any) -> dict[str, float]:
    SEEN.append((step.frame, step.actions.shape, step.obs.shape, step.rewards.sum()))
    return {"reward_per_step": step.rewards.mean()}


def on_episode(episode: Any) -> dict[str, float]:
    SEEN.append((episode.env, episode.total, episode.length))
    return {"total": episode.total}


def stop_at_third(episode: Any) -> None:
    SEEN.append(episode.total)
    episode.stop = len(SEEN) >= 3


def broken(episode: Any) -> None:
    raise ValueError("a mistake of mine")


class TwoGoals(gym.Env):
    """Five steps; a reward for each of two goals."""

    observation_space = gym.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)
    palestra_state = ("t",)
    t = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict]:
        self.t = 0
        return np.zeros(2, np.float32), {}

    def step(self, action: int) -> tuple[Any, Any, bool, bool, dict]:
        self.t += 1
        return np.zeros(2, np.float32), np.array([1.0, float(action)]), self.t == 5, False, {"energy": 2.0}


@pytest.fixture(autouse=True)
def _own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    import test_control_hooks as module  # as the specs name it: pytest may have imported it under another name

    module.SEEN.clear()


def seen() -> list[Any]:
    import test_control_hooks as module

    return module.SEEN


@pytest.mark.parametrize("algorithm", [SHORT["algorithm"], {"name": "dqn", "start": 64, "batch": 16, "horizon": 64}])
def test_step_hook_sees_every_step_and_its_numbers_are_averaged(tmp_path, algorithm):
    run = palestra.run({**SHORT, "algorithm": algorithm}, root=tmp_path, quiet=True, on_step=[f"{OWN}:on_step"])
    rows, steps, n = run.metrics(), seen(), SHORT["env"]["num_envs"]
    assert [frame for frame, *_ in steps] == list(range(n, rows[-1]["frame"] + 1, n))
    assert {(actions, obs) for _, actions, obs, _ in steps} == {((n,), (n, 4))}
    assert all(row["reward_per_step"] == 1.0 for row in rows)  # CartPole's


def test_episode_hook_sees_the_episodes_that_are_counted(tmp_path):
    run = palestra.run(SHORT, root=tmp_path, quiet=True, on_episode=[f"{OWN}:on_episode"])
    rows = run.metrics()
    assert len(seen()) == rows[-1]["episodes"]
    assert all(total == length for _, total, length in seen())  # CartPole gives 1 a step
    first = seen()[: rows[0]["episodes"]]
    assert rows[0]["total"] == pytest.approx(np.mean([total for _, total, _ in first]))


def test_hook_may_end_the_run(tmp_path):
    run = palestra.run(SHORT, root=tmp_path, quiet=True, on_episode=[f"{OWN}:stop_at_third"])
    assert run.state == "done"
    assert len(run.metrics()) == 1


def test_hook_that_raises_is_named(tmp_path):
    with pytest.raises(HookFailed, match=r"the hook test_control_hooks:broken raised ValueError at frame \d+: a mis"):
        palestra.run(SHORT, root=tmp_path, quiet=True, on_episode=[f"{OWN}:broken"])


def test_hooks_averages_survive_a_stop(tmp_path):
    """Rows average over steps before and after the checkpoint that a resume continues from."""
    spec = {**SHORT, "on_episode": [f"{OWN}:on_episode"], "every": {"log": "4 steps", "eval": None}}
    whole = palestra.run(spec, root=tmp_path / "whole", quiet=True).metrics()
    spec["on_step"] = [f"{OWN}:interrupt_once"]
    with pytest.raises(Interrupted):
        palestra.run(spec, root=tmp_path / "parts", quiet=True)
    path = next((tmp_path / "parts").glob("*/*/trial.json")).parent
    rows = palestra.run(resume=path, root=tmp_path / "parts", quiet=True).metrics()
    assert [row["total"] for row in rows] == [row["total"] for row in whole]


def interrupt_once(step: Any) -> None:
    import signal

    if step.frame >= 300 and not any(entry == "once" for entry in seen()):
        seen().append("once")
        signal.raise_signal(signal.SIGTERM)


@pytest.mark.parametrize("extra", [{"algorithm": {"name": "bc", "data": "x.npz"}}, {}])
def test_hooks_where_no_environment_is_stepped_are_refused(extra):
    stale = {"algorithm": {**SHORT["algorithm"], "staleness": 1}, "cluster": {"environments": 1}}
    with pytest.raises(SpecError, match="on_episode: expected none"):
        load({**SHORT, **(extra or stale), "on_episode": [f"{OWN}:on_episode"]})


def test_new_fields_do_not_change_the_hash_of_a_spec_without_them():
    assert spec_hash(load("examples/control/a2c_cartpole.yaml").spec).startswith("9f9ed6128e03d474")
    plain = load(SHORT).spec.model_dump()
    assert not {"on_step", "on_episode"} & set(plain)
    assert "video" not in plain["every"]
    assert "components" not in plain["env"]


def test_videos_during_training_are_pictures_of_episodes(tmp_path):
    run = palestra.run(SHORT, root=tmp_path, quiet=True, every__video="256 frames")
    last = run.metrics()[-1]["frame"]
    videos = sorted((run.path / "sessions/0/videos").iterdir())
    assert [path.name for path in videos] == [f"frame_{frame:09d}.gif" for frame in range(256, last + 1, 256)]
    with Image.open(videos[0]) as video:
        frames = getattr(video, "n_frames", 1)
        assert frames > 5
        first = np.asarray(video.convert("RGB"))
        video.seek(frames - 1)
        assert (first != np.asarray(video.convert("RGB"))).any()
    plain = palestra.run(SHORT, root=tmp_path / "plain", quiet=True).metrics()
    same = [name for name in plain[-1] if not name.startswith("time/")]
    assert [{name: row[name] for name in same if name in row} for row in run.metrics()] == [
        {name: row[name] for name in same if name in row} for row in plain
    ]  # drawing changes nothing


def test_video_of_an_environment_without_pictures_is_refused_before_training(tmp_path):
    env = {"id": f"{OWN}:TwoGoals", "num_envs": 4, "reward_weights": [1.0, 0.0]}
    with pytest.raises(UsageError, match=r"every\.video: .*TwoGoals"):
        palestra.run({**SHORT, "env": env}, root=tmp_path, quiet=True, every__video="1 steps")
    assert not list(tmp_path.glob("*"))


@pytest.mark.parametrize("vectorize", ["sync", "async"])
def test_components_of_a_vector_reward_are_logged_and_weighted(tmp_path, vectorize):
    env = {"id": f"{OWN}:TwoGoals", "num_envs": 4, "vectorize": vectorize}
    env |= {"reward_weights": [1.0, 10.0], "components": ["reward", "energy"]}
    run = palestra.run({**SHORT, "env": env}, root=tmp_path, quiet=True)
    row = run.metrics()[-1]
    assert row["component/reward/0"] == 5.0
    assert row["component/energy"] == 10.0
    assert row["return"] == pytest.approx(5 + 10 * row["component/reward/1"])


@pytest.mark.parametrize(
    ("env", "said"),
    [
        ({"reward_weights": [1.0, 0.0, 0.0]}, "3 weights, and the reward is of shape"),
        ({"reward_weights": [1.0, 0.0], "components": ["speed"]}, r"gave no info\['speed'\]; its last step: energy"),
    ],
)
def test_components_that_are_not_there_are_named(tmp_path, env, said):
    given = {"id": f"{OWN}:TwoGoals", "num_envs": 4, "vectorize": "sync", **env}
    with pytest.raises(UsageError, match=said):
        palestra.run({**SHORT, "env": given}, root=tmp_path, quiet=True)


def test_components_are_in_the_rows_of_the_file(tmp_path):
    env = {"id": f"{OWN}:TwoGoals", "num_envs": 4, "reward_weights": [1.0, 1.0], "components": ["energy"]}
    run = palestra.run({**SHORT, "env": env}, root=tmp_path, quiet=True)
    lines = (run.path / "sessions/0/metrics.jsonl").read_text().splitlines()
    assert {json.loads(line)["component/energy"] for line in lines} == {10.0}
