"""What every network that acts has: the policy of a checkpoint, whatever trained it."""

import torch
from torch import Tensor, nn

from palestra.control.actions import ActionHead


class Actor(nn.Module):
    """A network that acts. Actions are as they are stored: the head makes of them what the environment takes."""

    memory: int = 0
    """The width of what it remembers from step to step; 0: it acts on what it sees alone."""

    def __init__(self, head: ActionHead):
        super().__init__()
        self.head = head

    def greedy(self, obs: Tensor, mask: Tensor | None = None) -> Tensor:
        """The best action in each of `obs`, (B, ...), as far as it knows.

        `mask`, (B, outputs), is True for the actions that are allowed; None: the environment forbids none.
        """
        raise NotImplementedError

    def drawn(self, obs: Tensor, generator: torch.Generator, mask: Tensor | None = None) -> Tensor:
        """An action for each of `obs` as the policy draws them; the best one where it does not draw."""
        return self.greedy(obs, mask)
