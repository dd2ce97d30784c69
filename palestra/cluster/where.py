"""From `--on` to a backend of the fan-out and all that it has: processes of this machine, or Ray."""

import re
from collections.abc import Mapping
from typing import Any

from palestra.cluster.capacity import Ask, local_resources, require
from palestra.errors import UsageError
from palestra.work.fanout import SILENT_SECONDS, Backend, Processes, Resources


def open_backend(
    on: str | None,
    name: str,
    *,
    heartbeat_timeout: float | None = SILENT_SECONDS,
    spec: Mapping[str, Any] | None = None,
) -> tuple[Backend, Resources]:
    """The backend that `on` names, and its resources.

    None: processes of this machine. "ray": RAY_ADDRESS, else a Ray cluster on this machine, started if there is none.
    "HOST:PORT" or "ray://HOST:PORT": that cluster.
    """
    if on is None:
        return Processes(name, heartbeat_timeout=heartbeat_timeout), local_resources()
    if on != "ray" and not re.fullmatch(r"(ray://)?[^/\s]+:\d+", on):
        raise UsageError(f"--on {on}: expected ray, HOST:PORT or ray://HOST:PORT")
    from palestra.cluster.ray import RayBackend, resources_of  # here, because most runs need no Ray

    address = "auto" if on == "ray" else on
    backend = RayBackend(name, address=address, heartbeat_timeout=heartbeat_timeout, spec=spec)
    return backend, resources_of()


def refuse_more(on: str | None, available: Resources, parallel: int, threads: int) -> None:
    """Refuse more runs at once than a cluster has cores for; on this machine they may share them."""
    if on is not None:
        from palestra.cluster.ray import CLUSTER, resources_of

        require([Ask("runs at once", parallel, threads)], available, resources_of(free=True), CLUSTER)
