"""The part of Google Cloud Storage's JSON API that gcsfs uses, on loopback, with conditions on generations."""

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

OBJECT = re.compile(r"(?:/download)?/storage/v1/b/([^/]+)/o/(.+)")
LIST = re.compile(r"/storage/v1/b/([^/]+)/o")
UPLOAD = re.compile(r"/upload/storage/v1/b/([^/]+)/o")


class GcsServer:
    """The objects, by bucket and key: generation and content."""

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str], tuple[int, bytes]] = {}
        self.lock, self.generation, self.fail_every, self.requests = threading.Lock(), 1000, 0, 0
        self.url = ""


class Handler(BaseHTTPRequestHandler):
    """One request."""

    gcs: GcsServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None: ...

    def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def about(self, bucket: str, key: str) -> dict[str, str]:
        generation, data = self.gcs.objects[bucket, key]
        times = dict.fromkeys(("timeCreated", "updated"), "2026-01-01T00:00:00.000Z")
        return {"name": key, "bucket": bucket, "generation": str(generation), "size": str(len(data)), **times}

    def handle_one(self) -> None:
        parts = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        with self.gcs.lock:
            self.gcs.requests += 1
            if self.gcs.fail_every and self.gcs.requests % self.gcs.fail_every == 0:
                self.answer(503, b'{"error": {"code": 503, "message": "as asked"}}')
            elif match := UPLOAD.fullmatch(parts.path):
                self.upload(match[1], query, data)
            elif match := LIST.fullmatch(parts.path):
                prefix, bucket = query.get("prefix", ""), match[1]
                keys = [key for owner, key in sorted(self.gcs.objects) if owner == bucket and key.startswith(prefix)]
                rest = {key[len(prefix) :].partition("/")[0] for key in keys if "/" in key[len(prefix) :]}
                flat = query.get("delimiter") != "/"
                items = [self.about(bucket, key) for key in keys if flat or "/" not in key[len(prefix) :]]
                folders = [] if flat else [f"{prefix}{name}/" for name in sorted(rest)]
                self.answer(200, json.dumps({"items": items, "prefixes": folders}).encode())
            elif (match := OBJECT.fullmatch(parts.path)) and (
                place := (match[1], unquote(match[2]))
            ) in self.gcs.objects:
                generation, content = self.gcs.objects[place]
                if self.command == "DELETE":
                    del self.gcs.objects[place]
                    self.answer(204)
                elif query.get("alt") == "media":
                    self.answer(200, content, X_Goog_Generation=str(generation))
                else:
                    self.answer(200, json.dumps(self.about(*place)).encode())
            else:
                self.answer(404, b'{"error": {"code": 404, "message": "not there"}}')

    def upload(self, bucket: str, query: dict[str, str], data: bytes) -> None:
        if query["uploadType"] == "multipart":
            _, about, rest = data.split(b"--==0==", 2)
            name = json.loads(about.partition(b"\n\n")[2])["name"]
            data = rest.partition(b"\n\n")[2].removesuffix(b"\n--==0==--")
        else:
            name = query["name"]
        now = self.gcs.objects.get((bucket, name), (0, b""))[0]
        if "ifGenerationMatch" in query and int(query["ifGenerationMatch"]) != now:
            self.answer(412, b'{"error": {"code": 412, "message": "conditionNotMet"}}')
            return
        self.gcs.generation += 1
        self.gcs.objects[bucket, name] = self.gcs.generation, data
        self.answer(200, json.dumps(self.about(bucket, name)).encode())

    do_GET = do_POST = do_DELETE = handle_one


@contextmanager
def gcs_server() -> Iterator[GcsServer]:
    """Serve until the block ends."""
    gcs = GcsServer()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("OfThis", (Handler,), {"gcs": gcs}))
    gcs.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield gcs
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
