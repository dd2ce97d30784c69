"""Pages made from the package itself: what a spec can name, the extras, and the map of the code."""

import ast
import json
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, get_args

import typer
from typer.main import get_command

from palestra.cli.examples import STARTERS, examples, summary
from palestra.spec.algorithm import PRESETS
from palestra.spec.imports import load_named
from palestra.spec.kinds import KINDS, spec_type
from palestra.spec.kinds.control import AlgorithmSpec
from palestra.tasks.task import SOURCES, TASKS, task_type
from palestra.view.advice import RULES

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
EXTRAS = {
    "train": "training: torch, Gymnasium, tokenizers, Hugging Face files, GGUF files",
    "serve": "`palestra serve MODEL` and its client, and the gateway of the workflow `agent`",
    "guided": "completions that follow a JSON schema, a regex, choices or a grammar (llguidance)",
    "view": "`palestra view`: the web page over run folders (without torch)",
    "search": "`palestra search SPEC`: Optuna and CMA-ES",
    "ray": "`--on ray`: runs on a Ray cluster",
    "data": "the data steps `html_to_markdown` (trafilatura) and `filter` by language (langdetect)",
    "eval": "verifiers of mathematics (math-verify) and of instructions (langdetect)",
    "lm-eval": "tasks of lm-eval in our evaluations, and our engine as its model `palestra`",
    "reasoning-gym": "the tasks `reasoning_gym:<name>`",
    "textarena": "the games `textarena:<id>`",
    "openenv": "environments of OpenEnv, `openenv:<url>` and `openenv:<package>`",
    "mcp": "tools of MCP servers in the workflow `tools`",
    "box2d": "Box2D environments",
    "mujoco": "MuJoCo environments",
    "robotics": "goal environments of gymnasium-robotics, such as FetchReach",
    "atari": "Atari games",
    "envpool": "`env.vectorize: envpool`: environments in C++ threads",
    "gymnax": "environments in JAX, `gymnax:<id>`",
    "brax": "environments in JAX, `brax:<name>`",
    "playground": "MuJoCo Playground, in JAX, `playground:<name>` (not for Linux on ARM)",
    "pettingzoo": "environments of several agents, `pettingzoo:<module>`",
    "minigrid": "MiniGrid environments",
    "minari": "data sets of Minari and D4RL (.hdf5) for offline algorithms",
    "dm-control": "environments of the DeepMind Control Suite, `dm_control/<domain>-<task>-v0` (up to Python 3.12)",
    "video": "MP4 from `palestra enjoy RUN`",
    "onnx": "`palestra export RUN -o policy.onnx`",
    "tensorboard": "the sink `tensorboard`",
    "wandb": "the sink `wandb`",
    "swanlab": "the sink `swanlab`",
    "trackio": "the sink `trackio`",
    "s3": "`s3://` paths",
    "gcs": "`gs://` paths",
    "sagemaker": "`palestra launch SPEC --on sagemaker`",
    "query": "`palestra query`: SQL over runs (DuckDB)",
    "docs": "building this manual",
    "peers": "the frameworks that `benchmarks/` compares with",
    "dev": "everything to work on Palestra itself",
}
"""What each extra of pyproject.toml is for."""

_NAMES = """\
# Names

Generated from the code by `docs/generate.py`; do not edit.

What a spec can name, the extras, and the examples.
"""

_ARCHITECTURE = """\
# Architecture

Generated from the docstrings of the modules by `docs/generate.py`; do not edit.

A package imports only packages below it in this table, and `control` and `posttrain` do not import each other.
import-linter checks it in `make test`. `cli`, `api`, `spec`, `runs`, `work` and `track` import neither torch nor
Gymnasium at module level, so that the base install can check, list, compare and plot.

A command of `cli` calls `api`. `api` loads and validates the spec (`spec`) and looks up its kind (`kinds`). The kind
assembles the parts: environments and algorithms (`control`), or model (`lm`), data (`data`), generator (`generate`),
tasks (`tasks`), rollouts (`rollout`) and learner (`posttrain`). Metrics go through `track` into a run folder (`runs`).
"""


def kinds_table() -> str:
    """The kinds of experiments, with the example that `palestra new KIND` writes."""
    rows = [(f"`{kind}`", _first(spec_type(kind).__doc__), f"`examples/{STARTERS[kind]}.yaml`") for kind in KINDS]
    return _table(("kind", "what it does", "starter"), rows)


def advice_table() -> str:
    """The rules of advice, and in how many runs each of them fired (docs/advice.jsonl)."""
    measured = {row["rule"]: row for row in _advice_rows() if "rule" in row}
    rows = []
    for name, about in RULES.items():
        runs, fired = measured[name]["runs"], measured[name]["fired"]
        cells = [f"{fired[where]} of {runs[where]}" for where in ("broken", "near", "healthy")]
        precision = f"{fired['broken'] / total:.0%}" if (total := sum(fired.values())) else "–"
        rows.append((f"`{name}`", about["level"], about["when"], *cells, precision))
    return _table(("rule", "level", "when", "broken", "near", "healthy", "precision"), rows)


def broken_table() -> str:
    """What is said of examples that are broken by a setting (docs/advice.jsonl)."""
    broken = [row for row in _advice_rows() if "example" in row]
    rows = [(f"`{row['example']}`", f"`{row['broken by']}`", _names(row["fired"])) for row in broken]
    return _table(("example", "broken by", "rules"), rows)


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _advice_rows() -> list[dict[str, Any]]:
    return list(map(json.loads, (ROOT / "docs" / "advice.jsonl").read_text(encoding="utf-8").splitlines()))


