"""A step: a name, a function, and a config in which the outputs of other steps may stand anywhere.

    @step
    def clean(out: Path, *, source: Path, min_words: int = 5, workers: Execution[int] = 2) -> None: ...

    raw = download(url="https://…")
    docs = clean(source=raw / "books.jsonl")

Calling a decorated function makes a `Step` and runs nothing. Without the decorator: `Step("clean", function, config)`,
where `config` is a dataclass or a pydantic model, given to `function(config, out)`, or a dict, given as keywords.
A function writes all that it makes into the folder `out`.
"""

import dataclasses
import functools
import importlib
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FunctionType
from typing import Any, get_type_hints

from pydantic import BaseModel

from palestra.errors import UsageError
from palestra.spec.execution import Execution, is_execution

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*(/[A-Za-z0-9][A-Za-z0-9_.-]*)*")
LONGEST_NAME = 120


@dataclass(frozen=True, eq=False)
class Step:
    """One step. Two that are equal in name and config are the same step, whoever made them."""

    name: str
    """What it is called: the first part of its address; slashes make folders."""
    function: Callable[..., Any]
    config: Any = field(default_factory=dict)
    """A dict, a dataclass or a pydantic model."""
    retries: int = 0
    """How often a failed one is tried again in the same run of the pipeline."""
    resumes: bool = False
    """Whether the function goes on with what a killed attempt left in `out`; else it finds an empty folder."""

    def __post_init__(self) -> None:
        if not NAME.fullmatch(self.name) or len(self.name) > LONGEST_NAME:
            raise UsageError(
                f"{self.name!r} cannot name a step: use letters, digits, '_', '-' and '.', folders with '/', "
                f"at most {LONGEST_NAME} characters"
            )

    def __truediv__(self, path: str) -> "Output":
        return Output(self, path)

    def named(self, name: str) -> "Step":
        """The same step by another name."""
        return replace(self, name=name)

    def unawaited(self, path: str = "") -> "Output":
        """Its output as it is when another step begins: part of that one's address, but neither run nor waited for."""
        return Output(self, path, awaited=False)


@dataclass(frozen=True, eq=False)
class Output:
    """A file or folder in a step's output. In a config it stands where the path will."""

    step: Step
    path: str = ""
    awaited: bool = True

    def __post_init__(self) -> None:
        parts = Path(self.path).parts
        if Path(self.path).is_absolute() or ".." in parts:
            raise UsageError(f"{self.path!r} is not a path inside the output of {self.step.name}")

    def __truediv__(self, path: str) -> "Output":
        return replace(self, path=f"{self.path}/{path}" if self.path else path)


def step(function: Callable[..., Any] | None = None, *, name: str | None = None, **about: Any) -> Callable[..., Any]:
    """A function as a maker of steps; `about` are fields of `Step`, such as `retries` and `resumes`."""
    if function is None:
        return functools.partial(step, name=name, **about)
    signature = inspect.signature(function)
    if "out" not in signature.parameters:
        raise UsageError(f"{function.__qualname__} must take `out`, the folder that it writes into")
    for parameter in signature.parameters.values():
        if parameter.kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL):
            raise UsageError(f"{function.__qualname__}: a step gets its config by names, so {parameter} cannot be")
    rest = signature.replace(parameters=[p for p in signature.parameters.values() if p.name != "out"])

    @functools.wraps(function)
    def make(*args: Any, **kwargs: Any) -> Step:
        try:
            bound = rest.bind(*args, **kwargs)
        except TypeError as error:
            raise UsageError(f"step {function.__name__}: {error}") from error
        bound.apply_defaults()
        config: dict[str, Any] = {}
        for parameter in rest.parameters.values():
            if parameter.kind is inspect.Parameter.VAR_KEYWORD:
                config |= bound.arguments.get(parameter.name, {})
            else:
                config[parameter.name] = bound.arguments[parameter.name]
        return Step(name or function.__name__, function, config, **about)

    make.step_function = function  # pyrefly: ignore[missing-attribute]
    return make


def call(function: Callable[..., Any] | str, config: Any, out: Path) -> Any:
    """Carry a step out, its inputs being paths by now; the function may be what `portable` made of it."""
    if isinstance(function, str):
        function = _found(*function.split(":"))
    return function(**config, out=out) if isinstance(config, Mapping) else function(config, out)


def portable(function: Callable[..., Any]) -> Callable[..., Any] | str:
    """The function as "module:name", where another process can import it so; else itself.

    By its name pickle would find what the decorator made of it, and not send it.
    """
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    if module in (None, "__main__") or name is None or "<" in name or module not in sys.modules:
        return function
    try:
        return f"{module}:{name}" if _found(module, name) is function else function
    except AttributeError:
        return function


def _found(module: str, name: str) -> Callable[..., Any]:
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return getattr(found, "step_function", found)


def execution_fields(config: Any, function: Callable[..., Any]) -> frozenset[str]:
    """The fields of a config that are no part of the address."""
    if isinstance(config, BaseModel):
        return frozenset(name for name, info in type(config).model_fields.items() if Execution in info.metadata)
    owner = type(config) if dataclasses.is_dataclass(config) else plain(function)
    if not isinstance(owner, type | FunctionType):  # a callable object: nothing says what its config's fields are
        return frozenset()
    try:
        hints = get_type_hints(owner, include_extras=True)
    except NameError as error:
        raise UsageError(
            f"the types of {owner.__module__}:{owner.__qualname__} cannot be read ({error}): "
            "import at run time what they name"
        ) from error
    return frozenset(name for name, hint in hints.items() if is_execution(hint))


def plain(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function itself under decorators and `functools.partial`."""
    function = inspect.unwrap(function)
    return plain(function.func) if isinstance(function, functools.partial) else function


def children(value: Any) -> Iterator[tuple[str, Any]]:
    """The parts of a value that may hold outputs, each with its key; nothing for a value that has no parts."""
    if isinstance(value, BaseModel):
        yield from ((name, getattr(value, name)) for name in type(value).model_fields)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type | Step | Output):
        yield from ((f.name, getattr(value, f.name)) for f in dataclasses.fields(value))
    elif isinstance(value, Mapping):
        yield from ((str(key), item) for key, item in value.items())
    elif isinstance(value, list | tuple):
        yield from ((str(index), item) for index, item in enumerate(value))
    elif isinstance(value, set | frozenset) and any(True for item in value for _ in outputs(item)):
        raise UsageError("the outputs of steps cannot stand in a set, which has no order: use a list")


def outputs(value: Any) -> Iterator[Output]:
    """All outputs of other steps in a config, in order."""
    if isinstance(value, Output):
        yield value
    elif isinstance(value, Step):
        yield Output(value)
    else:
        for _, item in children(value):
            yield from outputs(item)


def filled(value: Any, path_of: Callable[[Output], Any]) -> Any:
    """The value with each output of a step replaced."""
    if isinstance(value, Output):
        return path_of(value)
    if isinstance(value, Step):
        return path_of(Output(value))
    if isinstance(value, BaseModel):
        # Not validated again: what was an output is a path now, which is what the field is for.
        return value.model_copy(update={name: filled(item, path_of) for name, item in children(value)})
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changes = {f.name: filled(getattr(value, f.name), path_of) for f in dataclasses.fields(value) if f.init}
        return replace(value, **changes)
    if isinstance(value, Mapping):
        return {key: filled(item, path_of) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [filled(item, path_of) for item in value]
        if isinstance(value, list):
            return items
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    return value
