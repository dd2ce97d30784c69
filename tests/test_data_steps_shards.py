"""Shards: any number of workers gives the same, a kill costs one shard, every row is accounted for."""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zygote
from hypothesis import given, settings
from hypothesis import strategies as st

from palestra.data.readers import Row
from palestra.data.steps.shards import Compression, Drop, map_documents, sources
from palestra.errors import PalestraError, UsageError


def odd_dropped(_: int, rows: Iterator[Row]) -> Iterator[Row | Drop]:
    """Texts of an odd length are left out, with a note."""
    for row in rows:
        yield row if len(row["text"]) % 2 == 0 else Drop("odd", {"id": row["id"]})


def slow(_: int, rows: Iterator[Row]) -> Iterator[Row | Drop]:
    """As `odd_dropped`, and each shard says in a file that it was begun."""
    first = True
    for row in odd_dropped(0, rows):
        if first and isinstance(row, dict):
            with Path(os.environ["BEGUN"]).open("a") as file:
                file.write(f"{row['id']}\n")
            first = False
        time.sleep(0.02)
        yield row


def write(path: Path, rows: list[Any]) -> Path:
    """A file of JSON lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def corpus(folder: Path, files: int = 4, rows: int = 9) -> Path:
    """Several files of rows whose text is of every length."""
    for number in range(files):
        write(folder / f"part{number}.jsonl", [{"text": "x" * n, "n": n} for n in range(rows)])
    return folder


def read(out: Path) -> list[Row]:
    """The documents of a step's output."""
    return [row for source in sources(out) for _, _, row in source.rows()]


def mapped(out: Path, source: Path, workers: int = 1, compression: Compression = "none", **more: Any) -> dict[str, Any]:
    """The step of these tests."""
    map_documents(out, source, odd_dropped, "odd", more, workers, compression=compression)
    return json.loads((out / "counts.json").read_text())


def test_documents_kept_and_dropped_are_all_rows_and_keep_their_order(tmp_path: Path) -> None:
    counts = mapped(tmp_path / "out", corpus(tmp_path / "in"))
    assert counts | {"seconds": 0} == {
        "step": "odd",
        "rows_in": 36,
        "rows_out": 20,
        "dropped": {"odd": 16},
        "shards": 4,
        "seconds": 0,
    }
    rows = read(tmp_path / "out")
    assert [row["n"] for row in rows] == [0, 2, 4, 6, 8] * 4
    assert [row["id"] for row in rows[:6]] == [f"part0.jsonl:{n}" for n in (1, 3, 5, 7, 9)] + ["part1.jsonl:1"]
    notes = (tmp_path / "out/notes/notes-00003.jsonl").read_text().splitlines()
    assert [json.loads(line)["id"] for line in notes] == [f"part3.jsonl:{n}" for n in (2, 4, 6, 8)]


@pytest.mark.parametrize("compression", ["none", "gz", "zst"])
def test_documents_with_two_workers_are_the_same_bytes_as_with_one(tmp_path: Path, compression: Compression) -> None:
    source = corpus(tmp_path / "in")
    for workers in (1, 2):
        mapped(tmp_path / str(workers), source, workers, compression)
    one, two = (sorted((tmp_path / name / "docs").iterdir()) for name in ("1", "2"))
    assert [path.name for path in one] == [path.name for path in two]
    assert len(one) == 4
    assert [path.read_bytes() for path in one] == [path.read_bytes() for path in two]
    assert len(read(tmp_path / "1")) == 20


def test_documents_of_an_output_keep_ids_and_columns(tmp_path: Path) -> None:
    mapped(tmp_path / "first", corpus(tmp_path / "in"))
    mapped(tmp_path / "second", tmp_path / "first")
    assert read(tmp_path / "second") == read(tmp_path / "first")


