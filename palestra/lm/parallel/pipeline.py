"""Pipeline parallelism: every rank has some of the layers, and micro-batches travel from rank to rank."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)

from palestra.lm.batch import Batch, computed, run_layers
from palestra.lm.model import Part, Transformer
from palestra.lm.moe import MoE, RouterElsewhere
from palestra.lm.optim import gradient_norm
from palestra.lm.parallel.collectives import Group
from palestra.lm.ranks import part

SCHEDULES: dict[str, Any] = {
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zero_bubble": ScheduleInterleavedZeroBubble,
}
"""1F1B (Narayanan et al. 2019), interleaved (Narayanan et al. 2021), zero bubble (Qi et al. 2023)."""

Work = Callable[[Batch, float], tuple[Tensor, dict[str, Tensor]]]
"""What the last stage does with a micro-batch: the loss, and what all ranks are told."""
Micros = Sequence[tuple[Batch, float]]


class Pipeline:
    """The stages of a model that this rank has. Stage s is on rank s modulo the number of ranks."""

    def __init__(self, model: Transformer, group: Group, schedule: str):
        ranks, layers = group.size(), len(model.layers)
        total = ranks if schedule == "1f1b" else 2 * ranks
        bounds = [layers * stage // total for stage in range(total + 1)]
        self.model, self.group, self.schedule, self.total = model, group, SCHEDULES[schedule], total
        self.stages = {stage: range(bounds[stage], bounds[stage + 1]) for stage in range(group.rank(), total, ranks)}
        self.last = total - 1 in self.stages
        mine = {layer for span in self.stages.values() for layer in span}
        for layer in set(range(layers)) - mine:
            model.layers[layer] = _Elsewhere(model.layers[layer])  # keeps the names of the others
        absent: list[str] = [] if self.last else ["norm", "head"]
        if 0 not in self.stages and not (self.last and model.shape.tied):
            absent.append("embed")
        if 0 not in self.stages:
            absent.append("positions")
        for name in absent:
            setattr(model, name, None)

    def run(self, micros: Micros, work: Work, *, train: bool) -> list[dict[str, Tensor]]:
        """Every micro-batch through all stages, with gradients if `train`; what `work` told of each, on all ranks."""
        told: dict[int, dict[str, Tensor]] = {}
        rows = max(_rows(self.model, micro) for micro, _ in micros)
        stages = []
        for number, span in self.stages.items():
            stage = _Stage(self.model, span, micros, rows, work, told)
            forms = stage.received(train), stage.sent(train)
            stages.append(PipelineStage(stage, number, self.total, self.device, *forms, group=self.group))
        single = self.schedule is Schedule1F1B
        schedule = self.schedule(
            stages[0] if single else stages, len(micros), lambda loss, _: loss.sum(), scale_grads=False
        )
        numbers = torch.arange(len(micros))
        target = numbers if self.last else None
        (schedule.step if train else schedule.eval)(number=numbers, target=target)
        box = [[told[i] for i in range(len(micros))] if self.last else None]
        dist.broadcast_object_list(box, group=self.group, group_src=(self.total - 1) % self.group.size())
        assert box[0] is not None
        return box[0]

    @torch.no_grad()
    def add_tied(self) -> None:
        """The gradient of an embedding that is the head too: the sum of those of the first and the last stage."""
        ranks, embed = self.group.size(), self.model.embed
        if not self.model.shape.tied or ranks == 1 or embed is None or not embed.requires_grad:
            return
        if embed.grad is None:  # there is no head
            embed.grad = torch.zeros_like(embed)
        mine = part(embed.grad)
        theirs, peer = torch.empty_like(mine), 0 if self.last else ranks - 1
        sends = [(dist.isend, mine), (dist.irecv, theirs)]
        for request in dist.batch_isend_irecv([dist.P2POp(f, t, group=self.group, group_peer=peer) for f, t in sends]):
            request.wait()
        mine.add_(theirs)

    def norm(self, parameters: Mapping[str, nn.Parameter]) -> Tensor:
        """The norm of the gradients of all stages, in which a tied embedding counts once."""
        again = self.last and self.model.shape.tied and self.group.size() > 1
        own = gradient_norm([p for name, p in parameters.items() if not (again and name.endswith("embed"))])
        dist.all_reduce(square := own.square(), group=self.group)
        return square.sqrt()

    @property
    def device(self) -> torch.device:
        """Where the layers are."""
        return next(self.model.parameters()).device


class _Elsewhere(nn.Module):
    """A layer that another rank has."""

    def __init__(self, block: Any):
        super().__init__()
        if isinstance(block.mlp, MoE):
            self.mlp = RouterElsewhere(block.mlp)


def _rows(model: Transformer, micro: Batch) -> int:
    """Hidden states of a micro-batch on this rank."""
    return -(-computed(model, micro) // (1 if model.layout is None else model.layout.slices))


class _Stage(nn.Module):
    """Some consecutive layers. Micro-batches have different numbers of tokens; what is sent has room for the most."""

    def __init__(
        self,
        model: Transformer,
        span: range,
        micros: Micros,
        rows: int,
        work: Work,
        told: dict[int, dict[str, Tensor]],
    ):
        super().__init__()
        self.model = [model]  # not a part of this module, which would register it
        self.span, self.micros, self.rows, self.work, self.told = span, micros, rows, work, told

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Those whose gradients a schedule may put off."""
        model = self.model[0]
        for layer in self.span:
            yield from model.layers[layer].parameters()
        if self.span.start == 0 or self.span.stop == model.shape.layers:
            yield from (p for name, p in model.named_parameters() if not name.startswith("layers."))

    def received(self, train: bool) -> tuple[Tensor, ...]:
        """The form of what the stage before sends."""
        return () if self.span.start == 0 else self._form(self.span.start, train)

    def sent(self, train: bool) -> tuple[Tensor, ...]:
        """The form of what this one sends."""
        model = self.model[0]
        if self.span.stop == model.shape.layers:
            return (torch.empty(1, dtype=model.dtype, device="meta", requires_grad=train),)
        return self._form(self.span.stop, train)

    def _form(self, layers: int, train: bool) -> tuple[Tensor, ...]:
        model = self.model[0]
        shape, wide = model.shape, torch.promote_types(model.dtype, torch.float32)
        hidden = torch.empty(self.rows, shape.width, dtype=model.dtype, device="meta", requires_grad=train)
        if shape.moe is None:
            return (hidden,)
        size = (layers, self.rows, shape.moe.experts)
        return hidden, torch.empty(size, dtype=wide, device="meta", requires_grad=train)

    def forward(self, *received: Tensor, number: Tensor) -> Tensor | tuple[Tensor, ...]:
        """The hidden states and router logits of a micro-batch after these layers, or its loss after the last."""
        model, (micro, counts) = self.model[0], self.micros[int(number)]
        rows = _rows(model, micro)
        hidden, routers = (*received, None, None)[:2]
        hidden = None if hidden is None else hidden[:rows]
        model.part = Part(self.span, hidden, None if routers is None else routers[:, :rows])
        if self.span.stop == model.shape.layers:
            loss, self.told[int(number)] = self.work(micro, counts)
            return loss.reshape(1)
        output = run_layers(model, micro)
        missing = self.rows - rows
        hidden = F.pad(output.hidden, (0, 0, 0, missing))
        return hidden if output.router is None else (hidden, F.pad(output.router, (0, 0, 0, missing)))
