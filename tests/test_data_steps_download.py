"""Downloads from every kind of place: checked, resumed by range, whole or not there."""

import hashlib
import json
import subprocess
import sys
import threading
from base64 import b64decode
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from conftest import wait_until
from hub_server import Hold, Repository, hub_server
from s3_server import s3_server

from palestra.data.cache import File, part_folder
from palestra.data.sources import resolve
from palestra.data.steps.download import download
from palestra.errors import PalestraError, UsageError
from palestra.pipeline.data import download as download_step
from palestra.pipeline.graph import Graph, explain
from palestra.pipeline.outputs import Outputs
from palestra.pipeline.report import write_report
from palestra.pipeline.runner import PipelineFailed, run

BYTES = bytes(range(256)) * 9000  # more than two chunks


class Web(BaseHTTPRequestHandler):
    """A server of one file, which can break off in the middle of it."""

    broken = 0
    """How many answers break off after a half."""
    version = '"one"'
    ranges = True
    asked: tuple[str, ...] = ()
    logins: tuple[str, ...] = ()
    """What each request had to show."""

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _answer(self, *, body: bool) -> None:
        web = type(self)
        path, _, query = self.path.partition("?")
        web.logins = (*web.logins, self.headers.get("Authorization") or query)
        if path != "/data/file%201.jsonl":
            self.send_error(404)
            return
        wanted = self.headers.get("Range")
        start = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted and web.ranges else 0
        if self.headers.get("If-Range", web.version) != web.version:
            start = 0
        data = BYTES[start:]
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("ETag", web.version)
        self.end_headers()
        if body:
            web.asked = (*web.asked, wanted or "whole")
            if web.broken:
                web.broken -= 1
                self.wfile.write(data[: len(data) // 2])
                self.close_connection = True
            else:
                self.wfile.write(data)


@pytest.fixture
def web() -> Iterator[tuple[str, type[Web]]]:
    """The address of the file, and the server."""
    handler = type("Fresh", (Web,), {})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/data/file%201.jsonl", handler
    server.shutdown()
    server.server_close()


def counts(out: Path) -> dict[str, Any]:
    """What the step noted."""
    return json.loads((out / "counts.json").read_text())


def test_download_of_a_web_file_that_breaks_off_goes_on_by_range(tmp_path: Path, web: tuple[str, type[Web]]) -> None:
    url, server = web
    server.broken = 1
    download(tmp_path, url=url, sha256=hashlib.sha256(BYTES).hexdigest())
    assert (tmp_path / "files/file 1.jsonl").read_bytes() == BYTES
    assert server.asked == ("whole", f"bytes={len(BYTES) // 2}-")
    assert counts(tmp_path)["bytes"] == len(BYTES)


SIGNED = "X-Amz-Credential=AKIAHIDDEN&X-Amz-Date=20261115&X-Amz-Signature=hidden0123&token=hidden4567"


@pytest.mark.parametrize("missing", [False, True])
def test_download_leaves_the_secrets_of_its_url_nowhere(
    tmp_path: Path, web: tuple[str, type[Web]], missing: bool, caplog: pytest.LogCaptureFixture
) -> None:
    url = web[0].replace("//", "//me:hidden%2Fpassword@") + ("x" if missing else "") + f"?{SIGNED}"
    step = download_step(url=url)
    graph, outputs = Graph([step]), Outputs(tmp_path)
    try:
        run([step], outputs)
        said = ""
    except PipelineFailed as failed:
        said = str(failed)
    report = Path(write_report("x", graph, outputs))
    told = explain(graph, outputs, "download")
    for text in (said, caplog.text, repr(told)):
        assert "hidden" not in text.lower()
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert [path for path in files if b"hidden" in path.read_bytes().lower()] == []
    assert "X-Amz-Date=20261115" in told.made_of["url"]
    assert "X-Amz-Date=20261115" in report.read_text()
    assert (b64decode(web[1].logins[0].removeprefix("Basic "))) == b"me:hidden/password"
    if missing:
        assert "HTTP 404" in said
    else:
        (out,) = tmp_path.glob("download-*")
        assert (out / "files/file 1.jsonl").read_bytes() == BYTES
        assert "X-Amz-Date=20261115" in counts(out)["url"]


def test_download_that_failed_goes_on_with_the_same_url_signed_anew(tmp_path: Path, web: tuple[str, type[Web]]) -> None:
    url, server = web
    server.broken = 1
    with pytest.raises(PalestraError, match="bytes of others are kept"):
        download(tmp_path, url=f"{url}?sig=first000", tries=1)
    download(tmp_path, url=f"{url}?sig=second11")
    assert (tmp_path / "files/file 1.jsonl").read_bytes() == BYTES
    assert counts(tmp_path)["bytes_resumed"] == len(BYTES) // 2
    assert server.logins[-1] == "sig=second11"


def test_download_that_failed_goes_on_in_the_next_attempt(tmp_path: Path, web: tuple[str, type[Web]]) -> None:
    url, server = web
    server.broken = 1
    with pytest.raises(PalestraError, match=f"{len(BYTES) // 2} bytes of others are kept"):
        download(tmp_path, url=url, tries=1)
    assert not (tmp_path / "files").exists()
    assert not (tmp_path / "counts.json").exists()
    download(tmp_path, url=url)
    assert (tmp_path / "files/file 1.jsonl").read_bytes() == BYTES
    assert counts(tmp_path)["bytes_resumed"] == len(BYTES) // 2
    download(tmp_path, url=url)  # all there: nothing is asked for again
    assert len(server.asked) == 2


@pytest.mark.parametrize("how", ["changed", "no ranges"])
def test_download_that_cannot_go_on_begins_anew(tmp_path: Path, web: tuple[str, type[Web]], how: str) -> None:
    url, server = web
    server.broken = 1
    with pytest.raises(PalestraError):
        download(tmp_path, url=url, tries=1)
    if how == "changed":
        server.version = '"two"'
    else:
        server.ranges = False
    download(tmp_path, url=url)
    assert (tmp_path / "files/file 1.jsonl").read_bytes() == BYTES


def test_download_with_another_checksum_is_refused_and_leaves_no_file(
    tmp_path: Path, web: tuple[str, type[Web]]
) -> None:
    with pytest.raises(PalestraError, match="has the SHA-256"):
        download(tmp_path, url=web[0], sha256="0" * 64)
    assert not (tmp_path / "files").exists()


def test_download_of_what_is_not_there_says_so(tmp_path: Path, web: tuple[str, type[Web]]) -> None:
    with pytest.raises(PalestraError, match="HTTP 404"):
        download(tmp_path / "a", url=web[0].replace("file", "other"))
    with pytest.raises(UsageError, match="not a URL, a file or folder in"):
        download(tmp_path / "b", url="no/such/thing")
    with pytest.raises(PalestraError, match="does not exist"):
        download(tmp_path / "c", url=f"file://{tmp_path}/nothing")


def test_download_of_a_local_folder_takes_the_files_that_match(tmp_path: Path) -> None:
    for name in ("a.jsonl", "deep/b.jsonl", "c.txt"):
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_text(name)
    download(tmp_path / "out", url=str(tmp_path / "in"), files=["*.jsonl"])
    found = sorted(
        path.relative_to(tmp_path / "out/files").as_posix() for path in (tmp_path / "out/files").rglob("*.*")
    )
    assert found == ["a.jsonl", "deep/b.jsonl"]
    with pytest.raises(UsageError, match=r"matches \*.csv"):
        download(tmp_path / "bad", url=str(tmp_path / "in"), files=["*.csv"])
    with pytest.raises(UsageError, match="give the checksums by name"):
        download(tmp_path / "sums", url=str(tmp_path / "in"), sha256="00")


def test_download_from_the_hub_takes_a_revision_and_gives_no_token_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with hub_server() as hub:
        hub.datasets["owner/set"] = Repository(
            {"train.parquet": BYTES, "README.md": b"about", "x/y.jsonl": b"{}\n"}, token="secret", tags=("v1",)
        )
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_TOKEN", "secret")
        monkeypatch.delenv("PALESTRA_MIRROR", raising=False)
        download(tmp_path, url="owner/set", revision="v1", files=["*.parquet", "x/*"])
        assert (tmp_path / "files/train.parquet").read_bytes() == BYTES
        assert (tmp_path / "files/x/y.jsonl").read_bytes() == b"{}\n"
        assert not (tmp_path / "files/README.md").exists()
        assert counts(tmp_path)["revision"] == hub.datasets["owner/set"].commit
        assert not any(token for _, path, token in hub.requests if path.startswith("/cdn/"))
        monkeypatch.setenv("HF_TOKEN", "wrong")
        with pytest.raises(PalestraError, match="no dataset of this name"):
            download(tmp_path / "other", url="owner/set")


def test_download_from_the_hub_that_was_killed_goes_on_in_the_middle_of_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with hub_server() as hub:
        hub.datasets["owner/set"] = Repository({"train.parquet": BYTES})
        hub.datasets["owner/gated"] = Repository({"a.txt": b"a"}, gated=True)
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        for name in ("HF_TOKEN", "PALESTRA_MIRROR"):
            monkeypatch.delenv(name, raising=False)
        hub.hold = Hold("train.parquet")
        code = "import sys; from pathlib import Path; from palestra.data.steps.download import download\n"
        code += "download(Path(sys.argv[1]), url='owner/set')"
        process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "out")])
        wait_until(
            lambda: any(path.stat().st_size for path in tmp_path.glob("out/.shards/download/parts/*/file")), process
        )
        process.kill()
        process.wait()
        hub.hold.released.set()
        hub.hold = None
        download(tmp_path / "out", url="owner/set")
        assert (tmp_path / "out/files/train.parquet").read_bytes() == BYTES
        resumed = counts(tmp_path / "out")["bytes_resumed"]
        assert 0 < resumed < len(BYTES)
        assert hub.ranges[-1].startswith(f"bytes={resumed}-")
        with pytest.raises(PalestraError, match="is gated: accept its terms there"):
            download(tmp_path / "gated", url="owner/gated")


