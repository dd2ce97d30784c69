"""Pages and texts of WARC files (web crawls: `.warc`, and `.wet`, which has texts alone), one at a time."""

import gzip
import io
import re
import zlib
from collections.abc import Iterator

KINDS = ("response", "resource", "conversion")
"""Records with content; others are about the crawl."""
PAGE = re.compile(r"text/|application/xhtml", re.IGNORECASE)
CHARSET = re.compile(r"charset=[\"']?([\w-]+)", re.IGNORECASE)


def pages(stream: io.BufferedReader, text_key: str) -> Iterator[dict[str, str]]:
    """Rows with `url`, `date` and the text: of successful responses that are text, and of conversions."""
    while (about := _headers(stream, first=True)) is not None:
        size = int(about["content-length"])
        block = stream.read(size)
        if len(block) < size:
            raise ValueError(f"its last record has {len(block)} of {size} bytes: the file is truncated")
        if about.get("warc-type") not in KINDS:
            continue
        kind, body = about.get("content-type", "text/plain"), block
        if about["warc-type"] == "response":
            http = io.BytesIO(block)
            status = http.readline().split()[1:2]
            headers = _headers(http, first=False) or {}
            kind, body = headers.get("content-type", ""), _decoded(http.read(), headers)
            if not status or not status[0].startswith(b"2"):
                continue
        if PAGE.match(kind):
            url = about.get("warc-target-uri", "").strip("<>")
            yield {text_key: _text(body, kind), "url": url, "date": about.get("warc-date", "")}


def _headers(stream: io.BufferedIOBase, *, first: bool) -> dict[str, str] | None:
    """Names in lower case and values up to an empty line; None at the end of the file."""
    if first:
        line = stream.readline()
        while line in (b"\r\n", b"\n"):  # between records
            line = stream.readline()
        if not line:
            return None
        if not line.startswith(b"WARC/"):
            raise ValueError(f"expected a WARC record, found {line[:40]!r}")
    headers = {}
    while (line := stream.readline()).strip():
        name, _, value = line.decode("utf-8", "replace").partition(":")
        headers[name.strip().lower()] = value.strip()
    return headers


def _decoded(body: bytes, headers: dict[str, str]) -> bytes:
    """The content as it was before it was sent: crawlers keep it as it came, or decoded under the same headers."""
    if "chunked" in headers.get("transfer-encoding", "").lower() and re.match(rb"[0-9A-Fa-f]+[^\r\n]*\r\n", body):
        whole, rest = b"", io.BytesIO(body)
        while size := int(rest.readline().partition(b";")[0].strip() or b"0", 16):
            whole += rest.read(size)
            rest.readline()
        body = whole
    if body[:2] == b"\x1f\x8b":
        return gzip.decompress(body)
    return zlib.decompress(body) if headers.get("content-encoding") == "deflate" and body[:1] == b"\x78" else body


def _text(body: bytes, kind: str) -> str:
    named = CHARSET.search(kind) or CHARSET.search(body[:1024].decode("latin-1"))
    try:
        return body.decode(named[1] if named else "utf-8", "replace")
    except LookupError:  # no such encoding
        return body.decode("utf-8", "replace")
