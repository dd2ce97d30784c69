"""Every problem at once, each with its line, the value, what was expected and the nearest key."""

import copy
import re

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from palestra.errors import UsageError
from palestra.spec.kinds import _installed_kinds, kinds, loader, runner, spec_type
from palestra.spec.load import load
from palestra.spec.source import read_text
from palestra.spec.validate import SpecError, validate

VALID = {
    "kind": "control",
    "name": "x",
    "env": {"id": "CartPole-v1", "num_envs": 4, "kwargs": {"a": 1}},
    "algorithm": {"name": "ppo", "lr": {"shape": "linear", "start": 1e-3}},
    "net": {"hidden": [8]},
    "train": {"frames": 1000},
    "eval": {"episodes": 1},
    "every": {"eval": "1 step"},
    "track": {"sinks": []},
}
MAPPINGS = [(), ("env",), ("algorithm",), ("algorithm", "lr"), ("net",), ("train",), ("eval",), ("every",), ("track",)]


def problems(data):
    with pytest.raises(SpecError) as caught:
        load(data)
    return {problem.path: problem for problem in caught.value.problems}


def changed(path, value):
    data = copy.deepcopy(VALID)
    here = data
    *parents, last = path.split(".")
    for part in parents:
        here = here[part]
    here[last] = value
    return data


BAD = """\
kind: control
env: {id: "", num_envs: 2.5, vectorizes: sync}
gamma: 0.3
algorithm:
  name: ppo
  gama: 0.99
  lam: 1.5
  lr: -1
  epochs: true
  value_coef: "0.5"
net: {hidden: [64, 0, x], activation: rleu}
every: {eval: 5 minutes, checkpoint: 5 min, foo: 1}
track: {sinks: [wandbb]}
hooks: [abc]
name: a/b
"""
EXPECTED = """\
bad.yaml:1  train: missing; expected a mapping
bad.yaml:2  env.id: expected text that is not empty, got ''
bad.yaml:2  env.num_envs: expected a whole number of at least 1, got 2.5
bad.yaml:2  env.vectorizes: unknown key. Did you mean 'vectorize'?
bad.yaml:3  gamma: unknown key. Did you mean 'algorithm.gamma'? Valid keys: kind, name,
bad.yaml:6  algorithm.gama: unknown key. Did you mean 'gamma'?
bad.yaml:7  algorithm.lam: expected a number of at least 0 and at most 1, got 1.5
bad.yaml:8  algorithm.lr: expected a number of at least 0, got -1
bad.yaml:9  algorithm.epochs: expected a whole number of at least 1, got true
bad.yaml:10  algorithm.value_coef: expected a number of at least 0, got '0.5'
bad.yaml:11  net.hidden.1: expected a whole number of at least 1, got 0
bad.yaml:11  net.hidden.2: expected a whole number of at least 1, got 'x'
bad.yaml:11  net.activation: expected one of 'tanh', 'relu', 'silu', 'gelu', got 'rleu'. Did you mean 'relu'?
bad.yaml:12  every.checkpoint: expected an amount of steps, frames, tokens, seconds, minutes, hours, got '5 min'
bad.yaml:12  every.eval: expected a count such as steps: evaluation and logging are never timed in minutes
bad.yaml:12  every.foo: unknown key. Valid keys: checkpoint, eval, log
bad.yaml:13  track.sinks.0: expected one of 'tensorboard', 'wandb', 'swanlab', 'trackio', got 'wandbb'. Did you mean
bad.yaml:14  hooks.0: expected a function as 'module:function', got 'abc'
bad.yaml:15  name: expected a name of letters, digits, '_', '-' and '.' that begins with a letter or digit, got 'a/b'
"""


def test_validate_many_problems_reports_all_in_the_order_of_the_file():
    with pytest.raises(SpecError) as caught:
        validate(*read_text(BAD, "bad.yaml"))
    heading, *lines = str(caught.value).splitlines()
    expected = EXPECTED.splitlines()
    assert heading == f"the spec has {len(expected)} problems:"
    assert [line.strip().startswith(start) for line, start in zip(lines, expected, strict=True)] == [True] * len(lines)
    assert not re.search(r"pydantic|https?:|Input should|type=", str(caught.value))
    assert caught.value.exit_code == 2


