"""Imports a spec of SLM-Lab from a JSON or YAML file, with a note on every key that was not converted."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from palestra.errors import UsageError, did_you_mean
from palestra.migrate.algorithms import MEMORY_KEYS, Setting, algorithm_fields
from palestra.migrate.blocks import ForeignBlock, Notes
from palestra.migrate.nets import KEYS as NET_KEYS
from palestra.migrate.nets import net_fields, optimizer_fields, renorm_fields, search_fields
from palestra.spec.load import load
from palestra.spec.source import SourceError, read_text, write_text
from palestra.spec.validate import SpecError

READ_META = (
    "distributed", "log_frequency", "eval_frequency", "rigorous_eval", "max_session", "max_trial", "search_resources",
    "search_scheduler",
)  # fmt: skip
FILLED_BY_SLM_LAB = (
    "experiment", "trial", "session", "cuda_offset", "resume", "experiment_ts", "prepath", "predir", "git_sha",
    "random_seed", "graph_prepath", "info_prepath", "log_prepath", "model_prepath",
)  # fmt: skip
META_KEYS = frozenset({*READ_META, *FILLED_BY_SLM_LAB})
VARIABLE = re.compile(r"\$\{([^{}]+)\}")
UNFILLED = re.compile(r"__unfilled_(.+?)__")
NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")


@dataclass(frozen=True)
class Imported:
    """An imported spec and the notes for its reader."""

    name: str
    data: dict[str, Any]
    notes: list[str]

    def to_yaml(self, source: str) -> str:
        """The file to write, with the notes as comments at its top."""
        lines = [f"# Imported from SLM-Lab's {source} by `palestra import slm-lab`.", *(f"# {n}" for n in self.notes)]
        return "\n".join(lines) + "\n" + write_text(self.data)


def import_spec(path: Path, name: str, variables: Mapping[str, str] | None = None) -> Imported:
    """The spec `name` of a file, which must be valid here; `variables` fill its `${…}`."""
    given = dict(variables or {})
    specs = _read(path, given)
    if name not in specs:
        known = [key for key in specs if not key.startswith("_")]
        hint = did_you_mean(name, known, f"It has: {', '.join(known)}.")
        raise UsageError(f"{path} has no spec {name!r}. {hint}")
    missing = sorted(set(UNFILLED.findall(str(specs[name]))))
    if missing:
        flags = " ".join(f"-s {variable}=..." for variable in missing)
        raise UsageError(f"{path}: the spec {name!r} has variables without a value. Give them with {flags}")
    env = given.get("env", "").rpartition("/")[2].partition("-")[0].lower()
    return convert(_numbers(specs[name]), f"{name}_{env}" if "env" in given else name)  # as SLM-Lab names such runs


def convert(spec: Mapping[str, Any], name: str) -> Imported:
    """One of SLM-Lab's specs, its variables filled, as ours."""
    notes = Notes()
    top = ForeignBlock(spec, name, notes, frozenset({"agent", "env", "meta", "search", "name", "body"}))
    agent, env = (_only(top, key) for key in ("agent", "env"))
    meta = ForeignBlock(top.take("meta", {}), "meta", notes, META_KEYS)
    agent.read |= {"name"}
    num_envs, frames = env.count("num_envs", 1), env.count("max_frame")
    if frames is None:
        raise UsageError(f"{name}: env.max_frame is missing: how long to train")
    memory, net = agent.block("memory", MEMORY_KEYS), agent.block("net", NET_KEYS)
    block = agent.block("algorithm")
    algorithm = algorithm_fields(block, Setting(memory, net, num_envs, frames))
    nets = net_fields(net, algorithm)
    if "critic_net" in agent:
        rates, widths = _critic(agent.block("critic_net", NET_KEYS), algorithm | nets, frames)
        algorithm, nets = algorithm | rates, nets | widths
    data: dict[str, Any] = {
        "kind": "control",
        "name": re.sub(r"[^A-Za-z0-9_.-]", "_", name),
        "env": _env(env, num_envs),
        "algorithm": algorithm,
        "net": nets,
        "train": {"frames": frames},
    }
    data |= _meta(meta)
    if net.take("gpu") is True:
        data["device"] = "cuda"
    searched, every = search_fields(top.block("search").data, meta, data, str(net.data.get("type")), notes)
    if searched:
        data["search"] = searched
        data["every"] |= every
    top.take("body")
    for part in (top, agent, block, memory, net, meta):
        part.close()
    return Imported(data["name"], _checked(data, notes), notes.lines)


def _checked(data: dict[str, Any], notes: Notes) -> dict[str, Any]:
    """The data, if it is a valid spec; without a search that does not fit it."""
    try:
        load(data)
        return data
    except SpecError as error:
        outside = [problem for problem in error.problems if not problem.path.startswith("search.space")]
        if outside or "search" not in data:
            raise UsageError(f"the converted spec is not valid here:\n{error}") from error
        wrong = {problem.path.removeprefix("search.space.") for problem in error.problems}
        space = {key: axis for key, axis in data["search"]["space"].items() if key not in wrong}
        for problem in error.problems:
            notes.add(problem.path, f"{problem.reason}; it is not searched")
    rest = {key: value for key, value in data.items() if key != "search"}
    return _checked({**rest, "search": {**data["search"], "space": space}} if space else rest, notes)


