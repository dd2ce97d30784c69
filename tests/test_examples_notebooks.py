"""The example notebooks run from top to bottom, as a kernel would run them, and are kept without outputs."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ENVIRONMENT

NOTEBOOKS = Path(__file__).parent.parent / "examples" / "notebooks"
# Cells share one namespace, that of __main__, as in a kernel.
KERNEL = "import json, sys; [exec(compile(code, 'cell', 'exec'), globals()) for code in json.load(sys.stdin)]"


def execute(name: str, folder: Path, ending: str = "") -> str:
    """Run all code cells of a notebook in a process of its own, then `ending`; what that printed."""
    cells = json.loads((NOTEBOOKS / name).read_text())["cells"]
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells)
    codes = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    done = subprocess.run(
        [sys.executable, "-c", KERNEL],
        input=json.dumps([*codes, ending]),
        capture_output=True,
        text=True,
        cwd=folder,
        env=ENVIRONMENT | {"MPLBACKEND": "Agg"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_cartpole_notebook_learns_and_plots(tmp_path):
    pytest.importorskip("pandas")
    printed = execute("cartpole.ipynb", tmp_path, "print(best, run.state, steps)").split()
    assert float(printed[0]) > 40
    assert printed[1] == "done"


@pytest.mark.slow
def test_reward_function_notebook_learns_what_the_function_rewards(tmp_path):
    first, last = map(float, execute("reward_function.ipynb", tmp_path, "print(rewards[0], rewards[-1])").split())
    assert first < 0.5 < 0.9 < last
