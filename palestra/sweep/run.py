"""Runs a sweep, alone or beside other processes: each run of the grid is claimed and carried out once.

Nobody coordinates. A process takes the lease of a target that is neither done nor held, carries it out, and writes that
it is done before it gives the lease back. A target that failed, or whose process died, is open again: others try it.
"""

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from palestra.errors import Interrupted, LeaseLost, PalestraError, UsageError
from palestra.kinds.trial import Launch
from palestra.runs.lease import Lease, Owner
from palestra.runs.run import Run, make_trial, refuse_secrets
from palestra.runs.session import stop_signals
from palestra.runs.store import LocalStore, clear_write_errors, write_json
from palestra.search.trials import shared
from palestra.spec.base import ExperimentSpec
from palestra.spec.blocks import label
from palestra.spec.compose import parse
from palestra.spec.grid import Point, points
from palestra.spec.kinds import runner
from palestra.spec.load import Source, resolved
from palestra.spec.load import load as load_spec
from palestra.spec.model import plain
from palestra.sweep.results import POINT, write_results
from palestra.work import fanout
from palestra.work.fanout import Backend, Inline, Processes, Resources, Stop, WorkItem, WorkOutcome
from palestra.work.pool import TaskFailed, WorkerDied

log = logging.getLogger("palestra.sweep")

CLAIM_SECONDS = 0.5  # between two looks at what others hold


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

    def run(
        self,
        targets: Sequence[str],
        work: Callable[[str], Any],
        *,
        look: float = CLAIM_SECONDS,
        stop: Stop | None = None,
        resources: Resources | None = None,
        backend: Backend | None = None,
        logs: Path | None = None,
        **conditions: Any,
    ) -> list[str]:
        """Carry out what is neither done nor held until all are done; what this process did, in that order.

        A target that fails here is left to the others, and the rest goes on; at the end `TargetsFailed` is raised
        unless another process succeeded with it. While others hold targets this one waits, and takes over from the
        dead. Being asked to stop (`Interrupted`) gives the target back at once. In line where no backend is given;
        `logs` is the folder of what the targets print, and `conditions` are those of a `WorkItem`.
        """
        stop, left = stop or Stop(), list(targets)
        ran: list[str] = []
        died: set[str] = set()
        failed: dict[str, BaseException] = {}

        def items() -> Iterator[WorkItem | None]:
            while True:
                log = {"log": logs / f"{left[0]}.txt"} if left and logs is not None else {}
                yield self._item(left.pop(0), work, **log, **conditions) if left else None

        running = fanout.run(items(), resources or Resources(), backend or Inline(), stop=stop, look=look)
        with closing(running) as outcomes:
            for outcome in outcomes:
                target, error = outcome.item.name, outcome.error
                cause = error.__cause__ if isinstance(error, TaskFailed) else error
                if error is None:
                    ran += [target] if outcome.attempts else []
                elif stop.requested or isinstance(cause, Interrupted):
                    stop()
                elif isinstance(cause, LeaseLost) or (isinstance(error, WorkerDied) and target not in died):
                    # We were silent for too long, and its new owner carries it out; or our worker was killed, once.
                    log.warning("%s: %s", target, cause)
                    died.add(target)
                    left.append(target)
                elif not outcome.attempts:
                    with clear_write_errors(self.folder):
                        raise error
                else:
                    # Logged with its traceback, counted, and raised at the end: one bad run must not end the others.
                    log.error("%s failed", target, exc_info=error)
                    self._write(outcome, {"state": "failed", "error": _short(error)})
                    failed[target] = error
        if stop.requested:
            raise Interrupted(STOPPED)
        still = {target: error for target, error in failed.items() if not self.done(target)}
        if still:
            lines = "\n".join(f"  {target}: {_short(error)}" for target, error in still.items())
            raise TargetsFailed(f"{len(still)} of {len(targets)} failed:\n{lines}") from next(iter(still.values()))
        return ran

    def _item(self, target: str, work: Callable[[str], Any], **conditions: Any) -> WorkItem:
        lease = self._lease(target)

        def complete(outcome: WorkOutcome) -> None:
            if outcome.error is None:
                lease.renew()
                self._write(outcome, {"state": "done"})

        def done(held: bool) -> bool:
            return self.done(target)

        return WorkItem(target, work, (target,), lease=lease, done=done, complete=complete, **conditions)

    def _write(self, outcome: WorkOutcome, came: dict[str, Any]) -> None:
        target = outcome.item.name
        about = {
            **came,
            "tries": (self.outcome(target) or {}).get("tries", 0) + 1,
            "seconds": round(outcome.seconds, 3),
            "finished": datetime.now(UTC).isoformat(timespec="seconds"),
            "owner": outcome.value or asdict(Owner.here()),
        }
        with clear_write_errors(self.folder):
            self._store.put(f"{target}.json", (json.dumps(about, indent=1) + "\n").encode())

    def _lease(self, target: str) -> Lease:
        return Lease(self._store, f"{target}.lease.json")


def _short(error: BaseException) -> str:
    lines = str(getattr(error, "message", error)).strip().splitlines()
    return lines[0] if lines else type(error).__name__


CLAIMS = "claims"
STOPPED = "the sweep was interrupted with everything saved; the same command resumes it"


@dataclass(frozen=True)
class Plan:
    """What a sweep would run, and where."""

    spec: ExperimentSpec
    folder: Path
    points: list[Point]

    @property
    def group(self) -> str:
        """The name that all runs share."""
        return self.folder.name

    def state(self, name: str) -> str:
        """done, failed, running or new."""
        claims = Claims(self.folder / CLAIMS)
        if claims.done(name):
            return "done"
        return "running" if claims.held(name) else (claims.outcome(name) or {"state": "new"})["state"]


