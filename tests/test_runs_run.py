import json
import math
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from palestra.errors import PalestraError, UsageError
from palestra.runs import plot
from palestra.runs.manifest import compare, manifest
from palestra.runs.run import Run, diff, list_runs, new_trial, open_run
from palestra.runs.session import Session
from palestra.runs.store import write_json


def make(root: Path, name: str = "ppo", seeds=(0, 1), lr: float = 0.1, rows=None, headline=None) -> Run:
    trial = new_trial(root, name, seeds=seeds, command=["palestra", "train"], spec={})
    for seed in seeds:
        path = trial.session(seed)
        spec = {"name": name, "algorithm": {"lr": lr}}
        with Session.create(path, spec_yaml="", spec_data=spec, manifest={"seed": seed}) as session:
            (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in (rows or {}).get(seed, [])))
            session.progress(step=10 + seed, frame=100 + seed, headline={"return": (headline or {}).get(seed, 0.0)})
    return trial


# ---- folders


def test_new_trial_makes_folder_info_and_latest(tmp_path):
    trial = new_trial(tmp_path, "ppo", seeds=[3, 4], command=["palestra", "train", "x.yaml"], spec={})
    assert trial.path.parent == tmp_path / "ppo"
    assert re.fullmatch(r"\d{8}T\d{6}-[0-9a-f]{4}", trial.path.name)
    assert (tmp_path / "ppo" / "latest").read_text() == trial.path.name + "\n"
    assert trial.info["name"] == "ppo"
    assert trial.info["id"] == trial.path.name
    assert trial.info["seeds"] == [3, 4]
    assert trial.info["command"] == ["palestra", "train", "x.yaml"]
    assert trial.sessions == []


@pytest.mark.parametrize("name", ["", "a/b", "..", "-x", ".hidden", "a b"])
def test_new_trial_with_a_name_that_is_no_folder_is_refused(tmp_path, name):
    with pytest.raises(UsageError, match="not a valid run name"):
        new_trial(tmp_path, name, seeds=[0], command=[], spec={})


def test_new_trial_where_a_file_stands_is_a_clear_error(tmp_path):
    (tmp_path / "runs").write_text("")
    with pytest.raises(PalestraError, match="cannot write the run folder"):
        new_trial(tmp_path / "runs", "ppo", seeds=[0], command=[], spec={})
    (tmp_path / "ppo").write_text("")
    with pytest.raises(PalestraError, match="cannot write the run folder"):
        new_trial(tmp_path, "ppo", seeds=[0], command=[], spec={})


def fake_trial(root: Path, name: str, trial_id: str) -> Path:
    write_json(
        root / name / trial_id / "trial.json", {"name": name, "id": trial_id, "seeds": [0], "created": "x", "spec": {}}
    )
    return root / name / trial_id


def test_find_accepts_path_name_id_and_unique_prefix(tmp_path, monkeypatch):
    old = fake_trial(tmp_path, "ppo", "20260101T000000-aaaa")
    new = fake_trial(tmp_path, "ppo", "20260202T000000-bbbb")
    other = fake_trial(tmp_path, "dqn", "20260303T000000-cccc")
    write_json(new / "sessions/7/manifest.json", {})
    assert open_run(old, tmp_path).path == old
    assert open_run("ppo/20260101T000000-aaaa", tmp_path).path == old
    assert open_run("ppo/202601", tmp_path).path == old
    assert open_run("202603", tmp_path).path == other
    assert open_run("ppo", tmp_path).path == new  # no pointer: the newest
    (tmp_path / "ppo/latest").write_text(old.name + "\n")
    assert open_run("ppo", tmp_path).path == old
    assert open_run(tmp_path / "ppo").path == old
    (tmp_path / "ppo/latest").write_text("removed\n")
    assert open_run("ppo", tmp_path).path == new
    session = open_run(new / "sessions/7")
    assert (session.seed, session.trial.path) == (7, new)
    monkeypatch.chdir(new)
    assert open_run(".").path == new


