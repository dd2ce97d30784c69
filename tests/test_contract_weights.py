"""The contract of weight updates: every way in which weights reach a generator passes this suite unchanged.

A version is whole or refused, and what is refused, or never arrives, changes nothing. A new channel is one function
that opens it over a tiny engine, and one line in `CHANNELS`.
"""

import asyncio
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import pytest
import safetensors.torch
import torch
from tiny_server import KEY, serving, tiny_engine, tiny_model
from torch import Tensor

from palestra.cluster.broadcast import Broadcast
from palestra.cluster.channel import WeightChannel, fetch_newest, open_channel
from palestra.cluster.files import Files
from palestra.cluster.memory import CudaMemory, SharedMemory
from palestra.data.remote import open_filesystem
from palestra.errors import PalestraError, UsageError
from palestra.generate.client import HttpGenerator
from palestra.generate.engine.engine import Engine

Weights = Mapping[str, Tensor]


@dataclass(frozen=True)
class Channel:
    """A writer's and a reader's end."""

    publish: Callable[[int, Weights], None]
    """Returns once the version is in place; raises where it is refused."""
    newest: Callable[[], int]
    fetch: Callable[[], Weights]
    """The tensors of the newest version."""


@contextmanager
def in_process() -> Iterator[Channel]:
    engine = tiny_engine()
    yield Channel(lambda version, weights: engine.publish(weights, version), *_read(engine))


@contextmanager
def uploaded() -> Iterator[Channel]:
    with serving() as (address, engine):

        async def upload(version: int, weights: Weights) -> None:
            async with HttpGenerator(address, KEY) as generator:
                await generator.publish(weights, version)

        yield Channel(lambda version, weights: asyncio.run(upload(version, weights)), *_read(engine, address))


@contextmanager
def from_a_file() -> Iterator[Channel]:
    with serving() as (address, engine), TemporaryDirectory() as folder:

        def publish(version: int, weights: Weights) -> None:
            path = Path(folder) / f"{version}.safetensors"
            safetensors.torch.save_file(dict(weights), path)
            body, key = {"path": str(path), "version": version}, {"Authorization": f"Bearer {KEY}"}
            response = httpx.post(f"{address}/update_weights", json=body, headers=key)
            if response.is_error:
                raise UsageError(response.text)

        yield Channel(publish, *_read(engine, address))


def carried(open_writer: Callable[[], AbstractContextManager[WeightChannel]]) -> Callable[..., Any]:
    """An engine that takes over the newest version of a writer, through the address that other processes open."""

    @contextmanager
    def channel() -> Iterator[Channel]:
        engine, turns = tiny_engine(), threading.Lock()
        with open_writer() as writer:
            reader = open_channel(writer.address)

            def publish(version: int, weights: Weights) -> None:
                writer.publish(version, weights)
                with turns:
                    newest, tensors = fetch_newest(reader)
                    if newest > engine.version:
                        engine.publish(tensors, newest)

            yield Channel(publish, *_read(engine))

    return channel


@contextmanager
def folder() -> Iterator[Files]:
    with TemporaryDirectory() as path:
        yield Files(path, whole_every=3)


@contextmanager
def bucket() -> Iterator[Files]:
    pytest.importorskip("s3fs", reason="needs the extra s3")
    from s3_server import s3_server

    with s3_server() as s3, pytest.MonkeyPatch.context() as patch:
        for name, value in s3.environment.items():
            patch.setenv(name, value)
        files, _ = open_filesystem("s3://weights")
        files.mkdir("weights")
        yield Files("s3://weights/run", whole_every=3)


def _read(engine: Engine, address: str | None = None) -> tuple[Callable[[], int], Callable[[], Weights]]:
    def newest() -> int:
        return engine.version if address is None else httpx.get(f"{address}/health").json()["version"]

    return newest, lambda: {name: tensor.clone() for name, tensor in engine.model.state_dict().items()}


CHANNELS = {
    "engine": in_process,
    "upload": uploaded,
    "file": from_a_file,
    "shm": carried(lambda: closing(SharedMemory())),
    "cuda": carried(lambda: closing(CudaMemory())),
    "files": carried(folder),
    "s3": carried(bucket),
    "broadcast": carried(lambda: closing(Broadcast())),
}
MARKS = {
    "s3": pytest.mark.slow,
    "cuda": pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
}


