import dataclasses
import datetime
import enum
import functools
import math
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pipeline_steps import linked, noop, number, total
from pydantic import BaseModel

from palestra.errors import UsageError
from palestra.pipeline import Execution, Output, Step, step
from palestra.pipeline.graph import Graph, plan
from palestra.pipeline.outputs import Outputs
from palestra.pipeline.step import execution_fields, filled, identity, lines, outputs, portable

KEYS = st.text(st.characters(exclude_characters="$"), max_size=5)
LITERALS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
VALUES = st.recursive(
    LITERALS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3), max_leaves=10
)


def anything(**config) -> None: ...


def made(config, name="made") -> Step:
    return Step(name, anything, config)


def address(target: Step) -> str:
    return Graph([target]).targets[0]


def backwards(value):
    if isinstance(value, dict):
        return {key: backwards(value[key]) for key in reversed(value)}
    return [backwards(item) for item in value] if isinstance(value, list) else value


def same(one, other) -> bool:
    """Equal literals of equal types; NaN is itself."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and repr(one) == repr(other)


@given(st.dictionaries(KEYS, VALUES, max_size=4))
def test_address_does_not_depend_on_the_order_of_keys(config):
    assert address(made(config)) == address(made(backwards(config)))


@given(VALUES, VALUES)
def test_address_of_two_configs_is_equal_only_where_every_literal_is(one, other):
    assert (address(made({"x": one})) == address(made({"x": other}))) == same(one, other)


@given(st.integers(), st.integers(1, 64), st.integers(1, 64))
def test_address_leaves_execution_fields_out(value, one, other):
    @dataclasses.dataclass
    class Config:
        value: int
        workers: Execution[int]

    addresses = {address(made(Config(value, workers))) for workers in (one, other)}
    assert len(addresses) == 1
    assert addresses != {address(made(Config(value + 1, one)))}


def test_address_leaves_execution_fields_of_functions_models_and_nested_configs_out():
    class Model(BaseModel):
        value: int
        workers: Execution[int] = 1

    def of(value, workers):
        return address(made({"nested": [Model(value=value, workers=workers)]}))

    assert of(1, 1) == of(1, 2) != of(2, 1)
    assert address(number(value=1, seconds=1.0)) == address(number(value=1, seconds=2.0)) != address(number(value=2))
    assert address(made(Model(value=1))) == address(made(Model(value=1, workers=9)))


def test_input_in_an_execution_field_is_refused():
    with pytest.raises(UsageError, match=r"number\.journal is marked Execution, .* the output of noop, "):
        Graph([number(value=1, journal=noop(index=1) / "x")])


def test_address_does_not_depend_on_the_prefix_or_the_process(tmp_path):
    graph = Graph([number(value=1)])
    assert {plan(graph, Outputs(tmp_path / name))[0].address for name in "ab"} == {"number-11187fc753"}


def test_address_changes_with_name_input_path_in_it_and_what_that_was_made_of():
    source, other = number(value=1), number(value=2)
    found = [
        total(parts=[source]),
        total(parts=[other]),
        total(parts=[source / "value.txt"]),
        total(parts=[source.unawaited()]),
        total(parts=[source]).named("sum"),
        total(parts=[total(parts=[source])]),
        total(parts=[total(parts=[other])]),
    ]
    assert len({address(each) for each in found}) == len(found)
    assert address(total(parts=[number(value=1)])) == address(total(parts=[source]))


def test_address_of_configs_of_two_classes_with_equal_fields_differs():
    @dataclasses.dataclass
    class Adam:
        lr: float

    @dataclasses.dataclass
    class Sgd:
        lr: float

    assert address(made({"optimizer": Adam(0.1)})) != address(made({"optimizer": Sgd(0.1)}))


class Color(enum.Enum):
    RED = "red"


class Both(enum.StrEnum):
    RED = "red"


class Pair(NamedTuple):
    one: object
    two: object


def test_address_takes_what_configs_are_made_of():
    plain = {
        "enum": Color.RED,
        "str_enum": Both.RED,
        "path": Path("a/b"),
        "date": datetime.date(2020, 1, 2),
        "delta": datetime.timedelta(seconds=3),
        "array": np.arange(3),
        "scalar": np.float32(0.5),
        "bytes": b"abc",
        "set": {3, 1, 2},
        "function": anything,
        "partial": functools.partial(anything, a=1),
        "class": Color,
        "nan": math.nan,
        "surrogate": "\ud800",
        "pair": Pair(1, 2),
    }
    assert address(made(plain)) == address(made(dict(plain)))
    for key, other in {
        "array": np.arange(4),
        "set": {1, 2},
        "bytes": b"abd",
        "partial": functools.partial(anything),
    }.items():
        assert address(made(plain)) != address(made(plain | {key: other}))


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (object(), "made.x.1: a object cannot be part of a step's address.*Execution"),
        (lambda: 0, "made.x.1: .*lambda.*define it at the top of a module"),
        ({"$step": 1}, r"'\$step' cannot be a key"),
        ({1: 1, "1": 2}, "two keys are the same"),
        ({number(value=1)}, "a set cannot hold outputs"),
        (frozenset({(number(value=1),)}), "a set cannot hold outputs"),
    ],
)
def test_address_of_what_has_no_form_of_its_own_is_refused_with_its_place(value, says):
    with pytest.raises(UsageError, match=says):
        address(made({"x": [0, value]}))


def test_lines_of_an_address_name_each_value_and_input():
    source = number(value=1)
    found = lines(identity(total(parts={"a": (source / "x", 2)}), address))
    assert found == {"name": "total", "parts.a.0": f"{address(source)}/x", "parts.a.1": "2"}


def test_outputs_are_found_and_filled_anywhere_tuples_too():
    @dataclasses.dataclass(frozen=True)
    class Inner:
        where: object

    class Model(BaseModel):
        model_config = {"arbitrary_types_allowed": True}
        where: object

    steps = [number(value=index) for index in range(7)]
    config = {
        "list": [steps[0]],
        "tuple": (steps[1], (steps[2] / "f",)),
        "named": Pair(steps[3], 1),
        "data": Inner({"deep": [steps[4]]}),
        "model": Model(where=steps[5]),
        "unawaited": steps[6].unawaited(),
        "plain": 3,
    }
    assert [output.step for output in outputs(config)] == steps
    result = filled(config, lambda output: f"{output.step.config['value']}/{output.path}")
    assert result["tuple"] == ("1/", ("2/f",))
    assert result["named"] == Pair("3/", 1)
    assert (result["data"].where, result["model"].where) == ({"deep": ["4/"]}, "5/")
    assert (result["list"], result["unawaited"], result["plain"]) == (["0/"], "6/", 3)
    node = Graph([made(config)]).nodes[address(made(config))]
    assert node.inputs == tuple(address(each) for each in steps[:6])
    assert node.unawaited == (address(steps[6]),)


def test_graph_of_a_chain_longer_than_the_stack_is_built():
    chain = number(value=0)
    for _ in range(3000):
        chain = total(parts=[chain])
    assert len(Graph([chain]).nodes) == 3001


def test_graph_merges_equal_steps_and_refuses_two_functions_under_one_name():
    graph = Graph([total(parts=[number(value=1), number(value=1)]), number(value=1)])
    assert len(graph.nodes) == 2
    with pytest.raises(UsageError, match="give them different names"):
        Graph([noop(index=1), Step("noop", anything, {"index": 1})])
    Graph([Step("a", functools.partial(anything, b=1)), Step("a", functools.partial(anything, b=1))])


def test_graph_of_a_cycle_is_refused():
    config: dict = {}
    first = made(config)
    config["x"] = made({"y": first}, "second")
    with pytest.raises(UsageError, match="made needs its own output, by way of second"):
        Graph([first])


@pytest.mark.parametrize("name", ["", "a b", "../a", "a//b", ".hidden", "a/.b", "x" * 121, "a\n", "a.partial-b"])
def test_step_with_a_name_that_cannot_be_a_folder_is_refused(name):
    with pytest.raises(UsageError, match="cannot name a step"):
        made({}, name)


@pytest.mark.parametrize("path", ["/etc", "../x", "a/../../b"])
def test_output_outside_of_a_step_is_refused(path):
    with pytest.raises(UsageError, match="not a path inside"):
        Output(number(value=1), path)


def test_step_maker_refuses_wrong_arguments_and_functions():
    with pytest.raises(UsageError, match=r"step number: .*'wrong'"):
        number(value=1, wrong=2)
    with pytest.raises(UsageError, match="must take `out`"):
        step(anything)

    def positional(out, /, *rest): ...

    with pytest.raises(UsageError, match="is not allowed"):
        step(positional)


def test_types_that_cannot_be_read_are_told():
    def broken(out, value: "Missing"): ...  # noqa: F821

    with pytest.raises(UsageError, match=r"types of .*broken cannot be resolved"):
        execution_fields({}, broken)


def test_function_of_a_module_travels_by_name_and_a_local_one_as_it_is():
    def local(out): ...

    assert portable(linked(index=0, inputs=[]).function) == "pipeline_steps:linked"
    assert portable(anything) == f"{__name__}:anything"
    assert portable(local) is local
