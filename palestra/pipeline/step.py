"""A step: a name, a function, a config that may hold other steps' outputs, and the address made of them.

@step
    def clean(out: Path, *, source: Path, min_words: int = 5, workers: Execution[int] = 2) -> None: ...

    raw = download(url="https://…")
    docs = clean(source=raw / "books.jsonl")

Calling a decorated function makes a `Step` and runs nothing. Without the decorator: `Step("clean", function, config)`,
where `config` is a dataclass or a pydantic model, passed as `function(config, out)`, or a dict, passed as keywords.
A function writes its output into the folder `out`.

A value is a path if something exists there and it is a `Path`, or text with a slash or a suffix (`books.jsonl`,
`data/*.txt`), or the value of a key in `KEYS`. Hashes of files are cached in `PALESTRA_CACHE/hashes` until the size or
the times of a file change.
"""

import dataclasses
import datetime
import enum
import functools
import glob
import hashlib
import inspect
import json
import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePath
from pkgutil import resolve_name
from types import FunctionType
from typing import Any, get_type_hints

from pydantic import BaseModel

from palestra.data.cache import cache_root, file_sha256
from palestra.errors import UsageError
from palestra.runs.store import write_bytes
from palestra.spec.kinds.pipeline import STEP_NAME, StepResources
from palestra.spec.model import Execution
from palestra.spec.renames import original
from palestra.work.redact import redacted

LONGEST_NAME = 120


@dataclass(frozen=True, eq=False)
class Step:
    """One step. Two with the same name and config are the same step."""

    name: str
    """The first part of its address; slashes make folders."""
    function: Callable[..., Any]
    config: Any = field(default_factory=dict)
    """A dict, a dataclass or a pydantic model."""
    retries: int = 0
    """How often a failed step is retried in the same run of the pipeline."""
    resumes: bool = False
    """Whether the function resumes from what a killed attempt left in `out`; else `out` is empty."""
    resources: StepResources = field(default_factory=StepResources)
    """What it needs of the machine that runs it."""

    def __post_init__(self) -> None:
        if not STEP_NAME.fullmatch(self.name) or len(self.name) > LONGEST_NAME:
            raise UsageError(
                f"{self.name!r} cannot name a step: use letters, digits, '_', '-' and '.', folders with '/', "
                f"at most {LONGEST_NAME} characters, and not '.partial-', which names what is not done"
            )

    def __truediv__(self, path: str) -> "Output":
        return Output(self, path)

    def named(self, name: str) -> "Step":
        """The same step by another name."""
        return replace(self, name=name)

    def unawaited(self, path: str = "") -> "Output":
        """Its output as it is when another step begins: part of that step's address, but neither run nor waited for."""
        return Output(self, path, awaited=False)


@dataclass(frozen=True, eq=False)
class Output:
    """A file or folder in a step's output: a placeholder for its path in a config."""

    step: Step
    path: str = ""
    awaited: bool = True

    def __post_init__(self) -> None:
        if Path(self.path).is_absolute() or ".." in Path(self.path).parts:
            raise UsageError(f"{self.path!r} is not a path inside the output of {self.step.name}")

    def __truediv__(self, path: str) -> "Output":
        return replace(self, path=f"{self.path}/{path}" if self.path else path)


def step(function: Callable[..., Any] | None = None, *, name: str | None = None, **about: Any) -> Callable[..., Any]:
    """Decorator: calling the function makes a step; `about` are fields of `Step`, such as `retries` and `resumes`."""
    if function is None:
        return functools.partial(step, name=name, **about)
    signature = inspect.signature(function)
    if "out" not in signature.parameters:
        raise UsageError(f"{function.__qualname__} must take `out`, the folder that it writes into")
    for parameter in signature.parameters.values():
        if parameter.kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL):
            raise UsageError(
                f"{function.__qualname__}: a step gets its config as keywords, so {parameter} is not allowed"
            )
    rest = signature.replace(parameters=[p for p in signature.parameters.values() if p.name != "out"])

    @functools.wraps(function)
    def make(*args: Any, **kwargs: Any) -> Step:
        try:
            bound = rest.bind(*args, **kwargs)
        except TypeError as error:
            raise UsageError(f"step {function.__name__}: {error}") from error
        bound.apply_defaults()
        config = dict(zip(rest.parameters, bound.args, strict=False)) | bound.kwargs
        return Step(name or function.__name__, function, config, **about)

    return make


def call(function: Callable[..., Any] | str, config: Any, out: Path) -> Any:
    """Run a step whose inputs are paths by now; the function may be a result of `portable`."""
    if isinstance(function, str):
        function = _imported(function)
    return function(**config, out=out) if isinstance(config, Mapping) else function(config, out)


def portable(function: Callable[..., Any]) -> Callable[..., Any] | str:
    """The function as "module:name" if another process can import it, else itself.

    pickle would look up the decorated function under that name, and refuse to send the plain one.
    """
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    if module in (None, "__main__") or name is None or "<" in name or module not in sys.modules:
        return function
    try:
        return f"{module}:{name}" if _imported(f"{module}:{name}") is function else function
    except AttributeError:
        return function


