"""The best layout and split between trainers and generators: by closed forms first, then by simulation."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from math import ceil, exp, log, sqrt

from palestra.errors import UsageError
from palestra.plan.costs import Layout, Phase, Sampling, publish, sampling, train_step, trainer_memory
from palestra.plan.devices import Pool, Work
from palestra.plan.job import Job
from palestra.plan.simulate import Loop, Outcome, simulate
from palestra.spec.parallel import ParallelSpec

POWERS = (1, 2, 4, 8, 16, 32, 64)
ROOM = 0.9
"""Share of a device's memory that a plan may fill: predictions are right to a tenth."""
UNEVENNESS = 0.03
"""Standard deviation of the logarithm of speeds: machines of one type differ by up to 15 % (docs/performance.md)."""
MTBF_HOURS = 50_000.0
"""Of one device: 419 interruptions of 16,384 GPUs in 54 days (Llama 3, arXiv 2407.21783, section 3.3.4)."""
RESTART = 300.0
"""Seconds from a failure of the trainer to the next step."""
SIMULATED = 512
"""Completions of a step in a simulation: larger steps on more generators are scaled down together."""


@dataclass(frozen=True)
class Plan:
    """A way to run a job, and what comes of it."""

    job: Job
    pool: Pool
    layout: Layout
    train: Phase
    memory: dict[str, float]
    """Bytes on each device of the trainer."""
    generators: int
    """Beside the trainer; 0: its first process generates."""
    tensor: int
    """Devices of one generator."""
    sample: Sampling | None
    """A generator, where completions are sampled."""
    publish: float
    verifiers: int
    on: int
    """Devices that there are for all of it: fewer than processes, if they share."""

    @property
    def devices(self) -> int:
        return min(self.on, self.layout.processes + self.generators * self.tensor)

    @property
    def together(self) -> bool:
        """Whether trainer and generators take turns."""
        return not self.generators or self.layout.processes + self.generators * self.tensor > self.on

    @property
    def trained_in(self) -> float:
        """Seconds of a training step, with the slowest of its devices and those that share one."""
        shared = max(1.0, self.layout.processes / self.on)
        slowest = exp(UNEVENNESS * sqrt(2 * log(self.layout.processes))) if self.on > 1 else 1.0
        return self.train.seconds * shared * slowest

    @property
    def loop(self) -> Loop | None:
        """What is simulated."""
        rollout, sample = self.job.rollout, self.sample
        if rollout is None or sample is None:
            return None
        count = max(1, self.generators)
        shared = max(1.0, count * self.tensor / self.on)  # processes that take turns on a core
        complete = self.pool.device.seconds("complete", Work(rows=1.0))
        return Loop(
            prompts=rollout.train.prompts_per_step,
            group=rollout.rollout.group,
            staleness=rollout.rollout.staleness,
            train=self.trained_in,
            publish=self.publish + self.pool.device.seconds("complete", Work(steps=1.0)),
            fetch=min(self.publish, 1.0),
            generators=count,
            slots=sample.slots,
            base=sample.base * shared,
            each=sample.each * shared,
            start=sample.start * shared,
            mean=self.job.new,
            spread=self.job.spread,
            longest=rollout.rollout.max_new_tokens,
            verify=self.job.verify,
            verifiers=self.verifiers,
            complete=complete,
            together=self.together,
            running=rollout.rollout.running,
            unevenness=UNEVENNESS if self.on > 1 else 0.0,
        )

    @cached_property
    def estimate(self) -> float:
        """Seconds of a step in closed form: the sum where both take turns, else the slower of both."""
        if (loop := self.loop) is None:
            return self.trained_in
        completions = loop.prompts * loop.group
        tail = min(loop.longest, loop.mean * (1 + loop.spread * sqrt(2 * log(1 + completions))))
        rows = min(loop.slots, max(1.0, completions * (1 + loop.staleness) / loop.generators))
        work = completions / loop.generators * (loop.mean * (loop.base / rows + loop.each) + loop.start / loop.group)
        last = tail * (loop.base + rows * loop.each)
        mine = loop.train + loop.publish + loop.complete * completions
        verdicts = loop.verify * completions / loop.verifiers
        if loop.staleness == 0:
            waves = completions / loop.generators / rows
            return mine + max(loop.base * max(tail, waves * loop.mean) + work - loop.mean * loop.base * waves, verdicts)
        if loop.together:
            return mine + max(work, verdicts)
        return max(mine, work + loop.fetch, last / (1 + loop.staleness), verdicts)

    @cached_property
    def outcome(self) -> Outcome | None:
        """What the simulation says."""
        return None if self.loop is None else simulate(scaled(self.loop), steps=6)

    @property
    def step(self) -> float:
        """Seconds of a step."""
        return self.trained_in if self.outcome is None else self.outcome.step

    @property
    def lost(self) -> float:
        """Share of the time that failures of the trainer cost: restarts, and half the time between checkpoints."""
        timed = [cadence.seconds for cadence in self.job.spec.every.checkpoint if cadence.is_time]
        rate = 0.0 if self.on == 1 else self.layout.processes / (MTBF_HOURS * 3600)
        return min(0.9, rate * (RESTART + min(timed, default=600.0) / 2))

    @property
    def hours(self) -> float:
        """To the end of the spec, evaluations and failures included."""
        return (self.job.spec.train.steps * self.step + self.evaluations) / (1 - self.lost) / 3600

    @property
    def evaluations(self) -> float:
        """Seconds of all evaluations on tasks."""
        rollout, loop = self.job.rollout, self.loop
        if rollout is None or loop is None or not rollout.tasks.eval:
            return 0.0
        every = rollout.every.eval
        times = 2 + (
            rollout.train.steps // max(1, int(every.amount)) if every is not None and every.unit == "steps" else 0
        )
        count = rollout.eval.problems * len(rollout.tasks.eval) * (rollout.eval.greedy + rollout.eval.samples)
        rows = max(1.0, min(loop.slots, count / loop.generators))
        return times * count / loop.generators * loop.mean * (loop.base / rows + loop.each)


