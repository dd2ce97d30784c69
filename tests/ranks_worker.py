"""What each rank of test_lm_ranks.py does: train models beside whole ones and write down how far apart they are.

torchrun --nproc-per-node 2 tests/ranks_worker.py FOLDER float64 shard=2/tied tensor=2/experts
"""

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from palestra.lm.batch import Batch, score
from palestra.lm.engine import Loss, TrainEngine
from palestra.lm.hf import skeleton
from palestra.lm.lora import add_lora
from palestra.lm.model import Transformer
from palestra.lm.moe import router_terms
from palestra.lm.objectives import reward_loss
from palestra.lm.optim import Ema, Optimizer
from palestra.lm.ranks import Ranks, part
from palestra.lm.scorer import ScalarModel
from palestra.lm.shards import folder as folders
from palestra.lm.shards import saver
from palestra.lm.shards.boxes import Boxes
from palestra.lm.shards.boxes import load as load_boxes
from palestra.lm.shards.boxes import save as save_boxes
from palestra.lm.shards.folder import fill, sample, save_folder
from palestra.runs.checkpoint import load, save
from palestra.spec.kinds.lm import RewardLossSpec
from palestra.spec.lm import AdamWSpec, LoraSpec, MuonSpec
from palestra.spec.schedule import Schedule
from palestra.spec.shape import MoESpec, Shape

SHAPE = Shape(layers=2, width=16, heads=4, kv_heads=2, mlp=24, context=32, vocab=21)
UNTIED = SHAPE.model_copy(update={"tied": False, "qk_norm": "head", "attention_bias": True})
EXPERTS = SHAPE.model_copy(
    update={"moe": MoESpec(experts=3, active=2, mlp=8, shared=1, balance=0.1, z_loss=0.1, bias_rate=0.1)}
)
GATED = EXPERTS.model_copy(
    update={"moe": MoESpec(experts=3, active=2, mlp=8, gated_shared=12, balance=0.1), "norm_order": "post"}
)
GEMMA = UNTIED.model_copy(
    update={
        **{"norm_order": "both", "norm_offset": 1.0, "embed_scale": "sqrt_width", "activation": "geglu"},
        **{"window": 5, "full_layers": [0], "local_rope_theta": 300.0, "query_pre_attn_scalar": 7, "nope_layers": [0]},
    }
)
GPT_OSS = SHAPE.model_copy(
    update={
        **{"moe": MoESpec(experts=3, active=2, mlp=8, activation="clamped_swiglu", balance=0.1), "tied": False},
        **{"biases": True, "sinks": True, "window": 5, "full_layers": [0]},
    }
)
GPT2 = SHAPE.model_copy(
    update={"biases": True, "norm": "layer", "positions": "learned", "activation": "gelu", "kv_heads": 4}
)
# Adam makes gradients that are nothing but rounding, such as those of the keys' biases, as large as all others.
ADAMW = AdamWSpec(name="adamw", lr=Schedule(shape="linear", start=0.003, end=0.001), eps=1e-4, max_grad_norm=0.5)
MUON = MuonSpec(name="muon", lr=Schedule(shape="linear", start=0.003, end=0.001), max_grad_norm=0.5)
STEPS = 6


@dataclass(frozen=True)
class Case:
    """A model and how it is trained."""

    shape: Shape = SHAPE
    optim: AdamWSpec | MuonSpec = ADAMW
    lora: bool = False
    scalar: bool = False
    checkpointing: bool = False
    ema: float | None = None
    micro_tokens: int = 1000
    lengths: tuple[int, ...] = (9, 2, 17, 5, 8)


