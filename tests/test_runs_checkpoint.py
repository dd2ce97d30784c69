import math
import os
import random
import signal
import struct
import subprocess
import sys
import time
from collections import OrderedDict, namedtuple
from pathlib import Path

import numpy as np
import pytest
import torch
import zygote
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from palestra.errors import PalestraError
from palestra.runs import checkpoint
from palestra.runs.checkpoint import CheckpointFailed, DamagedCheckpoint
from palestra.runs.loop import CheckpointsDue
from palestra.runs.tree import UnsupportedState, flatten
from palestra.spec.model import Cadence

TORCH_TYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64,
    torch.bool, torch.complex64, torch.complex128,
]  # fmt: skip


def accept(found: checkpoint.Checkpoint) -> None:
    """No further check."""


def same(a, b) -> bool:
    """Equal in value and type, bit for bit."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return struct.pack("<d", a) == struct.pack("<d", b)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict):
        return (
            list(a) == list(b)
            and all(type(x) is type(y) for x, y in zip(a, b, strict=True))
            and all(same(a[key], b[key]) for key in a)
        )
    if isinstance(a, np.ndarray | np.generic):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, torch.Tensor) and a.numel() == 0:
        return a.dtype == b.dtype and a.shape == b.shape
    if isinstance(a, torch.Tensor):
        bits = [x.resolve_conj().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for x in (a, b)]
        return a.dtype == b.dtype and a.shape == b.shape and bits[0] == bits[1]
    return a == b


def round_trip(folder: Path, state):
    return checkpoint.load(checkpoint.save(folder, 1, state, reasons={"kept"})).state


@st.composite
def tensors(draw):
    dtype = draw(st.sampled_from(TORCH_TYPES))
    shape = draw(hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3))
    size = math.prod(shape) * torch.empty(0, dtype=dtype).element_size()
    raw = draw(st.binary(min_size=size, max_size=size))
    if dtype is torch.bool:
        raw = bytes(byte & 1 for byte in raw)
    flat = torch.frombuffer(bytearray(raw), dtype=dtype) if raw else torch.empty(0, dtype=dtype)
    return flat.reshape(shape)


arrays = hnp.arrays(
    dtype=st.one_of(
        hnp.boolean_dtypes(), hnp.integer_dtypes(endianness="="), hnp.floating_dtypes(endianness="?"),
        hnp.complex_number_dtypes(endianness="<"),
    ),
    shape=hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3),
)  # fmt: skip
leaves = st.one_of(
    st.none(), st.booleans(), st.text(), st.integers(), st.integers(-(10**30), 10**30), st.floats(), st.binary(),
    arrays, arrays.filter(lambda a: a.size > 0).map(lambda a: a.reshape(-1)[0]), tensors(),
)  # fmt: skip
keys = st.one_of(st.text(), st.integers(), st.sampled_from(["$", "a/b", "__metadata__"]))
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(st.lists(inner), st.lists(inner).map(tuple), st.dictionaries(keys, inner)),
    max_leaves=12,
)


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(state=trees)
def test_round_trip_of_any_tree_is_exact(tmp_path, state):
    assert same(round_trip(tmp_path, state), state)


def test_round_trip_of_awkward_values_is_exact(tmp_path):
    state = {
        "big": 7**9000,
        "negative": -(2**200),
        "float": [math.nan, math.inf, -math.inf, -0.0, 5e-324, struct.unpack("<d", b"\x01\0\0\0\0\0\xf8\xff")[0]],
        "tuple": (1, (2, [3, ()])),
        "optimizer": {"state": {0: {"step": torch.tensor(3.0)}, 1: {}}},
        "transposed": np.arange(6.0).reshape(2, 3).T,
        "strided": torch.arange(10)[::3],
        "conjugate": torch.tensor([1 + 2j]).conj(),
        "0-d": torch.tensor(1.5, dtype=torch.bfloat16),
        "empty": [b"", np.empty((0, 3), np.float32), {}, [], "", "\ud800"],
        "big-endian": np.array([1, 2], ">i4"),
        "numpy scalar": np.float32(0.1),
    }
    back = round_trip(tmp_path, state)
    assert same(back, state)
    back["transposed"] += 1  # loaded arrays can be trained on
    back["strided"].add_(1)


def test_round_trip_of_generators_and_weights_continues_identically(tmp_path):
    rng, python = np.random.default_rng(0), random.Random(1)
    net = torch.nn.Linear(3, 2)
    rng.normal(size=3), python.random()
    state = {
        "numpy": rng.bit_generator.state,
        "python": python.getstate(),
        "torch": torch.get_rng_state(),
        "net": net.state_dict(),
    }
    assert isinstance(state["net"], OrderedDict)
    back = round_trip(tmp_path, state)
    rng2, python2 = np.random.default_rng(5), random.Random(6)
    rng2.bit_generator.state = back["numpy"]
    python2.setstate(back["python"])
    assert rng2.normal() == rng.normal()
    assert python2.random() == python.random()
    net.load_state_dict(back["net"])
    assert torch.equal(back["torch"], state["torch"])
    assert torch.equal(back["net"]["weight"], state["net"]["weight"])


@pytest.mark.parametrize(
    "value",
    [object(), {1.5: 0}, {True: 0}, {None: 0}, {1, 2}, namedtuple("P", "x")(1), np.array(["a"]), np.array([object()]),
     np.array([1], "M8[s]"), np.zeros(2, [("a", "f4")]), np.zeros(2, np.longdouble), torch.eye(2).to_sparse(),
     torch.zeros(2, device="meta")],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_flatten_unsupported_value_is_refused_naming_where(value, tmp_path):
    with pytest.raises(UnsupportedState, match="agent/1"):
        flatten({"agent": [0, value]})
    with pytest.raises(UnsupportedState):
        checkpoint.save(tmp_path, 1, value, reasons=set())
    assert not (tmp_path / "checkpoints").exists()


def test_arrays_file_is_read_by_the_safetensors_library(tmp_path):
    from safetensors.torch import load_file

    weight, bias = torch.randn(3, 2, dtype=torch.float64), torch.randn(5).bfloat16()
    path = checkpoint.save(tmp_path, 1, {"flags": np.array([True]), "w": weight, "b": bias}, reasons=set())
    found = load_file(path / "state/arrays.safetensors")
    assert torch.equal(found["1:w"], weight)
    assert torch.equal(found["2:b"], bias)
    assert found["0:flags"].tolist() == [True]


def test_load_gives_back_meta(tmp_path):
    path = checkpoint.save(
        tmp_path, 12, {}, reasons={"best", "kept"}, score=1.5, metric="eval/return", counters={"frame": 9},
        offsets={"metrics.jsonl": 77},
    )  # fmt: skip
    meta = checkpoint.load(path).meta
    assert path == tmp_path / "checkpoints/step_000000012"
    assert (meta.step, meta.reasons, meta.score, meta.metric) == (12, {"best", "kept"}, 1.5, "eval/return")
    assert (meta.counters, meta.offsets) == ({"frame": 9}, {"metrics.jsonl": 77})


def damage_truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def damage_flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def damage_remove(path: Path) -> None:
    path.unlink()


@pytest.mark.parametrize("name", ["state/arrays.safetensors", "state/tree.json", "meta.json"])
@pytest.mark.parametrize("damage", [damage_truncate, damage_flip, damage_remove])
def test_newest_with_damaged_file_skips_it_naming_it(tmp_path, name, damage):
    checkpoint.save(tmp_path, 1, {"w": np.arange(100.0)}, reasons=set())
    newer = checkpoint.save(tmp_path, 2, {"w": np.arange(100.0), "n": [1, 2, 3]}, reasons=set())
    damage(newer / name)
    with pytest.raises(DamagedCheckpoint):
        checkpoint.load(newer)
    warnings: list[str] = []
    found = checkpoint.newest(tmp_path, warnings.append, accept)
    assert found is not None
    assert found.step == 1
    assert len(warnings) == 1
    assert "step_000000002" in warnings[0]


def test_meta_any_flipped_bit_is_noticed(tmp_path):
    path = checkpoint.save(tmp_path, 3, {}, reasons={"kept"}, score=2.0, offsets={"metrics.jsonl": 12345})
    original = (path / "meta.json").read_bytes()
    for index in range(len(original)):
        data = bytearray(original)
        data[index] ^= 1
        (path / "meta.json").write_bytes(data)
        with pytest.raises(DamagedCheckpoint):
            checkpoint.read_meta(path)


def test_newest_without_any_checkpoint_is_none(tmp_path):
    assert checkpoint.newest(tmp_path, pytest.fail, accept) is None


def test_newest_names_a_half_written_one(tmp_path):
    saved = checkpoint.save(tmp_path, 1, {}, reasons=set())
    half = saved.with_name(".step_000000002.part-0123abcd")
    (half / "state").mkdir(parents=True)
    warnings: list[str] = []
    assert checkpoint.newest(tmp_path, warnings.append, accept).step == 1
    assert half.name in warnings[0]
    checkpoint.prune(tmp_path)
    assert not half.exists()


def test_save_of_the_same_step_replaces_also_a_damaged_one(tmp_path):
    path = checkpoint.save(tmp_path, 1, {"x": 1}, reasons=set())
    checkpoint.save(tmp_path, 1, {"x": 2}, reasons={"kept"})
    assert checkpoint.load(path).state == {"x": 2}
    damage_remove(path / "meta.json")
    checkpoint.save(tmp_path, 1, {"x": 3}, reasons={"kept"})
    assert checkpoint.load(path).state == {"x": 3}
    assert os.listdir(path.parent) == [path.name]


def test_replacement_cut_between_its_renames_keeps_the_old_one(tmp_path):
    path = checkpoint.save(tmp_path, 1, {"x": 1}, reasons=set())
    path.rename(path.with_name(".step_000000001.old-00000001"))
    checkpoint.finish_renames(tmp_path)
    assert checkpoint.newest(tmp_path, pytest.fail, accept).state == {"x": 1}


def steps(folder: Path) -> list[int]:
    return [meta.step for meta in checkpoint.metas(folder)]


def test_prune_keeps_kept_newest_and_best(tmp_path):
    plan = [(1, {"time"}, None), (2, {"kept"}, None), (3, {"best"}, 5.0), (4, {"best"}, 9.0), (5, {"best"}, 7.0),
            (6, {"time"}, 99.0), (7, {"best"}, math.nan), (8, {"time"}, None)]  # fmt: skip
    for step, reasons, score in plan:
        checkpoint.save(tmp_path, step, {}, reasons=reasons, score=score)
    checkpoint.prune(tmp_path)
    assert steps(tmp_path) == [2, 4, 8]
    assert len(os.listdir(tmp_path / "checkpoints")) == 3


def test_policies_by_steps_and_by_time_keep_what_the_reference_keeps(tmp_path, monkeypatch):
    """The numbers of levanter's test_checkpoint: every 2 until 10, every 5 until 20, then every 10; one temporary."""
    now = 0.0
    monkeypatch.setattr("palestra.runs.loop.time.monotonic", lambda: now)

    def left(name: str, cadences: list[str], until: int, seconds: float = 1.0) -> list[list[int]]:
        nonlocal now
        policy, seen = CheckpointsDue([Cadence.parse(text) for text in cadences]), []
        for step in range(1, until + 1):
            now += seconds
            if reasons := policy.reasons({"steps": step - 1}, {"steps": step}):
                checkpoint.save(tmp_path / name, step, {}, reasons=reasons)
                checkpoint.prune(tmp_path / name)
            seen.append(steps(tmp_path / name))
        return seen

    kept = ["2 steps until 10", "5 steps until 20", "10 steps"]
    assert left("counted", kept, 49)[-1] == [2, 4, 6, 8, 10, 15, 20, 30, 40]
    assert left("timed", ["10 seconds"], 4, seconds=6.0) == [[], [2], [2], [4]]
    assert left("mixed", [*kept, "7 seconds"], 49)[-1] == [2, 4, 6, 8, 10, 15, 20, 30, 40, 49]


