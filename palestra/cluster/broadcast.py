"""Weights by collective broadcast: a group of the writer and those who ask, made for one version and then dropped.

All but the tensors goes through a store in the writer's process: a reader leaves `request/K`, a thread of the writer
answers with `reply/K`, which names the group, and both join it. torch's default group has no part in this.
"""

import atexit
import functools
import json
import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor

from palestra.cluster.channel import Buffer, ChannelError, Layout, Weights, as_source, check_newer, checksum
from palestra.errors import UsageError

log = logging.getLogger("palestra.cluster")

Result = TypeVar("Result")
_EMPTY = Buffer(Layout(()), torch.empty(0, dtype=torch.uint8))
SECONDS = 30.0  # without progress, after which a peer counts as dead or stopped


@dataclass(eq=False)
class _Version:
    """The tensors of a version, complete or on the way, and who has them."""

    version: int
    buffer: Buffer
    wanted: int
    """Readers that the first group waits for."""
    served: int = 0
    sums: list[Future[int]] = field(default_factory=list)
    """Checksums of the chunks that are being filled."""
    failure: str | None = None
    changed: threading.Condition = field(default_factory=threading.Condition)

    def change(self, **values: Any) -> None:
        with self.changed:
            for name, value in values.items():
                setattr(self, name, value)
            self.changed.notify_all()

    def chunks(self) -> Iterator[tuple[Tensor, int]]:
        """Each chunk and its checksum once it is filled."""
        for number, chunk in enumerate(self.buffer.chunks):
            with self.changed:
                self.changed.wait_for(lambda number=number: len(self.sums) > number or self.failure)
                if len(self.sums) <= number:
                    raise ChannelError(f"version {self.version} was not completed: {self.failure}")
            yield chunk, self.sums[number].result()


