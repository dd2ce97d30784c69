"""Speedruns: costs before a run, submissions after it, the board and the frontier of a folder of them."""

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
from conftest import Scratch
from tiny_lm import Lab

from palestra.errors import PalestraError, UsageError
from palestra.runs.run import open_run
from palestra.spec.shape import Shape
from palestra.speedrun.leaderboard import draw, frontier, read_rows
from palestra.speedrun.submission import about, cost, pretraining, seconds, submit

ADA: dict[str, Any] = {"author": "Ada", "affiliation": "Analytical Engines", "url": "https://example.org"}


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return Lab(tmp_path_factory.mktemp("speedrun"))


@pytest.fixture(scope="module")
def submitted(lab: Lab) -> Path:
    """The submission of a run of two sessions; only to be read."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PALESTRA_CACHE", str(lab.path / "cache"))
        patch.setattr("palestra.kinds.trial.trial_plots", lambda run: [])
        spec = lab.spec("pretrain", name="fast", every__eval="4 steps", every__log="3 steps")
        return submit(spec, **ADA, description="a test", root=lab.root, quiet=True)


def info(path: Path) -> dict[str, Any]:
    (entry,) = json.loads(path.read_text())["runs"]
    return entry["run_info"]


def test_submission_lies_in_its_run_and_says_who_made_what(lab, submitted):
    told = info(submitted)
    run = open_run(told["run"], lab.root)

    assert submitted == run.path / "speedrun.json"
    assert told["author"] == {"name": "Ada", "affiliation": "Analytical Engines", "url": "https://example.org"}
    assert told["description"] == "a test"
    assert told["spec"] == run.spec
    assert told["commit"] is None or len(told["commit"]) == 40


def test_submission_has_what_follows_from_the_spec_and_what_was_measured(lab, submitted):
    told = info(submitted)
    shape = Shape(layers=2, width=32, heads=2, mlp=48, context=48, vocab=64)  # 27 characters and special tokens
    rows = open_run(told["run"], lab.root).metrics()

    assert told["model_size"] == shape.parameters()
    assert told["total_tokens"] == 12 * 6 * 48 == rows[-1]["tokens"]
    assert told["model_flops_per_token"] == shape.flops_per_token(48)
    assert told["model_flops"] == 3 * shape.flops_per_token(48) * 12 * 6 * 48
    assert told["eval/bits_per_byte"] == rows[-1]["eval/bits_per_byte"]
    assert told["training_hardware_flops"] == told["training_time"] * told["num_devices"] * told["device_flops"]
    assert told["device_flops"] > 1e8
    assert 0 < told["training_time"] <= told["wall_time"]
    assert told["model_flops"] < told["training_hardware_flops"]  # no device is used beyond its peak


def test_submission_of_a_finished_run_is_written_again_with_another_peak(lab, submitted):
    before = submitted.read_bytes()
    path = submit(None, resume="fast", **ADA, peak=1e12, root=lab.root, quiet=True)
    told = info(path)
    submitted.write_bytes(before)

    assert path == submitted
    assert (told["device_flops"], told["device_flops_source"]) == (1e12, "given")
    assert told["training_hardware_flops"] == told["training_time"] * 1e12


def test_seconds_take_the_rate_between_rows_and_the_steps_own_time_before_it():
    rows = [
        {"tokens": 100, "time/train": 3.0, "time/eval": 0.5},
        {"tokens": 300, "time/train": 0.1, "time/tokens_per_s": 50.0},
        {"tokens": 400, "time/train": 2.0, "time/checkpoint": 0.25},  # gone on with after a kill
        {"tokens": 500, "time/train": 0.1, "time/tokens_per_s": 100.0},
    ]

    assert seconds(rows) == (3.0 + 4.0 + 2.0 + 1.0, 10.0 + 0.75)


def test_cost_of_a_published_run_equals_its_flops_to_six_digits():
    """Marin's adamw_130m: 128 sequences of 4,096 tokens, 4,959 steps."""
    spec = pretraining(
        {
            "kind": "pretrain",
            "name": "adamw_130m",
            "model": {"tokenizer": "t", "shape": {"layers": 6, "width": 512, "heads": 8, "mlp": 1792, "context": 4096}},
            "data": {"train": {"text": {"path": "t"}}, "holdout": 0.1, "context": 4096},
            "train": {"steps": 4959, "batch": 128},
        },
        None,
        ["model.shape.vocab=128256", "model.shape.tied=false"],
    )
    assert f"{cost(spec, Path())['model_flops']:.5e}" == "1.77734e+18"
    assert about(spec)["model FLOPs"] == "1.77734e+18"
    assert about(spec)["hardware FLOPs, estimated"].startswith("3.55e+18 to 8.89e+18")


def test_spec_that_measures_no_bits_per_byte_is_refused(lab):
    with pytest.raises(UsageError, match="kind 'pretrain'"):
        about(lab.spec("sft"))
    with pytest.raises(UsageError, match=r"data\.eval or data\.holdout"):
        about(lab.spec("pretrain", data__holdout=0.0))
    with pytest.raises(UsageError, match="and not both"):
        submit(None, **ADA)


