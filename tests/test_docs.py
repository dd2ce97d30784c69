"""The documentation tells the truth: it builds, its links lead somewhere, its commands and specs are real."""

import ast
import importlib
import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from typer.main import get_command

import palestra
from palestra.api import check
from palestra.cli.main import app
from palestra.errors import UsageError
from palestra.spec.algorithm import PRESETS
from palestra.spec.kinds import KINDS
from palestra.spec.kinds.control import AlgorithmSpec
from palestra.tasks.task import TASKS

ROOT = Path(__file__).parent.parent
FENCE = re.compile(r"^(?P<indent> *)(?P<ticks>```+)(?P<info>.*)$")
TITLE = re.compile(r'title="([^"]+)"')
# What makes a spec small enough to be run by a test, by its kind.
SMALL = {
    "control": ["max_session=1", "train.frames=4096", "algorithm.minibatch=256", "eval.episodes=4", "every.eval=null"],
    "pretrain": ["train.steps=2", "train.batch=4", "eval.examples=4", "threads=1", "train.precision=fp32"],
}
# They need a network, a person or minutes.
NOT_RUN = ("model", "chat", "serve", "view", "eval", "search", "pipeline", "import")
ALGORITHMS = {get_args(spec.model_fields["name"].annotation)[0] for spec in get_args(get_args(AlgorithmSpec)[0])}
EXTRAS = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])


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


COMMANDS: Any = get_command(app)
"""Made once: that takes longer than parsing all pages."""


def parsed(arguments: list[str]) -> tuple[str, dict[str, Any]]:
    """The command and its parameters; raises a usage error where there is no such command or option."""
    root = COMMANDS
    first = next((i for i, word in enumerate(arguments) if not word.startswith("-")), len(arguments))
    # Nothing is carried out: --help would exit, --install-completion would change the shell's start-up file.
    context = root.make_context("palestra", arguments[: first + 1], resilient_parsing=True)
    known = {option for parameter in root.get_params(context) for option in parameter.opts}
    assert known.issuperset(arguments[:first]), f"there is no option {arguments[0]}"
    if first == len(arguments):
        return "", context.params
    name, rest = arguments[first], arguments[first + 1 :]
    command: Any = root.get_command(context, name)
    assert command is not None, f"there is no command {name!r}"
    if hasattr(command, "list_commands") and rest:  # `model fetch`
        group = command.make_context(name, rest, parent=context)
        command, rest = command.get_command(group, rest[0]), rest[1:]
        assert command is not None, f"there is no command {' '.join(arguments)!r}"
    # A command that is only named, such as `palestra runs`, has no arguments to be checked.
    return name, command.make_context(name, rest, parent=context, resilient_parsing=not rest).params


def pairs(params: dict[str, Any]) -> dict[str, str]:
    return dict(text.split("=", 1) for text in params.get("variables") or [])


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
        text = html.read_text(encoding="utf-8")
        assert not fetched.search(text), f"{html.name} fetches from elsewhere"
        assert "$`" not in text, f"{html.name} has a formula that was not rendered"
    # What the search needs where there is no server: the index as a script, and the worker's replacement.
    assert (tmp_path / "site/search/search_index.js").read_text().startswith("var __index = ")
    assert "javascripts/iframe-worker.js" in (tmp_path / "site/index.html").read_text()


