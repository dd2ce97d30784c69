"""The Python API from end to end: environments as objects, hooks, metrics, trained policies, videos."""

import functools
import importlib.util
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
from typing import Any

import gymnasium as gym
import imageio_ffmpeg
import numpy as np
import pytest
import torch
import zygote
from conftest import ENVIRONMENT, fast_only, numbers
from envs import LENGTH, Faulty, Identity
from PIL import Image

import palestra
from palestra.errors import Interrupted, PalestraError, UsageError
from palestra.kinds.policies import enjoy
from palestra.runs.recorder import HookContext
from palestra.spec.model import plain

TINY: dict[str, Any] = {
    "kind": "control",
    "name": "tiny",
    "algorithm": {"name": "ppo", "horizon": 32, "minibatch": 32, "epochs": 2},
    "net": {"hidden": [8]},
    "train": {"frames": 256},
    "eval": {"episodes": 2, "num_envs": 2},
}
run = functools.partial(palestra.run, quiet=True)


@pytest.fixture(scope="module")
def cartpole(tmp_path_factory) -> palestra.Run:
    """A run that has learned a little; only to be read."""
    return run(
        {**TINY, "env": "CartPole-v1", "net": {"hidden": [32]}, "algorithm": {"name": "ppo", "lr": 3e-3}},
        root=tmp_path_factory.mktemp("runs"),
        train__frames=12 * 512,
        every__eval="6 steps",
        eval__episodes=10,
    )


# ---- specs and results


def test_run_of_a_spec_whose_search_does_not_fit_ignores_it_and_says_so(tmp_path, caplog):
    search = {"space": {"algorithm.lr": {"choice": [1e-3, 1e-2]}}, "pruner": {"asha": {"grace": 500, "by": "frames"}}}
    spec = {**TINY, "env": "CartPole-v1", "search": search}
    done = run(spec, root=tmp_path, search__trials=3)
    assert done.state == "done"
    assert "search: ignored, because it is invalid and a single run does not use it:" in caplog.text
    assert "fewer than the 256 frames" in caplog.text
    with pytest.raises(UsageError, match="fewer than the 256 frames"):
        palestra.check({**spec, "env": {"id": "CartPole-v1"}})
    with pytest.raises(UsageError, match=r"train\.frames"):  # what it does use is still refused
        run({**spec, "train": {"frames": -1}}, root=tmp_path)


def test_run_of_a_file_with_fields_overrides_and_variables_uses_them(tmp_path):
    path = tmp_path / "two.yaml"
    path.write_text(
        "base:\n  kind: control\n  env: {id: '${game}', num_envs: 2}\n"
        "  algorithm: {name: ppo, horizon: 32, minibatch: 64}\n  train: {frames: 128}\n  eval: {episodes: 2}\n"
    )
    done = run(
        f"{path}:base",
        variables={"game": "CartPole-v1"},
        root=tmp_path,
        algorithm__lr=1e-3,
        overrides=["net.hidden=[4]"],
    )
    assert done.name == "base"
    assert done.spec["algorithm"]["lr"] == pytest.approx(1e-3)
    assert done.spec["net"]["hidden"] == [4]
    assert done.spec["env"]["id"] == "CartPole-v1"
    assert done.state == "done"


def test_metrics_has_every_row_of_every_seed_and_nothing_but_the_files_numbers(cartpole):
    rows = cartpole.metrics()
    assert [row["step"] for row in rows] == list(range(1, 13))
    assert [row["frame"] for row in rows] == list(range(512, 512 * 13, 512))
    assert {row["seed"] for row in rows} == {0}
    assert ["eval/return" in row for row in rows] == [step in (6, 12) for step in range(1, 13)]
    on_disk = numbers(cartpole.sessions[0].path)
    assert [{k: v for k, v in row.items() if k != "seed" and not k.startswith("time/")} for row in rows] == on_disk


def test_same_seed_alone_and_beside_another_gives_equal_numbers_and_the_other_seed_others(two_seeds, finished):
    assert two_seeds.rows(seed=0) == finished.rows()
    assert two_seeds.rows(seed=1) != finished.rows()