def test_resolve_of_a_web_file_that_broke_off_goes_on_in_the_middle(
    tmp_path: Path, web: tuple[str, type[Web]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PALESTRA_CACHE", str(tmp_path))
    url, server = web
    server.broken = 1
    with pytest.raises(PalestraError, match=f"{len(BYTES) // 2} bytes of others are kept"):
        resolve(url, kind="dataset")
    assert resolve(url, kind="dataset").read_bytes() == BYTES
    assert server.asked == ("whole", f"bytes={len(BYTES) // 2}-")


def test_download_from_a_bucket_goes_on_in_the_middle_of_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with s3_server() as s3:
        for name, value in s3.environment.items():
            monkeypatch.setenv(name, value)
        import s3fs

        files = s3fs.S3FileSystem(skip_instance_cache=True)
        files.mkdir("bucket")
        files.pipe_file("bucket/data/a.jsonl", BYTES)
        download(tmp_path / "whole", url="s3://bucket/data")
        assert (tmp_path / "whole/files/a.jsonl").read_bytes() == BYTES
        # As a kill leaves it: the first part of the file, in a folder that is named by its version.
        (file,) = json.loads((tmp_path / "whole/source.json").read_text())["files"]
        part = part_folder(tmp_path / "half/.shards/download", File(**file)) / "file"
        part.parent.mkdir(parents=True)
        part.write_bytes(BYTES[:1000])
        download(tmp_path / "half", url="s3://bucket/data")
        assert (tmp_path / "half/files/a.jsonl").read_bytes() == BYTES
        assert counts(tmp_path / "half")["bytes_resumed"] == 1000
