"""Runs a sweep, alone or next to other processes: each run of the grid is claimed and run once.

There is no coordinator. A process takes the lease of a target that is neither done nor held, runs it, and writes that
it is done before it releases the lease. A target that failed, or whose process died, is open again: others try it.
"""

import json
import logging
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from palestra.cluster.where import open_backend, refuse_more
from palestra.errors import Interrupted, LeaseLost, PalestraError, UsageError
from palestra.kinds.trial import Launch
from palestra.runs.lease import Lease, Owner
from palestra.runs.manifest import git_output
from palestra.runs.run import refuse_secrets
from palestra.runs.session import stop_signals
from palestra.runs.store import LocalStore, clear_write_errors, write_json
from palestra.search.trials import make_trial, shared
from palestra.spec.base import ExperimentSpec
from palestra.spec.blocks import label
from palestra.spec.compose import parse
from palestra.spec.grid import Point, points
from palestra.spec.kinds import runner
from palestra.spec.load import Overrides, Source, resolved
from palestra.spec.load import load as load_spec
from palestra.spec.model import plain
from palestra.sweep.results import POINT, write_results
from palestra.work import fanout
from palestra.work.fanout import Backend, Inline, Resources, Stop, WorkItem, WorkOutcome
from palestra.work.pool import TaskFailed, WorkerDied

log = logging.getLogger("palestra.sweep")

CLAIMS = "claims"
CLAIM_SECONDS = 0.5  # between two looks at the leases of others
STOPPED = "the sweep was interrupted with everything saved; the same command resumes it"


class TargetsFailed(PalestraError):
    """Some targets failed in this process, and no other process has succeeded with them since."""


class Claims:
    """Who runs which target, in one folder: `<target>.lease.json` while it runs, `<target>.json` once it ended."""

    def __init__(self, folder: Path):
        self.folder, self._store = folder, LocalStore(folder)

    def ended(self, target: str) -> dict[str, Any]:
        """How a target ended the last time: its `state`, done or failed, and more; empty where it never ended."""
        return json.loads(self._store.get(f"{target}.json") or b"{}")

    def done(self, target: str) -> bool:
        """Whether some process has run it to its end."""
        return self.ended(target).get("state") == "done"

    def state(self, target: str) -> str:
        """done, running (by a live process), failed or new."""
        state = self.ended(target).get("state", "new")
        return "running" if state != "done" and self._lease(target).holder() is not None else state

    def run(
        self,
        items: Sequence[WorkItem],
        resources: Resources | None = None,
        backend: Backend | None = None,
        *,
        look: float = CLAIM_SECONDS,
        stop: Stop | None = None,
    ) -> list[str]:
        """Run what is neither done nor held until all targets are done; returns what this process ran, in that order.

        A target is the name of an item. One that fails here is left to the other processes; `TargetsFailed` is raised
        at the end unless one of them succeeded. While others hold targets this process waits, and takes over from dead
        ones. `Interrupted` releases the target at once. Without a backend the work runs in this process.
        """
        stop, left = stop or Stop(), list(items)
        ran: list[str] = []
        died: set[str] = set()
        failed: dict[str, BaseException] = {}

        def claimed() -> Iterator[WorkItem | None]:
            while True:
                yield self._claimed(left.pop(0)) if left else None

        running = fanout.run(claimed(), resources or Resources(), backend or Inline(), stop=stop, look=look)
        with closing(running) as outcomes:
            for outcome in outcomes:
                target, error = outcome.item.name, outcome.error
                cause = error.__cause__ if isinstance(error, TaskFailed) else error
                if error is None:
                    ran += [target] if outcome.attempts else []
                elif stop.requested or isinstance(cause, Interrupted):
                    stop()
                elif isinstance(cause, LeaseLost) or (isinstance(error, WorkerDied) and target not in died):
                    # Our lease expired and its new owner runs it; or our worker was killed for the first time.
                    log.warning("%s: %s", target, cause)
                    died.add(target)
                    left.append(outcome.item)
                elif not outcome.attempts:
                    with clear_write_errors(self.folder):
                        raise error
                else:
                    # Logged with its traceback and raised at the end: one bad run must not end the others.
                    log.error("%s failed", target, exc_info=error)
                    self._write(outcome, {"state": "failed", "error": _first_line(error)})
                    failed[target] = error
        if stop.requested:
            raise Interrupted(STOPPED)
        still = {target: error for target, error in failed.items() if not self.done(target)}
        if still:
            lines = "\n".join(f"  {target}: {_first_line(error)}" for target, error in still.items())
            raise TargetsFailed(f"{len(still)} of {len(items)} failed:\n{lines}") from next(iter(still.values()))
        return ran

    def _claimed(self, item: WorkItem) -> WorkItem:
        lease = self._lease(item.name)

        def complete(outcome: WorkOutcome) -> None:
            if outcome.error is None:
                lease.renew()
                self._write(outcome, {"state": "done"})

        return replace(item, lease=lease, done=lambda held: self.done(item.name), complete=complete)

    def _write(self, outcome: WorkOutcome, state: dict[str, Any]) -> None:
        target = outcome.item.name
        about = {
            **state,
            "tries": self.ended(target).get("tries", 0) + 1,
            "seconds": round(outcome.seconds, 3),
            "finished": datetime.now(UTC).isoformat(timespec="seconds"),
            "owner": outcome.value or asdict(Owner.here()),
        }
        with clear_write_errors(self.folder):
            self._store.put(f"{target}.json", (json.dumps(about, indent=1) + "\n").encode())

    def _lease(self, target: str) -> Lease:
        return Lease(self._store, f"{target}.lease.json")