def test_summary_has_the_trial_metrics_of_slm_lab_recomputed_from_the_rows(two_seeds):
    done = palestra.open_run(two_seeds.trial())
    summary = json.loads((done.path / "summary.json").read_text())
    returns = {seed: [row["return"] for row in done.metrics(seed) if "return" in row] for seed in (0, 1)}
    frames = {seed: [row["frame"] for row in done.metrics(seed) if "return" in row] for seed in (0, 1)}
    late = [
        np.mean([r for r, f in zip(returns[s], frames[s], strict=True) if f > 0.75 * frames[s][-1]]) for s in (0, 1)
    ]
    assert summary["total_reward_ma"] == pytest.approx(np.mean(late))
    strengths = {seed: np.array(r) - summary["random_return"] for seed, r in returns.items()}
    assert summary["strength"] == pytest.approx(np.mean([s.mean() for s in strengths.values()]))
    efficiency = [np.average(strengths[seed], weights=1 / np.array(frames[seed])) for seed in (0, 1)]
    assert summary["sample_efficiency"] == pytest.approx(np.mean(efficiency))
    for name in ("stability", "consistency", "training_efficiency", "max_strength", "final_strength"):
        assert math.isfinite(summary[name])
    assert 15 < summary["random_return"] < 30
    assert summary == done.summary()


# ---- environments


def test_environment_as_class_function_instance_and_id_trains_the_same(tmp_path):
    """All four are CartPole, stepped one after the other."""
    from gymnasium.envs.classic_control import CartPoleEnv

    given = {
        "id": "CartPole-v1",
        "instance": gym.make("CartPole-v1"),
        "function": lambda: gym.make("CartPole-v1"),
        "class": CartPoleEnv,
    }
    rows = {}
    for name, env in given.items():
        done = run(TINY, root=tmp_path, name=name, env=env, env__vectorize="sync")
        rows[name] = numbers(done.sessions[0].path)
    assert rows["instance"] == rows["function"] == rows["id"]
    assert rows["class"][0]["ppo/policy_loss"] == rows["id"][0]["ppo/policy_loss"]


def test_local_class_and_lambda_travel_to_the_processes_of_two_seeds(tmp_path):
    class Local(Faulty):
        def __init__(self) -> None:
            super().__init__(at=-1)

    done = run(TINY, root=tmp_path, env=lambda: Local(), max_session=2)
    assert done.state == "done"
    assert done.spec["env"]["id"].startswith("object:")
    assert [len(done.metrics(seed)) for seed in (0, 1)] == [2, 2]
    assert done.metrics(0)[-1]["return"] != done.metrics(1)[-1]["return"]


def test_made_instance_with_pictures_travels_to_the_processes_of_two_seeds(tmp_path):
    env = gym.make("CartPole-v1", render_mode="rgb_array")
    env.reset()
    env.render()  # it now holds a surface that no pickle can take
    assert run(TINY, root=tmp_path, env=env, max_session=2).state == "done"


def test_object_that_is_no_environment_is_refused_before_there_is_a_folder(tmp_path):
    for env, said in ((3, "got int"), (lambda: 3, "made a int"), (Faulty(), "pass its class")):
        with pytest.raises(UsageError, match=said):
            run(TINY, root=tmp_path, env=env)
    assert not list(tmp_path.iterdir())


def test_run_with_an_object_resumes_with_the_object_and_says_so_without(tmp_path):
    done = run(TINY, root=tmp_path, env=Faulty)
    with pytest.raises(UsageError, match=r"Python object envs\.Faulty.*env="):
        run(resume=done, root=tmp_path, train__frames=512, allow=["train.frames"])
    more = run(resume=done, root=tmp_path, env=Faulty, train__frames=512, allow=["train.frames"])
    assert more.path == done.path
    assert [row["step"] for row in more.metrics()] == [1, 2, 3, 4]


def test_resume_with_another_seed_allowed_trains_it_and_counts_it(tmp_path):
    first = run({**TINY, "env": "CartPole-v1"}, root=tmp_path)
    rows = first.metrics(seed=0)
    both = run(resume=first, root=tmp_path, max_session=2, allow=["max_session"])
    assert both.path == first.path
    assert both.seeds == [0, 1]
    assert set(both.summary()["eval/return_by_seed"]) == {"0", "1"}
    assert both.metrics(seed=0) == rows


def test_resume_without_the_trace_goes_on_from_the_checkpoint(tmp_path):
    first = run({**TINY, "env": "CartPole-v1"}, root=tmp_path)
    rows = first.metrics()
    (first.sessions[0].path / "trace.json").unlink()
    longer = run(resume=first, root=tmp_path, train__frames=512, allow=["train.frames"])
    assert longer.metrics()[: len(rows)] == rows
    assert longer.metrics()[-1]["frame"] == 512