PAIRS = (9, 2, 17, 5, 8, 3)
CASES = {
    "tied": Case(),
    "untied": Case(UNTIED),
    "experts": Case(EXPERTS),
    "adapters": Case(UNTIED, lora=True, ema=0.8),
    "scalar": Case(UNTIED, scalar=True, lengths=PAIRS),
    "micro-batches": Case(EXPERTS, MUON, ema=0.8, micro_tokens=10, lengths=(17, 6, 6, 6)),
    "recomputed": Case(EXPERTS, checkpointing=True, micro_tokens=10),
    "one sequence": Case(EXPERTS, lengths=(7,)),
    "one pair": Case(scalar=True, lengths=(7, 3)),
    "deep": Case(EXPERTS.model_copy(update={"layers": 5}), micro_tokens=10, ema=0.8),
    "gated": Case(GATED),
    "gemma": Case(GEMMA),
    "gpt-oss": Case(GPT_OSS, MUON),
    "gpt2": Case(GPT2),
    "deep dense": Case(SHAPE.model_copy(update={"layers": 4})),
}


def next_token(model: Transformer, batch: Batch) -> Loss:
    scored = score(model, batch, entropy=False)
    total = -(scored.logprobs * batch.loss_mask).sum()
    return Loss(total, {}, router_terms(model, scored.router, batch))


class Run:
    """A case on the given ranks."""

    def __init__(self, case: Case, ranks: Ranks):
        draws = torch.Generator().manual_seed(0)
        model = Transformer(case.shape, torch.get_default_dtype())
        model.initialize(draws)
        if case.lora:
            add_lora(model, LoraSpec(rank=3, alpha=6.0), draws)
        model.checkpointing = lambda layer: case.checkpointing
        trained = ScalarModel(model) if case.scalar else model
        with torch.no_grad():
            for name, parameter in trained.named_parameters():
                if "lora_b" in name or name == "value.weight":
                    parameter.copy_(torch.randn(parameter.shape, generator=draws) * 0.1)
        ranks.shard(trained)
        self.engine = TrainEngine(
            trained,
            Optimizer(trained, case.optim, STEPS),
            ranks,
            micro_tokens=case.micro_tokens,
            flops_per_token=1.0,
            ema=None if case.ema is None else Ema(trained, case.ema),
        )
        self.case = case
        self.loss = reward_loss(RewardLossSpec()) if case.scalar else next_token
        self.group = 2 if case.scalar else 1

    def batch(self, step: int) -> Batch:
        draws = torch.Generator().manual_seed(100 + step)
        tokens = [torch.randint(self.case.shape.vocab or 0, (n,), generator=draws).tolist() for n in self.case.lengths]
        masks = [[float(i % 5 > 0) for i in range(n)] for n in self.case.lengths]
        return Batch.pack(tokens, masks)

    def backward(self, step: int) -> dict[str, Tensor]:
        return self.engine.forward_backward(self.batch(step), self.loss, 3.0, group=self.group)

    def evaluate(self, step: int) -> dict[str, Tensor]:
        return self.engine.losses(self.batch(step), self.loss, group=self.group)

    def step(self, step: int) -> dict[str, float]:
        return self.engine.optim_step(step / STEPS)

    def gradients(self) -> dict[str, Tensor]:
        trained = self.engine.optimizer.parameters.items()
        gradients = self.engine.ranks.gather({name: p.grad for name, p in trained if p.grad is not None})
        # The first and the last stage of a pipeline add up those of a tied embedding before the step.
        return {name: g for name, g in gradients.items() if not (name.endswith("embed") and self.case.shape.tied)}


def apart(one: Mapping[str, Tensor | float], other: Mapping[str, Tensor | float]) -> float:
    """The largest difference between numbers of the same names, relative to those above 1."""
    assert one.keys() == other.keys(), one.keys() ^ other.keys()
    pairs = [(torch.as_tensor(one[name]).double(), torch.as_tensor(other[name]).double()) for name in one]
    return max(float(((a - b).abs() / a.abs().clamp_min(1.0)).max()) for a, b in pairs)


