"""Steps that are Palestra specs: their addresses, and their runs, which live in the step's folder and resume there."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from palestra.pipeline.step import Output, Step
from palestra.runs.folder import Trial, find
from palestra.runs.run import Run
from palestra.runs.store import write_bytes
from palestra.spec.execution import Execution, Parts, split
from palestra.spec.kinds.pipeline import REFERENCE
from palestra.spec.load import resolved
from palestra.spec.plain import plain

LATEST = "latest"


def spec_step(name: str, data: Mapping[str, Any], output_of: Callable[[str], Output]) -> Step:
    """The step that runs a spec; its address counts all of the spec besides the fields marked `Execution`."""
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
    """Run a spec with `out` as the folder of all runs, from where a killed attempt was.

    `out/latest` names the run, so that `out` itself can be given wherever a run is asked for.
    """
    from palestra.api import run  # here: it takes the kinds with it

    whole = resolved(plain(Parts(spec, execution, unset).joined()))
    begun = _begun(out / whole.name)
    found = run(
        whole,
        resume=None if begun is None else Run(begun.path),
        allow=[".".join(path) for path, _ in execution],
        root=out,
        quiet=True,
    )
    write_bytes(out / LATEST, f"{os.path.relpath(found.path, out)}\n".encode())


def with_outputs(value: Any, output_of: Callable[[str], Output]) -> Any:
    """The value with every text or path `step:…` replaced by the output that it means."""
    if isinstance(value, str | os.PathLike):
        text = os.fspath(value)
        return output_of(text) if isinstance(text, str) and text.startswith(REFERENCE) else value
    if isinstance(value, Mapping):
        return {key: with_outputs(item, output_of) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [with_outputs(item, output_of) for item in value]
        return items if isinstance(value, list) else tuple(items)
    return value


def _begun(folder: Path) -> Trial | None:
    """The run of an attempt that was killed."""
    if not folder.is_dir() or not any(folder.glob("*/trial.json")):
        return None
    found = find(folder)
    assert isinstance(found, Trial)
    return found