@given(st.sampled_from(MAPPINGS), st.from_regex(r"[a-z_][a-z0-9_]{0,12}", fullmatch=True))
def test_validate_unknown_key_anywhere_is_named(path, key):
    data = copy.deepcopy(VALID)
    here = data
    for part in path:
        here = here[part]
    assume(key not in here and key != "extends")
    here[key] = {"a": 1}
    dotted = ".".join((*path, key))
    with pytest.raises(SpecError) as caught:
        load(data)
    # A key that exists but was not set in VALID fails by its value instead; either way it is the one that is named.
    assert any(problem.path == dotted or problem.path.startswith(f"{dotted}.") for problem in caught.value.problems)


@pytest.mark.parametrize(
    ("path", "value", "reason"),
    [
        ("algorithm", 3, "expected a mapping, got 3"),
        ("algorithm", [], "expected a mapping, got []"),
        (
            "algorithm.name",
            "ppa",
            "expected one of 'reinforce', 'sarsa', 'a2c', 'ppo', 'dqn', 'sac', 'tqc', 'td3', 'crossq', 'bc', 'td3_bc', "
            "'iql', got 'ppa'",
        ),
        ("algorithm.gamma", None, "expected a number of at least 0 and at most 1, got null"),
        ("algorithm.gamma", float("nan"), "expected a number of at least 0 and at most 1, got nan"),
        ("algorithm.clip", 0, "expected a number above 0, got 0"),
        ("algorithm.clip", "x", "expected a number, or a mapping such as"),
        ("algorithm.clip", {"shape": "linear", "start": 0}, "expected a schedule with 'start' above 0"),
        ("algorithm.entropy", {"shape": "linear", "start": 1, "end": -1}, "a schedule with 'end' of at least 0"),
        ("algorithm.lr", {"shape": "linear", "start": 1, "rate": 0.5}, "a linear schedule does not use 'rate'"),
        ("algorithm.lr", {"shape": "cosine", "start": 1, "begin": 0.5, "finish": 0.5}, "must come before"),
        ("algorithm.lr", {"shape": "linaer", "start": 1}, None),
        ("algorithm.minibatch", 513, "expected at most horizon × num_envs = 128 × 4 = 512, got 513"),
        ("algorithm.minibatch", 100, "expected a divisor of horizon × num_envs = 128 × 4 = 512, such as 64 or 128"),
        ("algorithm.minibatch", 1, "expected at least 2"),
        ("env.kwargs", {"a": {1, 2}}, None),
        ("every.eval", "20 steeps", "expected an amount of steps"),
        ("every.eval", "2.5 steps", "expected a whole number of steps"),
        ("every.eval", 20, "expected a cadence"),
        ("every.log", "0 steps", "expected an amount above 0, got '0 steps'"),
        ("every.log", None, "expected a cadence"),
        ("every.checkpoint", ["5 minutes", "x"], None),
        ("seed", -1, "expected a whole number of at least 0, got -1"),
        ("kind", "contrl", "unknown kind 'contrl'. Did you mean 'control'?"),
        ("kind", 3, "unknown kind 3"),
        ("kind", ["control"], "unknown kind ['control']"),
        ("name", "", "expected a name"),
        ("train", {}, None),
    ],
)
def test_validate_one_bad_value_says_what_was_expected(path, value, reason):
    found = problems(changed(path, value))
    if reason is None:
        (only,) = found
        assert only.startswith(f"{path}.")
    else:
        assert reason in found[path].reason
    assert len(found) == 1


def test_validate_missing_key_points_to_the_mapping_that_lacks_it():
    with pytest.raises(SpecError, match=r"x.yaml:2  env.id: missing; expected text that is not empty"):
        validate(
            *read_text(
                "kind: control\nenv:\n  num_envs: 3\nalgorithm: {name: ppo}\ntrain: {frames: 1}\nname: x", "x.yaml"
            )
        )


