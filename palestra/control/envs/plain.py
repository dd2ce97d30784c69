"""The values that environments hold as plain data for a checkpoint, and back, with their types and bits."""

from collections import deque
from typing import Any

import numpy as np
from gymnasium.wrappers.utils import RunningMeanStd

_TAG = "#"  # marks a dictionary that stands for something else


class NotPlain(TypeError):
    """A value that cannot be written as plain data; `value` is the innermost one."""

    def __init__(self, value: Any):
        super().__init__(f"a {type(value).__module__}.{type(value).__qualname__} is not plain data")
        self.value = value


def encode(value: Any) -> Any:
    """Turn a value into a tree of str-keyed dicts, lists, str, int, float, bool, None, bytes and numeric arrays.

    NumPy scalars keep their type: float32(1) and 1.0 do not compute alike. Exact types only: a subclass may hold more.
    """
    kind = type(value)
    if value is None or kind in (bool, int, float, str, bytes):
        return value
    if kind is np.ndarray:
        return _encode_array(value)
    if isinstance(value, np.generic):
        return {_TAG: "scalar", "array": _encode_array(np.array([value]))}
    if kind is list:
        return [encode(item) for item in value]
    if kind is tuple:
        return {_TAG: "tuple", "items": [encode(item) for item in value]}
    if kind is deque:
        return {_TAG: "deque", "items": [encode(item) for item in value], "maxlen": value.maxlen}
    if kind is dict:
        if _TAG not in value and all(type(key) is str for key in value):
            return {key: encode(item) for key, item in value.items()}
        return {_TAG: "dict", "keys": [encode(key) for key in value], "values": [encode(v) for v in value.values()]}
    if kind is np.random.Generator:
        return {_TAG: "generator", "state": encode(value.bit_generator.state)}
    if kind is RunningMeanStd:
        return {_TAG: "running_mean_std", "fields": encode(vars(value))}
    raise NotPlain(value)


def decode(tree: Any, current: Any = None) -> Any:
    """Rebuild what `encode` was given. Where `current` is a generator or a view of other memory, it is set in place."""
    if isinstance(tree, np.ndarray):
        view = isinstance(current, np.ndarray) and current.base is not None and current.flags.writeable
        if view and (current.shape, current.dtype) == (tree.shape, tree.dtype):
            current[...] = tree
            return current
        return tree.copy()
    if isinstance(tree, list):
        return [decode(item) for item in tree]
    if not isinstance(tree, dict):
        return tree
    match tree.get(_TAG):
        case None:
            return {key: decode(item) for key, item in tree.items()}
        case "array":
            return np.frombuffer(tree["data"], tree["dtype"]).reshape(tree["shape"]).copy()
        case "scalar":
            return decode(tree["array"])[0]
        case "tuple":
            return tuple(decode(tree["items"]))
        case "deque":
            return deque(decode(tree["items"]), tree["maxlen"])
        case "dict":
            return dict(zip(decode(tree["keys"]), decode(tree["values"]), strict=True))
        case "generator":
            state = decode(tree["state"])
            in_place = isinstance(current, np.random.Generator)
            if not (in_place and current.bit_generator.state["bit_generator"] == state["bit_generator"]):
                current = np.random.Generator(getattr(np.random, state["bit_generator"])())
            current.bit_generator.state = state
            return current
        case "running_mean_std":
            statistics = RunningMeanStd()
            vars(statistics).update(decode(tree["fields"]))
            return statistics
        case other:
            raise ValueError(f"unknown mark {other!r} in a saved environment")


def encode_actions(actions: list[Any]) -> Any:
    """Encode a list of actions, as one array where they are arrays or NumPy scalars of one type and shape."""
    kinds = {(type(a), getattr(a, "dtype", None), getattr(a, "shape", None)) for a in actions}
    first = actions[0] if actions else None
    if len(kinds) == 1 and isinstance(first, np.ndarray | np.generic) and first.dtype.kind in "biuf":
        return {_TAG: "stack", "scalars": isinstance(first, np.generic), "array": np.stack(actions)}
    return encode(actions)


def decode_actions(tree: Any) -> list[Any]:
    """Rebuild the list that `encode_actions` was given."""
    if not isinstance(tree, dict):
        return decode(tree)
    # iterating over a vector gives NumPy scalars
    return list(tree["array"]) if tree["scalars"] else [np.array(action) for action in tree["array"]]


def same_bits(a: Any, b: Any) -> bool:
    """Whether two encoded trees are equal bit for bit: NaN equals NaN, 0.0 is not -0.0."""
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same_bits(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(same_bits(x, y) for x, y in zip(a, b, strict=True))
    return repr(a) == repr(b) if isinstance(a, float) else a == b


def _encode_array(value: np.ndarray) -> Any:
    if value.dtype.kind in "biuf" and value.dtype.itemsize <= 8 and value.dtype.isnative:
        return value.copy()
    if value.dtype.kind in "biufcSUmM":
        return {_TAG: "array", "dtype": value.dtype.str, "shape": list(value.shape), "data": value.tobytes()}
    raise NotPlain(value)
