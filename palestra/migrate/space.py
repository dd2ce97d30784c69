"""SLM-Lab's `search` block, `key__uniform: [a, b]`, as ours."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from palestra.migrate.blocks import Block, Notes
from palestra.migrate.nets import ACTIVATIONS, flat, polyak

ALGORITHM = {
    "gamma": "gamma",
    "lam": "lam",
    "val_loss_coef": "value_coef",
    "time_horizon": "horizon",
    "num_step_returns": "horizon",
    "minibatch_size": "minibatch",
    "training_epoch": "epochs",
    "training_start_step": "start",
    "policy_delay": "policy_delay",
    "fixed_alpha": "alpha",
    "target_entropy": "target_entropy",
    "alpha_lr": "alpha_lr",
    "sil_policy_loss_coef": "self_imitation.coef",
    "sil_val_loss_coef": "self_imitation.value_coef",
}
SCHEDULES = {"entropy_coef_spec": "entropy", "clip_eps_spec": "clip"}
PARTS = {"start_val": "start", "end_val": "end", "start_step": "begin", "end_step": "finish"}
NET = {
    "optim_spec.lr": "algorithm.lr",
    "actor_optim_spec.lr": "algorithm.lr",
    "critic_optim_spec.lr": "algorithm.critic_lr",
    "clip_grad_val": "algorithm.max_grad_norm",
    "polyak_coef": "algorithm.tau",
    "update_frequency": "algorithm.target_every",
    "hid_layers": "net.hidden",
    "fc_hid_layers": "net.hidden",
    "rnn_hidden_size": "net.recurrent.size",
    "hid_layers_activation": "net.activation",
    "layer_norm": "net.layer_norm",
    "shared": "net.shared",
}
PATHS = {
    **{f"agent.algorithm.{theirs}": f"algorithm.{ours}" for theirs, ours in ALGORITHM.items()},
    **{f"agent.net.{theirs}": ours for theirs, ours in NET.items()},
    "agent.memory.batch_size": "algorithm.batch",
    "agent.memory.max_size": "algorithm.buffer",
    "agent.memory.alpha": "algorithm.prioritised.alpha",
    "env.num_envs": "env.num_envs",
    "env.max_frame": "train.frames",
}
FORMS = {
    "uniform": "uniform", "quniform": "uniform", "loguniform": "loguniform", "qloguniform": "loguniform",
    "randint": "int", "qrandint": "int", "lograndint": "int", "qlograndint": "int", "choice": "choice",
    "grid_search": "choice",
}  # fmt: skip
APPROXIMATE = ("grid_search", "quniform", "qloguniform", "qrandint", "lograndint", "qlograndint")


def search_fields(
    space: Mapping[str, Any], meta: Block, spec: Mapping[str, Any], net: str, notes: Notes
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Our `search` for a spec imported with a `net` of this type, and fields of `every` that it needs; or nothing."""
    axes = {path: axis for key, values in _flat(space) for path, axis in _axis(key, values, spec, net, notes)}
    scheduler = meta.block("search_scheduler", frozenset({"grace_period", "reduction_factor"}))
    trials = meta.count("max_trial", 16)
    if not axes:
        scheduler.rest()
        return {}, {}
    found: dict[str, Any] = {"space": axes, "trials": max(1, trials)}
    every: dict[str, Any] = {}
    if scheduler.data:
        grace = max(1, int(scheduler.take("grace_period", 1)))
        if grace < spec["train"]["frames"]:
            reduction = max(2, round(scheduler.take("reduction_factor", 4)))
            found["pruner"] = {"asha": {"grace": grace, "reduction": reduction, "by": "frames"}}
            every["eval"] = f"{grace} frames"  # trials are compared at evaluations
        scheduler.close()
    return found, every


def _flat(space: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and their values, also of nested mappings and lists of one, which older specs have."""
    for key, value in space.items():
        inner = value[0] if isinstance(value, list) and len(value) == 1 else value
        if isinstance(inner, Mapping) and "__" not in key:
            yield from _flat(inner, f"{path}{key}.")
        else:
            yield f"{path}{key}", value


def _axis(key: str, values: Any, spec: Mapping[str, Any], net: str, notes: Notes) -> list[tuple[str, dict[str, Any]]]:
    path, _, form = key.rpartition("__")
    at, ours, place = f"search.{key}", FORMS.get(form), _where(path, spec, net)
    if ours is None or place is None or not isinstance(values, list):
        what = f"the distribution {form or '(none)'}" if ours is None else "the field"
        notes.add(at, f"{what} has no counterpart here; it is not searched")
        return []
    if form in APPROXIMATE:
        notes.add(at, f"{form} has no counterpart here; {ours} was taken")
    if ours == "int":
        values = [int(value) - index for index, value in enumerate(values[:2])]  # SLM-Lab leaves the upper end out
    elif ours != "choice":
        values = values[:2]
    where, convert = place
    pairs = [(value, None if value is None else convert(value)) for value in values]
    lost = [value for value, new in pairs if new is None and value is not None]
    if lost:
        notes.add(at, f"not possible here, and left out: {', '.join(map(str, lost))}")
    left = [new for value, new in pairs if value not in lost]
    left = [new for index, new in enumerate(left) if new not in left[:index]]
    if len(left) < 2:
        notes.add(at, "fewer than two values are left; it is not searched")
        return []
    return [(where, {ours: left})]


def _where(path: str, spec: Mapping[str, Any], net: str) -> tuple[str, Callable[[Any], Any]] | None:
    """Our path of a field and how its values become ours; None where the imported spec cannot have it."""
    algorithm, frames, n = spec["algorithm"], spec["train"]["frames"], spec["env"]["num_envs"]
    outer, _, last = path.rpartition(".")
    scheduled = outer.removeprefix("agent.algorithm.")
    if scheduled in (*SCHEDULES, "explore_var_spec"):
        field = SCHEDULES.get(scheduled, "temperature" if "temperature" in algorithm else "epsilon")
        if not isinstance(algorithm.get(field), dict):
            return (f"algorithm.{field}", _same) if last == "start_val" and field in algorithm else None
        inside = (lambda step: step / frames if step <= frames else None) if last.endswith("_step") else _same
        return (f"algorithm.{field}.{PARTS[last]}", inside) if last in PARTS else None
    ours = PATHS.get(path)
    name = (ours or "").rpartition(".")[2]
    if ours is None or (name in ("tau", "target_every") and name not in algorithm):
        return None
    if name == "hidden":
        read = "fc_hid_layers" if "Conv" in net or net == "RecurrentNet" else "hid_layers"
        return (ours, flat) if last == read else None
    if name == "activation":
        return ours, ACTIVATIONS.get
    if name == "target_every":
        return ours, lambda every: max(1, round(max(every, n) * algorithm["replay_ratio"]))
    if name == "tau" and algorithm["name"] == "dqn":
        return ours, lambda share: polyak(share, algorithm["replay_ratio"] * n) if 0 < share <= 1 else None
    here: Any = spec
    for part in ours.split("."):
        here = here.get(part) if isinstance(here, Mapping) else None
    return (f"{ours}.start" if isinstance(here, dict) and "shape" in here else ours), _same


def _same(value: Any) -> Any:
    return value