def test_validate_long_value_is_shortened():
    assert len(problems(changed("seed", "x" * 500))["seed"].reason) < 130


# --- kinds of other packages, with an algorithm that is a union


KIND = '''
from typing import Annotated, Literal
from pydantic import Field, field_validator
from palestra.spec.base import ExperimentSpec
from palestra.spec.kinds import Kind
from palestra.spec.model import Model

class Greedy(Model):
    """Greedy."""
    name: Literal["greedy"]
    """The algorithm."""
    greedy: float = Field(default=0.1, gt=0)
    """Epsilon."""

class Thompson(Model):
    """Thompson."""
    name: Literal["thompson"]
    """The algorithm."""
    prior: float = 1.0
    """The prior."""

    @field_validator("prior")
    @classmethod
    def even(cls, value):
        if value == 13:
            raise ValueError("13 brings bad luck")
        return value

class BanditSpec(ExperimentSpec):
    """A bandit."""
    kind: Literal["bandit"]
    """The kind of experiment."""
    algorithm: Annotated[Greedy | Thompson, Field(discriminator="name")]
    """How it learns."""
    arms: list[Greedy | Thompson] = Field(default=[])
    """A union without a discriminator, in a list."""
    size: int | str = 1
    """A plain union."""

KIND = Kind(spec="bandit_kind:BanditSpec", run="bandit_kind:run", load="bandit_kind:load")

def run(spec):
    return spec.name

def load(path):
    return path
'''


@pytest.fixture
def bandit(tmp_path, monkeypatch):
    """An installed package that brings a kind."""
    (tmp_path / "bandit_kind.py").write_text(KIND)
    info = tmp_path / "bandit_kind-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: bandit-kind\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[palestra.kinds]\nbandit = bandit_kind:KIND\n")
    monkeypatch.syspath_prepend(tmp_path)
    _installed_kinds.cache_clear()
    yield
    _installed_kinds.cache_clear()


@pytest.mark.usefixtures("bandit")
def test_kind_of_another_package_is_found_validated_and_run():
    assert set(kinds()) >= {"control", "bandit"}
    spec = load({"kind": "bandit", "name": "b", "algorithm": {"name": "thompson", "prior": 2}}).spec
    assert runner("bandit")(spec) == "b"
    assert loader("bandit")("path") == "path"
    with pytest.raises(UsageError, match="Did you mean 'bandit'"):
        spec_type("bandid")


@pytest.mark.usefixtures("bandit")
@pytest.mark.parametrize(
    ("given", "path", "text"),
    [
        ({"algorithm": {"name": "greedi"}}, "algorithm.name", "expected one of 'greedy', 'thompson', got 'greedi'"),
        ({"algorithm": {}}, "algorithm.name", "missing; expected one of 'greedy', 'thompson'"),
        ({"algorithm": {"name": "greedy", "greedy": -1}}, "algorithm.greedy", "expected a number above 0, got -1"),
        ({"algorithm": {"name": "thompson", "greedy": 1}}, "algorithm.greedy", "unknown key"),
        ({"algorithm": {"name": "greedy", "prior": 1}}, "algorithm.prior", "unknown key"),
        ({"algorithm": {"name": "thompson", "prior": 13}}, "algorithm.prior", "13 brings bad luck; got 13"),
        ({"size": 1.5}, "size", "expected a whole number, or text, got 1.5"),
    ],
)
def test_kind_with_unions_problems_are_at_the_places_of_the_data(given, path, text):
    found = problems({"kind": "bandit", "name": "b", "algorithm": {"name": "greedy"}} | given)
    assert list(found) == [path]
    assert text in str(found[path])


@pytest.mark.usefixtures("bandit")
def test_kind_with_undiscriminated_union_in_a_list_names_the_item():
    found = problems({"kind": "bandit", "name": "b", "algorithm": {"name": "greedy"}, "arms": [{"name": "x"}]})
    assert "arms.0.name" in found