def plan(
    spec: Source,
    *,
    only: Sequence[str] = (),
    group: str | None = None,
    variables: Mapping[str, Any] | None = None,
    root: str | Path = "runs",
    overrides: Iterable[str] | Mapping[str, Any] = (),
) -> Plan:
    """The runs of a spec's `sweep:` block; nothing is written.

    Args:
        spec: A file ("spec.yaml" or "spec.yaml:name"), a dict or a spec.
        only: Keep only these settings of an axis, as "size=s,m"; several axes must all agree.
        group: The folder under the runs; over `sweep.group`.
        variables: Values of the `${…}` in the spec.
        root: The folder of all runs.
        overrides: Fields of the spec: `["train.steps=8"]`, or a mapping of paths to values.
    """
    given = dict(parse(overrides)) | ({} if group is None else {"sweep.group": group})
    loaded = load_spec(spec, variables=variables, overrides=given).spec
    refuse_secrets(plain(loaded), "a sweep")
    made = points(loaded)
    assert loaded.sweep is not None
    wanted = _chosen(only, loaded)
    kept = [point for point in made if all(label(point.at[axis]) in labels for axis, labels in wanted.items())]
    if not kept:
        raise UsageError(f"--only {' '.join(only)}: no run of {loaded.name} is left")
    folder = Path(os.path.abspath(root)) / (loaded.sweep.group or default_group(loaded.name))
    return Plan(loaded, folder, kept)


def sweep(planned: Plan, *, parallel: int = 1, quiet: bool = False) -> dict[str, Any]:
    """Run what is not done yet, together with any other process that does the same; the summary of the whole group.

    With `parallel` above 1 so many worker processes share the runs, and the GPUs if there are any; any number of
    processes, also on other machines that see the folder, may run the same sweep beside this one.
    """
    claims, names, command = Claims(planned.folder / CLAIMS), [point.name for point in planned.points], list(sys.argv)
    if parallel == 1:
        orders = {point.name: _order(planned, point) for point in planned.points}
        claims.run(names, partial(run_point, planned.folder, orders, command, not quiet))
    else:
        threads, stop = max(1, (os.cpu_count() or 1) // parallel), Stop()
        resources, share = shared(parallel, threads, planned.spec.device)
        orders = {point.name: _order(planned, point, None if share else threads) for point in planned.points}
        work, backend = partial(run_point, planned.folder, orders, command, False), Processes(planned.group)
        (logs := planned.folder / "logs").mkdir(parents=True, exist_ok=True)
        with stop_signals(stop):
            claims.run(
                names, work, stop=stop, resources=resources, backend=backend, logs=logs, cores=threads, gpu=share
            )
    return write_results(planned.folder)


def run_point(
    folder: Path, orders: Mapping[str, Mapping[str, Any]], command: Sequence[str], show: bool, name: str
) -> dict[str, Any]:
    """Carry out one run; the process that did it."""
    trial = _trial(folder, orders[name], command)
    spec = resolved(trial.info["spec"])
    runner(spec.kind)(spec, Launch(folder.parent, command, trial, show=show))
    return asdict(Owner.here())


def default_group(name: str) -> str:
    """The name of the sweep and the short commit of the code around it, else Palestra's; the name where there is none.

    The code around is that of the current folder: a sweep of changed code is another sweep.
    """
    commit = _commit(Path.cwd()) or _commit(Path(__file__).parent)
    return f"{name}_{commit}" if commit else name


def _commit(folder: Path) -> str | None:
    try:
        done = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=folder, capture_output=True, text=True, check=False
        )
    except FileNotFoundError:  # no git here
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _chosen(only: Sequence[str], spec: ExperimentSpec) -> dict[str, set[str]]:
    assert spec.sweep is not None
    axes, wanted = spec.sweep.axes, {}
    for text in only:
        name, equals, labels = text.partition("=")
        if not equals or name not in axes:
            raise UsageError(f"--only {text}: expected AXIS=SETTING, of the axes {', '.join(axes)}")
        chosen = set(labels.split(",")) if labels not in axes[name].labels else {labels}
        unknown = sorted(chosen - set(axes[name].labels))
        if unknown:
            raise UsageError(f"--only {text}: axis '{name}' has no {unknown[0]}; it has {', '.join(axes[name].labels)}")
        wanted[name] = wanted.get(name, set()) | chosen
    return wanted


def _order(planned: Plan, point: Point, threads: int | None = None) -> dict[str, Any]:
    """What a worker needs to know of a run, as plain data."""
    spec = point.spec
    track = spec.track.model_copy(update={"project": spec.track.project or planned.group})
    changes = {"track": track, "threads": spec.threads or threads}
    return {"name": point.name, "at": point.at, "spec": plain(spec.model_copy(update=changes))}


def _trial(folder: Path, order: Mapping[str, Any], command: Sequence[str]) -> Run:
    """The folder of a run with its trial.json, as any other run has; one that is there already goes on as it began."""
    path = folder / order["name"]
    with clear_write_errors(path):
        if not (path / POINT).exists():
            write_json(path / POINT, {"at": order["at"]})
    spec = order["spec"]
    seeds = resolved(spec).seeds
    return make_trial(path, name=folder.name, id=order["name"], seeds=seeds, command=command, spec=spec)
