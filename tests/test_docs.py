"""The documentation tells the truth: it builds, its links lead somewhere, its commands and specs are real."""

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from typer.main import get_command

from palestra.api import check
from palestra.cli.main import app
from palestra.errors import UsageError

ROOT = Path(__file__).parent.parent
FENCE = re.compile(r"^(?P<indent> *)(?P<ticks>```+)(?P<info>.*)$")
TITLE = re.compile(r'title="([^"]+)"')
# What makes a spec small enough to be run by a test, by its kind.
SMALL = {
    "control": ["max_session=1", "train.frames=4096", "algorithm.minibatch=256", "eval.episodes=4", "every.eval=null"],
    "sft": ["train.steps=2", "train.batch=4", "eval.examples=4", "threads=1"],
    "posttrain": ["train.steps=1", "train.prompts_per_step=2", "eval.problems=2", "threads=1"],
}
# They need a network, a person or somebody to ask them.
NOT_RUN = ("model", "chat", "serve")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page: the language, the title if it has one, and the text without its indentation."""

    language: str
    title: str | None
    text: str


@dataclass(frozen=True)
class Page:
    """A Markdown file of the repository."""

    path: Path

    @cached_property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @cached_property
    def _split(self) -> tuple[list[Block], str]:
        blocks: list[Block] = []
        prose: list[str] = []
        lines = iter(self.text.splitlines())
        for line in lines:
            opening = FENCE.match(line)
            if opening is None:
                prose.append(line)
                continue
            inside = []
            for inner in lines:
                if inner.strip() == opening["ticks"]:
                    break
                inside.append(inner.removeprefix(opening["indent"]))
            language, title = opening["info"].partition(" ")[0], TITLE.search(opening["info"])
            blocks.append(Block(language, title and title[1], "\n".join(inside) + "\n"))
        return blocks, "\n".join(prose)

    @property
    def blocks(self) -> list[Block]:
        return self._split[0]

    @property
    def prose(self) -> str:
        return self._split[1]

    def commands(self) -> Iterator[list[str]]:
        """The arguments of each `palestra` command that the page shows, in blocks and in running text."""
        for block in self.blocks:
            if block.language not in ("bash", "console"):
                continue
            for line in block.text.splitlines():
                if block.language == "console" and not line.startswith("$ "):
                    continue  # what the command printed
                words = shlex.split(line.removeprefix("$ "), comments=True)
                if words[:1] == ["palestra"]:
                    yield [word for word in words[1:] if word != "&"]
        for span in re.findall(r"`palestra ([^`]+)`", self.prose):
            yield shlex.split(span)

    def write_specs(self, folder: Path) -> list[Path]:
        """Write the YAML blocks that have a title, which are the specs of the page, under their titles."""
        titled = [block for block in self.blocks if block.language == "yaml" and block.title is not None]
        for block in titled:
            (folder / str(block.title)).write_text(block.text)
        return [folder / str(block.title) for block in titled]


PAGES = [Page(path) for path in (*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md")))]
README = Page(ROOT / "README.md")
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.path.relative_to(ROOT)))


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder with the examples, to run commands in."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PALESTRA_CACHE", str(tmp_path / "cache"))
    return tmp_path


def parsed(arguments: list[str]) -> tuple[str, dict[str, Any]]:
    """The command and its parameters; raises a usage error where there is no such command or option."""
    root: Any = get_command(app)
    first = next((i for i, word in enumerate(arguments) if not word.startswith("-")), len(arguments))
    try:
        context = root.make_context("palestra", arguments[: first + 1])
    except typer.Exit:  # --help
        return "", {}
    if first == len(arguments):
        return "", context.params
    name, rest = arguments[first], arguments[first + 1 :]
    command: Any = root.get_command(context, name)
    assert command is not None, f"there is no command {name!r}"
    if hasattr(command, "list_commands"):  # `model fetch`
        group = command.make_context(name, rest, parent=context)
        command, rest = command.get_command(group, rest[0]), rest[1:]
        assert command is not None, f"there is no command {' '.join(arguments)!r}"
    return name, command.make_context(name, rest, parent=context).params


def pairs(params: dict[str, Any]) -> dict[str, str]:
    return dict(text.split("=", 1) for text in params.get("set_") or [])


def test_site_strict_build_gives_no_warning(tmp_path: Path) -> None:
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert built.returncode == 0, built.stderr
    assert not [line for line in built.stderr.splitlines() if line.startswith("WARNING")]
    fetched = re.compile(r'<(?:script[^>]* src|link[^>]* rel="stylesheet"[^>]* href)="?https?://')
    for html in (tmp_path / "site").rglob("*.html"):
        assert not fetched.search(html.read_text(encoding="utf-8")), f"{html.name} fetches from elsewhere"


def test_reference_pages_and_schema_are_up_to_date() -> None:
    done = subprocess.run([sys.executable, "docs/generate.py", "--check"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@each_page
def test_commands_on_page_parse_and_their_specs_load(page: Page, scratch: Path) -> None:
    page.write_specs(scratch)
    for arguments in page.commands():
        name, params = parsed(arguments)
        spec = params.get("spec")
        if name not in ("check", "train") or spec is None or "=" in spec:
            continue
        file = spec.partition(":")[0]
        if (scratch / file).exists():
            check(spec, variables=pairs(params), overrides=params.get("overrides") or [])
        elif file.startswith("examples/"):
            assert f"Write `{file}`" in page.text, f"{file} does not exist"


@each_page
def test_yaml_with_title_on_page_is_a_valid_spec(page: Page, scratch: Path) -> None:
    variables: dict[str, str] = {}
    for arguments in page.commands():
        variables |= pairs(parsed(arguments)[1])
    for path in page.write_specs(scratch):
        data = yaml.safe_load(path.read_text())
        named = [""] if {"kind", "extends"} & data.keys() else [f":{name}" for name in data if not name.startswith("_")]
        for name in named:
            try:
                check(f"{path.name}{name}")
            except UsageError as error:
                if "variables without a value" not in str(error):
                    raise
                check(f"{path.name}{name}", variables=variables)


@each_page
def test_relative_links_on_page_resolve(page: Page) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.prose):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, anchor = target.partition("#")
        path = (page.path.parent / file) if file else page.path
        assert path.exists(), f"{page.path.name} links to {target}"
        if anchor:
            headings = re.findall(r"^#+ (.+)$", Page(path).prose, re.MULTILINE)
            slugs = [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]
            assert anchor in slugs, f"{page.path.name} links to {target}"


def test_readme_commands_in_order_really_run(scratch: Path, capsys: pytest.CaptureFixture[str]) -> None:
    README.write_specs(scratch)
    assert "\npython examples/lm/make_data.py data\n" in README.text
    subprocess.run([sys.executable, "examples/lm/make_data.py", "data"], check=True)
    # What `make quickstart` does, which has its own test.
    subprocess.run([sys.executable, "examples/quickstart/teacher.py"], check=True)
    for kind, spec in (("sft", "sft"), ("posttrain", "grpo")):
        app(["train", f"examples/quickstart/{spec}.yaml", "--quiet", *SMALL[kind]], standalone_mode=False)
    ran: dict[str, int] = {}
    for arguments in README.commands():
        name, params = parsed(arguments)
        about = [str(value) for value in params.values() if isinstance(value, str)] + list(params.get("run") or [])
        about += pairs(params).values()
        if name in NOT_RUN or any(word.isupper() or word == "bad.yaml" for word in about):
            continue  # a placeholder, and a file that is shown as wrong
        if name == "train" and params["resume"] is None:
            arguments = [*arguments, "--quiet", *SMALL[check(params["spec"]).spec.kind]]
        app(arguments, standalone_mode=False)
        ran[name] = ran.get(name, 0) + 1
    assert ran.keys() >= {"check", "train", "runs", "plot"}
    assert ran["train"] >= 4  # three new runs, one resumed
    assert "done" in capsys.readouterr().out


def test_readme_python_block_runs(scratch: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = next(block.text for block in README.blocks if block.language == "python")
    small = code.replace("max_session=2", "max_session=1, train__frames=4096, eval__episodes=4, quiet=True")
    assert small != code
    names: dict[str, Any] = {}
    exec(small, names)
    assert names["action"] in (0, 1)
    assert "done" in capsys.readouterr().out


def test_spec_in_readme_fits_in_twenty_lines() -> None:
    spec = next(block for block in README.blocks if block.title == "cartpole.yaml")
    assert len(spec.text.splitlines()) <= 20


def test_make_commands_in_readme_exist_in_makefile() -> None:
    code = "\n".join([block.text for block in README.blocks] + re.findall(r"`([^`]+)`", README.prose))
    shown = set(re.findall(r"^(?:\$ )?make ([a-z-]+)", code, re.MULTILINE))
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {"quickstart", "test"} <= shown <= targets


def test_package_map_in_readme_names_every_folder_and_file() -> None:
    block = next(block for block in README.blocks if block.text.startswith("palestra/\n"))
    shown: set[Path] = set()
    above: list[str] = []
    for line in block.text.splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        name = line.split()[0]
        above = [*above[:depth], name.rstrip("/")]
        shown.add(Path(*above))
    files = [path for kind in ("*.py", "*.cpp") for path in (ROOT / "palestra").rglob(kind)]
    files = [path for path in files if path.name != "__init__.py"]
    folders = [path.parent for path in (ROOT / "palestra").rglob("__init__.py")]
    assert shown == {path.relative_to(ROOT) for path in (*files, *folders)}


def test_pre_commit_hooks_are_all_local_and_of_the_system() -> None:
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    assert {repo["repo"] for repo in config["repos"]} == {"local"}
    assert {hook["language"] for repo in config["repos"] for hook in repo["hooks"]} == {"system"}
