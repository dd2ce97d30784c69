"""Weight channels: what every carrier keeps to, and what shared memory and files do on bad days."""

import fcntl
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from conftest import small_disk
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from palestra.cluster import memory
from palestra.cluster.broadcast import Broadcast
from palestra.cluster.channel import (
    CHUNK,
    ChannelError,
    Entry,
    Layout,
    WeightChannel,
    checksum,
    fetch_newest,
    open_channel,
)
from palestra.cluster.files import Files
from palestra.cluster.memory import SharedMemory
from palestra.errors import PalestraError, UsageError

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.complex64, torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16),
]


def every_dtype() -> dict[str, Tensor]:
    return {str(dtype): torch.arange(35).reshape(5, 7).to(dtype) for dtype in DTYPES}


def odd_tensors() -> dict[str, Tensor]:
    tied = torch.randn(6, 4)
    return {
        "transposed": torch.randn(5, 7).T,
        "strided": torch.arange(40.0)[::3],
        "expanded": torch.ones(1, 3).expand(4, 3),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "conjugate": torch.randn(3, dtype=torch.complex64).conj(),
        "embedding": tied,
        "head": tied,
        "nan": torch.tensor([float("nan"), float("inf"), -0.0]),
        "grad": torch.nn.Parameter(torch.randn(3)),
    }


def bits(tensor: Tensor) -> bytes:
    return tensor.detach().resolve_conj().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def equal(fetched: dict[str, Tensor], sent: dict[str, Tensor]) -> bool:
    return list(fetched) == list(sent) and all(
        (a.dtype, a.shape, bits(a)) == (b.dtype, b.shape, bits(b))
        for a, b in zip(fetched.values(), sent.values(), strict=True)
    )


@pytest.fixture(params=["shm", "files", "broadcast"])
def writer(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[WeightChannel]:
    makers: dict[str, Any] = {"shm": SharedMemory, "files": lambda: Files(str(tmp_path)), "broadcast": Broadcast}
    with closing(makers[request.param]()) as channel:
        yield channel


def test_tensors_of_every_dtype_and_form_come_back_bit_for_bit(writer: WeightChannel) -> None:
    reader = open_channel(writer.address)
    assert reader.newest() == -1
    with pytest.raises(ChannelError, match="publish one first"):
        fetch_newest(reader)
    for version, tensors in enumerate((every_dtype(), odd_tensors(), {})):
        writer.publish(version, tensors)
        assert (reader.newest(), equal(dict(reader.fetch(version)), tensors)) == (version, True)


def test_version_that_is_not_newer_is_refused_by_number(writer: WeightChannel) -> None:
    writer.publish(4, {"a": torch.ones(2)})
    for version in (4, 3):
        with pytest.raises(UsageError, match=f"version {version} is not newer than 4"):
            writer.publish(version, {"a": torch.zeros(2)})
    assert equal(dict(open_channel(writer.address).fetch(4)), {"a": torch.ones(2)})


def test_version_that_is_not_there_is_refused_with_the_newest(writer: WeightChannel) -> None:
    writer.publish(4, {"a": torch.ones(2)})
    with pytest.raises(ChannelError, match=r"version 2 is not in .*newest, 4"):
        list(open_channel(writer.address).fetch(2))


def test_fetched_tensors_stay_of_their_version_and_changing_them_changes_no_other_reader(writer: WeightChannel) -> None:
    first, second = open_channel(writer.address), open_channel(writer.address)
    writer.publish(0, {"a": torch.zeros(5000)})
    kept = dict(first.fetch(0))
    kept["a"][7] = 1.0
    assert equal(dict(second.fetch(0)), {"a": torch.zeros(5000)})
    for version in range(1, 5):
        writer.publish(version, {"a": torch.full((5000,), float(version))})
    assert kept["a"].sum() == 1.0
    assert fetch_newest(second)[1]["a"].sum() == 5000 * 4


class Announced:
    """A source that announces one thing and gives another."""

    def __init__(self, metadata: Sequence[Entry], given: dict[str, Tensor]):
        self._metadata, self._given = metadata, given

    def metadata(self) -> Sequence[Entry]:
        return self._metadata

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return iter(self._given.items())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"a": torch.ones(2)}, "announced b .* gave nothing"),
        ({"a": torch.ones(2), "c": torch.ones(2)}, "announced b .* gave c"),
        ({"a": torch.ones(3), "b": torch.ones(2)}, r"announced a .* gave a \(3,\)"),
        ({"a": torch.ones(2).double(), "b": torch.ones(2)}, r"announced a .*float64"),
        ({"a": torch.ones(2), "b": torch.ones(2), "c": torch.ones(2)}, "gave c, which"),
    ],
)
def test_source_that_is_not_as_its_metadata_says_is_refused_by_name(writer, given, message: str) -> None:
    metadata = [Entry("a", (2,), torch.float32), Entry("b", (2,), torch.float32)]
    writer.publish(0, {"a": torch.ones(1)})
    with pytest.raises(UsageError, match=message):
        writer.publish(1, Announced(metadata, given))
    writer.publish(1, Announced(metadata, {"a": torch.ones(2), "b": torch.ones(2)}))
    assert list(dict(open_channel(writer.address).fetch(1))) == ["a", "b"]


