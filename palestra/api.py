"""The Python API: run a spec, open what came of it, load a trained policy. The commands only call this."""

import json
import logging
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from palestra.errors import MissingExtra, UsageError
from palestra.kinds.trial import Launch, resumed_trial
from palestra.runs.redact import REDACTED
from palestra.runs.run import Run, open_run
from palestra.spec.kinds import loader, runner
from palestra.spec.load import Loaded, Source, resolved
from palestra.spec.load import load as load_spec
from palestra.spec.overrides import parse
from palestra.spec.validate import SpecError

log = logging.getLogger("palestra")


def run(
    spec: Source | None = None,
    *,
    resume: str | Path | Run | None = None,
    allow: Sequence[str] = (),
    variables: Mapping[str, Any] | None = None,
    root: str | Path = "runs",
    quiet: bool = False,
    overrides: Iterable[str] | Mapping[str, Any] = (),
    **fields: Any,
) -> Run:
    """Run a spec to its end, or resume a run, and return what came of it.

    Args:
        spec: A file ("spec.yaml" or "spec.yaml:name"), a dict or a spec; may be left out when resuming.
        resume: A run to continue, by path, name, name/id or id.
        allow: Dotted paths of fields that may differ from the resumed run's spec.
        variables: Values of the `${…}` in the spec.
        root: The folder of all runs.
        quiet: Show no progress.
        overrides: Fields of the spec as on the command line: `["algorithm.lr=1e-3"]`, or a mapping of paths to values.
        fields: Fields of the spec by path, with `__` for the dot: `algorithm__lr=1e-3`. `env` may be an
            environment's id, its class, or a function that makes one.
    """
    overrides = [overrides] if isinstance(overrides, str) else overrides
    allow = [allow] if isinstance(allow, str) else list(allow)
    given = {**dict(parse(overrides)), **{path.replace("__", "."): value for path, value in fields.items()}}
    data, given, objects = _without_objects(spec, given)
    trial = None
    if resume is not None:
        existing = resume if isinstance(resume, Run) else open_run(resume, root)
        trial = resumed_trial(existing)
        if data is None:
            _require_whole(existing)
            data = resolved(existing.spec)
    if data is None:
        raise UsageError("give a spec to run, or a run to resume")
    loaded = _load_to_run(data, variables, given)
    launch = Launch(Path(root), list(sys.argv), trial, allow, not quiet, objects)
    with _missing_extra():
        runs = runner(loaded.spec.kind)
    return runs(loaded.spec, launch)


def _load_to_run(data: Source, variables: Mapping[str, Any] | None, given: Mapping[str, Any]) -> Loaded:
    """The spec of one run; blocks that describe many runs are not used, so nothing that is wrong with them matters."""
    try:
        return load_spec(data, variables=variables, overrides=given)
    except SpecError as error:
        wrong = {problem.path.partition(".")[0] for problem in error.problems}
        if not wrong <= {"search", "sweep"}:
            raise
        problems = "; ".join(map(str, error.problems))
        log.warning("%s: not used by a single run, and ignored because it is not valid: %s", ", ".join(wrong), problems)
    kept = {path: value for path, value in given.items() if path.partition(".")[0] not in wrong}
    return load_spec(data, variables=variables, overrides=kept | dict.fromkeys(wrong))


def _require_whole(run: Run) -> None:
    """Refuse a stored spec from which secrets were left out: it would run with something else in their place."""
    if REDACTED in json.dumps(run.spec):
        raise UsageError(
            f"the spec in {run.path} is without the secrets that were in it: give the spec again, with --resume"
        )


def check(spec: Source, *, variables: Mapping[str, Any] | None = None, overrides: Any = ()) -> Loaded:
    """Load and validate a spec without running it."""
    return load_spec(spec, variables=variables, overrides=overrides)


