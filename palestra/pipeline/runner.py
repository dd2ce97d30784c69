"""Runs a pipeline: in parallel over the graph, each step once, whoever else works on the same prefix."""

import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, CancelledError, wait
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from palestra.errors import Interrupted, PalestraError, UsageError
from palestra.pipeline.graph import Graph, Node, chosen
from palestra.pipeline.outputs import Outputs
from palestra.pipeline.step import Output, Step, call, filled, portable
from palestra.runs.lease import Lease, LeaseLost, Owner, RunBusy
from palestra.runs.session import stop_signals
from palestra.work.pool import Pool, Task
from palestra.work.redact import redact


def carry_out(
    outputs: Outputs,
    address: str,
    attempt: str,
    function: Callable[..., Any] | str,
    config: Any,
    *,
    inputs: Sequence[str],
    resumes: bool,
) -> dict[str, Any]:
    """Do a step up to its commit, which is the owner of the lease's; gives what its status has to say of the output."""
    with outputs.alone(address):
        for needed in inputs:
            outputs.fetch(needed)
        call(function, config, outputs.begin(address, attempt, resumes=resumes))
        return outputs.send(address, attempt)


log = logging.getLogger("palestra.pipeline")

LONGEST_WAIT = 1.0
"""Seconds until a signal, or a lease that was lost, is acted upon."""
STOP_SECONDS = 30.0
"""What a training step gets to save its state in when the run is stopped; a second Ctrl-C ends it at once."""
LONGEST_RETRY_WAIT = 60.0
"""Seconds between tries: 1, 2, 4 and so on, up to this."""

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
        self.graph, self.outputs, self.parallel, self.watch = graph, outputs, parallel, watch
        self.force_failed = force_failed
        self.outcome = Outcome()
        self.tasks: dict[Task, _Attempt] = {}
        self.later: list[tuple[float, _Attempt]] = []
        """Attempts to make when their time has come: what failed is tried again."""
        self.leases: dict[str, Lease] = {}
        self.lost: set[str] = set()
        """Steps that another process has taken over from us; the thread that beats finds out."""
        self.pool: Pool | None = None
        self.known_done: set[str] = set()  # once done, always done
        self.forced: set[str] = set()
        self.look_at: dict[str, float] = {}
        self.stopping = False

    def run(self, targets: Sequence[str]) -> Outcome:
        states = self.outcome.states
        for address in self.graph.needed(targets, self._is_done):
            states[address] = "waiting"
        for address in targets:
            states.setdefault(address, "done")
        if self._over():
            return self.outcome
        if self.force_failed:  # what failed before; not what another process fails with meanwhile
            self.forced = {address for address, state in states.items() if state == "waiting" and self._failed(address)}
        with stop_signals(self._request_stop), self._beating(), self._cleaned_up():
            while not self._over():
                self._begin_what_can()
                self._await_one()
                self.watch(self.outcome)
                if self.stopping:
                    raise Interrupted(
                        "the pipeline was interrupted: the next run resumes or restarts the unfinished steps"
                    )
        return self.outcome

    def _request_stop(self) -> None:
        self.stopping = True

    def _over(self) -> bool:
        return not any(state in ("waiting", "running", "elsewhere") for state in self.outcome.states.values())

    def _is_done(self, address: str) -> bool:
        if address not in self.known_done and self.outputs.done(address) is not None:
            self.known_done.add(address)
        return address in self.known_done

    def _failed(self, address: str) -> str | None:
        attempt = self.outputs.attempt(address)
        return attempt["error"] if attempt is not None and attempt["state"] == "failed" else None

    def _begin_what_can(self) -> None:
        states, now = self.outcome.states, time.monotonic()
        for due in [each for each in self.later if each[0] <= now]:
            if len(self.tasks) < self.parallel:
                self.later.remove(due)
                self._trying(self._start, due[1].node.address, due[1])
        for address, state in list(states.items()):
            if len(self.tasks) >= self.parallel:
                return
            if state not in ("waiting", "elsewhere") or self.look_at.get(address, 0.0) > now:
                continue
            inputs = [states.get(needed, "done") for needed in self.graph.nodes[address].inputs]
            if any(needed in ("failed", "blocked") for needed in inputs):
                states[address] = "blocked"
            elif all(needed in ("done", "ran") for needed in inputs):
                self._trying(self._begin, address, self.graph.nodes[address])

    def _trying(self, begin: Callable[[Any], None], address: str, what: Any) -> None:
        try:
            begin(what)
        except (OSError, PalestraError) as error:  # of the disk or the bucket, or something is in the way
            self._fail(address, _short(error), note=False)

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
            self.look_at[address] = time.monotonic() + self.outputs.look_seconds
            return
        self.leases[address] = lease
        # Between the look and the lease another process may have finished it, or failed.
        if self._is_done(address) or self.outputs.finish(address):
            states[address] = "done"
            self._release(address)
        elif (error := self._failed(address)) is not None and address not in self.forced:
            self._fail(address, f"failed before ({error}): --force-failed tries again", note=False)
        else:
            self.forced.discard(address)  # anew once, not as often as it fails
            self._start(_Attempt(node))

    def _start(self, attempt: "_Attempt") -> None:
        node, address = attempt.node, attempt.node.address
        self.outputs.write_attempt(
            address, {"state": "running", "owner": asdict(Owner.here()), "started": attempt.started}
        )
        self.outputs.log(address).parent.mkdir(parents=True, exist_ok=True)
        inputs = [*node.inputs, *filter(self._is_done, node.unawaited)]
        config = filled(node.step.config, self._path)
        if self.pool is None:
            size = min(self.parallel, sum(state not in ("done", "blocked") for state in self.outcome.states.values()))
            self.pool = Pool(size, threads=max(1, (os.cpu_count() or 1) // size), name="steps")
        task = self.pool.submit(
            carry_out,
            self.outputs,
            address,
            self.leases[address].token,
            portable(node.step.function),
            config,
            inputs=inputs,
            resumes=node.step.resumes,
            log=self.outputs.log(address),
        )
        self.tasks[task] = attempt
        self.outcome.states[address] = "running"

    def _path(self, output: Output) -> Path:
        address = self.graph.address(output.step)
        folder = self.outputs.path(address) if output.awaited else self.outputs.current(address)
        return folder / output.path if output.path else folder

    def _await_one(self) -> None:
        """Wait until a step ends, or it is time to look at something else."""
        times = [due for due, _ in self.later]
        times += [self.look_at[address] for address, state in self.outcome.states.items() if state == "elsewhere"]
        patience = min([LONGEST_WAIT, *(max(0.0, due - time.monotonic()) for due in times)])
        if self.tasks:
            wait(self.tasks, timeout=patience, return_when=FIRST_COMPLETED)
        elif times:
            time.sleep(patience)
        for task, attempt in list(self.tasks.items()):
            if attempt.node.address in self.lost:
                task.cancel()
            if task.done():
                self._end(task, self.tasks.pop(task))

    def _end(self, task: Task, attempt: "_Attempt") -> None:
        node, address = attempt.node, attempt.node.address
        self.outcome.seconds[address] = time.monotonic() - attempt.began
        error = _error(task)
        try:
            if address in self.lost:
                raise LeaseLost("another process has taken it over")
            with self.leases[address].fenced():  # a step that another process took over is theirs to finish or to fail
                if error is None:
                    status = self._status(attempt) | task.result()
                    self.outputs.commit(address, self.leases[address].token, status)
                    self.outcome.states[address] = "ran"
            self._publish_log(address)
        except LeaseLost as lost:
            log.warning("%s: %s", address, lost)
            self.lost.discard(address)
            late = self.outputs.partial(address, self.leases.pop(address).token)
            shutil.rmtree(late, ignore_errors=True)  # ours alone
            self.outcome.states[address] = "elsewhere"
            self.look_at[address] = time.monotonic()
            return
        except (OSError, PalestraError) as problem:
            error = problem
        if error is None:
            self._release(address)
        elif attempt.tries < node.step.retries:
            seconds = min(LONGEST_RETRY_WAIT, 2.0**attempt.tries)
            log.warning("%s failed and is tried again in %g s: %s", address, seconds, redact(_short(error)))
            self.later.append((time.monotonic() + seconds, _Attempt(node, tries=attempt.tries + 1)))
        else:
            self._fail(address, _short(error), trace=str(error))

    def _publish_log(self, address: str) -> None:
        try:
            self.outputs.publish_log(address)
        except (OSError, PalestraError) as error:
            log.warning("the log of %s could not be uploaded: %s", address, error)

    def _status(self, attempt: "_Attempt") -> dict[str, Any]:
        node = attempt.node
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
        error = redact(error)
        self.outcome.states[address] = "failed"
        self.outcome.errors[address] = f"{error} (log: {self.outputs.log(address)})" if note else error
        try:
            if note:
                about = {"state": "failed", "error": error, "traceback": trace, "finished": _now()}
                self.outputs.write_attempt(address, about)
        except (OSError, PalestraError) as problem:  # such as a full disk; without a note the step is tried anew
            log.warning("how %s failed could not be noted: %s", address, problem)
        self._release(address)

    def _release(self, address: str) -> None:
        lease = self.leases.pop(address, None)
        try:
            if lease is not None:
                lease.release()
        except (OSError, PalestraError) as error:  # then it is taken over when this process has ended
            log.warning("the lease on %s could not be given back: %s", address, error)

    @contextmanager
    def _beating(self) -> Iterator[None]:
        """Renew the leases of what runs, from a thread."""
        stop = threading.Event()

        def beat() -> None:
            while not stop.wait(self.outputs.beat_seconds):
                for address, lease in list(self.leases.items()):
                    try:
                        lease.renew()
                    except LeaseLost:
                        self.lost.add(address)
                    except (OSError, PalestraError, RuntimeError) as error:
                        if address in self.leases:  # else it was released meanwhile
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
                self.pool.stop(STOP_SECONDS)
            for task, attempt in self.tasks.items():
                self._stopped(task, attempt)
            for _, attempt in self.later:
                self._note_stopped(attempt.node.address)
            raise
        else:
            if self.pool is not None:
                with self.pool:
                    pass
        finally:
            for address in list(self.leases):
                self._release(address)

    def _stopped(self, task: Task, attempt: "_Attempt") -> None:
        """A step that came to its end while it was asked to is done all the same."""
        if _error(task) is None:
            self._end(task, attempt)
        elif attempt.node.address not in self.lost:
            self._note_stopped(attempt.node.address)

    def _note_stopped(self, address: str) -> None:
        try:
            with self.leases[address].fenced():
                self.outputs.write_attempt(address, {"state": "stopped", "finished": _now()})
        except (OSError, PalestraError) as error:
            log.warning("that %s was stopped could not be noted: %s", address, error)


@dataclass(frozen=True)
class _Attempt:
    node: Node
    tries: int = 0
    """How many were made before it."""
    began: float = field(default_factory=time.monotonic)
    started: str = field(default_factory=lambda: _now())


def _error(task: Task) -> BaseException | None:
    try:
        return task.exception(0)
    except (CancelledError, TimeoutError) as error:
        return error


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def _short(error: BaseException) -> str:
    """An error in a line: what a worker's exception said, not where."""
    kind, message = getattr(error, "type_name", type(error).__name__), getattr(error, "message", str(error))
    first = message.strip().splitlines()[0] if message.strip() else ""
    return f"{kind}: {first}" if first else kind