def test_run_with_a_literal_dollar_brace_can_be_resumed_and_loaded(tmp_path):
    first = run({**TINY, "env": "CartPole-v1"}, root=tmp_path, track__project="${money}")
    assert first.spec["track"]["project"] == "${money}"
    again = run(resume=first, root=tmp_path)
    assert again.state == "done"
    assert palestra.load(again).act([0.0, 0.0, 0.0, 0.0]) in (0, 1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_gpu_that_is_not_there_is_refused_before_there_is_a_folder(tmp_path):
    with pytest.raises(UsageError, match="device: cuda"):
        run({**TINY, "env": "CartPole-v1"}, root=tmp_path, device="cuda")
    assert not (tmp_path / "tiny").exists()


def test_arguments_for_an_environment_given_as_an_object_are_refused(tmp_path):
    with pytest.raises(UsageError, match=r"env\.kwargs"):
        run({**TINY, "env": Identity}, root=tmp_path, env__kwargs={"kind": "box"})
    assert not (tmp_path / "tiny").exists()


@pytest.mark.parametrize("space", fast_only(Identity.SPACES, "dict_obs"))  # the others: test_control_learning
def test_every_space_learns_to_do_what_it_is_shown(tmp_path, space):
    done = run(
        TINY,
        root=tmp_path,
        env={"id": "Identity-v0", "module": "envs", "kwargs": {"kind": space}, "num_envs": 8},
        algorithm={"name": "ppo", "horizon": 32, "minibatch": 64, "epochs": 8, "lr": 0.01, "gamma": 0.5},
        net__hidden=[32],
        train__frames=256 * 30,
        every__eval=None,
    )
    last = done.metrics()[-1]
    assert last["eval/return"] > (0.8 if space == "box" else 0.95) * LENGTH
    assert last["eval/return"] > done.summary()["random_return"] + 0.2 * LENGTH


def test_script_without_main_guard_runs_seeds_in_parallel_with_its_own_environment(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import palestra\n"
        "from envs import Faulty\n"
        "class Mine(Faulty):\n"
        "    pass\n"
        f"spec = {TINY!r}\n"
        "run = palestra.run(spec, env=Mine, max_session=2, quiet=True)\n"
        "print(run.state, len(run.metrics()), palestra.load(run).act([1.0, 0.0]))\n"
    )
    as_main = f"__file__ = {str(script)!r}\nexec(compile(open(__file__).read(), __file__, 'exec'))"
    command, pipe = [sys.executable, "-c", as_main], subprocess.PIPE
    process = zygote.Popen(command, cwd=tmp_path, env=ENVIRONMENT, stdout=pipe, stderr=pipe, text=True)
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    assert out.split()[:2] == ["done", "4"]


# ---- policies


def test_loaded_policy_acts_alike_on_one_observation_and_a_batch(cartpole):
    policy = palestra.load(cartpole)
    batch = np.random.default_rng(0).normal(0, 0.1, (32, 4)).astype(np.float32)
    actions = policy.act(batch)
    assert actions.shape == (32,)
    assert set(actions.tolist()) == {0, 1}
    assert [policy.act(obs) for obs in batch] == actions.tolist()
    assert np.shape(policy.act(batch[0])) == ()
    assert policy.act(batch[0].tolist()) == actions[0]
    with pytest.raises(UsageError, match="shape"):
        policy.act([1.0, 2.0])


@pytest.mark.parametrize("which", ["best", "last"])
def test_loaded_policy_plays_the_evaluations_episodes_to_the_same_returns(cartpole, which):
    from palestra.control.seeding import stream

    scores = {row["step"]: row["eval/return"] for row in cartpole.metrics() if "eval/return" in row}
    step = max(scores, key=lambda s: (scores[s], s)) if which == "best" else max(scores)
    policy, env = palestra.load(cartpole, which), gym.make("CartPole-v1")
    returns = []
    for i in range(2):  # 10 episodes from 2 environments: 5 each, those after the first from the environment's own RNG
        obs, _ = env.reset(seed=stream(0, "eval", step) + i)
        for _ in range(5):
            total, over = 0.0, False
            while not over:
                obs, reward, terminated, truncated, _ = env.step(policy.act(obs))
                total, over = total + float(reward), terminated or truncated
            returns.append(total)
            obs, _ = env.reset()
    assert np.mean(returns) == scores[step]


def test_sampled_actions_follow_the_policy_not_only_its_mode(cartpole):
    policy = palestra.load(cartpole)
    obs = np.zeros((500, 4), np.float32)
    assert len(set(policy.act(obs).tolist())) == 1
    assert len(set(policy.act(obs, deterministic=False).tolist())) == 2


# ---- hooks


def count_and_stop(moment: HookContext) -> dict[str, float]:
    if moment.step == 3:
        moment.stop = True
    return {"hook/twice": 2 * moment.metrics["episodes"], "hook/action": float(moment.policy.act(np.zeros(4)))}


def numpy_numbers(moment):
    several = {"several": np.ones(2)} if moment.step == 2 else {}
    return {"single": np.float32(0.5), **several}


def test_hook_that_returns_an_array_is_named_and_a_numpy_scalar_is_a_number(tmp_path):
    with pytest.raises(PalestraError, match="the hook test_e2e_api:numpy_numbers raised ValueError at step 2"):
        run({**TINY, "env": "CartPole-v1"}, root=tmp_path, hooks=["test_e2e_api:numpy_numbers"])
    (trial,) = palestra.list_runs(tmp_path)
    assert [row["single"] for row in trial.metrics()] == [0.5]


def test_hook_adds_metrics_and_stops_the_run_which_counts_as_done(tmp_path):
    done = run(
        {**TINY, "env": "CartPole-v1"}, root=tmp_path, train__frames=10**5, hooks=["test_e2e_api:count_and_stop"]
    )
    rows = done.metrics()
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert all(row["hook/twice"] == 2 * row["episodes"] for row in rows)
    assert all(row["hook/action"] in (0, 1) for row in rows)
    assert done.state == "done"
    assert done.checkpoint("last").name == "step_000000003"
    assert "eval/return" in rows[-1]  # it ends like a run that reached its end


# ---- stopping


class AsksToStop(Identity):
    """Sends the signal to its own process in the middle of an evaluation, once."""

    asked = False

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict]:
        frame = sys._getframe()
        while frame is not None and frame.f_code.co_name != "_episodes":
            frame = frame.f_back
        if frame is not None and self.in_episode == 7 and not AsksToStop.asked:
            AsksToStop.asked = True
            os.kill(os.getpid(), signal.SIGTERM)
        return super().step(action)


