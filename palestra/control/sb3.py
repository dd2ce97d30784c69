"""Weights of Stable-Baselines3 zips as ours: PPO, A2C, DQN, SAC and TD3 with MLPs, the first three with a CNN too.

Only tensors and JSON are read. The pickled objects in such a file are never loaded: an unknown file can do no harm.
"""

import json
import re
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from palestra.control.algorithms.base import Algorithm
from palestra.control.nets.heads import ActionHead
from palestra.errors import UsageError

Weights = dict[str, Tensor]

CONV = "features_extractor.cnn"
MODULES = {"dqn": "dqn", "sac": "sac", "td3": "td3", "common": "ppo"}  # of SB3's policies, and our algorithms


@dataclass(frozen=True)
class Sb3Model:
    """A zip: what it was trained with as far as JSON has it, and the tensors of its policy."""

    path: Path
    data: dict[str, Any]
    weights: Weights
    variables: Weights

    @property
    def algorithm(self) -> str:
        """Our name of the algorithm."""
        module = str(self.data.get("policy_class", {}).get("__module__", "")).split(".")
        name = MODULES.get(module[1]) if len(module) > 1 and module[0] == "stable_baselines3" else None
        if name is None or self.data.get("use_sde"):
            what = "use_sde" if name else f"a policy of {'.'.join(module) or 'an unknown class'}"
            raise UsageError(
                f"{self.path}: {what} is not supported: expected a PPO, A2C, DQN, SAC or TD3 of SB3 itself"
            )
        return "a2c" if name == "ppo" and "clip_range" not in self.data else name

    @property
    def convolves(self) -> bool:
        """Whether images go through Nature's CNN first."""
        return any(CONV in name for name in self.weights)

    def layers(self, prefix: str) -> list[tuple[Tensor, Tensor]]:
        """Weights and biases of the linear layers of an nn.Sequential, in order."""
        at = sorted(
            int(m[1]) for name in self.weights if (m := re.fullmatch(rf"{re.escape(prefix)}\.(\d+)\.weight", name))
        )
        return [(self.weights[f"{prefix}.{i}.weight"], self.weights[f"{prefix}.{i}.bias"]) for i in at]

    @property
    def net(self) -> dict[str, Any]:
        """The block `net` of a spec whose networks have the shapes of this one's."""
        name, kwargs = self.algorithm, self.data.get("policy_kwargs") or {}
        usual = "Tanh" if name in ("ppo", "a2c") else "ReLU"
        activation = re.search(r"(\w+)'?>?$", str(kwargs.get("activation_fn", usual)))
        known = {"Tanh": "tanh", "ReLU": "relu", "SiLU": "silu", "GELU": "gelu"}.get(
            activation[1] if activation else ""
        )
        if known is None:
            raise UsageError(f"{self.path}: the activation {kwargs['activation_fn']} has no counterpart here")
        if self.convolves:
            if name not in ("ppo", "a2c", "dqn") or len(self._hidden(name)[0]) != 0:
                raise UsageError(f"{self.path}: a CNN is supported for PPO, A2C and DQN without further hidden layers")
            size = next(len(w) for n, w in self.weights.items() if n.endswith("features_extractor.linear.0.bias"))
            return {"trunk": "nature", "hidden": [size], "activation": "relu"} | (
                {} if name == "dqn" else {"shared": True}
            )
        hidden, critic = self._hidden(name)
        return {"hidden": hidden, "activation": known} | ({} if critic in (None, hidden) else {"critic_hidden": critic})

    def _hidden(self, name: str) -> tuple[list[int], list[int] | None]:
        """Widths of the policy's and of the critic's hidden layers."""
        policy, critic = {
            "ppo": ("mlp_extractor.policy_net", "mlp_extractor.value_net"),
            "a2c": ("mlp_extractor.policy_net", "mlp_extractor.value_net"),
            "dqn": ("q_net.q_net", None),
            "sac": ("actor.latent_pi", "critic.qf0"),
            "td3": ("actor.mu", "critic.qf0"),
        }[name]
        widths = [len(bias) for _, bias in self.layers(policy)]
        of_critic = None if critic is None else [len(bias) for _, bias in self.layers(critic)]
        if name in ("sac", "td3") and of_critic is not None:
            of_critic = of_critic[:-1]  # the last layer is the value itself
        return widths[:-1] if name in ("dqn", "td3") else widths, of_critic

    def parts(self, head: ActionHead) -> dict[str, Any]:
        """What `Algorithm.begin_from` takes: the policy, and what the algorithm has of critics, targets and log α."""
        name = self.algorithm
        if name in ("ppo", "a2c"):
            return {"policy": self._actor_critic(head)}
        if name == "dqn":
            return {"policy": self._q("q_net"), "target": self._q("q_net_target")}
        critics = {"critics": self._twins("critic"), "targets": self._twins("critic_target")}
        if name == "td3":
            return {"policy": self._actor("actor"), "target": self._actor("actor_target"), **critics}
        hidden = _mlp("trunk.mlp", self.layers("actor.latent_pi"))
        outputs = {part: torch.cat([self.weights[f"actor.{of}.{part}"] for of in ("mu", "log_std")]) for part in PARTS}
        policy = hidden | {f"policy_head.{part}": outputs[part] for part in PARTS}
        alpha = self.variables.get("log_ent_coef")
        return {"policy": policy, **critics} | ({} if alpha is None else {"log_alpha": alpha.detach()})

    def _actor_critic(self, head: ActionHead) -> Weights:
        made = self._convolutions("features_extractor") if self.convolves else {}
        made |= _mlp("trunk.mlp", self.layers("mlp_extractor.policy_net")) if not self.convolves else {}
        made |= _mlp("value_trunk.mlp", self.layers("mlp_extractor.value_net")) if not self.convolves else {}
        weight, bias = (self.weights[f"action_net.{part}"] for part in PARTS)
        if head.continuous:  # our Gaussian is in units of half the range, SB3's in the environment's
            middle, half, _, _ = map(torch.from_numpy, head._units)
            weight, bias = weight / half[:, None], (bias - middle) / half
            made["log_std"] = self.weights["log_std"] - half.log()
        made |= {"policy_head.weight": weight, "policy_head.bias": bias}
        return made | {f"value_head.{part}": self.weights[f"value_net.{part}"] for part in PARTS}

    def _q(self, prefix: str) -> Weights:
        *hidden, (weight, bias) = self.layers(f"{prefix}.q_net")
        made = self._convolutions(f"{prefix}.features_extractor") if self.convolves else _mlp("trunk.mlp", hidden)
        return made | {"advantage_head.weight": weight, "advantage_head.bias": bias}

    def _actor(self, prefix: str) -> Weights:
        *hidden, (weight, bias) = self.layers(f"{prefix}.mu")
        return _mlp("trunk.mlp", hidden) | {"policy_head.weight": weight, "policy_head.bias": bias}

    def _twins(self, prefix: str) -> Weights:
        if self.layers(f"{prefix}.qf2") or not self.layers(f"{prefix}.qf1"):
            raise UsageError(f"{self.path}: expected two critics")
        pairs = zip(self.layers(f"{prefix}.qf0"), self.layers(f"{prefix}.qf1"), strict=True)
        made: Weights = {}
        for i, ((weight, bias), (other, other_bias)) in enumerate(pairs):
            made[f"weights.{i}"] = torch.stack([weight.T, other.T])
            made[f"biases.{i}"] = torch.stack([bias[None], other_bias[None]])
        return made

    def _convolutions(self, prefix: str) -> Weights:
        named = {
            f"trunk.front.body.{i}.{part}": self.weights[f"{prefix}.cnn.{i}.{part}"]
            for i in (0, 2, 4)
            for part in PARTS
        }
        return named | {f"trunk.mlp.layers.0.{part}": self.weights[f"{prefix}.linear.0.{part}"] for part in PARTS}


