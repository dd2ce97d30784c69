"""Pipelines as files: what is wrong with one, what its steps are, and what their addresses count."""

import sys
from pathlib import Path

import pytest

from palestra.api import run as run_spec
from palestra.errors import UsageError
from palestra.pipeline import Execution, Step, step
from palestra.pipeline.form import load_pipeline
from palestra.pipeline.graph import Graph
from palestra.pipeline.outputs import Outputs
from palestra.pipeline.runner import run
from palestra.spec.load import load, resolved
from palestra.spec.model import plain, split
from palestra.spec.validate import SpecError

STEPS = """\
from pathlib import Path
from palestra.pipeline import Execution, Step, step

def write(out: Path, *, rows: int = 3, text: str = "a") -> None:
    (out / "rows.txt").write_text(f"{text}\\n" * rows)

@step(retries=4)
def join(out: Path, *, parts: list[Path], sizes: tuple[int, ...] = (1,), workers: Execution[int] = 1) -> None:
    assert isinstance(sizes, tuple) and all(isinstance(part, Path) for part in parts)
    (out / "all.txt").write_text("".join(part.read_text() for part in parts))

def chosen(*, long: bool) -> Step:
    return step(write)(rows=9 if long else 1)

def nothing(*, long: bool) -> int:
    return 1
"""
CONTROL = """\
kind: control
env: {id: CartPole-v1, num_envs: 2}
algorithm: {name: reinforce, lr: 1.0e-3}
train: {frames: 64}
every: {eval: null}
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a module of steps of its own, under a name that no other test has."""
    name = f"steps_{abs(hash(str(tmp_path)))}"
    (tmp_path / f"{name}.py").write_text(STEPS)
    (tmp_path / "control.yaml").write_text(CONTROL)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for known, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[known]


def written(folder: Path, text: str, name: str = "pipe.yaml") -> str:
    module = next(path.stem for path in folder.glob("steps_*.py"))
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text.replace("mine:", f"{module}:"))
    return str(path)


def addresses(source: str, *overrides: str) -> dict[str, str]:
    graph = Graph(load_pipeline(source, overrides=overrides).steps)
    return {node.step.name: node.address for node in graph.nodes.values()}


JOINED = """\
kind: pipeline
retries: 1
steps:
  all: {use: "mine:join", with: {parts: ["step:a/rows.txt", "step:in/b/rows.txt"], sizes: [1, 2]}}
  a: {use: "mine:write", with: {rows: 2}}
  in/b: {use: "mine:write", with: {text: b}, retries: 0}
"""


def test_steps_are_made_in_order_with_outputs_typed_arguments_and_retries(folder):
    pipeline = load_pipeline(written(folder, JOINED))
    assert (pipeline.name, pipeline.prefix) == ("pipe", "outputs")
    assert [one.name for one in pipeline.steps] == ["a", "in/b", "all"]
    a, b, joined = pipeline.steps
    assert [(part.step, part.path) for part in joined.config["parts"]] == [(a, "rows.txt"), (b, "rows.txt")]
    assert joined.config["sizes"] == (1, 2)
    assert [one.retries for one in pipeline.steps] == [1, 0, 1]
    outputs = Outputs(folder / "out")
    run(pipeline.steps, outputs)
    graph = Graph(pipeline.steps)
    assert (outputs.path(graph.address(joined)) / "all.txt").read_text() == "a\na\nb\nb\nb\n"


def test_name_with_slashes_is_referred_to_by_the_longest_step_that_fits(folder):
    text = JOINED + '  in: {use: "mine:write"}\n  last: {use: "mine:join", with: {parts: ["step:in/rows.txt"]}}\n'
    *_, last = sorted(load_pipeline(written(folder, text)).steps, key=lambda one: one.name == "last")
    assert last.config["parts"][0].step.name == "in"


WRONG = """\
kind: pipeline
prefx: out
steps:
  a:
    use: mine:write
    with: {row: 2, text: 5}
  b: {use: filtr}
  c:
    use: mine:join
    with: {parts: ["step:a/rows.txt", "step:aa/x"]}
  d:
    spec: control.yaml
    set: {algorithm.lr: fast, train.framez: 2}
  e: {use: mine:absent}
  f: {spec: {kind: control}, use: mine:write}
  g: {use: mine:join, with: {parts: ["step:g/x"]}}
  h: {use: mine:join}
  "i i": {use: mine:write}
  j: {spec: {kind: pipeline, steps: {}}}
"""


