"""Python values as plain data: what YAML would have given for them."""

from collections.abc import Mapping
from os import PathLike
from typing import Any

from pydantic import BaseModel

from palestra.spec.cadence import Cadence


def plain(value: Any) -> Any:
    """A spec or a part of one as mappings, lists and scalars, defaults included; tuples become lists."""
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if hasattr(value, "tolist"):  # NumPy's scalars and arrays, without importing it
        return plain(value.tolist())
    return str(value) if isinstance(value, Cadence | PathLike) else value
