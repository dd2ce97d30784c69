"""Values between a program and its tests: plain ones come through exactly, forged bytes give plain ones or an error."""

import json
import socket
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from palestra.tasks.sandbox.literals import MOST_BYTES, Channel, Malformed, NotLiteral, decode, encode

PLAIN = (int, float, complex, str, bytes, bool, type(None), list, tuple, dict, set, frozenset)
single = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.complex_numbers() | st.binary()
    | st.text(st.characters(exclude_categories=[]))
)  # fmt: skip
hashable = st.recursive(single, lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3), max_leaves=5)
values = st.recursive(
    single,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(hashable, inner, max_size=3)
        | st.sets(hashable, max_size=3)
        | st.frozensets(hashable, max_size=3)
    ),
    max_leaves=10,
)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["int", "bytes", "complex", "dict", "set", "frozenset", "tuple", "list", "object", "a"]),
            inner,
            max_size=2,
        )
    ),
    max_leaves=12,
)


def written(value: Any) -> str:
    """A text that two values share if they are the same, types and all, whatever the order of their sets."""
    if isinstance(value, list | tuple):
        return f"{type(value)}{[written(one) for one in value]}"
    if isinstance(value, dict):
        return f"{type(value)}{[(written(key), written(one)) for key, one in value.items()]}"
    if isinstance(value, set | frozenset):
        return f"{type(value)}{sorted(written(one) for one in value)}"
    return f"{type(value)}{value!r}"


def only_plain(value: Any) -> bool:
    if type(value) not in PLAIN:
        return False
    if isinstance(value, dict):
        return all(map(only_plain, value)) and all(map(only_plain, value.values()))
    return all(map(only_plain, value)) if isinstance(value, list | tuple | set | frozenset) else True


@given(values)
def test_plain_value_is_encoded_and_decoded_it_is_the_same(value: Any):
    assert written(decode(encode(value))) == written(value)


@given(st.binary() | json_values.map(lambda value: json.dumps(value).encode()))
def test_bytes_of_anybody_are_decoded_they_give_a_plain_value_or_are_refused(data: bytes):
    try:
        value = decode(data)
    except Malformed:
        return
    assert only_plain(value)


@pytest.mark.parametrize(
    "data",
    [
        *(b"", b"[", b"{}", b'{"a": 1}', b'{"int": 5}', b'{"int": "x"}', b'{"set": [[]]}', b'{"dict": [[1]]}', b"nul"),
        *(b"\xff", b'{"dict": [[[], 1]]}', b'{"tuple": "ab"}', b'{"complex": [1]}', b'{"int": "1", "bytes": "00"}'),
        *(b"[" * 10**6, b'{"tuple": [' * 10**5, b"1" * 5000, b'{"bytes": "0"}', b'{"__class__": []}'),
    ],
)
def test_bytes_that_are_no_value_are_refused(data: bytes):
    with pytest.raises(Malformed):
        decode(data)


def test_values_of_other_classes_are_refused_however_they_call_themselves():
    class Sly(int):
        __module__, __qualname__ = "builtins", "int"

        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = int.__hash__

    class Named(dict):
        __module__ = "numpy"

    itself: list = []
    itself.append(itself)
    for value in (Sly(1), [Sly(1)], {Sly(1): 2}, (1, {2: Sly(1)}), Named(), object(), int, len, iter(()), itself):
        with pytest.raises(NotLiteral):
            encode(value)


def test_message_is_too_long_it_is_neither_sent_nor_received():
    one, other = socket.socketpair()
    with one, other:
        sender, receiver = Channel(one.detach()), Channel(other.detach())
        with pytest.raises(NotLiteral, match="may cross"):
            sender.send("a" * MOST_BYTES)
        sender.send([1])
        assert receiver.receive() == [1]
        sender._socket.sendall((MOST_BYTES + 1).to_bytes(4, "big"))
        with pytest.raises(Malformed):
            receiver.receive()
        sender._socket.sendall(b"\0\0")
        sender._socket.close()
        with pytest.raises(EOFError):
            receiver.receive()
        receiver._socket.close()
