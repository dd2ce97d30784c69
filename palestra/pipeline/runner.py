"""Runs a pipeline: steps in parallel over the graph, each once, also next to other processes on the same prefix."""

import logging
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from palestra.cluster.where import open_backend, refuse_more
from palestra.errors import Interrupted, LeaseLost, PalestraError, UsageError
from palestra.pipeline.graph import Graph, Node, chosen
from palestra.pipeline.outputs import Outputs
from palestra.pipeline.step import Output, Step, call, filled, portable
from palestra.runs.lease import Lease, Owner
from palestra.runs.session import stop_signals
from palestra.work import fanout
from palestra.work.fanout import Resources, Stop, WorkItem, WorkOutcome
from palestra.work.redact import redact


def carry_out(
    outputs: Outputs,
    address: str,
    attempt: str,
    function: Callable[..., Any] | str,
    config: Any,
    inputs: Sequence[str],
    resumes: bool,
) -> dict[str, Any]:
    """In a worker: run a step up to its commit, which is left to the lease's owner; returns what the status stores."""
    with outputs.alone(address):
        for needed in inputs:
            outputs.fetch(needed)
        call(function, config, outputs.begin(address, attempt, resumes=resumes))
        return outputs.send(address, attempt)


log = logging.getLogger("palestra.pipeline")

STOP_SECONDS = 30.0
"""The time a training step has to save its state after a stop request; a second Ctrl-C ends it at once."""


class PipelineFailed(PalestraError):
    """Steps failed; the others ran as far as they did not need these."""


class FailedBefore(PalestraError):
    """A step that failed in an earlier run is not retried by itself."""


def run(
    targets: Sequence[Step],
    outputs: Outputs,
    *,
    only: Sequence[str] = (),
    force_failed: bool = False,
    max_parallel: int = 2,
    on: str | None = None,
    watch: "Callable[[PipelineRun], None]" = lambda run: None,
) -> "PipelineRun":
    """Run all that the targets need and that is not done; raises `PipelineFailed` at the end if a step failed.

    `on` is "ray" or the address of a Ray cluster: the steps run there, not in processes of this machine.
    """
    if max_parallel < 1:
        raise UsageError(f"--max-parallel: expected at least 1, got {max_parallel}")
    graph = Graph(targets)
    ended = PipelineRun(graph, outputs, watch)
    ended.run(chosen(graph, only), force_failed, max_parallel, on)
    failed = [address for address, state in ended.states.items() if state == "failed"]
    if failed:
        blocked = sum(state == "blocked" for state in ended.states.values())
        dependent = f" ({blocked} that need {'it' if len(failed) == 1 else 'them'} did not run)" if blocked else ""
        errors = "\n".join(f"  {address}: {ended.errors[address]}" for address in failed)
        raise PipelineFailed(f"{len(failed)} step{'s' if len(failed) > 1 else ''} failed{dependent}:\n{errors}")
    return ended


