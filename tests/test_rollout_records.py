"""Rollouts as JSON lines: the same bits again, whatever they hold, wherever a kill has cut the file."""

import math
import os
import signal
import struct
import subprocess
import sys
from dataclasses import fields, is_dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ENVIRONMENT
from hypothesis import given, settings
from hypothesis import strategies as st
from rollout_groups import GROUPS, NUMBERS, group, trajectory

from palestra.errors import PalestraError
from palestra.lm.batch import Batch
from palestra.posttrain.batch import pack, with_advantages
from palestra.rollout import records
from palestra.rollout.records import FILE, Recording, RolloutRecord, newest, read, replay, scan, write
from palestra.rollout.types import Group
from palestra.runs.session import Session
from palestra.spec.algorithm import AlgorithmSpec
from palestra.tasks.task import Problem
from palestra.track.sinks import JsonlSink


@st.composite
def some_records(draw: st.DrawFn) -> RolloutRecord:
    one = draw(GROUPS)
    fate = draw(st.sampled_from(["trained", "filtered"]))
    advantages = []
    for each in one.trajectories if fate == "trained" else ():
        size = len(each.tokens)
        same = tuple(draw(NUMBERS.map(lambda x, each=each: tuple(x if m else 0.0 for m in each.loss_mask))))
        any_ = tuple(draw(st.lists(NUMBERS, min_size=size, max_size=size)))
        advantages.append(draw(st.sampled_from([same, any_])))
    return RolloutRecord(one, fate, draw(st.integers(0, 2**40)), tuple(advantages))


def bits(value: Any) -> Any:
    """The value with every float as its bits, and every type beside it: what `==` would let pass."""
    if isinstance(value, float):
        # One NaN is as good as another; JSON has no signs and payloads of it.
        return ("float", "nan" if math.isnan(value) else struct.pack("<d", value))
    if is_dataclass(value):
        return (type(value).__name__, *(bits(getattr(value, field.name)) for field in fields(value)))
    if isinstance(value, dict):
        return ("dict", *((key, bits(entry)) for key, entry in value.items()))
    if isinstance(value, (list, tuple)):
        return (type(value).__name__, *map(bits, value))
    return (type(value).__name__, value)


def written(path: Path, *given: RolloutRecord) -> Path:
    sink = JsonlSink(path)
    for record in given:
        write(sink, record)
    sink.close()
    return path


def training(step: int, *numbers: int, fate: str = "trained") -> list[RolloutRecord]:
    return [RolloutRecord(group([0.0, 1.0], number), fate, step) for number in numbers]


@settings(max_examples=40)
@given(st.lists(some_records(), max_size=3))
def test_records_of_any_content_come_back_bit_for_bit(tmp_path_factory: Any, given: list[RolloutRecord]) -> None:
    path = written(tmp_path_factory.mktemp("records") / FILE, *given)
    assert [bits(one) for one in scan(path)] == [bits(one) for one in given]
    assert [bits(one) for one in newest(path)] == [bits(one) for one in reversed(given)]
    assert [bits(one) for one in read(path)] == [bits(one.group) for one in given]


def test_advantages_that_are_the_same_for_all_drawn_tokens_take_one_number(tmp_path: Path) -> None:
    one = group([1.0])
    size = len(one.trajectories[0].tokens)
    same, other = ((0.0, 0.0, 0.7, 0.7, 0.7),), ((0.0, 0.0, 0.7, 0.7, 0.8),)
    assert size == 5
    paths = [written(tmp_path / name, RolloutRecord(one, "trained", 1, a)) for name, a in (("a", same), ("b", other))]
    assert [next(scan(path)).advantages for path in paths] == [same, other]
    assert b'"advantages": 0.7}' in paths[0].read_bytes()


@pytest.mark.parametrize("block", [1, 7, 64, 10_000, 1 << 22])
def test_newest_with_blocks_of_any_size_is_the_file_backwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    monkeypatch.setattr(records, "BLOCK", block)
    path = written(tmp_path / FILE, *training(1, 1, 2), *training(2, 3))
    assert [record.group.number for record in newest(path)] == [3, 2, 1]
    path.write_bytes(b"")
    assert list(newest(path)) == []


def test_file_cut_at_any_byte_gives_its_whole_lines(tmp_path: Path) -> None:
    given = [RolloutRecord(group([1.0], number), "trained", number) for number in range(3)]
    data = written(tmp_path / FILE, *given).read_bytes()
    ends = [place + 1 for place, byte in enumerate(data) if byte == 10]
    near = {end + shift for end in (0, *ends) for shift in (-2, -1, 0, 1, 2)}
    for size in sorted({*range(0, len(data), 23), *near} & set(range(len(data) + 1))):
        (tmp_path / FILE).write_bytes(data[:size])
        whole = given[: sum(end <= size for end in ends)]
        assert list(scan(tmp_path / FILE)) == whole
        assert list(newest(tmp_path / FILE)) == whole[::-1]


def test_newest_reads_no_further_than_asked(tmp_path: Path) -> None:
    path = written(tmp_path / FILE, *training(1, 1, 2))
    path.write_bytes(b"{damaged\n" * 600_000 + path.read_bytes())
    found = newest(path)
    assert [next(found).group.number for _ in range(2)] == [2, 1]
    with pytest.raises(PalestraError, match="is not a line of rollouts"):
        next(found)