def _read(path: Path, given: Mapping[str, str]) -> dict[str, Any]:
    """All specs of the file. As SLM-Lab does, variables are filled in the text, before it is parsed."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8 text") from error
    known = set(VARIABLE.findall(text))
    for variable in given:
        if variable not in known:
            have = ", ".join(sorted(known)) or "none"
            raise UsageError(f"-s {variable}: {path} has no variable ${{{variable}}}. Its variables are: {have}.")
    filled = VARIABLE.sub(lambda match: given.get(match[1], f"__unfilled_{match[1]}__"), text)
    data = read_text(filled.replace("\t", " ") if path.suffix == ".json" else filled, str(path)).data
    if not isinstance(data, dict):
        raise SourceError(f"{path} is not a file of SLM-Lab's specs: expected a mapping of names to specs")
    return {name: spec for name, spec in data.items() if isinstance(spec, dict)}  # the rest are anchors of parts


def _numbers(value: Any) -> Any:
    """The same with text such as "1e6", which a quoted `${max_frame}` becomes, as numbers."""
    if isinstance(value, Mapping):
        return {key: _numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_numbers(item) for item in value]
    return float(value) if isinstance(value, str) and NUMBER.fullmatch(value) else value


def _only(top: ForeignBlock, key: str) -> ForeignBlock:
    """`agent` or `env`, which older specs write as a list of one."""
    value = top.take(key)
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if not isinstance(value, Mapping):
        raise UsageError(f"{top.path}.{key}: expected one mapping, got {value!r}")
    return ForeignBlock(
        value, key, top.notes, None if key == "env" else frozenset({"name", "algorithm", "memory", "net"})
    )


def _critic(block: ForeignBlock, policy: dict[str, Any], frames: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """The fields of CrossQ's critics that differ from the policy's, for `algorithm` and for `net`."""
    own = net_fields(block, policy) | optimizer_fields(block, policy["name"], frames)
    differ = {key: value for key, value in own.items() if value != policy.get(key)}
    rates = {"critic_lr": differ.pop("lr")} if "lr" in differ else {}
    widths = {"critic_hidden": differ.pop("hidden")} if "hidden" in differ else {}
    for key, value in differ.items():
        block.note(key, f"policy and critics share it here, and have the policy's; {value!r} was left out")
    block.read |= {"gpu", "update_type", "update_frequency", "polyak_coef"}
    block.close()
    return rates | renorm_fields(block), widths


def _env(env: ForeignBlock, num_envs: int) -> dict[str, Any]:
    name = env.take("name", "")
    atari = str(name).startswith("ALE/")
    if str(name).startswith("playground/"):
        env.note("name", "MuJoCo Playground is not a part of Palestra: name a Gymnasium environment, see env.module")
    fields: dict[str, Any] = {"id": name, "num_envs": num_envs}
    kwargs: dict[str, Any] = {"max_episode_steps": env.count("max_t")} if "max_t" in env else {}
    fields |= {key: True for key in ("normalize_obs", "normalize_reward") if env.take(key, False)}
    if "clip_obs" in env and fields.get("normalize_obs"):
        fields["clip_obs"] = env.take("clip_obs")
    env.wanted("clip_obs", fields.get("clip_obs"), "observations are clipped only where they are normalized here")
    clip = env.take("clip_reward", 10.0 if fields.get("normalize_reward") else None)
    if isinstance(clip, list):
        env.note("clip_reward", f"rewards are clipped as far below 0 as above here; {clip} was taken as its larger end")
        clip = max(map(abs, clip))
    scale = env.take("reward_scale")
    env.wanted("reward_scale", 1, f"rewards are {'clipped to −1..1' if scale == 'sign' else 'not scaled'} here")
    if scale == "sign" or (atari and num_envs > 1):
        clip = 1.0  # SLM-Lab clips those of several Atari games, whatever clip_reward says
    if clip:
        fields["clip_reward"] = 1.0 if clip is True else float(clip)
    stack = env.count("frame_op_len", 1)
    if stack > 1 and not atari:
        fields["frame_stack"] = stack
    env.wanted("frame_op_len", 4 if atari else stack, "Atari games come with 4 frames stacked")
    env.read |= {"frame_op", "max_t"}
    env.wanted("device", "cpu", "environments run where they run here")
    kwargs |= env.rest()  # SLM-Lab hands all others to gymnasium.make
    return {**fields, "kwargs": kwargs} if kwargs else fields


def _meta(meta: ForeignBlock) -> dict[str, Any]:
    every: dict[str, Any] = {}
    if "log_frequency" in meta:
        every["log"] = f"{meta.count('log_frequency')} frames"
    evaluated = meta.count("eval_frequency")
    # SLM-Lab evaluates in environments of its own only with rigorous_eval, which its benchmarks leave at 0.
    every["eval"] = f"{evaluated} frames" if meta.take("rigorous_eval", 0) and evaluated else None
    meta.wanted("distributed", False, "sessions are independent seeds here, each of max_frame frames")
    meta.wanted("search_resources", None, "`search.parallel` and `search.threads` say how much a trial gets")
    meta.read |= {*FILLED_BY_SLM_LAB}
    return {"max_session": meta.count("max_session", 1), "every": every}
