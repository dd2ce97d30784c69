"""Rows as lines of JSON: the fast encoder and the thorough one say the same."""

import json

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from palestra.track.sinks import json_line, long_line


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=3), inner, max_size=4),
        max_leaves=30,
    )
)
@example([1.0, float("nan"), 2.0])
@example([10**400, 0.5])
@example({"a": "\ud800", "b": [float("inf"), "x"]})
def test_long_lines_read_back_as_the_others_do(value):
    row = {"row": value, "more": (1, 2.5, True)}
    long, plain = long_line(row), json_line(row)
    assert long.index(b"\n") == len(long) - 1
    assert repr(json.loads(long)) == repr(json.loads(plain))


def test_long_lines_of_numpy_numbers_and_other_keys_are_those_of_json():
    row = {"a": np.float32(0.5), "b": np.int64(3), 7: [1]}
    assert json.loads(long_line(row)) == json.loads(json_line(row)) == {"a": 0.5, "b": 3, "7": [1]}
    with pytest.raises(AttributeError):
        long_line({"a": object()})
