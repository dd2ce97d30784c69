"""The Python API: run a spec, load a trained policy, evaluate, chat, serve. The commands only call this."""

import hashlib
import json
import logging
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from palestra.errors import MissingExtra, UsageError
from palestra.kinds.trial import Launch, resumed_trial
from palestra.runs.run import Run, open_run
from palestra.runs.share import place
from palestra.runs.store import write_bytes
from palestra.runs.sync import fetch_run, newest_at
from palestra.spec.compose import parse
from palestra.spec.imports import OBJECT, known_objects
from palestra.spec.kinds import loader, runner, spec_type
from palestra.spec.load import Loaded, Overrides, Source, read, resolved
from palestra.spec.load import load as load_spec
from palestra.spec.model import mapped, plain
from palestra.spec.validate import SpecError
from palestra.work.redact import REDACTED
from palestra.work.worker import pack

log = logging.getLogger("palestra")


def run(
    spec: Source | None = None,
    *,
    resume: str | Path | Run | None = None,
    allow: Sequence[str] = (),
    restarts: int = 0,
    variables: Mapping[str, Any] | None = None,
    root: str | Path = "runs",
    quiet: bool = False,
    on: str | None = None,
    id: str | None = None,
    sync: str | None = None,
    overrides: Overrides = (),
    reward: Callable[..., Any] | str | None = None,
    data: Iterable[Mapping[str, Any]] | Mapping[str, Any] | None = None,
    hooks: Sequence[Callable[..., Any] | str] = (),
    **fields: Any,
) -> Run:
    """Run a spec to its end, or resume a run, and return the run.

    Args:
        spec: A file ("spec.yaml" or "spec.yaml:name"), a dict or a spec; may be left out when resuming.
        resume: A run to continue, by path, name, name/id or id; or by its URL where it was synced to.
        allow: Dotted paths of fields that may differ from the resumed run's spec.
        restarts: How often a seed that fails continues from its last checkpoint by itself.
        variables: Values of the `${…}` in the spec.
        root: The folder that holds all runs.
        quiet: Do not show progress.
        on: "ray" or the address of a Ray cluster: the seeds run there, not in processes of this machine.
        id: The id of the run. One that exists, here or where it is synced to, is continued.
        sync: Where to copy the run's folder while it trains: a folder, s3://… or another URL, or dev.
        overrides: Fields of the spec as on the command line: `["algorithm.lr=1e-3"]`, or a mapping of paths to values.
        reward: A function that verifies completions in place of all training tasks: see docs/recipes/add_reward.md.
        data: Rows to train on, such as a list of dicts or a `datasets.Dataset`; or the spec's field `data`.
        hooks: Functions called at every row of metrics, after those that the spec names.
        fields: Fields of the spec by path, with `__` for the dot: `algorithm__lr=1e-3`. `env` may be an
            environment's id, its class, or a function that makes one; where the spec names a function or a class, it
            may be the function or the class itself.
    """
    overrides = [overrides] if isinstance(overrides, str) else overrides
    allow = [allow] if isinstance(allow, str) else list(allow)
    given = dict(parse(overrides)) | {path.replace("__", "."): value for path, value in fields.items()}
    spec, given, objects = _without_env(spec, given)
    spec, given, reward, hooks = mapped([spec, given, reward, hooks], partial(_named, objects=objects))
    trial = None
    with known_objects(objects):
        sync = None if sync is None else place(sync)[0]
        if resume is not None and "://" in str(resume):
            resume, sync = _fetched(str(resume), Path(root), sync)
        elif resume is None and spec is not None and id is not None:
            resume = _started(_load_to_run(spec, variables, given).spec.name, id, Path(root), sync)
        if resume is not None:
            existing = resume if isinstance(resume, Run) else open_run(resume, root)
            trial = resumed_trial(existing)
            if spec is None and REDACTED in json.dumps(existing.spec):  # it would run with something else instead
                raise UsageError(
                    f"the spec in {existing.path} was stored without its secrets: give the spec again, with --resume"
                )
            spec = resolved(existing.spec) if spec is None else spec
        if spec is None:
            raise UsageError("give a spec to run, or a run to resume")
        if data is not None:
            given |= {"data": data} if isinstance(data, Mapping) else _data_fields(spec, given, data, Path(root))
        loaded = _load_to_run(spec, variables, given)
        if added := _added_fields(loaded, reward, hooks):
            loaded = _load_to_run(spec, variables, given | added)
        if (
            on is not None or len(getattr(loaded.spec, "seeds", ())) > 1
        ):  # objects that cannot be pickled are refused first
            pack({name: value for name, value in objects.items() if name != "env"})
        origins = loaded.given() if trial is None else {}
        settings: dict[str, Any] = {"restarts": restarts, "on": on, "origins": origins, "id": id, "sync": sync}
        launch = Launch(Path(root), list(sys.argv), trial, allow, not quiet, objects, **settings)
        with _missing_extra():
            runs = runner(loaded.spec.kind)
        return runs(loaded.spec, launch)


