"""What workers need and what there is: asking for more is refused with the arithmetic, before anything starts."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from palestra.errors import UsageError
from palestra.work.fanout import Resources

GIB = 2**30


class NotEnough(UsageError):
    """More was asked for than there is."""


@dataclass(frozen=True)
class Ask:
    """`count` workers of one role, and what each of them needs."""

    role: str
    """In the plural: "generators"."""
    count: int
    cores: float = 1
    gpu: float = 0.0
    """Share of one GPU, or a number of whole ones."""
    memory: int = 0
    """Bytes of main memory."""


KINDS: dict[str, tuple[Callable[[Ask], float], Callable[[Resources], float]]] = {
    "cores": (lambda ask: ask.cores, lambda has: has.cores),
    "GPUs": (lambda ask: ask.gpu, lambda has: len(has.gpus)),
    "GiB of memory": (lambda ask: ask.memory / GIB, lambda has: has.memory / GIB),
}
"""What is counted: of one worker, and of all that there is."""


def require(
    asked: Sequence[Ask], available: Resources, free: Resources | None = None, where: str = "this machine"
) -> None:
    """Refuse workers that need more than is available in all; `free` is what others leave of it now."""
    if any(_needed(asked, kind) > has(available) + 1e-9 for kind, (_, has) in KINDS.items()):
        raise NotEnough(arithmetic(asked, available, free, where) + ": ask for less, or add machines")


def arithmetic(asked: Sequence[Ask], available: Resources, free: Resources | None, where: str) -> str:
    """What is asked of the scarcest kind, worker by worker, beside what there is."""

    def scarcity(kind: str) -> tuple[bool, float]:
        needed, has = _needed(asked, kind), KINDS[kind][1]
        return needed > has(available), needed / max(has(free or available), 1e-9)

    kind = max(KINDS, key=scarcity)
    needs, has = KINDS[kind]
    parts = " + ".join(f"{ask.count} {ask.role} × {needs(ask):g}" for ask in asked if needs(ask))
    left = "" if free is None else f" ({has(free):.4g} free)"
    return f"needs {_needed(asked, kind):g} {kind} for {parts}, {where} has {has(available):.4g}{left}"


def local_resources() -> Resources:
    """The cores and GPUs of this machine."""
    return Resources(os.cpu_count() or 1, gpus())


def gpus() -> list[str]:
    """The GPUs of this machine, as CUDA_VISIBLE_DEVICES names them; without importing torch."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [name for name in visible.split(",") if name]
    folder = Path("/proc/driver/nvidia/gpus")
    return [str(index) for index in range(len(list(folder.iterdir())))] if folder.is_dir() else []


def _needed(asked: Sequence[Ask], kind: str) -> float:
    return sum(ask.count * KINDS[kind][0](ask) for ask in asked)