def test_documents_killed_in_the_middle_go_on_and_end_as_without_a_kill(tmp_path: Path) -> None:
    corpus(tmp_path / "in", files=6, rows=20)
    script = (
        "import sys; from pathlib import Path; from test_data_steps_shards import *\n"
        "map_documents(Path(sys.argv[1]), Path(sys.argv[2]), slow, 'odd', {}, 2)"
    )
    out, begun = tmp_path / "out", tmp_path / "begun"
    environment = {**os.environ, "BEGUN": str(begun), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", script, str(out), str(tmp_path / "in")]
    process = zygote.Popen(command, env=environment)
    deadline = time.monotonic() + 60
    while not any((out / ".shards/docs").glob("*.json")) and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    finished = {path.stem for path in (out / ".shards/docs").glob("*.json")}
    assert finished
    assert len(finished) < 6
    assert not (out / "counts.json").exists()
    before = begun.read_text().splitlines()
    time.sleep(1.5)  # until the workers of the dead process are gone too
    begun.write_text("")
    subprocess.run(command, env=environment, check=True, timeout=120)
    again = begun.read_text().splitlines()
    assert len(again) == 6 - len(finished)
    assert len(before) >= len(finished)
    map_documents(tmp_path / "whole", tmp_path / "in", odd_dropped, "odd", {}, 1)
    assert read(out) == read(tmp_path / "whole")
    assert not list((out / "docs").glob(".*"))
    counts = [json.loads((folder / "counts.json").read_text()) | {"seconds": 0} for folder in (out, tmp_path / "whole")]
    assert counts[0] == counts[1]


def test_documents_of_a_changed_file_are_done_again_and_no_other(tmp_path: Path) -> None:
    source, out = corpus(tmp_path / "in", files=3), tmp_path / "out"
    mapped(out, source)
    stamps = [path.stat().st_mtime_ns for path in sorted((out / "docs").iterdir())]
    write(source / "part1.jsonl", [{"text": "four"}])
    assert mapped(out, source)["rows_in"] == 19
    changed = [path.stat().st_mtime_ns for path in sorted((out / "docs").iterdir())]
    assert [a != b for a, b in zip(stamps, changed, strict=True)] == [False, True, False]
    (source / "part2.jsonl").unlink()
    mapped(out, source)
    assert len(list((out / "docs").iterdir())) == 2


def test_documents_into_a_folder_of_other_arguments_are_refused(tmp_path: Path) -> None:
    source = corpus(tmp_path / "in")
    mapped(tmp_path / "out", source, bound=1)
    with pytest.raises(UsageError, match="begun with bound = 1, not 2"):
        mapped(tmp_path / "out", source, bound=2)


def test_documents_without_the_column_are_an_error_with_file_and_line(tmp_path: Path) -> None:
    write(tmp_path / "in.jsonl", [{"text": "ab"}, {"body": "cd"}])
    with pytest.raises(PalestraError, match=r"in\.jsonl:2: no column 'text', only body"):
        mapped(tmp_path / "out", tmp_path / "in.jsonl")
    for name in ("a", "b"):
        write(tmp_path / f"two/{name}.jsonl", [{"text": 3}])
    with pytest.raises(PalestraError, match=r"\.jsonl:1: expected a string under 'text', found int"):
        mapped(tmp_path / "two_out", tmp_path / "two", workers=2)


def test_documents_without_text_or_not_unicode_are_dropped_and_counted(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('{"text": null}\n{"text": "\\ud83d!"}\n{"text": "ok"}\n')
    assert mapped(tmp_path / "out", source)["dropped"] == {"no text": 1, "not valid Unicode": 1}
    assert [row["text"] for row in read(tmp_path / "out")] == ["ok"]


def test_documents_that_do_not_fit_the_disk_leave_nothing_half_written(tmp_path: Path) -> None:
    source = corpus(tmp_path / "in", files=1, rows=200)
    script = (
        "import resource, signal, sys; from pathlib import Path; from test_data_steps_shards import *\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        f"resource.setrlimit(resource.RLIMIT_FSIZE, (4096, {resource.RLIM_INFINITY}))\n"
        "mapped(Path(sys.argv[1]), Path(sys.argv[2]))"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", script, str(tmp_path / "out"), str(source)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert "cannot write" in done.stderr
    assert "docs-00000.jsonl: File too large" in done.stderr
    assert not list((tmp_path / "out/docs").iterdir())
    assert not (tmp_path / "out/counts.json").exists()
    assert mapped(tmp_path / "out", source)["rows_out"] == 100


def test_sources_of_files_with_one_name_are_told_apart(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write(tmp_path / name / "x.jsonl", [{"text": name}])
    ids = [made for source in sources(tmp_path) for made, _, _ in source.rows()]
    assert ids == ["a/x.jsonl:1", "b/x.jsonl:1"]


@settings(max_examples=25, deadline=None)
@given(sizes=st.lists(st.integers(0, 400), min_size=1, max_size=150))
def test_sources_of_small_files_hold_each_once_in_order(tmp_path_factory: Any, sizes: list[int]) -> None:
    folder = tmp_path_factory.mktemp("files")
    for number, size in enumerate(sizes):
        (folder / f"{number:03}.txt").write_bytes(b"x" * size)
    found = sources(folder)
    assert [Path(file.path).name for one in found for file in one.files.values()] == [
        f"{n:03}.txt" for n in range(len(sizes))
    ]
    assert [one.number for one in found] == list(range(len(found)))
    most = sum(sizes) // 64
    assert all(len(one.files) == 1 or sum(file.size for file in one.files.values()) <= most for one in found)
    assert len(found) <= 2 * 64 + sum(size > most for size in sizes) + 1
