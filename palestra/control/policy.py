"""A policy as an object: what a checkpoint holds and `palestra.load` gives back."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from palestra.control.nets.actor_critic import Actor, RecurrentActor
from palestra.control.spaces import ObsShape, packed, structured
from palestra.errors import UsageError


class Policy:
    """Acts on observations: what a checkpoint holds of an algorithm, and `palestra.load` gives back."""

    def __init__(self, obs_shape: Sequence[int], net: Actor, device: torch.device | str = "cpu"):
        self.obs_shape = obs_shape if isinstance(obs_shape, ObsShape) else ObsShape(obs_shape)
        self.head, self.device = net.head, torch.device(device)
        self.net = net.to(self.device)
        self._memory: Tensor | None = None  # of a recurrent policy, (B, memory)

    def reset(self, rows: np.ndarray | None = None) -> None:
        """Clear a recurrent policy's memory where episodes start: in `rows`, bool (B,), of a batch; None: in all."""
        if rows is None or self._memory is None:
            self._memory = None
        else:
            self._memory = torch.where(torch.from_numpy(rows).to(self.device)[:, None], 0.0, self._memory)

    def act(self, obs: Any, *, deterministic: bool = True, mask: Any = None) -> Any:
        """The action for one observation, or the actions for a batch of them (one more dimension in front).

        Both as the environment has them, also where they are Dicts and Tuples; observations packed into one array, as
        in training, are taken too. `mask` is the environment's `info["action_mask"]`, where it gives one; for a batch,
        one per row. For a recurrent policy the observation continues its episode: call `reset` where one starts.
        """
        array = np.asarray(self._packed(obs))
        if array.dtype.kind == "f":  # integers, as of images, stay as they are
            array = array.astype(np.float32, copy=False)
        single = array.shape == self.obs_shape
        if not single and array.shape[1:] != self.obs_shape:
            raise UsageError(f"expected an observation of shape {self.obs_shape} or a batch of them, got {array.shape}")
        batch = torch.from_numpy(array[None] if single else array)
        allowed = None if mask is None else self._mask(mask, single, len(batch))
        actions = self.actions(batch, allowed, None if deterministic else torch.default_generator)
        vectors = self.head.to_env(actions)[0] if single else self.head.to_env(actions)
        form = self.head.description.get("form")
        return vectors if form is None else structured(form, vectors)

    def _packed(self, obs: Any) -> Any:
        """An observation of several parts, or of one-hot choices, as one array; others as they are."""
        parts = self.obs_shape.parts
        if parts is None:
            return obs
        # n integers for Discrete(n) are a batch of them: one-hot vectors are packed as floats.
        choices = not parts[0].path and parts[0].sizes is not None
        given = isinstance(obs, np.ndarray) and not (choices and obs.dtype.kind in "iu")
        if given and obs.shape[-1:] == self.obs_shape[-1:]:
            return obs
        if len(self.obs_shape) > 1:
            raise UsageError(
                f"expected {self.obs_shape[0]} stacked observations, each packed into one array, because the policy "
                "was trained with env.frame_stack"
            )
        try:
            return packed(parts, obs)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            names = ", ".join(".".join(map(str, part.path)) or "one value" for part in parts)
            raise UsageError(f"expected an observation with the parts {names}: {error!r}") from error

    @torch.no_grad()
    def actions(self, obs: Tensor, mask: Tensor | None = None, generator: torch.Generator | None = None) -> Tensor:
        """The best actions for a batch of observations, or ones sampled with a generator."""
        obs, mask = obs.to(self.device), None if mask is None else mask.to(self.device)
        if not isinstance(self.net, RecurrentActor):
            return self.net.actions(obs, mask, generator)
        if self._memory is None:
            self._memory = self.net.nothing(len(obs))
        if len(self._memory) != len(obs):
            raise UsageError(
                f"a recurrent policy with the memory of {len(self._memory)} parallel episodes got {len(obs)} "
                "observations: call policy.reset() first"
            )
        actions, self._memory = self.net.remembered(obs, self._memory, mask, generator)
        return actions

    def _mask(self, mask: Any, single: bool, rows: int) -> Tensor:
        """The environment's mask as (B, choices)."""
        sizes = self.head.maskable
        if sizes is None:
            raise UsageError("a mask is for Discrete and MultiDiscrete actions")
        if isinstance(mask, tuple):  # one array for each part of a MultiDiscrete action
            mask = np.concatenate([np.asarray(part) for part in mask], axis=-1)
        array = np.asarray(mask, dtype=bool)
        array = array[None] if single else array
        if array.shape != (rows, sum(sizes)):
            raise UsageError(f"expected a mask of {sum(sizes)} entries for each observation, got {array.shape}")
        return torch.from_numpy(array)

    def state(self) -> dict[str, Any]:
        """Weights and spaces as plain data and tensors, copied: later updates do not change them."""
        weights = {name: value.detach().to("cpu", copy=True) for name, value in self.net.state_dict().items()}
        parts = self.obs_shape.plain_parts
        description = {"obs_shape": list(self.obs_shape), "actions": self.head.description, "weights": weights}
        return description if parts is None else description | {"parts": parts}

    def load_state(self, state: dict[str, Any]) -> None:
        """Take the weights of `state()`; they are copied into the parameters, so views of them stay views."""
        self.net.load_state_dict(state["weights"])
