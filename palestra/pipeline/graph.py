"""The graph of steps: their order, the plan of a run, and what an address is made of."""

import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from palestra.errors import UsageError
from palestra.pipeline.form import run_spec
from palestra.pipeline.outputs import Outputs
from palestra.pipeline.step import Step, address_of, children, execution_fields, identity, lines, outputs, plain


@dataclass(frozen=True)
class Node:
    """A step with what follows from its place in the graph."""

    step: Step
    address: str
    identity: dict[str, Any]
    inputs: tuple[str, ...]
    """Addresses of the steps that must be done before it."""
    unawaited: tuple[str, ...]
    """Addresses of those whose outputs it takes as they are."""


class Graph:
    """All steps that some targets need, each after its inputs. Equal steps are one node."""

    def __init__(self, targets: Iterable[Step]):
        self.nodes: dict[str, Node] = {}
        self._addresses: dict[Step, str] = {}
        for step in _inputs_first(targets):
            self._add(step)
        self.targets = [self._addresses[step] for step in targets]

    def address(self, step: Step) -> str:
        """The address of a step of the graph."""
        return self._addresses[step]

    def needed(self, targets: Iterable[str], is_done: Callable[[str], bool]) -> list[str]:
        """What must run for the targets, in order; inputs of a step that is done are not needed and may be gone."""
        needed: set[str] = set()
        stack = list(targets)
        while stack:
            address = stack.pop()
            if address not in needed and not is_done(address):
                needed.add(address)
                stack += self.nodes[address].inputs
        return [address for address in self.nodes if address in needed]

    def _add(self, step: Step) -> None:
        identified = identity(step, self.address)
        address = self._addresses[step] = address_of(identified)
        if address in self.nodes:
            first = self.nodes[address].step
            if _origin(first.function) != _origin(step.function):
                raise UsageError(
                    f"two steps are called {step.name} with the same config, but one runs {_origin(first.function)}, "
                    f"the other {_origin(step.function)}: give them different names"
                )
            return
        needs: dict[bool, dict[str, None]] = {True: {}, False: {}}  # dicts for their order
        for output in outputs(step.config):
            needs[output.awaited][self.address(output.step)] = None
        self.nodes[address] = Node(step, address, identified, tuple(needs[True]), tuple(needs[False]))


def _origin(function: Callable[..., Any]) -> str:
    inner = plain(function)
    return f"{inner.__module__}:{inner.__qualname__}" if hasattr(inner, "__qualname__") else repr(inner)


def _inputs_first(targets: Iterable[Step]) -> Iterator[Step]:
    """All steps, each after its inputs: depth first, with a stack, as a chain may be longer than Python's."""
    finished: dict[Step, bool] = {}  # False: on the path from a target to the top of the stack
    stack = list(targets)[::-1]
    while stack:
        step = stack.pop()
        if step not in finished:
            finished[step] = False
            stack.append(step)
            inputs = [output.step for output in outputs(step.config)]
            for other in inputs:
                if finished.get(other) is False:
                    raise UsageError(f"{other.name} needs its own output, by way of {step.name}")
            stack += inputs[::-1]
        elif not finished[step]:
            finished[step] = True
            yield step


Action = Literal["run", "skip", "wait", "refuse"]
NEEDS = "needs"
ABSENT = "(absent)"


@dataclass(frozen=True)
class Planned:
    """One step of a plan."""

    address: str
    action: Action
    reason: str


def chosen(graph: Graph, only: Sequence[str]) -> list[str]:
    """The steps whose names `--only` matches, or the targets; an expression that matches none is an error."""
    if not only:
        return graph.targets
    matching: dict[str, None] = {}  # a dict for its order
    for pattern in only:
        try:
            matches = [a for a, node in graph.nodes.items() if re.search(pattern, node.step.name)]
        except re.error as error:
            raise UsageError(f"--only {pattern!r} is not a regular expression: {error}") from error
        if not matches:
            names = ", ".join(sorted({node.step.name for node in graph.nodes.values()}))
            raise UsageError(f"--only {pattern!r} matches no step; there are {names}")
        matching |= dict.fromkeys(matches)
    return list(matching)


def plan(graph: Graph, outputs: Outputs, *, only: Sequence[str] = (), force_failed: bool = False) -> list[Planned]:
    """What a run would do with each chosen step and with the steps that it needs, and why."""
    is_done = functools.cache(lambda address: outputs.done(address) is not None)  # a request under a URL
    targets = chosen(graph, only)
    shown = {*targets, *graph.needed(targets, is_done)}
    planned, stuck = [], set()
    for address in [address for address in graph.nodes if address in shown]:
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
    if (owner := outputs.lease(address).holder()) is not None:
        return Planned(address, "wait", f"process {owner.pid} on {owner.host} is running it")
    if outputs.half_done(address) is not None:
        return Planned(address, "run", "done before, except for the final rename of its folder")
    if attempt is None:
        return Planned(address, "run", "not done yet")
    reasons = {"failed": "failed before", "running": "its process died", "stopped": "was stopped"}
    return Planned(address, "run", f"not done yet: {reasons[attempt['state']]}")


@dataclass(frozen=True)
class Explanation:
    """What the address of one step is made of."""

    address: str
    place: str
    """Where its output is or will be."""
    done: bool
    made_of: dict[str, str]
    """Dotted path to value."""
    left_out: dict[str, str]
    """The same of the fields marked `Execution`."""
    other: str | None
    """The address of the newest other step of its name that is done."""
    differences: list[tuple[str, str, str]]
    """Path, value there, value here; `ABSENT` on the side that has none."""


def explain(graph: Graph, outputs: Outputs, name: str) -> Explanation:
    """What the address of a step is made of; the step is given by its name or address."""
    node = _named(graph, name)
    here = lines(node.identity)
    others = [status for status in outputs.earlier(node.step.name) if status["address"] != node.address]
    there = lines(others[0]["identity"]) if others else here
    differing = [path for path in dict.fromkeys([*here, *there]) if there.get(path) != here.get(path)]
    if node.step.function is run_spec:
        left_out = {".".join(path): repr(value) for path, value in node.step.config["execution"]}
    else:
        left_out = dict(_execution_only(node.step.config, "", execution_fields(node.step.config, node.step.function)))
    return Explanation(
        address=node.address,
        place=outputs.place(node.address),
        done=outputs.done(node.address) is not None,
        made_of=here,
        left_out=left_out,
        other=others[0]["address"] if others else None,
        differences=[(path, there.get(path, ABSENT), here.get(path, ABSENT)) for path in differing],
    )


def _named(graph: Graph, name: str) -> Node:
    nodes = [node for node in graph.nodes.values() if name in (node.step.name, node.address)]
    if len(nodes) == 1:
        return nodes[0]
    if nodes:
        addresses = ", ".join(node.address for node in nodes)
        raise UsageError(f"{len(nodes)} steps are called {name}: give the address of one: {addresses}")
    names = ", ".join(dict.fromkeys(node.step.name for node in graph.nodes.values()))
    raise UsageError(f"no step is called {name}; there are {names}")


def _execution_only(value: Any, path: str, marked: frozenset[str]) -> Iterator[tuple[str, str]]:
    """The fields marked `Execution` in a config, and in dataclasses and models inside it."""
    for key, item in children(value):
        at = f"{path}.{key}" if path else key
        if key in marked:
            yield at, repr(item)
        else:
            parts = not isinstance(item, Mapping | list | tuple) and any(children(item))
            yield from _execution_only(item, at, execution_fields(item, type(item)) if parts else frozenset())
