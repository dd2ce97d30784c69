"""Trains one session of a language model: batch, gradient, step, evaluate, log, save, until the steps are done."""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Protocol

import torch

from palestra.errors import Interrupted
from palestra.lm.batch import Batch
from palestra.lm.engine import LossFunction, TrainEngine
from palestra.runs.checkpoint import load as load_checkpoint
from palestra.runs.due import CheckpointsDue, due
from palestra.runs.recorder import Moment, Recorder, Silent, call_hooks, load_hooks
from palestra.runs.session import Session
from palestra.spec.lm import LmSpec, ProfileSpec

PEAKS = {"H100": 989.5e12, "H200": 989.5e12, "A100": 312e12}
"""Dense bf16 operations a second by the maker's data sheet; a name that contains the key has its peak."""


def peak_flops(device: torch.device) -> float | None:
    """The peak of a GPU that is in the table."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for key, peak in PEAKS.items() if key in name), None)


class Speed:
    """Tokens a second between rows, without the time that evaluations, samples and checkpoints take."""

    def __init__(self, engine: TrainEngine):
        self.engine = engine
        self._since, self._spent, self._tokens = time.perf_counter(), 0.0, -1
        self._peak = peak_flops(engine.device)

    def since_last(self, tokens: int) -> dict[str, float]:
        """Rates since the last call; none at the first one, which has waited for compilation and caches."""
        if self.engine.device.type == "cuda":
            torch.cuda.synchronize()
        spent = self._spent + time.perf_counter() - self._since
        done, first = tokens - self._tokens, self._tokens < 0
        self._since, self._spent, self._tokens = time.perf_counter(), 0.0, tokens
        if first:
            return {}
        rates = {"time/tokens_per_s": done / spent}
        if self._peak is not None:
            training = 3 * self.engine.flops_per_token
            rates["time/mfu"] = training * done / spent / (self._peak * self.engine.ranks.size)
        return rates

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Around what is not training: its time does not count."""
        self._spent += time.perf_counter() - self._since
        yield
        self._since = time.perf_counter()


@contextmanager
def profiled(
    spec: ProfileSpec | None, path: Path, writes: bool
) -> Iterator[Callable[[int], AbstractContextManager[None]]]:
    """Around a run: gives a context for each step, which records the steps that `spec` names into a Chrome trace."""
    if spec is None or not writes:
        yield lambda step: nullcontext()
        return
    first, last = spec.steps
    recorder, recording = torch.profiler.profile(record_shapes=True), False

    def end() -> None:
        nonlocal recording
        recording = False
        recorder.stop()
        recorder.export_chrome_trace(str(path))

    @contextmanager
    def around(step: int) -> Iterator[None]:
        nonlocal recording
        if step == first:
            recorder.start()
            recording = True
        yield
        if step == last and recording:
            end()

    try:
        yield around
    finally:
        if recording:  # the run ended before
            end()


log = logging.getLogger("palestra.lm")


class Objective(Protocol):
    """What is trained for: which examples a step has, what is lost on them, and how well the model does."""

    group: int
    """How many consecutive sequences of a batch belong together: 2 for pairs."""

    def batch(self, step: int) -> Batch:
        """The examples of a step, from its number alone."""
        ...

    def denominator(self, batch: Batch) -> float:
        """What the batch's summed loss is divided by: its tokens, or its pairs."""
        ...

    @property
    def loss(self) -> LossFunction:
        """The summed loss of some sequences."""
        ...

    def evaluate(self, engine: TrainEngine) -> dict[str, float]:
        """Metrics on what is not trained on, `eval/loss` among them where there is any."""
        ...


class Keeper(Protocol):
    """Writes the model into a checkpoint as others can load it, and reads it back."""

    def writer(self) -> Callable[[Path], None]:
        """Gathers the weights, on every rank; what it gives writes them into a folder, on the first."""
        ...

    def load(self, folder: Path) -> None:
        """Take the weights that were written there."""
        ...


class Sampler(Protocol):
    """Lets the model write now and then, for people to read."""

    def due(self, before: dict[str, int], after: dict[str, int]) -> bool:
        """Whether it is time to."""
        ...

    def write(self, step: int) -> None:
        """Let it write."""
        ...


class Suites(Protocol):
    """Measures the model with suites now and then, and at the end."""

    def due(self, before: dict[str, int], after: dict[str, int], last: bool) -> list[str]:
        """The names of those that are due."""
        ...

    def measure(self, labels: Sequence[str], counters: dict[str, int]) -> dict[str, float]:
        """The metrics of some."""
        ...


