"""When things are due: the cadences of a spec against the counters of a run."""

import time
from collections.abc import Mapping, Sequence

from palestra.spec.model import Cadence

Counters = Mapping[str, int]  # "steps" and "frames" so far


def due(cadence: Cadence | None, before: Counters, after: Counters) -> bool:
    """Whether a counted cadence fell due on the way from `before` to `after`. No memory, so a resume repeats it."""
    return cadence is not None and cadence.crossed(before[cadence.unit], after[cadence.unit])


class CheckpointsDue:
    """Why a checkpoint is due: "temporary" by the clock (only the newest stays), "kept" by steps or frames.

    A counted cadence begins where those before it in the list end: 2 steps until 10, 5 steps until 20, 10 steps.
    """

    def __init__(self, cadences: Sequence[Cadence]):
        self.counted = [cadence for cadence in cadences if not cadence.is_time]
        self.timed = min((cadence.seconds for cadence in cadences if cadence.is_time), default=None)
        self._since = time.monotonic()

    def reasons(self, before: Counters, after: Counters) -> set[str]:
        """The reasons for one now, empty when none is due."""
        reasons, begin = set(), dict.fromkeys(before, 0)
        for cadence in self.counted:
            if due(cadence, {unit: max(count, begin[unit]) for unit, count in before.items()}, after):
                reasons.add("kept")
            begin[cadence.unit] = max(begin[cadence.unit], int(cadence.until or 0))
        if self.timed is not None and time.monotonic() - self._since >= self.timed:
            self._since = time.monotonic()
            reasons.add("temporary")
        return reasons