def test_addresses_of_no_channel_and_readers_that_publish_are_refused() -> None:
    for address in ("nowhere", "http://host", "shm:"):
        with pytest.raises(UsageError, match="not the address of a weight channel"):
            open_channel(address)
    with pytest.raises(UsageError, match="HOST:PORT"):
        open_channel("broadcast:7")
    with closing(SharedMemory()) as writer, pytest.raises(UsageError, match="publish where it was made"):
        open_channel(writer.address).publish(0, {})


@given(st.binary(min_size=1, max_size=20_000), st.data())
def test_checksum_shows_a_changed_byte_and_moved_rows(data: bytes, draw: st.DataObject) -> None:
    tensor = torch.frombuffer(bytearray(data * 3), dtype=torch.uint8)
    before = checksum(tensor)
    assert checksum(tensor.clone()) == before
    position = draw.draw(st.integers(0, tensor.numel() - 1))
    tensor[position] ^= draw.draw(st.integers(1, 255))
    assert checksum(tensor) != before
    rows = torch.arange(2 * 1024).view(torch.uint8).view(2, -1)
    assert checksum(rows.flatten()) != checksum(rows.flip(0).flatten())


def test_layout_names_the_tensors_of_a_damaged_chunk() -> None:
    sizes = {"a": 100, "big": 2 * CHUNK, "next": CHUNK, "b": 100}
    layout = Layout(tuple(Entry(name, (size,), torch.uint8) for name, size in sizes.items()))
    assert Layout.load(json.loads(json.dumps(layout.dump()))) == layout
    for chunk, names in enumerate(("a … big:", "damaged in big:", "big … next:", "next … b:")):
        with pytest.raises(ChannelError, match=names):
            layout.verify([0] * 4, [int(number == chunk) for number in range(4)], "it")


# Shared memory


def slots(channel: SharedMemory) -> set[str]:
    return {name for name in os.listdir(channel.address.partition(":")[2]) if name.isdigit()}


def test_slot_is_freed_when_nobody_reads_it_and_a_killed_reader_holds_none() -> None:
    lock = "import fcntl, sys, time; f = open(sys.argv[1]); fcntl.flock(f, 1); print(flush=True); time.sleep(99)"
    with closing(SharedMemory()) as writer:
        writer.publish(0, {"a": torch.zeros(9)})
        path = f"{writer.address.partition(':')[2]}/0"
        process = subprocess.Popen([sys.executable, "-c", lock, path], stdout=subprocess.PIPE)
        assert process.stdout is not None
        process.stdout.readline()
        for version in range(1, 6):
            writer.publish(version, {"a": torch.full((9,), float(version))})
        assert slots(writer) == {"0", "4", "5"}
        process.kill()
        process.wait()
        reader = open_channel(writer.address)
        held = dict(reader.fetch(5))
        for version in range(6, 9):
            writer.publish(version, {"a": torch.full((9,), float(version))})
        assert slots(writer) == {"5", "7", "8"}
        assert held["a"].sum() == 5 * 9
        del held
        writer.publish(9, {"a": torch.zeros(9)})
        writer.publish(10, {"a": torch.zeros(9)})
        assert slots(writer) == {"9", "10"}


