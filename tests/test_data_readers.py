import gzip
import json
import os
import tracemalloc
from pathlib import Path

import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from s3_server import s3_server

from palestra.data import readers
from palestra.data.readers import Shard, numbered_rows, read_rows, shards
from palestra.errors import PalestraError, UsageError

DATA = Path(__file__).parents[1] / os.environ.get("PALESTRA_DATA", "../shared/data")
ROWS = [{"text": "one"}, {"text": "zwei\n", "id": 2}, {"text": "三 𝟛", "tags": ["a", None]}]


def one(path: Path, **options) -> Shard:
    (found,) = shards(path, **options)
    return found


def lines(rows) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def save_arrow(path: Path, rows, *, random_access: bool = False, batch: int = 2) -> None:
    table = pa.Table.from_pylist(rows)
    new = pyarrow.ipc.new_file if random_access else pyarrow.ipc.new_stream
    with path.open("wb") as file, new(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=batch)


def save_to_disk(folder: Path, *parts) -> None:
    """A folder as `datasets` saves it."""
    folder.mkdir(parents=True)
    names = [f"data-{i:05}-of-{len(parts):05}.arrow" for i in range(len(parts))]
    for name, rows in zip(names, parts, strict=True):
        save_arrow(folder / name, rows)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    (folder / "dataset_info.json").write_text("{}")


# Formats.


@pytest.mark.parametrize(
    "name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.json", "a.json.gz", "a.parquet", "a.arrow"]
)
def test_rows_of_every_format_are_those_written(tmp_path, name):
    path, rows = tmp_path / name, [{"text": f"Nr. {i} …\n", "number": i} for i in range(1000)]
    text = (json.dumps(rows, indent=1) if ".json." in f"{name}." and ".jsonl" not in name else lines(rows)).encode()
    if name == "a.parquet":
        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=100)
    elif name == "a.arrow":
        save_arrow(path, rows, batch=300)
    elif name.endswith(".gz"):
        path.write_bytes(gzip.compress(text))
    elif name.endswith(".zst"):
        path.write_bytes(pa.compress(text, codec="zstd", asbytes=True))
    else:
        path.write_bytes(text)
    assert list(read_rows(one(path))) == rows


def test_rows_of_arrow_in_the_random_access_format_are_read_too(tmp_path):
    save_arrow(tmp_path / "a.arrow", [{"text": str(i)} for i in range(7)], random_access=True)
    assert [row["text"] for row in read_rows(one(tmp_path / "a.arrow"))] == list("0123456")


def test_text_whole_file_is_one_document_without_mark_and_carriage_returns(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbffirst\r\n\r\nsecond\r\n")
    assert list(read_rows(one(tmp_path / "a.txt"))) == [{"text": "first\n\nsecond\n"}]
    assert list(read_rows(one(tmp_path / "a.txt"), text_key="story")) == [{"story": "first\n\nsecond\n"}]


def test_text_split_into_lines_numbers_them_and_leaves_empty_ones_out(tmp_path):
    (tmp_path / "a.txt").write_text("one\n\nthree")
    shard = one(tmp_path / "a.txt", split="\n")
    assert list(numbered_rows(shard)) == [(1, {"text": "one"}), (3, {"text": "three"})]
    assert shard.place(3) == f"{tmp_path}/a.txt:3"


def test_text_that_is_empty_has_no_documents(tmp_path):
    (tmp_path / "a.txt").write_text("")
    assert list(read_rows(one(tmp_path / "a.txt"))) == []


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.text("ab<>|\n", max_size=12), max_size=12), st.sampled_from(["\n", "<|end|>", "||"]), st.integers(1, 9)
)
def test_text_split_by_any_separator_in_any_chunks_equals_str_split(tmp_path_factory, pieces, split, chunk):
    path = tmp_path_factory.mktemp("split") / "a.txt"
    path.write_text(split.join(pieces))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(readers, "CHUNK", chunk)
        found = [row["text"] for row in read_rows(one(path, split=split))]
    assert found == [document for document in split.join(pieces).split(split) if document]


