"""One seed trained by several processes: started here for `devices`, or already started by `torchrun`."""

import os
from collections.abc import Iterator
from concurrent.futures import CancelledError
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path

import torch
from torch.distributed import TCPStore

from palestra.cluster.capacity import Ask
from palestra.cluster.network import use_network_of
from palestra.cluster.placement import address_of, asks, backend_of, check_room
from palestra.errors import Interrupted, PalestraError, UsageError
from palestra.kinds.trial import Launch, SessionRunner, device_of
from palestra.lm.ranks import Ranks
from palestra.runs.run import Run
from palestra.runs.session import log, logging_to, stop_signals
from palestra.spec.cluster import ClusterSpec
from palestra.spec.lm import LanguageModelSpec
from palestra.spec.shape import Shape
from palestra.work import fanout
from palestra.work.fanout import STOP_SECONDS, Resources, Stop, WorkItem

FOLLOW_SECONDS = 5.0  # for the other ranks to notice that one has failed


def check_ranks(spec: LanguageModelSpec, ranks: Ranks, device: torch.device) -> None:
    """Refuse a number of processes that the spec or the machine does not allow."""
    if ranks.size > 1 and spec.max_session > 1:
        raise UsageError("max_session: several ranks train one seed together; start each seed by itself")
    if ranks.size > 1 and spec.devices not in (None, ranks.size):
        raise UsageError(f"devices: {spec.devices}, but torchrun has started {ranks.size} processes; leave it out")
    if ranks.size > 1 and not spec.parallel.divides(ranks.size):
        asked = spec.parallel.processes
        raise UsageError(f"parallel: its product is {asked}, but torchrun has started {ranks.size} processes")
    if ranks.size > 1:
        for path, reason in spec.alone():
            raise UsageError(f"{'.'.join(map(str, path))}: {reason}")
    if (
        ranks.size == 1
        and device.type == "cuda"
        and not spec.cluster.ray
        and spec.processes > torch.cuda.device_count()
    ):
        raise UsageError(f"devices: {spec.processes}, but torch sees {torch.cuda.device_count()} GPUs here")
    if ranks.size == 1 and (spec.cluster.ray or spec.cluster.apart):
        check_room(
            spec.cluster, [*asks(trainers=(spec.processes, device.type == "cuda")), *apart(spec.cluster, device)]
        )


def apart(cluster: ClusterSpec, device: torch.device) -> list[Ask]:
    """The processes of a run besides its trainers. Without Ray generators may share the trainers' GPUs."""
    on_gpu = cluster.ray and device.type == "cuda"
    return asks(generators=(cluster.generators, on_gpu), verifiers=(cluster.verifiers, False))


def check_split(spec: LanguageModelSpec, shape: Shape) -> None:
    """Refuse a model that `parallel` cannot split, before anything starts."""
    if shape.vision is not None and spec.processes > 1:
        raise UsageError("parallel: a model with a vision tower is trained by one process: leave `parallel` out")
    for path, reason in spec.parallel.problems(shape, lora=spec.model.lora is not None):
        raise UsageError(f"parallel.{'.'.join(map(str, path))}: {reason}")


def joined(spec: LanguageModelSpec, device: torch.device) -> Ranks:
    """The ranks that train a session, with their layout."""
    sizes = spec.parallel.sizes(int(os.environ.get("WORLD_SIZE", "1")))
    return Ranks.join(device, spec.parallel.schedule, **sizes)


def ranks_here(spec: LanguageModelSpec) -> int:
    """How many share this machine's cores: trainers and generators, which take turns where nothing is off-policy."""
    trainers, generators = int(os.environ.get("LOCAL_WORLD_SIZE") or spec.processes), spec.cluster.generators
    turns = generators and not getattr(spec, "rollout").staleness  # noqa: B009
    return max(trainers, generators) if turns else trainers + generators


def together(session: SessionRunner, spec: LanguageModelSpec, ranks: Ranks, threads: int) -> SessionRunner:
    """Trains a session on all ranks; called by rank 0, or by the only process before ranks are started."""
    if ranks.size > 1:
        return partial(_lead, session, ranks)
    return session if spec.processes == 1 else partial(_start, session, spec, threads)


def done(ranks: Ranks, trial: Run) -> Run:
    """Rank 0: let the other ranks return from `follow`."""
    ranks.from_first((trial.path, True))
    return trial


def follow(session: SessionRunner, ranks: Ranks, launch: Launch) -> Run:
    """The other ranks: train what rank 0 trains, until it is done."""
    while True:
        folder, is_done = ranks.from_first(None)
        if is_done:
            return Run(folder)
        _train(session, ranks, folder, launch)


@contextmanager
def following(folder: Path, rank: int) -> Iterator[None]:
    """A session on another rank: rank 0 decides when all stop; a failure goes to the run's log too."""
    with stop_signals(lambda: None):
        try:
            yield
        except Interrupted:
            raise
        except Exception:
            with logging_to(folder / "log.txt"):
                log.exception("rank %d failed", rank)
            raise


def _lead(session: SessionRunner, ranks: Ranks, folder: Path, launch: Launch) -> None:
    ranks.from_first((folder, False))
    _train(session, ranks, folder, launch)


def _train(session: SessionRunner, ranks: Ranks, folder: Path, launch: Launch) -> None:
    try:
        session(folder, launch)
    except Interrupted:
        raise
    except BaseException:
        ranks.abandon()
        raise


def _start(session: SessionRunner, spec: LanguageModelSpec, threads: int, folder: Path, launch: Launch) -> None:
    """Train in one process per rank; the error of the rank that failed first is raised here."""
    size, machine = str(spec.processes), address_of(spec.cluster)
    # The ranks find each other by a store of this process, wherever they are.
    store = TCPStore(machine, 0, is_master=True, wait_for_workers=False)
    meeting = {"MASTER_ADDR": machine, "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    where = meeting | {"TORCHELASTIC_RESTART_COUNT": "0", "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    items = [
        WorkItem(f"rank {rank}", _run_rank, (rank, spec.cluster.ray, session, folder, launch), cores=threads)
        for rank in range(spec.processes)
    ]
    asked = asks(trainers=(spec.processes, device_of(spec).type == "cuda"))
    stop, backend = Stop(), backend_of(spec.cluster, spec.name, asked, env=where)
    running = fanout.run(items, Resources(spec.processes * threads), backend, stop=stop, follow=FOLLOW_SECONDS)
    with stop_signals(stop), closing(running) as outcomes:
        errors = [outcome.error for outcome in outcomes if outcome.error is not None]
    failed = [error for error in errors if not isinstance(error, CancelledError)]
    if failed:
        cause = failed[0].__cause__
        # An error for users by itself, any other with the traceback of its process.
        raise cause if isinstance(cause, PalestraError) else failed[0]
    if errors:
        raise Interrupted(f"did not save within {STOP_SECONDS:g} s: it resumes from its last checkpoint")


def _run_rank(rank: int, on_ray: bool, session: SessionRunner, folder: Path, launch: Launch) -> None:
    # Ray shows each process its own GPU alone.
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": "0" if on_ray else str(rank)}
    if on_ray:
        use_network_of(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    session(folder, launch)
