"""The best layout and split between trainers and generators: by closed forms first, then by simulation."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import product
from math import ceil, exp, log, sqrt
from typing import Any

from palestra.errors import UsageError
from palestra.plan.costs import Layout, Phase, Sampling, publish, sampling, train_step, trainer_memory
from palestra.plan.devices import Pool
from palestra.plan.job import Job
from palestra.plan.simulate import TRAINER, Loop, Outcome, simulate
from palestra.spec.parallel import ParallelSpec

POWERS = tuple(2**power for power in range(12))
ROOM = 0.9
"""Share of a device's memory that a plan may fill: predictions are right to a tenth."""
UNEVENNESS = 0.03
"""Standard deviation of the logarithm of speeds: machines of one type differ by up to 15 % (docs/performance.md)."""
RESTART = 300.0
"""Seconds from a failure to work."""
SIMULATED = 512
"""Completions of a step in a simulation: larger steps on more generators are scaled down together."""
STEPS = 6
"""Steps of a simulation."""


@dataclass(frozen=True)
class Plan:
    """A way to run a job, and what comes of it."""

    job: Job
    pool: Pool
    on: int  # devices that there are for all of it: fewer than processes, if they share
    layout: Layout
    train: Phase
    memory: dict[str, float]  # bytes on each device of the trainer
    generators: int = 0  # beside the trainer; 0: its first process generates
    tensor: int = 1  # devices of one generator
    sample: Sampling | None = None  # A generator, where completions are sampled
    publish: float = 0.0
    verifiers: int = 1

    @property
    def devices(self) -> int:
        return min(self.on, self.layout.processes + self.generators * self.tensor)

    @property
    def trained_in(self) -> float:
        """Seconds of a training step, with the slowest of its devices and those that share one."""
        processes, device = self.layout.processes, self.pool.device
        slowest = 1.0 if device.cpu else exp(UNEVENNESS * sqrt(2 * log(processes)))
        return self.train.seconds * max(1.0, processes / self.on) * slowest * self._crowded(processes, self.generators)

    def _crowded(self, at_work: int, others: int) -> float:
        """How much slower those at work are because of each other, and of others unless all take turns."""
        rollout = self.job.rollout
        at_once = at_work + (others if rollout is not None and rollout.rollout.staleness else 0)
        return 1 + self.pool.device.crowd * (at_once > 1)

    @cached_property
    def loop(self) -> Loop | None:
        """What is simulated."""
        rollout, sample, device = self.job.rollout, self.sample, self.pool.device
        if rollout is None or sample is None:
            return None
        processes, apart = self.layout.processes, bool(self.generators)
        own, sampled = device.prices["complete"], self.job.sampled / max(1, self.generators)
        # Of each second of a generator, what the trainer lends it where both share a core.
        lent = max(0.0, (processes + self.generators * self.tensor) / self.on - 1) * (rollout.rollout.staleness > 0)
        joined, slower = processes > 1, self._crowded(self.generators, processes) if apart else 1.0
        return Loop(
            **{"prompts": rollout.train.prompts_per_step, "group": rollout.rollout.group},
            **{"staleness": rollout.rollout.staleness, "running": rollout.rollout.running},
            **{"mean": self.job.new, "spread": self.job.spread, "longest": rollout.rollout.max_new_tokens},
            **{"slots": sample.slots, "base": slower * (sample.base + own.launches), "each": slower * sample.each},
            **{"verify": self.job.verify, "verifiers": self.verifiers},
            start=sample.start + apart * rollout.rollout.group * device.prices["apart"].rows,
            train=self.trained_in + lent * slower * sampled * (sample.base / sample.slots + sample.each),
            complete=sum(device.prices[name].rows for name in ("complete", "joined")[: 1 + joined]),
            publish=self.publish + own.steps,
            fetch=min(self.publish, 1.0),
            generators=max(1, self.generators),
            burst=8 if device.cpu else 16,
            devices=self.on / self.tensor if apart else 1.0,
            trainers=processes / self.tensor if apart else 1.0,
            unevenness=0.0 if device.cpu else UNEVENNESS,
            **{"restart": RESTART, "repeat": self.repeat},
        )

    @property
    def repeat(self) -> float:
        """Seconds that a trainer does again after a failure: half of those between two checkpoints."""
        return min((each.seconds for each in self.job.spec.every.checkpoint if each.is_time), default=600.0) / 2

    @cached_property
    def estimate(self) -> float:
        """Seconds of a step in closed form: the sum where both take turns, else the slower of both."""
        if (loop := self.loop) is None:
            return self.trained_in
        completions = loop.prompts * loop.group
        tail = min(loop.longest, loop.mean * (1 + loop.spread * sqrt(2 * log(1 + completions))))
        rows = min(loop.slots, max(1.0, completions * (1 + loop.staleness) / loop.generators))
        waves = completions / loop.generators / rows
        every = completions / loop.generators * (loop.mean * loop.each + loop.start / loop.group)
        mine = loop.train + loop.publish + loop.complete * completions
        verdicts = loop.verify * completions / loop.verifiers
        if loop.staleness == 0:
            return mine + max(loop.base * max(tail, waves * loop.mean) + every, verdicts)
        work = every + waves * loop.mean * loop.base
        if loop.together:
            return mine + max(work, verdicts)
        last = tail * (loop.base + rows / 2 * loop.each) / (1 + loop.staleness)  # others end before the longest
        return max(mine, work + loop.fetch, last, verdicts)

    @cached_property
    def outcome(self) -> Outcome | None:
        """What the simulation says."""
        return None if self.loop is None else simulate(scaled(self.loop), STEPS)

    @property
    def step(self) -> float:
        """Seconds of a step."""
        return self.trained_in if self.outcome is None else self.outcome.step

    @cached_property
    def lost(self) -> float:
        """Share of the time that failures cost: how often, by how late one makes the steps of a simulation."""
        each, loop = self.job.mtbf * 3600, self.loop
        if loop is None:
            return min(0.9, self.layout.processes / each * (RESTART + self.repeat))
        small, lost = scaled(loop), 0.0
        when, steps = 1.5 * self.step, STEPS * (1 + loop.staleness)
        for who, count in ((TRAINER, self.layout.processes), (0, small.generators * self.tensor)):
            if who == TRAINER or self.generators:
                late = steps * (simulate(small, steps, [(when, who)]).step - simulate(small, steps).step)
                lost += max(0.0, late) * count / each
        return min(0.9, lost)

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
        every, steps = rollout.every.eval, rollout.train.steps
        times = 2 + (steps // max(1, int(every.amount)) if every is not None and every.unit == "steps" else 0)
        count = rollout.eval.problems * len(rollout.tasks.eval) * (rollout.eval.greedy + rollout.eval.samples)
        rows = max(1.0, min(loop.slots, count / loop.generators))
        return times * count / loop.generators * loop.mean * (loop.base / rows + loop.each)


def scaled(loop: Loop) -> Loop:
    """Fewer generators and prompts, with as many rows on each and as many steps between them."""
    most = min(loop.generators, max(1, loop.prompts * loop.group // SIMULATED))
    factor = next(f for f in range(most, 0, -1) if loop.generators % f == 0 and loop.prompts % f == 0)
    fewer: dict[str, Any] = {name: getattr(loop, name) // factor for name in ("generators", "prompts")}
    fewer |= {name: max(1, getattr(loop, name) // factor) for name in ("verifiers", "running") if getattr(loop, name)}
    fewer |= {"devices": loop.devices / factor, "trainers": loop.trainers / factor}
    return replace(loop, **fewer, complete=loop.complete * factor)


class Search:
    """Plans of a job on a pool of devices."""

    def __init__(self, job: Job, pool: Pool):
        self.job, self.pool = job, pool
        self.trainer = cache(self._fastest)
        self.least: tuple[float, str] | None = None
        """The fewest bytes that a device would have to hold, and for what: for people, where nothing fits."""

    def written(self) -> Plan | None:
        """The spec as it is, with its own layout and cluster; None where it does not fit."""
        spec, train = self.job.spec, self.job.spec.train
        sizes = spec.parallel.sizes(spec.processes)
        layout = Layout(**sizes, checkpointing=train.checkpointing, micro=train.micro_tokens)
        plan = self._trained(layout, spec.cluster.generators == 0)
        return None if plan is None else self._sampled(plan, spec.cluster.generators, 1, self.pool.count)

    def best(self, goal: str = "tokens/s") -> Plan:
        """The best plan that fits: by seconds a step, or by device-seconds; it may leave devices idle."""

        def score(plan: Plan, seconds: float) -> float:
            return seconds * plan.devices if goal == "cost" else seconds

        total, candidates = self.pool.count, []
        while total >= 1:
            candidates += sorted(self.plans(total), key=lambda plan: score(plan, plan.estimate))[:3]
            total //= 2
        if not candidates:
            raise UsageError(self._fits_nowhere())
        first = min(score(plan, plan.estimate) for plan in candidates)
        near = [plan for plan in candidates if score(plan, plan.estimate) <= 1.5 * first]
        return min(near, key=lambda plan: score(plan, plan.hours if goal == "wall" else plan.step))

    def plans(self, total: int) -> Iterator[Plan]:
        """Those with so many devices at most."""
        if (whole := self.trainer(total, self.job.rollout is not None)) is not None:
            plan = self._sampled(whole, 0, 1, total)
            yield from [plan] if plan is not None else []
        if self.job.rollout is None or self.job.rollout.rollout.generator is not None:
            return
        counts = {power for power in POWERS if power < total} | {total * part // 8 for part in range(1, 8)} - {0}
        for trainers in sorted(counts):
            if (whole := self.trainer(trainers, False)) is None:
                continue
            for tensor in (size for size in POWERS[:4] if size <= min(self.pool.each, total - trainers)):
                if (plan := self._sampled(whole, (total - trainers) // tensor, tensor, total)) is not None:
                    yield plan
                    break

    def _fastest(self, count: int, generates: bool) -> Plan | None:
        """The fastest layout of so many processes that fits; None where none does."""
        axes = sorted(self._axes(count), key=lambda layout: train_step(self.job, layout, self.pool).seconds)
        own = self.job.spec.train.micro_tokens
        micros = sorted({max(micro, ceil(self.job.longest)) for micro in (own // 4, own, 4 * own)})
        for start in range(0, len(axes), 8):
            small = [layout._replace(checkpointing="full", micro=micros[0]) for layout in axes[start : start + 8]]
            fit = [layout for layout in small if self._trained(layout, generates) is not None]
            ways = product(fit, ("none", "selective", "full"), micros)
            tried = [layout._replace(checkpointing=name, micro=micro) for layout, name, micro in ways]
            for layout in sorted(tried, key=self._preference):
                if (plan := self._trained(layout, generates)) is not None:
                    return plan
        return None

    def _preference(self, layout: Layout) -> tuple[float, bool, bool]:
        """Faster first; of those that are as fast within a percent, what the spec says."""
        seconds, own = train_step(self.job, layout, self.pool).seconds, self.job.spec.train
        return round(log(seconds) * 100), layout.checkpointing != own.checkpointing, layout.micro != own.micro_tokens

    def _axes(self, count: int) -> Iterator[Layout]:
        """Layouts of so many processes that the model and the batch allow."""
        spec = self.job.spec
        if count > 1 and next(spec.alone(), None) is not None:
            return
        whole = spec.model.lora is None and spec.train.weights == "fp32"
        least = self.job.shape.parameters() * (10.0 if whole else 0.5)  # weights, gradients and moments
        for sizes in self._splits:
            rest, odd = divmod(count, sizes["tensor"] * sizes["context"] * sizes["pipeline"] * sizes["expert"])
            for data in (power for power in POWERS[:10] if not odd and rest % power == 0):
                layout = Layout(data=data, shard=rest // data, **sizes, micro=spec.train.micro_tokens)
                if layout.apart <= spec.examples and not self._too_large(least * data / count, count):
                    yield layout

    @cached_property
    def _splits(self) -> list[dict[str, Any]]:
        """Sizes of tensor, context, pipeline and expert that the model allows."""
        spec, shape = self.job.spec, self.job.shape
        inside = [size for size in POWERS if size <= min(8, self.pool.each)]
        stages = POWERS[:5] if spec.kind in ("pretrain", "sft", "posttrain") else (1,)
        experts = POWERS[:7] if shape.moe is not None else (1,)
        names, lora = ("tensor", "context", "pipeline", "expert"), spec.model.lora is not None
        every: list[dict[str, Any]] = [
            dict(zip(names, sizes, strict=True)) for sizes in product(inside, inside, stages, experts)
        ]
        return [sizes for sizes in every if not any(ParallelSpec(**sizes).problems(shape, lora=lora))]

    def _trained(self, layout: Layout, generates: bool) -> Plan | None:
        memory = trainer_memory(self.job, layout, self.pool, generates=generates)
        if self._too_large(sum(memory.values()), layout.processes):
            return None
        return Plan(self.job, self.pool, self.pool.count, layout, train_step(self.job, layout, self.pool), memory)

    def _too_large(self, needed: float, count: int, what: str = "training") -> bool:
        """Whether a device cannot hold it; the least of what did not fit is kept for people."""
        if needed <= ROOM * self.pool.device.memory:
            return False
        if self.least is None or needed < self.least[0]:
            self.least = needed, f"{what} on {count}"
        return True

    def _sampled(self, plan: Plan, generators: int, tensor: int, total: int) -> Plan | None:
        """The plan with generators; None where the model does not fit one."""
        job, device, rollout = self.job, self.pool.device, self.job.rollout
        if rollout is None:
            return replace(plan, on=total)
        flying = rollout.train.prompts_per_step * (rollout.rollout.staleness + 1)
        rows = min(flying, rollout.rollout.running or flying) * rollout.rollout.group / max(1, generators)
        room = ROOM * device.memory - device.base * bool(generators)  # else the trainer's memory has it already
        if (sample := sampling(job, self.pool, rows, tensor=tensor, room=room)) is None:
            self._too_large(job.shape.parameters() * job.used(device.cpu) / tensor, tensor, "generating")
            return None
        sent = publish(job, plan.layout, self.pool, generators, tensor)
        own = rollout.cluster.verifiers or rollout.rollout.verifiers
        verifiers = own or (1 if device.cpu else 16 * self.pool.nodes)
        split = {"generators": generators, "tensor": tensor, "sample": sample, "on": total}
        return replace(plan, **split, publish=sent, verifiers=verifiers)

    def _fits_nowhere(self) -> str:
        device, (needed, what) = self.pool.device, self.least or (0.0, "the model")
        have = ROOM * device.memory
        sizes = f"needs {needed / 1e9:.1f} GB on each, {(needed - have) / 1e9:.1f} GB more than the {have / 1e9:.1f} GB"
        return (
            f"the model fits nowhere on {self.pool.count} × {device.name}: at best, {what} {sizes} that may be filled. "
            "Give more --devices or --nodes, or train less of it: model.lora, optim.state=8bit, train.weights=bf16"
        )
