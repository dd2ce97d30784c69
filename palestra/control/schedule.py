"""A schedule of the spec, evaluated."""

import torch
from torch import Tensor

from palestra.rl.schedules import value
from palestra.spec.schedule import Schedule


def scheduled(schedule: Schedule, progress: float) -> Tensor:
    """The value at `progress` in [0, 1] as a 0-dim tensor: a compiled update must not compile again when it moves."""
    return torch.tensor(value(progress=progress, **schedule.arguments()))