@pytest.mark.parametrize("line", ["{}", "[]", "12", "nonsense", '{"number": 1}'])
def test_line_that_is_no_record_is_named_with_its_place(tmp_path: Path, line: str) -> None:
    path = written(tmp_path / FILE, *training(1, 1))
    path.write_bytes(path.read_bytes() + line.encode() + b"\n")
    with pytest.raises(PalestraError, match=rf"{FILE}:2 is not a line of rollouts"):
        read(path)


def test_row_that_json_does_not_have_is_refused_by_the_problems_name(tmp_path: Path) -> None:
    one = replace(group([1.0]), problem=Problem("t/train/0", "", {"day": date(2025, 1, 2)}))
    with pytest.raises(PalestraError, match="the rollouts of t/train/0 cannot be written as JSON"):
        written(tmp_path / FILE, RolloutRecord(one, "trained", 1))


def test_replay_gives_the_batches_that_were_trained_in_their_order(tmp_path: Path) -> None:
    given = [*training(1, 4, 1), *training(2, 2, fate="filtered"), *training(2, 3, 5)]
    found = list(replay(written(tmp_path / FILE, *given)))
    assert [(step, [one.number for one in groups]) for step, groups in found] == [(1, [4, 1]), (2, [3, 5])]
    assert found[1][1] == [given[3].group, given[4].group]


# ---- what a session records


def session(folder: Path) -> Session:
    return Session.create(folder, spec_yaml="", spec_data={"kind": "posttrain"}, manifest={"seed": 0, "diff": ""})


def packed(groups: list[Group]) -> Batch:
    algorithm = AlgorithmSpec(preset="dr_grpo")
    return with_advantages(pack(groups, algorithm), algorithm, max_new_tokens=8)


def test_recording_of_a_step_replays_to_the_same_batch_bit_for_bit(tmp_path: Path) -> None:
    """Groups of several sizes; trajectories that end in tokens of a tool; several versions."""
    tool = trajectory(1.0, loss_mask=(False, False, True, True, False), logprobs=(0.0, 0.0, -0.3, -1 / 3, 0.0))
    groups = [
        group([0.0, 1.0, 0.0], 5),
        replace(group([0.0, 1.0], 2), trajectories=(trajectory(0.2, drawn=7), tool), asked=4),
    ]
    batch = packed(groups)
    with session(tmp_path / "s") as made, Recording(made) as recording:
        recording.write(3, groups, [group([1.0, 1.0], 4)], batch)
    first, *trained = scan(tmp_path / "s" / FILE)
    assert (first.fate, first.step, first.group.number, first.advantages) == ("filtered", 3, 4, ())
    given = [x for record in trained for one in record.advantages for x in one]
    assert given == batch.per_token["advantages"].tolist()
    assert any(x != 0 for x in given)
    ((step, replayed),) = replay(tmp_path / "s" / FILE)
    assert (step, [bits(one) for one in replayed]) == (3, [bits(one) for one in groups])
    again = packed(replayed)
    for name, values in batch.per_token.items():
        assert torch.equal(values, again.per_token[name]), name
    for name, values in batch.per_sequence.items():
        assert torch.equal(values, again.per_sequence[name]), name
    assert torch.equal(batch.tokens, again.tokens)
    assert torch.equal(batch.loss_mask, again.loss_mask)


CHILD = """
import os, signal, sys
from pathlib import Path
from types import SimpleNamespace
import numpy
from palestra.rollout.records import FILE, Recording
from palestra.rollout.types import Group, Trajectory
from palestra.runs.session import Session
from palestra.tasks.task import Problem, Status, Verdict

answer = Trajectory((1, 2), (False, True), (0.0, -0.1), (-1, 0), 1.0, Verdict(1.0, Status.CORRECT), "eos", "yes")
batch = SimpleNamespace(per_token={"advantages": numpy.ones(6)}, lengths=[2, 2, 2])  # as torch's, in less time

path, first, kill = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
with Session.open(path) as session:
    found = session.restore()
    recording = Recording(session)
    start = 0 if found is None else found.step
    assert start == first, start
    for step in range(start + 1, 9):
        problem = Problem(f"t/train/{step}", "?")
        groups = [Group(10 * step + place, problem, 0, (answer,), 1) for place in range(3)]
        recording.write(step, groups, [], batch)
        if step % 3 == 0:
            session.checkpoint(step, {}, reasons={"temporary"})
        if step == kill:
            with open(path / FILE, "ab") as file:
                file.write(b'{"number": 1, "st')
            os.kill(os.getpid(), signal.SIGKILL)
"""


def test_recording_killed_and_resumed_holds_each_step_once(tmp_path: Path) -> None:
    folder = session(tmp_path / "s").path
    for first, kill in ((0, 2), (0, 5), (3, 7), (6, 0)):
        done = subprocess.run(
            [sys.executable, "-c", CHILD, str(folder), str(first), str(kill)],
            env=ENVIRONMENT,
            capture_output=True,
            text=True,
        )
        assert done.returncode == (-signal.SIGKILL if kill else 0), done.stderr
    found = list(replay(folder / FILE))
    assert [step for step, _ in found] == list(range(1, 9))
    assert [[one.number for one in groups] for _, groups in found] == [
        [10 * step + place for place in range(3)] for step in range(1, 9)
    ]


def test_reading_rollouts_needs_no_torch(tmp_path: Path) -> None:
    code = "import sys, palestra.rollout.records, palestra.cli.rollouts; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env=ENVIRONMENT, cwd=os.getcwd()).returncode == 0
