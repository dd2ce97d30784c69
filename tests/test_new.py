"""First contact: `palestra new` in an empty folder, the public names, and what a wheel holds."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml
from example_specs import FILES, ROOT, VARIABLES, specs_of

import palestra
from palestra.api import check
from palestra.cli.examples import STARTERS, examples, folder, summary, write_example
from palestra.cli.main import app
from palestra.errors import UsageError
from palestra.spec.kinds import KINDS


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to work in."""
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    return tmp_path / "empty"


@pytest.mark.parametrize("name", [*STARTERS, *examples()])
def test_new_writes_every_kind_and_example_as_a_valid_spec_with_all_that_it_names(name: str, empty: Path) -> None:
    written = write_example(name, Path())
    assert written[0].suffix == ".yaml"
    for path in written:
        text = path.read_text()
        assert "examples/" not in text
        assert "examples." not in text
        for word in text.replace("'", " ").replace('"', " ").split():
            if word.endswith((".py", ".yaml")) and word.partition("/")[0] == word and not word.startswith("*"):
                assert Path(word).exists(), f"{path} names {word}"
        if path.suffix == ".yaml":
            for source, variables in specs_of(path).items():
                check(source, variables=variables or VARIABLES.get(Path(source).name, {}))


def test_every_kind_has_a_starter_and_every_example_a_summary() -> None:
    assert STARTERS.keys() == KINDS.keys()
    for kind, name in STARTERS.items():
        assert yaml.safe_load((folder() / f"{name}.yaml").read_text())["kind"] == kind
    assert [name for name in examples() if len(summary(name)) < 8] == []
    assert len(examples()) == len(FILES)


def test_new_command_prints_the_commands_to_begin_with(empty: Path, capsys: pytest.CaptureFixture[str]) -> None:
    app(["new", "sft", "--to", "words", "--schema"], standalone_mode=False)
    out = capsys.readouterr().out
    assert "  python words/make_data.py data && palestra train words/sft.yaml\n" in out
    assert (empty / "words/sft.yaml").read_text().startswith("# yaml-language-server: $schema=palestra.schema.json\n")
    assert (empty / "words/palestra.schema.json").exists()
    app(["new", "--list"], standalone_mode=False)
    out = capsys.readouterr().out
    assert all(name in out for name in (*STARTERS, *examples()))


def test_new_what_it_wrote_runs_in_an_empty_folder(empty: Path) -> None:
    write_example("sft", Path())
    subprocess.run([sys.executable, "make_data.py", "data"], check=True)
    app(["train", "sft.yaml", "--quiet", "train.steps=2", "train.batch=4", "threads=1"], standalone_mode=False)
    assert palestra.open_run("words_sft").state == "done"


def test_new_keeps_a_file_that_was_changed_and_names_the_nearest(empty: Path) -> None:
    write_example("control", Path())
    write_example("control", Path())  # the same again
    Path("ppo_cartpole_fast.yaml").write_text("kind: control\n")
    with pytest.raises(UsageError, match=r"ppo_cartpole_fast\.yaml exists and differs"):
        write_example("control", Path())
    assert Path("ppo_cartpole_fast.yaml").read_text() == "kind: control\n"
    with pytest.raises(UsageError, match=r"no kind or example 'posttrian'. Did you mean 'posttrain'\?"):
        write_example("posttrian", Path())


def test_wheel_holds_examples_schema_and_type_marker(tmp_path: Path) -> None:
    pytest.importorskip("hatchling")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    names = set(zipfile.ZipFile(next(tmp_path.glob("*.whl"))).namelist())
    assert {"palestra/py.typed", "palestra/palestra.schema.json", "palestra/examples/lm/make_data.py"} <= names
    assert {f"palestra/examples/{name}.yaml" for name in examples()} <= names
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        wheel.extractall(tmp_path / "site")
    # As installed: nothing of the checkout is on the path.
    code = "import palestra; from palestra.cli.main import app; print(palestra.__file__); app(['new', 'posttrain'])"
    environment = {"PYTHONPATH": f"{tmp_path / 'site'}"}
    (tmp_path / "work").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path / "work", env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(tmp_path / "site"))
    assert sorted(path.name for path in (tmp_path / "work").iterdir()) == ["grpo.yaml", "sft.yaml", "teacher.py"]


def test_public_names_are_listed_and_exist() -> None:
    assert set(palestra.__all__) <= set(dir(palestra))
    code = "import palestra; print([n for n in palestra.__all__ if not callable(getattr(palestra, n))])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr


def test_evaluate_is_called_also_after_its_package_was_imported() -> None:
    code = (
        "import palestra, palestra.evaluate.records as outcomes\n"
        "assert outcomes.__name__ == 'palestra.evaluate.records' and palestra.evaluate.records is outcomes\n"
        "try: palestra.evaluate('nothing', tasks=['nothing'])\n"
        "except palestra.errors.UsageError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "unknown task 'nothing'" in done.stdout, done.stderr