def test_all_problems_come_at_once_with_their_lines(folder):
    with pytest.raises(SpecError) as caught:
        load(written(folder, WRONG.replace("prefx: out\n", "prefix: out\n")))
    found = {
        (problem.path, int(problem.origin.where.rpartition(":")[2])): problem.reason
        for problem in caught.value.problems
    }
    assert {where: reason[:24] for where, reason in found.items()} == {
        ("steps.a.with.row", 6): "unknown argument of writ",
        ("steps.a.with.text", 6): "expected text, got 5",
        ("steps.b.use", 7): "no built-in step 'filtr'",
        ("steps.c.with.parts.1", 10): "'step:aa/x' does not nam",
        ("steps.d.spec.algorithm.lr", 13): found["steps.d.spec.algorithm.lr", 13][:24],
        ("steps.d.spec.train.framez", 13): "unknown key. Did you mea",
        ("steps.e.use", 14): found["steps.e.use", 14][:24],
        ("steps.f", 15): "expected either `use`, a",
        ("steps.g.with.parts.0", 16): "'step:g/x' is its own ou",
        ("steps.h.with", 17): "missing 'parts'; expecte",
        ("steps.i i", 18): "expected a name of lette",
        ("steps.j.spec.kind", 19): "a pipeline cannot be a s",
    }
    assert "Did you mean 'rows'" in found["steps.a.with.row", 6]
    assert "Did you mean 'step:a'" in found["steps.c.with.parts.1", 10]
    assert "Did you mean 'filter'" in found["steps.b.use", 7]


def test_unknown_key_of_the_pipeline_is_an_error_that_names_the_nearest(folder):
    with pytest.raises(SpecError, match=r"prefx: unknown key\. Did you mean 'prefix'"):
        load(written(folder, WRONG))


def test_circle_of_steps_is_an_error_that_shows_it(folder):
    text = JOINED + (
        '  x: {use: "mine:join", with: {parts: ["step:z"]}}\n'
        '  y: {use: "mine:join", with: {parts: ["step:x"]}}\n'
        '  z: {use: "mine:join", with: {parts: ["step:y"]}}\n'
    )
    with pytest.raises(SpecError, match="in a circle") as caught:
        load(written(folder, text))
    circle = caught.value.problems[0].reason.rpartition(": ")[2].split(" → ")
    assert circle[0] == circle[-1]
    assert {*circle} == {"x", "y", "z"}


def test_function_that_makes_a_step_decides_which(folder):
    text = 'kind: pipeline\nsteps:\n  a: {use: "mine:chosen", with: {long: true}}\n'
    (made,) = load_pipeline(written(folder, text)).steps
    assert (made.name, made.config["rows"]) == ("a", 9)
    with pytest.raises(UsageError, match="neither takes `out`"):
        load_pipeline(written(folder, text.replace("chosen", "nothing")))


SPECS = """\
kind: pipeline
steps:
  first:
    spec: ../control.yaml
    set: {train.frames: "${frames}"}
  second:
    spec: {extends: ../control.yaml, algorithm: {gamma: 0.9}}
    set: {hooks: ["json:dumps"]}
"""


def test_spec_files_are_seen_from_the_pipeline_and_changed_by_set_variables_and_overrides(folder):
    source = written(folder, SPECS, "below/pipe.yaml")
    loaded = load(source, variables={"frames": "128"}, overrides=["steps.second.spec.seed=5"])
    first, second = (loaded.data["steps"][name]["spec"] for name in ("first", "second"))
    assert (first["name"], first["train"]["frames"], second["algorithm"]["gamma"]) == ("first", 128, 0.9)
    assert (second["name"], second["seed"]) == ("second", 5)
    assert loaded.origin("steps.first.spec.algorithm.lr").endswith("control.yaml:3")
    assert loaded.origin("steps.second.spec.hooks").endswith("pipe.yaml:8")
    assert loaded.origin("steps.second.spec.algorithm.gamma").endswith("pipe.yaml:7")
    again = load(loaded.spec)
    assert again.spec == loaded.spec


def test_spec_file_that_is_not_there_is_an_error_with_the_line(folder):
    with pytest.raises(UsageError, match=r"pipe\.yaml:3: steps\.a\.spec names .*nowhere\.yaml"):
        load(written(folder, "kind: pipeline\nsteps:\n  a: {spec: nowhere.yaml}\n"))


CHAIN = """\
kind: pipeline
steps:
  data: {use: "mine:write"}
  first: {spec: control.yaml}
  other: {spec: control.yaml, set: {seed: 3}}
  after: {use: "mine:join", with: {parts: ["step:first/latest", "step:data/rows.txt"]}}
"""


@pytest.mark.parametrize(
    "override",
    ["device=cpu", "threads=1", "track.trace=false", "every.log=7 steps", "train.compile=off", "track.project=x"],
)
def test_execution_only_fields_of_a_spec_do_not_count(folder, override):
    source = written(folder, CHAIN)
    assert addresses(source, f"steps.first.spec.{override}") == addresses(source)


