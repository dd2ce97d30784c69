"""Trains one session of a language model: a step is a batch, its gradient and an update; `runs.loop` does the rest."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from palestra.lm.batch import Batch
from palestra.lm.engine import LossFunction, TrainEngine
from palestra.runs.checkpoint import Checkpoint
from palestra.runs.loop import AT_ONCE, Counters, Row, due, restore, run
from palestra.runs.recorder import Recorder, Silent
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
        """Excludes the time inside from the rates."""
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


class Objective(Protocol):
    """What is trained: the examples of a step, their loss, and the evaluation."""

    group: int
    """How many consecutive sequences of a batch belong together: 2 for pairs."""

    def batch(self, step: int) -> Batch:
        """The examples of a step, a function of its number alone."""
        ...

    def denominator(self, batch: Batch) -> float:
        """The divisor of the batch's summed loss: its tokens, or its pairs."""
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

    def writer(self) -> Callable[..., None]:
        """What writes the weights into a folder; of several ranks, those of now, and all call it with their group."""
        ...

    def load(self, folder: Path) -> None:
        """Take the weights that were written there."""
        ...


class Sampler(Protocol):
    """Samples completions for people to read."""

    def due(self, before: Counters, after: Counters) -> bool:
        """Whether samples are due."""
        ...

    def write(self, step: int) -> None:
        """Sample, and write the texts."""
        ...


class SuiteRunner(Protocol):
    """Evaluates the model with suites during training and at the end."""

    def due(self, before: Counters, after: Counters, last: bool) -> list[str]:
        """The names of those that are due."""
        ...

    def measure(
        self, labels: Sequence[str], counters: Counters, look: Callable[[], None] = lambda: None
    ) -> dict[str, float]:
        """The metrics of some suites; calls `look` between items."""
        ...


@dataclass
class LmParts:
    """The parts of a training session."""

    engine: TrainEngine
    objective: Objective
    keeper: Keeper
    sampler: Sampler
    suites: SuiteRunner


def train(spec: LmSpec, session: Session, parts: LmParts, *, show: bool = True) -> None:
    """Train to the end of the spec's steps, from the session's newest checkpoint if it has one."""
    ranks = parts.engine.ranks
    saved = restore(session, ranks)
    trainer = LmTrainer(spec, parts, saved)
    about: dict[str, Any] = {"total": spec.train.steps, "unit": "steps", "show": show}
    recorder = Recorder(session, spec, **about) if ranks.first else Silent(session, spec, ranks.rank)
    with recorder as record, profiled(spec.train.profile, session.path / "profile.json", ranks.first) as profile:
        trainer.record, trainer.profile = record, profile
        run(spec, session, trainer, record, saved, ranks)


class LmTrainer:
    """A training session."""

    headline = ("loss", "eval/loss")
    record: Recorder | Silent
    profile: Callable[[int], AbstractContextManager[None]]

    def __init__(self, spec: LmSpec, parts: LmParts, saved: Checkpoint | None):
        self.spec, self.parts, self.engine, self.policy = spec, parts, parts.engine, parts.engine.model
        self.speed = Speed(parts.engine)
        self.steps = self.tokens = 0
        self._sums: dict[str, Any] = {}
        if saved is not None:
            parts.keeper.load(saved.meta.path / "model")
            parts.engine.load_state(saved.state["engine"], saved.meta.path)
            self.steps, self.tokens = saved.state["steps"], saved.state["tokens"]

    @property
    def counters(self) -> dict[str, int]:
        return {"steps": self.steps, "tokens": self.tokens}

    @property
    def done(self) -> bool:
        return self.steps >= self.spec.train.steps

    def first_row(self) -> None:
        return None

    def step(self) -> None:
        """Batch → gradients, summed over micro-batches and ranks → one optimizer step."""
        objective = self.parts.objective
        with self.record.span("train"), self.profile(self.steps + 1):
            batch = objective.batch(self.steps)
            weight = objective.denominator(batch)
            sums = self.engine.forward_backward(batch, objective.loss, weight, group=objective.group)
            self._sums = sums | self.engine.optim_step(self.steps / self.spec.train.steps)
        self.steps, self.tokens = self.steps + 1, self.tokens + len(batch.tokens)

    def metrics(self) -> Row:
        """Loss, gradient norm and rates."""
        self.record.rates(self.speed.since_last(self.tokens))
        return {name: float(value) for name, value in self._sums.items()}

    def due(self, before: Counters, last: bool) -> list[str]:
        """Evaluations, suites by their names, and samples."""
        names = ["eval"] if last or due(self.spec.every.eval, before, self.counters) else []
        names += [f"suite/{label}" for label in self.parts.suites.due(before, self.counters, last)]
        return names + (["samples"] if last or self.parts.sampler.due(before, self.counters) else [])

    def measure(self, names: Sequence[str]) -> Row:
        """By the averaged weights, where there are any."""
        row: Row = {}
        labels = [name.removeprefix("suite/") for name in names if name.startswith("suite/")]
        with self.speed.paused(), self.engine.averaged():
            if "eval" in names:
                with self.record.span("eval"):
                    row |= self.parts.objective.evaluate(self.engine)
            if labels:
                with self.record.span("suites"):
                    row |= self.parts.suites.measure(labels, self.counters)
            if "samples" in names:
                with self.record.span("sample"):
                    self.parts.sampler.write(self.steps)
        return row

    def score(self, row: Row) -> tuple[str, float] | None:
        return ("eval/loss", -row["eval/loss"]) if "eval/loss" in row else None

    def paused(self) -> AbstractContextManager[None]:
        return self.speed.paused()

    def state(self) -> dict[str, Any]:
        return {**self.counters, "engine": self.engine.state()}

    def model(self) -> Callable[..., None]:
        """The averaged weights."""
        with self.engine.averaged():
            write = self.parts.keeper.writer()

        def averaged(folder: Path) -> None:
            with self.engine.averaged():  # what is written at once are the parameters themselves
                write(folder)

        return averaged if self.engine.ranks.saver is AT_ONCE else write
