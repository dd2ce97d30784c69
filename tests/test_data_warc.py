"""Pages of web crawls: as crawlers write them, compressed record by record, chunked, in other encodings, truncated."""

import gzip
import zlib
from pathlib import Path

import pytest

from palestra.data.readers import read_rows, shards
from palestra.errors import PalestraError, UsageError


def record(kind: str, block: bytes, url: str = "https://a.example/", content: str = "application/http") -> bytes:
    head = f"WARC/1.0\r\nWARC-Type: {kind}\r\nWARC-Target-URI: {url}\r\nWARC-Date: 2026-01-02T03:04:05Z\r\n"
    head += f"Content-Type: {content}\r\nContent-Length: {len(block)}\r\n\r\n"
    return head.encode() + block + b"\r\n\r\n"


def response(body: bytes, kind: str = "text/html; charset=utf-8", status: str = "200 OK", more: str = "") -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\n{more}\r\n".encode() + body


def rows(path: Path) -> list[dict]:
    return [row for shard in shards(path) for row in read_rows(shard)]


def test_pages_are_read_and_the_rest_of_a_crawl_is_left_out(tmp_path):
    parts = [
        record("warcinfo", b"software: x\r\n", content="application/warc-fields"),
        record("request", b"GET / HTTP/1.1\r\n\r\n"),
        record("response", response("<p>één</p>".encode()), "https://a.example/1"),
        record("response", response(b"gone", status="404 Not Found")),
        record("response", response(b"\x89PNG", kind="image/png")),
        record("resource", b"plain", "<https://a.example/2>", "text/plain"),
    ]
    expected = [
        {"text": "<p>één</p>", "url": "https://a.example/1", "date": "2026-01-02T03:04:05Z"},
        {"text": "plain", "url": "https://a.example/2", "date": "2026-01-02T03:04:05Z"},
    ]
    (tmp_path / "a.warc").write_bytes(b"".join(parts))
    assert rows(tmp_path / "a.warc") == expected
    (tmp_path / "a.warc.gz").write_bytes(b"".join(map(gzip.compress, parts)))  # as Common Crawl has them
    assert rows(tmp_path / "a.warc.gz") == expected


def test_texts_of_a_wet_file_are_read(tmp_path):
    (tmp_path / "a.wet").write_bytes(record("conversion", "größer\nals".encode(), content="text/plain"))
    assert rows(tmp_path / "a.wet")[0]["text"] == "größer\nals"


@pytest.mark.parametrize(
    ("body", "more"),
    [
        (b"4\r\n<p>h\r\n6;x=1\r\ni</p>\n\r\n0\r\n\r\n", "Transfer-Encoding: chunked\r\n"),
        (gzip.compress(b"<p>hi</p>\n", mtime=0), "Content-Encoding: gzip\r\n"),
        (zlib.compress(b"<p>hi</p>\n"), "Content-Encoding: deflate\r\n"),
        (b"<p>hi</p>\n", "Content-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n"),  # decoded by the crawler
    ],
)
def test_content_is_what_it_was_before_it_was_sent(tmp_path, body, more):
    (tmp_path / "a.warc").write_bytes(record("response", response(body, more=more)))
    assert rows(tmp_path / "a.warc")[0]["text"] == "<p>hi</p>\n"


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ("é".encode("latin-1"), "text/html; charset=iso-8859-1"),
        ('<meta charset="latin-1">é'.encode("latin-1"), "text/html"),
        ("é".encode(), "text/html; charset=nonsense"),
    ],
)
def test_encoding_is_that_of_the_header_or_of_the_page(tmp_path, body, kind):
    (tmp_path / "a.warc").write_bytes(record("response", response(body, kind=kind)))
    assert rows(tmp_path / "a.warc")[0]["text"].endswith("é")


def test_file_that_is_truncated_or_something_else_is_an_error_that_names_it(tmp_path):
    (tmp_path / "a.warc").write_bytes(record("response", response(b"<p>whole page</p>"))[:-12])
    with pytest.raises(PalestraError, match=r"a.warc cannot be read: its last record has \d+ of \d+ bytes"):
        rows(tmp_path / "a.warc")
    (tmp_path / "b.warc").write_bytes(b"nonsense\n")
    with pytest.raises(PalestraError, match=r"b.warc cannot be read: expected a WARC record, found b'nonsense"):
        rows(tmp_path / "b.warc")
    (tmp_path / "c.warcs").write_bytes(b"")
    with pytest.raises(UsageError, match="unknown format"):
        shards(tmp_path / "c.warcs")
