"""Values as they cross between a program and its tests: plain built-in ones as JSON, and nothing else.

Whatever bytes come in, only exact int, float, complex, str, bytes, bool, None, list, tuple, dict, set and frozenset
come out: no class of the other side, and so no `__eq__`. What the standard library or NumPy compares as if it were one
of these (a Counter, a float64) goes out as that. Values are copies: what is done to them stays on one side.
"""

import json
import socket
import struct
from collections.abc import Callable
from typing import Any

MOST_BYTES = 4 << 20  # of one message
EXACT = 1 << 53  # beyond it JSON readers and people do not agree on integers
AS_DICT = ("collections.Counter", "collections.defaultdict", "collections.OrderedDict")


class NotLiteral(TypeError):
    """A value that cannot cross."""


class Malformed(ValueError):
    """Bytes that are not a message."""


def encode(value: Any) -> bytes:
    """A plain value as bytes."""
    try:
        return json.dumps(_packed(value)).encode()
    except RecursionError:
        raise NotLiteral("it is nested too deeply") from None


def decode(data: bytes) -> Any:
    """The plain value of some bytes, whoever wrote them."""
    try:
        return _unpacked(json.loads(data))
    except (ValueError, TypeError, RecursionError, MemoryError, OverflowError) as error:
        raise Malformed(f"{type(error).__name__}: {error}") from None


class Channel:
    """Messages over a socket, one after the other."""

    def __init__(self, number: int):
        self._socket = socket.socket(fileno=number)

    def send(self, value: Any) -> None:
        """Send a plain value."""
        data = encode(value)
        if len(data) > MOST_BYTES:
            raise NotLiteral(f"it takes {len(data)} bytes, and {MOST_BYTES} may cross")
        self._socket.sendall(struct.pack("!I", len(data)) + data)

    def receive(self) -> Any:
        """The next value; EOFError where the other side is gone, Malformed where it wrote something else."""
        (length,) = struct.unpack("!I", self._read(4))
        if length > MOST_BYTES:
            raise Malformed(f"a message of {length} bytes")
        return decode(self._read(length))

    def _read(self, count: int) -> bytes:
        parts = []
        while count:
            part = self._socket.recv(min(count, 1 << 16))
            if not part:
                raise EOFError
            parts.append(part)
            count -= len(part)
        return b"".join(parts)


def _complex(real: float, imaginary: float) -> complex:
    return complex(real, imaginary)


FORMS: dict[type, tuple[type, Callable[[Any], Any], Callable[[Any], Any]]] = {
    int: (str, hex, lambda text: int(text, 16)),
    bytes: (str, bytes.hex, bytes.fromhex),
    complex: (list, lambda value: [value.real, value.imag], lambda parts: _complex(*parts)),
    dict: (list, lambda value: [list(pair) for pair in value.items()], dict),
    tuple: (list, list, tuple),
    set: (list, list, set),
    frozenset: (list, list, frozenset),
}
"""What JSON lacks, as `{name: content}`: the content's type, how a value becomes it, how it becomes a value."""
NAMED = {kind.__name__: form for kind, form in FORMS.items()}


def _packed(value: Any) -> Any:
    kind = type(value)
    if value is None or kind in (bool, str, float) or (kind is int and -EXACT <= value <= EXACT):
        return value
    if kind is list:
        return [_packed(one) for one in value]
    if kind in FORMS:
        return {kind.__name__: _packed(FORMS[kind][1](value))}
    if f"{kind.__module__}.{kind.__qualname__}" in AS_DICT:
        return _packed(dict(value))
    if any(f"{base.__module__}.{base.__qualname__}" == "numpy.generic" for base in kind.__mro__):
        plain = value.item()
        if type(plain) is not kind:  # some have no built-in counterpart, and give themselves
            return _packed(plain)
    raise NotLiteral(f"{kind.__module__}.{kind.__qualname__} is not a plain value")


def _unpacked(value: Any) -> Any:
    if type(value) is list:
        return [_unpacked(one) for one in value]
    if type(value) is not dict:
        return value
    ((name, content),) = value.items()
    if name not in NAMED or type(content) is not NAMED[name][0]:
        raise Malformed(f"expected a plain value, not {name} of a {type(content).__name__}")
    return NAMED[name][2](_unpacked(content))
