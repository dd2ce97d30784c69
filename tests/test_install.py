"""Every extra installs on every platform that the README names: resolved by uv for each, wheels only."""

import os
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
from conftest import fast_only

ROOT = Path(__file__).parents[1]
UV = Path(sys.executable).with_name("uv")
PLATFORMS = ("x86_64-manylinux_2_28", "aarch64-manylinux_2_28", "aarch64-apple-darwin")
PYTHONS = ("3.11.7", "3.12", "3.13")
# Published as source alone, for any platform; all but the C of Box2D and pycosat are plain Python.
FROM_SOURCE = (
    "antlr4-python3-runtime",
    "box2d-py",
    "cellpylib",
    "chess",
    "langdetect",
    "pwinput",
    "pycosat",
    "rouge-score",
    "sqlitedict",
    "word2number",
    "zss",
)


def resolve(tmp_path: Path, platform: str, python: str, *more: str) -> subprocess.CompletedProcess[str]:
    """Resolve all extras, and what else is asked for, for a platform; skips where no package index answers."""
    if not UV.exists():
        pytest.skip("uv is not installed beside this Python: `make test` installs it")
    overrides = tmp_path / "overrides.txt"
    overrides.write_text("".join(f"{name}; sys_platform == 'never'\n" for name in FROM_SOURCE))
    besides = tmp_path / "besides.in"
    besides.write_text("\n".join(more))
    out = tmp_path / "resolved.txt"
    result = subprocess.run(
        [
            *(UV, "pip", "compile", "pyproject.toml", besides, "--all-extras", "--quiet", "--python", sys.executable),
            *("--python-platform", platform, "--python-version", python, "--only-binary", ":all:"),
            *("--constraints", "constraints.txt", "--override", overrides, "--output-file", out),
        ],
        cwd=ROOT,
        # Wheels of torch for macOS begin with 14; a local build of torch is for one platform alone.
        env={key: value for key, value in os.environ.items() if key != "UV_FIND_LINKS"}
        | {"MACOSX_DEPLOYMENT_TARGET": "14.0", "UV_HTTP_TIMEOUT": "20"},
        capture_output=True,
        text=True,
    )
    if result.returncode == 2 and "fetch" in result.stderr:
        pytest.skip(f"no package index answers: {result.stderr.splitlines()[0]}")
    result.stdout = out.read_text() if out.exists() else ""
    return result


@pytest.mark.parametrize(
    ("platform", "python"), fast_only(product(PLATFORMS, PYTHONS), *zip(PLATFORMS[1:], PYTHONS[1:], strict=True))
)  # the first platform: the test below
def test_extras_resolve_to_wheels_on_platform(tmp_path: Path, platform: str, python: str) -> None:
    result = resolve(tmp_path, platform, python)
    assert result.returncode == 0, result.stderr
    assert "torch==" in result.stdout
    assert ("box2d==" in result.stdout) == (platform != "aarch64-manylinux_2_28")


def test_package_without_a_wheel_for_the_platform_is_seen_on_any_machine(tmp_path: Path) -> None:
    """What broke the install on Linux on ARM: the wheels of box2d are for other platforms alone."""
    assert resolve(tmp_path, "x86_64-manylinux_2_28", "3.12", "box2d==2.3.10").returncode == 0
    result = resolve(tmp_path, "aarch64-manylinux_2_28", "3.12", "box2d==2.3.10")
    assert result.returncode == 1
    assert "box2d==2.3.10 has no wheels with a matching platform tag" in result.stderr