def test_find_that_fails_names_the_nearest_or_all_candidates(tmp_path):
    with pytest.raises(UsageError, match="no runs in"):
        open_run("ppo", tmp_path / "nowhere")
    for trial_id in ("20260101T000000-aaaa", "20260202T000000-bbbb"):
        fake_trial(tmp_path, "ppo_cartpole", trial_id)
    with pytest.raises(UsageError, match="Did you mean ppo_cartpole"):
        open_run("ppo_cartpol", tmp_path)
    with pytest.raises(UsageError, match=r"any of 2 runs: ppo_cartpole/20260202.*, ppo_cartpole/20260101"):
        open_run("2026", tmp_path)
    with pytest.raises(UsageError, match="There are: ppo_cartpole"):
        open_run("zzz", tmp_path)


def test_trials_come_newest_first_also_within_a_second(tmp_path):
    made = [new_trial(tmp_path, name, seeds=[0], command=[], spec={}) for name in "abcdefgh"]
    assert [run.path for run in list_runs(tmp_path)] == [run.path for run in made[::-1]]


# ---- the manifest


def test_manifest_tells_git_packages_and_redacts_secrets(tmp_path, monkeypatch):
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b.c"]
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    (tmp_path / "code.py").write_text("x = 1\n")
    subprocess.run([*git, "add", "."], cwd=tmp_path, check=True)
    subprocess.run([*git, "commit", "-qm", "first"], cwd=tmp_path, check=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PALESTRA_DATA", "here")
    monkeypatch.setenv("PALESTRA_HUB_TOKEN", "hush")
    monkeypatch.setenv("PALESTRA_DB_PASSWORD", "hush")
    monkeypatch.setenv("UNRELATED", "hush")
    clean = manifest(spec_hash="abc", seed=5, command=["palestra", "train"])
    assert len(clean["git"]["commit"]) == 40
    assert clean["git"]["dirty"] is False
    assert clean["diff"] == ""
    assert clean["packages"]["numpy"] == np.__version__
    assert clean["environment"] == {
        "PALESTRA_DATA": "here", "PALESTRA_DB_PASSWORD": "(redacted)", "PALESTRA_HUB_TOKEN": "(redacted)",
    }  # fmt: skip
    assert "hush" not in json.dumps(clean)
    (tmp_path / "code.py").write_text("x = 2\n")
    (tmp_path / "new.py").write_text("secret of mine\n")
    dirty = manifest(spec_hash="abc", seed=5, command=[])
    assert dirty["git"] == {"commit": clean["git"]["commit"], "dirty": True, "untracked": ["new.py"]}
    assert "+x = 2" in dirty["diff"]
    assert "secret of mine" not in dirty["diff"]
    (tmp_path / "code.py").write_text("y\n" * 2_000_000)
    huge = manifest(spec_hash="abc", seed=5, command=[])["diff"]
    assert 1 << 20 <= len(huge) < (1 << 20) + 100
    assert "truncated after" in huge


def test_manifest_in_a_repository_without_commits_has_none(tmp_path, monkeypatch):
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    (tmp_path / "a").write_text("")
    monkeypatch.chdir(tmp_path)
    assert manifest(spec_hash="", seed=0, command=[])["git"] == {"commit": None, "dirty": True, "untracked": ["a"]}


def test_manifest_without_git_installed_has_no_git(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert manifest(spec_hash="", seed=0, command=[])["git"] is None


def test_compare_names_what_breaks_exact_resume_and_nothing_else():
    then = {"cpu": "A", "threads": 2, "packages": {"torch": "2.13.0", "rich": "13"}, "host": "h1"}
    now = {"cpu": "B", "threads": 4, "packages": {"torch": "2.13.1", "rich": "14"}, "host": "h2"}
    assert [str(change) for change in compare(then, now)] == [
        "cpu: 'A' → 'B'", "torch: '2.13.0' → '2.13.1'", "threads: 2 → 4",
    ]  # fmt: skip
    assert compare(then, {**then, "host": "h2", "threads": None}) == []


# ---- the view


def test_run_shows_what_its_folder_holds(tmp_path):
    rows = {0: [{"step": 1, "loss": 0.5}], 1: [{"step": 1, "loss": math.nan}, {"step": 2, "loss": 0.25}]}
    run = make(tmp_path, rows=rows, headline={0: 10.0, 1: 20.0})
    assert (run.name, run.id, run.seeds, run.state) == ("ppo", run.path.name, [0, 1], "done")
    assert run.spec == {"name": "ppo", "algorithm": {"lr": 0.1}}
    assert [(row["seed"], row["step"]) for row in run.metrics()] == [(0, 1), (1, 1), (1, 2)]
    assert run.metrics(seed=0) == [{"seed": 0, "step": 1, "loss": 0.5}]
    assert run.progress() == {"step": 10, "frame": 100, "headline": {"return": 15.0}}
    assert run.summary() == {}
    write_json(run.path / "summary.json", {"return": {"mean": 15.0}})
    assert run.summary() == {"return": {"mean": 15.0}}
    one = open_run(run.path / "sessions/1")
    assert (one.name, one.seeds, len(one.metrics())) == ("ppo", [1], 2)
    with pytest.raises(UsageError, match="not a run's folder"):
        Run(tmp_path)


def test_metrics_with_a_torn_last_line_leave_it_out(tmp_path):
    run = make(tmp_path, seeds=[0], rows={0: [{"step": 1}]})
    with (run.path / "sessions/0/metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "lo')
    assert run.metrics() == [{"seed": 0, "step": 1}]
    with (run.path / "sessions/0/metrics.jsonl").open("a") as file:
        file.write("\n")
    with pytest.raises(PalestraError, match=r"metrics\.jsonl:2"):
        run.metrics()


def test_state_of_a_trial_is_its_most_urgent_session(tmp_path):
    trial = new_trial(tmp_path, "ppo", seeds=[0, 1], command=[], spec={})
    run = Run(trial.path)
    assert run.state == "new"
    assert run.progress() == {"headline": {}}
    assert run.spec == {}

    def session(seed):
        return Session.create(trial.session(seed), spec_yaml="", spec_data={}, manifest={"seed": seed})

    with session(0):
        assert run.state == "running"
    assert run.state == "unfinished"
    with pytest.raises(KeyError), session(1):
        raise KeyError("x")
    assert run.state == "failed"
    with Session.open(trial.session(1)):
        pass
    assert run.state == "done"


def test_checkpoint_best_is_the_best_of_all_sessions_else_the_last(tmp_path):
    run = make(tmp_path)
    with pytest.raises(UsageError, match="no complete checkpoint"):
        run.checkpoint()
    for seed, step, score in ((0, 5, None), (1, 9, None)):
        with Session.open(run.path / f"sessions/{seed}") as session:
            session.checkpoint(step, {}, reasons={"kept"}, score=score)
    assert run.checkpoint("best").name == "step_000000009"
    for seed, step, score in ((0, 6, 50.0), (1, 10, 40.0)):
        with Session.open(run.path / f"sessions/{seed}") as session:
            session.checkpoint(step, {}, reasons={"best"}, score=score)
    assert run.checkpoint("best") == run.path / "sessions/0/checkpoints/step_000000006"
    assert run.checkpoint("last") == run.path / "sessions/1/checkpoints/step_000000010"
    with pytest.raises(UsageError, match="choose 'best' or 'last'"):
        run.checkpoint("first")


def test_list_runs_of_many_has_all_newest_first_with_their_state(tmp_path):
    status = {"state": "done", "progress": {"step": 3, "headline": {"return": 1.0}}}
    for index in range(200):
        path = fake_trial(tmp_path, f"run_{index % 50}", f"20260101T{index:06d}-aaaa")
        for name, content in (("manifest.json", {"seed": 0, "spec": {}}), ("status.json", status)):
            (path / "sessions/0").mkdir(parents=True, exist_ok=True)
            (path / "sessions/0" / name).write_text(json.dumps(content))
    shown = [(run.name, run.state, run.progress()["step"]) for run in list_runs(tmp_path)]
    assert shown[0] == ("run_49", "done", 3)
    assert len(shown) == 200


def test_diff_gives_spec_and_results(tmp_path):
    a = make(tmp_path, lr=0.1, headline={0: 10.0, 1: 20.0})
    b = make(tmp_path, lr=0.2, headline={0: 30.0, 1: 30.0})
    write_json(b.path / "summary.json", {"strength": 2.5, "label": "text"})
    found = diff(a, b)
    assert [str(change) for change in found.spec] == ["algorithm.lr: 0.1 → 0.2"]
    assert found.results["return"] == (15.0, 30.0)
    assert found.results["summary.strength"] == (None, 2.5)
    assert not any("label" in metric for metric in found.results)


# ---- plots


def learning(seed: int, offset: int = 0) -> list[dict]:
    return [
        {"step": i, "frame": 1000 * i + offset, "train/return": i + seed, "ppo/loss": 1 / i, "time/fps": 9.0}
        for i in range(1, 21)
    ]


def drawn_axes(monkeypatch):
    seen = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: (seen.append(self), save(self, *a, **k))[1])
    return seen


def test_curves_draw_mean_and_band_over_interpolated_seeds(tmp_path, monkeypatch):
    run = make(tmp_path, seeds=[0, 2], rows={0: learning(0), 2: learning(2, offset=500)})
    figures = drawn_axes(monkeypatch)
    png, svg = plot.curves([run], metric="train/return", out=tmp_path / "out.v1")
    assert (png.name, svg.name) == ("out.v1.png", "out.v1.svg")
    assert png.read_bytes().startswith(b"\x89PNG")
    assert "<svg" in svg.read_text()
    axes = figures[0].axes[0]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("environment frames", "train return")
    assert axes.get_legend().get_texts()[0].get_text() == "ppo (2 seeds)"
    x, mean = axes.lines[0].get_data()
    assert (x[0], x[-1]) == (1500, 20000)  # the range both seeds cover
    # Seed 0 is frame/1000, seed 2 is (frame - 500)/1000 + 2: their mean and deviation are known at every frame.
    np.testing.assert_allclose(mean, x / 1000 + 0.75)
    band = axes.collections[0].get_paths()[0].vertices[:, 1]
    np.testing.assert_allclose([band.min(), band.max()], [1.5, 20 + 1.5])
    assert len(axes.lines) == 3  # the mean and two faint seeds


def test_curves_of_two_runs_of_one_name_are_told_apart_by_id(tmp_path, monkeypatch):
    runs = [make(tmp_path, seeds=[0], rows={0: learning(0)}) for _ in range(2)]
    figures = drawn_axes(monkeypatch)
    plot.curves(runs, metric="train/return", x="step", out=tmp_path / "both")
    texts = [text.get_text() for text in figures[0].axes[0].get_legend().get_texts()]
    assert texts == [f"ppo {run.id} (1 seed)" for run in runs]
    assert figures[0].axes[0].get_xlabel() == "training steps"


def test_curves_of_an_unknown_metric_name_the_nearest(tmp_path):
    run = make(tmp_path, rows={0: learning(0)})
    with pytest.raises(UsageError, match="Did you mean 'train/return'"):
        plot.curves([run], metric="train/retrun", out=tmp_path / "x")


def test_curves_skip_values_that_are_not_finite(tmp_path, monkeypatch):
    rows = [*learning(0), {"step": 21, "frame": 21000, "train/return": math.nan}, {"step": 22, "frame": 22000}]
    figures = drawn_axes(monkeypatch)
    plot.curves([make(tmp_path, seeds=[0], rows={0: rows})], metric="train/return", out=tmp_path / "x")
    assert figures[0].axes[0].lines[0].get_xdata()[-1] == 20000


def test_trial_plots_write_headline_and_grid_without_timings(tmp_path, monkeypatch, pictures):
    run = make(tmp_path, rows={0: learning(0), 1: learning(1)})
    figures = drawn_axes(monkeypatch)
    written = plot.trial_plots(run)
    assert run.plots() == sorted(written)
    assert [path.name for path in written] == ["learning_curve.png", "learning_curve.svg", "metrics.png", "metrics.svg"]
    assert [axes.get_title("left") for axes in figures[-1].axes] == ["ppo loss"]
    with pytest.raises(PalestraError, match="no metrics to plot"):
        plot.trial_plots(make(tmp_path, name="empty"))


def test_importing_runs_loads_no_heavy_library():
    modules = ", ".join(f"palestra.runs.{name}" for name in ("session", "run", "loop", "plot", "manifest"))
    code = f"import sys, {modules}; print({{'torch', 'gymnasium', 'matplotlib', 'numpy'}} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_spec_of_a_trial_that_has_neither_session_nor_spec_is_refused_in_a_sentence(tmp_path):
    folder = tmp_path / "runs" / "old" / "20260101T000000-0000"
    folder.mkdir(parents=True)
    (folder / "trial.json").write_text(json.dumps({"name": "old", "id": folder.name, "seeds": [0]}))
    with pytest.raises(PalestraError, match="has no session yet"):
        _ = Run(folder).spec
