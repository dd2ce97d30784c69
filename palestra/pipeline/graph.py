"""The graph of steps: order, what a run would do with each step and why, and what an address is made of."""

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
    """All steps that some targets need, inputs before those who need them. Equal steps are one."""

    def __init__(self, targets: Iterable[Step]):
        self.nodes: dict[str, Node] = {}
        self._addresses: dict[int, str] = {}
        self._steps: list[Step] = []  # kept alive: `_addresses` goes by id
        for step in _inputs_first(targets):
            self._add(step)
        self.targets = [self._addresses[id(step)] for step in targets]

    def address(self, step: Step) -> str:
        """The address of a step of the graph."""
        return self._addresses[id(step)]

    def needed(self, targets: Iterable[str], is_done: Callable[[str], bool]) -> list[str]:
        """What must run for the targets, in order: nothing behind a step that is done, whose inputs may be gone."""
        found: set[str] = set()
        waiting = list(targets)
        while waiting:
            address = waiting.pop()
            if address not in found and not is_done(address):
                found.add(address)
                waiting += self.nodes[address].inputs
        return [address for address in self.nodes if address in found]

    def _add(self, step: Step) -> None:
        identified = identity(step, self.address)
        found = address_of(identified)
        self._addresses[id(step)] = found
        self._steps.append(step)
        if found in self.nodes:
            first = self.nodes[found].step
            if _origin(first.function) != _origin(step.function):
                raise UsageError(
                    f"two steps are called {step.name} and have the same config, but one runs {_origin(first.function)}"
                    f" and one {_origin(step.function)}: give them different names"
                )
            return
        needs: dict[bool, dict[str, None]] = {True: {}, False: {}}  # dicts for their order
        for output in outputs(step.config):
            needs[output.awaited][self.address(output.step)] = None
        self.nodes[found] = Node(step, found, identified, tuple(needs[True]), tuple(needs[False]))


def _origin(function: Callable[..., Any]) -> str:
    inner = plain(function)
    return f"{inner.__module__}:{inner.__qualname__}" if hasattr(inner, "__qualname__") else repr(inner)


def _inputs_first(targets: Iterable[Step]) -> Iterator[Step]:
    """All steps, each after its inputs. Not by recursion: a chain may be longer than Python's stack."""
    seen: set[int] = set()
    open_ones: set[int] = set()
    for target in targets:
        stack = [(target, iter(list(outputs(target.config))))]
        if id(target) in seen:
            continue
        seen.add(id(target))
        open_ones.add(id(target))
        while stack:
            step, rest = stack[-1]
            for output in rest:
                if id(output.step) in open_ones:
                    raise UsageError(f"{output.step.name} needs its own output, by way of {step.name}")
                if id(output.step) not in seen:
                    seen.add(id(output.step))
                    open_ones.add(id(output.step))
                    stack.append((output.step, iter(list(outputs(output.step.config)))))
                    break
            else:
                yield step
                open_ones.discard(id(step))
                stack.pop()


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


@dataclass(frozen=True)
class Explanation:
    """Of one step."""

    address: str
    place: str
    """Where its output is or will be."""
    done: bool
    made_of: dict[str, str]
    """Dotted path to value."""
    left_out: dict[str, str]
    """The same of the fields that say how it is carried out."""
    other: str | None
    """The address of the newest other step of its name that is done."""
    differences: list[tuple[str, str, str]]
    """Path, value there, value here; "(absent)" on the side that has none."""


def explain(graph: Graph, outputs: Outputs, name: str) -> Explanation:
    """All about the address of the step of a name, or of an address."""
    node = _named(graph, name)
    here = lines(node.identity)
    others = [status for status in outputs.earlier(node.step.name) if status["address"] != node.address]
    there = lines(others[0]["identity"]) if others else {}
    return Explanation(
        address=node.address,
        place=outputs.place(node.address),
        done=outputs.done(node.address) is not None,
        made_of=here,
        left_out=dict(_left_out(node)),
        other=others[0]["address"] if others else None,
        differences=_differences(there, here) if others else [],
    )


def _named(graph: Graph, name: str) -> Node:
    found = [node for node in graph.nodes.values() if name in (node.step.name, node.address)]
    if len(found) == 1:
        return found[0]
    if found:
        raise UsageError(
            f"{len(found)} steps are called {name}: give one's address: {', '.join(n.address for n in found)}"
        )
    names = ", ".join(dict.fromkeys(node.step.name for node in graph.nodes.values()))
    raise UsageError(f"no step is called {name}; there are {names}")


def _left_out(node: Node) -> Iterator[tuple[str, str]]:
    if node.step.function is run_spec:
        yield from ((".".join(path), repr(value)) for path, value in node.step.config["execution"])
        return
    marked = execution_fields(node.step.config, node.step.function)
    for key, value in children(node.step.config):
        if key in marked:
            yield key, repr(value)
        else:
            yield from _inside(value, key)


def _inside(value: Any, path: str) -> Iterator[tuple[str, str]]:
    """Execution-only fields of dataclasses and models inside a config."""
    marked = frozenset() if isinstance(value, Mapping | list | tuple) else _marked(value)
    for key, item in children(value):
        if key in marked:
            yield f"{path}.{key}", repr(item)
        else:
            yield from _inside(item, f"{path}.{key}")


def _marked(value: Any) -> frozenset[str]:
    return execution_fields(value, type(value)) if list(children(value)) else frozenset()


def _differences(there: Mapping[str, str], here: Mapping[str, str]) -> list[tuple[str, str, str]]:
    paths = dict.fromkeys([*here, *there])
    absent = "(absent)"
    return [(p, there.get(p, absent), here.get(p, absent)) for p in paths if there.get(p) != here.get(p)]
