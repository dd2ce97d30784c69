"""A policy as one file that runs without Palestra: ONNX or TorchScript, from raw observations to environment actions.

Normalization of observations, the most likely action and its scale to the action space are all in the graph, so that
nothing has to be known to use the file. A recurrent policy takes and returns its memory, zeros where an episode begins.
"""

import warnings
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from palestra.control.nets.actor_critic import Recurrent, RecurrentActor, _gru, _lstm
from palestra.control.policy import Policy
from palestra.errors import UsageError, needs_extra
from palestra.runs.store import write_bytes

FORMATS = {"onnx": ".onnx", "torchscript": ".pt"}
"""The formats and the usual endings of their files."""


class Acting(nn.Module):
    """The function in the file: observations (B, ...) to actions; for a recurrent policy also memory to memory."""

    middle: Tensor
    width: Tensor
    low: Tensor
    high: Tensor
    start: Tensor

    def __init__(self, policy: Policy):
        super().__init__()
        self.net, self.head = policy.net, policy.head
        if self.head.continuous:
            units = zip(("middle", "width", "low", "high"), self.head._units, strict=True)
        else:
            units = [("start", np.asarray(self.head.description.get("start", 0)))]
        for name, array in units:
            self.register_buffer(name, torch.from_numpy(array))

    def forward(self, obs: Tensor, memory: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """Actions (B, ...) as the environment takes them, and the memory after them."""
        if memory is None:
            return self.to_env(self.net.actions(obs))
        net = self.net
        assert isinstance(net, RecurrentActor)
        if not isinstance(net, Recurrent):
            actions, memory = net.remembered(obs, memory)
            return self.to_env(actions), memory
        # Of an actor-critic the policy's cell alone: the value's is of no use to the file.
        features = net.trunk(obs if net.obs_scale is None else net.obs_scale.forward(obs))
        hidden = memory[:, : net.cell.size]
        seen, gates = net.cell.inputs(features), net.cell.hidden(hidden)
        memory = _lstm(seen + gates, memory[:, net.cell.size :]) if net.cell.lstm else _gru(seen, gates, hidden)
        distribution = net.head.distribution(net.policy_head(memory[:, : net.cell.size]), net.log_std)
        return self.to_env(distribution.mode()), memory

    def to_env(self, actions: Tensor) -> Tensor:
        """`ActionHead.to_env` as operations of a graph."""
        if self.head.continuous:
            return self.middle + self.width * torch.minimum(torch.maximum(actions, self.low), self.high)
        return actions.to(torch.int8) if self.head.kind == "multi_binary" else actions + self.start


def format_of(out: Path, to: str | None) -> str:
    """The format that is asked for, else that of the file's ending."""
    known = to or {ending: name for name, ending in FORMATS.items()}.get(out.suffix)
    if known not in FORMATS:
        raise UsageError(
            f"{out}: expected --to {', '.join(FORMATS)} or transitions, or a file that ends in .onnx or .pt"
        )
    return known


def export(policy: Policy, obs_dtype: np.dtype, out: Path, to: str) -> str:
    """Write a policy that sees observations of this type; returns a sentence on its inputs and outputs."""
    module = Acting(Policy(policy.obs_shape, policy.net)).eval()
    obs = torch.from_numpy(np.zeros((2, *policy.obs_shape), obs_dtype))  # 2: a batch of 1 may be taken for a constant
    net, inputs, names, outputs = policy.net, [obs], ["obs"], ["action"]
    if isinstance(net, RecurrentActor):
        width = net.cell.memory if isinstance(net, Recurrent) else net.memory
        inputs, names, outputs = [obs, torch.zeros(2, width)], ["obs", "memory"], ["action", "next_memory"]
    file = BytesIO()
    with torch.no_grad(), warnings.catch_warnings():
        # Tracing is deprecated, but takes 2 s and writes one file, where torch.export takes 40 and writes two.
        warnings.simplefilter("ignore")
        if to == "onnx":
            with needs_extra("exporting to ONNX", "onnx"):
                import onnx  # noqa: F401
            axes = {name: {0: "batch"} for name in (*names, *outputs)}
            options: dict[str, Any] = {"input_names": names, "output_names": outputs, "dynamic_axes": axes}
            torch.onnx.export(module, tuple(inputs), file, **options, dynamo=False)  # pyrefly: ignore
        else:
            torch.jit.save(torch.jit.trace(module, tuple(inputs)), file)
    write_bytes(out, file.getvalue())
    shapes = [f"{name} {array.dtype}{tuple(array.shape[1:])}" for name, array in zip(names, inputs, strict=True)]
    return f"{out}: a batch of {' and '.join(shapes)} to {' and '.join(outputs)}".replace("torch.", "")