def _imported(path: str) -> Callable[..., Any]:
    value = resolve_name(path)
    return getattr(value, "__wrapped__", value)  # of a function decorated with @step the function itself


def execution_fields(config: Any, function: Callable[..., Any]) -> frozenset[str]:
    """The fields of a config that are not part of the address."""
    if isinstance(config, BaseModel):
        return frozenset(name for name, info in type(config).model_fields.items() if Execution in info.metadata)
    owner = type(config) if dataclasses.is_dataclass(config) else plain(function)
    if not isinstance(owner, type | FunctionType):  # a callable object has no annotations of its config
        return frozenset()
    try:
        hints = get_type_hints(owner, include_extras=True)
    except NameError as error:
        raise UsageError(
            f"the types of {owner.__module__}:{owner.__qualname__} cannot be resolved ({error}): "
            "import the names at run time"
        ) from error
    return frozenset(name for name, hint in hints.items() if Execution in getattr(hint, "__metadata__", ()))


def plain(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function itself under decorators and `functools.partial`."""
    function = inspect.unwrap(function)
    return plain(function.func) if isinstance(function, functools.partial) else function


def children(value: Any) -> Iterator[tuple[str, Any]]:
    """The items of a value that may hold outputs, each with its key; nothing for a value without items."""
    if isinstance(value, BaseModel):
        yield from ((name, getattr(value, name)) for name in type(value).model_fields)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type | Step | Output):
        yield from ((f.name, getattr(value, f.name)) for f in dataclasses.fields(value))
    elif isinstance(value, Mapping):
        yield from ((str(key), item) for key, item in value.items())
    elif isinstance(value, list | tuple):
        yield from ((str(index), item) for index, item in enumerate(value))
    elif isinstance(value, set | frozenset) and any(True for item in value for _ in outputs(item)):
        raise UsageError("a set cannot hold outputs of steps, because it has no order: use a list")


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
    """The value with each output of a step replaced by its path."""
    return replaced(value, lambda part: path_of(next(outputs(part))) if isinstance(part, Step | Output) else part)


def replaced(value: Any, new: Callable[[Any], Any]) -> Any:
    """The value with `new(part)` in place of each part for which that is another object."""
    if (other := new(value)) is not value:
        return other
    if isinstance(value, BaseModel):
        # Not validated again: the field now holds the path that it is declared for.
        return value.model_copy(update={name: replaced(item, new) for name, item in children(value)})
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changes = {f.name: replaced(getattr(value, f.name), new) for f in dataclasses.fields(value) if f.init}
        return replace(value, **changes)
    if isinstance(value, Mapping):
        return {key: replaced(item, new) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [replaced(item, new) for item in value]
        if isinstance(value, list):
            return items
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    return value


KEYS = frozenset(("path", "source", "init", "tokenizer", "model", "order", "replay"))
"""Under these keys a text without a slash is a path too, if a file or folder of that name exists."""
RECENT_NS = 2_000_000_000
"""A file that changed just now may change again with the same time: file systems have coarse clocks."""


def content_hash(value: str | PurePath, key: str) -> str | None:
    """A hash of the content at a path, including the names inside a folder; None if the value is not a path."""
    text = os.fspath(value)
    if "://" in text or len(text) > 4096 or not text.isprintable() or not re.search(r"\w", text):  # such as "/"
        return None
    if not (isinstance(value, PurePath) or key in KEYS or "/" in text or PurePath(text).suffix):
        return None
    path = os.path.expanduser(text)
    found = [path] if os.path.exists(path) else sorted(glob.glob(path, recursive=True))
    return _hash([(os.path.basename(name), _of(Path(name))) for name in found]) if found else None


def _of(path: Path) -> str:
    """The hash of one file or folder; only files that changed since the last time are read."""
    kept = cache_root() / "hashes" / hashlib.sha256(os.fsencode(path.resolve())).hexdigest()[:32]
    known = json.loads(kept.read_bytes()) if kept.exists() else {}
    hashes: list[tuple[str, str]] = []
    now: dict[str, list[object]] = {}
    for name, file in [("", path)] if path.is_file() else _files(path):
        about = file.stat()
        stamp = [about.st_size, about.st_mtime_ns, about.st_ctime_ns]
        digest = known[name][1] if known.get(name, [None])[0] == stamp else file_sha256(file)
        hashes.append((name, digest))
        if time.time_ns() - max(stamp[1:]) > RECENT_NS:
            now[name] = [stamp, digest]
    if now != known:
        write_bytes(kept, json.dumps(now).encode())
    return _hash(hashes)


def _files(folder: Path) -> Iterator[tuple[str, Path]]:
    """The files of a folder except hidden ones, in order."""
    for where, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        files = [Path(where, name) for name in sorted(names) if not name.startswith(".")]
        yield from ((file.relative_to(folder).as_posix(), file) for file in files if file.is_file())


def _hash(parts: list[tuple[str, str]]) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


DIGITS = 10
"""Hexadecimal digits of the hash: among a thousand steps of one name two collide with probability 1 in 2 million."""
INPUT = "$step"
FILE = "$file"
"""A path and the hash of its content: the same file with other content is another input."""
TYPE = "$type"
"""The class of a config inside a config: `Adam(lr=1)` is not `Sgd(lr=1)`."""


def identity(step: Step, address_of: Callable[[Step], str]) -> dict[str, Any]:
    """All that a step's result depends on, as plain data; its hash is the address."""
    config = _plain(step.config, step.name, address_of, execution_fields(step.config, step.function))
    if isinstance(config, dict):
        config.pop(TYPE, None)  # of the whole config: that is what the function takes
    return {"name": step.name, "config": config}


def address_of(identified: Mapping[str, Any]) -> str:
    """`name-hash`, the same on every machine and under every prefix."""
    text = json.dumps(original(dict(identified)), sort_keys=True, separators=(",", ":"))
    return f"{identified['name']}-{hashlib.sha256(text.encode()).hexdigest()[:DIGITS]}"


def lines(identified: Mapping[str, Any]) -> dict[str, str]:
    """What an address is made of, for people: dotted path to value, without secrets."""
    return {"name": identified["name"]} | dict(_lines(redacted(identified["config"]), ""))


def _lines(value: Any, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict) and INPUT in value:
        waits = "" if value.get("awaited", True) else " (not waited for)"
        yield path, f"{value[INPUT]}{'/' if value['path'] else ''}{value['path']}{waits}"
    elif isinstance(value, dict) and FILE in value:
        yield path, f"{json.dumps(value[FILE], ensure_ascii=False)} (content {value['sha256'][:10]})"
    elif isinstance(value, dict | list) and value:
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _lines(item, f"{path}.{key}" if path else str(key))
    else:
        yield path, json.dumps(value, ensure_ascii=False)


def _counted(value: Any, left_out: frozenset[str], where: str) -> Iterator[tuple[str, Any]]:
    """The items of a value that are part of the address; the others must not hold outputs."""
    for key, item in children(value):
        if key not in left_out:
            yield key, item
        elif output := next(outputs(item), None):
            raise UsageError(
                f"{where}.{key} is marked Execution, but is the output of {output.step.name}, on which the result "
                "depends: remove the mark"
            )


def _key(where: str) -> str:
    """The key of a value, or of the list that holds it."""
    return next((part for part in reversed(where.split(".")) if not part.isdigit()), "")


def _plain(value: Any, where: str, address_of: Callable[[Step], str], left_out: frozenset[str] = frozenset()) -> Any:
    again = functools.partial(_plain, address_of=address_of)
    match value:
        case Step() | Output():
            output = value if isinstance(value, Output) else Output(value)
            about = {INPUT: address_of(output.step), "path": output.path}
            return about if output.awaited else about | {"awaited": False}
        case None | bool() | int():
            return value.value if isinstance(value, enum.Enum) else value
        case str() | PurePath():
            text = str(value.value if isinstance(value, enum.Enum) else value)
            content = content_hash(value, _key(where))
            return text if content is None else {FILE: text, "sha256": content}
        case float():
            return float(value) if math.isfinite(value) else {"$float": repr(float(value))}
        case bytes():
            return {"$bytes": hashlib.sha256(value).hexdigest()}
        case enum.Enum():
            return again(value.value, where)
        case datetime.date() | datetime.time() | datetime.timedelta():
            return str(value)
        case set() | frozenset():
            list(children(value))  # refuses outputs in a set
            return sorted((again(item, where) for item in value), key=lambda item: json.dumps(item, sort_keys=True))
        case type() | FunctionType():
            if "<" in value.__qualname__:
                raise UsageError(
                    f"{where}: {value.__qualname__} cannot be part of a step's address, because it is local and cannot "
                    "be imported: define it at the top of a module"
                )
            return f"{value.__module__}:{value.__qualname__}"
        case functools.partial():
            return again([value.func, list(value.args), value.keywords], where)
        case Mapping():
            if bad := [key for key in value if not isinstance(key, str | int) or str(key).startswith("$")]:
                raise UsageError(f"{where}: {bad[0]!r} cannot be a key in a step's config: use text without '$'")
            if len({str(key) for key in value}) < len(value):
                raise UsageError(f"{where}: two keys are the same as text, such as 1 and '1': use only text")
            return {key: again(item, f"{where}.{key}") for key, item in _counted(value, left_out, where)}
        case list() | tuple():
            return [again(item, f"{where}.{index}") for index, item in enumerate(value)]
        case _ if isinstance(value, BaseModel) or dataclasses.is_dataclass(value):
            inner = execution_fields(value, type(value))
            fields = {key: again(item, f"{where}.{key}") for key, item in _counted(value, inner, where)}
            return {TYPE: type(value).__qualname__} | fields
        case _ if hasattr(value, "tolist") and hasattr(value, "dtype"):  # NumPy's scalars and arrays
            return again(value.tolist(), where)
    raise UsageError(
        f"{where}: a {type(value).__name__} cannot be part of a step's address, because it has no canonical form: pass "
        "what it is made from (numbers, text, lists, dicts, dataclasses), or mark the field Execution[…] if the result "
        "does not depend on it"
    )
