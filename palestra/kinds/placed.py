"""The parts of a post-training run that its cluster places in processes of their own: generators and verifiers."""

from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from palestra.cluster.broadcast import Broadcast
from palestra.cluster.channel import WeightChannel, open_channel
from palestra.cluster.files import Files
from palestra.cluster.fleet import Fleet, HostedEngine
from palestra.cluster.memory import CudaMemory, SharedMemory
from palestra.cluster.placement import Placement, address_of, shares_memory
from palestra.errors import UsageError
from palestra.generate.engine.engine import Engine
from palestra.kinds import models
from palestra.kinds.ranks import apart
from palestra.kinds.trial import Launch, device_of
from palestra.lm import hf
from palestra.runs.session import Session
from palestra.spec.imports import known_objects
from palestra.spec.kinds.distill import DistillSpec
from palestra.spec.kinds.posttrain import PosttrainSpec
from palestra.spec.model import plain
from palestra.tasks.task import Completion, Problem, Verdict
from palestra.tasks.verify.workers import Verifiers, VerifiersElsewhere
from palestra.track.trace import span

TasksKind = PosttrainSpec | DistillSpec
"""Specs of models that are trained on their own completions of tasks."""


def open_placement(spec: TasksKind, session: Session, launch: Launch, stack: ExitStack) -> Placement | None:
    """The processes of a run apart from its trainers, if it has any."""
    if not spec.cluster.apart:
        return None
    run = None if launch.objects else plain(spec)
    asked = apart(spec.cluster, device_of(spec))
    return stack.enter_context(Placement(spec.cluster, spec.name, session.path, asked, run, spec.track.trace))


def open_verifiers(
    spec: TasksKind, launch: Launch, placement: Placement | None, stack: ExitStack
) -> tuple[Verifiers, Verifiers]:
    """The verifiers of training and of evaluation; `stack` closes them."""
    uses, timeout, root = (spec.tasks.train, spec.tasks.eval), spec.rollout.verify_seconds, launch.root
    if placement is None or not spec.cluster.verifiers:
        made = [Verifiers(each, workers=spec.rollout.verifiers, timeout=timeout, root=root) for each in uses]
        return stack.enter_context(made[0]), stack.enter_context(made[1])
    crew = placement.crew("verifier", spec.cluster.verifiers, HostedVerifiers, uses, timeout, root, launch.objects)

    def ask(place: int) -> Any:
        return lambda problem, completion: crew.call("verify", place, problem, completion)

    train, held_out = (VerifiersElsewhere(each, ask(place), root=root) for place, each in enumerate(uses))
    return stack.enter_context(train), stack.enter_context(held_out)


def open_fleet(
    spec: TasksKind, session: Session, launch: Launch, placement: Placement, stack: ExitStack, **settings: Any
) -> Fleet:
    """Engines in other processes, with the settings of the one that the trainer would have."""
    channel = _channel(spec, session, stack)
    fleet = Fleet(placement.hub, channel)
    on_gpu = device_of(spec).type == "cuda"
    first, gpus = spec.processes, [str(gpu) for gpu in range(torch.cuda.device_count() if on_gpu else 0)]
    fleet.crew = placement.crew(
        "generator",
        spec.cluster.generators,
        hosted_engine,
        *(spec, launch.root, channel.address, settings),
        cores=session.manifest["threads"],
        gpus=tuple(gpus[first % len(gpus) :] + gpus[: first % len(gpus)]) if gpus else (),
        prepare=fleet.prepare,
        prepared=fleet.prepared,
    )
    return fleet


def hosted_engine(spec: TasksKind, root: Path, address: str, settings: dict[str, Any]) -> HostedEngine:
    """In its own process: the engine of a spec, which waits for its first weights."""
    start, device = models.trained_start(spec.model, root, chat=True), device_of(spec)
    model = hf.empty_model(start.shape, settings["dtype"], settings["dtype"], device)
    for weight in model.state_dict().values():  # fresh memory may hold values that the engine refuses
        weight.zero_()
    engine = Engine(model, eos=frozenset(start.eos), tokenizer=start.tokenizer, device=device, **settings)
    return HostedEngine(engine, open_channel(address))


class HostedVerifiers:
    """In their own process: the verifiers of training and of evaluation."""

    def __init__(self, uses: tuple[Any, ...], timeout: float, root: Path, objects: dict[str, Any]):
        with known_objects(objects):
            settings: Any = {"workers": 1, "timeout": timeout, "root": root, "traced": False}
            self._sets = [Verifiers(each, **settings) for each in uses]

    async def verify(self, place: int, problem: Problem, completion: Completion) -> Verdict:
        """The verdict of one of them."""
        with span("verify", role="verifier") as about:
            verdict = await self._sets[place].verify(problem, completion)
            about["status"] = verdict.status
        return verdict

    def close(self) -> None:
        for verifiers in self._sets:
            verifiers.close()


def _channel(spec: TasksKind, session: Session, stack: ExitStack) -> WeightChannel:
    """How weights reach generators; `stack` closes it."""
    cluster, device = spec.cluster, device_of(spec).type
    near = shares_memory(cluster)
    kind = cluster.weights if cluster.weights != "auto" else "shared_memory" if near else "broadcast"
    if kind == "shared_memory" and not near:
        raise UsageError("cluster.weights: expected files or broadcast, because the cluster has several machines")
    if kind == "broadcast":
        channel: WeightChannel = Broadcast(address_of(cluster), device=device, seconds=3 * cluster.silence_seconds)
    elif kind == "files":
        channel = Files(stack.enter_context(TemporaryDirectory(dir=session.path, prefix="weights-")))
    else:
        channel = CudaMemory() if device == "cuda" else SharedMemory()
    stack.callback(channel.close)
    return channel