def _fetched(url: str, root: Path, sync: str | None) -> tuple[Run, str]:
    """The run at a URL, copied into the folder of runs, and the place to sync it to: that it came from."""
    from palestra.data.remote import open_filesystem

    url = newest_at(url.rstrip("/"), partial(open_filesystem, url))
    existing = fetch_run(url, partial(open_filesystem, url), root)
    if existing is None:
        raise UsageError(f"there is no run at {url}: it has no trial.json")
    return existing, sync or url.rsplit("/", 2)[0]


def _started(name: str, id: str, root: Path, sync: str | None) -> Run | None:
    """The run of this name and id, where it was begun before: where it is synced to, or here."""
    if sync is not None:
        from palestra.data.remote import open_filesystem

        url = f"{sync.rstrip('/')}/{name}/{id}"
        if (fetched := fetch_run(url, partial(open_filesystem, url), root)) is not None:
            return fetched
    return Run(root / name / id) if (root / name / id / "trial.json").is_file() else None


def _load_to_run(data: Source, variables: Mapping[str, Any] | None, given: Mapping[str, Any]) -> Loaded:
    """The spec of one run; its blocks `search` and `sweep` are not used, so errors in them do not matter."""
    try:
        return load_spec(data, variables=variables, overrides=given)
    except SpecError as error:
        wrong = {problem.path.partition(".")[0] for problem in error.problems}
        if not wrong <= {"search", "sweep"}:
            raise
        problems = "; ".join(map(str, error.problems))
        log.warning(
            "%s: ignored, because it is invalid and a single run does not use it: %s", ", ".join(wrong), problems
        )
    kept = {path: value for path, value in given.items() if path.partition(".")[0] not in wrong}
    return load_spec(data, variables=variables, overrides=kept | dict.fromkeys(wrong))


def check(spec: Source, *, variables: Mapping[str, Any] | None = None, overrides: Any = ()) -> Loaded:
    """Load and validate a spec without running it."""
    return load_spec(spec, variables=variables, overrides=overrides)


def load(run: str | Path | Run, which: str = "best", *, root: str | Path = "runs") -> Any:
    """The trained policy of a run: `palestra.load("ppo_cartpole").act(observation)`."""
    opened = run if isinstance(run, Run) else open_run(run, root)
    with _missing_extra():
        loads = loader(opened.spec["kind"])
    return loads(opened, which)


def enjoy(
    run: str | Path | Run,
    *,
    episodes: int = 1,
    out: str | Path | None = None,
    which: str = "best",
    seed: int = 0,
    grid: bool = False,
    env: Any = None,
    root: str | Path = "runs",
) -> str:
    """Show the trained policy of a run in a window, or write a video if there is no display or `out` is given.

    With `grid` the episodes, each of its own seed, are side by side. `env` is the environment's class or function if
    the run was given one. Returns a sentence with the returns.
    """
    opened = run if isinstance(run, Run) else open_run(run, root)
    with _missing_extra():
        from palestra.kinds.policies import enjoy as play
    target = None if out is None else Path(out)
    return play(opened, episodes=episodes, out=target, which=which, seed=seed, env=env, grid=grid)


def evaluate_policy(
    run: str | Path | Run,
    *,
    episodes: int = 100,
    which: str = "best",
    seed: int = 0,
    env: Any = None,
    root: str | Path = "runs",
) -> dict[str, Any]:
    """Returns of a control run's policies over whole episodes: mean, standard deviation and 95 % interval, by seed."""
    opened = run if isinstance(run, Run) else open_run(run, root)
    with _missing_extra():
        from palestra.kinds.policies import evaluate_run
    return evaluate_run(opened, episodes=episodes, which=which, seed=seed, env=env)


def export(
    run: str | Path | Run,
    out: str | Path,
    *,
    to: str | None = None,
    which: str = "best",
    env: Any = None,
    root: str | Path = "runs",
) -> str:
    """Write the policy of a control run as `to`, onnx or torchscript, by default what the file's ending says."""
    opened = run if isinstance(run, Run) else open_run(run, root)
    with _missing_extra():
        from palestra.kinds.policies import export_run
    return export_run(opened, out=Path(out), to=to, which=which, env=env)


def chat(model: str | Path, *, root: str | Path = "runs", **settings: Any) -> None:
    """Chat with a model in the terminal; `settings` are the options of `palestra chat`."""
    with _missing_extra():
        from palestra.kinds.serving import chat as talk
    talk(model, root=Path(root), **settings)


