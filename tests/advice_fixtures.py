"""Runs that are broken on purpose, one for each rule of advice, and healthy ones near to its limit.

Their rows go through the writers of real runs (`Session`, `Tracker`), with noise: what a rule must see through.
"""

import json
import os
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from palestra.api import check
from palestra.errors import PalestraError
from palestra.runs.loop import restore
from palestra.runs.run import Run, new_trial
from palestra.runs.session import Session
from palestra.spec.model import plain
from palestra.track.sinks import SinkPlace, Tracker

Change = Callable[[float], Any]
"""A metric by how much of the rows is done."""
Changes = Mapping[str, Change]
ROWS = 60
POSTTRAIN = {
    "kind": "posttrain", "name": "fixture", "model": {"init": "runs/taught"}, "train": {"steps": 100},
    "tasks": {"train": [{"task": "arithmetic"}], "eval": [{"task": "arithmetic"}]}, "algorithm": {"preset": "grpo"},
}  # fmt: skip
FLEET = POSTTRAIN | {"cluster": {"generators": 2}, "rollout": {"staleness": 1}}
CONTROL = {"kind": "control", "name": "fixture", "env": {"id": "CartPole-v1"}, "algorithm": {"name": "ppo"}}
CONTROL |= {"train": {"frames": 100_000}}
PRETRAIN = {
    "kind": "pretrain", "name": "fixture", "train": {"steps": 100, "batch": 8},
    "data": {"train": {"text": {"path": "text.txt"}}, "context": 64},
    "model": {"tokenizer": "characters", "shape": {"layers": 1, "width": 32, "heads": 2, "mlp": 64, "context": 64}},
}  # fmt: skip


def healthy_row(kind: str, step: int, done: float, noise: random.Random) -> dict[str, float]:
    """A row of a run that learns, with the noise of a small batch."""
    n = noise.gauss
    if kind == "control":
        row = {"frame": 1000 * step, "time/collect": 2.0, "time/learn": 2.0, "episodes": 9 * step}
        row |= {"return": 20 + 200 * done + n(0, 8), "ppo/entropy": 0.69 - 0.3 * done + n(0, 0.02), "ppo/lr": 1e-3}
        row |= {"ppo/grad_norm": abs(1 + n(0, 0.4)), "ppo/clip_fraction": abs(0.1 + n(0, 0.05))}
        evaluated = {"eval/return": 25 + 300 * done + n(0, 15), "eval/return_std": 60 + n(0, 9)}
        return row | (evaluated if step % 10 == 0 else {})
    row = {
        "tokens": 5000 * step,
        "time/train": 5.0,
        "grad_norm": abs(0.5 + n(0, 0.2)),
        "lr": 1e-3,
        "skipped_steps": 0.0,
    }
    if kind == "pretrain":
        row["loss"] = 1.6 + 2.5 * 0.03**done + n(0, 0.05)
        return row
    right = 0.2 + 0.5 * done
    shares = {"correct": right, "wrong": 0.95 - right, "unparsable": 0.05, "timeout": 0.0, "error": 0.0}
    row |= {f"status/{name}": max(0.0, share + n(0, 0.01)) if share else 0.0 for name, share in shares.items()}
    row |= {"reward": right + n(0, 0.04), "entropy": 1.0 - 0.5 * done + n(0, 0.03), "mismatch": abs(2e-4 + n(0, 1e-4))}
    row |= {"groups/no_variance": 0.35 + n(0, 0.08), "groups/all_correct": 0.2 * done, "truncated": abs(n(0.05, 0.03))}
    row |= {"kl_reference": 0.05 * done + abs(n(0, 0.01)), "effective_samples": 0.95 + n(0, 0.02)}
    row |= {
        "clipped_low": abs(n(0.01, 0.01)),
        "clipped_high": abs(n(0.01, 0.01)),
        "part/format": 0.8,
        "part/right": right,
    }
    row |= {"fate/trained": 16.0 * step, "fate/stale": 0.0, "fate/failed": 0.0, "fate/timeout": 0.0, "fleet/lost": 0.0}
    row |= {"rollout/running": 12.0, "rollout/ready": 4.0, "time/rollout": 0.8, "time/publish": 0.2, "time/record": 0.1}
    row |= {"time/loop_lag_mean": abs(n(0.01, 0.01))}
    if step % 10 == 0:
        row |= {"eval/arithmetic/accuracy": right + n(0, 0.02), "eval/arithmetic/accuracy_se": 0.02, "time/eval": 6.0}
        row["eval/accuracy"] = row["eval/arithmetic/accuracy"]
    return row


def end(value: float, usual: float = 0.0) -> Change:
    """`usual`, but `value` in the last fifth."""
    return lambda done: value if done > 0.8 else usual


def always(value: Any) -> Change:
    return lambda done: value


def counted(value: float) -> Change:
    """A counter that reaches `value`."""
    return lambda done: float(int(value * done))