def measure(case: Case, ranks: Ranks, folder: Path) -> dict[str, float]:
    """How far what the ranks do is from what one process does."""
    alone, together = Run(case, Ranks()), Run(case, ranks)
    runs = (alone, together)
    found = {"weights at first": apart(*(run.engine.weights() for run in runs))}
    found["losses"] = apart(*(run.backward(0) for run in runs))
    found["gradients"] = apart(*(run.gradients() for run in runs))
    found["evaluation before the step"] = apart(*(run.evaluate(9) for run in runs))
    if not case.scalar:
        found["log-probabilities"] = apart(*({"": run.engine.logprobs(run.batch(9))} for run in runs))
    found["steps"] = apart(*(run.step(0) for run in runs))
    found["weights"] = apart(*(run.engine.weights() for run in runs))
    # The moving average is evaluated and put away; what is trained then must not be it.
    for step in (1, 2):
        with alone.engine.averaged(), together.engine.averaged():
            found[f"evaluation {step}"] = apart(*(run.evaluate(9) for run in runs))
            found[f"averaged weights {step}"] = apart(*(run.engine.weights() for run in runs))
        found[f"losses {step}"] = apart(*(run.backward(step) for run in runs))
        found[f"steps {step}"] = apart(*(run.step(step) for run in runs))
    found["state"] = apart(*(tensors(run) for run in runs))
    found |= {f"{name} in turn": value for name, value in exchanged(alone, together, folder).items()}
    return found


def exchanged(alone: Run, together: Run, folder: Path) -> dict[str, float]:
    """One process goes on with what the ranks have kept, and the ranks with what it has."""
    others = [Run(run.case, run.engine.ranks) for run in (alone, together)]
    kept = checkpoint(together, folder), checkpoint(alone, folder / f"alone {together.engine.ranks.rank}")
    for run, path in zip(others, kept, strict=True):
        run.backward(5)  # loaded by an engine that has been at work
        run.step(5)
        restore(run, path)
    for run in (alone, *others):
        run.backward(3)
        run.step(3)
    runs = (alone, *others)
    expected, *found = [weights(run) for run in runs]
    first = {"one process": apart(expected, found[0]), "ranks": apart(expected, found[1])}
    losses, *later = [run.evaluate(4) for run in runs]
    return first | {"loss of one": apart(losses, later[0]), "loss of ranks": apart(losses, later[1])}


def weights(run: Run) -> dict[str, Tensor]:
    """Parameters and buffers as a checkpoint has them."""
    return run.engine.ranks.gather(run.engine.model.state_dict())


def tensors(run: Run) -> dict[str, Tensor]:
    """All tensors of a checkpoint, whole."""
    return run.engine.ranks.gather({f"model/{name}": t for name, t in run.engine.model.state_dict().items()}) | (
        run.engine.ranks.gather(run.engine._tensors())
    )


def checkpoint(run: Run, folder: Path) -> Path:
    """Save a run as the loop does; the checkpoint."""
    ranks, shape = run.engine.ranks, run.case.shape
    state = {"engine": run.engine.state(), "model": ranks.keep(run.engine.model.state_dict())}
    if ranks.size == 1:
        return save(folder, 1, state, reasons={"kept"})
    mine = ranks.keep(run.engine.transformer.state_dict())
    about = {"shape": shape, "mine": mine, "tokenizer": None, "eos": (), "base_config": {}}
    write = (lambda folder, group: None) if run.case.lora else partial(save_folder, **about)
    kept, trained_on = partial(save, folder, 1, reasons={"kept"}), Event()

    def later(*arguments: Any) -> None:
        trained_on.wait()
        save_boxes(*arguments)

    # Nothing is written before all has changed: what is saved are the numbers of before.
    with patch.object(saver, "save", later), torch.no_grad():
        ranks.saver.save((lambda state, model: kept(state, model=model)) if ranks.first else None, state, write)
        mine = [part(t) for t in (*run.engine.model.state_dict().values(), *run.engine._tensors().values())]
        before = [tensor.clone() for tensor in mine]
        for tensor in mine:
            tensor.zero_()
        trained_on.set()
        ranks.saver.settle()
        for tensor, value in zip(mine, before, strict=True):
            tensor.copy_(value)
    return folder / "checkpoints" / "step_000000001"