def test_reference_pages_and_schema_are_up_to_date(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(ROOT / "docs")
    code = importlib.import_module("generate").main(["--check"])
    assert code == 0, capsys.readouterr().err


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
    (scratch / "FILE.txt").write_text("Once upon a time there was a text. " * 100)
    ran: dict[str, int] = {}
    for arguments in README.commands():
        name, params = parsed(arguments)
        about = [str(value) for value in params.values() if isinstance(value, str)] + list(params.get("run") or [])
        if name in NOT_RUN or any(word.isupper() or word == "bad.yaml" for word in about):
            continue  # a placeholder, and a file that is shown as wrong
        if name == "train" and params["resume"] is None:
            loaded = check(params["spec"], variables=pairs(params))
            if "model" in loaded.data and "init" in loaded.data["model"]:
                continue  # it needs a model that is downloaded
            arguments = [*arguments, "--quiet", *SMALL[loaded.spec.kind]]
        app(arguments, standalone_mode=False)
        ran[name] = ran.get(name, 0) + 1
    assert ran.keys() >= {"new", "check", "train", "runs", "plot"}
    assert ran["train"] == 3  # control, pretraining, one resumed
    assert "done" in capsys.readouterr().out


def test_readme_sample_of_a_wrong_spec_is_what_check_prints(scratch: Path) -> None:
    lines = [
        "kind: control",
        "env: {id: CartPole-v1, num_env: 8}",
        "algorithm:",
        "  name: ppo",
        "  lr: fast",
        "  gamma: 0.98",
    ]
    (scratch / "bad.yaml").write_text("\n".join([*lines, "train: {frames: 1e5}", "every:", "  eval: 5 minutes"]))
    with pytest.raises(UsageError) as raised:
        check("bad.yaml")
    assert f"palestra: {raised.value}\n" in README.text


def test_readme_is_short_and_its_three_examples_have_eight_lines_at_most() -> None:
    assert len(README.text.splitlines()) <= 220
    examples = [block for block in README.blocks if block.title in ("cartpole.yaml", "gsm8k.yaml", "pretrain.yaml")]
    assert len(examples) == 3
    assert all(len(block.text.splitlines()) <= 8 for block in examples)


def test_readme_python_block_runs(scratch: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = next(block.text for block in README.blocks if block.language == "python")
    small = code.replace("max_session=2", "max_session=1, train__frames=4096, eval__episodes=4, quiet=True")
    assert small != code
    names: dict[str, Any] = {}
    exec(small, names)
    assert names["action"] in (0, 1)
    assert "done" in capsys.readouterr().out


def test_make_commands_in_readme_exist_in_makefile() -> None:
    code = "\n".join([block.text for block in README.blocks] + re.findall(r"`([^`]+)`", README.prose))
    shown = set(re.findall(r"^(?:\$ )?make ([a-z-]+)", code, re.MULTILINE))
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {"quickstart", "test"} <= shown <= targets


def test_architecture_page_names_every_package_and_file() -> None:
    text = Page(ROOT / "docs/architecture.md").text
    for section in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        package = ROOT / "palestra" / section.split()[0]
        if not package.is_dir():
            continue
        files = [path for kind in ("*.py", "*.cpp") for path in package.rglob(kind) if path.name != "__init__.py"]
        assert set(re.findall(r"^\| `([\w/]+\.\w+)`", section, re.MULTILINE)) == {
            path.relative_to(package).as_posix() for path in files
        }
    packages = {path.parent.name for path in (ROOT / "palestra").glob("*/__init__.py")}
    assert packages <= set(re.findall(r"^## (\w+)$", text, re.MULTILINE))


@pytest.mark.parametrize(("page", "names"), [("control", ALGORITHMS), ("posttrain", PRESETS)])
def test_algorithm_has_section_with_formula_that_renders(
    page: str, names: Collection[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(ROOT / "docs")
    render = importlib.import_module("mathml").on_page_markdown
    text = (ROOT / f"docs/algorithms/{page}.md").read_text()
    for name in names:
        section = re.search(rf"^## {name}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
        assert section is not None, f"no section on {name}"
        assert "```math" in section[1]
        shown = render(section[1])
        assert '<math xmlns="http://www.w3.org/1998/Math/MathML" display="block">' in shown
        assert "```math" not in shown
        leftover = re.search(r"<m[a-z]+>\\+[a-zA-Z]+</m", shown)
        assert leftover is None, f"{name}: {leftover and leftover[0]} was not understood"


def test_python_reference_has_every_public_name() -> None:
    text = (ROOT / "docs/reference/python.md").read_text()
    assert [name for name in palestra.__all__ if f"### `palestra.{name}`" not in text] == []


def test_versions_switcher_lists_the_newest_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "docs")
    versions = importlib.import_module("versions")
    for name in ("0.9", "0.10", "0.2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "index.html").write_text("")
    assert versions.write_index(tmp_path) == ["0.10", "0.9", "0.2"]
    rows = json.loads((tmp_path / "versions.json").read_text())
    assert rows[0] == {"version": "0.10", "title": "0.10", "aliases": ["latest"]}
    assert [row["aliases"] for row in rows[1:]] == [[], []]
    assert "url=0.10/" in (tmp_path / "index.html").read_text()
    with pytest.raises(SystemExit):
        versions.main(["--version", "../elsewhere"])


def test_home_page_lists_every_page_of_the_manual() -> None:
    home = (ROOT / "docs/index.md").read_text()
    manual = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")} - {"index.md"}
    assert manual - set(re.findall(r"\]\(([\w/]+\.md)\)", home)) == set()


@pytest.mark.parametrize(
    ("page", "names"),
    [
        ("docs/control.md", ALGORITHMS),
        ("docs/algorithms/control.md", ALGORITHMS),
        ("docs/algorithms/posttrain.md", PRESETS),
        ("docs/tasks.md", TASKS),
        ("docs/specs.md", KINDS),
        ("docs/getting_started.md", EXTRAS),
        ("README.md", EXTRAS - {"docs", "peers", "dev"}),
    ],
)
def test_page_names_all_that_there_is(page: str, names: Collection[str]) -> None:
    text = (ROOT / page).read_text()
    assert [name for name in names if f"`{name}`" not in text] == []


PACKAGES = {path.parent.name for path in (ROOT / "palestra").glob("*/__init__.py")}


def test_readme_and_agents_page_place_every_package_on_a_floor() -> None:
    floors = next(block.text for block in README.blocks if block.text.startswith("cli"))
    rows = re.findall(r"^\| `(\w+)` +\|", (ROOT / "AGENTS.md").read_text(), re.MULTILINE)
    assert PACKAGES - {word for line in floors.splitlines() for word in line[:32].split()} == set()
    assert PACKAGES - set(rows) == set()


def test_readme_table_names_every_control_algorithm_and_counts_the_presets() -> None:
    rows = {
        line.split("]")[0].lstrip("| ["): line.lower() for line in README.text.splitlines() if line.startswith("| [")
    }
    assert [name for name in ALGORITHMS if name not in rows["deep RL"]] == []
    assert f"{len(PRESETS)} presets" in rows["post-training"]


NAMED = re.compile(r"\bpalestra(?:\.[A-Za-z_]\w*)+")


def resolve(dotted: str) -> Any:
    """What a dotted name means: modules are imported, names read from them."""
    found: Any = importlib.import_module("palestra")
    for place, part in enumerate(dotted.split(".")[1:], 2):
        try:
            found = getattr(found, part)
        except AttributeError:
            found = importlib.import_module(".".join(dotted.split(".")[:place]))
    return found


@each_page
def test_python_on_page_compiles_and_its_palestra_names_exist(page: Page) -> None:
    code = [block.text for block in page.blocks if block.language == "python"]
    for text in code:
        compile(text, page.path.name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    spans = [span for span in re.findall(r"`([^`\n]+)`", page.prose) if "/" not in span and ".json" not in span]
    for text in (*code, *spans):
        for name in NAMED.findall(text):
            resolve(name)
        imports = (
            [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom)] if text in code else []
        )
        for node in imports:
            if (node.module or "").split(".")[0] == "palestra":
                assert [alias.name for alias in node.names if not hasattr(resolve(str(node.module)), alias.name)] == []


def test_pre_commit_hooks_are_all_local_and_of_the_system() -> None:
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    assert {repo["repo"] for repo in config["repos"]} == {"local"}
    assert {hook["language"] for repo in config["repos"] for hook in repo["hooks"]} == {"system"}
