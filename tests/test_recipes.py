"""The recipes, followed to the letter: files as the pages give them, commands as the pages give them, nothing else.

A block belongs to the file that the line above it names, as in "In `doubles.py`:". Blocks of `bash` are run, in their
order and in a copy of what they need of the checkout, with two steps of training where a page trains.
"""

import ast
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import zygote
from conftest import COMMAND, ENVIRONMENT

ROOT = Path(__file__).parent.parent
RECIPES = ROOT / "docs" / "recipes"
BLOCK = re.compile(r"(?:^[^\n]*`(?P<file>[\w./]+)`:\n\n)?^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.M | re.S)
MODEL = "python examples/quickstart/teacher.py\npalestra train examples/quickstart/sft.yaml train.steps=2\n"
"""How every page gets the model that it starts from: run once for all of them."""
TESTS = ("tests/test_posttrain_magistral.py", "tests/test_posttrain_loss_reference.py")
"""Of the new preset: by hand, and against the formula of its paper."""


@dataclass(frozen=True)
class Followed:
    """A page after all of its commands have been run."""

    folder: Path
    said: tuple[str, ...]
    """What the commands of each block printed."""

    def session(self, name: str) -> Path:
        """The only session of the run of this name."""
        (session,) = self.folder.glob(f"runs/{name}/*/sessions/0")
        return session

    def rows(self, name: str) -> list[dict[str, Any]]:
        """The metrics of the run of this name."""
        return [json.loads(line) for line in (self.session(name) / "metrics.jsonl").read_text().splitlines()]

    def groups(self, name: str) -> list[dict[str, Any]]:
        """The rollouts of the run of this name."""
        return [json.loads(line) for line in (self.session(name) / "rollouts.jsonl").read_text().splitlines()]


def blocks(page: Path) -> Iterator[tuple[str | None, str, str]]:
    """File, language and text of every block of a page, in their order."""
    for found in BLOCK.finditer(page.read_text(encoding="utf-8")):
        yield found["file"], found["language"], found["text"]


def run(commands: str, folder: Path) -> str:
    """Run a block of commands in a folder; what they print.

    Where the folder is a whole checkout, its own `palestra` is run; else the installed one, each command in a process
    forked from one that has imported it.
    """
    environment = ENVIRONMENT | {"PALESTRA_CACHE": str(folder / "cache")}
    if (folder / "palestra").exists():
        environment["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        environment["PYTHONPATH"] = str(folder)  # before what is installed
        return said_by(["bash", "-e", "-c", commands], folder, environment)
    return "".join(said_by(forked(shlex.split(line)), folder, environment) for line in commands.splitlines())


def forked(words: list[str]) -> list[str]:
    """A command of a page in the form that the zygote forks; `python -m pytest` stays as it is."""
    match words:
        case ["palestra", *arguments]:
            return [COMMAND, *arguments]
        case ["python", "-m", "palestra", *arguments]:
            return [sys.executable, "-c", "from palestra.cli import main; main()", *arguments]
        case ["python", file, *arguments] if file.endswith(".py"):
            code = f"import runpy; runpy.run_path({file!r}, run_name='__main__')"
            return [sys.executable, "-c", code, *arguments]
        case ["python", *arguments]:
            return [sys.executable, *arguments]
    raise AssertionError(f"a page has a command of another kind: {words}")


def said_by(command: list[str], folder: Path, environment: dict[str, str]) -> str:
    """What a command prints that must end well."""
    pipe = subprocess.PIPE
    process = zygote.Popen(
        command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True
    )
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, f"{command}\n{out[-3000:]}\n{err[-3000:]}"
    return out


@pytest.fixture(scope="module")
def with_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the examples and the model that the pages start from."""
    folder = tmp_path_factory.mktemp("with_model")
    shutil.copytree(ROOT / "examples", folder / "examples")
    run(MODEL, folder)
    return folder


@pytest.fixture
def follow(with_model: Path, tmp_path: Path) -> Callable[..., Followed]:
    """Does what a page says, with copies of the parts of the checkout that it changes."""

    def followed(name: str, *parts: str) -> Followed:
        folder, said = shutil.copytree(with_model, tmp_path / name), []
        for part in parts:
            (shutil.copytree if (ROOT / part).is_dir() else shutil.copy)(ROOT / part, folder / part)
        whole = [text for _, language, text in blocks(RECIPES / f"{name}.md") if language == "bash"]
        assert any(text.startswith(MODEL) for text in whole), "the page makes no model, or makes it another way"
        for file, language, text in blocks(RECIPES / f"{name}.md"):
            if file is not None:
                (folder / file).write_text(text)
            elif language == "bash" and (commands := text.removeprefix(MODEL)):
                said.append(run(commands, folder))
        return Followed(folder, tuple(said))

    return followed


def text_of(page: str, file: str) -> str:
    """What a page writes into a file."""
    (found,) = [text for name, _, text in blocks(RECIPES / f"{page}.md") if name == file]
    return found


def code_lines(text: str) -> int:
    """How many lines of a Python file are neither empty, nor imports, nor docstrings."""
    left_out: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr | ast.Import | ast.ImportFrom):
            left_out |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return sum(bool(line.strip()) and number not in left_out for number, line in enumerate(text.splitlines(), 1))


def test_recipes_code_is_as_short_as_promised() -> None:
    assert code_lines(text_of("add_task", "doubles.py")) <= 30
    assert len(text_of("add_reward", "rewards.py").splitlines()) <= 15
    assert len(text_of("add_workflow", "looks.py").splitlines()) < 60


@pytest.mark.parametrize("file", ["magistral.diff", "reference.diff"])
def test_add_preset_diff_fits_the_files_as_they_are(file: str) -> None:
    patch = text_of("add_preset", file)
    done = subprocess.run(["git", "apply", "--check", "-"], cwd=ROOT, input=patch, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_add_task_followed_trains_on_the_new_task(follow: Callable[..., Followed]) -> None:
    page = follow("add_task")
    assert "6 passed" in page.said[0]
    assert "Doubles/train/" in page.said[1]
    problems = [group["problem"] for group in page.groups("doubles")]
    assert len({problem["id"] for problem in problems}) == 16  # two steps of eight prompts, each once
    for problem in problems:
        number = int(problem["id"].removeprefix("Doubles/train/"))
        assert number % 5 != 0
        assert (problem["prompt"], problem["row"]) == (f"{number}+{number}=", {"answer": str(2 * number)})
    rows = page.rows("doubles")
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert "eval/Doubles/accuracy" in rows[-1]


@pytest.mark.slow
def test_add_reward_followed_trains_on_the_number_the_function_gives(follow: Callable[..., Followed]) -> None:
    page = follow("add_reward")
    shown = next(text for _, language, text in blocks(RECIPES / "add_reward.md") if language == "text")
    assert page.said[0] == shown
    close = runpy.run_path(str(page.folder / "rewards.py"))["close"]
    answers = [(group, one) for group in page.groups("close") for one in group["trajectories"]]
    assert len(answers) == 2 * 8 * 4
    for group, one in answers:
        verdict = close(one["completion"], group["problem"]["row"]["answer"])
        assert (one["reward"], one["verdict"]["status"]) == (verdict.score, verdict.status)
    assert any(0 < one["reward"] < 1 for _, one in answers)
    last = page.rows("close")[-1]
    assert last["part/off"] > 0
    assert last["eval/arithmetic/score"] == last["eval/accuracy"]  # the task's own judge knows no half-right sums


@pytest.mark.slow
def test_add_workflow_followed_asks_twice_and_trains_what_was_drawn(follow: Callable[..., Followed]) -> None:
    page = follow("add_workflow")
    answers = [one for group in page.groups("second_look") for one in group["trajectories"]]
    assert len(answers) == 2 * 8 * 4
    for one in answers:
        (begin, end), (again, last) = one["turns"]
        assert one["tokens"][end:again] == one["tokens"][:begin]  # the question, a second time
        drawn = [begin <= place < end or again <= place < last for place in range(len(one["tokens"]))]
        assert [bool(used) for used in one["loss_mask"]] == drawn
        assert last == len(one["tokens"])
    assert page.rows("second_look")[-1]["turns"] == 2
    printed = page.said[-1].splitlines()
    assert len(printed) == 4
    assert re.match(r"\(\(6, \d+\), \(\d+, \d+\)\) \.{6}x+\.{6}x+ '", printed[0])


@pytest.mark.slow
def test_add_preset_followed_gives_a_preset_that_runs(follow: Callable[..., Followed]) -> None:
    page = follow("add_preset", "palestra", "docs", "tests", "README.md", "pyproject.toml")
    assert re.match(r"\.+ .*\n(1\d|[5-9]) passed", page.said[1])
    resolved = (page.session("magistral") / "spec.yaml").read_text()
    assert re.search(r"preset: magistral\n.*scale: advantage_std\n", resolved, re.S)
    assert page.rows("magistral")[-1]["step"] == 2
    assert "magistral" in (page.folder / "docs" / "reference" / "spec.md").read_text()
    # Its tests can fail: another scale is another algorithm.
    presets = page.folder / "palestra" / "spec" / "algorithm.py"
    presets.write_text(presets.read_text().replace('"scale": "advantage_std"', '"scale": "batch_std"'))
    with pytest.raises(AssertionError, match="5 failed"):
        run(f"python -m pytest -q {' '.join(TESTS)} -k magistral", page.folder)
