"""Ray as a backend of the fan-out: where workers run is Ray's, how they run is `palestra.work`'s.

A worker is an actor with our own pool of one process (`host.py`), reused by items with the same needs. `connect` joins
a cluster or starts one on this machine, which ends with this process, however that ends.
"""

import contextlib
import logging
import os
import pickle
import signal
import socket
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from pathlib import Path
from typing import Any

from palestra.cluster.capacity import Ask, NotEnough, arithmetic, require
from palestra.cluster.host import Host, environment
from palestra.cluster.versions import versions
from palestra.errors import PalestraError, UsageError, needs_extra
from palestra.work.fanout import SILENT_SECONDS, Handle, Resources, WorkItem
from palestra.work.pool import WorkerDied, name_of
from palestra.work.worker import pack

log = logging.getLogger("palestra.cluster")

CLUSTER = "the cluster"
REACH_SECONDS = 5.0  # to connect to a cluster's port
PLACE_SECONDS = 10.0  # for a placement group, and until it is said that a worker waits for a machine
BEAT_SECONDS = 5.0  # between two signs of life of a host
END_SECONDS = 5.0  # for a host to end its worker, before it is killed itself
CALLS = 8  # at once on a host: run, ask, cancel, signs of life
QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_AUTH_MODE": "token",  # else Ray says that it is on; what Ray starts here accepts only this user's token
}
OF_A_HOST = {"RAY_kill_child_processes_on_worker_exit": "0", "RAY_worker_niceness": "0"}
"""Ray would kill the pool's guard with its worker, and so leave the worker's children alive; and run all at nice 15."""


class Unreachable(PalestraError):
    """There is no Ray cluster at the address."""


def connect(address: str = "auto", temp_dir: str | None = None, token_env: str | None = None, **settings: Any) -> None:
    """Connect this process to a Ray cluster, unless it is connected already; `token_env` names what has its token.

    `auto` is RAY_ADDRESS, else a cluster that `ray start` has started on this machine, else a new one with all cores of
    this machine, whose sockets and logs are in `temp_dir`; `settings` of `ray.init` are for this one. Call it in a
    thread that lives as long as the process: what Ray starts ends with the thread.
    """
    address = os.environ.get("RAY_ADDRESS", "auto") if address == "auto" else address
    found = _started_here() if address == "auto" else None if address == "local" else address
    if token_env is not None:
        if not os.environ.get(token_env):
            raise UsageError(f"cluster.token_env: {token_env} is not set: export it with the token of the Ray cluster")
        os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": os.environ[token_env]}
    if found is None and "ray" not in sys.modules:  # read by Ray when it is imported
        os.environ.update({name: value for name, value in QUIET.items() if name not in os.environ})
    with needs_extra("Ray", "ray"):
        import ray
    if ray.is_initialized():
        return
    how: dict[str, Any] = {"log_to_driver": False, "configure_logging": False, "logging_level": logging.ERROR}
    if found is None:
        # Short: the path of a socket has at most 107 characters, of which Ray's own part takes 70.
        folder = temp_dir or os.environ.get("RAY_TMPDIR") or f"/tmp/palestra-ray-{os.getuid()}"
        how |= {"address": "local", "num_cpus": os.cpu_count(), "include_dashboard": False, "_temp_dir": folder}
        how |= settings
    else:
        _reach(found)
        how["address"] = "auto" if address == "auto" else address
    before, level = signal.getsignal(signal.SIGTERM), logging.getLogger("ray").level
    logging.getLogger("ray").setLevel(logging.ERROR)
    try:
        ray.init(**how)
    except Exception as error:  # whatever Ray raises: ConnectionError, RuntimeError, ValueError, plain Exception
        raise Unreachable(f"Ray at {found or 'this machine'} does not answer: {_first_line(error)}") from error
    finally:
        logging.getLogger("ray").setLevel(level)
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)  # Ray has set its own


def resources_of(*, free: bool = False) -> Resources:
    """All cores, GPUs and memory of the cluster, or what of it nobody uses now."""
    import ray

    machines = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    total = {name: sum(machine.get(name, 0.0) for machine in machines) for name in ("CPU", "GPU", "memory")}
    counts = ray.available_resources() if free else total
    gpus = tuple(str(index) for index in range(int(counts.get("GPU", 0))))
    return Resources(int(counts.get("CPU", 0)), gpus, counts.get("memory", 0.0))


def placed(asked: Sequence[Ask], strategy: str = "PACK", seconds: float = PLACE_SECONDS) -> Any:
    """A placement group with one bundle for each worker, in their order; refused if it is not there in time."""
    from ray.util import placement_group, remove_placement_group

    require(asked, resources_of(), resources_of(free=True), CLUSTER)
    bundles = [{"CPU": ask.cores, "GPU": ask.gpu, "memory": ask.memory} for ask in asked for _ in range(ask.count)]
    group = placement_group([{k: v for k, v in bundle.items() if v} for bundle in bundles], strategy=strategy)
    if group.wait(seconds):
        return group
    remove_placement_group(group)
    problem = arithmetic(asked, resources_of(), resources_of(free=True), CLUSTER)
    raise NotEnough(f"{problem}, and not where each fits on one machine: ask for less, or wait for others to end")


