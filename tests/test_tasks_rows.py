"""Rows of a task come from a file, a folder, `PALESTRA_DATA`, a bucket or the Hub, in this order, in any format."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq
import pytest
import s3fs
from hub_server import Repository, hub_server
from s3_server import s3_server

from palestra.data.sources import push
from palestra.errors import PalestraError, UsageError
from palestra.tasks.dataset import files_of, load_rows, text_of

TRAIN, TEST = [{"question": f"{n} + 1?", "answer": n + 1} for n in range(5)], [{"question": "1 + 1?", "answer": 2}]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache and working folder, and nothing from outside."""
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("PALESTRA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nobody listens there
    for name in ("PALESTRA_DATA", "PALESTRA_MIRROR", "HF_TOKEN", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "cache"


def lines(rows) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def arrow_folder(folder: Path, rows) -> Path:
    """A folder as `save_to_disk` of `datasets` leaves it."""
    folder.mkdir(parents=True)
    table = pa.Table.from_pylist(rows)
    with (folder / "data-00000-of-00001.arrow").open("wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}))
    (folder / "dataset_info.json").write_text("{}")
    return folder


def folder_of(kind: str, folder: Path) -> Path:
    """A folder with both splits in one of the forms."""
    folder.mkdir(parents=True)
    for split, rows in (("train", TRAIN), ("test", TEST)):
        if kind == "jsonl":
            (folder / f"{split}.jsonl").write_text(lines(rows))
        elif kind == "json":
            (folder / f"{split}.json").write_text(json.dumps(rows))
        elif kind == "parquet":
            (folder / "main").mkdir(exist_ok=True)
            pq.write_table(pa.Table.from_pylist(rows[:3]), folder / "main" / f"{split}-00000-of-00002.parquet")
            pq.write_table(pa.Table.from_pylist(rows[3:] or rows[:0]), folder / f"main/{split}-00001-of-00002.parquet")
        else:
            arrow_folder(folder / split, rows)
    if kind == "arrow":
        (folder / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "test"]}))
    return folder


def rows_of(source: str | Path | None, split: str = "train", default: str = "lab/sums"):
    return load_rows(None if source is None else str(source), default=default, files=files_of(split))


@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet", "arrow"])
def test_rows_of_a_folder_are_those_of_the_split(tmp_path, kind):
    folder = folder_of(kind, tmp_path / "sums")
    assert rows_of(folder, "train") == TRAIN
    assert rows_of(folder, "test") == TEST


def test_rows_of_one_file_pattern_or_saved_folder_are_all_of_them(tmp_path):
    file = tmp_path / "mine.jsonl"
    file.write_text(lines(TRAIN))
    saved = arrow_folder(tmp_path / "saved", TRAIN)
    for source in (file, tmp_path / "mi*.jsonl", saved):
        assert rows_of(source, "test") == TRAIN


def test_rows_without_a_source_come_from_palestra_data(tmp_path, monkeypatch):
    monkeypatch.setenv("PALESTRA_DATA", str(tmp_path / "data"))
    folder_of("jsonl", tmp_path / "data" / "sums")
    assert rows_of(None) == TRAIN
    assert load_rows(None, default="lab/other", folder="sums", files=files_of("test")) == TEST
    # Named in the spec, with and without a folder of that name where the command runs.
    assert rows_of("sums", default="lab/other") == TRAIN
    (tmp_path / "work" / "sums").mkdir()
    (tmp_path / "work" / "sums" / "train.jsonl").write_text(lines(TEST))
    assert rows_of("sums", default="lab/other") == TEST


def test_rows_of_a_bucket_are_downloaded_once(tmp_path, monkeypatch):
    with s3_server() as s3:
        for name, value in s3.environment.items():
            monkeypatch.setenv(name, value)
        s3fs.S3FileSystem(skip_instance_cache=True).mkdir("bucket")
        push(folder_of("jsonl", tmp_path / "sums"), "s3://bucket/sums")
        assert rows_of("s3://bucket/sums") == TRAIN
        assert rows_of(None, "test", default="s3://bucket/sums") == TEST
        asked = s3.requests
        assert rows_of("s3://bucket/sums", "test") == TEST
        assert s3.requests == asked
        push(arrow_folder(tmp_path / "saved", TRAIN), "s3://bucket/saved")
        assert rows_of("s3://bucket/saved", "test") == TRAIN
        assert rows_of("s3://bucket/sums/test.jsonl") == TEST


def test_rows_of_a_name_come_from_the_hub_where_nothing_else_has_them(tmp_path, monkeypatch):
    with hub_server() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        files = {f"{split}.jsonl": lines(rows).encode() for split, rows in (("train", TRAIN), ("test", TEST))}
        hub.datasets = {"lab/sums": Repository(files)}
        assert rows_of(None) == TRAIN
        asked = len(hub.requests)
        assert rows_of("lab/sums", "test") == TEST
        assert len(hub.requests) == asked


@pytest.mark.parametrize("data", [None, "data"])
def test_rows_that_are_nowhere_tell_all_places(tmp_path, monkeypatch, data):
    if data:
        monkeypatch.setenv("PALESTRA_DATA", data)
    with pytest.raises(UsageError) as error:
        rows_of(None)
    assert "lab/sums" in str(error.value)
    assert ("it has no sums" if data else "not set") in str(error.value).splitlines()[-1]
    with pytest.raises(UsageError, match=r"no file gone\.jsonl"):
        rows_of("gone.jsonl")


def test_rows_of_a_split_that_a_folder_lacks_are_an_error_with_its_files(tmp_path):
    folder = folder_of("jsonl", tmp_path / "sums")
    (folder / "test.jsonl").unlink()
    with pytest.raises(UsageError, match=r"It has: train\.jsonl"):
        rows_of(folder, "test")


def test_rows_that_are_broken_name_file_and_line(tmp_path):
    (tmp_path / "train.jsonl").write_text(lines(TRAIN) + "{nothing\n")
    with pytest.raises(PalestraError, match=r"train\.jsonl:6"):
        rows_of(tmp_path)


def test_text_of_a_missing_or_odd_column_names_row_and_columns():
    assert [text_of(row, "answer", 0, "sums") for row in ({"answer": 2}, {"answer": "2"}, {"answer": 0.5})] == [
        "2",
        "2",
        "0.5",
    ]
    with pytest.raises(UsageError, match="sums, row 3: there is no 'result'; the row has question, answer"):
        text_of(TEST[0], "result", 2, "sums")
    with pytest.raises(UsageError, match=r"'answer' is \[2\], not text"):
        text_of({"answer": [2]}, "answer", 0, "sums")