def test_kept_afterwards_is_never_pruned_and_intact(tmp_path):
    path = checkpoint.save(tmp_path, 1, {"w": np.arange(3.0)}, reasons={"best"}, score=1.0)
    checkpoint.keep(path)
    checkpoint.keep(path)  # no harm
    for step in (2, 3):
        checkpoint.save(tmp_path, step, {}, reasons={"best"}, score=2.0)
    checkpoint.prune(tmp_path)
    assert steps(tmp_path) == [1, 3]
    assert checkpoint.load(path).meta.reasons == {"best", "kept"}
    assert checkpoint.is_checkpoint(path)
    assert not checkpoint.is_checkpoint(tmp_path)
    damage_truncate(path / "state/tree.json")
    with pytest.raises(DamagedCheckpoint):
        checkpoint.keep(path)


def test_prune_with_a_damaged_newest_keeps_the_newest_complete_one(tmp_path):
    checkpoint.save(tmp_path, 1, {}, reasons=set())
    damage_truncate(checkpoint.save(tmp_path, 2, {}, reasons=set()) / "state/tree.json")
    checkpoint.prune(tmp_path)
    assert steps(tmp_path) == [1]


def test_set_aside_after_renames_later_ones_and_deletes_none(tmp_path):
    for step in (1, 2, 3):
        checkpoint.save(tmp_path, step, {}, reasons=set())
    checkpoint.set_aside_after(tmp_path, 1)
    assert steps(tmp_path) == [1]
    assert len(list((tmp_path / "checkpoints").glob("damaged_step_*"))) == 2


