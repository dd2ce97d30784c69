"""Runs what a pipeline needs: in parallel over the graph, each step once, whoever else works on the same prefix."""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from palestra.errors import PalestraError, UsageError
from palestra.pipeline.graph import Graph, Node
from palestra.pipeline.outputs import Outputs
from palestra.pipeline.plan import chosen
from palestra.pipeline.step import Output, Step, call, filled
from palestra.runs.lease import Lease, LeaseLost, Owner, RunBusy
from palestra.work.pool import Pool, Task

log = logging.getLogger("palestra.pipeline")

BEAT_SECONDS = 2.0
LOOK_SECONDS = 0.2
"""How often we look whether another process is done with a step."""

State = Literal["waiting", "running", "elsewhere", "done", "ran", "failed", "blocked"]


class PipelineFailed(PalestraError):
    """Steps failed; the others were run as far as they did not need these."""


@dataclass
class Outcome:
    """What a run came to."""

    states: dict[str, State] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)

    @property
    def ran(self) -> list[str]:
        """The steps that this run carried out."""
        return [address for address, state in self.states.items() if state == "ran"]


Watcher = Callable[[Outcome], None]


def run(
    targets: Sequence[Step],
    outputs: Outputs,
    *,
    only: Sequence[str] = (),
    force_failed: bool = False,
    max_parallel: int = 2,
    watch: Watcher = lambda outcome: None,
) -> Outcome:
    """Carry out all that the targets need and that is not done; raises `PipelineFailed` at the end if a step failed."""
    if max_parallel < 1:
        raise UsageError(f"--max-parallel: expected at least 1, got {max_parallel}")
    graph = Graph(targets)
    runner = _Runner(graph, outputs, force_failed, max_parallel, watch)
    outcome = runner.run(chosen(graph, only))
    failed = [address for address, state in outcome.states.items() if state == "failed"]
    if failed:
        blocked = sum(state == "blocked" for state in outcome.states.values())
        behind = f" ({blocked} that need {'it' if len(failed) == 1 else 'them'} did not run)" if blocked else ""
        told = "\n".join(f"  {address}: {outcome.errors[address]}" for address in failed)
        raise PipelineFailed(f"{len(failed)} step{'s' if len(failed) > 1 else ''} failed{behind}:\n{told}")
    return outcome


