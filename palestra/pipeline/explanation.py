"""What the address of a step is made of, what is left out of it, and what differs from the last one of its name."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from palestra.errors import UsageError
from palestra.pipeline.address import lines
from palestra.pipeline.graph import Graph, Node
from palestra.pipeline.outputs import Outputs
from palestra.pipeline.spec_steps import run_spec
from palestra.pipeline.step import children, execution_fields


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