SAVE_WITH_LIMIT = """
import resource, sys
from pathlib import Path
import numpy as np
from palestra.runs import checkpoint
folder = Path(sys.argv[1])
checkpoint.save(folder, 1, {"w": np.arange(10.0)}, reasons={"kept"})
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    checkpoint.save(folder, 2, {"w": np.zeros(1_000_000)}, reasons={"kept"})
except checkpoint.CheckpointFailed as error:
    print(error)
"""


def test_save_past_the_file_size_limit_leaves_earlier_ones_and_no_rest(tmp_path):
    done = subprocess.run([sys.executable, "-c", SAVE_WITH_LIMIT, tmp_path], capture_output=True, text=True, check=True)
    assert "step_000000002" in done.stdout
    assert "File too large" in done.stdout
    assert "MiB free" in done.stdout
    assert os.listdir(tmp_path / "checkpoints") == ["step_000000001"]
    assert checkpoint.newest(tmp_path, pytest.fail, accept).step == 1


def test_save_on_a_full_disk_raises_naming_it_and_leaves_earlier_ones(tmp_path):
    mount = tmp_path / "small"
    mount.mkdir()
    if os.geteuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", mount]).returncode:
        pytest.skip("no right to mount a small disk here")
    try:
        checkpoint.save(mount, 1, {"w": np.arange(10.0)}, reasons={"kept"})
        with pytest.raises(CheckpointFailed, match="No space left on device") as caught:
            checkpoint.save(mount, 2, {"w": np.zeros(1_000_000)}, reasons={"kept"})
        assert str(mount) in str(caught.value)
        assert os.listdir(mount / "checkpoints") == ["step_000000001"]
        assert checkpoint.newest(mount, pytest.fail, accept).step == 1
    finally:
        subprocess.run(["umount", mount], check=True)


