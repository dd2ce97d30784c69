"""One seed trained by several processes: started here as `devices` asks, or found as `torchrun` has started them."""

import os
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path

import torch

from palestra.errors import Interrupted, PalestraError, UsageError
from palestra.kinds.trial import Launch
from palestra.lm.ranks import Ranks
from palestra.runs.run import Run
from palestra.runs.session import log, logging_to, stop_signals
from palestra.spec.lm import LmSpec
from palestra.work import fanout
from palestra.work.fanout import STOP_SECONDS, Processes, Resources, Stop, WorkItem

FOLLOW_SECONDS = 5.0  # for the other ranks to notice that one has failed


TrainSession = Callable[[Path, Launch], None]


def check_ranks(spec: LmSpec, ranks: Ranks, device: torch.device) -> None:
    """Refuse a number of processes that the spec or the machine does not allow."""
    if ranks.size > 1 and spec.max_session > 1:
        raise UsageError("max_session: several ranks train one seed together; start each seed by itself")
    if ranks.size > 1 and spec.devices not in (None, ranks.size):
        raise UsageError(f"devices: {spec.devices}, but torchrun has started {ranks.size} processes; leave it out")
    if ranks.size == 1 and device.type == "cuda" and (spec.devices or 1) > torch.cuda.device_count():
        raise UsageError(f"devices: {spec.devices}, but torch sees {torch.cuda.device_count()} GPUs here")


def threads_each(spec: LmSpec, device: torch.device) -> int:
    """Torch threads of one process: this machine's cores are shared by the ranks on it, or by the seeds.

    On a GPU a seed takes all of them, so that the seeds are trained one after the other: they would share its memory.
    """
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE") or spec.devices or 1)
    seeds = 1 if device.type == "cuda" else spec.max_session
    return spec.threads or max(1, (os.cpu_count() or 1) // (ranks * seeds))


def together(session: TrainSession, spec: LmSpec, ranks: Ranks, threads: int) -> TrainSession:
    """What trains a session on all ranks, called by the first of them or by the one process there is so far."""
    if ranks.size > 1:
        return partial(_lead, session, ranks)
    return session if (spec.devices or 1) == 1 else partial(_start, session, spec, threads)


def done(ranks: Ranks, trial: Run) -> Run:
    """The first rank tells the others that there is nothing more to train."""
    ranks.from_first((trial.path, True))
    return trial


def follow(session: TrainSession, ranks: Ranks, launch: Launch) -> Run:
    """What the ranks after the first do: train what it trains, until it is done."""
    while True:
        folder, is_done = ranks.from_first(None)
        if is_done:
            return Run(folder)
        _train(session, ranks, folder, launch)


@contextmanager
def following(folder: Path, rank: int) -> Iterator[None]:
    """Around a session on a rank after the first, which decides when all stop; a failure goes to the run's log too."""
    with stop_signals(lambda: None):
        try:
            yield
        except Interrupted:
            raise
        except Exception:
            with logging_to(folder / "log.txt"):
                log.exception("rank %d failed", rank)
            raise


def _lead(session: TrainSession, ranks: Ranks, folder: Path, launch: Launch) -> None:
    ranks.from_first((folder, False))
    _train(session, ranks, folder, launch)


def _train(session: TrainSession, ranks: Ranks, folder: Path, launch: Launch) -> None:
    try:
        session(folder, launch)
    except Interrupted:
        raise
    except BaseException:
        ranks.abandon()
        raise


def _start(session: TrainSession, spec: LmSpec, threads: int, folder: Path, launch: Launch) -> None:
    """Train in processes of their own; the error of the one that failed first is raised here."""
    assert spec.devices is not None
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    size = str(spec.devices)
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    items = [
        WorkItem(f"rank {rank}", _run_rank, (rank, session, folder, launch), cores=threads)
        for rank in range(spec.devices)
    ]
    stop, backend = Stop(), Processes(spec.name, env=where)
    running = fanout.run(items, Resources(spec.devices * threads), backend, stop=stop, follow=FOLLOW_SECONDS)
    with stop_signals(stop), closing(running) as outcomes:
        errors = [outcome.error for outcome in outcomes if outcome.error is not None]
    failed = [error for error in errors if not isinstance(error, CancelledError)]
    if failed:
        cause = failed[0].__cause__
        # What a person needs to know, else the error with the traceback of its process.
        raise cause if isinstance(cause, PalestraError) else failed[0]
    if errors:
        raise Interrupted(f"did not save within {STOP_SECONDS:g} s: it goes on from its last checkpoint")


def _run_rank(rank: int, session: TrainSession, folder: Path, launch: Launch) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    session(folder, launch)
