"""Checkpoints that a thread writes while training goes on: of several ranks, and of one process with a GPU."""

from collections.abc import Callable
from concurrent.futures import Future
from copy import deepcopy
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from palestra.lm.parallel.collectives import Group
from palestra.lm.shards.boxes import Boxes, save
from palestra.runs.checkpoint import CheckpointFailed, checksums, written

SHARDS = "shards"
"""The folder in a checkpoint with what ranks have written of its state."""
Together = Callable[[Path, Group], None]
"""Writes a model into a folder; all ranks of the group call it."""


class Shards(dict[str, Boxes]):
    """A rank's boxes of tensors in a state, in the host's memory; in the saved state, the path to them stands here."""


class Background:
    """Saves one checkpoint at a time, in a thread."""

    _last: Future[None] | None = None

    def settle(self, *, wait: bool = True) -> None:
        """Raise what the last save has raised; with `wait` when it is done."""
        if self._last is not None and (wait or self._last.done()):
            last, self._last = self._last, None
            last.result()


class OneSaver(Background):
    """Of one process with a GPU, from a copy in the GPU's memory, or in the host's where that is short."""

    def save(self, write: Callable[[Any, Any], object] | None, state: dict[str, Any], model: Any) -> None:
        """Begin to save a state, and a model as it was when its writer was made."""
        self.settle()
        assert write is not None
        copies, side = copied(state), torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())

        def work() -> None:
            with torch.cuda.stream(side):  # the copies to the host run beside the training's kernels
                write(copies, model)

        self._last = _in_thread(work)


def copied(state: Any) -> Any:
    """A state whose tensors nothing else changes; those of a GPU stay there while it has twice the room."""
    if isinstance(state, Tensor):
        state = state.detach()
        short = state.is_cuda and torch.cuda.mem_get_info(state.device)[0] < 2 * state.nbytes
        return state.to("cpu") if short else state.clone()
    if isinstance(state, dict):
        return {key: copied(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(copied(value) for value in state)
    return deepcopy(state)


class Saver(Background):
    """Of all ranks, each from a copy in its host's memory."""

    def __init__(self, group: Group):
        self.group = group  # of nothing else: its thread must not meet the trainer's collectives

    def save(self, write: Callable[[Any, Any], object] | None, state: dict[str, Any], model: Together) -> None:
        """Begin to save a state and a model; `write`, of the first rank, is `Session.saving`'s."""
        self.settle()
        shards: dict[str, Boxes] = {}
        small, together = _apart(state, "", shards), partial(self._write, shards, model)

        def work() -> None:
            try:
                together(None) if write is None else write(small, together)
            except OSError as error:  # of this rank, or told by another; the first rank says more
                problem = f"could not write a checkpoint: {error.strerror or error}"
                raise CheckpointFailed(f"{problem}. Earlier checkpoints are intact: make room, then resume.") from error
            dist.barrier(self.group)  # it is there, for all

        self._last = _in_thread(work)

    def _write(self, shards: dict[str, Boxes], model: Together, folder: Path | None) -> dict[str, dict[str, int]]:
        """Write all files but the small state; their sizes and checksums. The first rank knows the model's folder."""
        place: list[Any] = [folder]
        dist.broadcast_object_list(place, src=0, group=self.group)
        checkpoint = place[0].parent
        save(checkpoint / SHARDS, shards, self.group)
        model(place[0], self.group)
        dist.barrier(self.group)
        mine = checksums(checkpoint, written(checkpoint)[self.group.rank() :: self.group.size()])
        sums: list[Any] = [None] * self.group.size()
        dist.all_gather_object(sums, mine, group=self.group)
        return {name: told for part in sums for name, told in part.items()}


def _apart(state: Any, path: str, shards: dict[str, Boxes]) -> Any:
    """A copy of a state with paths in place of its `Shards`, which go into `shards` under them."""
    if isinstance(state, Shards):
        shards.update({f"{path}/{name}": boxes for name, boxes in state.items()})
        return path
    if isinstance(state, dict):
        return {key: _apart(value, f"{path}/{key}" if path else str(key), shards) for key, value in state.items()}
    return deepcopy(state)


def _in_thread(work: Callable[[], Any]) -> Future[None]:
    future: Future[None] = Future()

    def run() -> None:
        try:
            work()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(None)

    Thread(target=run, name="checkpoint", daemon=True).start()  # a process that fails does not wait for it
    return future