PARTS = ("weight", "bias")


def _mlp(to: str, layers: list[tuple[Tensor, Tensor]]) -> Weights:
    return {
        f"{to}.layers.{i}.{part}": tensor
        for i, layer in enumerate(layers)
        for part, tensor in zip(PARTS, layer, strict=True)
    }


def read_sb3(path: Path) -> Sb3Model:
    """Open a zip that `model.save` of Stable-Baselines3 wrote."""
    try:
        with zipfile.ZipFile(path) as file:
            data = json.loads(file.read("data"))
            tensors = {name: file.read(f"{name}.pth") for name in ("policy", "pytorch_variables")}
    except (OSError, zipfile.BadZipFile, KeyError, ValueError) as error:
        raise UsageError(f"{path} is not a model of Stable-Baselines3: {error}") from error
    weights, variables = (torch.load(BytesIO(of), map_location="cpu", weights_only=True) for of in tensors.values())
    return Sb3Model(path, data, weights, variables)


def initial(path: Path, algorithm: Algorithm) -> dict[str, Any]:
    """What `algorithm.begin_from` takes, of a zip that fits it; statistics of observations stay as they are."""
    model, head = read_sb3(path), algorithm.policy.head
    if model.algorithm != algorithm.spec.name:
        raise UsageError(f"init: {path} is a model of {model.algorithm}, and `algorithm.name` is {algorithm.spec.name}")
    parts, into = model.parts(head), algorithm.policy.state()["weights"]
    for part in parts.keys() & {"policy", "target"}:
        parts[part] = _fitting(parts[part], into, path)
    return parts


def _fitting(given: Mapping[str, Tensor], into: Mapping[str, Tensor], path: Path) -> Weights:
    for name, tensor in into.items():
        ours, theirs = tuple(tensor.shape), tuple(given[name].shape) if name in given else None
        if ours != theirs and "obs_scale" not in name:
            raise UsageError(
                f"init: {path} does not fit the spec: {name} has the shape {theirs} there and {ours} here. "
                f"`palestra import sb3 {path} --env ID` writes a spec that fits"
            )
    if extra := given.keys() - into.keys():
        raise UsageError(f"init: {path} has {', '.join(sorted(extra))}, for which the spec's network has no place")
    return {**into, **given}
