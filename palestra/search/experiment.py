"""Runs a search: proposes trials, runs them in parallel, pauses and promotes them at rungs."""

import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

from palestra.cluster.where import open_backend, refuse_more
from palestra.errors import Interrupted, PalestraError, UsageError
from palestra.runs.lease import Lease, kept
from palestra.runs.recorder import in_words
from palestra.runs.run import refuse_secrets
from palestra.runs.session import stop_signals
from palestra.runs.store import LocalStore, write_json
from palestra.search.results import Experiment, find_experiment, new_experiment, ranked, write_results
from palestra.search.study import Study, TrialRecord, promotion
from palestra.search.trials import RUNG, Rung, TrialOutcome, make_trial, run_trial, shared, trial_outcome, trial_spec
from palestra.spec.base import ExperimentSpec
from palestra.spec.blocks import SearchSpec
from palestra.spec.compose import escape, parse
from palestra.spec.grid import given_data
from palestra.spec.load import Overrides, Source, differences
from palestra.spec.load import load as load_spec
from palestra.spec.model import plain
from palestra.spec.validate import SpecError
from palestra.track.progress import Progress
from palestra.work import fanout
from palestra.work.fanout import Stop, WorkItem, WorkOutcome

log = logging.getLogger("palestra.search")

ATTEMPTS = 100  # consecutive invalid samples before the space is taken to be wrong
FREE = ("search.trials", "search.parallel", "search.keep")
"""What may change when a search is resumed."""


def search(
    spec: Source | None = None,
    *,
    resume: str | Path | None = None,
    keep: int | None = None,
    variables: Mapping[str, Any] | None = None,
    root: str | Path = "runs",
    quiet: bool = False,
    on: str | None = None,
    overrides: Overrides = (),
) -> Experiment:
    """Run the search of a spec's `search:` block to its end, or continue one that was stopped or killed.

    Args:
        spec: A file ("spec.yaml" or "spec.yaml:name"), a dict or a spec; left out when resuming.
        resume: A search to continue: its folder, its name or name/id.
        keep: Keep only the checkpoints of the best `keep` trials; overrides `search.keep`.
        variables: Values of the `${…}` in the spec.
        root: The folder that holds all runs.
        quiet: Do not show progress.
        on: "ray" or the address of a Ray cluster: the trials run there, not in processes of this machine.
        overrides: Fields of the spec: `["search.trials=8"]`, or a mapping of paths to values.
    """
    given = dict(parse(overrides)) | ({} if keep is None else {"search.keep": keep})
    if resume is not None:
        if spec is not None:
            raise UsageError("a search is resumed with its own spec: leave the spec out, or start a new search")
        experiment = find_experiment(resume, Path(root))
        loaded = load_spec(escape(experiment.info["spec"]), overrides=given).spec
        before, after = (whole.model_dump(mode="json") for whole in (experiment.spec, loaded))
        refused = "\n".join(f"  {change}" for change in differences(before, after) if change.path not in FREE)
        if refused:
            message = f"a search cannot be resumed with these changes of its spec:\n{refused}\nStart a new search."
            raise UsageError(message)
        experiment.amend(loaded)
    else:
        if spec is None:
            raise UsageError("give a spec to search, or a search to resume")
        loaded = load_spec(spec, variables=variables, overrides=given).spec
        if loaded.search is None:
            raise UsageError(f"{loaded.name} has no block 'search': set search.space to the fields to vary")
        refuse_secrets(plain(loaded), "a search")
        experiment = new_experiment(Path(root), loaded, sys.argv)
    assert loaded.search is not None
    with kept(Lease(LocalStore(experiment.path))):
        return Search(experiment, loaded, loaded.search, show=not quiet, on=on).run()