def serve(model: str | Path, *, root: str | Path = "runs", **settings: Any) -> None:
    """Serve a model over HTTP until SIGINT or SIGTERM; `settings` are the options of `palestra serve`."""
    with _missing_extra():
        from palestra.kinds.serving import serve as start
    start(model, root=Path(root), **settings)


def evaluate(model: str | Path, *, root: str | Path = "runs", quiet: bool = False, **settings: Any) -> Run:
    """Evaluate a model on tasks, or on rows with given answers; `settings` are the options of `palestra eval`."""
    from palestra.spec.kinds.evaluate import evaluation  # here, because no other call needs it

    return run(evaluation(model, **settings), root=root, quiet=quiet)


def fetch_model(name: str, target: str | Path) -> Path:
    """Download a small pretrained model into a Hugging Face folder; an existing one is kept."""
    with _missing_extra("fetching a model"):
        from palestra.lm.convert import fetch
    return fetch(name, Path(target))


def convert_model(source: str | Path, target: str | Path, *, dtype: str | None = None) -> None:
    """Convert a GGUF file, a llama2.c file or a Hugging Face folder to a Hugging Face folder."""
    with _missing_extra("converting a model"):
        from palestra.kinds.models import named_dtype
        from palestra.lm.convert import convert
    convert(Path(source), Path(target), dtype=None if dtype is None else named_dtype(dtype))


@contextmanager
def _missing_extra(what: str = "training") -> Iterator[None]:
    """Name the extra to install if a package is missing that the base install does not have."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name in ("torch", "gymnasium", "tokenizers", "safetensors", "jinja2", "fsspec", "gguf"):
            raise MissingExtra(what, "train") from error
        raise


def _named(value: Any, objects: dict[str, Any]) -> Any:
    """The name of a function or class, under which `objects` gets it; other values as they are."""
    if not callable(value):
        return value
    name = OBJECT + re.sub(r"\W", "_", getattr(value, "__name__", type(value).__name__))
    names = [name, *(f"{name}_{number}" for number in range(2, len(objects) + 2))]  # two lambdas have one name
    name = next(free for free in names if objects.get(free, value) is value)
    objects[name] = value
    return name


def _added_fields(loaded: Loaded, reward: str | None, hooks: Sequence[str]) -> dict[str, Any]:
    """The overrides for a reward of all training tasks, and for hooks after those of the spec."""
    fields: dict[str, Any] = {"hooks": list(dict.fromkeys([*loaded.spec.hooks, *hooks]))} if hooks else {}
    if reward is not None:
        uses = getattr(getattr(loaded.spec, "tasks", None), "train", None)
        if uses is None:
            raise UsageError(f"reward: kind {loaded.spec.kind} has no training tasks whose completions it could verify")
        fields |= {f"tasks.train.{number}.reward": {"function": reward} for number in range(len(uses))}
    return fields


def _data_fields(spec: Source, given: Mapping[str, Any], rows: Iterable[Any], root: Path) -> dict[str, Any]:
    """The overrides for training on rows, written to a file named by its hash, so that a resume finds it again."""
    tree, listed = read(spec).data, list(rows)
    kind = given.get("kind", tree.get("kind"))
    on_rows = "data" in spec_type(kind).model_fields
    if not listed:
        raise UsageError("data: there are no rows to train on")
    if not on_rows and kind not in ("posttrain", "distill"):
        raise UsageError(f"data: kind {kind} does not train on rows")
    content = "".join(_json_line(row, number) for number, row in enumerate(listed, 1)).encode()
    path = root.absolute() / ".data" / f"{hashlib.sha256(content).hexdigest()[:16]}.jsonl"
    write_bytes(path, content)
    if on_rows:
        return {"data.train": {"rows": {"path": str(path)}}}
    uses = given.get("tasks.train") or (tree.get("tasks") or {}).get("train") or ()
    use = next((use for use in uses if isinstance(use, Mapping)), {})
    columns = {} if "question" in listed[0] else {"question": ["prompt"], "template": "{question}"}
    columns |= {} if "answer" in listed[0] else {"answer": None}
    args = {**columns, **use.get("args", {}), "source": str(path)}
    return {"tasks.train": [{"task": "answers", **use, "args": args}]}


def _json_line(row: Any, number: int) -> str:
    if not isinstance(row, Mapping):
        raise UsageError(f"data: row {number} is of type {type(row).__name__}: expected a dict for each row")
    try:
        return json.dumps(plain(row), ensure_ascii=False) + "\n"
    except (TypeError, ValueError) as error:
        raise UsageError(f"data: row {number} cannot be written as JSON: {error}") from error


def _without_env(spec: Source | None, given: dict[str, Any]) -> tuple[Source | None, dict[str, Any], dict[str, Any]]:
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
