"""Values as they cross between a program and its tests: plain built-in ones as JSON, and nothing else.

Whatever bytes come in, only exact int, float, complex, str, bytes, bool, None, list, tuple, dict, set and frozenset
come out: no class of the other side, and so no `__eq__`. What the standard library or NumPy compares as if it were one
of these (a Counter, a float64) goes out as that. Values are copies: what is done to them stays on one side.
"""

import json
import socket
import struct
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
    except Malformed:
        raise
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


def _packed(value: Any) -> Any:
    kind = type(value)
    if value is None or kind in (bool, str, float):
        return value
    if kind is int:
        return value if -EXACT <= value <= EXACT else {"int": hex(value)}
    if kind is list:
        return [_packed(one) for one in value]
    if kind in (tuple, set, frozenset):
        return {kind.__name__: [_packed(one) for one in value]}
    if kind is dict:
        return {"dict": [[_packed(key), _packed(one)] for key, one in value.items()]}
    if kind is bytes:
        return {"bytes": value.hex()}
    if kind is complex:
        return {"complex": [value.real, value.imag]}
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
    if len(value) != 1:
        raise Malformed("expected one key")
    ((kind, content),) = value.items()
    if type(content) is str and kind == "int":
        return int(content, 16)
    if type(content) is str and kind == "bytes":
        return bytes.fromhex(content)
    if type(content) is not list:
        raise Malformed(f"expected a list, or text with digits, in {kind}")
    if kind == "complex":
        real, imaginary = content
        return complex(float(real), float(imaginary))
    if kind == "dict":
        return {_unpacked(key): _unpacked(one) for key, one in content}
    if kind in ("tuple", "set", "frozenset"):
        return {"tuple": tuple, "set": set, "frozenset": frozenset}[kind](map(_unpacked, content))
    raise Malformed(f"expected a plain value, not {kind}")
