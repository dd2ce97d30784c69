"""Field-level differences, and a hash that changes with every literal and with nothing else."""

import copy
import random
import warnings

import pytest
from hypothesis import given
from hypothesis import strategies as st

from palestra.spec.load import ABSENT, Difference, differences, load, spec_hash
from palestra.spec.model import plain

BASE = {
    "kind": "control",
    "name": "x",
    "env": {"id": "CartPole-v1", "kwargs": {"a": 1, "b": {"c": [1, 2]}}},
    "algorithm": {"name": "ppo", "lr": {"shape": "linear", "start": 1e-3}},
    "train": {"frames": 1000},
    "every": {"eval": "10 steps"},
}

numbers = st.integers(-5, 5) | st.floats(-5, 5) | st.sampled_from([0.0, 1.0, 2.0])
trees = st.dictionaries(
    st.sampled_from("abcd"),
    st.recursive(
        st.none() | st.booleans() | numbers | st.sampled_from(["1", "x"]),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abcd"), inner, max_size=3),
        max_leaves=8,
    ),
)


def shuffled(tree):
    if isinstance(tree, dict):
        return {key: shuffled(tree[key]) for key in random.Random(0).sample(list(tree), len(tree))}
    return tree


def as_floats(tree):
    if isinstance(tree, dict):
        return {key: as_floats(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [as_floats(value) for value in tree]
    return float(tree) if isinstance(tree, int) and not isinstance(tree, bool) else tree


def leaves(tree, path=()):
    if isinstance(tree, dict) and tree:
        for key, value in tree.items():
            yield from leaves(value, (*path, key))
    else:
        yield path, tree


def test_differences_name_each_field_once():
    a = {"x": 1, "net": {"hidden": [1, 2], "gone": 3}, "tasks": [{"w": 1}, {"w": 2}], "n": None}
    b = {"x": 1.0, "net": {"hidden": [1, 3], "new": 4}, "tasks": [{"w": 1}, {"w": 5}], "n": {"a": 1}}
    assert differences(a, b) == [
        Difference("net.hidden", [1, 2], [1, 3]),
        Difference("net.gone", 3, ABSENT),
        Difference("net.new", ABSENT, 4),
        Difference("tasks.1.w", 2, 5),
        Difference("n", None, {"a": 1}),
    ]
    assert str(Difference("net.gone", 3, ABSENT)) == "net.gone: 3 → (absent)"


@pytest.mark.parametrize(("a", "b"), [(True, 1), (False, 0), ("1", 1), (None, 0), ([], {}), (0, ABSENT)])
def test_differences_values_of_other_types_differ(a, b):
    assert len(differences({"v": a}, {"v": b} if b is not ABSENT else {})) == 1


@given(trees)
def test_differences_same_tree_reordered_or_in_floats_has_none(tree):
    assert differences(tree, shuffled(as_floats(tree))) == []


@given(trees, trees)
def test_differences_are_symmetric(a, b):
    forth = {(d.path, repr(d.before), repr(d.after)) for d in differences(a, b)}
    back = {(d.path, repr(d.after), repr(d.before)) for d in differences(b, a)}
    assert forth == back


def test_hash_key_order_and_whole_floats_do_not_matter():
    expected = spec_hash(load(BASE).spec)
    assert spec_hash(load(shuffled(BASE)).spec) == expected
    assert spec_hash(load(BASE, overrides={"env.kwargs.a": 1.0, "env.kwargs.b.c": [1.0, 2.0]}).spec) == expected
    assert spec_hash(load(BASE, overrides={"algorithm.gamma": 0.99}).spec) == expected  # the default, written out
    assert spec_hash(load(BASE, overrides=["every.eval=1e1 steps"]).spec) == expected


@pytest.mark.parametrize("path", [path for path, _ in leaves(plain(load(BASE).spec))], ids=".".join)
def test_hash_changes_with_every_literal(path):
    spec = load(BASE).spec
    other = copy.deepcopy(plain(spec))
    here = other
    for part in path[:-1]:
        here = here[part]
    here[path[-1]] = "changed"
    changed = spec.model_copy(update={path[0]: other[path[0]]})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the copy is not validated, and pydantic says so when it is written
        assert spec_hash(changed) != spec_hash(spec)
    assert [d.path for d in differences(plain(spec), other)] == [".".join(path)]