def joining() -> dict[str, str]:
    """What makes `auto` this cluster in the processes of its workers."""
    import ray

    return {"RAY_ADDRESS": ray.get_runtime_context().gcs_address}


def this_machine() -> str:
    """The address of this machine in the cluster."""
    import ray

    return ray.util.get_node_ip_address()


class RayBackend:
    """Runs items in workers that Ray places, reused by items with the same needs; `env` is added to their environment.

    Another version of the code on a worker's machine is refused; with a `spec` as plain data, also another reading
    of it. A worker or machine that dies fails its item with `WorkerDied`.
    """

    def __init__(
        self,
        name: str,
        *,
        address: str = "auto",
        env: Mapping[str, str] | None = None,
        temp_dir: str | None = None,
        heartbeat_timeout: float | None = SILENT_SECONDS,
        token_env: str | None = None,
        spec: Mapping[str, Any] | None = None,
        cores: float | None = None,
        asked: Sequence[Ask] = (),
    ) -> None:
        """Ray reserves `cores` for each worker, by default those of its items, and room for all `asked` at once."""
        connect(address, temp_dir, token_env)
        self._cores, self._group = cores, placed(asked) if asked else None
        self._env, self._silence, self._count = {**environment(), **joining(), **(env or {})}, heartbeat_timeout, 0
        self._name, self._about = name, (os.getcwd(), versions(spec), spec)
        self._hosts: list[_Placed] = []
        self._lock, self._closing = threading.Lock(), threading.Event()  # the lock: who takes or ends an idle host
        self._watching = threading.Thread(target=self._watch, name="palestra-hosts", daemon=True)
        self._watching.start()

    def submit(self, item: WorkItem, args: tuple[Any, ...], gpu: str | None) -> Handle:
        """Run in an idle worker, else in a new one, once Ray has a place for it."""
        payload, needs = pack((item.function, args, {})), _needs(item, gpu, self._cores)
        with self._lock:
            host = next((host for host in self._hosts if host.idle and host.needs == needs), None)
            if host is not None:
                return host.start(item, payload)
        self._end(lambda host: host.attempt is None)  # they hold what the new one may need
        host = self._place(item.cores, needs)
        with self._lock:
            self._hosts.append(host)
        return host.start(item, payload)

    def close(self) -> None:
        """End the workers, all at once."""
        self._closing.set()
        self._watching.join()
        self._end(lambda host: True)
        if self._group is not None:
            from ray.util import remove_placement_group

            remove_placement_group(self._group)

    def _place(self, threads: int, needs: dict[str, Any]) -> "_Placed":
        import ray

        self._count += 1
        env = self._env if needs["num_gpus"] else {**self._env, "CUDA_VISIBLE_DEVICES": ""}  # else as Ray has set it
        name = f"{self._name}-{self._count}"
        pool = {"threads": threads, "name": name, "env": env, "heartbeat_timeout": self._silence}
        variables = {"env_vars": {**OF_A_HOST, "PYTHONPATH": os.pathsep.join(_own_paths())}}
        where = self._reserved(needs)
        placing = ray.remote(Host).options(**needs, **where, max_concurrency=CALLS, runtime_env=variables)
        return _Placed(placing.remote(*self._about, pool), needs, bool(where))

    def _reserved(self, needs: dict[str, Any]) -> dict[str, Any]:
        """The place in the group for a worker with these needs, unless others have all of them."""
        if self._group is None:
            return {}
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        wanted = (needs["num_cpus"], needs["num_gpus"])
        places = [b for b in self._group.bundle_specs if (b.get("CPU", 0.0), b.get("GPU", 0.0)) == wanted]
        taken = [host for host in self._hosts if host.reserved and host.needs == needs and not host.unwanted]
        return (
            {"scheduling_strategy": PlacementGroupSchedulingStrategy(self._group)} if len(taken) < len(places) else {}
        )

    def _end(self, which: "Callable[[_Placed], bool]") -> None:
        import ray

        with self._lock:
            ending = [host for host in self._hosts if which(host)]
            self._hosts = [host for host in self._hosts if host not in ending]
        if closing := [host.actor.close.remote() for host in ending if host.placed and not host.dead]:
            ray.wait(closing, num_returns=len(closing), timeout=END_SECONDS)
        for host in ending:
            host.kill()

    def _watch(self) -> None:
        """Kill hosts that give no sign of life; end idle ones while others wait for a place."""
        while not self._closing.wait(BEAT_SECONDS):
            for host in list(self._hosts):
                host.check(self._silence)
            if any(host.waits for host in list(self._hosts)):
                self._end(lambda host: host.idle)