def restore(run: Run, path: Path) -> None:
    """Continue from `checkpoint`."""
    state, ranks = load(path).state, run.engine.ranks
    ranks.restore(state["model"], run.engine.model.state_dict(), path)
    run.engine.load_state(state["engine"], path)


def differing(one: Run, other: Run) -> float:
    """How many tensors of two runs differ in a bit."""
    mine, theirs = tensors(one), tensors(other)
    assert mine.keys() == theirs.keys(), mine.keys() ^ theirs.keys()
    return float(sum(not torch.equal(mine[name].reshape(-1), theirs[name].reshape(-1)) for name in mine))


def reload(case: Case, ranks: Ranks, folder: Path, then: Sequence[Ranks] = ()) -> dict[str, float]:
    """Save under one layout, load under it, others and on one process: tensors that differ, and how far runs part."""
    run, found = Run(case, ranks), {}
    for step in (0, 1):
        run.backward(step)
        run.step(step)
    with counted() as gathered:
        path = checkpoint(run, folder)
    weights_of = {name: tensor.nbytes for name, tensor in run.engine.transformer.state_dict().items()}
    if ranks.layout is not None and not ranks.partial:  # a stage knows its own tensors alone
        # One file of the model at a time: a rank's share of it, or a tensor.
        bound = sum(weights_of.values()) / ranks.size + max(weights_of.values())
        found["too much gathered"] = float(max(gathered, default=0) > bound)
    others = {str(place): Run(case, other) for place, other in enumerate((ranks, *then, Ranks()))}
    for name, other in others.items():
        restore(other, path)
        found[f"restored {name}"] = differing(run, other)
    for name, other in others.items():
        found[f"built {name}"] = built(run, other, path)
    expected = run.backward(2)
    losses = {name: other.backward(2) for name, other in others.items()}
    for each in (run, *others.values()):
        each.step(2)
    for name, other in others.items():
        found[f"losses {name}"] = apart(expected, losses[name])
        found[f"weights {name}"] = apart(weights(run), weights(other))
    found["exact"] = differing(run, others["0"]) + apart(expected, losses["0"])
    return found


@contextmanager
def counted() -> Iterator[list[int]]:
    """The bytes of what is read at once to write the model's folder; nothing else is made whole."""
    bytes_of: list[int] = []

    def counting(parts: Path, wanted: Mapping[str, Boxes], **options: Any) -> None:
        bytes_of.append(sum(box.tensor.nbytes for boxes in wanted.values() for box in boxes.boxes))
        load_boxes(parts, wanted, **options)

    def refused(*_: Any, **__: Any) -> None:
        raise AssertionError("a tensor was gathered")

    with patch.object(folders, "load", counting), patch.object(DTensor, "full_tensor", refused):
        yield bytes_of


def built(run: Run, other: Run, path: Path) -> float:
    """How many tensors of a model that was split without memory and then read, or sampled, differ."""
    if run.case.lora or run.case.scalar or other.engine.ranks.size == 1:
        return 0.0
    sources = [(partial(fill, folder=path / "model"), run.engine.transformer.state_dict())]
    whole = Transformer(run.case.shape)
    whole.initialize(torch.Generator().manual_seed(3))
    sources.append((partial(sample, seed=3), whole.state_dict()))
    differ = 0
    for source, wanted in sources:
        model = skeleton(run.case.shape, torch.get_default_dtype())
        model.source = source
        other.engine.ranks.shard(model)
        mine, theirs = other.engine.ranks.gather(model.state_dict()), run.engine.ranks.gather(wanted)
        assert mine.keys() == theirs.keys(), mine.keys() ^ theirs.keys()
        differ += sum(not torch.equal(mine[name], theirs[name]) for name in mine)
    return float(differ)


