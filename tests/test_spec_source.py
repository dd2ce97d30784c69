"""Text to plain data, and back."""

import json
import math

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from palestra.spec.source import Origin, SourceError, read_file, read_text, write_text


def value(text):
    return read_text(f"v: {text}", "x.yaml").data["v"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("3e-4", 3e-4),
        ("4e6", 4_000_000),
        ("1.5e3", 1500),
        ("1e-5", 1e-5),
        ("-2E3", -2000),
        ("1_000", 1000),
        ("1_000.5", 1000.5),
        ("010", 10),
        ("0o17", 15),
        ("0x1F", 31),
        ("+1.5", 1.5),
        (".5", 0.5),
        ("5.", 5.0),
        ("1e16", 1e16),
        (".inf", math.inf),
        ("-.inf", -math.inf),
        ("true", True),
        ("False", False),
        ("null", None),
        ("~", None),
        ("", None),
        ("yes", "yes"),
        ("on", "on"),
        ("1:30", "1:30"),
        ("2020-01-01", "2020-01-01"),
        ("'1e4'", "1e4"),
        ("1e4 frames", "1e4 frames"),
        ("_1", "_1"),
        ("0x", "0x"),
        ("1.2.3", "1.2.3"),
    ],
)
def test_scalar_plain_text_follows_yaml_1_2(text, expected):
    got = value(text)
    assert got == expected
    assert type(got) is type(expected)


def test_scalar_whole_number_beyond_floats_stays_float():
    assert isinstance(value("1e15"), int)
    assert isinstance(value("9007199254740993e0"), float)


def test_scalar_nan_is_a_number():
    assert math.isnan(value(".nan"))


def test_anchor_and_merge_key_own_keys_win_and_lines_are_those_of_the_anchor():
    text = "base: &base\n  a: 1\n  b: 2\nother: &other {b: 3, c: 4}\nuse:\n  <<: [*base, *other]\n  a: 9\nnet: *base\n"
    tree = read_text(text, "x.yaml")
    assert tree.data["use"] == {"a": 9, "b": 2, "c": 4}
    assert tree.data["net"] == {"a": 1, "b": 2}
    lines = {path: origin.line for path, origin in tree.origins.items()}
    assert lines[("use", "a")] == 7
    assert lines[("use", "b")] == 3
    assert lines[("use", "c")] == 4
    assert lines[("net",)] == 8


def test_alias_changed_copy_leaves_the_anchor_alone():
    data = read_text("a: &a [1, 2]\nb: *a\n", "x.yaml").data
    data["b"].append(3)
    assert data["a"] == [1, 2]


def test_origins_of_keys_and_items_are_their_lines():
    origins = read_text("a:\n  b:\n    - 1\n    - {c: 2}\n", "x.yaml").origins
    assert origins[("a", "b")] == Origin("x.yaml", 2)
    assert origins[("a", "b", 1)].line == 4
    assert str(origins[("a", "b", 1, "c")]) == "x.yaml:4"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: 1\nb: 2\na: 3\n", "x.yaml:3: the key 'a' is given twice, first in line 1"),
        ("a: {x: 1,\n  x: 2}\n", "x.yaml:2: the key 'x' is given twice, first in line 1"),
        ("a: 1\n b: 2\n", "x.yaml:2: not valid YAML"),
        ("a: [1, 2\nb: 3\n", "not valid YAML"),
        ("a: 1\n---\nb: 2\n", "single document"),
        ("a: !!python/object:os.system x\n", "x.yaml:1: unknown tag"),
        ("a: !mine {b: 1}\n", "x.yaml:1: unknown tag"),
        ("a: !mine [1]\n", "x.yaml:1: unknown tag"),
        ("a: &a [*a]\n", "x.yaml:1: this anchor contains itself"),
        ("a: &a\n  <<: *a\n", "contains itself"),
        ("a:\n  <<: 3\n", "x.yaml:2: '<<' takes a mapping"),
        ("a:\n  1: x\n", "x.yaml:2: the key 1 is not text; put quotes around it"),
        ("? [a]\n: 1\n", "is not text"),
        ("a: \x00\n", "not valid YAML"),
        ("a: 1\nb: !!int x\n", "x.yaml:2: 'x' is not of the type in its tag, int"),
        ("a: !!float 1.x\n", "x.yaml:1: '1.x' is not of the type in its tag, float"),
        ("a: !!bool yes\n", "x.yaml:1: 'yes' is not of the type in its tag, bool"),
        (f"a: {'9' * 5000}\n", "x.yaml:1: a number of 5000 digits is too large"),
    ],
)
def test_text_that_is_no_plain_data_is_refused_with_its_line(text, expected):
    with pytest.raises(SourceError) as caught:
        read_text(text, "x.yaml")
    assert expected in str(caught.value)
    assert caught.value.exit_code == 2


def test_file_missing_folder_and_binary_are_usage_errors(tmp_path):
    (tmp_path / "binary.yaml").write_bytes(b"a: \xff\xfe")
    for name, words in [("none.yaml", "no spec file"), ("", "is a folder"), ("binary.yaml", "not UTF-8")]:
        with pytest.raises(SourceError, match=words):
            read_file(tmp_path / name)


def test_json_file_with_tabs_reads_as_json(tmp_path):
    data = {"a": {"b": [1, 2.5, None, True, "x\ty: {"]}, "lr": 1e-5}
    path = tmp_path / "x.json"
    path.write_text(json.dumps(data, indent="\t"))
    tree = read_file(path)
    assert tree.data == data
    assert tree.origins[("lr",)].line == 11


scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.text(),
    st.sampled_from(
        ["1e4", "010", "yes", "null", "~", "<<", "1_0", ".5", "1:30", "2020-01-01", "=", "- a", "a: b", "#"]
    ),
)
trees = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4), max_leaves=12
)


@given(trees)
def test_write_then_read_gives_the_same_data_of_the_same_types(data):
    got = read_text(write_text({"v": data}), "x.yaml").data["v"]
    assert repr(got) == repr(data)


@given(scalars)
def test_written_text_means_the_same_to_a_yaml_1_1_reader(data):
    assert yaml.safe_load(write_text({"v": data}))["v"] == data
