"""The commands on real run folders: what they print, and what they cost to start."""

import io
import json
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree
from contextlib import redirect_stdout

import pytest
from conftest import ENVIRONMENT
from PIL import Image
from typer.testing import CliRunner

from palestra.cli.main import app
from palestra.cli.show import show_result
from palestra.runs.run import open_run

COMMANDS = (
    *(
        "check",
        "dev",
        "train",
        "search",
        "bench",
        "enjoy",
        "export",
        "runs",
        "rollouts",
        "diff",
        "plot",
        "push",
        "pull",
    ),
    *("chat", "serve", "eval", "model", "data", "import", "pipeline", "sweep", "speedrun"),
)


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=ENVIRONMENT, check=True)
    return done.stdout.strip()


def test_help_names_every_command(scratch):
    done = scratch("--help")
    assert all(re.search(rf"^ +{name} ", done.stdout, re.MULTILINE) for name in COMMANDS)


def test_import_of_palestra_loads_nothing_heavy_and_help_no_torch():
    heavy = "[m for m in ('torch', 'numpy', 'gymnasium', 'matplotlib', 'optuna') if m in sys.modules]"
    assert python(f"import sys, palestra; print({heavy}, 'pydantic' in sys.modules)") == "[] False"
    code = "import sys; sys.argv = ['palestra', 'train', '--help']\nfrom palestra.cli import main\ntry: main()\n"
    assert python(f"{code}except SystemExit: print({heavy})").splitlines()[-1] == "[]"


@pytest.mark.parametrize("name", COMMANDS)
def test_command_help_says_what_it_does(name):
    result = CliRunner().invoke(app, [name, "--help"], prog_name="palestra")
    assert result.exit_code == 0
    assert f"palestra {name}" in result.stdout
    assert len(result.stdout.splitlines()) > 5


def test_no_command_and_unknown_command_and_bad_option_are_usage_errors(scratch):
    for arguments in ([], ["tarin"], ["train", "--sped"], ["plot"], ["train"], ["train", "x.yaml", "-s", "nonsense"]):
        result = scratch.here(*arguments)
        assert result.returncode == 2, (arguments, result.stderr)
        assert result.stderr
        assert "Traceback" not in result.stderr


def test_override_named_like_an_argument_of_the_api_is_an_unknown_key(scratch):
    result = scratch.here("train", scratch.spec(), "quiet=1")
    assert result.returncode == 2
    assert "quiet: unknown key" in result.stderr


def test_version_is_the_packages(scratch):
    from palestra import __version__

    assert scratch.here("--version").stdout.strip() == __version__


def test_check_prints_values_with_origins_and_what_follows(scratch):
    result = scratch.here("check", scratch.spec(), "algorithm.lr=1e-3")
    assert result.returncode == 0
    lines = {line.split("#")[0].strip(): line.partition("#")[2].strip() for line in result.stdout.splitlines()}
    assert lines["lr: 0.001"] == "override"
    assert lines["gamma: 0.99"] == "default"
    assert lines["id: CartPole-v1"].startswith("short.yaml:")
    assert "steps: 36" in lines
    assert not (scratch.path / "runs").exists()


def test_runs_lists_state_step_headline_and_age(finished):
    result = finished.here("runs")
    (line,) = [line for line in result.stdout.splitlines() if "short/" in line]
    assert re.search(
        r"short/\d{8}T\d{6}-\w{4} +done +1 +36 +4,608 frames +return \d+\.\d, eval/return \d+\.\d +\d+ (s|min)", line
    )
    unknown = finished.here("runs", "shart")
    assert unknown.returncode == 2
    assert "no runs named shart in runs. Did you mean 'short'?" in unknown.stderr


def test_runs_lists_the_others_beside_a_damaged_and_a_renamed_one(scratch, finished):
    for name in ("short", "renamed"):
        shutil.copytree(finished.path / "runs" / "short", scratch.path / "runs" / name)
    damaged = scratch.path / "runs" / "torn" / finished.trial().name
    shutil.copytree(finished.trial(), damaged)
    (damaged / "trial.json").write_bytes(b"")
    result = scratch.here("runs", "--sort", "name", "--json")
    assert result.returncode == 0, result.stderr
    rows = json.loads(result.stdout)
    assert [(row["name"], row["state"]) for row in rows] == [
        ("renamed", "done"),
        ("short", "done"),
        ("torn", "unreadable"),
    ]
    assert "trial.json is not valid JSON" in rows[2]["error"]
    assert scratch.here("diff", f"renamed/{rows[0]['id']}", "short").returncode == 0  # as it is listed