def test_save_where_no_folder_can_be_made_raises_a_clear_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(PalestraError, match="could not write the checkpoint"):
        checkpoint.save(tmp_path / "file", 1, {}, reasons=set())


SAVE_FOREVER = """
import sys
from pathlib import Path
import numpy as np
from palestra.runs import checkpoint
folder = Path(sys.argv[1])
found = checkpoint.newest(folder, lambda text: None, lambda found: None)
step = 0 if found is None else found.step
print("ready", flush=True)
while True:
    # Every step is saved twice, so that kills land in replacements too.
    step += 1
    for again in range(2):
        reasons = {"kept"} if step % 50 == 0 else {"time"}
        checkpoint.save(folder, step, {"step": step, "w": np.full(20_000, step)}, reasons=reasons)
        checkpoint.prune(folder)
"""


def test_killed_at_random_moments_the_newest_checkpoint_always_loads(tmp_path):
    reached = 0
    moments = random.Random(0)
    for _ in range(12):
        process = zygote.Popen([sys.executable, "-c", SAVE_FOREVER, tmp_path], stdout=subprocess.PIPE)
        assert process.stdout.readline() == b"ready\n"
        time.sleep(moments.uniform(0.02, 0.25))
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        checkpoint.finish_renames(tmp_path)
        damaged: list[str] = []
        found = checkpoint.newest(tmp_path, damaged.append, accept)
        assert found is not None
        assert found.step >= reached
        assert found.state["step"] == found.step
        assert (found.state["w"] == found.step).all()
        assert all("half-written" in text for text in damaged)
        reached = found.step
    assert reached > 12
