"""How the processes that train one model share it."""

from collections.abc import Iterator
from math import prod
from typing import Literal

from pydantic import Field

from palestra.spec.model import Conflict, Model
from palestra.spec.shape import Shape


class ParallelSpec(Model):
    """How many processes share a model along each axis; `devices` is the product."""

    data: int = Field(default=1, ge=1)
    """Copies of the model, each trained on its own examples (DDP; with `shard`: HSDP)."""
    shard: int | None = Field(default=None, ge=1)
    """Processes that split parameters and optimizer state (FSDP), each with its own examples; null: what is left."""
    context: int = Field(default=1, ge=1)
    """Processes that split the tokens of a micro-batch; in attention they split the heads (Ulysses)."""
    expert: int = Field(default=1, ge=1)
    """Processes that split the experts of each layer, each with its own examples; tokens travel to their experts."""
    tensor: int = Field(default=1, ge=1)
    """Processes that split heads, MLP and vocabulary, and between them the tokens (sequence parallelism)."""
    pipeline: int = Field(default=1, ge=1)
    """Processes that split the layers; micro-batches travel from one to the next."""
    schedule: Literal["1f1b", "interleaved", "zero_bubble"] = "1f1b"
    """Order of a pipeline's forward and backward passes; the last two give each process two parts of the layers."""

    def sizes(self, processes: int | None = None) -> dict[str, int]:
        """The size of each axis for so many processes; by default the fewest."""
        given = {name: getattr(self, name) for name in ("pipeline", "data", "context", "expert", "tensor")}
        shard = self.shard if self.shard is not None else max(1, (processes or 1) // prod(given.values()))
        return given | {"shard": shard}

    @property
    def processes(self) -> int:
        """The fewest processes."""
        return prod(self.sizes().values())

    def divides(self, processes: int) -> bool:
        """Whether so many processes are what the axes ask for."""
        return prod(self.sizes(processes).values()) == processes

    def conflicts(self) -> Iterator[Conflict]:
        """A schedule without a pipeline, or that does not go with other axes."""
        if self.schedule != "1f1b" and self.pipeline == 1:
            yield Conflict(("schedule",), "expected 1f1b, because there is no `pipeline`")
        if self.schedule == "zero_bubble" and self.processes != self.pipeline:
            yield Conflict(("schedule",), "expected 1f1b or interleaved: zero_bubble goes with `pipeline` alone")

    def problems(self, shape: Shape, *, lora: bool) -> Iterator[Conflict]:
        """Why a model cannot be split so, by the axes' names."""
        stages = self.pipeline * (1 if self.schedule == "1f1b" else 2)
        if shape.layers < stages:
            yield Conflict(("pipeline",), f"expected a layer for each of {stages} parts, but there are {shape.layers}")
        tensor = {"heads": shape.heads, "kv_heads": shape.kv, "mlp": shape.mlp, "vocab": shape.vocab}
        if shape.moe is not None:
            name = "moe.shared · moe.mlp" if shape.moe.gated_shared is None else "moe.gated_shared"
            tensor[name] = shape.moe.shared_width
        for name, count in tensor.items():
            if count is not None and count % self.tensor:
                yield Conflict(("tensor",), f"expected a divisor of the model's {name} = {count}")
        if self.tensor > 1 and shape.qk_norm == "full":
            yield Conflict(("tensor",), "expected 1, because `qk_norm: full` normalizes over all heads together")
        if self.pipeline > 1 and lora:
            yield Conflict(("pipeline",), "expected 1, because adapters are not split: use `shard` for them")
        if self.tensor > 1 and lora:
            yield Conflict(("tensor",), "expected 1, because adapters are not split: use `shard` for them")
        if shape.heads % (self.tensor * self.context):
            heads = f"tensor · context to divide the model's heads = {shape.heads}"
            yield Conflict(("context",), f"expected {heads}, got {self.tensor} · {self.context}")
        if self.expert > 1 and shape.moe is None:
            yield Conflict(("expert",), "expected 1, because the model has no experts")
        elif shape.moe is not None and shape.moe.experts % self.expert:
            yield Conflict(("expert",), f"expected a divisor of the model's {shape.moe.experts} experts")