@dataclass(frozen=True)
class Case:
    """What breaks a healthy run for a rule, and what comes near to it."""

    spec: Mapping[str, Any]
    broken: Changes
    near: Changes = field(default_factory=dict)
    rows: int = ROWS
    vocabulary: int | None = None
    """Of the model in a checkpoint."""


CASES: dict[str, Case] = {
    "non_finite": Case(PRETRAIN, {"skipped_steps": counted(30)}, {"skipped_steps": counted(2)}),
    "exploding": Case(PRETRAIN, {"grad_norm": end(40.0, 0.5)}, {"grad_norm": lambda done: 40.0 if done == 1 else 0.5}),
    "no_gradient": Case(
        POSTTRAIN, {"grad_norm": always(0.0)}, {"grad_norm": lambda done: 0.4 * (round(done * ROWS) % 3 > 0)}
    ),
    "loss_spike": Case(PRETRAIN, {"loss": end(3.0, 1.8)}, {"loss": lambda done: 3.0 if done == 1 else 2 - 0.3 * done}),
    "uniform": Case(PRETRAIN, {"loss": always(4.17)}, {"loss": lambda done: 4 - 0.2 * done}, vocabulary=65),
    "entropy_collapse": Case(
        POSTTRAIN,
        {"entropy": lambda done: 0.02 + max(0, 1 - 3 * done), "status/correct": always(0.3)},
        {"entropy": lambda done: 0.02 + max(0, 1 - 3 * done), "status/correct": lambda done: 0.3 + 0.65 * done},
    ),
    "mismatch": Case(POSTTRAIN, {"mismatch": lambda done: 2e-4 + 0.01 * done**2}, {"mismatch": always(2e-3)}),
    "held_out": Case(
        POSTTRAIN,
        {"eval/accuracy": lambda done: 0.6 - 1.2 * abs(done - 0.5)},
        {"eval/accuracy": lambda done: 0.6 - 0.05 * (done == 1)},
    ),
    "hacked": Case(POSTTRAIN, {"status/correct": lambda done: 0.5 - 0.3 * done}, {"status/correct": always(0.4)}),
    "kl_runaway": Case(
        POSTTRAIN, {"kl_reference": lambda done: 3 * done**4}, {"kl_reference": lambda done: 0.3 * done}
    ),
    "verifier_timeouts": Case(POSTTRAIN, {"status/timeout": always(0.08)}, {"status/timeout": always(0.004)}),
    "verifier_errors": Case(
        POSTTRAIN, {"status/error": always(0.05)}, {"status/error": lambda done: 0.1 * (done == 0.5)}
    ),
    "unparsable": Case(
        POSTTRAIN, {"status/unparsable": always(0.7)}, {"status/unparsable": lambda done: 0.7 - 0.6 * done}
    ),
    "too_hard": Case(POSTTRAIN, {"groups/no_variance": always(0.9)}, {"groups/no_variance": always(0.6)}),
    "off_policy": Case(POSTTRAIN, {"effective_samples": always(0.3)}, {"effective_samples": always(0.7)}),
    "generators_lost": Case(FLEET, {"fleet/lost": counted(9)}, {"fleet/lost": counted(2)}),
    "endless": Case(CONTROL, {"episodes": always(0), "return": always(None)}, {"episodes": counted(6)}),
    "no_progress": Case(
        CONTROL, {"return": lambda done: 21 + round(done * ROWS) * 7 % 5}, {"return": lambda done: 21 + 6 * done}
    ),
    "trainer_waits": Case(FLEET, {"time/rollout": always(3.6)}, {"time/rollout": always(1.0)}),
    "generators_wait": Case(
        FLEET, {"time/rollout": always(0.01), "rollout/running": always(0.0)}, {"time/rollout": always(0.01)}
    ),
    "overhead": Case(POSTTRAIN, {"time/eval": always(6.0)}, {"time/eval": always(1.0)}),
    "blocked_loop": Case(
        POSTTRAIN, {"time/loop_lag_mean": always(1.2)}, {"time/loop_lag_mean": lambda done: 9.0 if done == 1 else 0.1}
    ),
    "truncation": Case(POSTTRAIN, {"truncated": always(0.5)}, {"truncated": lambda done: 0.6 - 0.55 * done}),
    "stale": Case(FLEET, {"fate/stale": counted(400)}, {"fate/stale": counted(30)}),
    "solved": Case(
        POSTTRAIN,
        {"groups/all_correct": always(0.95), "groups/no_variance": always(0.95)},
        {"groups/all_correct": always(0.8), "groups/no_variance": always(0.8)},
    ),
    "lr_finished": Case(
        CONTROL, {"ppo/lr": lambda done: 1e-3 * max(0.0, 1 - 2 * done)}, {"ppo/lr": lambda done: 1e-3 * (1.01 - done)}
    ),
    "noisy_evaluation": Case(
        CONTROL,
        {"eval/return": lambda done: 100 + done, "eval/return_std": always(40.0)},
        {"eval/return": lambda done: 100 + 80 * done, "eval/return_std": always(40.0)},
    ),
}
"""By rule. `failed`, `stalled` and `odd_seed` are not of rows alone: `tests/test_view_advice.py` makes them."""

