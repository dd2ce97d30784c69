"""Schedules: a scheduled value as a pure function of training progress, in Python floats."""

import math
from typing import Literal

Shape = Literal["constant", "linear", "cosine", "rate", "periodic", "wsd", "inverse_sqrt"]

STAIRS = 20
"""Equal steps of the `rate` shape."""


def value(
    shape: Shape,
    progress: float,
    start: float,
    end: float,
    *,
    warmup: float = 0.0,
    begin: float = 0.0,
    finish: float = 1.0,
    rate: float = 0.9,
    period: float = 0.1,
) -> float:
    """The scheduled value when `progress` (0 to 1) of training is done.

    During `warmup` (a fraction of training) it rises from 0 to `start` in a straight line. The change happens between
    `begin`, or the end of the warm-up where that is later, and `finish` (fractions of training); before it holds
    `start`, after it holds what it reached. With p the progress between the two, start and end in either order and
    either of them 0:

    - constant: start.
    - linear: (1 - p)·start + p·end.
    - cosine: half a cosine wave from start to end, flat at both.
    - rate: 20 equal stairs, each multiplying what is left of start - end by `rate`; it nears `end`, never reaching it.
    - periodic: linear, plus a sine of the given `period` (in units of p) with amplitude (start - end)·p·(1 - p), which
      is 0 at both ends and never leaves the range from start to end.
    - wsd: warm up, stay, decay with 1 - √p (Hägele et al. 2024); `begin` 0.8 decays over the last fifth.
    - inverse_sqrt: start - end falls with 1/√progress from where the change begins, which must be after 0 (Vaswani et
      al. 2017, eq. 3, with `begin` at the end of the warm-up); it nears `end`, never reaching it.

    Linear, cosine, periodic and wsd are exactly `start` at p = 0 and exactly `end` at p = 1.
    """
    if progress < warmup:
        return start * progress / warmup
    if shape == "constant":
        return start
    begin = max(begin, warmup)
    if finish <= begin:
        raise ValueError(f"a schedule must finish after it begins, not at {finish} after {begin}")
    p = min(max((progress - begin) / (finish - begin), 0.0), 1.0)
    linear = (1.0 - p) * start + p * end
    if shape == "linear":
        return linear
    if shape == "periodic":
        return linear + (start - end) * p * (1.0 - p) * math.sin(2.0 * math.pi * p / period)
    if shape == "cosine":
        left = 0.5 * (1.0 + math.cos(math.pi * p))
    elif shape == "rate":
        left = rate ** math.floor(p * STAIRS)
    elif shape == "wsd":
        left = 1.0 - math.sqrt(p)
    elif shape == "inverse_sqrt":
        if begin <= 0:
            raise ValueError("an inverse_sqrt schedule must begin after 0")
        left = math.sqrt(begin / min(max(progress, begin), finish))
    else:
        raise ValueError(f"unknown schedule {shape!r}: constant, linear, cosine, rate, periodic, wsd or inverse_sqrt")
    return left * start + (1.0 - left) * end