def test_stop_in_the_middle_of_an_evaluation_saves_and_resumes_with_it(tmp_path):
    spec = {**TINY, "every": {"eval": "1 steps"}, "train": {"frames": 512}}
    whole = run({**spec, "env": Identity}, root=tmp_path / "whole")
    with pytest.raises(Interrupted):
        run({**spec, "env": AsksToStop}, root=tmp_path / "cut")
    (cut,) = palestra.list_runs(tmp_path / "cut")
    assert cut.state == "interrupted"
    assert cut.metrics() == []  # the row of the first step waits for its evaluation
    again = run(resume=cut, env=AsksToStop, root=tmp_path / "cut")
    assert numbers(again.sessions[0].path) == numbers(whole.sessions[0].path)


def frames_evaluated(rows: list[dict]) -> float:
    return sum(row["eval/length"] * 10 for row in rows if "eval/length" in row)


def test_default_evaluation_takes_at_most_a_tenth_of_the_frames_and_a_resume_repeats_it(tmp_path):
    large = {"name": "ppo", "horizon": 32, "minibatch": 128, "epochs": 1}
    spec = {**TINY, "algorithm": large, "eval": {"num_envs": 10}, "every": {}, "train": {"frames": 8192}}
    whole = run({**spec, "env": Identity}, root=tmp_path / "whole")
    rows = whole.metrics()
    evaluated = [row["frame"] for row in rows if "eval/return" in row]
    assert len(evaluated) > 2
    assert evaluated[-1] == rows[-1]["frame"]
    assert 0 < frames_evaluated(rows) <= 8192 / 10
    dense = {**spec, "env": Identity, "every": {"eval": "1 steps"}, "train": {"frames": 1024}}
    assert frames_evaluated(run(dense, root=tmp_path / "dense").metrics()) > 1024 / 10
    told = (whole.sessions[0].path / "log.txt").read_text()
    assert told.count("evaluation of 10 episodes took") == len(evaluated)
    AsksToStop.asked = False
    with pytest.raises(Interrupted):
        run({**spec, "env": AsksToStop}, root=tmp_path / "cut")
    (cut,) = palestra.list_runs(tmp_path / "cut")
    again = run(resume=cut, env=AsksToStop, root=tmp_path / "cut")
    assert numbers(again.sessions[0].path) == numbers(whole.sessions[0].path)


class Endless(Identity):
    """Never ends an episode."""

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict]:
        obs, reward, *_ = super().step(action)
        return obs, reward, False, False, {}


def test_environment_whose_episodes_never_end_says_so_instead_of_hanging(tmp_path, monkeypatch):
    monkeypatch.setattr("palestra.control.evaluation.LONGEST_EPISODE", 300)
    with pytest.raises(PalestraError, match="did not end within 300 steps"):
        run({**TINY, "env": Endless}, root=tmp_path)