def train(
    spec: LmSpec,
    session: Session,
    engine: TrainEngine,
    objective: Objective,
    keeper: Keeper,
    sampler: Sampler,
    suites: Suites,
    *,
    show: bool = True,
) -> None:
    """Train to the end of the spec's steps, from the session's newest checkpoint if it has one."""
    ranks, hooks = engine.ranks, load_hooks(spec.hooks)
    step, tokens = _restore(session, engine, keeper)
    log.info("seed %d: %s", session.seed, "from the start" if step == 0 else f"resumed at step {step}")
    checkpoints, speed = CheckpointsDue(spec.every.checkpoint), Speed(engine)
    recorder = Recorder(session, spec, total=spec.train.steps, unit="steps", show=show) if ranks.first else Silent()
    with recorder as record, profiled(spec.train.profile, session.path / "profile.json", ranks.first) as profile:

        def evaluate() -> dict[str, float]:
            with speed.paused(), record.span("eval"), engine.averaged():
                return objective.evaluate(engine)

        def write_samples() -> None:
            with speed.paused(), record.span("sample"), engine.averaged():
                sampler.write(step)

        def measure(labels: Sequence[str]) -> dict[str, float]:
            if not labels:
                return {}
            with speed.paused(), record.span("suites"), engine.averaged():
                return suites.measure(labels, counters)

        last = step >= spec.train.steps
        while not last:
            before = {"steps": step, "tokens": tokens}
            with record.span("train"), profile(step + 1):
                batch = objective.batch(step)
                weight = objective.denominator(batch)
                sums = engine.forward_backward(batch, objective.loss, weight, group=objective.group)
                stepped = engine.optim_step(step / spec.train.steps)
            step, tokens = step + 1, tokens + len(batch.tokens)
            counters = {"steps": step, "tokens": tokens}
            # Clocks and signals differ between ranks: the first one decides.
            stop, reasons = ranks.from_first((session.stop_requested, checkpoints.reasons(before, counters)))
            last = step >= spec.train.steps
            evaluated, written = last or due(spec.every.eval, before, counters), last or sampler.due(before, counters)
            measured = suites.due(before, counters, last)
            row: dict[str, float] = {}
            if evaluated or due(spec.every.log, before, counters):
                row = {name: float(value) for name, value in (sums | stepped).items()}
                record.rates(speed.since_last(tokens))
            if evaluated:
                row |= evaluate()
            row |= measure(measured)
            if written:
                write_samples()
            if row:
                moment = Moment(step, tokens, row, engine.model, session.path)
                if ranks.first:
                    call_hooks(hooks, moment)
                if ranks.from_first(moment.stop) and not last:  # a hook ends the run here, as its last step would
                    last = True
                    row |= {} if evaluated else evaluate()
                    row |= measure([one for one in suites.due(before, counters, last) if one not in measured])
                    if not written:
                        write_samples()
                record.row(row, counters, headline=("loss", "eval/loss"))
            reasons = reasons | ({"best"} if "eval/loss" in row else set()) | ({"temporary"} if last or stop else set())
            if reasons:
                with speed.paused(), record.span("checkpoint"):
                    _save(session, engine, keeper, counters, reasons, row.get("eval/loss"))
            if stop and not last:
                raise Interrupted(
                    f"stopped at step {step} with everything saved; continue with: "
                    f"palestra train --resume {session.path.parent.parent}"
                )


def _restore(session: Session, engine: TrainEngine, keeper: Keeper) -> tuple[int, int]:
    """Continue from the newest checkpoint: the steps and tokens so far."""
    saved = session.restore() if engine.ranks.first else None
    path = engine.ranks.from_first(None if saved is None else saved.meta.path)
    if path is None:
        return 0, 0
    state = (saved or load_checkpoint(path)).state
    keeper.load(path / "model")
    engine.load_state(state["engine"])
    return state["steps"], state["tokens"]


def _save(
    session: Session,
    engine: TrainEngine,
    keeper: Keeper,
    counters: dict[str, int],
    reasons: set[str],
    loss: float | None,
) -> None:
    with engine.averaged():
        gathered = keeper.writer()

    def model(folder: Path) -> None:
        with engine.averaged():  # what one process gathers are the parameters themselves
            gathered(folder)

    state = {**counters, "engine": engine.state()}
    if engine.ranks.first:
        log.info("step %d: checkpoint (%s)", counters["steps"], ", ".join(sorted(reasons)))
        score, metric = (None, None) if loss is None else (-loss, "eval/loss")
        session.checkpoint(
            counters["steps"], state, reasons=reasons, score=score, metric=metric, counters=counters, model=model
        )
