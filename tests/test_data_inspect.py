"""`palestra data inspect`: the numbers are those of the data, wherever they lie."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from s3_server import s3_server
from typer.testing import CliRunner

from palestra.cli.main import app
from palestra.data.inspect import PERCENTILES, Inspection, inspect, percentiles
from palestra.data.steps.filters import filter_documents
from palestra.data.steps.tokenize import tokenize, train_tokenizer
from palestra.errors import UsageError

ROWS = [
    {"text": "x" * n, "n": n, "tags": ["a"] * (n % 3), **({"extra": None} if n % 4 == 0 else {})} for n in range(20)
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Rows in two files."""
    (tmp_path / "data").mkdir()
    for name, rows in (("a", ROWS[:12]), ("b", ROWS[12:])):
        (tmp_path / f"data/{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path / "data"


def test_inspect_of_a_folder_finds_types_lengths_and_rows(folder: Path) -> None:
    found = inspect(str(folder), samples=2)
    assert isinstance(found, Inspection)
    assert ([file.path for file in found.files], found.rows) == ([str(folder / "a.jsonl"), str(folder / "b.jsonl")], 20)
    assert found.complete
    assert dict(found.columns["text"].types) == {"text": 20}
    assert dict(found.columns["extra"].types) == {"null": 5, "missing": 15}
    assert found.columns["text"].percentiles()[50] in (9, 10)
    assert found.columns["n"].percentiles()[100] == 19
    assert max(found.columns["tags"].lengths) == 2
    assert [row["n"] for row in found.samples] == [0, 12]
    assert list(found.columns) == ["text", "n", "tags", "extra"]


def test_inspect_of_some_rows_says_that_there_are_more(folder: Path) -> None:
    found = inspect(str(folder), rows=6)
    assert isinstance(found, Inspection)
    assert (found.rows, found.complete) == (6, False)
    assert sorted(found.columns["n"].numbers) == [0, 1, 2, 12, 13, 14]
    everything = inspect(str(folder), rows=0)
    assert isinstance(everything, Inspection)
    assert (everything.rows, everything.complete) == (20, True)


@given(st.lists(st.integers(-50, 50), min_size=1))
def test_percentiles_of_any_numbers_are_among_them_and_in_order(values: list[int]) -> None:
    found = percentiles(values)
    assert list(found) == list(PERCENTILES)
    assert set(found.values()) <= set(values)
    assert list(found.values()) == sorted(found.values())
    assert (found[0], found[100]) == (min(values), max(values))


def test_inspect_of_a_token_store_shows_its_tokens(folder: Path, tmp_path: Path) -> None:
    train_tokenizer(tmp_path / "vocabulary", source=folder, vocab_size=260)
    tokenize(tmp_path / "tokens", source=folder, tokenizer=tmp_path / "vocabulary", workers=1)
    lengths = np.diff(np.fromfile(tmp_path / "tokens/ends.bin", "<i8"), prepend=0)
    said = CliRunner().invoke(app, ["data", "inspect", str(tmp_path / "tokens"), "--samples", "2"]).output
    assert f"20 documents, {lengths.sum()} tokens" in said
    assert f"{sum(range(20))} bytes, {sum(range(20)) / lengths.sum():.2f} bytes per token" in said
    assert re.search(rf"trained on +{lengths.sum()} tokens", said)
    assert re.search(rf"tokens per document +{lengths.min()} .* {lengths.max()}\s", said)
    samples = re.findall(r"sample (\d): ([\d ]+) …", said)
    assert [(number, len(tokens.split())) for number, tokens in samples] == [("1", lengths[0]), ("2", lengths[10])]


def test_inspect_command_prints_the_data_and_what_a_step_noted(folder: Path, tmp_path: Path) -> None:
    filter_documents(
        tmp_path / "out",
        source=folder,
        min_words=1,
        min_chars=5,
        mean_word_length=None,
        min_stop_words=None,
        repetition=False,
        workers=1,
    )
    said = CliRunner().invoke(app, ["data", "inspect", str(tmp_path / "out"), "--samples", "1"])
    assert said.exit_code == 0, said.output
    assert "15 rows" in said.output
    assert "fewer than 5 characters" in said.output
    assert "rows_in: 20" in said.output
    with pytest.raises(UsageError, match="there is no file or folder"):
        inspect(str(tmp_path / "nothing"))


def test_inspect_of_a_bucket_reads_it_there(monkeypatch: pytest.MonkeyPatch) -> None:
    with s3_server() as s3:
        for name, value in s3.environment.items():
            monkeypatch.setenv(name, value)
        import s3fs

        files = s3fs.S3FileSystem(skip_instance_cache=True)
        files.mkdir("bucket")
        files.pipe_file("bucket/set/a.jsonl", b'{"text": "abc"}\n{"text": "de"}\n')
        found = inspect("s3://bucket/set")
        assert isinstance(found, Inspection)
        assert (found.rows, found.columns["text"].lengths) == (2, [3, 2])