class Broadcast:
    """The writer's end. `publish` returns when `readers` of them have the version; later ones get it when they ask."""

    def __init__(self, host: str = "127.0.0.1", port: int = 0, *, device: str = "cpu", seconds: float = SECONDS):
        self.readers = 0
        self._device, self._seconds = device, seconds
        self._store = _store(host, port, seconds, serve=True)
        self.address = f"broadcast:{host}:{self._store.port}"
        self._newest: _Version | None = None
        self._offered: _Version | None = None  # on its way
        self._serving: _Version | None = None
        self._spare = _EMPTY
        self._publishing = threading.Lock()
        self._store.set("newest", json.dumps([-1, device]))
        self._thread = threading.Thread(target=self._serve, args=(host,), name="broadcast", daemon=True)
        self._thread.start()
        atexit.register(self.close)  # a thread inside torch must not be there when the interpreter ends

    def publish(self, version: int, source: Weights) -> None:
        source = as_source(source)
        with self._publishing:
            check_newer(version, self.newest())
            layout = Layout.of(source)
            if layout != self._spare.layout:
                flat = torch.empty(layout.offsets[-1], dtype=torch.uint8, device=self._device)
                self._spare = Buffer(layout, flat)
            self._offered = offered = _Version(version, self._spare, self.readers)
            _request(self._store)
            try:
                with ThreadPoolExecutor(1) as pool:  # the wire is slower than one thread
                    for filled in self._spare.pack(source, pool):
                        offered.change(sums=[*offered.sums, filled])
                for filled in offered.sums:
                    filled.result()
            except BaseException as error:
                self._offered = None
                offered.change(failure=f"its source failed with {type(error).__name__}")
                raise
            previous, self._newest, self._offered = self._newest, offered, None
            self._store.set("newest", json.dumps([version, self._device]))
            _request(self._store)
            self._spare = _EMPTY if previous is None or self._serving is previous else previous.buffer
            self._await_readers(offered)

    def newest(self) -> int:
        return -1 if self._newest is None else self._newest.version

    def fetch(self, version: int) -> Iterator[tuple[str, Tensor]]:
        return BroadcastReader(self.address.partition(":")[2], seconds=self._seconds).fetch(version)

    def close(self) -> None:
        if self._thread.is_alive():
            _request(self._store, close=True)
            self._thread.join(self._seconds)

    def _await_readers(self, offered: _Version) -> None:
        wanted = offered.wanted
        with offered.changed:
            while not offered.changed.wait_for(lambda: offered.served >= wanted or offered.failure, self._seconds):
                if self._serving is not offered:  # else the thread has a limit of its own
                    break
            if offered.served >= wanted:
                return
            offered.wanted = 0
        _request(self._store)  # those who did ask need not wait longer
        raise ChannelError(
            f"version {offered.version} is published, but not all of {wanted} readers took it: "
            f"{offered.failure or f'fewer asked within {self._seconds:g} s'}. Replace what died or stopped; the others "
            "fetch it again"
        )

    def _serve(self, host: str) -> None:
        """Take requests in their order until one says to close."""
        store = _store(host, self._store.port, self._seconds)
        waiting: dict[int, int] = {}
        for number in range(1, 1 << 62):
            store.wait([f"request/{number}"], timedelta(days=365))
            request = json.loads(store.get(f"request/{number}"))
            store.delete_key(f"request/{number}")
            if request.get("close"):
                return
            waiting.pop(request.get("cancel"), None)
            if "version" in request:
                waiting[number] = request["version"]
            for version in filter(None, (self._offered, self._newest)):
                self._answer(store, version, waiting)

    def _answer(self, store: Any, version: _Version, waiting: dict[int, int]) -> None:
        """Serve those who wait for this version, once the first of its groups is complete."""
        group = [number for number, wanted in waiting.items() if wanted == version.version]
        if group and (version.served or version.failure or len(group) >= version.wanted):
            for number in group:
                del waiting[number]
            self._serving = version
            try:
                self._send(store, version, group)
            except (RuntimeError, ChannelError) as error:
                reason = str(error).splitlines()[0]
                log.warning("broadcast of version %d to %d readers ended: %s", version.version, len(group), reason)
                version.change(failure=version.failure or reason)
            else:
                version.change(served=version.served + len(group))
            self._serving = None
        for number in [number for number, wanted in waiting.items() if wanted < self.newest()]:
            del waiting[number]
            store.set(f"reply/{number}", json.dumps({"newest": self.newest()}))

    def _send(self, store: Any, version: _Version, group: list[int]) -> None:
        name, size = f"group/{group[0]}", len(group) + 1
        reply = {"group": name, "size": size, "layout": version.buffer.layout.dump()}
        for rank, number in enumerate(group, 1):
            store.set(f"reply/{number}", json.dumps({**reply, "rank": rank}))
        peers = _Group(store, name, 0, size, self._device, self._seconds)
        try:
            sums, sent = [], []
            for chunk, filled in version.chunks():
                sent.append(peers.broadcast(chunk))
                sums.append(filled)
            sent.append(peers.broadcast(torch.tensor(sums, dtype=torch.int64, device=self._device)))
            for wait in sent:
                wait()
            store.wait([f"{name}/{rank}" for rank in range(1, size)], timedelta(seconds=self._seconds))
        finally:
            peers.close()
            for number in group:
                store.delete_key(f"reply/{number}")