@pytest.mark.parametrize(
    "override", ["algorithm.lr=2e-3", "seed=1", "train.frames=128", "max_session=2", "env.num_envs=4"]
)
def test_any_other_field_changes_the_step_and_those_after_it_only(folder, override):
    source = written(folder, CHAIN)
    before, after = addresses(source), addresses(source, f"steps.first.spec.{override}")
    assert {name for name in before if before[name] != after[name]} == {"first", "after"}


def test_null_counts_where_it_is_not_the_default_and_new_optional_fields_change_nothing(folder):
    source = written(folder, CHAIN)
    text = Path(source).read_text()
    Path(source).write_text(text.replace("{seed: 3}", "{every.eval: 9 steps}"))
    assert addresses(source)["other"] != addresses(source, "steps.other.spec.every.eval=null")["other"]
    (first,) = (one for one in load_pipeline(source).steps if one.name == "first")
    assert ["every", "eval"] in first.config["unset"]
    assert "eval" not in first.config["spec"]["every"]  # a field that comes to be, null by default, is not there either


def test_spec_is_whole_again_after_it_was_taken_apart():
    data = {
        "kind": "pretrain",
        "name": "a",
        "model": {"tokenizer": "characters", "shape": {"layers": 1, "width": 8, "heads": 1, "mlp": 8, "context": 8}},
        "data": {"train": {"dotted.name": {"path": "x"}, "b": {"path": "y", "split": "z"}}, "context": 8},
        "train": {"steps": 2, "batch": 1},
        "every": {"eval": None},
    }
    whole = resolved(data)
    parts = split(whole, plain(whole))
    assert resolved(parts.joined()) == whole
    assert ["data", "train", "dotted.name", "split"] in parts.unset
    assert "device" in {path[0] for path, _ in parts.execution}
    assert resolved(parts.counted) != whole  # every.eval has a default


def test_prefix_and_retries_do_not_count(folder):
    source = written(folder, CHAIN)
    assert addresses(source, "prefix=elsewhere", "retries=7") == addresses(source)


PYTHON = """\
from pathlib import Path
from palestra.pipeline import step

@step
def numbers(out: Path, *, count: int) -> None:
    (out / "n").write_text(str(count))

def pipeline(count: int = 2) -> list:
    return [numbers(count=count)]

single = numbers(count=8)
"""


def test_python_file_makes_steps_by_its_function_by_name_or_at_its_top(folder):
    path = folder / "made_in_python.py"
    path.write_text(PYTHON)
    assert [one.config["count"] for one in load_pipeline(str(path)).steps] == [2]
    assert [one.config["count"] for one in load_pipeline(str(path), variables={"count": "5"}).steps] == [5]
    assert [one.config["count"] for one in load_pipeline(f"{path}:single").steps] == [8]
    path.write_text(PYTHON.partition("def pipeline")[0] + "a, b = numbers(count=1), numbers(count=2)\n")
    pipeline = load_pipeline(str(path))
    assert (pipeline.name, [one.config["count"] for one in pipeline.steps]) == ("made_in_python", [1, 2])
    outputs = Outputs(folder / "out")
    assert len(run(pipeline.steps, outputs).ran) == 2


@pytest.mark.parametrize(
    ("text", "name", "variables", "overrides", "said"),
    [
        (PYTHON, ":absent", {}, [], "has no 'absent'"),
        (PYTHON, "", {"size": "1"}, [], "unexpected keyword argument 'size'"),
        (PYTHON, "", {}, ["a.b=1"], "without keys to override"),
        ("x = 1\n", "", {}, [], "defines no steps"),
        ("x = 1\n", ":x", {}, [], "defines no steps"),
        ("x = 1\n", "", {"n": "1"}, [], "no `def pipeline"),
    ],
)
def test_python_file_that_makes_no_steps_is_an_error(folder, text, name, variables, overrides, said):
    path = folder / "wrong_python.py"
    path.write_text(text)
    with pytest.raises(UsageError, match=said):
        load_pipeline(f"{path}{name}", variables=variables, overrides=overrides)


def test_training_a_pipeline_and_piping_a_training_name_the_right_command(folder):
    with pytest.raises(UsageError, match="palestra pipeline run"):
        run_spec(written(folder, CHAIN), root=folder / "runs")
    with pytest.raises(UsageError, match=r"palestra train control\.yaml"):
        load_pipeline("control.yaml")
    assert not (folder / "runs").exists()


def test_execution_fields_of_own_functions_do_not_count(folder):
    source = written(folder, JOINED)
    text = Path(source).read_text().replace("sizes: [1, 2]", "sizes: [1, 2], workers: 9")
    Path(source).write_text(text)
    assert addresses(source) == addresses(written(folder, JOINED))


def test_step_and_execution_come_from_one_place():
    from palestra.spec.model import Execution as Marked

    assert Marked is Execution
    assert step(lambda out, a: None, name="x")(a=1).name == Step("x", print).name
