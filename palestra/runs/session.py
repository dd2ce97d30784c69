"""A session: one seed's run folder, its status, log and stop signals, owned by the process that trains in it."""

import json
import logging
import os
import signal
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from fnmatch import fnmatch
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

from palestra.errors import Interrupted, PalestraError, UsageError
from palestra.runs import checkpoint as checkpoints
from palestra.runs.checkpoint import Checkpoint, DamagedCheckpoint
from palestra.runs.lease import Lease, LeaseLost, Owner, repeating
from palestra.runs.store import LocalStore, clear_write_errors, read_json, write_bytes, write_json
from palestra.spec.load import Difference, differences
from palestra.spec.renames import translated
from palestra.track.trace import FILES
from palestra.work.redact import redact, redacted

NAME = "status.json"


def read_status(folder: Path) -> dict[str, Any] | None:
    """The status as its owner last wrote it; None for a session that never started."""
    path = folder / NAME
    return read_json(path) if path.exists() else None


def state_of(folder: Path) -> str:
    """new, running, done, failed, interrupted, or killed: the status says running but its owner is dead."""
    status = read_status(folder)
    if status is None:
        return "new"
    if status["state"] == "running" and not Owner.read(status).alive(status["heartbeat"]):
        return "killed"
    return status["state"]


@contextmanager
def stop_signals(request_stop: Callable[[], None]) -> Iterator[None]:
    """Call `request_stop` on SIGTERM and SIGINT; a second SIGINT raises KeyboardInterrupt. Other threads: no effect."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    interrupts = 0

    def on_signal(number: int, frame: FrameType | None) -> None:
        nonlocal interrupts
        request_stop()
        interrupts += number == signal.SIGINT
        if interrupts > 1:
            raise KeyboardInterrupt

    previous = {number: signal.signal(number, on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            # None: a handler that was not installed from Python and cannot be restored.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


class _Redacting(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return redact(super().format(record))


@contextmanager
def logging_to(path: Path) -> Iterator[logging.Handler]:
    """Copy what `palestra` loggers log, from INFO up, into the session's log.txt."""
    logger = logging.getLogger("palestra")
    handlers: list[logging.Handler] = []
    if not logger.hasHandlers() and logging.lastResort is not None:
        handlers.append(logging.lastResort)  # with a handler of its own the logger would stop warning on stderr
    file = logging.FileHandler(path, encoding="utf-8")
    file.setLevel(logging.INFO)
    file.setFormatter(_Redacting("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    handlers.append(file)
    level = logger.level
    if logger.getEffectiveLevel() > logging.INFO:
        logger.setLevel(logging.INFO)
    for handler in handlers:
        logger.addHandler(handler)
    try:
        yield file
    finally:
        for handler in handlers:
            logger.removeHandler(handler)
        logger.setLevel(level)
        file.close()


HEARTBEAT_SECONDS = 2.0
# Append-only files, truncated on resume, also when the resuming process does not follow them.
APPEND_ONLY = ("metrics.jsonl", "rollouts.jsonl", FILES)
# A checkpoint is valid without these: a user may have removed a large one.
DISPENSABLE = ("rollouts.jsonl", FILES)

log = logging.getLogger("palestra.runs")


class Session:
    """One seed's run folder. As a context manager it owns the folder: lease, status, heartbeat, log file, signals.

    The order in a trainer: enter, `restore()`, open the append-only files for appending and `follow()` them, train.
    """

    def __init__(self, path: Path):
        self.path = path
        self.manifest: dict[str, Any] = read_json(path / "manifest.json")
        self.stop_requested = False
        """Set by the first SIGINT or SIGTERM: take a checkpoint, then raise `Interrupted`."""
        self._followed: dict[str, Callable[[], None]] = {}
        self._progress: dict[str, Any] = {}
        self._started = 0.0
        self._lease = Lease(LocalStore(path))
        self._lost: LeaseLost | None = None
        self._warned = False
        self._log_file: logging.Handler | None = None
        self._owned: ExitStack | None = None

    @classmethod
    def create(
        cls, path: Path, *, spec_yaml: str, spec_data: Mapping[str, Any], manifest: Mapping[str, Any]
    ) -> "Session":
        """Make a session's folder with its resolved spec and its manifest."""
        if (path / "manifest.json").exists():
            raise UsageError(f"{path} already holds a session: resume it, or start a new run")
        with clear_write_errors(path):
            (path / checkpoints.FOLDER).mkdir(parents=True, exist_ok=True)
            (path / "plots").mkdir(exist_ok=True)
            # At most 64 characters, which is what tracking services accept.
            id = f"{path.absolute().parent.parent.name[:40]}-{path.name[:14]}-{uuid.uuid4().hex[:8]}"
            _write_identity(path, spec_yaml, spec_data, {**manifest, "id": id})
        return cls(path)

    @classmethod
    def open(cls, path: Path) -> "Session":
        """The session in an existing folder."""
        if not (path / "manifest.json").exists():
            raise UsageError(f"{path} is not a session's folder: it has no manifest.json")
        return cls(path)

    @property
    def seed(self) -> int:
        """The seed of this session."""
        return self.manifest["seed"]

    @property
    def id(self) -> str:
        """Unique, also among sessions of the same name elsewhere; a folder keeps it when moved."""
        if "id" not in self.manifest:
            raise UsageError(f"{self.path} was started by an earlier version, without session ids: start a new run")
        return self.manifest["id"]

    @property
    def spec_data(self) -> dict[str, Any]:
        """The resolved spec as plain data."""
        return translated(self.manifest["spec"])

    # ---- owning the folder

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            with clear_write_errors(self.path):
                self._lease.acquire()
                stack.callback(self._lease.release)
                for partial in self.path.glob(".*.tmp"):  # small files a killed owner was writing
                    partial.unlink()
                self._lost = None
                self.stop_requested = False
                stack.enter_context(stop_signals(self._request_stop))
                self._log_file = stack.enter_context(logging_to(self.path / "log.txt"))
                self._started = time.time()
                before = read_status(self.path)
                self._progress = {} if before is None else before["progress"]  # until the first update
                self._write_status("running")
            stack.push(self._conclude)
            # Ends first, so that the concluding status is the last one written.
            stack.enter_context(repeating(self._beat, HEARTBEAT_SECONDS))
            self._owned = stack.pop_all()
        return self

    def __exit__(self, *raised: Any) -> None:
        assert self._owned is not None
        owned, self._owned = self._owned, None
        owned.__exit__(*raised)

    def progress(self, *, headline: Mapping[str, float] | None = None, **counts: int) -> None:
        """Set the progress: `step`, and `frame` or `tokens`; `headline` is metric → value.

        It is written with the next heartbeat. Raises `LeaseLost` if another process has taken the folder over.
        """
        if self._lost is not None:
            raise self._lost
        # A new dict each time: the heartbeat's thread reads the old one.
        progress = self._progress | {name: int(count) for name, count in counts.items()}
        if headline is not None:
            progress["headline"] = {metric: float(value) for metric, value in headline.items()}
        self._progress = progress

    def _request_stop(self) -> None:
        self.stop_requested = True

    def _write_status(self, state: str, error: BaseException | None = None) -> None:
        status = {
            "state": state,
            "started": self._started,
            "heartbeat": time.time(),
            **asdict(Owner.here()),
            "progress": self._progress,
            "reason": None if error is None else f"{type(error).__name__}: {error}",
            "traceback": None if error is None else "".join(traceback.format_exception(error)),
        }
        write_json(self.path / NAME, redacted(status))

    def _beat(self) -> None:
        if self._lost is not None:
            return
        try:
            self._lease.renew()
            self._write_status("running")
        except LeaseLost as error:
            self._lost = error  # raised in the trainer's thread by progress() or checkpoint()
            self.stop_requested = True
        except OSError as error:
            if not self._warned:
                log.warning("the heartbeat of %s cannot be written (%s); training continues", self.path, error)
            self._warned = True

    def _conclude(self, kind: object, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._lost is not None or isinstance(error, LeaseLost):
            return  # the folder has another owner, who writes its status and log
        if error is None:
            state = "done"
        elif isinstance(error, Interrupted | KeyboardInterrupt):
            state = "interrupted"
        else:
            state = "failed"
            # Into the log file only: the terminal shows one paragraph unless --debug is given.
            raised = (type(error), error, trace)
            record = logging.LogRecord(log.name, logging.ERROR, __file__, 0, "the session failed", None, raised)
            assert self._log_file is not None
            self._log_file.handle(record)
        try:
            self._write_status(state, error)
        except OSError as problem:
            if error is None:
                raise PalestraError(f"could not write the last status of {self.path}: {problem}") from problem
            error.add_note(f"status.json in {self.path} could not be written either: {problem}")

    # ---- checkpoints

    def follow(self, name: str, flush: Callable[[], None]) -> None:
        """Tie an append-only file of this folder to checkpoints: `flush` is called before each."""
        self._followed[name] = flush

    def checkpoint(
        self, step: int, state: Any, *, reasons: set[str], model: Callable[[Path], None] | None = None, **about: Any
    ) -> Path:
        """Save all state with the sizes of the append-only files, then prune; see `palestra.runs.checkpoint.save`."""
        return self.saving(step, reasons=reasons, **about)(state, model)

    def saving(self, step: int, *, reasons: set[str], **about: Any) -> Callable[[Any, Any], Path]:
        """Note the sizes of the append-only files; what it gives saves the state and model of now, also later."""
        with clear_write_errors(self.path):
            self._lease.renew()  # a process that was stopped and has lost the folder must not write into it
            for flush in self._followed.values():
                flush()
            offsets = {name: _synced_size(self.path / name) for name in self._growing()}

        def write(state: Any, model: Callable[[Path], checkpoints.Files | None] | None) -> Path:
            with clear_write_errors(self.path):
                path = checkpoints.save(self.path, step, state, reasons=reasons, offsets=offsets, model=model, **about)
                checkpoints.prune(self.path)
            return path

        return write

    def restore(self) -> Checkpoint | None:
        """The newest valid checkpoint (None: start from scratch), with every append-only file truncated to it."""
        with clear_write_errors(self.path):
            self._lease.renew()
            checkpoints.finish_renames(self.path)
            saved = checkpoints.newest(self.path, log.warning, self._check_offsets)
            checkpoints.set_aside_after(self.path, -1 if saved is None else saved.step)
            offsets = {} if saved is None else saved.meta.offsets
            for name in {*self._growing(), *offsets}:
                if (self.path / name).exists():
                    os.truncate(self.path / name, min((self.path / name).stat().st_size, offsets.get(name, 0)))
        return saved

    def _growing(self) -> list[str]:
        return sorted({*self._followed, *(path.name for name in APPEND_ONLY for path in self.path.glob(name))})

    def _check_offsets(self, checkpoint: Checkpoint) -> None:
        for name, offset in checkpoint.meta.offsets.items():
            if any(fnmatch(name, each) for each in DISPENSABLE):
                continue
            size = (self.path / name).stat().st_size if (self.path / name).exists() else 0
            if size < offset:
                raise DamagedCheckpoint(
                    f"checkpoint {checkpoint.meta.path} does not fit {name}, which has {size} bytes instead of {offset}"
                )

    # ---- identity

    def check_resume(
        self, spec_data: Mapping[str, Any], allow: Sequence[str] = (), fixed: Sequence[str] = ()
    ) -> list[Difference]:
        """Refuse a changed spec unless each changed field is at or under an allowed path; returns the changes.

        A field at or under a `fixed` path cannot be allowed: the checkpoints would not fit.
        """
        # As it is read back from manifest.json, so that a tuple equals its list.
        changed = differences(self.spec_data, redacted(json.loads(json.dumps(spec_data))))
        if stuck := [change for change in changed if any(_covers(path, change.path) for path in fixed)]:
            lines = "\n".join(f"  {change}" for change in stuck)
            raise UsageError(f"the checkpoints of {self.path} do not fit the changed spec:\n{lines}\nStart a new run.")
        if refused := [change for change in changed if not any(_covers(path, change.path) for path in allow)]:
            lines = "\n".join(f"  {change}" for change in refused)
            flags = " ".join(f"--allow {change.path}" for change in refused)
            raise UsageError(
                f"the spec has changed since {self.path} was started:\n{lines}\n"
                f"Resume with the same spec, accept the changes with {flags}, or start a new run."
            )
        return changed

    def amend(self, *, spec_yaml: str, spec_data: Mapping[str, Any], manifest: Mapping[str, Any]) -> None:
        """Store a spec that `check_resume` accepted; the manifest before it stays in manifest.json as "before"."""
        with clear_write_errors(self.path):
            self._lease.acquire()  # not under a process that is training in it
            try:
                _write_identity(self.path, spec_yaml, spec_data, {**manifest, "id": self.id, "before": self.manifest})
            finally:
                self._lease.release()
        self.manifest = read_json(self.path / "manifest.json")


def _write_identity(path: Path, spec_yaml: str, spec_data: Mapping[str, Any], manifest: Mapping[str, Any]) -> None:
    """spec.yaml, git.diff and, last because it makes the folder a session, manifest.json."""
    write_bytes(path / "spec.yaml", redact(spec_yaml).encode())
    content = dict(manifest)
    if diff := content.pop("diff", ""):
        write_bytes(path / "git.diff", redact(diff).encode())
    write_json(path / "manifest.json", redacted({**content, "spec": spec_data}))


def _covers(allowed: str, path: str) -> bool:
    parts = allowed.split(".")
    return path.split(".")[: len(parts)] == parts


def _synced_size(path: Path) -> int:
    if not path.exists():
        return 0
    with path.open("rb") as file:
        os.fsync(file.fileno())  # a checkpoint must not survive a power cut without the rows it counts
        return os.fstat(file.fileno()).st_size