class Quits(Identity):
    """Ends the process instead of a step."""

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict]:
        raise SystemExit(0)


def test_environment_that_exits_fails_the_run(tmp_path):
    with pytest.raises(PalestraError, match="raised SystemExit in vector step 1"):
        run({**TINY, "env": Quits}, root=tmp_path)


# ---- what a resume cannot change, and odd arguments


def test_resume_with_a_field_that_the_checkpoints_depend_on_is_refused_and_changes_nothing(tmp_path, cartpole):
    shutil.copytree(cartpole.path, tmp_path / "tiny" / cartpole.id)
    (copy,) = palestra.list_runs(tmp_path)
    before = {path: path.read_bytes() for path in copy.path.rglob("*.json")}
    for field, value in (("net.hidden", [8]), ("env.num_envs", 8), ("algorithm.horizon", 64)):
        with pytest.raises(UsageError, match="do not fit"):
            run(resume=copy, root=tmp_path, overrides={field: value}, allow=[field])
    with pytest.raises(UsageError, match="seeds"):
        run(resume=copy, root=tmp_path, seed=3, allow="seed")
    assert {path: path.read_bytes() for path in copy.path.rglob("*.json")} == before


def test_numpy_values_and_single_texts_are_taken_as_overrides(tmp_path):
    done = run(
        {**TINY, "env": "CartPole-v1"},
        root=tmp_path,
        seed=np.int64(3),
        algorithm__lr=np.float32(0.5),
        net__hidden=np.array([4, 4]),
        overrides="algorithm.gamma=0.5",
    )
    assert done.seeds == [3]
    assert done.spec["algorithm"]["lr"] == 0.5
    assert done.spec["algorithm"]["gamma"] == 0.5
    assert done.spec["net"]["hidden"] == [4, 4]
    assert json.loads((done.path / "summary.json").read_text(), parse_constant=pytest.fail)["consistency"] is None


def test_sink_or_hook_that_is_not_there_is_refused_before_there_is_a_folder(tmp_path):
    with pytest.raises(UsageError, match="no function 'TINY'"):
        run({**TINY, "env": "CartPole-v1"}, root=tmp_path, hooks=["test_e2e_api:TINY"])
    if importlib.util.find_spec("swanlab") is None:
        with pytest.raises(UsageError, match="swanlab"):
            run({**TINY, "env": "CartPole-v1"}, root=tmp_path, track__sinks=["swanlab"])
    assert not (tmp_path / "tiny").exists()


# ---- watching


def test_enjoy_writes_an_mp4_and_by_default_a_gif_that_open(scratch):
    trained = run({**TINY, "env": "CartPole-v1"}, root=scratch.path)  # badly: its episode is short
    result = scratch("enjoy", str(trained.path), "--out", "seen.mp4", DISPLAY="", WAYLAND_DISPLAY="")
    assert result.returncode == 0, result.stderr
    assert re.fullmatch(r"return [\d.]+ over 1 episode: seen\.mp4\n", result.stdout)
    length = int(float(result.stdout.split()[1]))  # CartPole gives 1 a step
    assert imageio_ffmpeg.count_frames_and_secs(str(scratch.path / "seen.mp4"))[0] == length + 1
    result = scratch("enjoy", str(trained.path), DISPLAY="", WAYLAND_DISPLAY="")
    assert result.returncode == 0, result.stderr
    with Image.open(trained.path / "plots" / "enjoy.gif") as gif:
        assert gif.size == (600, 400)
        assert length // 2 < gif.n_frames <= length + 1  # equal neighbors may be one frame


def test_enjoy_of_an_object_or_into_another_format_is_refused(cartpole, tmp_path):
    with pytest.raises(UsageError, match=r"\.gif or \.mp4"):
        enjoy(cartpole, episodes=1, out=tmp_path / "seen.avi", which="last", seed=0)
    trained = run(TINY, root=tmp_path, env=Faulty)
    with pytest.raises(UsageError, match=r"envs\.Faulty"):
        enjoy(trained, episodes=1, out=None, which="best", seed=0)


def test_enjoy_of_a_language_model_names_chat(cartpole, tmp_path):
    folder = tmp_path / "lm" / cartpole.path.name
    shutil.copytree(cartpole.path, folder)
    spec = plain(palestra.check("examples/lm/shakespeare.yaml", variables={"text": __file__}).spec)
    for path in folder.glob("sessions/*/manifest.json"):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"spec": spec}))
    with pytest.raises(UsageError, match="is of kind pretrain, which has no episodes: use palestra chat"):
        palestra.enjoy(folder)
