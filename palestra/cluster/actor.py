"""Any object in another process: hosted there, called from here, and missed when it no longer answers.

A backend of the fan-out starts the process, on this machine or another; it connects back to the hub of its owner.
Messages are pickled tuples over an authenticated connection. To the host: ("call", id, method, args), ("stop", id) and
("end",). From the host: ("hello", name, key, versions, pid, machine), ("ready",), ("beat", status) every second,
("value", id, value), ("item", id, value) of a stream, ("error", id, exception).
"""

import asyncio
import contextlib
import inspect
import itertools
import logging
import os
import pickle
import queue
import secrets
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import AsyncGenerator, Callable, Mapping
from concurrent.futures import Future, InvalidStateError
from multiprocessing.connection import Client, Connection, Listener, answer_challenge, deliver_challenge
from pathlib import Path
from typing import Any

from palestra.cluster.network import use_network_of
from palestra.cluster.versions import OtherVersion, refuse_other, versions
from palestra.errors import PalestraError
from palestra.track.trace import Tracer
from palestra.work.fanout import Backend, Handle, WorkItem

log = logging.getLogger("palestra.cluster")

BEAT_SECONDS = 1.0
SILENT_SECONDS = 10.0  # without a beat an actor counts as stopped or cut off
START_SECONDS = 180.0  # for a process to start, import and connect
END_SECONDS = 5.0  # for an actor to end when asked to


class ActorLost(PalestraError):
    """A hosted object whose process died, stopped answering or was cut off; another can be asked instead."""


class _Wire:
    """A connection whose sends never block their caller."""

    def __init__(self, connection: Connection):
        self._connection = connection
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write, name="actor-write", daemon=True)
        self._thread.start()
        self.recv = connection.recv

    def send(self, *message: Any) -> None:
        self._outbox.put(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))

    def close(self, seconds: float = 0.0) -> None:
        """Cut the connection, after at most `seconds` for what is still to be sent; readers get EOFError."""
        self._outbox.put(None)
        self._thread.join(seconds)
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self._connection.fileno())) as line:
            line.shutdown(socket.SHUT_RDWR)

    def _write(self) -> None:
        with contextlib.suppress(OSError):
            while (message := self._outbox.get()) is not None:
                self._connection.send_bytes(message)


