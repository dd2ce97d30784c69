"""Where the parts of a run are placed."""

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from palestra.spec.model import Conflict, Model


class ClusterSpec(Model):
    """How many processes train, generate and verify, on this machine or on a Ray cluster."""

    trainers: int | None = Field(default=None, ge=1)
    """Processes that train together, the same as `devices`; null: what `devices` or `parallel` asks for."""
    generators: int = Field(default=0, ge=0)
    """Processes that generate completions; 0: the first trainer generates."""
    verifiers: int = Field(default=0, ge=0)
    """Processes that verify completions; 0: the first trainer verifies, with `rollout.verifiers` worker processes."""
    address: str = Field(default="local", min_length=1)
    """`local`: processes of this machine; `auto`: Ray, started here unless it runs; HOST:PORT or ray://…: a cluster."""
    weights: Literal["auto", "shared_memory", "files", "broadcast"] = "auto"
    """How weights reach generators; auto: shared memory on one machine (CUDA IPC on a GPU), else broadcast."""
    silence_seconds: float = Field(default=10.0, gt=1)
    """A process that gives no sign of life for this long is replaced."""
    temp_dir: str | None = Field(default=None, min_length=1)
    """Ray's folder for sockets and logs; null: Ray's default."""

    @property
    def ray(self) -> bool:
        """Whether Ray places the processes."""
        return self.address != "local"

    @property
    def apart(self) -> bool:
        """Whether anything runs outside the trainers."""
        return self.generators > 0 or self.verifiers > 0

    def conflicts(self) -> Iterator[Conflict]:
        """A setting of Ray without Ray."""
        if self.temp_dir is not None and not self.ray:
            yield Conflict(("temp_dir",), "expected null, because `address: local` starts no Ray")