def _first_line(error: BaseException) -> str:
    lines = str(getattr(error, "message", error)).strip().splitlines()
    return lines[0] if lines else type(error).__name__


@dataclass(frozen=True)
class Plan:
    """The runs of a sweep, and their folder."""

    spec: ExperimentSpec
    folder: Path
    points: list[Point]


def plan(
    spec: Source,
    *,
    only: Sequence[str] = (),
    group: str | None = None,
    variables: Mapping[str, Any] | None = None,
    root: str | Path = "runs",
    overrides: Overrides = (),
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
        raise UsageError(f"--only {' '.join(only)}: matches no run of {loaded.name}")
    folder = Path(os.path.abspath(root)) / (loaded.sweep.group or default_group(loaded.name))
    return Plan(loaded, folder, kept)


def sweep(planned: Plan, *, parallel: int = 1, quiet: bool = False, on: str | None = None) -> dict[str, Any]:
    """Run what is not done yet; returns the summary of the whole group.

    With `parallel` above 1 that many worker processes share the runs, and the GPUs if there are any. Any number of
    processes, also on other machines that see the folder, may run the same sweep at the same time. `on` is "ray" or
    the address of a Ray cluster: the workers run there.
    """
    folder, in_workers = planned.folder, parallel > 1 or on is not None
    backend, available = open_backend(on, folder.name)
    threads = max(1, available.cores // parallel)
    refuse_more(on, available, parallel, threads)
    resources, share = shared(parallel, threads, planned.spec.device, available)
    items = []
    for point in planned.points:
        spec, log = point.spec, folder / "logs" / f"{point.name}.txt" if in_workers else None
        track = spec.track.model_copy(update={"project": spec.track.project or folder.name})
        changes = {"track": track, "threads": spec.threads or (threads if in_workers and not share else None)}
        data = plain(spec.model_copy(update=changes))
        args = (folder / point.name, point.at, data, list(sys.argv), not (quiet or in_workers))
        items.append(WorkItem(point.name, run_point, args, cores=threads, gpu=share, log=log))
    claims, stop = Claims(folder / CLAIMS), Stop()
    if in_workers:
        (folder / "logs").mkdir(parents=True, exist_ok=True)
        with stop_signals(stop):
            claims.run(items, resources, backend, stop=stop)
    else:
        claims.run(items)
    return write_results(folder)


def run_point(
    path: Path, at: Mapping[str, Any], data: Mapping[str, Any], command: Sequence[str], show: bool
) -> dict[str, Any]:
    """Run or continue one point of the grid, whose spec is `data`; returns the process that did."""
    with clear_write_errors(path):
        if not (path / POINT).exists():
            write_json(path / POINT, {"at": at})
    trial = make_trial(path, resolved(data), command, name=path.parent.name, id=path.name)
    spec = resolved(trial.info["spec"])
    runner(spec.kind)(spec, Launch(path.parent.parent, command, trial, show=show))
    return asdict(Owner.here())


def default_group(name: str) -> str:
    """The sweep's name and the short commit of the code in the current folder, else of Palestra, if there is one.

    A sweep of changed code is another sweep.
    """
    for folder in (Path.cwd(), Path(__file__).parent):
        if commit := (git_output(folder, "rev-parse", "--short", "HEAD") or "").strip():
            return f"{name}_{commit}"
    return name


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
