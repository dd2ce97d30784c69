"""Runs a search: proposes trials, runs them side by side, pauses and promotes them at rungs, until all is decided."""

import logging
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from palestra.errors import Interrupted, PalestraError, UsageError
from palestra.runs.lease import Lease, kept
from palestra.runs.recorder import in_words
from palestra.runs.run import refuse_secrets
from palestra.runs.session import stop_signals
from palestra.runs.store import LocalStore
from palestra.search.results import Experiment, find_experiment, new_experiment, write_results
from palestra.search.study import Proposal, Study, TrialRecord, last_promotion, level, promotion
from palestra.search.trials import (
    Rung,
    TrialOutcome,
    clear_rung,
    make_trial,
    run_trial,
    shared,
    trial_outcome,
    trial_spec,
    write_rung,
)
from palestra.spec.base import ExperimentSpec
from palestra.spec.blocks import SearchSpec
from palestra.spec.compose import escape, parse
from palestra.spec.grid import given_data
from palestra.spec.load import Source, differences
from palestra.spec.load import load as load_spec
from palestra.spec.model import plain
from palestra.spec.validate import SpecError
from palestra.track.progress import Progress
from palestra.work import fanout
from palestra.work.fanout import Processes, Stop, WorkItem, WorkOutcome

log = logging.getLogger("palestra.search")

ATTEMPTS = 100  # draws in a row that do not fit together before the space is taken for wrong
FREE = ("search.trials", "search.parallel", "search.keep")
"""What may change when a search is continued."""


def search(
    spec: Source | None = None,
    *,
    resume: str | Path | None = None,
    keep: int | None = None,
    variables: Mapping[str, Any] | None = None,
    root: str | Path = "runs",
    quiet: bool = False,
    overrides: Iterable[str] | Mapping[str, Any] = (),
) -> Experiment:
    """Search the space of a spec's `search:` block to its end, or continue a search that was stopped or killed.

    Args:
        spec: A file ("spec.yaml" or "spec.yaml:name"), a dict or a spec; left out when resuming.
        resume: A search to continue: its folder, its name or name/id.
        keep: Keep the checkpoints of the best so many trials; over `search.keep`.
        variables: Values of the `${…}` in the spec.
        root: The folder of all runs.
        quiet: Show no progress.
        overrides: Fields of the spec: `["search.trials=8"]`, or a mapping of paths to values.
    """
    given = dict(parse(overrides)) | ({} if keep is None else {"search.keep": keep})
    if resume is not None:
        if spec is not None:
            raise UsageError("a search is continued with its own spec: leave out the spec, or start a new search")
        experiment = find_experiment(resume, Path(root))
        loaded = load_spec(escape(experiment.info["spec"]), overrides=given).spec
        _check_changes(experiment, loaded)
        experiment.amend(loaded)
    else:
        if spec is None:
            raise UsageError("give a spec to search, or a search to resume")
        loaded = load_spec(spec, variables=variables, overrides=given).spec
        if loaded.search is None:
            raise UsageError(f"{loaded.name} has no block 'search': say there what to vary, search.space")
        refuse_secrets(plain(loaded), "a search")
        experiment = new_experiment(Path(root), loaded, sys.argv)
    assert loaded.search is not None
    with kept(Lease(LocalStore(experiment.path))):
        return Search(experiment, loaded, loaded.search, show=not quiet).run()


def _check_changes(experiment: Experiment, loaded: ExperimentSpec) -> None:
    before, after = (spec.model_dump(mode="json") for spec in (experiment.spec, loaded))
    refused = [change for change in differences(before, after) if change.path not in FREE]
    if refused:
        lines = "\n".join(f"  {change}" for change in refused)
        raise UsageError(f"a search cannot go on with a spec changed like this:\n{lines}\nStart a new one for it.")


