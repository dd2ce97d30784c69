import json
import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
import zygote
from byte_encoder import ByteEncoder
from hypothesis import given, settings
from hypothesis import strategies as st

from palestra.data.encoders import TextEncoder
from palestra.data.readers import shards
from palestra.data.steps import tokenize as tokenize
from palestra.data.steps.tokenize import build_store
from palestra.data.store import Documents, Example, TokenStore, Windows
from palestra.data.tokenizers import Tokenizer, character_tokenizer, train_bpe
from palestra.errors import PalestraError, UsageError

BYTES = ByteEncoder()
TEXTS = [["one", "ZWEI zwei", ""], ["three 三"], [], ["x" * 700, "Y", "z"] * 200]


def write_shards(folder: Path, texts=TEXTS) -> list:
    folder.mkdir(parents=True, exist_ok=True)
    for number, group in enumerate(texts):
        (folder / f"{number}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in group))
    return shards(folder)


def contents(folder: Path) -> dict[str, bytes]:
    """All files of a store with their bytes; a killed process leaves its lease."""
    return {
        path.name: path.read_bytes() for path in folder.iterdir() if path.name not in (".lease.json.lock", "lease.json")
    }


def documents(store: TokenStore) -> list[list[int]]:
    return [store[i].tolist() for i in range(len(store))]


@pytest.fixture(autouse=True)
def no_sync(monkeypatch):
    """Slow, and of no matter to a process that is killed; only a power cut would tell."""
    monkeypatch.setattr(os, "fsync", lambda file: None)


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    return write_shards(tmp_path_factory.mktemp("sources"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory, sources) -> TokenStore:
    """A store that was built in one go; only to be read."""
    return build_store(tmp_path_factory.mktemp("whole"), sources, ByteEncoder(masked=True))


def in_child(function) -> int:
    """Run in a forked process that ends with it; its pid."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            function()
            code = 0
        finally:
            os._exit(code)
    return pid


# What is in it.


def test_store_holds_every_row_in_order_with_its_mask_and_bytes(whole):
    texts = [text for group in TEXTS for text in group]
    assert len(whole) == len(texts)
    assert documents(whole) == [[*text.encode(), 256] for text in texts]
    assert whole.loss[whole.ends[0] : whole.ends[1]].tolist() == [False] * 4 + [True] * 6
    assert whole.num_bytes == sum(len(text.encode()) for text in texts)
    assert whole.num_tokens == whole.num_bytes + len(texts)
    assert whole.ledger.fingerprint == "b" * 64
    assert [record.documents for record in whole.ledger.shards] == [3, 1, 0, 600]


def test_store_document_is_a_view_of_the_file(whole):
    assert whole[1].base is not None
    assert isinstance(whole.tokens, np.memmap)
    assert whole.tokens.dtype == np.uint16
    with pytest.raises(ValueError, match="read-only"):
        whole[1][0] = 3


@pytest.mark.parametrize("index", [-1, 604])
def test_store_document_outside_is_refused(whole, index):
    with pytest.raises(IndexError, match="604"):
        whole[index]


@pytest.mark.parametrize(("vocab_size", "bits"), [(1 << 16, 16), ((1 << 16) + 1, 32)])
def test_store_tokens_have_the_smallest_type_that_fits(tmp_path, vocab_size, bits):
    encoder = ByteEncoder(vocab_size=vocab_size, shift=vocab_size - 257)
    store = build_store(tmp_path / "store", write_shards(tmp_path / "a", [["ab"]]), encoder)
    assert store.tokens.dtype == np.dtype(f"u{bits // 8}")
    assert store[0].tolist() == [vocab_size - 257 + 97, vocab_size - 257 + 98, vocab_size - 1]


def test_store_without_masks_has_none(tmp_path):
    store = build_store(tmp_path / "store", write_shards(tmp_path / "a", [["ab"]]), BYTES)
    assert store.loss is None
    assert Windows(store, 2)[0].loss is None


def test_text_encoder_with_a_real_tokenizer_round_trips_and_closes_documents(tmp_path):
    texts = ["Who comes here?", "A grenadier.", "Naïve café: 三 <|endoftext|>"]
    folder = tmp_path / "tokenizer"
    train_bpe(texts, 300).save(folder)
    encoder, tokenizer = TextEncoder.load(folder), Tokenizer.load(folder)
    found = write_shards(tmp_path / "a", [texts[:1], texts[1:]])
    store = build_store(tmp_path / "store", found, encoder, workers=2)
    assert [store[i][-1] for i in range(3)] == [tokenizer.eos] * 3
    assert [tokenizer.decode(store[i][:-1].tolist()) for i in range(3)] == texts
    assert tokenizer.eos not in store[2][:-1]
    opened = TokenStore.open(store.folder)
    assert opened.num_bytes == sum(len(text.encode()) for text in texts)
    bare = build_store(tmp_path / "bare", found, replace(encoder, closing=None))
    assert bare.num_tokens == store.num_tokens - 3
    with pytest.raises(UsageError, match=r"closing = \d+, and None"):
        build_store(store.folder, found, replace(encoder, closing=None))


def test_text_encoder_unknown_character_is_named_with_its_line(tmp_path):
    character_tokenizer("ab").save(tmp_path / "tokenizer")
    found = write_shards(tmp_path / "a", [["ab", "ba", "abc"]])
    with pytest.raises(PalestraError, match=r"0\.jsonl:3: .*'c'"):
        build_store(tmp_path / "store", found, TextEncoder.load(tmp_path / "tokenizer"))


# Building in parallel, killed, and by two at once.


def test_build_bytes_do_not_depend_on_workers(tmp_path, sources, whole):
    store = build_store(tmp_path / "store", sources, ByteEncoder(masked=True), workers=3)
    assert contents(store.folder) == contents(whole.folder)


def test_build_killed_at_every_write_goes_on_to_the_same_bytes(tmp_path):
    encoder, found = ByteEncoder(masked=True), write_shards(tmp_path / "a", TEXTS[:2])
    whole = contents(build_store(tmp_path / "whole", found, encoder).folder)
    rename = Path.replace

    def build_and_die(folder: Path, at: int) -> None:
        count = 0

        def reached() -> None:
            nonlocal count
            if count == at:
                os.kill(os.getpid(), signal.SIGKILL)
            count += 1

        os.fsync = lambda file: reached()
        Path.replace = lambda path, target: (reached(), rename(path, target))[1]
        build_store(folder, found, encoder)

    for at in range(500):
        folder = tmp_path / str(at)
        _, status = os.waitpid(in_child(lambda folder=folder, at=at: build_and_die(folder, at)), 0)
        if os.waitstatus_to_exitcode(status) == 0:
            break
        ledger = folder / "ledger.json"
        if ledger.exists() and not json.loads(ledger.read_text())["finished"]:
            with pytest.raises(PalestraError, match="not finished"):
                TokenStore.open(folder)
        left = contents(build_store(folder, found, encoder).folder)
        assert {name: data for name, data in left.items() if not name.startswith(".lease")} == whole, at
    assert 30 < at < 499


def test_build_that_goes_on_skips_the_shards_that_are_done(tmp_path, sources):
    folder, log = tmp_path / "store", tmp_path / "log"
    bad = [*sources[:3], replace(sources[3], path=f"{tmp_path}/gone.jsonl")]
    with pytest.raises(PalestraError, match="gone"):
        build_store(folder, bad, ByteEncoder(log=str(log)))
    assert log.read_text().splitlines() == ["one", "three 三"]
    build_store(folder, sources, ByteEncoder(log=str(log)))
    assert log.read_text().splitlines()[2:] == ["x" * 700, "Y", "z"]  # 600 rows in three batches
    build_store(folder, sources, ByteEncoder(log=str(log)))
    assert len(log.read_text().splitlines()) == 5


SCRIPT = """
import sys
from byte_encoder import ByteEncoder
from palestra.data.readers import shards
from palestra.data.steps.tokenize import build_store
from palestra.data.tokenizers import Tokenizer, character_tokenizer, train_bpe
build_store(sys.argv[2], shards(sys.argv[1]), ByteEncoder(masked=True, seconds=0.1), workers=2)
"""


def test_build_with_workers_killed_leaves_no_process_and_goes_on(tmp_path):
    many = write_shards(tmp_path / "a", [[f"text {i}"] for i in range(12)])
    parts = tmp_path / "store" / "parts"
    process = zygote.Popen([sys.executable, "-c", SCRIPT, tmp_path / "a", tmp_path / "store"])
    deadline = time.monotonic() + 60
    while len(list(parts.glob("*.record.json"))) < 3:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    children = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.wait()
    _, alive = psutil.wait_procs(children, timeout=10)
    assert not alive
    assert 3 <= len(list(parts.glob("*.record.json"))) < 12
    store = build_store(tmp_path / "store", many, ByteEncoder(masked=True))
    assert contents(store.folder) == contents(build_store(tmp_path / "again", many, ByteEncoder(masked=True)).folder)


def test_build_by_two_processes_at_once_encodes_each_shard_once(tmp_path):
    many = write_shards(tmp_path / "a", [[f"text {i}"] for i in range(8)])
    encoder = ByteEncoder(seconds=0.05, log=str(tmp_path / "log"))
    children = [in_child(lambda: build_store(tmp_path / "store", many, encoder)) for _ in range(2)]
    assert [os.waitpid(pid, 0)[1] for pid in children] == [0, 0]
    assert sorted((tmp_path / "log").read_text().splitlines()) == [f"text {i}" for i in range(8)]
    assert len(TokenStore.open(tmp_path / "store")) == 8


# What is refused.


def test_open_of_nothing_is_refused(tmp_path):
    with pytest.raises(UsageError, match="no token store"):
        TokenStore.open(tmp_path)


def test_open_of_another_format_is_refused(tmp_path):
    build_store(tmp_path / "store", write_shards(tmp_path / "a", [["ab"]]), BYTES)
    ledger = json.loads((tmp_path / "store" / "ledger.json").read_text())
    (tmp_path / "store" / "ledger.json").write_text(json.dumps({**ledger, "format": 99}))
    with pytest.raises(PalestraError, match="another format"):
        TokenStore.open(tmp_path / "store")


@pytest.mark.parametrize("name", ["tokens.bin", "ends.bin", "loss.bin"])
def test_open_of_a_store_that_was_cut_off_names_the_file(tmp_path, name):
    build_store(tmp_path / "store", write_shards(tmp_path / "a", [["abc"]]), ByteEncoder(masked=True))
    path = tmp_path / "store" / name
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(PalestraError, match=f"{name} has .* bytes and should have"):
        TokenStore.open(tmp_path / "store")


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (ByteEncoder(tokenizer="gpt2", fingerprint="c" * 64), r"bytes \(bbbbbbbbbbbb\), and gpt2 \(cccccccccccc\)"),
        (ByteEncoder(shift=1, vocab_size=258), "begun with shift = 0, not 1"),
        (ByteEncoder(masked=True), "begun with masked = False, not True"),
    ],
)
def test_build_over_a_store_made_otherwise_is_refused(tmp_path, sources, other, message):
    build_store(tmp_path / "store", sources, BYTES)
    with pytest.raises(UsageError, match=message):
        build_store(tmp_path / "store", sources, other)


@pytest.mark.parametrize("finished", [True, False])
def test_build_over_changed_shards_is_refused_by_name(tmp_path, finished):
    folder, store = tmp_path / "a", tmp_path / "store"
    found = write_shards(folder, [["one"], ["two"], ["three"]])
    if finished:
        build_store(store, found, BYTES)
    else:
        with pytest.raises(PalestraError, match="gone"):
            build_store(store, [*found[:2], replace(found[2], path=f"{tmp_path}/gone.jsonl")], BYTES)
    os.utime(folder / "0.jsonl", (1, 1))  # touched, the same content
    (folder / "1.jsonl").write_text('{"text": "TWO"}\n')  # other content of the same size
    os.utime(folder / "1.jsonl", (1, 1))
    with pytest.raises(UsageError, match=r"made from .*1\.jsonl .* has other content"):
        build_store(store, shards(folder), BYTES)
    (folder / "1.jsonl").write_text('{"text": "longer"}\n')
    with pytest.raises(UsageError, match=r"1\.jsonl \(16 bytes.*1\.jsonl \(19 bytes"):
        build_store(store, shards(folder), BYTES)
    (folder / "1.jsonl").write_text('{"text": "two"}\n')
    assert documents(build_store(store, shards(folder), BYTES))[1] == [*b"two", 256]


def test_build_over_other_shards_is_refused_by_name(tmp_path):
    found = write_shards(tmp_path / "a", [["one"], ["two"]])
    build_store(tmp_path / "store", found, BYTES)
    with pytest.raises(UsageError, match=r"finished without .*2\.jsonl"):
        build_store(tmp_path / "store", write_shards(tmp_path / "a", [["one"], ["two"], ["three"]]), BYTES)
    with pytest.raises(UsageError, match=r"holds .*1\.jsonl, which is not among the 1"):
        build_store(tmp_path / "store", found[:1], BYTES)
    with pytest.raises(UsageError, match=r"made from .*0\.jsonl .*, and .*1\.jsonl .* has other content"):
        build_store(tmp_path / "store", found[::-1], BYTES)
    (tmp_path / "a").rename(tmp_path / "moved")
    build_store(tmp_path / "store", shards(f"{tmp_path}/moved/[01].jsonl"), BYTES)


def test_build_with_other_splitting_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("a\nb\n")
    assert len(build_store(tmp_path / "store", shards(tmp_path / "a.txt", split="\n"), BYTES)) == 2
    with pytest.raises(UsageError, match=r"split by '\\n'.*split by None"):
        build_store(tmp_path / "store", shards(tmp_path / "a.txt"), BYTES)


@pytest.mark.parametrize("workers", [1, 2])
def test_build_with_a_bad_row_names_file_and_line(tmp_path, workers):
    write_shards(tmp_path / "a", [["one"], ["two"], ["three", "four"]])
    (tmp_path / "a" / "1.jsonl").write_text('{"text": "fine"}\n\n{"text": "fine"}\n{"text": 7}\n{"text": "fine"}\n')
    with pytest.raises(PalestraError, match=r"1\.jsonl:4: expected text, found 7$"):
        build_store(tmp_path / "store", shards(tmp_path / "a"), BYTES, workers=workers)
    with pytest.raises(PalestraError, match="not finished"):
        TokenStore.open(tmp_path / "store")


def test_text_encoder_without_the_key_says_what_is_there():
    encoder = TextEncoder("none", "f", 10, "text", False, "nowhere", (), None)
    with pytest.raises(PalestraError, match="expected a string under 'text', found only story, id"):
        encoder([{"story": "a", "id": 3}])
    with pytest.raises(PalestraError, match="expected a string under 'text', found NoneType there"):
        encoder([{"text": None}])


def test_build_with_tokens_outside_the_vocabulary_is_refused(tmp_path):
    with pytest.raises(PalestraError, match=r"0\.jsonl:1 .*from 97 to 256, and its vocabulary has 256"):
        build_store(tmp_path / "store", write_shards(tmp_path / "a", [["ab"]]), ByteEncoder(vocab_size=256))


def test_build_with_an_encoder_that_drops_rows_is_refused(tmp_path):
    class Forgetful(ByteEncoder):
        def __call__(self, rows):
            return super().__call__(rows)[1:]

    with pytest.raises(ValueError, match="Forgetful made 1 documents of 2 rows"):
        build_store(tmp_path / "store", write_shards(tmp_path / "a", [["a", "b"]]), Forgetful())


def test_build_of_no_text_is_refused(tmp_path):
    with pytest.raises(PalestraError, match="no text"):
        build_store(tmp_path / "store", write_shards(tmp_path / "a", [[], []]), BYTES)
    with pytest.raises(UsageError, match="0 shards"):
        build_store(tmp_path / "store", [], BYTES)


def test_build_of_a_shard_that_changes_while_it_is_read_is_refused(tmp_path, monkeypatch):
    found = write_shards(tmp_path / "a", [["ab"]])
    encode = tokenize._encode

    def meanwhile(*arguments):
        (tmp_path / "a" / "0.jsonl").write_text('{"text": "cd"}\n')
        os.utime(tmp_path / "a" / "0.jsonl", (1, 1))
        return encode(*arguments)

    monkeypatch.setattr(tokenize, "_encode", meanwhile)
    with pytest.raises(PalestraError, match=r"0\.jsonl was changed while it was read"):
        build_store(tmp_path / "store", found, BYTES)


# Examples.


@pytest.fixture(scope="module")
def build(tmp_path_factory):
    """A store of documents given as strings."""
    numbers = iter(range(10**6))

    def made(texts: list[str], **options) -> TokenStore:
        folder = tmp_path_factory.getbasetemp() / f"examples{next(numbers)}"
        return build_store(folder / "store", write_shards(folder, [texts]), ByteEncoder(**options))

    return made


def as_text(example: Example) -> list[str]:
    """The pieces of an example, with | for the closing token."""
    whole = "".join("|" if token == 256 else chr(token) for token in example.tokens)
    ends = np.cumsum(example.segments)
    return [whole[end - length : end] for end, length in zip(ends, example.segments, strict=True)]


def test_windows_cut_the_documents_end_to_end(build):
    windows = Windows(build(["abc", "d", "", "EFGHIJ"], masked=True), 4)
    assert [as_text(windows[i]) for i in range(len(windows))] == [["abc|"], ["d|", "|", "E"], ["FGHI"]]
    assert windows[0].tokens.dtype == np.int32
    assert windows[1].loss.tolist() == [True, True, True, False]
    with pytest.raises(IndexError):
        windows[3]
    with pytest.raises(IndexError):
        windows[-1]


@settings(max_examples=15, deadline=None)
@given(texts=st.lists(st.text("abC", max_size=9), min_size=1, max_size=12), length=st.integers(2, 12))
def test_windows_of_any_documents_are_the_stream_with_its_borders(build, texts, length):
    windows = Windows(build(texts, masked=True), length)
    stream = "".join(text + "|" for text in texts)
    assert len(windows) == len(stream) // length
    for i in range(len(windows)):
        expected = stream[i * length : (i + 1) * length]
        pieces = as_text(windows[i])
        assert "".join(pieces) == expected
        # A piece ends at a closing token or at the window's end, and nowhere else.
        assert all(piece.count("|") == 1 and piece.endswith("|") for piece in pieces[:-1])
        assert "|" not in pieces[-1][:-1]
        assert windows[i].loss.tolist() == [sign != "C" for sign in expected]


def test_windows_over_documents_without_tokens_have_no_empty_pieces(build):
    windows = Windows(build(["", "ab", "", "", "cdef", ""], close=False), 3)
    assert [as_text(windows[i]) for i in range(len(windows))] == [["ab", "c"], ["def"]]


def test_windows_too_short_to_predict_are_refused(whole):
    with pytest.raises(UsageError, match="at least 2"):
        Windows(whole, 1)


LONG = ["abcdefgh", "ij", "klmnop"]


def test_documents_longer_than_allowed_are_cut_at_the_end(build):
    found = Documents(build(LONG), 3)
    assert [as_text(found[i]) for i in range(len(found))] == [["abc"], ["ij|"], ["klm"]]
    with pytest.raises(IndexError):
        found[3]


def test_documents_longer_than_allowed_are_refused_with_the_first(build):
    with pytest.raises(UsageError, match=r"2 of 3 documents .* more than 3 tokens, first document 0 with 9"):
        Documents(build(LONG), 3, "error")
    assert len(Documents(build(LONG), 9, "error")) == 3


def test_documents_carry_their_masks(build):
    found = Documents(build(["Ab", "CDe"], masked=True), 3)
    assert found[0].loss.tolist() == [False, True, True]
    assert found[1].loss.tolist() == [False, False, True]
