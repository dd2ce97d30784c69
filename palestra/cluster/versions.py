"""Driver and worker must run the same code: their versions, and the comparison when a worker starts."""

import sys
from collections.abc import Mapping
from importlib import metadata
from typing import Any

from palestra.errors import UsageError
from palestra.spec.load import resolved, spec_hash


class OtherVersion(UsageError):
    """A worker runs other code than the driver."""


def versions(spec: Mapping[str, Any] | None = None) -> dict[str, str]:
    """What must be equal here and there; with a spec as plain data, also the hash that this code gives it."""
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    found = {"palestra": sys.modules["palestra"].__version__, "Python": python}
    try:
        found["torch"] = metadata.version("torch")
    except metadata.PackageNotFoundError:
        found["torch"] = "none"
    return found if spec is None else found | {"the spec's hash": spec_hash(resolved(spec))[:12]}


def refuse_other(driver: Mapping[str, str], worker: Mapping[str, str], host: str) -> None:
    """Refuse a worker whose versions differ from the driver's."""
    for name, ours in driver.items():
        if worker.get(name) != ours:
            theirs = f"the worker on {host} has {name} {worker.get(name)}, the driver {ours}"
            raise OtherVersion(f"{theirs}: install the same on both")