@pytest.fixture(params=[pytest.param(opened, id=name, marks=MARKS.get(name, ())) for name, opened in CHANNELS.items()])
def opened(request: pytest.FixtureRequest) -> Callable[[], AbstractContextManager[Channel]]:
    return request.param


def weights_of(seed: int) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tiny_model(seed).state_dict().items()}


def same(a: Weights, b: Weights) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_published_version_is_the_newest_and_holds_the_tensors_that_were_sent(opened) -> None:
    with opened() as channel:
        assert (channel.newest(), same(channel.fetch(), weights_of(0))) == (0, True)
        for version, seed in ((1, 1), (2, 2), (7, 3)):
            channel.publish(version, weights_of(seed))
            assert (channel.newest(), same(channel.fetch(), weights_of(seed))) == (version, True)


def test_tensors_the_writer_changes_afterwards_stay_as_published(opened) -> None:
    weights = weights_of(1)
    with opened() as channel:
        channel.publish(1, weights)
        for tensor in weights.values():
            tensor.zero_()
        assert same(channel.fetch(), weights_of(1))


def test_order_of_names_and_precision_of_the_writer_do_not_matter(opened) -> None:
    rounded = {name: tensor.bfloat16() for name, tensor in reversed(weights_of(1).items())}
    with opened() as channel:
        channel.publish(1, rounded)
        fetched = channel.fetch()
        assert all(torch.equal(fetched[name], tensor.float()) for name, tensor in rounded.items())


def broken(kind: str) -> dict[str, Tensor]:
    weights = weights_of(1)
    if kind == "missing":
        del weights["norm.weight"]
    elif kind == "extra":
        weights["extra.weight"] = torch.zeros(2)
    elif kind == "shape":
        weights["norm.weight"] = torch.zeros(3)
    else:
        weights["norm.weight"][5] = float(kind)
    return weights


@pytest.mark.parametrize("kind", ["missing", "extra", "shape", "nan", "inf"])
def test_version_that_does_not_fit_is_refused_by_the_tensors_name_and_changes_nothing(opened, kind: str) -> None:
    with opened() as channel:
        channel.publish(1, weights_of(2))
        with pytest.raises(UsageError, match="extra.weight" if kind == "extra" else "norm.weight"):
            channel.publish(2, broken(kind))
        assert (channel.newest(), same(channel.fetch(), weights_of(2))) == (1, True)
        channel.publish(3, weights_of(3))
        assert same(channel.fetch(), weights_of(3))


class Dying(Mapping[str, Tensor]):
    """Weights whose source fails at its last tensor."""

    def __init__(self, weights: Weights):
        self._weights = weights

    def __len__(self) -> int:
        return len(self._weights)

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __getitem__(self, name: str) -> Tensor:
        if name == list(self)[-1]:
            raise OSError("the writer is gone")
        return self._weights[name]


def test_writer_that_dies_halfway_changes_nothing(opened) -> None:
    with opened() as channel:
        with pytest.raises((OSError, PalestraError)):
            channel.publish(1, Dying(weights_of(1)))
        assert (channel.newest(), same(channel.fetch(), weights_of(0))) == (0, True)


def test_writers_at_the_same_time_leave_one_whole_version(opened) -> None:
    with opened() as channel:

        def publish(version: int) -> None:
            with suppress(UsageError):  # refused where a newer one came first
                channel.publish(version, weights_of(version))

        threads = [threading.Thread(target=publish, args=(n,)) for n in range(1, 5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert same(channel.fetch(), weights_of(channel.newest()))


def test_upload_that_breaks_off_changes_nothing() -> None:
    data = safetensors.torch.save(weights_of(1))

    def half() -> Iterator[bytes]:
        yield data[: len(data) // 2]
        raise OSError("the writer is gone")

    with serving() as (address, engine):
        headers = {"Authorization": f"Bearer {KEY}", "Content-Length": str(len(data))}
        with pytest.raises((OSError, httpx.HTTPError)):
            httpx.put(f"{address}/update_weights", params={"version": 1}, content=half(), headers=headers)
        newest, fetch = _read(engine, address)
        assert (newest(), same(fetch(), weights_of(0))) == (0, True)
        # A file that is cut off but sent whole is refused too.
        response = httpx.put(
            f"{address}/update_weights",
            params={"version": 1},
            content=data[:-8],
            headers=headers | {"Content-Length": str(len(data) - 8)},
        )
        assert response.status_code == 400
        assert newest() == 0
