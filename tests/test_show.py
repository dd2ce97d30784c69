"""What `palestra check` and `palestra runs` print, and the order of the panels in metrics.png."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from example_specs import FILES, specs_of

from palestra.api import check
from palestra.cli.main import app
from palestra.errors import UsageError
from palestra.runs.plot import leading_metrics, trial_plots
from palestra.runs.run import Run, new_trial
from palestra.spec.model import plain
from palestra.spec.source import read_text


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    app(list(arguments), standalone_mode=False)
    return capsys.readouterr().out


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_check_prints_yaml_that_reads_back_with_an_origin_on_every_value(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for source, variables in specs_of(path).items():
        given = [word for name, value in variables.items() for word in ("-s", f"{name}={value}")]
        text = printed(capsys, "check", source, *given).partition("\n\n# derived")[0]
        assert read_text(text, "check").data == plain(check(source, variables=variables).spec)
        for line in text.splitlines():
            assert line.endswith(":") or "  # " in line


def test_check_of_a_preset_labels_what_it_sets_and_fits_in_110_columns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(Path(__file__).parent.parent)
    out = printed(capsys, "check", "examples/posttrain/smollm2_sums.yaml", "algorithm.trust={type: none}")
    origins = {line.split("  # ")[0].strip(): line.split("  # ")[1] for line in out.splitlines() if "  # " in line}
    assert origins["zero_variance: true"] == "preset dapo"
    assert origins["aggregation: token"] == "preset dapo"
    assert origins["ratio: token"] == "default"
    assert origins["preset: dapo"] == "examples/posttrain/smollm2_sums.yaml:10"
    assert "high: 0.28" not in origins  # another type of trust region replaced the preset's
    assert max(len(line) for line in out.splitlines()) <= 110
    loaded = check("examples/quickstart/grpo.yaml", overrides=["algorithm.kl.where=none"])
    assert loaded.origin("algorithm.kl.estimator") == "default"  # switched off: the preset's is void
    assert check("examples/quickstart/grpo.yaml").origin("algorithm.kl.estimator") == "preset grpo"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Three runs, of which one has progress."""
    root = tmp_path / "runs"
    for name, step in (("ppo_one", 3), ("ppo_two", 7), ("dqn", None)):
        trial = new_trial(root, name, seeds=[0], command=[], spec={"kind": "control"})
        if step is not None:
            folder = trial.session(0)
            folder.mkdir(parents=True)
            (folder / "manifest.json").write_text(json.dumps({"spec": {"kind": "control"}}))
            headline = {"return": 10.0 - step}
            status = {"state": "done", "progress": {"step": step, "frame": 10 * step, "headline": headline}}
            (folder / "status.json").write_text(json.dumps(status))
    return root


def test_runs_filters_sorts_and_prints_json(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def names(*options: str) -> list[str]:
        rows = json.loads(printed(capsys, "runs", "--runs", str(root), "--json", *options))
        return [row["name"] for row in rows]

    assert names("--sort", "name") == ["dqn", "ppo_one", "ppo_two"]
    assert names("--sort", "step") == ["ppo_two", "ppo_one", "dqn"]
    assert names("--sort", "return", "--limit", "1") == ["ppo_one"]
    assert names("ppo_*", "--sort", "name") == ["ppo_one", "ppo_two"]
    assert names("--state", "new") == ["dqn"]
    (row,) = json.loads(printed(capsys, "runs", "--runs", str(root), "--json", "ppo_two"))
    assert row["step"] == 7
    assert row["headline"] == {"return": 3.0}
    assert Path(row["path"]).is_dir()
    with pytest.raises(UsageError, match=r"no runs named ppo_tow in .* Did you mean 'ppo_two'"):
        printed(capsys, "runs", "--runs", str(root), "ppo_tow")


def test_runs_print_json_that_any_reader_takes(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status = next(root.glob("ppo_one/*/sessions/0/status.json"))
    data = json.loads(status.read_text())
    status.write_text(json.dumps(data | {"progress": {"step": 3, "headline": {"return": math.nan, "loss": math.inf}}}))
    text = printed(capsys, "runs", "--runs", str(root), "--json", "ppo_one")
    (row,) = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert row["headline"] == {"return": None, "loss": None}


def test_runs_watch_shows_what_changed_and_ends_when_asked_to(root: Path) -> None:
    command = [sys.executable, "-m", "palestra", "runs", "--runs", str(root), "--watch", "0.2"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONUNBUFFERED": "1"}
    ) as process:
        assert process.stdout is not None
        assert any("dqn/" in line for line in process.stdout)
        new_trial(root, "later", seeds=[0], command=[], spec={"kind": "control"})
        assert any("later/" in line for line in process.stdout)
        process.terminate()  # like Ctrl-C, which a process in the background may ignore
        process.stdout.read()  # a closed pipe would end it too
    assert process.returncode == 0


@pytest.mark.usefixtures("pictures")
def test_metrics_picture_of_post_training_begins_with_reward_and_evaluation_with_its_error(tmp_path: Path) -> None:
    order = ["loss", "grad_norm", "entropy", "reward", "length", "truncated", "kl_reference"]
    tasks = ["eval/a/accuracy", "eval/a/accuracy_se", "eval/accuracy"]
    leading = ["reward", "eval/a/accuracy", "entropy", "kl_reference", "length", "truncated", "grad_norm"]
    assert leading_metrics([*order, *tasks]) == leading
    many = [f"eval/{task}/accuracy{end}" for task in "abcd" for end in ("", "_se")]
    assert leading_metrics(["reward", *many, "eval/accuracy"]) == ["reward", "eval/accuracy"]

    trial = new_trial(tmp_path, "grpo", seeds=[0], command=[], spec={"kind": "posttrain"})
    folder = trial.session(0)
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text(json.dumps({"spec": {"kind": "posttrain"}}))
    (folder / "status.json").write_text(json.dumps({"state": "done", "progress": {"headline": {"reward": 1.0}}}))
    rows = [{"step": step, **dict.fromkeys((*order, *tasks), step / 10), "truncated": 0} for step in range(5)]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    trial_plots(Run(trial.path))
    svg = (trial.path / "plots/metrics.svg").read_text()
    titles = [line for line in svg.splitlines() if line.strip().startswith("<!--")]
    shown = [title.strip(" <!->") for title in titles if title.strip(" <!->")[:1].isalpha()]
    assert shown[:3] == ["reward", "evaluation a accuracy ± SE", "entropy"]
    assert "truncated" in shown  # also where it is 0 all the time
    assert not any("accuracy se" in title for title in shown)
