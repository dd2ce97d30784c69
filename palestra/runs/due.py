"""When things are due: the cadences of a spec against the counters of a run."""

import time
from collections.abc import Mapping, Sequence

from palestra.spec.cadence import Cadence

Counters = Mapping[str, int]  # "steps" and "frames" so far


def due(cadence: Cadence | None, before: Counters, after: Counters) -> bool:
    """Whether a counted cadence fell due on the way from `before` to `after`. No memory, so a resume repeats it."""
    return cadence is not None and cadence.crossed(before[cadence.unit], after[cadence.unit])


class CheckpointsDue:
    """Why a checkpoint is due: "temporary" by the clock (only the newest stays), "kept" by steps or frames."""

    def __init__(self, cadences: Sequence[Cadence]):
        self.counted = [cadence for cadence in cadences if not cadence.is_time]
        self.timed = min((cadence.seconds for cadence in cadences if cadence.is_time), default=None)
        self._since = time.monotonic()

    def reasons(self, before: Counters, after: Counters) -> set[str]:
        """The reasons for one now, empty when none is due."""
        reasons = {"kept"} if any(due(cadence, before, after) for cadence in self.counted) else set()
        if self.timed is not None and time.monotonic() - self._since >= self.timed:
            self._since = time.monotonic()
            reasons.add("temporary")
        return reasons
