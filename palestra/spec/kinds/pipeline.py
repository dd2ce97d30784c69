"""The spec of kind `pipeline`: named steps, functions with arguments or specs, that use each other's outputs.

`step:NAME` anywhere in a step's values is the output folder of another step, `step:NAME/docs` a path inside it.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from difflib import get_close_matches
from graphlib import CycleError, TopologicalSorter
from importlib import import_module
from typing import Any, ClassVar, Literal

from pydantic import Field, create_model

from palestra.errors import UsageError, did_you_mean
from palestra.spec.base import NamedSpec
from palestra.spec.imports import argument_problems, load_named
from palestra.spec.model import Conflict, Execution, Model
from palestra.spec.source import DataPath
from palestra.spec.validate import SpecError, validate

REFERENCE = "step:"
STEP_NAME = re.compile(r"(?!.*\.partial-)[A-Za-z0-9][A-Za-z0-9_.-]*(/[A-Za-z0-9][A-Za-z0-9_.-]*)*")


class StepResources(Model):
    """What a step needs of the machine, or of the cluster (`--on ray`), that runs it."""

    cores: int | None = Field(default=None, ge=1)
    """Cores; null: its share of all that there are."""
    gpu: float = Field(default=0.0, ge=0, le=1)
    """GPUs: 1, or the share of one."""
    memory_gb: float = Field(default=0.0, ge=0)
    """Main memory."""


class _Step(Model):
    """A step: a function with arguments (`use`, `with`), or a spec with overrides (`spec`, `set`)."""

    use: str | None = Field(default=None, min_length=1)
    """Built-in step such as filter, or your own as module:function, also looked up beside the file."""
    spec: str | dict[str, Any] | None = None
    """Spec of any other kind: a file (file.yaml or file.yaml:name, relative to this one), or inline."""
    set: dict[str, Any] = Field(default={})
    """Overrides of that spec by dotted path: `optim.lr: 1e-3`."""
    retries: int | None = Field(default=None, ge=0)
    """Retries after a failure; null: the pipeline's."""
    resources: Execution[StepResources] = StepResources()
    """What it needs; steps that need more than there is run alone."""

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of the function."""
        return getattr(self, "with")


# `with` is a word of Python: a class cannot say it.
PipelineStep = create_model(
    "PipelineStep",
    __base__=_Step,
    __doc__=_Step.__doc__,
    **{"with": (dict[str, Any], Field(default={}, description="Arguments of the function besides `out`."))},
)


class PipelineSpec(NamedSpec):
    """A pipeline of steps that use each other's outputs; `palestra pipeline run FILE` runs unfinished ones."""

    search: ClassVar[None] = None  # its steps may have one

    kind: Literal["pipeline"]
    """Kind of spec."""
    prefix: Execution[str] = Field(default="outputs", min_length=1)
    """Location of outputs: a folder, or a URL such as s3://bucket/folder or gs://…."""
    retries: int = Field(default=0, ge=0)
    """Default retries of a step after a failure."""
    steps: dict[str, PipelineStep] = Field(min_length=1)
    """Steps by name; the name prefixes its output folder, and slashes make subfolders."""

    def conflicts(self) -> list[Conflict]:
        """Incomplete steps, unknown functions and arguments, invalid specs, dangling references."""
        conflicts = []
        for name, step in self.steps.items():
            place = ("steps", name)
            if not STEP_NAME.fullmatch(name):
                reason = "expected a name of letters, digits, '_', '-' and '.' (not '.partial-'), with '/' for folders"
                conflicts.append(Conflict(place, reason))
            conflicts += [Conflict((*place, *path), reason) for path, reason in _step_problems(step)]
            conflicts += [Conflict((*place, *path), reason) for path, reason in self._lost_references(name, step)]
        return conflicts or self._circles()

    def order(self) -> list[str]:
        """The names of the steps, each after those whose outputs it uses."""
        needs = {name: sorted(self._needs(step), key=list(self.steps).index) for name, step in self.steps.items()}
        return list(TopologicalSorter(needs).static_order())

    def referred(self, text: str) -> tuple[str, str] | None:
        """The step that a `step:…` means and the path inside its output; None where there is no such step."""
        parts = text.removeprefix(REFERENCE).split("/")
        for length in range(len(parts), 0, -1):
            if (name := "/".join(parts[:length])) in self.steps:
                return name, "/".join(parts[length:])
        return None

    def derived(self) -> dict[str, int | float | str]:
        """The order in which steps can run."""
        return {"steps": len(self.steps), "order": ", ".join(self.order())}

    def _needs(self, step: _Step) -> set[str]:
        targets = (self.referred(text) for _, text in references({"with": step.arguments, "spec": step.spec}))
        return {target[0] for target in targets if target is not None}

    def _lost_references(self, name: str, step: _Step) -> Iterator[tuple[DataPath, str]]:
        for path, text in references({"with": step.arguments, "spec": step.spec}):
            target = self.referred(text)
            if target is None:
                wanted = text.removeprefix(REFERENCE).partition("/")[0]
                near = get_close_matches(wanted, self.steps, n=1)
                hint = f"Did you mean '{REFERENCE}{near[0]}'?" if near else f"The steps are: {', '.join(self.steps)}"
                yield path, f"'{text}' does not name a step. {hint}"
            elif ".." in target[1].split("/"):
                yield path, f"'{text}' is not a path inside the output of {target[0]}"
            elif target[0] == name:
                yield path, f"'{text}' is its own output"

    def _circles(self) -> list[Conflict]:
        try:
            self.order()
        except CycleError as error:
            circle = list(reversed(error.args[1]))
            reason = f"the steps depend on each other in a circle: {' → '.join(circle)}"
            return [Conflict(("steps", circle[0]), reason)]
        return []


