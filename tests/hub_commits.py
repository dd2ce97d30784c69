"""The server of `hub_server.py` with the endpoints by which a client writes small files and looks at some."""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

from hub_server import Handler, HubServer

POSTED = re.compile(r"/api/datasets/([^/]+/[^/]+)/(preupload|commit|paths-info)/([^/]+)")


class WritingHandler(Handler):
    """One connection."""

    def do_POST(self) -> None:
        path = unquote(urlsplit(self.path).path)
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if path == "/api/validate-yaml":
            return self._json({"errors": [], "warnings": []})
        match = POSTED.fullmatch(path)
        if match is None or match[1] not in self.hub.datasets:
            return self._refuse(404, "RepoNotFound", "Repository not found")
        repository = self.hub.datasets[match[1]]
        if match[2] == "preupload":
            files = [
                {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False, "oid": None}
                for file in json.loads(body)["files"]
            ]
            return self._json({"files": files})
        if match[2] == "commit":
            lines = [json.loads(line) for line in body.splitlines()]
            for line in lines:
                if line["key"] == "file":
                    repository.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            self.hub.requests.append(("COMMIT", str(len(lines) - 1), True))
            url = f"{self.hub.url}/datasets/{match[1]}/commit/{repository.commit}"
            return self._json({"commitOid": repository.commit, "commitUrl": url})
        return self._json([row for path in _asked(body) for row in _about(repository.files, path)])

    def do_GET(self) -> None:
        """As before; a tree may begin at a folder."""
        path = unquote(urlsplit(self.path).path)
        match = re.fullmatch(r"/api/datasets/([^/]+/[^/]+)/tree/([^/]+)(?:/(.*))?", path)
        if match is None or match[1] not in self.hub.datasets:
            return super().do_GET()
        under = f"{match[3]}/" if match[3] else ""
        files = self.hub.datasets[match[1]].files
        names = {name for name in files if name.startswith(under)}
        if "recursive=true" not in self.path.lower():
            names = {under + name.removeprefix(under).partition("/")[0] for name in names}
        if under and not names:
            return self._refuse(404, "EntryNotFound", "Entry not found")
        return self._json([row for name in sorted(names) for row in _about(files, name)])


def _asked(body: bytes) -> list[str]:
    try:
        return json.loads(body)["paths"]
    except ValueError:  # a form
        return [unquote(part.partition("=")[2]) for part in body.decode().split("&") if part.startswith("paths")]


def _about(files: dict[str, bytes], path: str) -> list[dict[str, object]]:
    if path in files:
        blob = hashlib.sha1(b"blob %d\0" % len(files[path]) + files[path]).hexdigest()
        return [{"type": "file", "path": path, "size": len(files[path]), "oid": blob}]
    if any(name.startswith(f"{path}/") for name in files):
        return [{"type": "directory", "path": path, "oid": "0" * 40, "size": 0}]
    return []


@contextmanager
def writing_hub() -> Iterator[HubServer]:
    """Serve until the block ends."""
    hub = HubServer()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (WritingHandler,), {"hub": hub}))
    server.daemon_threads = True
    hub.url = hub.cdn = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
