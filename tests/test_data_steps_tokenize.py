"""Tokenizing as a step: the store is that of the library, held-out sources are refused, a pipeline runs it all."""

import json
from pathlib import Path

import pytest

from palestra.data.steps import STEPS
from palestra.data.steps.tokenize import tokenize, train_tokenizer
from palestra.data.store import TokenStore
from palestra.data.tokenizers import Tokenizer
from palestra.errors import PalestraError, UsageError
from palestra.pipeline.data import data_step
from palestra.pipeline.outputs import Outputs
from palestra.pipeline.runner import run

TEXTS = [f"The fox number {n} jumps over {n + 1} dogs." for n in range(40)]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Two files of documents."""
    (tmp_path / "corpus").mkdir()
    for name, part in (("a", TEXTS[:25]), ("b", TEXTS[25:])):
        rows = "".join(json.dumps({"text": text}) + "\n" for text in part)
        (tmp_path / f"corpus/{name}.jsonl").write_text(rows)
    return tmp_path / "corpus"


def test_tokenize_of_documents_is_what_the_tokenizer_says_closed_by_eos(tmp_path: Path, source: Path) -> None:
    train_tokenizer(tmp_path / "vocabulary", source=source, vocab_size=300)
    for workers in (1, 2):
        tokenize(tmp_path / f"tokens{workers}", source=source, tokenizer=tmp_path / "vocabulary", workers=workers)
    store = TokenStore.open(tmp_path / "tokens2")
    tokenizer = Tokenizer.load(tmp_path / "vocabulary")
    assert [store[n].tolist() for n in range(40)] == [[*tokenizer.encode(text), tokenizer.eos] for text in TEXTS]
    assert (tmp_path / "tokens1/tokens.bin").read_bytes() == (tmp_path / "tokens2/tokens.bin").read_bytes()
    counts = json.loads((tmp_path / "tokens2/counts.json").read_text())
    assert (counts["rows_in"], counts["tokens"], counts["bytes"]) == (40, store.num_tokens, sum(map(len, TEXTS)))


def test_train_tokenizer_leaves_out_texts_that_are_not_unicode(tmp_path: Path) -> None:
    rows = [{"text": "some words"}, {"text": "half \ud800 a pair"}, {"text": None}]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    train_tokenizer(tmp_path / "out", source=tmp_path / "in.jsonl", vocab_size=260)
    assert json.loads((tmp_path / "out/counts.json").read_text())["rows_in"] == 1


def test_train_tokenizer_of_the_first_documents_reads_no_more(tmp_path: Path, source: Path) -> None:
    train_tokenizer(tmp_path / "out", source=source, vocab_size=270, max_documents=5)
    assert json.loads((tmp_path / "out/counts.json").read_text())["rows_in"] == 5
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(PalestraError, match=r"empty\.jsonl has no documents"):
        train_tokenizer(tmp_path / "bad", source=tmp_path / "empty.jsonl", vocab_size=270)


@pytest.mark.parametrize("name", ["test.jsonl", "set-validation-00.jsonl", "eval/part.jsonl", "dev/x/part.jsonl"])
def test_tokenize_of_what_is_to_be_tested_on_is_refused_unless_told(tmp_path: Path, source: Path, name: str) -> None:
    train_tokenizer(tmp_path / "vocabulary", source=source, vocab_size=270)
    held_out = tmp_path / "data" / name
    held_out.parent.mkdir(parents=True)
    held_out.write_text('{"text": "a"}\n')
    with pytest.raises(UsageError, match="in its name, and training on a test set"):
        tokenize(tmp_path / "out", source=held_out, tokenizer=tmp_path / "vocabulary")
    tokenize(tmp_path / "out", source=held_out, tokenizer=tmp_path / "vocabulary", allow_held_out=True, workers=1)
    assert len(TokenStore.open(tmp_path / "out")) == 1


def test_tokenize_of_latest_and_contest_is_not_refused(tmp_path: Path, source: Path) -> None:
    train_tokenizer(tmp_path / "vocabulary", source=source, vocab_size=270)
    path = tmp_path / "latest/contest.jsonl"
    path.parent.mkdir()
    path.write_text('{"text": "a"}\n')
    tokenize(tmp_path / "out", source=path, tokenizer=tmp_path / "vocabulary", workers=1)
    assert len(TokenStore.open(tmp_path / "out")) == 1


def test_data_steps_of_a_pipeline_run_one_after_the_other_and_not_again(tmp_path: Path, source: Path) -> None:
    raw = data_step("download")(url=str(source))
    clean = data_step("filter")(
        source=raw, min_words=3, min_stop_words=None, min_alphabetic_words=0.5, repetition=False, workers=1
    )
    vocabulary = data_step("train_tokenizer")(source=clean, vocab_size=280)
    tokens = data_step("tokenize")(source=clean, tokenizer=vocabulary, workers=1)
    outputs = Outputs(tmp_path / "prefix")
    outcome = run([tokens], outputs)
    assert len(outcome.ran) == 4
    (done,) = (address for address in outcome.ran if address.startswith("tokenize-"))
    assert len(TokenStore.open(outputs.path(done))) == 40
    assert run([tokens], outputs).ran == []
    same = data_step("tokenize")(source=clean, tokenizer=vocabulary, workers=2)  # how, not what
    assert run([same], outputs).ran == []


def test_steps_of_the_table_are_all_there() -> None:
    for name in STEPS:
        step = data_step(name)
        assert step.__doc__
    with pytest.raises(UsageError, match="no data step 'nothing'"):
        data_step("nothing")