def test_what_a_dead_writer_left_is_removed_by_the_next_and_what_a_living_one_has_is_not() -> None:
    left = memory.ROOT / f"{memory.PREFIX}left-by-a-test"
    left.mkdir()
    (left / "3").write_bytes(b"x")
    with closing(SharedMemory()) as living:
        living.publish(0, {"a": torch.ones(2)})
        with closing(SharedMemory()):
            assert not left.exists()
        assert open_channel(living.address).newest() == 0
        reader = open_channel(living.address)
        held = dict(reader.fetch(0))
    assert held["a"].sum() == 2
    with pytest.raises(ChannelError, match="its writer ended"):
        reader.newest()


def test_damaged_and_overwritten_slots_are_refused() -> None:
    with closing(SharedMemory()) as writer:
        writer.publish(0, {"a": torch.ones(9), "b": torch.ones(9)})
        reader, folder = open_channel(writer.address), Path(writer.address.partition(":")[2])
        with (folder / "0").open("r+b") as file:
            file.seek(memory.START + 64)
            file.write(b"\xff")
        with pytest.raises(ChannelError, match=r"version 0 .* is damaged in a … b"):
            list(reader.fetch(0))
        # What a reader opened just before it was overwritten: locked by the writer, then of another version.
        (folder / "7").hardlink_to(folder / "0")
        with pytest.raises(ChannelError, match="version 7 is not in"):
            list(reader.fetch(7))
        with (folder / "0").open() as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            with pytest.raises(ChannelError, match="version 0 is not in"):
                list(reader.fetch(0))


def test_memory_that_is_full_is_said_before_anything_is_written() -> None:
    class Huge:
        def metadata(self) -> Sequence[Entry]:
            return [Entry("a", (1 << 50,), torch.uint8)]

        def __iter__(self) -> Iterator[tuple[str, Tensor]]:
            raise AssertionError("not asked for")

    with closing(SharedMemory()) as writer:
        with pytest.raises(PalestraError, match="no room for"):
            writer.publish(0, Huge())
        assert os.listdir(writer.address.partition(":")[2]) == []
        writer.publish(0, {"a": torch.ones(2)})


# Files


def names(folder: Path) -> list[str]:
    return sorted(path.name.lstrip("0") for path in folder.iterdir())