def extras_table() -> str:
    """The optional dependencies of pyproject.toml."""
    declared = PROJECT["project"]["optional-dependencies"]
    if declared.keys() != EXTRAS.keys():
        raise SystemExit(f"docs/catalog.py and pyproject.toml differ in: {declared.keys() ^ EXTRAS.keys()}")
    rows = [("none", "check specs, list, compare and plot runs; no torch")]
    return _table(("extra", "for"), [*rows, *((f"`{name}`", about) for name, about in EXTRAS.items())])


def commands_table(app: typer.Typer) -> str:
    """The commands of an app with the first paragraph of their help."""
    rows = [(f"`{path}`", about) for path, about in _commands(get_command(app), "")]
    return _table(("command", "what it does"), rows)


def _source(name: str) -> str:
    return _first(load_named(SOURCES[name], "task", "class").__doc__)


def names_page() -> str:
    """All that a spec can name: kinds, algorithms, presets, tasks; then extras and examples."""
    algorithms = get_args(get_args(AlgorithmSpec)[0])
    named = [(f"`{get_args(one.model_fields['name'].annotation)[0]}`", _first(one.__doc__)) for one in algorithms]
    parts = {key: [_inline(preset.get(key, "")) for preset in PRESETS.values()] for key in ("baseline", "scale")}
    presets = [
        (f"`{name}`", baseline, scale, _inline(preset["trust"]), preset["aggregation"], _rest(preset))
        for (name, preset), baseline, scale in zip(PRESETS.items(), *parts.values(), strict=True)
    ]
    sections = {
        "Kinds": kinds_table(),
        "Control algorithms": _table(("`algorithm.name`", "what it is"), named),
        "Post-training presets": _table(
            ("`algorithm.preset`", "baseline", "advantage scale", "trust region", "loss aggregation", "extras"), presets
        ),
        "Tasks": _table(("`task`", "what it asks"), [(f"`{n}`", _first(task_type(n).__doc__)) for n in TASKS]),
        "Sources of tasks": _table(("`task`", "what it is"), [(f"`{n}:…`", _source(n)) for n in SOURCES]),
        "Extras": extras_table(),
        "Examples": _table(
            ("`palestra new …`", "what it is"),
            [(f"`{name}`", summary(name)) for name in examples()],
        ),
    }
    return "\n\n".join([_NAMES, *(f"## {title}\n\n{table}" for title, table in sections.items())]) + "\n"


def architecture_page() -> str:
    """Every package and module with the first line of its docstring, from the commands down to the errors."""
    layers = PROJECT["tool"]["importlinter"]["contracts"][0]["layers"]
    parts = [_ARCHITECTURE]
    rows = []
    for layer in layers:
        names = [name.strip().removeprefix("palestra.") for name in layer.split("|")]
        rows += [(f"`{name}`", _about(ROOT / "palestra" / name)) for name in names]
    parts.append(_table(("package", "what it is"), rows))
    for layer in layers:
        for name in (name.strip().removeprefix("palestra.") for name in layer.split("|")):
            folder = ROOT / "palestra" / name
            if folder.is_dir():
                parts += [f"## {name}", _about(folder), _table(("file", "what it is"), _files(folder))]
    top = [(f"`{path.name}`", _docstring(path)) for path in sorted((ROOT / "palestra").glob("*.py"))]
    parts += ["## Beside the packages", _table(("file", "what it is"), top)]
    return "\n\n".join(parts) + "\n"


def _files(folder: Path) -> list[tuple[str, str]]:
    """The modules of a package, its own first, then those of its subpackages under their folders."""
    own = [path for path in sorted(folder.iterdir()) if path.suffix in (".py", ".cpp") and path.name != "__init__.py"]
    rows = [(f"`{path.name}`", _docstring(path)) for path in own]
    for inner in sorted(path.parent for path in folder.glob("*/__init__.py")):
        rows.append((f"`{inner.name}/`", _about(inner)))
        rows += [(f"`{inner.name}/{name.strip('`')}`", about) for name, about in _files(inner)]
    return rows


def _about(package: Path) -> str:
    module = package.with_suffix(".py")
    return _docstring(module if module.exists() else package / "__init__.py")


def _docstring(path: Path) -> str:
    """The first paragraph of a module's docstring; of C++ its first comment."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        return text.splitlines()[0].lstrip("/ ")
    documented = ast.get_docstring(ast.parse(text))
    if not documented:
        raise SystemExit(f"{path} has no docstring")
    return _first(documented)


def _first(text: str | None) -> str:
    """The first paragraph of a docstring, on one line."""
    return " ".join((text or "").strip().split("\n\n")[0].split())


def _commands(command: Any, path: str) -> Iterable[tuple[str, str]]:
    context = command.make_context(path or "palestra", [], resilient_parsing=True)
    for name in command.list_commands(context):
        inner = command.get_command(context, name)
        if inner is None or inner.hidden:
            continue
        if hasattr(inner, "list_commands"):
            yield from _commands(inner, f"{path}{name} ")
        else:
            yield f"{path}{name}", _first((inner.help or "").split("\f")[0])


def _rest(preset: dict[str, Any]) -> str:
    known = ("baseline", "scale", "trust", "aggregation")
    return "; ".join(f"{key} {_inline(value)}" for key, value in preset.items() if key not in known)


def _inline(value: Any) -> str:
    """`{type: clip, low: 0.2}` as "clip, low 0.2"."""
    if not isinstance(value, dict):
        return str(value).lower() if isinstance(value, bool) else str(value)
    return ", ".join(item if key == "type" else f"{key} {_inline(item)}" for key, item in value.items())


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(
        "| " + " | ".join(" ".join(cell.replace("|", r"\|").split()) for cell in line) + " |" for line in lines
    )
