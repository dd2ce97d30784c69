"""What a run of a pipeline would do with each step, and why. Making a plan writes nothing."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from palestra.errors import UsageError
from palestra.pipeline.graph import Graph
from palestra.pipeline.outputs import Outputs

Action = Literal["run", "skip", "wait", "refuse"]
NEEDS = "needs"


@dataclass(frozen=True)
class Planned:
    """One step of a plan."""

    address: str
    action: Action
    reason: str


def chosen(graph: Graph, only: Sequence[str]) -> list[str]:
    """The steps that `--only` names by regular expressions, or the targets; one that fits no step is an error."""
    if not only:
        return graph.targets
    found: dict[str, None] = {}
    for pattern in only:
        try:
            fits = [a for a, node in graph.nodes.items() if re.search(pattern, node.step.name)]
        except re.error as error:
            raise UsageError(f"--only {pattern!r} is not a regular expression: {error}") from error
        if not fits:
            names = ", ".join(sorted({node.step.name for node in graph.nodes.values()}))
            raise UsageError(f"--only {pattern!r} fits no step; there are {names}")
        found |= dict.fromkeys(fits)
    return list(found)


def plan(graph: Graph, outputs: Outputs, *, only: Sequence[str] = (), force_failed: bool = False) -> list[Planned]:
    """What would happen with each step that is asked for, and with those that it needs."""
    done: dict[str, bool] = {}

    def is_done(address: str) -> bool:
        if address not in done:
            done[address] = outputs.done(address) is not None
        return done[address]

    targets = chosen(graph, only)
    needed = graph.needed(targets, is_done)
    planned, stuck = [], set()
    for address in _in_order(graph, {*targets, *needed}):
        step = _planned(graph, outputs, address, done=is_done(address), stuck=stuck, force_failed=force_failed)
        if step.action == "refuse" or step.reason.startswith(NEEDS):
            stuck.add(address)
        planned.append(step)
    return planned


def _planned(
    graph: Graph, outputs: Outputs, address: str, *, done: bool, stuck: set[str], force_failed: bool
) -> Planned:
    if done:
        return Planned(address, "skip", "done before")
    blocked = [graph.nodes[needed].step.name for needed in graph.nodes[address].inputs if needed in stuck]
    if blocked:
        return Planned(address, "wait", f"{NEEDS} {', '.join(blocked)}, which will not run")
    attempt = outputs.attempt(address)
    if attempt is not None and attempt["state"] == "failed" and not force_failed:
        return Planned(address, "refuse", f"failed before ({attempt['error']}): --force-failed tries again")
    if (owner := outputs.owner(address)) is not None:
        return Planned(address, "wait", f"process {owner.pid} on {owner.host} is at work on it")
    if outputs.half_done(address):
        return Planned(address, "run", "done before, but for the name of its folder")
    if attempt is None:
        return Planned(address, "run", "not done yet")
    reasons = {"failed": "failed before", "running": "its process is gone", "stopped": "was stopped"}
    return Planned(address, "run", f"not done yet: {reasons[attempt['state']]}")


def _in_order(graph: Graph, addresses: Iterable[str]) -> list[str]:
    wanted = set(addresses)
    return [address for address in graph.nodes if address in wanted]