def unused(case: Case, ranks: Ranks, folder: Path) -> dict[str, float]:
    """How far ranks are from one process where no token chooses the experts of the last ones."""
    runs = Run(case, Ranks()), Run(case, ranks)
    for run in runs:
        for name, parameter in run.engine.model.named_parameters():
            if name.endswith("router"):  # of equal experts the first are chosen
                torch.nn.init.zeros_(parameter)
    losses = [run.backward(0) for run in runs]
    for run in runs:
        run.step(0)
    return {"losses": apart(*losses), "weights": apart(*map(weights, runs))}


def poisoned(case: Case, ranks: Ranks, folder: Path) -> dict[str, float]:
    """Whether all ranks skip a step in which the last one's loss is NaN, and then go on together."""
    runs = Run(case, Ranks()), Run(case, ranks)
    for run in runs:
        run.backward(0)
        run.step(0)
    together, sound = runs[1], runs[1].loss
    before = tensors(together)

    def loss(model: Any, batch: Batch) -> Loss:
        result = sound(model, batch)
        return replace(result, total=result.total * (torch.nan if ranks.rank == ranks.size - 1 else 1.0))

    together.loss = loss
    together.backward(1)
    skipped = together.step(1)["skipped"]
    after = tensors(together)
    differ = sum(not torch.equal(before[name], after[name]) for name in before)
    together.loss = sound
    losses = [run.backward(1) for run in runs]
    for run in runs:
        run.step(1)
    return {
        "not skipped": 1.0 - skipped,
        "changed": float(differ),
        "losses": apart(*losses),
        "weights": apart(*map(weights, runs)),
    }


def twenty(case: Case, ranks: Ranks, folder: Path) -> dict[str, float]:
    """How far losses and weights are from those of one process in the course of 20 steps."""
    runs, losses = (Run(case, Ranks()), Run(case, ranks)), []
    for step in range(20):
        losses.append(apart(*(run.backward(step) for run in runs)))
        for run in runs:
            run.step(min(step, STEPS - 1))
    return {"losses": max(losses), "weights": apart(*(weights(run) for run in runs))}


def shares(case: Case, ranks: Ranks, folder: Path) -> dict[str, float]:
    """How much of a model a rank has."""
    parameters = list(Run(case, ranks).engine.model.parameters())
    mine = sum(p.to_local().numel() for p in parameters)
    return {"mine": mine, "all": sum(p.numel() for p in parameters)}


JOBS = {
    "measure": measure,
    "twenty": twenty,
    "shares": shares,
    "reload": reload,
    "unused": unused,
    "poisoned": poisoned,
}


def even(case: Case) -> Case:
    """The case with a model that splits evenly along the other axes than `shard`."""
    moe = case.shape.moe
    changes = {"vocab": 22} | ({} if moe is None else {"moe": moe.model_copy(update={"experts": 4})})
    return replace(case, shape=case.shape.model_copy(update=changes))


def main(folder: Path, dtype: str, *jobs: str) -> None:
    """Jobs are `AXIS=SIZE,…/CASE/WHAT`, or `AXIS=SIZE,…>AXIS=SIZE,…/CASE/reload`."""
    torch.set_num_threads(1)
    torch.set_default_dtype(getattr(torch, dtype))
    layouts: dict[str, Ranks] = {}
    found: dict[str, dict[str, float]] = {}
    for job in jobs:
        axes, name, what = job.split("/")
        name = name.replace("_", " ")
        for layout in axes.split(">"):
            sizes: dict[str, Any] = dict(part.split("=") for part in layout.split(","))
            sizes = {axis: size if axis == "schedule" else int(size) for axis, size in sizes.items()}
            if layout not in layouts:
                layouts[layout] = Ranks.join(torch.device("cpu"), **sizes)
        first, *others = (layouts[layout] for layout in axes.split(">"))
        case = CASES[name] if axes.startswith("shard=") and not {",", ">"} & {*axes} else even(CASES[name])
        more = {"then": others} if others else {}
        found[job] = JOBS[what](case, first, folder / job.replace("/", " "), **more)
    (folder / f"{os.environ['RANK']}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