def references(value: Any, path: DataPath = ()) -> Iterator[tuple[DataPath, str]]:
    """All texts `step:…` inside a value, each with its place."""
    if isinstance(value, str) and value.startswith(REFERENCE):
        yield path, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from references(item, (*path, key))
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from references(item, (*path, index))


def step_function(use: str) -> Callable[..., Any]:
    """The function of a built-in step, or of `module:function`."""
    if ":" in use:
        return load_named(use, "use")
    # By name, because the steps of data build on specs.
    known = import_module("palestra.data.steps").STEPS
    if use not in known:
        hint = did_you_mean(use, known, f"There are {', '.join(sorted(known))}")
        raise UsageError(f"no built-in step '{use}'. {hint}; your own is module:function")
    return load_named(known[use], "use")


def _step_problems(step: _Step) -> Iterator[tuple[DataPath, str]]:
    if (step.use is None) == (step.spec is None):
        yield (), "expected either `use`, a function, or `spec`"
    elif step.use is not None:
        if step.set:
            yield ("set",), "expected nothing, because it changes a `spec`: write arguments under `with`"
        try:
            problems = argument_problems(step_function(step.use), step.arguments)
            yield from ((("with", *path), reason) for path, reason in problems)
        except UsageError as error:
            yield ("use",), str(error).removeprefix("use: ")
    elif isinstance(step.spec, str) or step.set:  # loading has put the file and `set` into the spec by now
        yield ("spec",), "an override comes too late for a file and for `set`: override keys of the spec itself"
    else:
        yield from _spec_problems(step)


def _spec_problems(step: _Step) -> Iterator[tuple[DataPath, str]]:
    assert isinstance(step.spec, dict)
    if step.arguments:
        yield ("with",), "expected nothing, because it is for a function (`use`): write values under `set`"
    if step.spec.get("kind") == "pipeline":
        yield ("spec", "kind"), "a pipeline cannot be a step of another: put its steps here"
        return
    try:
        validate(step.spec, {})
    except SpecError as error:
        yield from ((("spec", *problem.at), problem.advice) for problem in error.problems)