class Actor:
    """A hosted object, as its owner sees it."""

    def __init__(self, name: str):
        self.name, self.machine, self.pid = name, "", 0
        self.status: dict[str, Any] = {}
        """What it last said of itself, with a beat."""
        self.ready: Future[None] = Future()
        """Done when the object is made; fails with ActorLost."""
        self.lost: ActorLost | None = None
        self.began = self.heard = time.monotonic()
        self.handle: Handle | None = None
        self.key = secrets.token_hex(16)
        self._wire: _Wire | None = None
        self._early: list[tuple[Any, ...]] = []  # asked before it has connected
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._calls: dict[int, Future[Any]] = {}
        self._streams: dict[int, Callable[[Any], None]] = {}
        self.when_lost: list[Callable[[Actor], None]] = []

    def call(self, method: str, *args: Any) -> "Future[Any]":
        """Call a method there; cancelling the future cancels it, where it is a coroutine."""
        future: Future[Any] = Future()
        number = self._begin(self._calls, future)
        if number is None:
            future.set_exception(self.lost)
        else:
            future.add_done_callback(lambda ended: self._stop(number) if ended.cancelled() else None)
            self._send("call", number, method, args)
        return future

    async def stream(self, method: str, *args: Any) -> AsyncGenerator[Any, None]:
        """The items of an asynchronous generator there; closing it closes that."""
        loop, items = asyncio.get_running_loop(), asyncio.Queue()
        number = self._begin(self._streams, lambda item: loop.call_soon_threadsafe(items.put_nowait, item))
        if number is None:
            raise self._gone()
        self._send("call", number, method, args)
        try:
            while True:
                kind, value = await items.get()
                if kind == "error":
                    raise value
                if kind == "value":
                    return
                yield value
        finally:
            if self._streams.pop(number, None) is not None:
                self._stop(number)

    def end(self) -> None:
        """Ask it to end."""
        self._send("end")

    def lose(self, why: str) -> None:
        """Give it up: what was asked of it fails, and its process is killed."""
        with self._lock:
            if self.lost is not None:
                return
            self.lost = ActorLost(f"{self.name} {why}")
            calls, streams = list(self._calls.values()), list(self._streams.values())
            self._calls.clear()
            self._streams.clear()
        for future in (self.ready, *calls):
            with contextlib.suppress(InvalidStateError):
                future.set_exception(self.lost)
        for deliver in streams:
            with contextlib.suppress(RuntimeError):  # its loop is gone
                deliver(("error", self.lost))
        if self._wire is not None:
            self._wire.close()
        if self.handle is not None:
            self.handle.cancel()
        for told in self.when_lost:
            told(self)

    def connected(self, wire: _Wire, machine: str, pid: int) -> None:
        with self._lock:
            self._wire, self.machine, self.pid, self.heard = wire, machine, pid, time.monotonic()
            for message in self._early:
                wire.send(*message)

    def receive(self, kind: str, *values: Any) -> bool:
        """A message from the host; False where it answers nothing that was asked, as after it was given up."""
        self.heard = time.monotonic()
        if kind == "beat":
            self.status = values[0]
        elif kind == "ready":
            with contextlib.suppress(InvalidStateError):
                self.ready.set_result(None)
        else:
            return self._answer(kind, *values)
        return True

    def _answer(self, kind: str, number: int, value: Any) -> bool:
        with self._lock:
            deliver = self._streams.get(number) if kind == "item" else self._streams.pop(number, None)
            future = self._calls.pop(number, None)
        if deliver is not None:
            with contextlib.suppress(RuntimeError):
                deliver((kind, value))
        elif future is not None:
            with contextlib.suppress(InvalidStateError):  # cancelled meanwhile
                future.set_result(value) if kind == "value" else future.set_exception(value)
        return deliver is not None or future is not None

    def _begin(self, waiting: dict[int, Any], what: Any) -> int | None:
        with self._lock:
            if self.lost is not None:
                return None
            number = next(self._numbers)
            waiting[number] = what
            return number

    def _gone(self) -> ActorLost:
        assert self.lost is not None
        return self.lost

    def _stop(self, number: int) -> None:
        self._calls.pop(number, None)
        self._send("stop", number)

    def _send(self, *message: Any) -> None:
        with self._lock:
            if self._wire is None:
                self._early.append(message)
            else:
                self._wire.send(*message)


class Hub:
    """Starts hosted objects by a backend, takes their connections, and gives up those that no longer answer."""

    def __init__(
        self,
        backend: Backend,
        *,
        machine: str = "127.0.0.1",
        silence: float = SILENT_SECONDS,
        spec: Mapping[str, Any] | None = None,
    ):
        """`machine` is this one's address for the hosts; they must read the `spec`, plain data, as it is read here."""
        self._backend, self._silence, self._spec, self._versions = backend, silence, spec, versions(spec)
        self._secret = secrets.token_bytes(32)
        self._listener = Listener((machine, 0), backlog=64)
        use_network_of(machine)
        self._actors: dict[str, Actor] = {}  # by their keys
        self._closed = threading.Event()
        self.late = 0
        """Answers that came after their actor was given up, or after nobody waited for them: refused."""
        for target in (self._accept, self._watch):
            threading.Thread(target=target, name=f"hub{target.__name__}", daemon=True).start()

    def start(
        self,
        name: str,
        make: Callable[..., Any],
        *args: Any,
        cores: int = 1,
        gpu: str | None = None,
        log: Path | None,
        trace: Path | None = None,
    ) -> Actor:
        """Host `make(*args)` in a process of its own, whose spans are in `trace`."""
        actor = Actor(name)
        self._actors[actor.key] = actor
        arguments = (self._listener.address, self._secret, name, actor.key, self._spec, trace, make, args)
        item = WorkItem(name, host, cores=cores, gpu=0.0 if gpu is None else 1.0, log=log)
        actor.handle = self._backend.submit(item, arguments, gpu)
        actor.handle.add_done_callback(lambda handle: actor.lose(_why_ended(handle)))
        return actor

    def close(self) -> None:
        """End all actors, and the backend's workers."""
        self._closed.set()
        for actor in self._actors.values():
            actor.end()
        deadline = time.monotonic() + END_SECONDS
        for actor in self._actors.values():
            while actor.handle is not None and not actor.handle.done() and time.monotonic() < deadline:
                time.sleep(0.02)
            actor.lose("was ended")
        self._listener.close()
        self._backend.close()

    def _accept(self) -> None:
        while not self._closed.is_set():
            with contextlib.suppress(OSError, EOFError):
                connection = self._listener.accept()
                threading.Thread(target=self._serve, args=(connection,), name="hub-read", daemon=True).start()

    def _serve(self, connection: Connection) -> None:
        """Read what one host sends, until it is gone."""
        actor = None
        try:
            deliver_challenge(connection, self._secret)
            answer_challenge(connection, self._secret)
            _, _, key, theirs, pid, machine = connection.recv()
            actor = self._actors[key]
            actor.connected(_Wire(connection), machine, pid)
            try:
                refuse_other(self._versions, theirs, machine)
            except OtherVersion as error:
                actor.lose(f"cannot be used: {error}")
            while True:
                message = connection.recv()
                if not actor.receive(*message):
                    self.late += 1
                    log.warning("a late answer of %s is refused", actor.name)
        except Exception as error:  # whoever else connects is turned away
            if actor is not None and actor.lost is None:
                # The process itself tells more than its connection, a moment later.
                self._closed.wait(1.0)
                actor.lose(f"closed its connection: {error or type(error).__name__}")
        finally:
            connection.close()

    def _watch(self) -> None:
        while not self._closed.wait(0.5):
            now = time.monotonic()
            for actor in list(self._actors.values()):
                if actor.lost is None and actor.pid and now - actor.heard > self._silence:
                    actor.lose(f"(process {actor.pid} on {actor.machine}) has not answered for {self._silence:g} s")
                elif actor.lost is None and not actor.pid and now - actor.began > START_SECONDS:
                    actor.lose(f"did not connect within {START_SECONDS:g} s")


