"""SLM-Lab's `search` block, `key__uniform: [a, b]`, as ours."""

from collections.abc import Mapping
from typing import Any

from palestra.migrate.blocks import Block, Notes

ALGORITHM = {
    "gamma": "gamma",
    "lam": "lam",
    "entropy_coef_spec.start_val": "entropy",
    "clip_eps_spec.start_val": "clip",
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
}
NET = {
    "optim_spec.lr": "algorithm.lr",
    "actor_optim_spec.lr": "algorithm.lr",
    "critic_optim_spec.lr": "algorithm.critic_lr",
    "clip_grad_val": "algorithm.max_grad_norm",
    "polyak_coef": "algorithm.tau",
    "hid_layers": "net.hidden",
    "fc_hid_layers": "net.hidden",
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
}  # fmt: skip
APPROXIMATE = ("quniform", "qloguniform", "qrandint", "lograndint", "qlograndint")


def search_fields(
    space: Mapping[str, Any], meta: Block, spec: Mapping[str, Any], notes: Notes
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Our `search` for an imported spec, and fields of `every` that it needs; both empty where nothing is left."""
    axes = {path: axis for key, values in space.items() for path, axis in _axis(key, values, spec, notes)}
    scheduler = meta.block("search_scheduler", frozenset({"grace_period", "reduction_factor"}))
    trials = meta.take("max_trial", 16)
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


def _axis(key: str, values: Any, spec: Mapping[str, Any], notes: Notes) -> list[tuple[str, dict[str, Any]]]:
    path, _, form = key.rpartition("__")
    at = f"search.{key}"
    if form not in FORMS:
        notes.add(at, f"{form or 'no distribution'} has no counterpart here; the field is not searched")
        return []
    ours = _where(path, spec)
    if ours is None:
        notes.add(at, "the field has no counterpart here; it is not searched")
        return []
    if form in APPROXIMATE:
        notes.add(at, f"{form} has no counterpart here; {FORMS[form]} was taken")
    values = list(values)
    if FORMS[form] == "int":
        values = [int(values[0]), int(values[1]) - 1]  # SLM-Lab leaves the upper end out
    elif FORMS[form] != "choice":
        values = values[:2]
    return [(ours, {FORMS[form]: values})]


def _where(path: str, spec: Mapping[str, Any]) -> str | None:
    """Our path of a field, inside the schedule where it became one; None where the imported spec cannot have it."""
    ours = PATHS.get(path)
    if path.startswith("agent.algorithm.explore_var_spec."):
        field = "temperature" if "temperature" in spec["algorithm"] else "epsilon"
        end = path.rpartition(".")[2]
        value = spec["algorithm"].get(field)
        if end not in ("start_val", "end_val") or (end == "end_val" and not isinstance(value, dict)):
            return None
        ours, inner = f"algorithm.{field}", end.removesuffix("_val")
        return f"{ours}.{inner}" if isinstance(value, dict) else ours
    if ours is None:
        return None
    here: Any = spec
    for part in ours.split("."):
        here = here.get(part) if isinstance(here, Mapping) else None
    return f"{ours}.start" if isinstance(here, dict) and "shape" in here else ours