def load(run: str | Path | Run, which: str = "best", *, root: str | Path = "runs") -> Any:
    """The trained policy of a run: `palestra.load("ppo_cartpole").act(observation)`."""
    found = run if isinstance(run, Run) else open_run(run, root)
    with _missing_extra():
        loads = loader(found.spec["kind"])
    return loads(found, which)


def enjoy(
    run: str | Path | Run,
    *,
    episodes: int = 1,
    out: str | Path | None = None,
    which: str = "best",
    seed: int = 0,
    env: Any = None,
    root: str | Path = "runs",
) -> str:
    """Show the trained policy of a run in a window, or write a video where there is none or `out` is given.

    `env` is the environment's class or function where the run was given one. Returns a sentence of what was seen.
    """
    found = run if isinstance(run, Run) else open_run(run, root)
    with _missing_extra():
        from palestra.kinds.control import enjoy as play
    return play(found, episodes=episodes, out=None if out is None else Path(out), which=which, seed=seed, env=env)


def chat(
    model: str | Path,
    *,
    system: str | None = None,
    temperature: float = 0.7,
    max_new_tokens: int = 512,
    dtype: str = "auto",
    device: str = "auto",
    root: str | Path = "runs",
) -> None:
    """Talk with a model in the terminal."""
    with _missing_extra():
        from palestra.kinds.serving import chat as talk
    talk(
        model,
        system=system,
        temperature=temperature,
        max_new_tokens=max_new_tokens,
        dtype=dtype,
        device=device,
        root=Path(root),
    )


def serve(
    model: str | Path,
    *,
    dtype: str = "auto",
    device: str = "auto",
    root: str | Path = "runs",
    **settings: Any,
) -> None:
    """Serve a model over HTTP until a signal ends it; `settings` are those of `palestra serve`."""
    with _missing_extra():
        from palestra.kinds.serving import serve as start
    start(model, dtype=dtype, device=device, root=Path(root), **settings)


def evaluate(model: str | Path, *, root: str | Path = "runs", quiet: bool = False, **settings: Any) -> Run:
    """Evaluate a model on tasks, or on rows with given answers; `settings` are those of `palestra eval`."""
    from palestra.spec.kinds.evaluate import evaluation  # here, because no other call needs it

    return run(evaluation(model, **settings), root=root, quiet=quiet)


def fetch_model(name: str, target: str | Path) -> Path:
    """Download a small real model into a Hugging Face folder; one that is there already is kept."""
    with _missing_extra("fetching a model"):
        from palestra.lm.convert import fetch
    return fetch(name, Path(target))


def convert_model(source: str | Path, target: str | Path, *, dtype: str | None = None) -> None:
    """Write a GGUF file, a llama2.c file or a Hugging Face folder as a Hugging Face folder."""
    with _missing_extra("converting a model"):
        from palestra.kinds.models import named_dtype
        from palestra.lm.convert import convert
    convert(Path(source), Path(target), dtype=None if dtype is None else named_dtype(dtype))


@contextmanager
def _missing_extra(what: str = "training") -> Iterator[None]:
    """The base install has neither torch nor gymnasium, nor what language models need: say so, before any work."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name in ("torch", "gymnasium", "tokenizers", "safetensors", "jinja2", "fsspec", "gguf"):
            raise MissingExtra(what, "train") from error
        raise


def _without_objects(
    spec: Source | None, given: dict[str, Any]
) -> tuple[Source | None, dict[str, Any], dict[str, Any]]:
    """The spec, the overrides by dotted path, and the environment if it was given as an object."""
    given, objects = dict(given), {}
    if isinstance(spec, Mapping) and "env" in spec and not isinstance(spec["env"], Mapping):
        spec, given = {key: value for key, value in spec.items() if key != "env"}, {"env": spec["env"], **given}
    if "env" in given and not isinstance(given["env"], Mapping):
        env = given.pop("env")
        if not isinstance(env, str):
            objects["env"] = env
            env = f"object:{getattr(env, '__module__', '')}.{getattr(env, '__qualname__', type(env).__qualname__)}"
        given["env.id"] = env
    return spec, given, objects
