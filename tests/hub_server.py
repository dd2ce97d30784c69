"""A server on loopback that speaks those endpoints of the Hugging Face Hub that downloads use.

As the Hub does, it lists trees in pages, sends large files (LFS) by a redirect to another host, which must not be given
the token, answers 401 for what does not exist where no token came, and says that a repository is gated only when a
file is asked for.
"""

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

LFS = (".safetensors", ".bin", ".parquet")
PAGE = 3  # files in a page of a tree; the Hub's is 1,000
API = re.compile(r"/api/(models|datasets)/([^/]+/[^/]+)(?:/(revision|tree)/([^/]+))?")
RESOLVE = re.compile(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)")
CDN = re.compile(r"/cdn/([0-9a-f]{64})")


@dataclass
class Repository:
    """The files of a model or a dataset at its only commit."""

    files: dict[str, bytes]
    token: str | None = None
    """Needed to see it at all."""
    gated: bool = False
    tags: tuple[str, ...] = ()

    @property
    def commit(self) -> str:
        """Changes with the files."""
        listing = [(name, hashlib.sha256(data).hexdigest()) for name, data in sorted(self.files.items())]
        return hashlib.sha1(json.dumps(listing).encode()).hexdigest()

    def has(self, revision: str) -> bool:
        """Whether this is one of its revisions."""
        return revision in ("main", self.commit, *self.tags)


@dataclass
class Hold:
    """Stops the answer with a file after its first half until it is let go."""

    name: str
    reached: threading.Event = field(default_factory=threading.Event)
    released: threading.Event = field(default_factory=threading.Event)


@dataclass
class HubServer:
    """What the server has, and what it was asked."""

    models: dict[str, Repository] = field(default_factory=dict)
    datasets: dict[str, Repository] = field(default_factory=dict)
    requests: list[tuple[str, str, bool]] = field(default_factory=list)
    """Method, path, and whether a token came with it."""
    hold: Hold | None = None
    url: str = ""
    cdn: str = ""
    """The other host, from which large files come."""
    downloads: list[str] = field(default_factory=list)
    """The names of the files whose content was asked for."""
    ranges: list[str] = field(default_factory=list)
    """What of them was asked for, where it was not all."""


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    hub: HubServer

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _answer(self) -> None:
        url = urlsplit(self.path)
        path = unquote(url.path)
        token = self.headers.get("authorization", "").removeprefix("Bearer ")
        self.hub.requests.append((self.command, path, bool(token)))
        if match := CDN.fullmatch(path):
            return self._content(*self._by_digest(match[1]))
        if match := API.fullmatch(path):
            repository = self._repository(match[1], match[2], match[4] or "main", token)
            if repository is None:
                return None
            if match[3] == "tree":
                return self._tree(repository, path, int(parse_qs(url.query).get("cursor", ["0"])[0]))
            return self._json({"id": match[2], "sha": repository.commit, "siblings": [], "tags": []})
        if match := RESOLVE.fullmatch(path):
            repository = self._repository("datasets" if match[1] else "models", match[2], match[3], token)
            return None if repository is None else self._resolve(repository, match[4], token)
        return self._refuse(404, "", "no such page")

    def _repository(self, kind: str, name: str, revision: str, token: str) -> Repository | None:
        repository = (self.hub.models if kind == "models" else self.hub.datasets).get(name)
        if repository is None or (repository.token is not None and repository.token != token):
            self._refuse(404 if token else 401, "RepoNotFound", "Repository not found")
            return None
        if not repository.has(revision):
            self._refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
            return None
        return repository

    def _tree(self, repository: Repository, path: str, start: int) -> None:
        rows = []
        for name, data in list(repository.files.items())[start : start + PAGE]:
            blob = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
            row = {"type": "file", "path": name, "size": len(data), "oid": blob}
            if name.endswith(LFS):
                row["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 128}
            rows.append(row)
        following = f'<{self.hub.url}{path}?recursive=true&cursor={start + PAGE}>; rel="next"'
        self._json(rows, {"Link": following} if start + PAGE < len(repository.files) else {})

    def _resolve(self, repository: Repository, name: str, token: str) -> None:
        commit = {"X-Repo-Commit": repository.commit}
        if repository.gated and not token:
            return self._refuse(401, "GatedRepo", "Access to model is restricted")
        if name not in repository.files:
            return self._refuse(404, "EntryNotFound", "Entry not found", commit)
        data = repository.files[name]
        digest = hashlib.sha256(data).hexdigest()
        if name.endswith(LFS):
            linked = {"X-Linked-Size": str(len(data)), "X-Linked-ETag": f'"{digest}"'}
            return self._send(302, b"", {**commit, **linked, "Location": f"{self.hub.cdn}/cdn/{digest}"})
        return self._content(name, data, {**commit, "ETag": f'"{hashlib.sha1(data).hexdigest()}"'})

    def _by_digest(self, digest: str) -> tuple[str, bytes]:
        repositories = [*self.hub.models.values(), *self.hub.datasets.values()]
        files = [item for repository in repositories for item in repository.files.items()]
        return next((name, data) for name, data in files if hashlib.sha256(data).hexdigest() == digest)

    def _content(self, name: str, data: bytes, headers: dict[str, str] | None = None) -> None:
        if self.command == "GET":
            self.hub.downloads.append(name)
        status, headers = 200, dict(headers or {})
        if wanted := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            first, last = int(wanted[1]), int(wanted[2] or len(data) - 1)
            self.hub.ranges.append(wanted[0])
            status, headers["Content-Range"] = 206, f"bytes {first}-{last}/{len(data)}"
            data = data[first : last + 1]
        self._send(status, data, headers, self.hub.hold if self.hub.hold and self.hub.hold.name == name else None)

    def _refuse(self, status: int, code: str, message: str, headers: dict[str, str] | None = None) -> None:
        told = {"X-Error-Code": code, "X-Error-Message": message}
        self._send(status, json.dumps({"error": message}).encode(), {**told, **(headers or {})})

    def _json(self, value: object, headers: dict[str, str] | None = None) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json", **(headers or {})})

    def _send(self, status: int, data: bytes, headers: dict[str, str], hold: Hold | None = None) -> None:
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        if hold is not None:
            self.wfile.write(data[: len(data) // 2])
            self.wfile.flush()
            hold.reached.set()
            hold.released.wait(60)
            data = data[len(data) // 2 :]
        try:
            self.wfile.write(data)
        except OSError:  # the client is gone, as it should be where a test killed it
            self.close_connection = True


@contextmanager
def hub_server() -> Iterator[HubServer]:
    """Serve until the block ends."""
    hub = HubServer()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Handler,), {"hub": hub}))
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_port}"
    hub.cdn = f"http://localhost:{server.server_port}"  # another host, as far as tokens are concerned
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        if hub.hold is not None:
            hub.hold.released.set()
        server.shutdown()
        server.server_close()
        thread.join()
