"""The graph of steps behind what was asked for: addresses, inputs, and an order in which they can run."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from palestra.errors import UsageError
from palestra.pipeline.address import address, identity
from palestra.pipeline.step import Step, outputs, plain


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
        found = address(identified)
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
