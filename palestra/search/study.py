"""The study of a search in SQLite: trials and their scores at rungs, samplers, asynchronous successive halving.

Optuna stores and samples. A paused trial stays "running" in the stored study, because it may continue; the sampler gets
a copy in memory in which it counts as ended, so that it learns from its scores.

Successive halving is algorithm 2 of Li et al. 2020, "A System for Massively Parallel Hyperparameter Tuning". Rung k is
at `grace · η^k`, and a higher score is better.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from palestra.errors import MissingExtra, UsageError
from palestra.spec.blocks import Axis, Direction, SearchSpec

if TYPE_CHECKING:
    import optuna
    from optuna.distributions import BaseDistribution
    from optuna.samplers import BaseSampler
    from optuna.trial import FrozenTrial


NAME = "study.db"
STUDY = "search"
TARGET = "rung"  # the user attribute with the rung that a trial was last sent to
REASON = "reason"


@dataclass(frozen=True)
class TrialRecord:
    """A trial in the study."""

    number: int
    values: dict[str, Any]
    """The searched fields by dotted path."""
    rung: int
    """The rung that it was last sent to."""
    scores: dict[int, float]
    """Its scores at the rungs that it reached, by rung."""
    state: str
    """running (or paused), complete, pruned or failed."""
    score: float | None = None
    """The last score: at its end, or at its last rung."""
    reason: str = ""
    """Why it failed."""


class Study:
    """The study of one search, in `study.db` of its folder; created if it does not exist."""

    def __init__(self, folder: Path, search: SearchSpec, direction: Direction):
        optuna = _optuna()
        self.search, self.direction = search, direction
        self._study: optuna.Study = optuna.create_study(
            storage=f"sqlite:///{folder / NAME}", study_name=STUDY, direction=direction, load_if_exists=True
        )

    def records(self) -> list[TrialRecord]:
        """All trials so far, by number."""
        return [_record(trial, self.search.space) for trial in self._study.get_trials(deepcopy=False)]

    def propose(self, number: int, attempt: int = 0) -> "tuple[dict[str, Any], FrozenTrial]":
        """Values for the trial of this number, and that trial for `add`; another attempt gives others.

        Nothing is stored. The sampler's seed follows from the two numbers, so that a search that was killed and resumed
        samples what it would have sampled from the same trials.
        """
        shown = _optuna().create_study(direction=self.direction, sampler=self._sampler(number, attempt))
        trials = self._study.get_trials(deepcopy=False)
        shown.add_trials([_shown(trial, self.search.sampler) for trial in trials])
        new = shown.ask({key: _distribution(axis) for key, axis in self.search.space.items()})
        assert new.number == number, "trials are numbered in the order in which they are added"
        new.set_user_attr(TARGET, 0)
        trial = shown.get_trials(deepcopy=False)[number]  # with the state of CMA-ES
        return _values(trial.params, self.search.space), trial

    def add(self, trial: "FrozenTrial") -> None:
        """Store a proposed trial as running to the first rung."""
        self._study.add_trial(trial)

    def send(self, number: int, rung: int) -> None:
        """Store that a trial is promoted to a rung."""
        self._trial(number).set_user_attr(TARGET, rung)

    def report(self, number: int, rung: int, score: float) -> None:
        """Store the score of a trial at a rung."""
        self._trial(number).report(score, rung)

    def complete(self, number: int, score: float) -> None:
        """Store that a trial has ended."""
        self._study.tell(number, score)

    def prune(self, number: int) -> None:
        """Store that a paused trial never continues."""
        self._study.tell(number, state=_optuna().trial.TrialState.PRUNED)

    def fail(self, number: int, reason: str) -> None:
        """Store that a trial failed, and why. It has no score."""
        self._trial(number).set_user_attr(REASON, reason)
        self._study.tell(number, state=_optuna().trial.TrialState.FAIL)

    def _trial(self, number: int) -> "optuna.trial.Trial":
        return _optuna().trial.Trial(self._study, self._study.get_trials(deepcopy=False)[number]._trial_id)

    def _sampler(self, number: int, attempt: int) -> "BaseSampler":
        import numpy as np

        samplers = _optuna().samplers
        seed = int(np.random.SeedSequence([self.search.seed, number, attempt]).generate_state(1)[0])
        if self.search.sampler == "random":
            return samplers.RandomSampler(seed=seed)
        if self.search.sampler == "tpe":
            return samplers.TPESampler(seed=seed)
        independent = samplers.RandomSampler(seed=seed)  # of choices, which CMA-ES does not support
        return samplers.CmaEsSampler(seed=seed, independent_sampler=independent, warn_independent_sampling=False)


def _optuna() -> Any:
    try:
        import optuna
    except ModuleNotFoundError as error:
        raise MissingExtra("A search", "search") from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def _distribution(axis: Axis) -> "BaseDistribution":
    made = _optuna().distributions
    if axis.form == "choice":  # as JSON: Optuna does not store lists and mappings
        return made.CategoricalDistribution([json.dumps(value) for value in axis.values])
    low, high = axis.values
    if axis.form == "int":
        return made.IntDistribution(low, high)
    return made.FloatDistribution(low, high, log=axis.form == "loguniform")


def _values(params: Mapping[str, Any], space: Mapping[str, Axis]) -> dict[str, Any]:
    unknown = [key for key in params if key not in space]
    if unknown:
        raise UsageError(f"the study varies {', '.join(unknown)}, but the search does not: start a new search")
    return {key: json.loads(params[key]) if axis.form == "choice" else params[key] for key, axis in space.items()}


def _record(trial: "FrozenTrial", space: Mapping[str, Axis]) -> TrialRecord:
    states = {"RUNNING": "running", "COMPLETE": "complete", "PRUNED": "pruned", "FAIL": "failed"}
    scores = dict(sorted(trial.intermediate_values.items()))
    last = list(scores.values())[-1] if scores else None
    failed = trial.state.name == "FAIL"
    return TrialRecord(
        number=trial.number,
        values=_values(trial.params, space),
        rung=trial.user_attrs[TARGET],
        scores=scores,
        state=states[trial.state.name],
        score=None if failed else (trial.value if trial.state.name == "COMPLETE" else last),
        reason=trial.user_attrs.get(REASON, ""),
    )


def _shown(trial: "FrozenTrial", sampler: str) -> "FrozenTrial":
    """A trial for the sampler: one that is paused at a rung, or was pruned there, has ended with its score.

    TPE accounts for how far a pruned trial ran; CMA-ES uses only complete ones.
    """
    made = _optuna().trial
    paused = trial.state == made.TrialState.RUNNING and trial.intermediate_values
    pruned = paused or trial.state == made.TrialState.PRUNED
    last = max(trial.intermediate_values) if pruned else None
    ended = made.TrialState.COMPLETE if sampler == "cmaes" else made.TrialState.PRUNED
    return made.create_trial(
        state=ended if pruned else trial.state,
        value=trial.intermediate_values[last] if last is not None else trial.value,
        params=trial.params,
        distributions=trial.distributions,
        system_attrs=trial.system_attrs,
        intermediate_values=trial.intermediate_values,
    )


def promotion(records: Sequence[TrialRecord], reduction: int, *, maximize: bool) -> tuple[int, int] | None:
    """The next trial to promote and its target rung; None if a new trial is due instead.

    The highest rung comes first; its candidates are the best ⌊n/η⌋ of the n trials that have reached it so far, and of
    these the best that waits there; of equal ones the earlier. Trials that failed do not count.
    """
    sign = -1.0 if maximize else 1.0
    alive = [record for record in records if record.state != "failed"]
    for rung in sorted({rung for record in alive for rung in record.scores}, reverse=True):
        reached = sorted((sign * r.scores[rung], r.number, r) for r in alive if rung in r.scores)
        for _, number, record in reached[: len(reached) // reduction]:
            if record.rung == rung and record.state == "running":
                return number, rung + 1
    return None
