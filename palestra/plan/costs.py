"""Seconds and bytes of training, sampling and sending weights, of a model under a layout on a device."""

from math import ceil, inf, log2
from typing import NamedTuple

from palestra.plan.devices import Pool, Work
from palestra.plan.job import Job
from palestra.spec.memory import KV_CACHE, matrices, predicted
from palestra.spec.shape import Shape

WIRE = 0.75
"""Share of a link's published bandwidth that collectives reach."""
PAGE = 32
"""Tokens of a page of keys and values."""


class Layout(NamedTuple):
    """Processes of the trainer along each axis of `parallel`, and how they compute."""

    data: int = 1
    shard: int = 1
    context: int = 1
    expert: int = 1
    tensor: int = 1
    pipeline: int = 1
    checkpointing: str = "none"
    micro: int = 16384

    @property
    def processes(self) -> int:
        return self.apart * self.context * self.tensor * self.pipeline

    @property
    def apart(self) -> int:
        """Processes with examples of their own."""
        return self.shard * self.data * self.expert

    @property
    def axes(self) -> dict[str, int]:
        """Those that split anything, by name."""
        return {name: size for name, size in zip(self._fields[:6], self[:6], strict=True) if size > 1}


class Phase(NamedTuple):
    """Seconds of a phase by what they go to."""

    compute: float
    bandwidth: float
    latency: float
    network: float = 0.0  # waiting for other processes: collectives that nothing hides
    bubble: float = 0.0  # of a pipeline

    @classmethod
    def of(cls, parts: Work, network: float = 0.0, bubble: float = 0.0) -> "Phase":
        return cls(parts.flops, parts.bytes, parts.host, network, bubble)

    @property
    def seconds(self) -> float:
        return sum(self)

    @property
    def binds(self) -> str:
        """What takes most of it."""
        return max(self._fields, key=lambda name: getattr(self, name))


def train_work(job: Job, layout: Layout, *, cpu: bool) -> tuple[Work, Work]:
    """Of one process in a step: gradients, and optimizer."""
    shape, forwards, micros = job.shape, job.forwards(layout.checkpointing), micro_batches(job, layout)
    passes = forwards / 3  # forward and backward
    tokens = job.trained / layout.processes
    flops = forwards * tokens * shape.flops_per_token(round(job.length / 2))
    flops += tokens * scored_again(shape) * (job.spec.kind not in ("pretrain", "sft"))
    if job.spec.optim.name == "muon":  # its products are as those of training
        sides = [(min(pair), max(pair)) for pair in matrices(shape).values()]
        orthogonal = shape.layers * sum(5 * (4 * s * s * long + 2 * s**3) for s, long in sides)
        flops += job.updates * orthogonal / layout.apart
    train = Work(
        flops=flops,
        bytes=forwards * tokens * traffic(shape, job.used(cpu)),
        launches=passes * micros * shape.layers / layout.pipeline,
        rows=0.0 if job.spec.kind == "pretrain" else passes * job.sequences / layout.apart,  # of unequal lengths
        steps=passes * micros,
    )
    parameters = shape.parameters() / (layout.processes / layout.data)
    update = Work(0.0, 28 * parameters, shape.layers / layout.pipeline, 0.0, 1.0)
    return train, update.times(job.updates * (2 if job.critic else 1))


def scored_again(shape: Shape) -> float:
    """Operations a token of computing the scores of its vocabulary twice: where gradients wait for all of a batch."""
    return 2.0 * (shape.vocab or 0) * shape.width


def micro_batches(job: Job, layout: Layout) -> int:
    """Micro-batches of a process in a step."""
    tokens, longest = job.trained / layout.apart, max(layout.micro, job.longest)
    return job.updates * max(layout.pipeline, ceil(tokens / job.updates / longest))


def traffic(shape: Shape, used: int) -> float:
    """Bytes that a forward pass reads and writes a token, beside weights: norms, rotations, gates, logits."""
    rows = (shape.heads + 2 * shape.kv) * shape.dim
    hidden = shape.hidden if shape.moe is None else shape.moe.active * shape.moe.mlp + shape.moe.shared_width
    return 2 * used * shape.layers * (3 * shape.width + rows + 1.5 * hidden) + 4 * (shape.vocab or 0)


def train_step(job: Job, layout: Layout, pool: Pool) -> Phase:
    """A training step, updates included, of processes that all wait for the slowest."""
    train, update = train_work(job, layout, cpu=pool.device.cpu)
    hides = pool.device.parts("train", train)
    parts = hides.plus(pool.device.parts("update", update))
    outside, inside = _collectives(job, layout, pool)
    if not pool.device.cpu:  # where the processor sends, nothing hides it
        outside = max(0.0, outside - sum(hides)) + outside / job.shape.layers
    bubble = (layout.pipeline - 1) / (micro_batches(job, layout) / job.updates) * (sum(parts) + outside + inside)
    return Phase.of(parts, outside + inside, bubble)


