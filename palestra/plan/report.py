"""A plan in words and as JSON: what fits, how fast, how long, what it costs, and what binds."""

from collections.abc import Iterator
from typing import Any

from palestra.plan.costs import Phase
from palestra.plan.search import Plan

WORDS = {
    "compute": "arithmetic",
    "bandwidth": "memory bandwidth",
    "latency": "launches and Python between kernels, not the device's rates",
    "network": "collectives between devices that computing does not hide",
    "bubble": "the pipeline's bubble: more micro-batches, or fewer stages",
}


def binds(plan: Plan) -> tuple[str, str]:
    """What limits a plan (a word of `WORDS`, or `tail`, `sync`, `verifiers`), and a sentence about it."""
    outcome, sample = plan.outcome, plan.sample
    if outcome is None or sample is None:
        return _named(plan.train, "training")
    loop = plan.loop
    assert loop is not None
    if outcome.verifiers > 0.8:
        return "verifiers", f"{plan.verifiers} verifiers work {outcome.verifiers:.0%} of the time: give more of them"
    waited = plan.publish / outcome.step
    if waited > 0.25:
        return "sync", f"weights on their way to the generators take {waited:.0%} of a step"
    handled = loop.complete * loop.prompts * loop.group / outcome.step
    if handled > 0.4:
        return (
            "latency",
            f"workflows of {loop.prompts * loop.group} completions take {handled:.0%} of a step in the first process",
        )
    if outcome.trainer > 0.5 and outcome.trainer > outcome.generator:
        return _named(plan.train, f"the trainer, {outcome.trainer:.0%} of the time at work,")
    if outcome.tail > 0.5 and loop.spread:
        advice = "allow more staleness" if not loop.staleness else "fewer generators, or shorter completions"
        return (
            "tail",
            f"the longest completions: {outcome.tail:.0%} of the generators' time is with few rows or none; {advice}",
        )
    return _named(sample.parts, f"generators, {outcome.generator:.0%} of the time at work,")


def _named(phase: Phase, who: str) -> tuple[str, str]:
    share = getattr(phase, phase.binds) / phase.seconds
    return phase.binds, f"{who} by {WORDS[phase.binds]} ({share:.0%} of it)"


def as_json(plan: Plan, price: float | None) -> dict[str, Any]:
    """All that is known of a plan."""
    what, sentence = binds(plan)
    sample, outcome = plan.sample, plan.outcome
    row = {
        "devices": plan.devices,
        "device": plan.pool.device.name,
        "rates": plan.pool.device.source,
        "trainers": plan.layout.processes,
        "parallel": plan.layout.axes,
        "checkpointing": plan.layout.checkpointing,
        "micro_tokens": plan.layout.micro,
        "generators": plan.generators,
        "generator_devices": plan.tensor if plan.generators else 0,
        "rows": sample.slots if sample else 0,
        "trainer_bytes": {name: round(count) for name, count in plan.memory.items()},
        "trainer_peak": round(sum(plan.memory.values())),
        "generator_peak": round(sample.needed + plan.pool.device.base) if sample and plan.generators else 0,
        "train_seconds": plan.trained_in,
        "publish_seconds": plan.publish,
        "step_seconds": plan.step,
        "tokens_per_second": plan.job.sampled / plan.step,
        "steps_per_hour": 3600 / plan.step,
        "hours": plan.hours,
        "lost": plan.lost,
        "cost": None if price is None else price * plan.devices * plan.hours,
        "binds": what,
        "why": sentence,
        "assumed": list(plan.job.assumed),
    }
    return row | {"simulated": outcome._asdict() if outcome else None}


def overrides(plan: Plan) -> list[str]:
    """The overrides that make a spec run so."""
    own, layout = plan.job.spec, plan.layout
    axes = ", ".join(f"{axis}: {size}" for axis, size in layout.axes.items())
    given = [f"'parallel={{{axes}}}'"] if axes else []
    if plan.generators and plan.tensor == 1:
        given.append(f"'cluster={{trainers: {layout.processes}, generators: {plan.generators}}}'")
    for name, value in (("checkpointing", layout.checkpointing), ("micro_tokens", layout.micro)):
        given += [f"train.{name}={value}"] if getattr(own.train, name) != value else []
    return given


def lines(plan: Plan, written: Plan | None, price: float | None, spec: str) -> Iterator[str]:
    """The report for people."""
    job, pool = plan.job, plan.pool
    machines = f" on {pool.nodes} machines" * (pool.nodes > 1)
    yield f"{spec} on {pool.count} × {pool.device.name}{machines}; rates: {pool.device.source}"
    size = f"{job.shape.parameters() / 1e6:,.4g}M parameters"
    yield f"model of {size}, {job.sampled:,.0f} tokens a step, {job.spec.train.steps} steps"
    if job.assumed:
        yield f"assumed: {'; '.join(job.assumed)}"
    columns = {"best": plan} if written is None else {"as written": written, "best": plan}
    rows = {name: _column(each, price) for name, each in columns.items()}
    yield ""
    yield f"{'':<22}" + "".join(f"{name:>22}" for name in rows)
    for key in next(iter(rows.values())):
        yield f"{key:<22}" + "".join(f"{column[key]:>22}" for column in rows.values())
    yield ""
    yield f"memory of a trainer: {_memory(plan)}"
    if plan.sample is not None and plan.generators:
        weights, needed = job.shape.parameters() * job.used(pool.device.cpu) / plan.tensor, plan.sample.needed
        keys = f"keys and values of {plan.sample.slots} rows {_size(needed - weights)}"
        yield f"memory of a generator: weights {_size(weights)}, {keys}"
    yield f"what binds: {': '.join(binds(plan))}"
    if plan.devices < pool.count:
        yield f"{pool.count - plan.devices} devices are left out: with them it would not be faster"
    if plan.tensor > 1:
        server = f"vLLM server with --tensor-parallel-size {plan.tensor}"
        yield f"it does not fit one device to generate: each generator is a {server} (rollout.generator)"
    given = overrides(plan)
    yield f"palestra train {' '.join([spec, *given])}"


def _column(plan: Plan, price: float | None) -> dict[str, str]:
    hours = plan.hours
    row = {
        "trainers": str(plan.layout.processes),
        "layout": ", ".join(f"{axis} {size}" for axis, size in plan.layout.axes.items()) or "–",
        "generators": (f"{plan.generators}" + f" × {plan.tensor}" * (plan.tensor > 1)) if plan.generators else "–",
        "devices used": str(plan.devices),
        "memory of a trainer": _size(sum(plan.memory.values())),
        "seconds a step": f"{plan.step:.3g}",
        "tokens/s": f"{plan.job.sampled / plan.step:,.0f}",
        "steps/h": f"{3600 / plan.step:,.1f}",
        "hours to the end": f"{hours:.2f}",
    }
    return row | ({} if price is None else {"cost": f"${price * plan.devices * hours:,.2f}"})


def _memory(plan: Plan) -> str:
    rows = sorted(plan.memory.items(), key=lambda row: -row[1])
    return (
        ", ".join(f"{name} {_size(count)}" for name, count in rows if count) + f" of {_size(plan.pool.device.memory)}"
    )


def _size(count: float) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"
