"""What a process pays before it works: a first line at once, and torch's compiler only where something is compiled."""

import subprocess
import sys
from pathlib import Path

import pytest
import zygote
from conftest import ENVIRONMENT
from posttrain_lab import save_model

# torch._dynamo and sympy take three times as long to import as torch does without them.
COMPILER = """
import sys
compiler = [name for name in ("torch._dynamo", "torch._inductor", "sympy") if name in sys.modules]
assert not compiler, compiler
"""
IMPORTS = """
import palestra.kinds.control, palestra.kinds.lm, palestra.kinds.distill, palestra.kinds.evaluate
import palestra.kinds.posttrain, palestra.kinds.serving
"""
LANGUAGE = """
from pathlib import Path
from posttrain_lab import Lab
Lab(Path.cwd()).run(train__steps=1, optim__name="adamw")
"""
CONTROL = """
import palestra
from conftest import SHORT
palestra.run({**SHORT, "train": {"frames": 256}}, quiet=True)
"""


@pytest.mark.parametrize("work", [IMPORTS, LANGUAGE, CONTROL], ids=["imports", "posttrain", "control"])
def test_compiler_of_torch_is_not_imported_where_nothing_is_compiled(tmp_path: Path, work: str) -> None:
    """Nor by what it is forked from: a process that has imported torch, the command and two kinds."""
    command = [sys.executable, "-c", work + COMPILER]
    process = zygote.Popen(command, cwd=tmp_path, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True)
    said = process.communicate(timeout=240)[1]
    assert process.returncode == 0, said


# What was on standard error when torch began to be imported, which ends the process there.
AT_TORCH = """
import sys
class Finder:
    def find_spec(self, name, path, target=None):
        if name == "torch":
            raise SystemExit(77)
sys.meta_path.insert(0, Finder())
from palestra.cli import main
sys.argv[0] = "palestra"
main()
"""


@pytest.mark.parametrize("command", ["train", "dev", "eval", "chat", "serve"])
def test_first_line_says_what_is_loaded_before_torch_is(scratch, command: str) -> None:
    what = scratch.spec() if command in ("train", "dev") else str(save_model(scratch.path / "model"))
    more = ["--task", "arithmetic"] if command == "eval" else []
    done = subprocess.run(
        [sys.executable, "-c", AT_TORCH, command, what, *more],
        cwd=scratch.path, env=ENVIRONMENT, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (77, f"loading torch and {what} …\n")


def test_quiet_run_says_nothing(scratch) -> None:
    command = [sys.executable, "-c", AT_TORCH, "train", scratch.spec(), "--quiet"]
    done = subprocess.run(command, cwd=scratch.path, env=ENVIRONMENT, capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stderr) == (77, "")
