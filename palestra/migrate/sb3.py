"""Imports a model of Stable-Baselines3: a spec that starts from its weights, with a note on what was not converted."""

import re
from pathlib import Path
from typing import Any

from palestra.spec.load import load
from palestra.spec.source import write_text

Fields = dict[str, str]
SHARED: Fields = {"gamma": "gamma", "max_grad_norm": "max_grad_norm"}
ON_POLICY: Fields = {"n_steps": "horizon", "gae_lambda": "lam", "ent_coef": "entropy", "vf_coef": "value_coef"}
OFF_POLICY: Fields = {"batch_size": "batch", "buffer_size": "buffer", "learning_starts": "start", "n_steps": "n_step"}
FIELDS: dict[str, Fields] = {
    "ppo": ON_POLICY
    | {"batch_size": "minibatch", "n_epochs": "epochs", "normalize_advantage": "normalize_advantages"}
    | {"clip_range": "clip", "clip_range_vf": "clip_value", "target_kl": "target_kl"},
    "a2c": ON_POLICY | {"normalize_advantage": "normalize_advantages"},
    "dqn": OFF_POLICY | {"exploration_final_eps": "epsilon"},
    "sac": OFF_POLICY | {"tau": "tau", "target_entropy": "target_entropy", "ent_coef": "alpha"},
    "td3": OFF_POLICY
    | {"tau": "tau", "policy_delay": "policy_delay", "target_policy_noise": "target_noise"}
    | {"target_noise_clip": "noise_clip"},
}
TRAIN_FREQ = {"dqn": 4, "sac": 1, "td3": 1}
"""Vector steps between updates, SB3's defaults: a zip has the number pickled alone, which is not read."""


def import_model(path: Path, env: str) -> tuple[dict[str, Any], list[str]]:
    """A spec that continues the model in an environment, and notes for its reader."""
    from palestra.control.sb3 import read_sb3  # here, because it imports torch

    model = read_sb3(path)
    name, data, notes = model.algorithm, model.data, []
    algorithm: dict[str, Any] = {"name": name}
    for theirs, ours in {"learning_rate": "lr", **SHARED, **FIELDS[name]}.items():
        value = _number(data.get("lr_schedule" if theirs == "learning_rate" else theirs))
        if value is not None or (theirs in data and data[theirs] is None and theirs != "learning_rate"):
            algorithm[ours] = value
        elif theirs in data:
            notes.append(f"{theirs} is a function, which is not read: algorithm.{ours} has our default")
    envs = data.get("n_envs") or 1
    if name in TRAIN_FREQ:
        every, steps = TRAIN_FREQ[name], data.get("gradient_steps", 1)
        algorithm |= {"update_every": every, "replay_ratio": (steps if steps > 0 else every * envs) / (every * envs)}
        notes.append(f"train_freq is pickled, which is not read: algorithm.update_every is SB3's default, {every}")
    if name == "dqn":
        algorithm |= {"double": False, "target_every": max(1, data["target_update_interval"] // TRAIN_FREQ["dqn"])}
    if name in ("a2c", "td3"):
        notes.append({"a2c": "the optimizer is Adam, not RMSprop", "td3": "action_noise: algorithm.noise is 0.1"}[name])
    notes += ["the states of the optimizers are not read", "statistics of a VecNormalize are not part of the zip"]
    spec = {
        "kind": "control",
        "env": {"id": env, "num_envs": envs},
        "algorithm": algorithm,
        "net": model.net,
        "init": str(path),
        "train": {"frames": max(data.get("_total_timesteps") or 0, 1)},
    }
    load({"name": "imported", **spec})  # what cannot be a spec here is refused now
    return spec, notes


def spec_text(path: Path, spec: dict[str, Any], notes: list[str]) -> str:
    """The file to write, with the notes as comments at its top."""
    lines = [f"# Imported from {path.name} of Stable-Baselines3 by `palestra import sb3`.", *(f"# {n}." for n in notes)]
    return "\n".join(lines) + "\n" + write_text(spec)


def _number(value: Any) -> Any:
    """A number, or text such as auto; also of a constant schedule. None of everything else."""
    if isinstance(value, dict):
        constant = re.fullmatch(r"ConstantSchedule\(val=(.+)\)", str(value.get("value_schedule", "")))
        return None if constant is None else float(constant[1])
    return value