class _Placed:
    """A host as the driver sees it."""

    def __init__(self, actor: Any, needs: dict[str, Any], reserved: bool) -> None:
        self.actor, self.needs, self.reserved = actor, needs, reserved
        self.attempt: _Attempt | None = None
        self.placed = self.dead = self._told = False
        self._count, self._asked, self._heard = 0, time.monotonic(), 0.0
        actor.here.remote().future().add_done_callback(self._hear)

    @property
    def waits(self) -> bool:
        return not self.placed and not self.dead

    @property
    def unwanted(self) -> bool:
        """Whether its place is, or will soon be, free."""
        return self.dead or (self.attempt is not None and self.attempt.unwanted is not None)

    @property
    def idle(self) -> bool:
        return self.attempt is None and self.placed and not self.dead

    def start(self, item: WorkItem, payload: bytes) -> "_Attempt":
        from ray.exceptions import RayActorError, RayError

        self._count, name = self._count + 1, name_of(item.function)
        self.attempt = attempt = _Attempt(self, self._count, name)

        def end(future: Future) -> None:  # in a thread of Ray, which must not wait
            self.dead = isinstance(future.exception(), RayActorError)
            self.attempt = None
            attempt.end(future)

        try:
            self.actor.run.remote(self._count, name, payload, item.timeout, item.log).future().add_done_callback(end)
        except RayError as error:
            self.attempt = None
            raise PalestraError(f"Ray cannot take the arguments of {name}: {_first_line(error)}") from error
        return attempt

    def check(self, silence: float | None) -> None:
        """Ask for a sign of life; a host that gives none for that long is killed."""
        now = time.monotonic()
        if self.waits and not self._told and now - self._asked > PLACE_SECONDS:
            self._told = True
            log.warning("a worker waits for a place with %s; free: %s", self.needs, resources_of(free=True))
        elif self.placed and not self.dead and self._heard >= self._asked:
            self._asked = now
            self.actor.here.remote().future().add_done_callback(self._hear)
        elif self.placed and silence is not None and now - self._asked > silence:
            if self.attempt is not None:
                self.attempt.why = f"gave no sign of life for {silence:g} s and was killed with its host"
            self.kill()

    def kill(self) -> None:
        import ray

        with contextlib.suppress(Exception):  # gone already
            ray.kill(self.actor)

    def _hear(self, future: Future) -> None:
        if future.exception() is None:
            self.placed, self._heard = True, time.monotonic()


class _Attempt(Future):
    """A call on a host. Requests to end are lost while it begins: the fan-out repeats them."""

    def __init__(self, host: _Placed, number: int, name: str) -> None:
        super().__init__()
        self._host, self._number, self._name = host, number, name
        self.unwanted: float | None = None
        self.why = ""

    def ask_to_end(self) -> None:
        if self._host.placed:
            self._host.actor.ask_to_end.remote(self._number)
        else:
            self.cancel()  # nothing runs that could save

    def cancel(self) -> bool:
        """Let the host kill its worker; a host that has not within seconds is killed itself."""
        self.unwanted = self.unwanted or time.monotonic()
        if self._host.placed and time.monotonic() - self.unwanted < END_SECONDS:
            self._host.actor.cancel.remote(self._number)
        else:
            self._host.kill()
        return not self.done()

    def end(self, future: Future) -> None:
        """Take over the outcome of Ray's future."""
        error = future.exception()
        if error is None:
            self.set_result(future.result())
        elif self.unwanted is not None:
            self.set_exception(CancelledError())
        elif self._host.dead:
            why = self.why or f"was lost with its host ({_first_line(error)})"
            self.set_exception(WorkerDied(self._name, why, -signal.SIGKILL))
        else:
            self.set_exception(PalestraError(f"Ray cannot return the result of {self._name}: {_first_line(error)}"))

    def result(self, timeout: float | None = None) -> Any:
        succeeded, data = super().result(timeout)
        if succeeded:
            return pickle.loads(data)
        raise pickle.loads(data)


def _started_here() -> str | None:
    """The address of the cluster that `ray start` has started on this machine, if it still answers."""
    folder = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
    try:
        address = (Path(folder) / "ray" / "ray_current_cluster").read_text().strip()
        _reach(address)
    except (OSError, PalestraError):
        return None
    return address


def _reach(address: str) -> None:
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        socket.create_connection((host, int(port)), REACH_SECONDS).close()
    except ValueError as error:
        raise UsageError(f"Ray's address {address}: expected HOST:PORT or ray://HOST:PORT") from error
    except OSError as error:
        raise Unreachable(f"no Ray cluster answers at {address} ({error}): start it, or correct the port") from error


def _needs(item: WorkItem, gpu: str | None, reserved: float | None) -> dict[str, Any]:
    """What Ray reserves; of what no machine has so much of, all that the largest has: there it runs alone."""
    import ray

    machines = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    cores, memory = (max(machine.get(name, 0.0) for machine in machines) for name in ("CPU", "memory"))
    share = 0.0 if gpu is None else item.gpu
    return {
        "num_cpus": min(item.cores if reserved is None else reserved, cores),
        "num_gpus": share,
        "memory": min(item.memory, memory) or None,
    }


def _own_paths() -> list[str]:
    """Where modules are found here, apart from Python's own and installed packages."""
    paths = [os.path.abspath(path) for path in sys.path]
    own = [path for path in paths if not path.startswith(sysconfig.get_path("stdlib")) and os.path.isdir(path)]
    return [path for path in own if "-packages" not in path]  # site- or dist-, and what Ray has added below it


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
