"""What each rank of test_lm_ranks.py does: train models beside whole ones and write down how far apart they are.

torchrun --nproc-per-node 2 tests/ranks_worker.py FOLDER float64 shard=2/tied tensor=2/experts
"""

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from palestra.lm.batch import Batch, score
from palestra.lm.engine import Loss, TrainEngine
from palestra.lm.lora import add_lora
from palestra.lm.model import Transformer
from palestra.lm.moe import router_terms
from palestra.lm.objectives import reward_loss
from palestra.lm.optim import Ema, Optimizer
from palestra.lm.ranks import Ranks
from palestra.lm.scorer import ScalarModel
from palestra.spec.kinds.lm import RewardLossSpec
from palestra.spec.lm import AdamWSpec, LoraSpec, MuonSpec
from palestra.spec.schedule import Schedule
from palestra.spec.shape import MoESpec, Shape

SHAPE = Shape(layers=2, width=16, heads=4, kv_heads=2, mlp=24, context=32, vocab=21)
UNTIED = SHAPE.model_copy(update={"tied": False, "qk_norm": "head", "attention_bias": True})
EXPERTS = SHAPE.model_copy(
    update={"moe": MoESpec(experts=3, active=2, mlp=8, shared=1, balance=0.1, z_loss=0.1, bias_rate=0.1)}
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


def copied(state):
    if isinstance(state, dict):
        return {key: copied(value) for key, value in state.items()}
    return state.clone() if isinstance(state, Tensor) else state


def flat(state, name: str = "") -> dict[str, Tensor | float]:
    if isinstance(state, dict):
        return {key: value for part in state for key, value in flat(state[part], f"{name}/{part}").items()}
    return {} if state is None else {name: state}


def measure(case: Case, ranks: Ranks) -> dict[str, float]:
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
    found["state"] = apart(*(flat(run.engine.state()) for run in runs))
    found |= {f"{name} in turn": value for name, value in exchanged(alone, together).items()}
    return found


def exchanged(alone: Run, together: Run) -> dict[str, float]:
    """One process goes on with what the ranks have kept, and the ranks with what it has."""
    kept = [(copied(run.engine.state()), copied(weights(run))) for run in (together, alone)]
    others = [Run(run.case, run.engine.ranks) for run in (alone, together)]
    for run, (state, model) in zip(others, kept, strict=True):
        run.backward(5)  # loaded by an engine that has been at work
        run.step(5)
        run.engine.ranks.scatter(model, run.engine.model)
        run.engine.load_state(state)
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


def twenty(case: Case, ranks: Ranks) -> dict[str, float]:
    """How far losses and weights are from those of one process in the course of 20 steps."""
    runs, losses = (Run(case, Ranks()), Run(case, ranks)), []
    for step in range(20):
        losses.append(apart(*(run.backward(step) for run in runs)))
        for run in runs:
            run.step(min(step, STEPS - 1))
    return {"losses": max(losses), "weights": apart(*(weights(run) for run in runs))}


def shares(case: Case, ranks: Ranks) -> dict[str, float]:
    """How much of a model a rank has."""
    parameters = list(Run(case, ranks).engine.model.parameters())
    mine = sum(p.to_local().numel() for p in parameters)
    return {"mine": mine, "all": sum(p.numel() for p in parameters)}


JOBS = {"measure": measure, "twenty": twenty, "shares": shares}


def even(case: Case) -> Case:
    """The case with a model that splits evenly along the other axes than `shard`."""
    moe = case.shape.moe
    changes = {"vocab": 22} | ({} if moe is None else {"moe": moe.model_copy(update={"experts": 4})})
    return replace(case, shape=case.shape.model_copy(update=changes))


def main(folder: Path, dtype: str, *jobs: str) -> None:
    """Jobs are `AXIS=SIZE,…/CASE/WHAT`."""
    torch.set_num_threads(1)
    torch.set_default_dtype(getattr(torch, dtype))
    layouts: dict[str, Ranks] = {}
    found: dict[str, dict[str, float]] = {}
    for job in jobs:
        axes, name, what = job.split("/")
        name = name.replace("_", " ")
        sizes: dict[str, Any] = dict(part.split("=") for part in axes.split(","))
        sizes = {axis: size if axis == "schedule" else int(size) for axis, size in sizes.items()}
        if axes not in layouts:
            layouts[axes] = Ranks.join(torch.device("cpu"), **sizes)
        found[job] = JOBS[what](CASES[name] if sizes.keys() == {"shard"} else even(CASES[name]), layouts[axes])
    (folder / f"{os.environ['RANK']}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
