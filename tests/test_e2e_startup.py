"""What a process pays before it works: torch's compiler stays out until something is compiled."""

import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ENVIRONMENT

# torch._dynamo and sympy take three times as long to import as torch does without them.
COMPILER = """
import sys
compiler = [name for name in ("torch._dynamo", "torch._inductor", "sympy") if name in sys.modules]
assert not compiler, compiler
"""
IMPORTS = """
import palestra.kinds.control, palestra.kinds.dpo, palestra.kinds.distill, palestra.kinds.evaluate
import palestra.kinds.posttrain, palestra.kinds.pretrain, palestra.kinds.serving
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
    command = [sys.executable, "-c", work + COMPILER]
    done = subprocess.run(command, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
