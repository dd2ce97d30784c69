"""The processes of one run apart from its trainers: hosted objects by role, and commands that change their number."""

import logging
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from palestra.cluster.actor import Actor, Hub
from palestra.cluster.capacity import Ask, local_resources, require
from palestra.cluster.crew import Crew
from palestra.errors import PalestraError, UsageError
from palestra.runs.store import read_json, write_json
from palestra.spec.cluster import PlaceSpec
from palestra.track.trace import trace_file
from palestra.work.fanout import Backend, Processes

log = logging.getLogger("palestra.cluster")

STATE, COMMANDS = "cluster.json", "cluster"
CORES = 0.25  # that a process needs at least: on a CPU they take turns
LOOK_SECONDS = 0.5  # between two looks for commands
PATIENCE_SECONDS = 30.0  # that a command waits for the run


def asks(**counts: tuple[int, bool]) -> list[Ask]:
    """Of each role how many processes there are, and whether each needs a GPU of its own."""
    return [Ask(role, count, CORES, float(gpu)) for role, (count, gpu) in counts.items() if count]


def check_room(spec: PlaceSpec, asked: Sequence[Ask]) -> None:
    """Refuse more processes than there is room for, with the arithmetic."""
    if not spec.ray:
        require(asked, local_resources())
        return
    from palestra.cluster.ray import connect, placed

    connect(spec.address, spec.temp_dir, spec.token_env)
    from ray.util import remove_placement_group

    remove_placement_group(placed(asked))  # it has been possible


def backend_of(spec: PlaceSpec, name: str, asked: Sequence[Ask], env: dict[str, str] | None = None) -> Backend:
    """Where processes are started; on a cluster there is room for all that are `asked` for, or for none."""
    if not spec.ray:
        return Processes(name, env=env, heartbeat_timeout=None)
    from palestra.cluster.ray import RayBackend

    settings: dict[str, Any] = {"temp_dir": spec.temp_dir, "token_env": spec.token_env, "cores": CORES}
    return RayBackend(name, address=spec.address, env=env, heartbeat_timeout=None, asked=asked, **settings)


def address_of(spec: PlaceSpec) -> str:
    """The address of this machine for those processes."""
    if not spec.ray:
        return "127.0.0.1"
    from palestra.cluster.ray import this_machine

    return this_machine()


def shares_memory(spec: PlaceSpec) -> bool:
    """Whether all processes are on this machine."""
    if not spec.ray:
        return True
    import ray

    return len([node for node in ray.nodes() if node["Alive"]]) == 1


class Placement(AbstractContextManager["Placement"]):
    """Hosted objects by role. Its folder says who there is, and takes the commands of `palestra cluster`."""

    def __init__(
        self,
        spec: PlaceSpec,
        name: str,
        folder: Path,
        asked: Sequence[Ask],
        run: Mapping[str, Any] | None = None,
        trace: bool = False,
    ):
        """`run` is the whole spec as plain data, which must mean the same wherever its processes are."""
        self._folder, self._trace, backend = folder, trace, backend_of(spec, name, asked)
        self.hub = Hub(backend, machine=address_of(spec), silence=spec.silence_seconds, spec=run)
        self.crews: dict[str, Crew] = {}
        self._written: Any = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._obey, name="placement", daemon=True)
        self._thread.start()

    def crew(
        self,
        role: str,
        size: int,
        make: Callable[..., Any],
        *args: Any,
        cores: int = 1,
        gpus: tuple[str, ...] = (),
        **preparing: Callable[[Actor], Any],
    ) -> Crew:
        """Host `size` objects that `make(*args)` makes, each with the next of the GPUs; `preparing` as in `Crew`."""
        logs = self._folder / "logs"
        logs.mkdir(exist_ok=True)

        def start(name: str) -> Actor:
            number = int(name.rpartition("/")[2])
            gpu, file = gpus[number % len(gpus)] if gpus else None, logs / f"{name.replace('/', '_')}.txt"
            trace = self._folder / trace_file(name) if self._trace else None
            return self.hub.start(name, make, *args, cores=cores, gpu=gpu, log=file, trace=trace)

        self.crews[role] = Crew(role, size, start, **preparing)
        return self.crews[role]

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._thread.join()
        for crew in self.crews.values():
            crew.close()
        self.hub.close()
        (self._folder / STATE).unlink(missing_ok=True)

    def _obey(self) -> None:
        folder = self._folder / COMMANDS
        folder.mkdir(exist_ok=True)
        for left in folder.glob("*.json"):  # of an earlier attempt
            left.unlink(missing_ok=True)
        while not self._closed.wait(LOOK_SECONDS):
            try:
                self._write()
                for path in sorted(folder.glob("*.ask.json")):
                    answer = self._done(**read_json(path))
                    path.unlink()
                    write_json(path.with_name(path.name.replace(".ask.", ".answer.")), answer)
            except (OSError, ValueError) as error:  # a full disk must not end the fleet
                log.warning("the commands in %s could not be read: %s", folder, error)

    def _done(self, do: str, role: str, count: int = 1, name: str | None = None) -> dict[str, Any]:
        crew = self.crews.get(role)
        try:
            if crew is None:
                raise PalestraError(f"this run has no {role}s of its own; it has {', '.join(self.crews) or 'none'}")
            return {"names": crew.add(count) if do == "add" else [crew.remove(name) for _ in range(count)]}
        except PalestraError as error:
            return {"error": str(error)}

    def _write(self) -> None:
        members = {role: crew.members() for role, crew in list(self.crews.items())}
        if members != self._written:
            write_json(self._folder / STATE, members)
            self._written = members


def members_of(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """The members of a session that is running, by role."""
    if not (folder / STATE).exists():
        raise UsageError(f"{folder} has no cluster: nothing of it runs apart from its trainer (now)")
    return read_json(folder / STATE)


def command(folder: Path, **what: Any) -> list[str]:
    """Ask a running session to `do: add` or `remove` members of a role; the names of those that come or go."""
    members_of(folder)
    ask = folder / COMMANDS / f"{uuid.uuid4().hex}.ask.json"
    answer = ask.with_name(ask.name.replace(".ask.", ".answer."))
    write_json(ask, what)
    waited = threading.Event()
    for _ in range(int(PATIENCE_SECONDS / 0.1)):
        if answer.exists():
            given = read_json(answer)
            answer.unlink()
            if "error" in given:
                raise UsageError(given["error"])
            return given["names"]
        waited.wait(0.1)
    ask.unlink(missing_ok=True)
    raise PalestraError(f"{folder} did not answer within {PATIENCE_SECONDS:g} s: is the run still alive?")
