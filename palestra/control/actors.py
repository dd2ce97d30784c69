"""What every network that acts has: the policy of a checkpoint, whatever trained it."""

import torch
from torch import Tensor, nn

from palestra.control.actions import ActionHead


class Actor(nn.Module):
    """A network that acts. Actions are as they are stored: the head makes of them what the environment takes."""

    def __init__(self, head: ActionHead):
        super().__init__()
        self.head = head

    def greedy(self, obs: Tensor) -> Tensor:
        """The best action in each of `obs`, (B, ...), as far as it knows."""
        raise NotImplementedError

    def drawn(self, obs: Tensor, generator: torch.Generator) -> Tensor:
        """An action for each of `obs` as the policy draws them; the best one where it does not draw."""
        return self.greedy(obs)
