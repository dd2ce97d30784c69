"""`make quickstart`: what it promises, as a newcomer runs it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "examples" / "quickstart" / "run.py"


def quickstart(folder: Path, *args: str) -> dict:
    """Run it there; its result."""
    done = subprocess.run([sys.executable, str(SCRIPT), *args], cwd=folder, capture_output=True, text=True, check=True)
    assert "500 sums that it has never seen" in done.stdout
    (result,) = folder.glob("runs/sums_*/2*/result.json")
    assert (result.parent / "plots" / "learning_curve.png").exists()
    return json.loads(result.read_text())


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_quickstart_takes_held_out_sums_from_below_half_to_nine_in_ten(tmp_path):
    result = quickstart(tmp_path, "--seed", "0")
    assert result["before"] < 0.5
    assert result["after"] >= 0.9
    assert result["seed"] == 0
    assert not result["control"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_quickstart_with_rewards_dealt_out_at_random_learns_nothing(tmp_path):
    result = quickstart(tmp_path, "--control")
    assert abs(result["after"] - result["before"]) <= 0.05


def test_lessons_are_wrong_only_where_a_carry_was_forgotten(tmp_path):
    subprocess.run([sys.executable, str(SCRIPT.parent / "teacher.py"), str(tmp_path / "lessons.jsonl")], check=True)
    lessons = [json.loads(line) for line in (tmp_path / "lessons.jsonl").read_text().splitlines()]
    right = 0
    for lesson in lessons:
        a, b = lesson["prompt"].removesuffix("=").split("+")
        columns = "".join(str((int(x) + int(y)) % 10) for x, y in zip(a, b, strict=True)).lstrip("0") or "0"
        assert lesson["completion"] in (str(int(a) + int(b)), columns)
        right += lesson["completion"] == str(int(a) + int(b))
    assert 0.4 < right / len(lessons) < 0.6