def _collectives(job: Job, layout: Layout, pool: Pool) -> tuple[float, float]:
    """Seconds to gather parameters and add gradients (FSDP, FP32), which computing can hide; and inside layers."""
    shape, tensor, apart, micros = job.shape, layout.tensor, layout.shard * layout.context, micro_batches(job, layout)
    layers, used = micros * shape.layers / layout.pipeline, job.used(pool.device.cpu)
    share = 4 * shape.parameters() / (tensor * layout.pipeline * layout.expert)
    numbers = job.trained / layout.apart * used * shape.layers / layout.pipeline / layout.context / tensor
    heads = (2 * shape.heads + 2 * shape.kv) * shape.dim / layout.context
    active = (shape.moe.active if shape.moe is not None else 0) / layout.expert

    def seconds(*kinds: tuple[int, float, float, int]) -> float:
        """Of processes, how often, bytes that each sends in all of them, and processes side by side around them."""
        moved = (sent * (size - 1) / size / (WIRE * pool.bandwidth(near)) for size, _, sent, near in kinds)
        waits = (often * pool.device.hop * log2(2 * size) for size, often, *_ in kinds if size > 1)
        return sum(moved) + sum(waits)

    outside = seconds(
        (apart, 3 * layers + 2 * micros, 3 * micros * share, apart * tensor),  # embeddings are gathered once
        (layout.data, job.updates, 2 * job.updates * share / apart, layout.processes),
    )
    inside = seconds(  # forward and backward
        (tensor, 8 * layers, 8 * numbers * shape.width, tensor),
        (layout.context, 4 * layers, 2 * numbers * heads, tensor * layout.context),
        (layout.expert, 4 * layers, 4 * numbers * active * shape.width, tensor * layout.expert),
    )
    return outside, inside


class Sampling(NamedTuple):
    """A generator: seconds of a decode step are `base + rows · each`."""

    base: float
    each: float
    start: float  # seconds of a prompt, which all completions of a group share
    slots: int  # rows at once
    parts: Phase  # of a decode step with all rows that there are
    weights: float  # bytes
    needed: float  # bytes of weights and of the rows' keys and values


def sampling(job: Job, pool: Pool, rows: float, *, tensor: int = 1, room: float = inf) -> Sampling | None:
    """A generator that would like `rows` at once, split over `tensor` devices; None where not one row fits in `room`.

    `room` are the bytes that it may take on each device.
    """
    shape, device = job.shape, pool.device
    used, context = job.used(device.cpu), job.prompt + job.new / 2
    keys = 2 * shape.layers * shape.kv * shape.dim * used / tensor
    weights = shape.parameters() * used / tensor
    most = (room - weights) / (keys * (job.prompt + job.new))
    if most < 1:
        return None
    slots = max(1, int(min(most, ceil(rows), 512 if device.cpu else 1024)))
    touched = shape.parameters() - (shape.vocab or 0) * shape.width * (0 if shape.tied else 1)
    if shape.moe is not None:  # experts that one of the rows asks for
        active, share = shape.parameters(active=True), shape.moe.active / shape.moe.experts
        touched = active + (1 - (1 - share) ** slots - share) * (shape.parameters() - active)
    flops = shape.flops_per_token(round(context)) / tensor
    wire = 2 * shape.layers * 2 * shape.width * used * (tensor - 1) / tensor / (WIRE * device.link)
    wait = 2 * shape.layers * device.hop * log2(2 * tensor) if tensor > 1 else 0.0
    fixed = device.parts("decode", Work(0.0, touched * used / tensor, shape.layers, 0.0, 1.0))
    row = device.parts("decode", Work(flops, keys * context, 0.0, 1.0, 0.0))
    prompt = Work(flops * job.prompt, job.prompt * traffic(shape, used) / tensor, 0.0, 1.0, 0.0)
    parts = Phase.of(fixed.plus(row.times(slots)), wait + wire * slots)
    needed = weights + slots * keys * (job.prompt + job.new)
    start = device.seconds("prefill", prompt)
    return Sampling(sum(fixed) + wait, sum(row) + wire, start, slots, parts, weights, needed)


def publish(job: Job, layout: Layout, pool: Pool, generators: int, tensor: int = 1) -> float:
    """Seconds from the last update to generators with its weights: gathered, then sent along a chain in pieces."""
    device, shape = pool.device, job.shape
    sent = shape.parameters() * job.used(device.cpu)
    seconds = device.seconds("publish", Work(0.0, 2 * sent, shape.layers, 0.0, 1.0))
    if layout.processes > 1:
        seconds += 4 * shape.parameters() / (WIRE * pool.bandwidth(layout.processes))
        seconds += 3 * shape.layers * device.hop * log2(layout.processes)
    if generators and not device.cpu:
        seconds += sent / (WIRE * pool.bandwidth(layout.processes + generators * tensor)) + device.hop * generators
    return seconds


def trainer_memory(job: Job, layout: Layout, pool: Pool, *, generates: bool) -> dict[str, float]:
    """Bytes on each device of the trainer by what they hold."""
    spec, device = job.spec, pool.device
    tokens, micros = job.trained / layout.apart, micro_batches(job, layout)
    micro = max(min(layout.micro, ceil(tokens / micros)), ceil(job.longest))  # they are of similar size
    settings = {
        "parallel": spec.parallel.model_copy(update=dict(zip(Layout._fields[:6], layout[:6], strict=True))),
        "train": spec.train.model_copy(update={"checkpointing": layout.checkpointing, "micro_tokens": micro}),
        "cluster": spec.cluster.model_copy(update={"generators": 0 if generates else 1, "trainers": None}),
        "devices": layout.processes,
    }
    rows: dict[str, float] = dict(
        predicted(spec.model_copy(update=settings), job.shape, "cpu" if device.cpu else "cuda")
    )
    if job.rollout is not None and KV_CACHE in rows:  # counted without prompts: whole pages on a GPU, as used on a CPU
        new = job.rollout.rollout.max_new_tokens
        most = (job.rollout.rollout.max_prompt_tokens or job.prompt) + new
        rows["KV cache"] = rows.pop(KV_CACHE) * (job.length if device.cpu else PAGE * ceil(most / PAGE)) / new
    more = device.sampling * (job.rollout is not None) + device.joined * (layout.processes > 1)
    return rows | {"process": device.base + more}