class _Runner:
    def __init__(self, graph: Graph, outputs: Outputs, force_failed: bool, parallel: int, watch: Watcher):
        self.graph, self.outputs, self.force_failed, self.parallel, self.watch = (
            graph,
            outputs,
            force_failed,
            parallel,
            watch,
        )
        self.outcome = Outcome()
        self.tasks: dict[Task, _Attempt] = {}
        self.leases: dict[str, Lease] = {}
        self.pool: Pool | None = None
        self.forced: set[str] = set()  # failed ones are tried anew once, not as often as they fail

    def run(self, targets: Sequence[str]) -> Outcome:
        states = self.outcome.states
        for address in self.graph.needed(targets, self._is_done):
            states[address] = "waiting"
        for address in targets:
            states.setdefault(address, "done")
        with self._beating(), self._cleaned_up():
            while any(state in ("waiting", "running", "elsewhere") for state in states.values()):
                self._begin_what_can()
                self._await_one()
                self.watch(self.outcome)
        return self.outcome

    def _is_done(self, address: str) -> bool:
        return self.outputs.done(address) is not None

    def _begin_what_can(self) -> None:
        states = self.outcome.states
        for address, state in list(states.items()):
            if state not in ("waiting", "elsewhere") or len(self.tasks) >= self.parallel:
                continue
            inputs = [states.get(needed, "done") for needed in self.graph.nodes[address].inputs]
            if any(needed in ("failed", "blocked") for needed in inputs):
                states[address] = "blocked"
            elif all(needed in ("done", "ran") for needed in inputs):
                self._begin(self.graph.nodes[address])

    def _begin(self, node: Node) -> None:
        """Start a step, unless it is done, failed, or another process is at work on it."""
        address, states = node.address, self.outcome.states
        if self._is_done(address):
            states[address] = "done"
            return
        lease = self.outputs.lease(address)
        try:
            lease.acquire()
        except RunBusy:
            states[address] = "elsewhere"
            return
        self.leases[address] = lease
        # Between the look and the lease another process may have finished it, or failed.
        if self._is_done(address) or self.outputs.finish(address):
            states[address] = "done"
            self._release(address)
            return
        attempt = self.outputs.attempt(address)
        failed_before = attempt is not None and attempt["state"] == "failed"
        if attempt is not None and failed_before and not (self.force_failed and address not in self.forced):
            self._fail(address, f"failed before ({attempt['error']}): --force-failed tries again", note=False)
            return
        self.forced.add(address)
        self._start(node, tries=0)

    def _start(self, node: Node, *, tries: int) -> None:
        address, owner = node.address, asdict(Owner.here())
        self.outputs.write_attempt(address, {"state": "running", "owner": owner, "started": _now()})
        out = self.outputs.begin(address, resumes=node.step.resumes)
        config = filled(node.step.config, self._path)
        self.outputs.log(address).parent.mkdir(parents=True, exist_ok=True)
        if self.pool is None:
            self.pool = Pool(self.parallel, name="steps")
        task = self.pool.submit(call, node.step.function, config, out, log=self.outputs.log(address))
        self.tasks[task] = _Attempt(node, time.monotonic(), _now(), tries)
        self.outcome.states[address] = "running"

    def _path(self, output: Output) -> Path:
        address = self.graph.address(output.step)
        folder = self.outputs.path(address) if output.awaited else self.outputs.current(address)
        return folder / output.path if output.path else folder

    def _await_one(self) -> None:
        elsewhere = any(state == "elsewhere" for state in self.outcome.states.values())
        if self.tasks:
            wait(self.tasks, timeout=LOOK_SECONDS if elsewhere else 1.0, return_when=FIRST_COMPLETED)
            for task in [task for task in self.tasks if task.done()]:
                self._end(task, self.tasks.pop(task))
        elif elsewhere:
            time.sleep(LOOK_SECONDS)

    def _end(self, task: Task, attempt: "_Attempt") -> None:
        node, address = attempt.node, attempt.node.address
        self.outcome.seconds[address] = time.monotonic() - attempt.began
        error = task.exception()
        if error is None:
            try:
                self.leases[address].renew()  # a step that another process took over is theirs to finish
                self.outputs.commit(address, self._status(node, attempt))
            except LeaseLost as lost:
                log.warning("%s: %s", address, lost)
                self.leases.pop(address)
                self.outcome.states[address] = "elsewhere"
                return
            self.outcome.states[address] = "ran"
            self._release(address)
            return
        if attempt.tries < node.step.retries:
            log.warning("%s failed and is tried again: %s", address, _short(error))
            self._start(node, tries=attempt.tries + 1)
            return
        self._fail(address, _short(error), trace=str(error))

    def _status(self, node: Node, attempt: "_Attempt") -> dict[str, Any]:
        return {
            "name": node.step.name,
            "address": node.address,
            "identity": node.identity,
            "inputs": list(node.inputs),
            "started": attempt.started,
            "finished": _now(),
            "seconds": round(time.monotonic() - attempt.began, 3),
            "tries": attempt.tries + 1,
            "owner": asdict(Owner.here()),
        }

    def _fail(self, address: str, error: str, *, trace: str = "", note: bool = True) -> None:
        if note:
            about = {"state": "failed", "error": error, "traceback": trace, "finished": _now()}
            self.outputs.write_attempt(address, about)
        self.outcome.states[address] = "failed"
        self.outcome.errors[address] = f"{error} (log: {self.outputs.log(address)})" if note else error
        self._release(address)

    def _release(self, address: str) -> None:
        self.leases.pop(address).release()

    @contextmanager
    def _beating(self) -> Iterator[None]:
        """Renew the leases of what runs, from a thread."""
        stop = threading.Event()

        def beat() -> None:
            while not stop.wait(BEAT_SECONDS):
                for address, lease in list(self.leases.items()):
                    try:
                        lease.renew()
                    except (LeaseLost, OSError, RuntimeError) as error:
                        if address in self.leases:
                            log.warning("the lease on %s could not be renewed: %s", address, error)

        thread = threading.Thread(target=beat, name="palestra-leases", daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()

    @contextmanager
    def _cleaned_up(self) -> Iterator[None]:
        """End the workers; a run that is stopped leaves its steps to be gone on with."""
        try:
            yield
        except BaseException:
            if self.pool is not None:
                self.pool.stop()
            for attempt in self.tasks.values():
                about = {"state": "stopped", "finished": _now()}
                self.outputs.write_attempt(attempt.node.address, about)
            raise
        else:
            if self.pool is not None:
                with self.pool:
                    pass
        finally:
            for address in list(self.leases):
                with contextlib.suppress(OSError):
                    self._release(address)


@dataclass(frozen=True)
class _Attempt:
    node: Node
    began: float
    started: str
    tries: int


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def _short(error: BaseException) -> str:
    """An error in a line: what a worker's exception said, not where."""
    kind, message = getattr(error, "type_name", type(error).__name__), getattr(error, "message", str(error))
    first = message.strip().splitlines()[0] if message.strip() else ""
    return f"{kind}: {first}" if first else kind