def _why_ended(handle: Handle) -> str:
    try:
        handle.result()
    except BaseException as error:
        return f"ended: {error}"
    return "ended"


def host(
    address: tuple[str, int],
    secret: bytes,
    name: str,
    key: str,
    spec: Mapping[str, Any] | None,
    trace: Path | None,
    make: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    """In the other process: make the object, and answer calls until the owner ends it or is gone."""
    use_network_of(*address)
    wire = _Wire(Client(address, authkey=secret))
    wire.send("hello", name, key, versions(spec), os.getpid(), socket.gethostname())
    made: list[Any] = []
    ended = threading.Event()
    tracer = None if trace is None else Tracer(trace, append=True, track=name)

    def beat() -> None:
        while not ended.wait(BEAT_SECONDS):
            if tracer is not None:
                tracer.flush()
            status = getattr(made[0], "status", None) if made else None
            wire.send("beat", {} if status is None else status())

    threading.Thread(target=beat, name="beat", daemon=True).start()
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    made.append(make(*args))
    wire.send("ready")
    try:
        asyncio.run(_answer_calls(made[0], wire))
    finally:
        ended.set()
        close = getattr(made[0], "close", None)
        if close is not None:
            close()
        if tracer is not None:
            tracer.close()
        wire.close(1.0)


async def _answer_calls(thing: Any, wire: _Wire) -> None:
    loop, tasks = asyncio.get_running_loop(), dict[int, asyncio.Task[None]]()
    over = loop.create_future()

    def read() -> None:
        with contextlib.suppress(EOFError, OSError, RuntimeError):
            while (message := wire.recv())[0] != "end":
                loop.call_soon_threadsafe(handle, *message)
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(over.set_result, None)

    def handle(kind: str, number: int, method: str = "", args: tuple[Any, ...] = ()) -> None:
        if kind == "stop":
            if number in tasks:
                tasks[number].cancel()
            return
        tasks[number] = loop.create_task(_answer(thing, number, method, args, wire))
        tasks[number].add_done_callback(lambda _: tasks.pop(number))

    threading.Thread(target=read, name="read", daemon=True).start()
    await over
    for task in tasks.values():
        task.cancel()


async def _answer(thing: Any, number: int, method: str, args: tuple[Any, ...], wire: _Wire) -> None:
    try:
        function = getattr(thing, method)
        if inspect.isasyncgenfunction(function):
            async with contextlib.aclosing(function(*args)) as items:
                async for item in items:
                    wire.send("item", number, item)
            value = None
        else:
            value = await (
                function(*args) if inspect.iscoroutinefunction(function) else asyncio.to_thread(function, *args)
            )
        wire.send("value", number, value)
    except Exception as error:
        wire.send("error", number, _portable(error))


def _portable(error: Exception) -> Exception:
    """The exception, or its text where it cannot be sent."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return PalestraError("".join(traceback.format_exception(error)).rstrip())
    return error