class BroadcastReader:
    """A reader's end."""

    def __init__(self, place: str, *, seconds: float = SECONDS):
        host, _, port = place.rpartition(":")
        if not host or not port.isdigit():
            raise UsageError(f"broadcast:{place} is not the address of a broadcast: expected broadcast:HOST:PORT")
        self.address = f"broadcast:{place}"
        self._seconds = seconds
        self._flat = torch.empty(0, dtype=torch.uint8)
        self._store = self._ask(lambda: _store(host, int(port), seconds))

    def publish(self, version: int, source: Weights) -> None:
        raise UsageError(f"{self.address} is open for reading here: publish where it was made")

    def newest(self) -> int:
        return json.loads(self._ask(lambda: self._store.get("newest")))[0]

    def fetch(self, version: int) -> Iterator[tuple[str, Tensor]]:
        device = json.loads(self._ask(lambda: self._store.get("newest")))[1]
        number = self._ask(lambda: _request(self._store, version=version))
        try:
            # The writer may wait as long as it says for the other readers, and be busy with a group before.
            reply = json.loads(self._ask(lambda: self._store.get(f"reply/{number}"), 3))
        except ChannelError:
            self._ask(lambda: _request(self._store, cancel=number))
            raise
        if "group" not in reply:
            raise ChannelError(f"version {version} is not in {self.address}: fetch the newest, {reply['newest']}")
        layout = Layout.load(reply["layout"])
        # Where no tensor of the last version is in use any more, its memory is: pages that are mapped already.
        if _uses(self._flat) > _uses(torch.empty(1)) or self._flat.numel() != layout.offsets[-1]:
            self._flat = torch.empty(layout.offsets[-1], dtype=torch.uint8, device=device)
        buffer = Buffer(layout, self._flat)
        try:
            sums, expected = self._receive(buffer.chunks, reply, device)
        except (RuntimeError, ChannelError) as error:
            raise ChannelError(
                f"version {version} from {self.address} broke off ({str(error).splitlines()[0]}): a peer died or "
                "stopped. Fetch the newest again"
            ) from error
        layout.verify(sums, expected, f"version {version} from {self.address}")
        yield from buffer.views

    def close(self) -> None:
        """Nothing is left open at the writer."""

    def _receive(self, chunks: list[Tensor], reply: dict[str, Any], device: str) -> tuple[list[int], list[int]]:
        """Fill the chunks; their checksums as computed here and as the writer has them."""
        name, rank = reply["group"], reply["rank"]
        peers = _Group(self._store, name, rank, reply["size"], device, self._seconds)
        try:
            expected = torch.zeros(len(chunks), dtype=torch.int64, device=device)
            pending, sums = [peers.broadcast(data) for data in (*chunks, expected)], []
            for chunk, received in zip(chunks, pending, strict=False):
                received()
                sums.append(checksum(chunk))
            pending[-1]()
            self._ask(lambda: self._store.set(f"{name}/{rank}", "done"))
            return sums, expected.tolist()
        finally:
            peers.close()

    def _ask(self, call: Callable[[], Result], patience: float = 1) -> Result:
        try:
            return _within(patience * self._seconds, call)
        except (RuntimeError, ChannelError) as error:
            raise ChannelError(
                f"no answer from {self.address} ({str(error).splitlines()[0]}): its writer died, stopped or has not "
                "published this version"
            ) from error


class _Group:
    """A process group of one broadcast."""

    def __init__(self, store: Any, name: str, rank: int, size: int, device: str, seconds: float):
        import torch.distributed as dist

        self._limit = timedelta(seconds=seconds)
        prefixed = dist.PrefixStore(name, store.clone())  # a call that waits keeps a store from all other callers
        if device == "cpu":
            self._peers: Any = _within(seconds, lambda: dist.ProcessGroupGloo(prefixed, rank, size, self._limit))
        else:
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = self._limit
            self._peers = dist.ProcessGroupNCCL(prefixed, rank, size, options)
        self._options = dist.BroadcastOptions()
        self._options.rootRank, self._options.rootTensor = 0, 0

    def broadcast(self, tensor: Tensor) -> Callable[[], Any]:
        """Begin to send from rank 0, or to receive; call the result to wait for it, at most as long as was said."""
        begin = functools.partial(self._peers.broadcast, [tensor], self._options)
        work = _within(self._limit.total_seconds(), begin) if tensor.is_cuda else begin()  # NCCL connects here
        return lambda: work.wait(self._limit)

    def close(self) -> None:
        """Break off what is not finished."""
        # The last reference goes to a thread: gloo takes 20 ms to end its own, for which nobody need wait.
        threading.Thread(target=lambda peers: peers.abort(), args=(self.__dict__.pop("_peers"),)).start()


def _uses(tensor: Tensor) -> int:
    """How many tensors have this one's memory, and a constant."""
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


def _store(host: str, port: int, seconds: float, serve: bool = False) -> Any:
    from torch.distributed import TCPStore

    return TCPStore(host, port, is_master=serve, timeout=timedelta(seconds=2 * seconds), wait_for_workers=False)


def _request(store: Any, **request: Any) -> int:
    number = store.add("requests", 1)
    store.set(f"request/{number}", json.dumps(request))
    return number


def _within(seconds: float, call: Callable[[], Result]) -> Result:
    """The result of a call that might never return; after so many seconds it is left to its thread."""
    result: Future[Result] = Future()

    def run() -> None:
        try:
            result.set_result(call())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    try:
        return result.result(seconds)
    except TimeoutError as error:
        raise ChannelError(f"nothing within {seconds:g} s") from error
