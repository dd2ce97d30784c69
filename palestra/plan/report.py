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
    outcome, sample, loop = plan.outcome, plan.sample, plan.loop
    if outcome is None or sample is None or loop is None:
        return _named(plan.train, "training")
    completions = loop.prompts * loop.group
    waited, handled = plan.publish / outcome.step, loop.complete * completions / outcome.step
    if outcome.verifiers > 0.8:
        return "verifiers", f"{plan.verifiers} verifiers work {outcome.verifiers:.0%} of the time: give more of them"
    if waited > 0.25:
        return "sync", f"weights on their way to the generators take {waited:.0%} of a step"
    if handled > 0.4:
        return "latency", f"workflows of {completions} completions take {handled:.0%} of a step in the first process"
    if outcome.trainer > 0.5 and outcome.trainer > outcome.generator:
        return _named(plan.train, f"the trainer, {outcome.trainer:.0%} of the time at work,")
    if outcome.tail > 0.5 and loop.spread:
        advice = "allow more staleness" if not loop.staleness else "fewer generators, or shorter completions"
        few = f"{outcome.tail:.0%} of the generators' time is with few rows or none"
        return "tail", f"the longest completions: {few}; {advice}"
    return _named(sample.parts, f"generators, {outcome.generator:.0%} of the time at work,")


def _named(phase: Phase, who: str) -> tuple[str, str]:
    share = getattr(phase, phase.binds) / phase.seconds
    return phase.binds, f"{who} by {WORDS[phase.binds]} ({share:.0%} of it)"


def as_json(plan: Plan, price: float | None) -> dict[str, Any]:
    """All that is known of a plan."""
    (what, sentence), sample, layout, device = binds(plan), plan.sample, plan.layout, plan.pool.device
    return {
        **{"devices": plan.devices, "device": device.name, "rates": device.source},
        **{"trainers": layout.processes, "parallel": layout.axes, "generators": plan.generators},
        **{"checkpointing": layout.checkpointing, "micro_tokens": layout.micro, "rows": sample.slots if sample else 0},
        "generator_devices": plan.tensor if plan.generators else 0,
        "trainer_bytes": {name: round(count) for name, count in plan.memory.items()},
        "trainer_peak": sum(round(count) for count in plan.memory.values()),
        "generator_peak": round(sample.needed + device.base) if sample and plan.generators else 0,
        **{"train_seconds": plan.trained_in, "publish_seconds": plan.publish, "step_seconds": plan.step},
        **{"tokens_per_second": plan.job.sampled / plan.step, "steps_per_hour": 3600 / plan.step},
        **{"hours": plan.hours, "lost": plan.lost, "binds": what, "why": sentence, "assumed": list(plan.job.assumed)},
        "cost": None if price is None else price * plan.devices * plan.hours,
        "simulated": None if plan.outcome is None else plan.outcome._asdict(),
    }


def overrides(plan: Plan) -> list[str]:
    """The overrides that make a spec run so."""
    own, layout = plan.job.spec.train, plan.layout
    axes = ", ".join(f"{axis}: {size}" for axis, size in layout.axes.items())
    given = [f"'parallel={{{axes}}}'"] if axes else []
    if plan.generators and plan.tensor == 1:
        given.append(f"'cluster={{trainers: {layout.processes}, generators: {plan.generators}}}'")
    ways = {"checkpointing": layout.checkpointing, "micro_tokens": layout.micro}
    return given + [f"train.{name}={value}" for name, value in ways.items() if getattr(own, name) != value]


def lines(plan: Plan, written: Plan | None, price: float | None, spec: str) -> Iterator[str]:
    """The report for people."""
    job, pool, sample = plan.job, plan.pool, plan.sample
    machines = f" on {pool.nodes} machines" * (pool.nodes > 1)
    yield f"{spec} on {pool.count} × {pool.device.name}{machines}; rates: {pool.device.source}"
    size = f"{job.shape.parameters() / 1e6:,.4g}M parameters"
    yield f"model of {size}, {job.sampled:,.0f} tokens a step, {job.spec.train.steps} steps"
    if job.assumed:
        yield f"assumed: {'; '.join(job.assumed)}"
    columns = {"as written": written, "best": plan}
    rows = {name: _column(as_json(one, price)) for name, one in columns.items() if one is not None}
    yield f"\n{'':<22}" + "".join(f"{name:>22}" for name in rows)
    for key in rows["best"]:
        yield f"{key:<22}" + "".join(f"{column[key]:>22}" for column in rows.values())
    held = sorted(((count, name) for name, count in plan.memory.items() if count), reverse=True)
    held_by = ", ".join(f"{name} {_size(count)}" for count, name in held)
    yield f"\nmemory of a trainer: {held_by} of {_size(pool.device.memory)}"
    if sample is not None and plan.generators:
        keys = f"keys and values of {sample.slots} rows {_size(sample.needed - sample.weights)}"
        yield f"memory of a generator: weights {_size(sample.weights)}, {keys}"
    yield f"what binds: {': '.join(binds(plan))}"
    if plan.devices < pool.count:
        yield f"{pool.count - plan.devices} devices are left out: with them it would not be faster"
    if plan.tensor > 1:
        server = f"vLLM server with --tensor-parallel-size {plan.tensor}"
        yield f"it does not fit one device to generate: each generator is a {server} (rollout.generator)"
    yield f"palestra train {' '.join([spec, *overrides(plan)])}"


def _column(row: dict[str, Any]) -> dict[str, str]:
    return {
        "trainers": str(row["trainers"]),
        "layout": ", ".join(f"{axis} {size}" for axis, size in row["parallel"].items()) or "–",
        "generators": f"{row['generators'] or '–'}" + f" × {row['generator_devices']}" * (row["generator_devices"] > 1),
        "devices used": str(row["devices"]),
        "memory of a trainer": _size(row["trainer_peak"]),
        "seconds a step": f"{row['step_seconds']:.3g}",
        "tokens/s": f"{row['tokens_per_second']:,.0f}",
        "steps/h": f"{row['steps_per_hour']:,.1f}",
        "hours to the end": f"{row['hours']:.2f}",
        **({} if row["cost"] is None else {"cost": f"${row['cost']:,.2f}"}),
    }


def _size(count: float) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"
