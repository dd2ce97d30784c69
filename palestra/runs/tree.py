"""A state tree as JSON plus arrays in the safetensors format: exact in type and bits, and nothing is pickled."""

import json
import math
import struct
import sys
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from palestra.errors import PalestraError, needs_extra

# safetensors' names for element types, and the NumPy type that carries their bits in memory and on disk.
CARRIERS = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "F8_E4M3": "|u1", "F8_E5M2": "|u1", "C64": "<c8",
    "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "|i1", "U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "|u1",
    "BOOL": "|b1",
}  # fmt: skip
NAMES = {carrier: name for name, carrier in reversed(CARRIERS.items())}
# torch types that NumPy lacks: the name on disk.
TORCH_ONLY = {"bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2"}
# In the tree, a JSON object with this key encodes a type that JSON lacks.
MARK = "$"


class UnsupportedState(PalestraError):
    """A value that a checkpoint cannot hold exactly."""


@dataclass(frozen=True)
class Leaf:
    """One array of the tree: its key in the file, safetensors' name of its type, and its bits."""

    key: str
    type_name: str
    carrier: np.ndarray


def flatten(state: Any) -> tuple[Any, list[Leaf]]:
    """Split a tree of dict, list, tuple, str, int, float, bool, None, bytes, array and tensor into JSON and arrays."""
    leaves: list[Leaf] = []
    return _encode(state, (), leaves), leaves


def unflatten(tree: Any, carriers: dict[str, np.ndarray]) -> Any:
    """The inverse of `flatten`; tensors come back on the CPU."""
    if isinstance(tree, list):
        return [unflatten(item, carriers) for item in tree]
    if not isinstance(tree, dict):
        return tree
    if MARK not in tree:
        return {key: unflatten(value, carriers) for key, value in tree.items()}
    match tree[MARK]:
        case "int":
            return int(tree["hex"], 16)
        case "float":
            return struct.unpack("<d", bytes.fromhex(tree["hex"]))[0]
        case "tuple":
            return tuple(unflatten(item, carriers) for item in tree["items"])
        case "dict":
            return {unflatten(key, carriers): unflatten(value, carriers) for key, value in tree["items"]}
        case "bytes":
            return carriers[tree["at"]].tobytes()
        case "numpy":
            return _numpy_from(carriers[tree["at"]], tree["dtype"])
        case "scalar":
            return _numpy_from(carriers[tree["at"]], tree["dtype"])[()]
        case "torch":
            return _torch_from(carriers[tree["at"]], tree["dtype"])
        case unknown:
            raise ValueError(f"unknown mark {unknown!r} in the state tree")


