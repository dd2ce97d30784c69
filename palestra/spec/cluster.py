"""Where the parts of a run are placed."""

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from palestra.spec.model import Conflict, Model


class PlaceSpec(Model):
    """Where the processes of a run are: on this machine or on a Ray cluster."""

    address: str = Field(default="local", min_length=1)
    """`local`: processes of this machine; `auto`: Ray, started here unless it runs; HOST:PORT or ray://…: a cluster."""
    silence_seconds: float = Field(default=10.0, gt=1)
    """A process that gives no sign of life for this long counts as lost."""
    temp_dir: str | None = Field(default=None, min_length=1)
    """Ray's folder for sockets and logs; null: Ray's default."""
    token_env: str | None = Field(default=None, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")
    """Environment variable with the token of the Ray cluster and its dashboard; null: where Ray itself looks for it."""

    @property
    def ray(self) -> bool:
        """Whether Ray places the processes."""
        return self.address != "local"

    def conflicts(self) -> Iterator[Conflict]:
        """A setting of Ray without Ray."""
        for name in ("temp_dir", "token_env"):
            if getattr(self, name) is not None and not self.ray:
                yield Conflict((name,), "expected null, because `address: local` starts no Ray")


class EnvClusterSpec(PlaceSpec):
    """How many processes step environments, on this machine or on a Ray cluster."""

    environments: int = Field(default=0, ge=0)
    """Processes that share the copies of the environment; 0: those that `env.vectorize` starts on this machine."""

    def conflicts(self) -> Iterator[Conflict]:
        """A place for no process."""
        yield from super().conflicts()
        if self.ray and not self.environments:
            yield Conflict(("address",), "expected local, because `environments: 0` places no process")


class ClusterSpec(PlaceSpec):
    """How many processes train, generate and verify, on this machine or on a Ray cluster."""

    trainers: int | None = Field(default=None, ge=1)
    """Processes that train together, the same as `devices`; null: what `devices` or `parallel` asks for."""
    generators: int = Field(default=0, ge=0)
    """Processes that generate completions; 0: the first trainer generates."""
    verifiers: int = Field(default=0, ge=0)
    """Processes that verify completions; 0: the first trainer verifies, with `rollout.verifiers` worker processes."""
    weights: Literal["auto", "shared_memory", "files", "broadcast"] = "auto"
    """How weights reach generators; auto: shared memory on one machine (CUDA IPC on a GPU), else broadcast."""

    @property
    def apart(self) -> bool:
        """Whether anything runs outside the trainers."""
        return self.generators > 0 or self.verifiers > 0