def write(folder: Path, name: str, bits: float, flops: float) -> None:
    whole = {
        "run": f"{name}/1",
        "seed": 0,
        "author": {"name": name},
        "description": "",
        "model_size": 10,
        "total_tokens": 100,
        "model_flops": flops / 4,
        "training_hardware_flops": flops,
        "training_time": 60.0,
        "eval/bits_per_byte": bits,
        "num_devices": 1,
        "resources": {"device": "CPU"},
        "commit": None,
        "run_completion_timestamp": "2026-01-01T00:00:00+00:00",
    }
    (folder / name).mkdir()
    (folder / name / "speedrun.json").write_text(json.dumps({"runs": [{"run_info": whole}]}))


def test_leaderboard_orders_by_bits_per_byte_and_marks_the_frontier(tmp_path):
    for name, bits, flops in (("a", 1.2, 1e12), ("b", 1.0, 1e13), ("c", 1.1, 2e13), ("d", 0.9, 1e15)):
        write(tmp_path, name, bits, flops)
    rows = read_rows(tmp_path)

    assert [(row["author"], row["pareto"]) for row in rows] == [("d", True), ("b", True), ("c", False), ("a", True)]
    assert rows[0]["mfu"] == 0.25
    assert rows[0]["results_filepath"] == "d/speedrun.json"
    assert draw(rows, tmp_path / "p").read_bytes().startswith(b"\x89PNG")


def test_leaderboard_of_nothing_or_of_something_else_says_so(tmp_path):
    with pytest.raises(UsageError, match=r"no speedrun\.json in"):
        read_rows(tmp_path)
    write(tmp_path, "a", 1.0, 1.0)
    (tmp_path / "a" / "speedrun.json").write_text('{"runs": [{"run_info": {"run": "a"}}]}')
    with pytest.raises(PalestraError, match="lacks 'seed'"):
        read_rows(tmp_path)


def test_frontier_is_what_no_other_beats_at_the_same_or_less_cost():
    """Against the definition, over random boards with ties."""
    draws = random.Random(0)
    for _ in range(200):
        rows = [
            {"training_hardware_flops": draws.randint(1, 6), "eval_bits_per_byte": draws.randint(1, 6)}
            for _ in range(draws.randint(1, 12))
        ]

        def beaten(row: dict[str, int], rows: list[dict[str, int]] = rows) -> bool:
            x, y = row.values()
            return any(a <= x and b <= y and (a, b) != (x, y) for a, b in (other.values() for other in rows))

        assert {tuple(row.values()) for row in frontier(rows)} == {tuple(r.values()) for r in rows if not beaten(r)}
        costs = [row["training_hardware_flops"] for row in frontier(rows)]
        assert costs == sorted(set(costs))


def test_published_pareto_points_are_their_own_frontier():
    """Marin's board: hardware FLOPs and bits per byte of C4."""
    published = [(1.43e18, 1.4019), (5.02e18, 1.2365), (8.26e18, 1.1861), (8.85e18, 1.1698), (1.22e19, 1.1564)]
    published += [(3.85e19, 1.0697), (4.08e19, 1.0616), (5.27e19, 1.0540), (1.37e20, 0.9990), (6.03e20, 0.9224)]
    rows = [{"training_hardware_flops": x, "eval_bits_per_byte": y} for x, y in published]
    moe = {"training_hardware_flops": 1.96e20, "eval_bits_per_byte": 1.1369}

    assert frontier([*rows, moe]) == rows


def test_author_without_a_name_is_gits_or_an_error(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(tmp_path / "config"))
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")
    with pytest.raises(UsageError, match="--author"):
        submit(None)
    (tmp_path / "config").write_text("[user]\nname = Grace\n")
    with pytest.raises(UsageError, match="and not both"):
        submit(None)


@pytest.mark.slow
def test_speedrun_commands_one_after_the_other(scratch: Scratch, lab: Lab):
    spec = scratch.spec("fast", base=lab.spec("pretrain"))
    told = scratch("speedrun", "info", spec, PALESTRA_CACHE=str(scratch.path / "cache"))
    assert told.returncode == 0, told.stderr
    assert "model FLOPs" in told.stdout
    assert not (scratch.path / "runs").exists()

    made = scratch("speedrun", "run", spec, "-q", "--author", "Ada", PALESTRA_CACHE=str(scratch.path / "cache"))
    assert made.returncode == 0, made.stderr
    assert Path(made.stdout.split()[-1]).name == "speedrun.json"

    board = scratch("speedrun", "leaderboard", "runs", "--json", "board.json")
    assert board.returncode == 0, board.stderr
    assert "Ada" in board.stdout
    (row,) = json.loads((scratch.path / "board.json").read_text())
    assert row["pareto"]
    assert math.isfinite(row["eval_bits_per_byte"])

    drawn = scratch("speedrun", "pareto", "runs", "--out", "front.png")
    assert drawn.returncode == 0, drawn.stderr
    assert (scratch.path / "front.png").exists()