def safetensors_chunks(leaves: list[Leaf]) -> Iterator[Any]:
    """The bytes of a safetensors file in order, without copying the arrays."""
    # Widest elements first: every array is aligned without holes, which the format forbids.
    ordered = sorted(leaves, key=lambda leaf: -leaf.carrier.itemsize)
    header: dict[str, Any] = {}
    offset = 0
    for leaf in ordered:
        end = offset + leaf.carrier.nbytes
        header[leaf.key] = {"dtype": leaf.type_name, "shape": leaf.carrier.shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield struct.pack("<Q", len(text)) + text
    for leaf in ordered:
        yield leaf.carrier.reshape(-1).view(np.uint8)


def read_safetensors(path: Path) -> dict[str, np.ndarray]:
    """The arrays of a safetensors file written by `safetensors_chunks`, as carriers by key."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
        carriers = {}
        for key, entry in header.items():  # in the order of their offsets
            count = math.prod(entry["shape"])
            carriers[key] = np.fromfile(file, CARRIERS[entry["dtype"]], count).reshape(entry["shape"])
    return carriers


def _encode(value: Any, path: tuple[str, ...], leaves: list[Leaf]) -> Any:
    kind = type(value)
    if value is None or kind is bool or kind is str:
        return value
    if kind is int:
        # Python refuses to parse decimals of more than 4,300 digits; hexadecimals have no such limit.
        return value if abs(value) < 2**63 else {MARK: "int", "hex": hex(value)}
    if kind is float:
        return value if math.isfinite(value) else {MARK: "float", "hex": struct.pack("<d", value).hex()}
    if kind is list:
        return [_encode(item, (*path, str(i)), leaves) for i, item in enumerate(value)]
    if kind is tuple:
        return {MARK: "tuple", "items": [_encode(item, (*path, str(i)), leaves) for i, item in enumerate(value)]}
    if kind is dict or kind is OrderedDict:  # a module's state_dict is an OrderedDict; it comes back as a dict
        return _encode_dict(value, path, leaves)
    if kind is bytes:
        return {MARK: "bytes", "at": _add(leaves, path, "U8", np.frombuffer(value, np.uint8))}
    if isinstance(value, np.ndarray | np.generic):
        array = np.asarray(value, order="C")
        type_name, carrier = _numpy_carrier(array, path)
        mark = "numpy" if isinstance(value, np.ndarray) else "scalar"
        return {MARK: mark, "at": _add(leaves, path, type_name, carrier), "dtype": array.dtype.str}
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        type_name, carrier = _torch_carrier(torch, value, path)
        return {MARK: "torch", "at": _add(leaves, path, type_name, carrier), "dtype": str(value.dtype)[len("torch.") :]}
    raise _unsupported(f"a {kind.__module__}.{kind.__qualname__}", path)


def _encode_dict(value: dict, path: tuple[str, ...], leaves: list[Leaf]) -> Any:
    for key in value:
        if type(key) is not str and type(key) is not int:
            raise _unsupported(f"a dict with the key {key!r} ({type(key).__name__}; str and int can be)", path)
    items = [(key, _encode(item, (*path, str(key)), leaves)) for key, item in value.items()]
    if all(type(key) is str and key != MARK for key in value):
        return dict(items)
    return {MARK: "dict", "items": [[_encode(key, path, leaves), item] for key, item in items]}


def _add(leaves: list[Leaf], path: tuple[str, ...], type_name: str, carrier: np.ndarray) -> str:
    # The number makes keys unique where names contain slashes; the path is for people who open the file.
    key = f"{len(leaves)}:{'/'.join(path)}"
    leaves.append(Leaf(key, type_name, carrier))
    return key


def _numpy_carrier(array: np.ndarray, path: tuple[str, ...]) -> tuple[str, np.ndarray]:
    little = array.astype(array.dtype.newbyteorder("<"), copy=False)
    if little.dtype.str == "<c16":  # the format has no such type: real and imaginary parts on a last axis
        return "F64", little.reshape(-1).view("<f8").reshape(*array.shape, 2)
    if little.dtype.str not in NAMES:
        raise _unsupported(f"a NumPy array of dtype {array.dtype}", path)
    return NAMES[little.dtype.str], little


def _numpy_from(carrier: np.ndarray, dtype: str) -> np.ndarray:
    if np.dtype(dtype).kind == "c" and carrier.dtype.kind == "f":
        carrier = carrier.reshape(-1).view("<c16").reshape(carrier.shape[:-1])
    return carrier.astype(dtype, copy=False)


def _torch_carrier(torch: Any, tensor: Any, path: tuple[str, ...]) -> tuple[str, np.ndarray]:
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type == "meta":
        raise _unsupported(f"a {tensor.layout} {tensor.dtype} tensor on {tensor.device}", path)
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    name = str(plain.dtype)[len("torch.") :]
    if name in TORCH_ONLY:
        same_width = torch.uint8 if plain.element_size() == 1 else torch.uint16
        return TORCH_ONLY[name], plain.view(same_width).numpy()
    try:
        array = plain.numpy()
    except TypeError as error:  # a torch type without a NumPy counterpart
        raise _unsupported(f"a {plain.dtype} tensor", path) from error
    return _numpy_carrier(array, path)


def _torch_from(carrier: np.ndarray, dtype: str) -> Any:
    with needs_extra("A checkpoint with torch tensors", "train"):
        import torch
    if dtype in TORCH_ONLY:
        return torch.from_numpy(carrier).view(getattr(torch, dtype))
    if dtype == "complex128":
        carrier = _numpy_from(carrier, "<c16")
    return torch.from_numpy(carrier)


def _unsupported(what: str, path: tuple[str, ...]) -> UnsupportedState:
    where = "/".join(path) or "the top"
    return UnsupportedState(
        f"a checkpoint cannot hold {what}, found at {where} of the state. Give it as dicts, lists, tuples, "
        "strings, numbers, bytes, numeric NumPy arrays or torch tensors."
    )