@st.composite
def training(draw: st.DrawFn) -> list[dict[str, Tensor]]:
    """Weights that change a little, much, or not at all from one version to the next."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    dtype = draw(st.sampled_from([torch.bfloat16, torch.float32, torch.float64]))
    weights = {"w": torch.randn(40, 9, generator=generator).to(dtype), "e": torch.empty(0, dtype=dtype)}
    versions = [weights]
    for change in draw(st.lists(st.sampled_from(["few", "all", "none", "shape"]), min_size=1, max_size=9)):
        w = versions[-1]["w"].clone()
        if change == "few":
            w[torch.rand(w.shape, generator=generator) < 0.02] *= 1.01
        elif change == "all":
            w = torch.randn(w.shape, generator=generator).to(dtype)
        elif change == "shape":
            w = torch.cat([w, w[:1]])
        versions.append({**weights, "w": w})
    return versions


@given(training(), st.integers(1, 4), st.lists(st.booleans(), min_size=10, max_size=10))
def test_chains_of_differences_give_every_version_to_early_and_late_readers(versions, whole_every, reads) -> None:
    with TemporaryDirectory() as folder:
        writer, early = Files(folder, whole_every=whole_every), open_channel(f"files:{folder}")
        for version, weights in enumerate(versions):
            writer.publish(version, weights)
            if reads[version]:
                assert equal(dict(early.fetch(version)), weights)
            assert equal(dict(open_channel(f"files:{folder}").fetch(version)), weights)
        headers = {int(path.stem): json.loads(path.read_text()) for path in Path(folder).glob("*.json")}
        for version, header in headers.items():
            assert header["base"] in (-1, version - 1)
            late = open_channel(f"files:{folder}")
            assert equal(dict(late.fetch(version)), versions[version])
        assert len(headers) <= 2 * whole_every


def test_difference_is_small_the_chain_is_bounded_and_old_versions_are_pruned(tmp_path: Path) -> None:
    writer, reader = Files(str(tmp_path), whole_every=3), open_channel(f"files:{tmp_path}")
    weights = torch.randn(100_000).bfloat16()
    for version in range(10):
        changed = torch.rand(weights.shape) < 0.02
        weights = torch.where(changed, weights * 1.01, weights)
        writer.publish(version, {"a": weights})
        assert equal(dict(reader.fetch(version)), {"a": weights})
    assert names(tmp_path) == [f"{version}.{suffix}" for version in (6, 7, 8, 9) for suffix in ("bin", "json")]
    sizes = {version: (tmp_path / f"{version:010d}.bin").stat().st_size for version in (6, 7, 8, 9)}
    assert sizes[6] == sizes[9] == 200_000
    assert max(sizes[7], sizes[8]) < 10_000


def test_writer_that_starts_again_writes_a_whole_version_and_one_that_died_halfway_left_none(tmp_path: Path) -> None:
    first = Files(str(tmp_path))
    for version in range(3):
        first.publish(version, {"a": torch.full((99,), float(version))})
    (tmp_path / f"{3:010d}.bin").write_bytes(b"half")
    again = Files(str(tmp_path))
    assert again.newest() == 2
    again.publish(3, {"a": torch.full((99,), 3.0)})
    assert json.loads((tmp_path / f"{3:010d}.json").read_text())["base"] == -1
    # The first one did not notice: its differences would be to a version that is not the one before.
    first.publish(4, {"a": torch.full((99,), 4.0)})
    assert json.loads((tmp_path / f"{4:010d}.json").read_text())["base"] == -1
    assert equal(dict(open_channel(first.address).fetch(4)), {"a": torch.full((99,), 4.0)})


@pytest.mark.parametrize("harm", ["flip", "cut", "deflate", "json"])
def test_damaged_file_is_refused_by_name_and_a_newer_version_read_again(tmp_path: Path, harm: str) -> None:
    writer, reader = Files(str(tmp_path), whole_every=2), open_channel(f"files:{tmp_path}")
    weights = [{"a": torch.arange(999) + i, "b": torch.arange(999) * (i + 1)} for i in range(4)]
    for version in range(2):
        writer.publish(version, weights[version])
    assert equal(dict(reader.fetch(0)), weights[0])
    path = tmp_path / f"{1:010d}.{'json' if harm == 'json' else 'bin'}"
    data = bytearray(path.read_bytes())
    if harm == "cut":
        del data[-40:]
    else:
        data[-12 if harm == "flip" else len(data) // 2] ^= 255
    path.write_bytes(b"{" if harm == "json" else data)
    with pytest.raises(ChannelError, match=r"version 1 .* is damaged in (a|b|.*json)"):
        list(reader.fetch(1))
    writer.publish(2, weights[2])
    assert equal(dict(reader.fetch(2)), weights[2])


def test_folder_that_cannot_be_written_is_said_and_the_next_version_is_whole(tmp_path: Path) -> None:
    writer = Files(str(tmp_path / "weights"))
    (tmp_path / "weights").write_text("a file, not a folder")
    with pytest.raises(PalestraError, match=r"cannot write version 0 .* free space"):
        writer.publish(0, {"a": torch.ones(2)})
    (tmp_path / "weights").unlink()
    writer.publish(0, {"a": torch.ones(2)})
    assert equal(fetch_newest(open_channel(writer.address))[1], {"a": torch.ones(2)})


def test_full_disk_is_said_and_readers_keep_the_version_before(tmp_path: Path) -> None:
    if not os.access("/dev/full", os.W_OK):
        pytest.skip("needs /dev/full")
    writer = Files(str(tmp_path))
    writer.publish(0, {"a": torch.ones(2)})
    (tmp_path / f"{1:010d}.bin").symlink_to("/dev/full")
    with pytest.raises(PalestraError, match=r"cannot write version 1 .*No space left"):
        writer.publish(1, {"a": torch.ones(2)})
    assert fetch_newest(open_channel(writer.address))[0] == 0
    writer.publish(2, {"a": torch.zeros(2)})
    assert equal(dict(open_channel(writer.address).fetch(2)), {"a": torch.zeros(2)})


# Processes that die


def numbered(version: int) -> dict[str, Tensor]:
    """Tensors that all say which version they are of."""
    return {f"t{i}": torch.full((50_000 + i,), float(version)) for i in range(12)}


def keep_publishing(kind: str, folder: str, to_parent: Any) -> None:
    torch.set_num_threads(1)
    writer = SharedMemory() if kind == "shm" else Files(folder, whole_every=4)
    to_parent.send(writer.address)
    version = writer.newest()
    while True:
        version += 1
        writer.publish(version, numbered(version))


def keep_reading(address: str, to_parent: Any, stop: Any) -> None:
    torch.set_num_threads(1)
    reader, seen, mixed = open_channel(address), 0, 0
    while not stop.is_set():
        try:
            version, tensors = fetch_newest(reader)
        except ChannelError:
            time.sleep(0.01)
            continue
        if not seen:
            to_parent.send("reading")
        seen += 1
        mixed += any(not torch.equal(tensor, numbered(version)[name]) for name, tensor in tensors.items())
    to_parent.send((seen, mixed))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["shm", "files"])
def test_writer_killed_at_any_time_leaves_two_readers_whole_versions_and_no_memory(kind: str, tmp_path: Path) -> None:
    processes = multiprocessing.get_context("spawn")
    addresses = []
    for _ in range(2):
        ours, theirs = processes.Pipe()
        writer = processes.Process(target=keep_publishing, args=(kind, str(tmp_path), theirs), daemon=True)
        writer.start()
        address, stop = ours.recv(), processes.Event()
        addresses.append(address)
        pipes = [processes.Pipe() for _ in range(2)]
        readers = [processes.Process(target=keep_reading, args=(address, pipe[1], stop), daemon=True) for pipe in pipes]
        for reader in readers:
            reader.start()
        assert [pipe[0].recv() for pipe in pipes] == ["reading", "reading"]
        time.sleep(random.random())
        os.kill(writer.pid or 0, signal.SIGKILL)
        writer.join()
        version, tensors = fetch_newest(open_channel(address))
        assert equal(tensors, numbered(version))
        time.sleep(0.5)
        stop.set()
        for pipe, reader in zip(pipes, readers, strict=True):
            seen, mixed = pipe[0].recv()
            assert (seen > 1, mixed) == (True, 0)
            reader.join()
    with closing(SharedMemory()):
        assert kind == "files" or not any(Path(address.partition(":")[2]).exists() for address in addresses)


def test_files_on_a_full_disk_say_so_and_leave_the_versions_before_and_room_for_the_next(tmp_path):
    def weights(size: int, value: float) -> dict[str, torch.Tensor]:
        return {name: torch.full((size,), value) for name in "abc"}

    with small_disk(tmp_path / "small", 1 << 20) as disk:
        writer = Files(str(disk))
        writer.publish(0, weights(20_000, 1.0))
        with pytest.raises(PalestraError, match=r"cannot write version 1 .*No space left.*readers keep the one before"):
            writer.publish(1, weights(200_000, 2.0))
        assert sorted(path.name for path in disk.iterdir()) == ["0000000000.bin", "0000000000.json"]
        assert fetch_newest(Files(str(disk)))[0] == 0
        writer.publish(2, weights(20_000, 3.0))
        version, found = fetch_newest(Files(str(disk)))
        assert version == 2
        assert all(torch.equal(found[name], tensor) for name, tensor in weights(20_000, 3.0).items())