class Search:
    """One search while it runs."""

    def __init__(
        self, experiment: Experiment, spec: ExperimentSpec, search: SearchSpec, *, show: bool, on: str | None = None
    ):
        self.experiment, self.spec, self.search, self.show = experiment, spec, search, show
        self.metric, self.direction = search.goal(spec.kind)
        self.maximize = self.direction == "maximize"
        self.asha = None if search.pruner is None else search.pruner.asha
        self.threads = search.threads or spec.threads or 1
        self.study = Study(experiment.path, search, self.direction)
        self.data = given_data(spec)
        self.running: set[int] = set()
        self.backend, available = open_backend(on, spec.name)
        cores = max(1, available.cores // self.threads)
        parallel = search.parallel or max(1, cores // min(spec.max_session, cores))
        refuse_more(on, available, parallel, self.threads)
        self.resources, self.gpu_share = shared(parallel, self.threads, spec.device, available)

    def run(self) -> Experiment:
        """Run until every trial is complete, pruned or failed; then write the results."""
        stop = Stop()
        progress = Progress(self.search.trials, "trials", self.spec.name, enabled=self.show)
        running = fanout.run(self._items(), self.resources, self.backend, stop=stop)
        with progress, stop_signals(stop), closing(running) as outcomes:
            self._show(progress)
            for outcome in outcomes:
                if not stop.requested:  # else its outcome is read from its folder when the search is resumed
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
        """Trials that were running when the search was stopped or killed, the furthest first."""
        unfinished = []
        for record in self.study.records():
            if record.state != "running":
                continue
            ended = trial_outcome(self._make(record), self._rung(record.rung))
            if ended.state == "stopped" and record.rung not in record.scores:
                unfinished.append(record)
            elif ended.state in ("paused", "complete", "failed"):  # killed before it was stored
                self._settle(record, ended)
        return sorted(unfinished, key=lambda record: (-record.rung, record.number))

    def _items(self) -> Iterator[WorkItem | None]:
        """The trials to run, each when there is a free slot."""
        waiting = self._unfinished()
        while True:
            record = waiting.pop(0) if waiting else self._next(idle=not self.running)
            yield None if record is None else self._item(record)

    def _next(self, *, idle: bool) -> TrialRecord | None:
        """By algorithm 2: a trial to promote, else a new one; None while it can only wait."""
        records, promoted = self.study.records(), None
        if self.asha is not None:
            promoted = promotion(records, self.asha.reduction, maximize=self.maximize)
        if promoted is None and len(records) < self.search.trials:
            return self.new(len(records))
        if promoted is None and idle and not any(record.state == "complete" for record in records):
            # With few trials ⌊n/η⌋ is 0 at a high rung, and the paper's rule, made for an endless stream of trials,
            # would wait: the best that waits at the highest rung runs on, so that one trial runs to its end.
            promoted = promotion(records, 1, maximize=self.maximize)
        if promoted is None:
            return None
        self.study.send(*promoted)
        return self.study.records()[promoted[0]]

    def new(self, number: int) -> TrialRecord:
        """Store a new trial with valid values."""
        problem = ""
        for attempt in range(ATTEMPTS):
            values, trial = self.study.propose(number, attempt)
            try:
                trial_spec(self.data, values, self.threads, pauses=self.asha is not None)
            except SpecError as error:
                problem = str(error)
                continue
            self.study.add(trial)
            return self.study.records()[number]
        raise UsageError(f"search.space: {ATTEMPTS} samples in a row make no valid spec; the last: {problem}")

    # ---- running

    def _make(self, record: TrialRecord) -> Path:
        spec = trial_spec(self.data, record.values, self.threads, pauses=self.asha is not None)
        path, command = self.experiment.trial(record.number), self.experiment.info["command"]
        name = f"{self.experiment.path.name}/trials/{record.number}"
        return make_trial(path, spec, command, name=spec.name, id=name).path

    def _rung(self, rung: int) -> Rung:
        if self.asha is None:
            return Rung(self.metric, "steps", None)
        return Rung(self.metric, self.asha.by, self.asha.grace * self.asha.reduction**rung)

    def _item(self, record: TrialRecord) -> WorkItem:
        path, rung = self._make(record), self._rung(record.rung)
        if rung.level is not None:
            write_json(path / RUNG, asdict(rung))
        self.running.add(record.number)
        args = (path, self.experiment.path.parent.parent, self.experiment.info["command"], self.gpu_share or None)
        name = str(record.number)
        return WorkItem(name, run_trial, args, cores=self.threads, gpu=self.gpu_share, log=path / "log.txt")

    def _conclude(self, outcome: WorkOutcome) -> None:
        """Store the outcome of a trial whose worker has ended."""
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
            ended = TrialOutcome("failed", reason="it ended before its rung without a request to stop")
        self._settle(record, ended)

    def _settle(self, record: TrialRecord, ended: TrialOutcome) -> None:
        """Store the outcome of a trial."""
        number = record.number
        if ended.state == "failed":
            log.warning("trial %d failed: %s", number, ended.reason.strip().splitlines()[-1])
            self.study.fail(number, ended.reason)
            return
        assert ended.score is not None
        if record.rung not in record.scores:
            self.study.report(number, record.rung, ended.score)
        if ended.state == "complete":
            self._clear_rung(number)
            self.study.complete(number, ended.score)

    def _clear_rung(self, number: int) -> None:
        """A user who resumes this trial later runs it to its end."""
        (self.experiment.trial(number) / RUNG).unlink(missing_ok=True)

    def _prune(self) -> None:
        """Trials that are paused now never continue as part of this search."""
        for record in self.study.records():
            if record.state == "running":
                self.study.prune(record.number)
                self._clear_rung(record.number)

    def _show(self, progress: Progress) -> None:
        records = self.study.records()
        best = next(iter(ranked(records, maximize=self.maximize)), None)
        ended = sum(record.state in ("complete", "failed") or record.rung in record.scores for record in records)
        headline = "" if best is None else f"{in_words({self.metric: best.score or 0.0})} (trial {best.number})"
        progress.update(ended, headline)