numbers = count()


@contextmanager
def written(
    root: Path, spec: Mapping[str, Any], seed: int = 0, seeds: tuple[int, ...] = (0,), trial: Run | None = None
) -> Iterator[tuple[Session, Tracker]]:
    """A session that is open, and what writes its rows; it may be one that was there."""
    loaded = check({**spec, "name": f"fixture{next(numbers)}"}).spec
    if trial is None:
        trial = new_trial(root, loaded.name, seeds=seeds, command=["palestra"], spec=plain(loaded))
    path = trial.session(seed)
    if not (path / "manifest.json").exists():
        Session.create(path, spec_yaml="", spec_data=plain(loaded), manifest={"seed": seed})
    with ExitStack() as stack:
        session = stack.enter_context(Session.open(path))
        restore(session)
        place = SinkPlace(path, "fixture", "fixture", session.id, {}, append=True)
        tracker = stack.enter_context(Tracker(place))
        session.follow("metrics.jsonl", tracker.flush)
        yield session, tracker


def write_rows(
    session: Session, tracker: Tracker, changes: Changes, *, noise: int = 0, first: int = 1, rows: int = ROWS
) -> None:
    """Rows of a healthy run with some metrics changed; a change to None leaves a metric out."""
    kind, source = session.spec_data["kind"], random.Random(noise)
    for step in range(first, first + rows):
        done = (step - first + 1) / rows
        row = healthy_row(kind, step, done, source)
        row |= {name: change(done) for name, change in changes.items() if name in row or not name.startswith("eval/")}
        row = {name: value for name, value in row.items() if value is not None}
        headline = {name: row[name] for name in ("return", "reward", "loss") if name in row}
        counts = {name: int(row.pop(name)) for name in ("frame", "tokens") if name in row}
        session.progress(step=step, headline=headline, **counts)
        tracker.log(row, step=step, **counts)


def write_case(root: Path, rule: str, *, broken: bool, noise: int = 0) -> Run:
    """A finished run of a case."""
    case = CASES[rule]
    with written(root, case.spec) as (session, tracker):
        write_rows(session, tracker, case.broken if broken else case.near, noise=noise, rows=case.rows)
        if case.vocabulary is not None:
            config = json.dumps({"vocab_size": case.vocabulary})
            session.checkpoint(
                case.rows, {}, reasons={"temporary"}, model=lambda path: _write(path / "config.json", config)
            )
    return Run(session.path.parent.parent)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def write_seeds(root: Path, *, broken: bool, noise: int = 0) -> Run:
    """Five seeds, of which one learned nothing, for `odd_seed`."""
    trial = None
    for seed in range(5):
        # The odd one learns too, so that nothing else is said of it.
        scale = 0.4 if broken and seed == 3 else 1.0
        changes = {"return": lambda done, scale=scale: scale * (20 + 200 * done)}
        with written(root, CONTROL, seed, tuple(range(5)), trial) as (session, tracker):
            write_rows(session, tracker, changes, noise=10 * noise + seed)
        trial = Run(session.path.parent.parent)
    assert trial is not None
    return trial


def write_failed(root: Path, *, broken: bool, noise: int = 0) -> Run:
    """A run that raised an error, or one that was stopped and can be resumed."""
    path = None
    try:
        with written(root, POSTTRAIN) as (session, tracker):
            path = session.path
            write_rows(session, tracker, {}, noise=noise)
            raise PalestraError("the model is gone") if broken else KeyboardInterrupt
    except (PalestraError, KeyboardInterrupt):
        pass
    assert path is not None
    return Run(path.parent.parent)


def write_killed(root: Path) -> Run:
    """A run whose process died in the middle."""
    before = set(root.glob("*/2*"))
    if (child := os.fork()) == 0:
        try:
            with written(root, POSTTRAIN) as (session, tracker):
                write_rows(session, tracker, {})
                os._exit(9)
        finally:
            os._exit(1)
    os.waitpid(child, 0)
    (path,) = set(root.glob("*/2*")) - before
    return Run(path)


@contextmanager
def running(root: Path, *, broken: bool, noise: int = 0) -> Iterator[Run]:
    """A run in the middle, whose last row is an hour or half a minute old."""
    with written(root, POSTTRAIN) as (session, tracker):
        write_rows(session, tracker, {}, noise=noise)
        last = (session.path / "metrics.jsonl").stat().st_mtime - (3600 if broken else 30)
        os.utime(session.path / "metrics.jsonl", (last, last))
        yield Run(session.path.parent.parent)