class PipelineRun:
    """One run of a pipeline: the states of its steps as they change, and how the steps ended."""

    def __init__(self, graph: Graph, outputs: Outputs, watch: "Callable[[PipelineRun], None]"):
        self.graph, self.outputs, self.watch = graph, outputs, watch
        self.states: dict[str, str] = {}
        """By address: waiting, running, elsewhere, done, ran, failed or blocked."""
        self.seconds: dict[str, float] = {}
        self.errors: dict[str, str] = {}
        self.leases: dict[str, Lease] = {}
        """Of the steps in flight."""
        self.started: dict[str, str] = {}
        self.known_done: set[str] = set()  # once done, always done
        self.forced: set[str] = set()
        self.stop = Stop()

    @property
    def ran(self) -> list[str]:
        """The steps that this run has run."""
        return [address for address, state in self.states.items() if state == "ran"]

    def run(self, targets: Sequence[str], force_failed: bool, parallel: int, on: str | None = None) -> None:
        """Run what the targets need; `PipelineRun.states` has what failed."""
        states, outputs = self.states, self.outputs
        for address in self.graph.needed(targets, self._is_done):
            states[address] = "waiting"
        for address in targets:
            states.setdefault(address, "done")
        size = min(parallel, sum(state == "waiting" for state in states.values()))
        if size == 0:
            return
        if force_failed:  # what failed before, not what another process fails with in the meantime
            self.forced = {address for address, state in states.items() if state == "waiting" and self._failed(address)}
        backend, available = open_backend(on, "steps", heartbeat_timeout=None)
        threads = max(1, available.cores // size)
        refuse_more(on, available, size, threads)
        running = fanout.run(
            iter(partial(self._next, threads), ...),  # without an end
            Resources(size * threads, available.gpus, available.memory),
            backend,
            stop=self.stop,
            grace=STOP_SECONDS,
            look=outputs.look_seconds,
            renew=outputs.beat_seconds,
            progress=self._show,
        )
        with stop_signals(self.stop), closing(running) as outcomes:
            for outcome in outcomes:
                self._end(outcome)
        if self.stop.requested:
            raise Interrupted("the pipeline was interrupted: the next run resumes or restarts the unfinished steps")

    def _is_done(self, address: str) -> bool:
        if address not in self.known_done and self.outputs.done(address) is not None:
            self.known_done.add(address)
        return address in self.known_done

    def _failed(self, address: str) -> str | None:
        attempt = self.outputs.attempt(address)
        return attempt["error"] if attempt is not None and attempt["state"] == "failed" else None

    def _show(self, on_hand: Mapping[str, str]) -> None:
        self.states.update(on_hand)
        self.watch(self)

    def _next(self, threads: int) -> WorkItem | None:
        """A step whose inputs are all done; a step with a failed input is blocked."""
        states = self.states
        for address, state in states.items():
            if state != "waiting" or address in self.leases:
                continue
            inputs = [states.get(needed, "done") for needed in self.graph.nodes[address].inputs]
            if any(needed in ("failed", "blocked") for needed in inputs):
                states[address] = "blocked"
            elif all(needed in ("done", "ran") for needed in inputs):
                return self._item(self.graph.nodes[address], threads)
        return None

    def _item(self, node: Node, threads: int) -> WorkItem:
        address, needs = node.address, node.step.resources
        self.leases[address] = lease = self.outputs.lease(address)

        def done(held: bool) -> bool:  # a killed process may have left only the rename to do
            return self._is_done(address) or (held and self.outputs.finish(address))

        return WorkItem(
            address,
            carry_out,
            partial(self._begin, node),
            cores=max(threads, needs.cores or 1),
            gpu=needs.gpu,
            memory=int(needs.memory_gb * 1e9),
            retries=node.step.retries,
            log=self.outputs.log(address),
            lease=lease,
            done=done,
            complete=partial(self._complete, node),
        )

    def _begin(self, node: Node) -> tuple[Any, ...]:
        """The arguments of an attempt at a step; stores that it begins."""
        address, step = node.address, node.step
        if (error := self._failed(address)) is not None and address not in self.forced:
            raise FailedBefore(f"failed before ({error}): --force-failed tries again")
        self.forced.discard(address)  # retried once, not as often as it fails
        self.started[address] = _now()
        about = {"state": "running", "owner": asdict(Owner.here()), "started": self.started[address]}
        self.outputs.write_attempt(address, about)
        self.outputs.log(address).parent.mkdir(parents=True, exist_ok=True)
        inputs = [*node.inputs, *filter(self._is_done, node.unawaited)]
        config, function = filled(step.config, self._path), portable(step.function)
        return self.outputs, address, self.leases[address].token, function, config, inputs, step.resumes

    def _path(self, output: Output) -> Path:
        address = self.graph.address(output.step)
        folder = self.outputs.path(address) if output.awaited else self.outputs.current(address)
        return folder / output.path

    def _complete(self, node: Node, outcome: WorkOutcome) -> None:
        address, lease = node.address, self.leases[node.address]
        self.seconds[address] = outcome.seconds
        if outcome.error is not None and self.stop.requested:
            return
        with lease.fenced():  # a step that another process took over is not ours to finish or to fail
            if outcome.error is None:
                status = {
                    "name": node.step.name,
                    "address": address,
                    "identity": node.identity,
                    "inputs": list(node.inputs),
                    "started": self.started[address],
                    "finished": _now(),
                    "seconds": round(outcome.seconds, 3),
                    "tries": outcome.attempts,
                    "owner": asdict(Owner.here()),
                }
                self.outputs.commit(address, lease.token, status | outcome.value)
        try:
            self.outputs.publish_log(address)
        except (OSError, PalestraError) as error:
            log.warning("the log of %s could not be uploaded: %s", address, error)

    def _end(self, outcome: WorkOutcome) -> None:
        address, error, states = outcome.item.name, outcome.error, self.states
        lease = self.leases.pop(address)
        if error is None:
            states[address] = "ran" if outcome.attempts else "done"
        elif isinstance(error, LeaseLost):
            log.warning("%s: %s", address, error)
            shutil.rmtree(self.outputs.partial(address, lease.token), ignore_errors=True)  # ours alone
            states[address] = "waiting"
        elif self.stop.requested:
            self._note(address, {"state": "stopped"}, lease)
        else:
            states[address] = "failed"
            text = redact(str(error) if isinstance(error, FailedBefore) else _short(error))
            self.errors[address] = text
            if outcome.attempts:
                self.errors[address] = f"{text} (log: {self.outputs.log(address)})"
                self._note(address, {"state": "failed", "error": text, "traceback": str(error)}, lease)

    def _note(self, address: str, about: dict[str, Any], lease: Lease) -> None:
        """Store how an attempt ended; if that fails, as on a full disk, the next run tries the step again."""
        try:
            with lease.fenced():
                self.outputs.write_attempt(address, about | {"finished": _now()})
        except (OSError, PalestraError) as error:
            log.warning("the state of %s (%s) could not be stored: %s", address, about["state"], error)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def _short(error: BaseException) -> str:
    """An error in one line: the type and message of a worker's exception, without its traceback."""
    kind, message = getattr(error, "type_name", type(error).__name__), getattr(error, "message", str(error))
    first = message.strip().splitlines()[0] if message.strip() else ""
    return f"{kind}: {first}" if first else kind