values = st.recursive(
    st.none() | st.booleans() | st.floats(allow_nan=False) | st.text(), lambda v: st.lists(v, max_size=3)
)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.dictionaries(st.text(max_size=3), values, max_size=3), max_size=5), st.integers(1, 40), st.booleans()
)
def test_json_list_read_in_chunks_equals_json_loads(tmp_path_factory, rows, chunk, listed):
    path = tmp_path_factory.mktemp("json") / "a.json"
    path.write_text(json.dumps(rows, indent=1) if listed else "\n".join(map(json.dumps, rows)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(readers, "CHUNK", chunk)
        found = list(numbered_rows(one(path)))
    assert [row for _, row in found] == rows
    text = path.read_text().splitlines()
    assert all(text[number - 1].lstrip().startswith("{") for number, _ in found)


# Which files.


def test_shards_of_a_pattern_are_sorted_and_carry_size_and_stamp(tmp_path):
    for name in ("b.jsonl", "a.jsonl", "c.jsonl.gz"):
        (tmp_path / name).write_text("{}\n")
    found = shards(f"{tmp_path}/*.jsonl*")
    assert [Path(shard.path).name for shard in found] == ["a.jsonl", "b.jsonl", "c.jsonl.gz"]
    assert {shard.size for shard in found} == {3}
    assert found[0] == found[0].now()
    os.utime(tmp_path / "a.jsonl", (1, 1))
    assert found[0] != found[0].now()
    assert found[0].checksum() == found[1].checksum()


def test_shards_of_a_list_keep_its_order(tmp_path):
    for name in ("b.txt", "a.txt"):
        (tmp_path / name).write_text(name)
    found = shards([tmp_path / "b.txt", f"{tmp_path}/a.*"])
    assert [row["text"] for shard in found for row in read_rows(shard)] == ["b.txt", "a.txt"]


def test_shards_of_a_folder_are_its_data_files_at_any_depth_without_the_rest(tmp_path):
    (tmp_path / "deep" / "er").mkdir(parents=True)
    (tmp_path / ".hidden").mkdir()
    for name in (
        "z.jsonl",
        "deep/er/a.jsonl.gz",
        "README.md",
        "LICENSE",
        ".hidden/x.jsonl",
        "deep/.y.jsonl",
        "dataset_infos.json",
    ):
        (tmp_path / name).write_text("")
    assert [shard.path for shard in shards(tmp_path)] == [f"{tmp_path}/deep/er/a.jsonl.gz", f"{tmp_path}/z.jsonl"]


def test_shards_of_a_folder_with_a_licence_among_the_texts_are_not_guessed(tmp_path):
    (tmp_path / "data.json").write_text("[]")
    (tmp_path / "LICENSE.txt").write_text("do not train on this")
    with pytest.raises(UsageError, match=r"\.json and \.txt.*pattern"):
        shards(tmp_path)


def test_shards_of_a_saved_dataset_are_its_arrow_files_in_order(tmp_path):
    save_to_disk(tmp_path / "train", ROWS[:2], ROWS[2:])
    found = shards(tmp_path / "train")
    assert [row["text"] for shard in found for row in read_rows(shard)] == [row["text"] for row in ROWS]
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(UsageError, match=r"splits train, test.*/train"):
        shards(tmp_path)
    (tmp_path / "train" / "data-00001-of-00002.arrow").unlink()
    with pytest.raises(UsageError, match=r"incomplete.*data-00001-of-00002"):
        shards(tmp_path / "train")


def test_shards_of_a_name_with_brackets_are_that_file(tmp_path):
    (tmp_path / "a[1].txt").write_text("x")
    assert one(tmp_path / "a[1].txt").size == 1


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("nothing.jsonl", "no file or folder .*nothing.jsonl"),
        ("*.parquet", "no file matches"),
        ("empty", "no files that end in"),
        ("data.csv", r"data.csv: unknown format.*\.parquet"),
        ("packed.parquet.gz", "unknown format"),
        ("gopher://data/x.txt", "cannot read gopher"),
        ([], "no data files"),
        (["a.txt", "*.txt"], r"a.txt is given twice"),
    ],
)
def test_shards_that_are_not_there_or_not_clear_are_refused(tmp_path, monkeypatch, where, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    for name in ("data.csv", "packed.parquet.gz", "a.txt"):
        (tmp_path / name).write_text("x")
    with pytest.raises(UsageError, match=message):
        shards(where)


def test_shards_and_rows_of_a_bucket_are_read_like_files(monkeypatch):
    with s3_server() as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        import s3fs

        bucket = s3fs.S3FileSystem(skip_instance_cache=True)
        bucket.mkdir("corpus")
        bucket.pipe_file("corpus/b.jsonl.gz", gzip.compress(lines(ROWS).encode()))
        table = pa.BufferOutputStream()
        pq.write_table(pa.Table.from_pylist(ROWS), table)
        bucket.pipe_file("corpus/deep/a.parquet", table.getvalue().to_pybytes())
        (packed,) = shards("s3://corpus/*.gz")
        (columns,) = shards("s3://corpus/deep")
        assert packed.path == "s3://corpus/b.jsonl.gz"
        assert not packed.local
        assert list(read_rows(packed)) == ROWS
        assert [row["text"] for row in read_rows(columns)] == [row["text"] for row in ROWS]
        bucket.pipe_file("corpus/b.jsonl.gz", gzip.compress(b"{}\n"))
        assert packed.now().stamp != packed.stamp


# Bad rows.


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"text": "a"}\n\n{"text": b}\n', r"a\.jsonl:3: not valid JSON .*one object a line"),
        ("a.jsonl", b'{"text": "a"}\n["b"]\n', r'a\.jsonl:2: expected a JSON object, found \["b"\]'),
        ("a.jsonl", b'{"text": "\xff"}\n', r"a\.jsonl:1: not valid JSON .*utf-8"),
        ("a.json", b'[\n{"a": 1},\n{"a": x}\n]', r"a\.json:3: not valid JSON \(Expecting value\)"),
        ("a.json", b'[\n{"a": 1},\n{"a": 2}\n', r"a\.json:4: the list is not closed"),
        ("a.json", b'[\n{"a": 1},\n{"a"', r"a\.json:3: not valid JSON"),
        ("a.json", b'[\n{"a": 1}\n{"a": 2}]', r"a\.json:3: expected a list of objects, found '\{\"a\": 2"),
        ("a.json", b'[{"a": 1},\n]', r"a\.json:2: not valid JSON"),
        ("a.json", b'[{"a": 1}] x', r"a\.json:1: .*found 'x'"),
        ("a.json", b"[1]", r"a\.json:1: expected a JSON object, found 1"),
        ("a.json", b'"text"', r'a\.json:1: expected a JSON object, found "text"'),
        ("a.jsonl.gz", gzip.compress(b'{"text": "a"}\n' * 100, mtime=0)[:-9], r"a\.jsonl\.gz cannot be read: .*end"),
        ("a.jsonl.gz", b'{"text": "a"}\n', r"a\.jsonl\.gz cannot be read: .*gzip"),
        ("a.jsonl.zst", b"nonsense", r"a\.jsonl\.zst cannot be read"),
        ("a.parquet", b"nonsense", r"a\.parquet cannot be read: .*[Pp]arquet"),
        ("a.arrow", b"nonsense", r"a\.arrow cannot be read"),
        ("a.txt", b"abc\xff", r"a\.txt cannot be read: .*utf-8"),
    ],
)
def test_bad_row_is_an_error_with_its_place_and_what_was_expected(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(PalestraError, match=message):
        list(read_rows(one(tmp_path / name)))


def test_bad_json_in_a_large_file_is_found_without_reading_the_rest(tmp_path):
    (tmp_path / "a.json").write_text('[{"a": x},' + '{"a": 1},' * 50_000)
    (tmp_path / "b.json").write_text("[" + '{"a": 1},' * 50_000 + '{"a": "' + "b" * 200_000)
    with pytest.raises(PalestraError, match=r"a\.json:1"):
        list(read_rows(one(tmp_path / "a.json")))
    with pytest.raises(PalestraError, match=r"b\.json:1.*Unterminated"):
        list(read_rows(one(tmp_path / "b.json")))


def test_file_removed_since_it_was_listed_is_named(tmp_path):
    (tmp_path / "a.jsonl").write_text("{}\n")
    shard = one(tmp_path / "a.jsonl")
    (tmp_path / "a.jsonl").unlink()
    with pytest.raises(PalestraError, match=r"a\.jsonl was removed"):
        list(read_rows(shard))


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.json", "a.parquet", "a.arrow", "a.txt"])
def test_reading_a_large_file_takes_little_memory(tmp_path, name):
    path, rows = tmp_path / name, [{"text": f"{i:06}" + "x" * 2_000} for i in range(4_000)]  # 8 MB
    if name == "a.parquet":
        pq.write_table(pa.Table.from_pylist(rows), path, compression="none", use_dictionary=False)
    elif name == "a.arrow":
        save_arrow(path, rows, batch=500)
    else:
        text = {"a.json": json.dumps(rows), "a.txt": "\n".join(row["text"] for row in rows)}.get(name, lines(rows))
        path.write_bytes(gzip.compress(text.encode(), 1) if name.endswith(".gz") else text.encode())
    del rows
    before = pa.total_allocated_bytes()
    tracemalloc.start()
    try:
        arrow = 0
        for number, _ in enumerate(read_rows(one(path, split="\n"))):
            arrow = max(arrow, pa.total_allocated_bytes() - before) if number % 500 == 0 else arrow
        assert number == 3_999
        assert tracemalloc.get_traced_memory()[1] < 3e6
        assert arrow < 3e6
    finally:
        tracemalloc.stop()


# Real files.


@pytest.mark.skipif(not DATA.is_dir(), reason="the shared data sets are not here (PALESTRA_DATA)")
@pytest.mark.parametrize(
    ("where", "key", "count"),
    [
        ("gsm8k/test.jsonl", "question", 1319),
        ("math/*algebra_test.json", "problem", 1187 + 871 + 903),
        ("mbpp/sanitized-mbpp.json", "prompt", 427),
        ("tinyshakespeare", "text", 1),
        ("gutenberg", "text", 6),
    ],
)
def test_real_files_are_read_whole(where, key, count):
    rows = [row for shard in shards(str(DATA / where)) for row in read_rows(shard)]
    assert len(rows) == count
    assert all(isinstance(row[key], str) and "\r" not in row[key] and "\ufeff" not in row[key] for row in rows)
