"""Weights by broadcast: groups of the right readers, and peers that die, stop or never come."""

import json
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Any

import pytest
import torch
from torch import Tensor

from palestra.cluster import broadcast
from palestra.cluster.broadcast import Broadcast, BroadcastReader
from palestra.cluster.channel import CHUNK, ChannelError, Entry, MappingSource, fetch_newest, open_channel
from palestra.errors import PalestraError

WEIGHTS = {
    "first": torch.zeros(CHUNK, dtype=torch.int8),
    "big": torch.arange(3 * CHUNK // 8 + 5),
    "small": torch.ones(3).bfloat16(),
}


def same(tensors: dict[str, Tensor]) -> bool:
    return all(torch.equal(tensor, WEIGHTS[name]) for name, tensor in tensors.items()) and len(tensors) == 3


class Fetching(threading.Thread):
    """A fetch in a thread, and what came of it."""

    def __init__(self, address: str, version: int, seconds: float = 30.0):
        super().__init__()
        self.version, self.error, self.tensors = version, None, {}
        self._reader = BroadcastReader(address.partition(":")[2], seconds=seconds)
        self.start()

    def run(self) -> None:
        try:
            self.tensors = dict(self._reader.fetch(self.version))
        except PalestraError as error:
            self.error = error


def test_publish_returns_when_its_readers_have_the_version_and_later_ones_get_it_alone() -> None:
    with closing(Broadcast()) as writer:
        writer.readers = 2
        fetching = [Fetching(writer.address, 3) for _ in range(2)]
        writer.publish(3, WEIGHTS)
        for each in fetching:
            each.join()
        assert [same(each.tensors) for each in fetching] == [True, True]
        assert same(dict(open_channel(writer.address).fetch(3)))


def test_readers_that_learn_of_a_version_from_newest_are_waited_for_too() -> None:
    with closing(Broadcast()) as writer:
        writer.readers = 1
        publishing = threading.Thread(target=writer.publish, args=(0, WEIGHTS))
        publishing.start()
        reader = open_channel(writer.address)
        while reader.newest() < 0:
            time.sleep(0.01)
        assert publishing.is_alive()
        assert same(fetch_newest(reader)[1])
        publishing.join()


def test_reader_that_asks_early_waits_for_its_version_and_one_that_gives_up_is_not_waited_for() -> None:
    with closing(Broadcast(seconds=5)) as writer:
        early = Fetching(writer.address, 1)
        impatient = Fetching(writer.address, 2, seconds=0.5)
        impatient.join()
        assert "no answer from" in str(impatient.error)
        assert "has not published" in str(impatient.error)
        for version in (1, 2):
            writer.publish(version, WEIGHTS)
            assert same(dict(open_channel(writer.address).fetch(version)))
        early.join()
        assert same(early.tensors)


def test_reader_that_never_comes_ends_publish_within_its_limit_and_the_version_is_there() -> None:
    with closing(Broadcast(seconds=0.5)) as writer:
        writer.readers = 2
        with pytest.raises(ChannelError, match=r"version 0 is published, but not all of 2 .* asked within 0.5 s"):
            writer.publish(0, WEIGHTS)
        # One that asked and is gone before the group is made.
        reader = BroadcastReader(writer.address.partition(":")[2])
        broadcast._request(reader._store, version=1)
        writer.readers = 1
        with pytest.raises(ChannelError, match="version 1 is published, but"):
            writer.publish(1, WEIGHTS)
        assert writer._newest is not None
        while writer._newest.failure is None:  # the thread has given that one up
            time.sleep(0.01)
        writer._seconds = 30.0  # for a slow machine
        assert same(dict(reader.fetch(1)))


def test_source_that_fails_ends_the_readers_fetch_and_leaves_the_version_before() -> None:
    class Failing:
        def metadata(self) -> Sequence[Entry]:
            return MappingSource(WEIGHTS).metadata()

        def __iter__(self) -> Iterator[tuple[str, Tensor]]:
            yield "first", WEIGHTS["first"]
            yield "big", WEIGHTS["big"]
            time.sleep(0.2)
            raise OSError("the trainer is gone")

    with closing(Broadcast(seconds=5)) as writer:
        writer.publish(0, WEIGHTS)
        writer.readers = 1
        fetching = Fetching(writer.address, 1, seconds=5)
        time.sleep(0.2)
        with pytest.raises(OSError, match="the trainer is gone"):
            writer.publish(1, Failing())
        fetching.join()
        assert "broke off" in str(fetching.error) or "no answer" in str(fetching.error)
        assert (writer.newest(), open_channel(writer.address).newest()) == (0, 0)
        assert same(dict(writer.fetch(0)))


def test_damaged_bytes_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(Broadcast()) as writer:
        writer.publish(0, WEIGHTS)
        reader = open_channel(writer.address)
        real = broadcast.BroadcastReader._receive

        def harmed(*args: Any) -> tuple[list[int], list[int]]:
            sums, expected = real(*args)
            return [sums[0], sums[1] + 1, *sums[2:]], expected

        monkeypatch.setattr(broadcast.BroadcastReader, "_receive", harmed)
        with pytest.raises(ChannelError, match="damaged in big"):
            list(reader.fetch(0))


def test_the_default_process_group_is_not_touched() -> None:
    with closing(Broadcast()) as writer:
        writer.publish(0, WEIGHTS)
        assert same(dict(open_channel(writer.address).fetch(0)))
    assert not torch.distributed.is_initialized()


def read_version(address: str, version: int, seconds: float, to_parent: Any) -> None:
    """A reader process that says when it is about to fetch, and what came of it."""
    torch.set_num_threads(1)
    reader = BroadcastReader(address.partition(":")[2], seconds=seconds)
    to_parent.send("ready")
    try:
        to_parent.send("whole" if same(dict(reader.fetch(version))) else "mixed")
    except PalestraError as error:
        to_parent.send(str(error))


class Slow:
    """Weights that are a second in coming, so that there is a middle."""

    def __init__(self, middle: Any):
        self._middle = middle

    def metadata(self) -> Sequence[Entry]:
        return MappingSource(WEIGHTS).metadata()

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        yield "first", WEIGHTS["first"]
        yield "big", WEIGHTS["big"]
        time.sleep(0.7)
        self._middle()
        yield "small", WEIGHTS["small"]


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_reader_that_dies_or_stops_in_the_middle_ends_it_for_all_and_the_others_fetch_again(how: int) -> None:
    processes, seconds = multiprocessing.get_context("spawn"), 4.0
    with closing(Broadcast(seconds=seconds)) as writer:
        pipes = [processes.Pipe() for _ in range(2)]
        readers = [
            processes.Process(target=read_version, args=(writer.address, 0, seconds, pipe[1]), daemon=True)
            for pipe in pipes
        ]
        for reader in readers:
            reader.start()
        assert [pipe[0].recv() for pipe in pipes] == ["ready", "ready"]
        writer.readers = 2
        began = time.monotonic()
        with pytest.raises(ChannelError, match="version 0 is published, but not all of 2 readers took it"):
            writer.publish(0, Slow(lambda: os.kill(readers[1].pid or 0, how)))
        assert time.monotonic() - began < 4 * seconds  # three limits and what a shared machine adds
        assert pipes[0][0].poll(4 * seconds)
        first = pipes[0][0].recv()
        assert first == "whole" or "broke off" in first
        assert same(dict(open_channel(writer.address).fetch(0)))
        writer.readers = 0
        writer.publish(1, WEIGHTS)
        assert same(dict(open_channel(writer.address).fetch(1)))
        readers[1].kill()
        for reader in readers:
            reader.join()


def write_version(to_parent: Any) -> None:
    torch.set_num_threads(1)
    writer = Broadcast(seconds=4.0)
    writer.publish(0, WEIGHTS)
    to_parent.send(writer.address)
    time.sleep(600)


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_writer_that_dies_or_stops_is_noticed_by_its_readers(how: int) -> None:
    processes = multiprocessing.get_context("spawn")
    ours, theirs = processes.Pipe()
    writer = processes.Process(target=write_version, args=(theirs,), daemon=True)
    writer.start()
    reader = BroadcastReader(ours.recv().partition(":")[2], seconds=2.0)
    assert same(dict(reader.fetch(0)))
    os.kill(writer.pid or 0, how)
    for ask in (lambda: list(reader.fetch(0)), reader.newest):
        with pytest.raises(ChannelError, match=r"no answer from .*its writer died, stopped"):
            ask()
    writer.kill()
    writer.join()


def test_store_of_the_writer_does_not_fill() -> None:
    with closing(Broadcast()) as writer:
        reader = BroadcastReader(writer.address.partition(":")[2])
        for version in range(3):
            writer.publish(version, {"a": torch.ones(3)})
            assert dict(reader.fetch(version))["a"].sum() == 3
        before = writer._store.num_keys()
        for version in range(3, 6):
            writer.publish(version, {"a": torch.ones(3)})
            assert dict(reader.fetch(version))["a"].sum() == 3
        assert json.loads(writer._store.get("newest"))[0] == 5
        assert writer._store.num_keys() - before <= 3 * 6