def scaled(loop: Loop) -> Loop:
    """Fewer generators and prompts, with as many rows on each and as many steps between them."""
    factor = min(loop.generators, max(1, loop.prompts * loop.group // SIMULATED))
    factor = next(f for f in range(factor, 0, -1) if loop.generators % f == 0 and loop.prompts % f == 0)
    running = None if loop.running is None else max(1, loop.running // factor)
    return replace(
        loop,
        generators=loop.generators // factor,
        prompts=loop.prompts // factor,
        verifiers=max(1, loop.verifiers // factor),
        complete=loop.complete * factor,
        running=running,
    )


class Search:
    """Plans of a job on a pool of devices."""

    def __init__(self, job: Job, pool: Pool):
        self.job, self.pool = job, pool
        self._layouts: dict[tuple[int, bool], Plan | None] = {}
        self.least: tuple[float, str] | None = None
        """The fewest bytes that a device would have to hold, and for what: for people, where nothing fits."""

    def written(self) -> Plan | None:
        """The spec as it is, with its own layout and cluster; None where it does not fit."""
        spec = self.job.spec
        sizes = spec.parallel.sizes(spec.processes)
        layout = Layout(**sizes, checkpointing=spec.train.checkpointing, micro=spec.train.micro_tokens)
        plan = self._trained(layout, spec.cluster.generators == 0)
        return None if plan is None else self._sampled(plan, spec.cluster.generators, 1, self.pool.count)

    def best(self, goal: str = "tokens/s") -> Plan:
        """The best plan that fits: by seconds a step, or by device-seconds; it may leave devices idle."""
        total, candidates = self.pool.count, []
        while total >= 1:
            plans = sorted(self.plans(total), key=lambda plan: _score(plan, plan.estimate, goal))
            candidates += plans[:2]
            total //= 2
        if not candidates:
            raise UsageError(self._fits_nowhere())
        first = min(_score(plan, plan.estimate, goal) for plan in candidates)
        near = [plan for plan in candidates if _score(plan, plan.estimate, goal) <= 1.5 * first]
        return min(near, key=lambda plan: _score(plan, plan.hours if goal == "wall" else plan.step, goal))

    def plans(self, total: int) -> Iterator[Plan]:
        """Those with so many devices at most."""
        if (whole := self.trainer(total, self.job.rollout is not None)) is not None:
            plan = self._sampled(whole, 0, 1, total)
            yield from [plan] if plan is not None else []
        if self.job.rollout is None or self.job.rollout.rollout.generator is not None:
            return
        counts = {power for power in (*POWERS, 128, 256, 512, 1024, 2048) if power < total}
        counts |= {total * part // 8 for part in range(1, 8)} - {0}
        for trainers in sorted(counts):
            if (whole := self.trainer(trainers, False)) is None:
                continue
            for tensor in (1, 2, 4, 8):
                if tensor > self.pool.each or (total - trainers) // tensor < 1:
                    break
                plan = self._sampled(whole, (total - trainers) // tensor, tensor, total)
                if plan is not None:
                    yield plan
                    break

    def trainer(self, count: int, generates: bool) -> Plan | None:
        """The fastest layout of so many processes that fits; None where none does."""
        if (count, generates) not in self._layouts:
            self._layouts[count, generates] = self._fastest(count, generates)
        return self._layouts[count, generates]

    def _fastest(self, count: int, generates: bool) -> Plan | None:
        axes = sorted(self._axes(count), key=lambda layout: train_step(self.job, layout, self.pool).seconds)
        own = self.job.spec.train.micro_tokens
        micros = [max(micro, ceil(self.job.longest)) for micro in (own // 4, own, 4 * own)]
        for start in range(0, len(axes), 8):
            some = [layout._replace(checkpointing="full", micro=micros[0]) for layout in axes[start : start + 8]]
            some = [
                layout for layout in some if self._trained(layout, generates) is not None
            ]  # the least that it takes
            ways = product(some, ("none", "selective", "full"), {own, *micros} if micros[0] < own else micros[:1])
            tried = [layout._replace(checkpointing=name, micro=micro) for layout, name, micro in ways]
            for layout in sorted(tried, key=self._preference):
                if (plan := self._trained(layout, generates)) is not None:
                    return plan
        return None

    def _preference(self, layout: Layout) -> tuple[float, bool, bool]:
        """Faster first; of those that are as fast within a percent, what the spec says."""
        seconds = train_step(self.job, layout, self.pool).seconds
        own = self.job.spec.train
        return round(log(seconds) * 100), layout.checkpointing != own.checkpointing, layout.micro != own.micro_tokens

    def _axes(self, count: int) -> Iterator[Layout]:
        """Layouts of so many processes that the model and the batch allow."""
        spec = self.job.spec
        if count > 1 and next(spec.alone(), None) is not None:
            return
        # Weights, gradients and moments, at the least.
        least = self.job.shape.parameters() * (
            10.0 if spec.model.lora is None and spec.train.weights == "fp32" else 0.5
        )
        for tensor, context, pipeline, expert in self._splits:
            rest, odd = divmod(count, tensor * context * pipeline * expert)
            for data in (2**power for power in range(10) if not odd and rest % 2**power == 0):
                layout = Layout(rest // data, data, context, expert, tensor, pipeline, micro=spec.train.micro_tokens)
                if layout.apart <= spec.examples and not self._too_large(least * data / count, count):
                    yield layout

    @cached_property
    def _splits(self) -> list[tuple[int, int, int, int]]:
        """Sizes of tensor, context, pipeline and expert that the model allows."""
        spec, shape = self.job.spec, self.job.shape
        inside = [size for size in POWERS if size <= min(8, self.pool.each)]
        stages = POWERS[:5] if spec.kind in ("pretrain", "sft", "posttrain") else (1,)
        experts = [size for size in POWERS if shape.moe is not None or size == 1]
        return [
            (tensor, context, pipeline, expert)
            for tensor, context, pipeline, expert in product(inside, inside, stages, experts)
            if not any(
                ParallelSpec(tensor=tensor, context=context, pipeline=pipeline, expert=expert).problems(
                    shape, lora=spec.model.lora is not None
                )
            )
        ]

    def _trained(self, layout: Layout, generates: bool) -> Plan | None:
        device = self.pool.device
        memory = trainer_memory(self.job, layout, device.cpu, generates=generates) | {"process": device.base}
        if self._too_large(sum(memory.values()), layout.processes):
            return None
        phase = train_step(self.job, layout, self.pool)
        return Plan(self.job, self.pool, layout, phase, memory, 0, 1, None, 0.0, 1, self.pool.count)

    def _too_large(self, needed: float, count: int, what: str = "training") -> bool:
        """Whether a device cannot hold it; the least of what did not fit is kept for people."""
        if needed <= ROOM * self.pool.device.memory:
            return False
        if self.least is None or needed < self.least[0]:
            self.least = needed, f"{what} on {count}"
        return True

    def _sampled(self, plan: Plan, generators: int, tensor: int, total: int) -> Plan | None:
        """The plan with generators; None where the model does not fit one."""
        rollout = self.job.rollout
        if rollout is None:
            return replace(plan, on=total)
        count = max(1, generators)
        flying = rollout.train.prompts_per_step * (rollout.rollout.staleness + 1)
        rows = min(flying, rollout.rollout.running or flying) * rollout.rollout.group / count
        room = None
        if not generators:  # beside the trainer, whose memory has the weights and the keys of all rows already
            room = ROOM * self.pool.device.memory
        sample = sampling(self.job, self.pool, rows, tensor=tensor, room=room)
        if sample is None:
            needed = self.job.shape.parameters() * self.job.used(self.pool.device.cpu) / tensor
            self._too_large(needed, tensor, "generating")
            return None
        sent = publish(self.job, plan.layout, self.pool, generators, tensor)
        own = rollout.cluster.verifiers or rollout.rollout.verifiers
        verifiers = own or (1 if self.pool.device.cpu else 16 * self.pool.nodes)
        return replace(
            plan, generators=generators, tensor=tensor, sample=sample, publish=sent, verifiers=verifiers, on=total
        )

    def _fits_nowhere(self) -> str:
        device, (needed, what) = self.pool.device, self.least or (0.0, "the model")
        have = ROOM * device.memory
        sizes = f"needs {needed / 1e9:.1f} GB on each, {(needed - have) / 1e9:.1f} GB more than the {have / 1e9:.1f} GB"
        return (
            f"the model fits nowhere on {self.pool.count} × {device.name}: at best, {what} {sizes} that may be filled. "
            "Give more --devices or --nodes, or train less of it: model.lora, optim.state=8bit, train.weights=bf16"
        )


def _score(plan: Plan, seconds: float, goal: str) -> float:
    return seconds * plan.devices if goal == "cost" else seconds