class Search:
    """One search while it runs."""

    def __init__(self, experiment: Experiment, spec: ExperimentSpec, search: SearchSpec, *, show: bool):
        self.experiment, self.spec, self.search, self.show = experiment, spec, search, show
        self.metric, self.direction = search.goal(spec.kind)
        self.sign = 1.0 if self.direction == "maximize" else -1.0
        self.asha = None if search.pruner is None else search.pruner.asha
        self.threads = search.threads or spec.threads or 1
        self.study = Study(experiment.path, search, self.direction)
        self.data = given_data(spec)
        self.running: set[int] = set()
        cores = max(1, (os.cpu_count() or 1) // self.threads)
        parallel = search.parallel or max(1, cores // min(spec.max_session, cores))
        self.resources, self.gpu_share = shared(parallel, self.threads, spec.device)

    def run(self) -> Experiment:
        """Run until every trial is complete, pruned or failed; then write what came of it."""
        stop = Stop()
        progress = Progress(self.search.trials, "trials", self.spec.name, enabled=self.show)
        running = fanout.run(self._items(), self.resources, Processes(self.spec.name), stop=stop)
        with progress, stop_signals(stop), closing(running) as outcomes:
            self._show(progress)
            for outcome in outcomes:
                if not stop.requested:  # else what came of it is read from its folder when the search goes on
                    self._conclude(outcome)
                    self._show(progress)
        if stop.requested:
            raise Interrupted(
                f"stopped with everything saved; continue with: palestra search --resume {self.experiment.path}"
            )
        self._prune()
        records = self.study.records()
        write_results(self.experiment, self.spec, self.search, records)
        if all(record.state == "failed" for record in records):
            raise PalestraError(
                f"all {len(records)} trials failed; the first: {records[0].reason}\n"
                f"Their tracebacks are in {self.experiment.path}/trials/*/log.txt"
            )
        return self.experiment

    # ---- what to run next

    def _unfinished(self) -> list[TrialRecord]:
        """Trials that were running when the search was stopped or killed, those that had come further first."""
        found = []
        for record in self.study.records():
            if record.state != "running":
                continue
            ended = trial_outcome(self._make(record), self._rung(record.rung))
            if ended.state == "stopped" and record.rung not in record.scores:
                found.append(record)
            elif ended.state in ("paused", "complete", "failed"):  # perhaps nobody was there to write it down
                self._settle(record, ended)
        return sorted(found, key=lambda record: (-record.rung, record.number))

    def _items(self) -> Iterator[WorkItem | None]:
        """The trials to run, each when there is room for it."""
        waiting = self._unfinished()
        while True:
            record = waiting.pop(0) if waiting else self._next(idle=not self.running)
            yield None if record is None else self._item(record)

    def _next(self, *, idle: bool) -> TrialRecord | None:
        """By algorithm 2: a trial that goes on, else a new one; None while there is nothing but to wait."""
        records = self.study.records()
        rungs, moved = self._rungs(records)
        sent = None if self.asha is None else promotion(rungs, moved, self.asha.reduction)
        if sent is None and len(records) < self.search.trials:
            return self.new(len(records))
        if sent is None and idle and not any(record.state == "complete" for record in records):
            sent = last_promotion(rungs, moved)
        return None if sent is None else self._send(*sent)

    def _rungs(self, records: list[TrialRecord]) -> tuple[list[dict[int, float]], list[set[int]]]:
        """The scores at each rung, higher being better, and who went on from there or can go no further."""
        alive = [record for record in records if record.state != "failed"]
        count = max((rung + 1 for record in alive for rung in record.scores), default=0)
        rungs = [{r.number: self.sign * r.scores[k] for r in alive if k in r.scores} for k in range(count)]
        moved = [{r.number for r in alive if r.rung > k or r.state != "running"} for k in range(count)]
        return rungs, moved

    def _send(self, number: int, rung: int) -> TrialRecord:
        self.study.send(number, rung)
        return self.study.records()[number]

    def new(self, number: int) -> TrialRecord:
        """Store a new trial with values that fit together."""
        problem = ""
        for attempt in range(ATTEMPTS):
            proposal: Proposal = self.study.propose(number, attempt)
            try:
                trial_spec(self.data, proposal.values, self.threads, pauses=self.asha is not None)
            except SpecError as error:
                problem = str(error)
                continue
            self.study.add(proposal)
            return self.study.records()[number]
        raise UsageError(f"search.space: {ATTEMPTS} draws in a row do not fit together; of the last, {problem}")

    # ---- running

    def _make(self, record: TrialRecord) -> Path:
        spec = trial_spec(self.data, record.values, self.threads, pauses=self.asha is not None)
        return make_trial(self.experiment.trial(record.number), spec, self.experiment.info["command"]).path

    def _rung(self, rung: int) -> Rung:
        if self.asha is None:
            return Rung(self.metric, "steps", None)
        return Rung(self.metric, self.asha.by, level(self.asha.grace, self.asha.reduction, rung))

    def _item(self, record: TrialRecord) -> WorkItem:
        path, rung = self._make(record), self._rung(record.rung)
        if rung.level is not None:
            write_rung(path, rung.metric, rung.by, rung.level)
        self.running.add(record.number)
        args = (path, self.experiment.root, self.experiment.info["command"], self.gpu_share or None)
        name = str(record.number)
        return WorkItem(name, run_trial, args, cores=self.threads, gpu=self.gpu_share, log=path / "log.txt")

    def _conclude(self, outcome: WorkOutcome) -> None:
        """Write down what a trial that has ended came to."""
        number, error = int(outcome.item.name), outcome.error
        record, path = self.study.records()[number], self.experiment.trial(number)
        self.running.remove(number)
        if error is not None:
            with (path / "log.txt").open("a") as file:
                file.write(f"{error}\n")
            self._settle(record, TrialOutcome("failed", reason=getattr(error, "message", str(error))))
            return
        ended = trial_outcome(path, self._rung(record.rung))
        if ended.state == "stopped":
            ended = TrialOutcome("failed", reason="it ended before its rung and nobody had asked it to")
        self._settle(record, ended)

    def _settle(self, record: TrialRecord, ended: TrialOutcome) -> None:
        """Write down what a trial came to."""
        number = record.number
        if ended.state == "failed":
            log.warning("trial %d failed: %s", number, ended.reason.strip().splitlines()[-1])
            self.study.fail(number, ended.reason)
            return
        assert ended.score is not None
        if record.rung not in record.scores:
            self.study.report(number, record.rung, ended.score)
        if ended.state == "complete":
            clear_rung(self.experiment.trial(number))
            self.study.complete(number, ended.score)

    def _prune(self) -> None:
        """What is paused now never goes on as part of this search; a person may resume it, and it runs to its end."""
        for record in self.study.records():
            if record.state == "running":
                self.study.prune(record.number)
                clear_rung(self.experiment.trial(record.number))

    def _show(self, progress: Progress) -> None:
        records = self.study.records()
        scored = [record for record in records if record.score is not None]
        ended = sum(record.state in ("complete", "failed") or record.rung in record.scores for record in records)
        best = max(scored, key=lambda record: (record.rung, self.sign * (record.score or 0.0)), default=None)
        told = "" if best is None or best.score is None else in_words({self.metric: best.score})
        progress.update(ended, f"{told} (trial {best.number})" if best is not None else "")
