"""Random access into files of lines."""

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from palestra.view import lines
from palestra.view.lines import LineFile, step_of


def rows(steps: list[int], pad: list[int]) -> list[bytes]:
    return [b'{"step": %d, "x": "%s"}' % (step, b"y" * width) for step, width in zip(steps, pad, strict=True)]


@given(
    steps=st.lists(st.integers(0, 9), max_size=60).map(sorted),
    seed=st.randoms(use_true_random=False),
    torn=st.binary(max_size=8).filter(lambda data: b"\n" not in data),
    block=st.sampled_from([8, 64, 1 << 16]),
)
def test_search_any_file_agrees_with_a_scan(tmp_path_factory, steps, seed, torn, block):
    path = tmp_path_factory.mktemp("lines") / "rows.jsonl"
    written = rows(steps, [seed.choice([0, 3, 200]) for _ in steps])
    for _ in range(3):
        written.insert(seed.randint(0, len(written)), b"not a row")
    path.write_bytes(b"".join(row + b"\n" for row in written) + torn)
    before = lines.BLOCK
    lines.BLOCK = block
    try:
        with LineFile(path) as file:
            read = list(file.lines())
            assert [line.data for line in read] == written
            assert [line.end for line in read[:-1]] == [line.start for line in read[1:]]
            for value in range(11):
                expected = [line.start for line in read if (step_of(line.data or b"") or -1) >= value]
                assert file.search(step_of, value) == (expected[0] if expected else file.end) or value == 0
            assert file.last_key(step_of) == (float(steps[-1]) if steps else None)
    finally:
        lines.BLOCK = before


def test_lines_one_too_long_is_passed_over_and_not_read(tmp_path: Path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"a\n" + b"b" * 300_000 + b"\nc\n")
    with LineFile(path) as file:
        assert [(line.start, line.data) for line in file.lines(longest=1000)] == [(0, b"a"), (2, None), (300_003, b"c")]
        assert [line.data for line in file.lines(longest=300_000)][1] == b"b" * 300_000


def test_search_of_ten_million_steps_reads_little(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"".join(b'{"step": %d}\n' % step for step in range(300_000)))
    reads = []
    pread = os.pread
    monkeypatch.setattr(lines.os, "pread", lambda file, count, start: reads.append(count) or pread(file, count, start))
    with LineFile(path) as file:
        start = file.search(step_of, 123_456)
        monkeypatch.undo()
        assert file.line_at(start).data == b'{"step": 123456}'
    with LineFile(path) as file:
        assert file.line_at(start + 1) is None
        sampled = [json.loads(line.data)["step"] for line in file.spread(50)]
    assert len(sampled) in range(45, 55)
    assert sampled == sorted(set(sampled))
    assert sampled[-1] == 299_999
