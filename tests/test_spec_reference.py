"""The schema, the reference page and the generator of docs/reference."""

import importlib.util
import json
import sys
from enum import Enum
from pathlib import Path
from typing import Annotated

import jsonschema
import pytest
import typer
from example_specs import FILES, ROOT, specs_of

from palestra.spec.kinds import spec_type
from palestra.spec.load import load
from palestra.spec.model import plain
from palestra.spec.schema import json_schema
from palestra.spec.source import read_file
from palestra.spec.validate import models

VALID = {
    "kind": "control",
    "env": {"id": "CartPole-v1"},
    "algorithm": {"name": "ppo"},
    "train": {"frames": 1000},
}
VALIDATOR = jsonschema.Draft7Validator(json_schema())


def load_generator():
    spec = importlib.util.spec_from_file_location("docs_generate", ROOT / "docs/generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["docs_generate"] = module
    sys.path.insert(0, str(ROOT / "docs"))  # as where it is run as a script
    spec.loader.exec_module(module)
    return module


generate = load_generator()


# --- the schema


def test_schema_is_a_valid_schema_with_a_description_for_every_key():
    schema = json_schema()
    jsonschema.Draft7Validator.check_schema(schema)
    for name, definition in schema["$defs"].items():
        for key, value in definition.get("properties", {}).items():
            assert value.get("description"), f"{name}.{key}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_schema_accepts_every_example_as_written_and_in_full(path):
    VALIDATOR.validate(read_file(path).data)
    for source, variables in specs_of(path).items():
        VALIDATOR.validate(plain(load(source, variables=variables).spec))


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"algorithm": {"name": "ppo", "lr": "${lr}", "clip": {"shape": "linear", "start": 0.1}}},
        {"net": {"hidden": ["${width}", 3], "activation": "${activation}"}},
        {"net": {"hidden": "${hidden}"}},
        {"every": {"checkpoint": ["5 minutes", "1e4 frames"], "eval": None, "log": "${log}"}},
        {"every": {"checkpoint": "1 hour"}},
        {"name": "ppo_${env}", "env": {"id": "${env}", "kwargs": {"a": [1, {"b": None}]}}},
    ],
)
def test_schema_accepts_what_loading_accepts(change):
    VALIDATOR.validate(VALID | change)
    VALIDATOR.validate({"_anchors": {"anything": 1}, "one": VALID | change})


def test_schema_accepts_partial_specs_that_extend():
    VALIDATOR.validate({"extends": "base.yaml", "algorithm": {"lr": 1e-4}})
    VALIDATOR.validate({"extends": ["a.yaml", ":b"], "kind": "control"})
    VALIDATOR.validate({"one": {"extends": ":two", "seed": 3}})


@pytest.mark.parametrize(
    "bad",
    [
        {"env": {"id": "x", "nun_envs": 3}},
        {"gamma": 0.3},
        {"kind": "contrl"},
        {"env": {}},
        {"algorithm": {"lr": 1e-3}},
        {"algorithm": {"name": "ppo", "gamma": 2}},
        {"algorithm": {"name": "ppo", "epochs": 1.5}},
        {"every": {"eval": "5 minutes"}},
        {"net": {"hidden": [0]}},
        {"net": {"activation": "rleu"}},
        {"train": {"frames": "many"}},
        {"extends": 3},
    ],
)
def test_schema_refuses_what_loading_refuses(bad):
    assert not VALIDATOR.is_valid(VALID | bad)
    assert not VALIDATOR.is_valid({"one": VALID | bad})


@pytest.mark.parametrize("key", ["kind", "env", "algorithm", "train"])
def test_schema_refuses_a_whole_spec_without_a_required_key(key):
    partial = {name: value for name, value in VALID.items() if name != key}
    assert not VALIDATOR.is_valid({"one": partial})


