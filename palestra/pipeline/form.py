"""Pipeline files: YAML, Python, and steps that run Palestra specs."""

import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from types import ModuleType
from typing import Any

from palestra.errors import UsageError
from palestra.pipeline.data import data_step
from palestra.pipeline.step import Output, Step, replaced, step
from palestra.runs.run import open_run
from palestra.runs.store import write_bytes
from palestra.spec.imports import typed_arguments
from palestra.spec.kinds.pipeline import REFERENCE, PipelineSpec, step_function
from palestra.spec.load import Overrides, Source, resolved
from palestra.spec.load import load as load_spec
from palestra.spec.model import Execution, SpecParts, plain, split
from palestra.spec.source import read_value

LATEST = "latest"


def spec_step(name: str, data: Mapping[str, Any], output_of: Callable[[str], Output]) -> Step:
    """The step that runs a spec; its address depends on all of the spec except the fields marked `Execution`."""
    spec = resolved(data)
    parts = split(spec, plain(spec))
    config = {"spec": parts.counted, "execution": parts.execution, "unset": parts.unset}
    return Step(name, run_spec, with_outputs(config, output_of), resumes=True)


def run_spec(
    out: Path,
    *,
    spec: dict[str, Any],
    execution: Execution[list[tuple[list[str], Any]]],
    unset: Execution[list[list[str]]],
) -> None:
    """Run a spec with `out` as the folder of runs, resuming the run of a killed attempt.

    `out/latest` names the run, so that `out` itself can be given in place of a run.
    """
    from palestra.api import run  # here: it imports the kinds

    whole = resolved(plain(SpecParts(spec, execution, unset).joined()))
    begun = next((out / whole.name).glob("*/trial.json"), None)
    resume = None if begun is None else open_run(out / whole.name)
    done = run(whole, resume=resume, allow=[".".join(path) for path, _ in execution], root=out, quiet=True)
    write_bytes(out / LATEST, f"{os.path.relpath(done.path, out)}\n".encode())


def with_outputs(value: Any, output_of: Callable[[str], Output]) -> Any:
    """The value with every text or path `step:…` replaced by that step's output."""

    def output(part: Any) -> Any:
        return output_of(str(part)) if isinstance(part, str | PurePath) and str(part).startswith(REFERENCE) else part

    return replaced(value, output)


PREFIX = "outputs"


@dataclass(frozen=True)
class Pipeline:
    """Steps that are run together."""

    name: str
    prefix: str
    """Where outputs are written, unless the command gives another place."""
    steps: list[Step]


def load_pipeline(source: Source, *, variables: Mapping[str, Any] | None = None, overrides: Overrides = ()) -> Pipeline:
    """The pipeline of a YAML file, a dict or a spec, or of `file.py` or `file.py:name`."""
    file, name = _python_file(source)
    if file is not None:
        if list(overrides):
            raise UsageError(
                f"{file} is a Python file without keys to override: give -s VAR=VALUE to its `def pipeline(var)`"
            )
        return _from_python(file, name, variables or {})
    loaded = load_spec(source, variables=variables, overrides=overrides).spec
    if not isinstance(loaded, PipelineSpec):
        raise UsageError(f"{source} is of kind {loaded.kind}, not a pipeline: run it with `palestra train {source}`")
    return pipeline_of(loaded)


def pipeline_of(spec: PipelineSpec) -> Pipeline:
    """The steps of a pipeline's spec, in an order in which they can run."""
    made: dict[str, Step] = {}

    def output_of(text: str) -> Output:
        referred = spec.referred(text)
        assert referred is not None  # PipelineSpec.conflicts
        return Output(made[referred[0]], referred[1])

    for name in spec.order():
        given = spec.steps[name]
        if given.use is None:
            assert isinstance(given.spec, dict)  # PipelineSpec.conflicts
            step = spec_step(name, given.spec, output_of)
        else:
            step = _function_step(given.use, given.arguments, output_of).named(name)
        retries = given.retries if given.retries is not None else spec.retries or step.retries
        made[name] = replace(step, retries=retries, resources=given.resources)
    return Pipeline(spec.name, spec.prefix, list(made.values()))


def run(spec: PipelineSpec, launch: Any) -> Any:
    """Refused: a pipeline is run by its own command."""
    raise UsageError(f"{spec.name} is a pipeline: run it with `palestra pipeline run`")


def load(run: Any, which: str = "best") -> Any:
    """Refused: only the steps of a pipeline have trained models."""
    raise UsageError("a pipeline has no model of its own: give the output folder of a step that trained one")


def _function_step(use: str, arguments: Mapping[str, Any], output_of: Callable[[str], Output]) -> Step:
    function = step_function(use)
    given = with_outputs(typed_arguments(function, arguments), output_of)
    if ":" not in use:
        return data_step(use)(**given)
    if "out" in inspect.signature(function).parameters and not hasattr(function, "__wrapped__"):
        return step(function)(**given)
    made = function(**given)  # decorated with @step, or a function that returns a step
    if not isinstance(made, Step):
        raise UsageError(f"{use} neither takes `out`, the folder that a step writes into, nor returns a Step")
    return made


def _python_file(source: Source) -> tuple[Path | None, str | None]:
    """The file and the name of "file.py" or "file.py:name"."""
    if not isinstance(source, str | os.PathLike):
        return None, None
    file, _, name = os.fspath(source).partition(".py:")
    if name:
        return Path(f"{file}.py"), name
    return (Path(file), None) if file.endswith(".py") else (None, None)


def _from_python(file: Path, name: str | None, variables: Mapping[str, Any]) -> Pipeline:
    module = _imported(file)
    if name is None and callable(getattr(module, "pipeline", None)):
        name = "pipeline"
    if name is None and variables:
        raise UsageError(f"{file} has no `def pipeline(…)` to give {', '.join(variables)} to")
    value = list(vars(module).values()) if name is None else getattr(module, name, None)
    if value is None:
        raise UsageError(f"{file} has no {name!r}: expected a step, a list of steps, or a function that returns one")
    if callable(value):
        typed = {key: read_value(v, f"-s {key}") if isinstance(v, str) else v for key, v in variables.items()}
        try:
            inspect.signature(value).bind(**typed)
        except TypeError as error:
            raise UsageError(f"{file}:{name}: {error}") from error
        value = value(**typed)
    steps = list(value) if isinstance(value, list | tuple) else [value]
    if name is None:
        steps = [step for step in steps if isinstance(step, Step)]
    if not steps or not all(isinstance(step, Step) for step in steps):
        raise UsageError(f"{file} defines no steps: define them at its top, or in `def pipeline() -> list[Step]`")
    return Pipeline(file.stem, PREFIX, steps)


def _imported(file: Path) -> ModuleType:
    """A Python file as a module that worker processes can import too, with its folder on their path."""
    if not file.is_file():
        raise UsageError(f"no pipeline file {file}")
    folder, name = str(file.absolute().parent), file.stem
    if folder not in sys.path:
        sys.path.insert(0, folder)
    known = sys.modules.get(name)
    if known is not None and getattr(known, "__file__", None) == str(file.absolute()):
        del sys.modules[name]  # read again: it may have changed
        known = None
    if known is not None or not name.isidentifier():
        raise UsageError(f"{file} cannot be imported as {name!r}: rename it to a module name that is not taken")
    spec = importlib.util.spec_from_file_location(name, file.absolute())
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