def test_standard_streams_that_are_closed_are_nobodys(scratch):
    def closed(*arguments: str) -> int:
        command = [sys.executable, "-m", "palestra", *arguments]
        shell = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *command]
        return subprocess.run(shell, cwd=scratch.path, env=ENVIRONMENT).returncode

    assert closed("check", scratch.spec()) == 0
    assert closed("check", "no.yaml") == 2
    assert closed("runs") == 0


def test_runs_in_an_empty_folder_says_so(scratch):
    result = scratch("runs")
    assert result.returncode == 0
    assert result.stdout.strip() == "no runs in runs"


def test_diff_shows_changed_fields_and_both_results(finished, two_seeds):
    result = finished.here("diff", "short", str(two_seeds.trial()))
    assert result.returncode == 0
    assert re.search(r"max_session +1 +2", result.stdout)
    assert re.search(r"summary\.total_reward_ma +[\d.]+ +[\d.]+", result.stdout)
    assert "algorithm.lr" not in result.stdout


def test_run_that_does_not_exist_is_refused_with_a_near_one(finished):
    for command in ("diff", "plot", "enjoy"):
        result = finished.here(command, "shirt", *(["short"] if command == "diff" else []))
        assert result.returncode == 2
        assert "Did you mean short" in result.stderr


def test_plot_writes_png_and_svg_that_open(scratch, finished, two_seeds):
    shutil.copytree(two_seeds.path / "runs", scratch.path / "runs")
    result = scratch.here("plot", "short", str(finished.trial()), "--metric", "eval/return", "--out", "both")
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["both.png", "both.svg"]
    with Image.open(scratch.path / "both.png") as picture:
        assert min(picture.size) > 300
    assert xml.etree.ElementTree.parse(scratch.path / "both.svg").getroot().tag.endswith("svg")
    result = scratch.here("plot", "short", "--metric", "retrun")
    assert result.returncode == 2
    assert "return" in result.stderr


def test_report_names_the_file_of_a_run_that_is_missing(scratch, finished):
    shutil.copytree(finished.path / "runs", scratch.path / "runs")
    next(scratch.path.glob("runs/short/*/sessions/0/spec.yaml")).unlink()
    result = scratch.here("report", "short")
    assert result.returncode == 1
    assert "spec.yaml" in result.stderr
    assert "cannot write" not in result.stderr


def test_metric_that_is_not_a_number_is_shown_and_comes_last(scratch, finished):
    """As of a policy that diverged: NaN, which has no place in an order, in status.json, and null in summary.json."""
    headlines = {"first": 1.0, "nothing": float("nan"), "second": 2.0}
    for name, value in headlines.items():
        folder = scratch.path / "runs" / name / finished.trial().name
        shutil.copytree(finished.trial(), folder)
        status = json.loads((folder / "sessions/0/status.json").read_text())
        status["progress"]["headline"]["eval/return"] = value
        (folder / "sessions/0/status.json").write_text(json.dumps(status))
    rows = json.loads(scratch.here("runs", "--sort", "eval/return", "--json").stdout)
    assert [row["name"] for row in rows] == ["second", "first", "nothing"]
    run = open_run("nothing", scratch.path / "runs")
    (run.path / "summary.json").write_text(json.dumps({"eval/return": None, "eval/return_by_seed": {"0": None}}))
    with redirect_stdout(io.StringIO()) as printed:
        show_result(run)
    assert re.search(r"evaluation +return nan", printed.getvalue())
    for path in run.path.glob("sessions/0/metrics.jsonl"):
        path.write_text('{"step": 1, "frame": 128, "mine": NaN, "other": 1.0}\n')
    told = scratch.here("plot", "nothing", "--metric", "mine").stderr
    assert "no values of 'mine'" in told
    assert "Did you mean 'mine'" not in told


def test_train_ends_with_results_the_folder_and_the_plot(finished):
    plots = [path.name for path in (finished.trial() / "plots").iterdir()]
    assert {"learning_curve.png", "learning_curve.svg"} <= set(plots)
    result = finished.here("train", "--resume", "short")  # nothing left to do: it only says what came of it
    assert result.returncode == 0
    assert str(finished.trial()) in result.stdout
    assert "learning_curve.png" in result.stdout
    assert re.search(r"evaluation +return \d+\.\d", result.stdout)
