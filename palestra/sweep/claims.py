"""Claim and run: any number of processes go through one list of targets, and each target is carried out once.

Nobody coordinates. A process takes the lease of a target that is neither done nor held, carries it out, and writes that
it is done before it gives the lease back. A target that failed, or whose process died, is open again: others try it.
"""

import json
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from palestra.errors import Interrupted, PalestraError
from palestra.runs.lease import Lease, LeaseLost, Owner, RunBusy, kept
from palestra.runs.store import LocalStore, clear_write_errors

log = logging.getLogger("palestra.sweep")

LOOK_SECONDS = 0.5  # between two looks at what others hold


class TargetsFailed(PalestraError):
    """Some targets failed in this process, and no other has carried them out since."""


@dataclass
class Claims:
    """Who carries out what, in one folder: `<target>.lease.json` while somebody does, `<target>.json` for what came."""

    folder: Path
    _store: LocalStore = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._store = LocalStore(self.folder)

    def outcome(self, target: str) -> dict[str, Any] | None:
        """What came of a target the last time: its `state`, done or failed; None where it never ended."""
        found = self._store.get(f"{target}.json")
        return None if found is None else json.loads(found)

    def done(self, target: str) -> bool:
        """Whether it has been carried out."""
        return (self.outcome(target) or {}).get("state") == "done"

    def held(self, target: str) -> bool:
        """Whether a living process is carrying it out."""
        return self._lease(target).holder() is not None

    def run(self, targets: Sequence[str], work: Callable[[str], None], *, look: float = LOOK_SECONDS) -> list[str]:
        """Carry out what is neither done nor held until all are done; what this process did, in that order.

        A target that fails here is left to the others, and the rest goes on; at the end `TargetsFailed` is raised
        unless another process succeeded with it. While others hold targets this one waits, and takes over from the
        dead. Being asked to stop (`Interrupted`) gives the target back at once.
        """
        ran: list[str] = []
        failed: dict[str, Exception] = {}
        while True:
            waiting = False
            for target in targets:
                if target in ran or target in failed or self.done(target):
                    continue
                with ExitStack() as stack:
                    lease = self._lease(target)
                    try:
                        stack.enter_context(kept(lease))
                    except RunBusy:
                        waiting = True
                        continue
                    if self.done(target):  # between the look and the lease
                        continue
                    try:
                        error = self._carry_out(target, work, lease)
                    except LeaseLost as lost:  # we were silent for too long, and its new owner carries it out
                        log.warning("%s: %s", target, lost)
                        waiting = True
                        continue
                    if error is None:
                        ran.append(target)
                    else:
                        failed[target] = error
            if not waiting:
                break
            time.sleep(look)
        left = {target: error for target, error in failed.items() if not self.done(target)}
        if left:
            lines = "\n".join(f"  {target}: {_short(error)}" for target, error in left.items())
            raise TargetsFailed(f"{len(left)} of {len(targets)} failed:\n{lines}") from next(iter(left.values()))
        return ran

    def _carry_out(self, target: str, work: Callable[[str], None], lease: Lease) -> Exception | None:
        started = time.monotonic()
        try:
            work(target)
        except (Interrupted, LeaseLost):
            raise
        except Exception as error:
            # Logged with its traceback, counted, and raised at the end: one bad run must not end the others.
            log.exception("%s failed", target)
            self._write(target, {"state": "failed", "error": _short(error)}, started)
            return error
        lease.renew()
        self._write(target, {"state": "done"}, started)
        return None

    def _write(self, target: str, outcome: dict[str, Any], started: float) -> None:
        about = {
            **outcome,
            "tries": (self.outcome(target) or {}).get("tries", 0) + 1,
            "seconds": round(time.monotonic() - started, 3),
            "finished": datetime.now(UTC).isoformat(timespec="seconds"),
            "owner": asdict(Owner.here()),
        }
        with clear_write_errors(self.folder):
            self._store.put(f"{target}.json", (json.dumps(about, indent=1) + "\n").encode())

    def _lease(self, target: str) -> Lease:
        return Lease(self._store, f"{target}.lease.json")


def _short(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