def test_schema_defaults_are_written_as_in_a_spec():
    schema = json_schema()
    every = schema["$defs"]["ControlEvery"]["properties"]
    assert every["log"]["default"] == "1 step"
    assert every["checkpoint"]["default"] == ["5 minutes"]
    assert schema["$defs"]["PPOSpec"]["properties"]["lr"]["default"] == 3e-4


# --- the page


def test_reference_has_a_row_for_every_key_of_every_model():
    text = generate.reference_markdown()

    def check(model):
        meanings = model.descriptions()
        for name, field in model.model_fields.items():
            assert any(line.startswith(f"| `{name}` |") and meanings[name] in line for line in text.splitlines()), name
            for inner in models(field.annotation):
                check(inner)

    check(spec_type("control"))
    assert "### `algorithm` with `name: ppo`" in text
    assert "| `id` | text that is not empty | required | Gymnasium id" in text
    assert "| `adam_eps` | a number above 0 | `1.0e-05` |" in text


# --- the generator


class Mode(Enum):
    FAST = "fast"
    SLOW = "slow"


def tiny_app():
    app = typer.Typer(help="A tiny lab.")
    pipeline = typer.Typer(help="Steps.")
    app.add_typer(pipeline, name="pipeline")

    @app.command()
    def train(
        spec: Annotated[Path, typer.Argument(help="The spec | file.")],
        overrides: Annotated[list[str] | None, typer.Argument(help="Dotted overrides.")] = None,
        variables: Annotated[list[str] | None, typer.Option("-s", "--set", help="Fill a variable.")] = None,
        resume: Annotated[bool, typer.Option("--resume/--fresh", help="Go on.")] = False,
        seeds: Annotated[int, typer.Option(help="How many.")] = 3,
        mode: Annotated[Mode, typer.Option(help="How.")] = Mode.FAST,
        secret: Annotated[str, typer.Option(hidden=True)] = "x",
    ):
        """Train a spec.

        Until it is done.
        """

    @pipeline.command("run")
    def run_steps(name: str):
        """Run the steps."""

    @app.command(hidden=True)
    def hidden():
        """Not shown."""

    return app


def test_cli_page_shows_every_command_and_parameter():
    text = generate.cli_page(tiny_app(), "lab")
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in text.splitlines() if line[:1] == "|"]
    assert ["`OVERRIDES`", "text, repeatable", "", "Dotted overrides."] in rows
    assert ["`-s`, `--set`", "text, repeatable", "", "Fill a variable."] in rows
    assert ["`--resume`, `--fresh`", "flag", "", "Go on."] in rows
    assert ["`--seeds`", "a whole number", "`3`", "How many."] in rows
    assert ["`--mode`", "one of 'fast', 'slow'", "`fast`", "How."] in rows
    assert any(row[:3] == ["`SPEC`", "a path", "required"] and row[3].startswith(r"The spec \|") for row in rows)
    assert "Until it is done." in text
    assert [line for line in text.splitlines() if line.startswith("#")] == [
        "# Commands",
        "## lab",
        "### lab train",
        "### lab pipeline",
        "#### lab pipeline run",
    ]
    assert "secret" not in text
    assert "Not shown" not in text


def test_generator_writes_then_checks_and_names_what_is_stale(tmp_path, capsys):
    wanted = {"a.md": "# A\n", "b.json": "{}\n"}
    assert generate.main(["--check"], tmp_path / "new", wanted) == 1
    assert not (tmp_path / "new").exists()
    assert generate.main([], tmp_path / "new", wanted) == 0
    assert generate.main(["--check"], tmp_path / "new", wanted) == 0
    capsys.readouterr()
    (tmp_path / "new/b.json").write_text("{ }")
    assert generate.main(["--check"], tmp_path / "new", wanted) == 1
    message = capsys.readouterr().err
    assert "b.json is out of date" in message
    assert "a.md" not in message


def test_generated_pages_are_formatted_and_the_schema_reads_back():
    pages = generate.spec_pages()
    assert generate._formatted(pages["reference/spec.md"]) == pages["reference/spec.md"]
    assert json.loads(pages["reference/palestra.schema.json"]) == json_schema()
