"""Moto's S3 on loopback, which notes what it is asked and can stop in the middle of an object."""

import io
import json
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import zygote
from hub_server import Hold
from moto.s3.models import s3_backends
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

with suppress(ImportError):  # tests of buckets are skipped without the extra s3
    import s3_client  # noqa: F401

# What botocore reads; the values matter to nobody.
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}


@dataclass
class S3Server:
    """Where it is, and what it was asked."""

    url: str = ""
    downloads: list[str] = field(default_factory=list)
    """The keys that were read, the last part of each."""
    uploads: list[str] = field(default_factory=list)
    """The same of those that were written."""
    hold: Hold | None = None
    requests: int = 0
    fail_every: int = 0
    """Each so-manieth request is answered with 503 and not carried out; 0: none. Odd ones of these were carried out."""
    failed: int = 0
    deny: str | None = None
    """The error code that every request is answered with: AccessDenied, ExpiredToken, SlowDown; None: as usual."""

    posts: list[dict[str, Any]] = field(default_factory=list)
    """The bodies of requests to other services than S3."""

    @property
    def environment(self) -> dict[str, str]:
        """With these variables, s3:// is this server, and a forked process need not import its client."""
        return {**CREDENTIALS, "AWS_ENDPOINT_URL": self.url, zygote.ALSO: "s3_client"}


@contextmanager
def s3_server() -> Iterator[S3Server]:
    """Serve until the block ends."""
    s3 = S3Server()
    for account in s3_backends.values():  # moto keeps its buckets for the whole process
        for backend in account.values():
            backend.reset()
    moto = DomainDispatcherApplication(create_backend_app)
    one_at_a_time = threading.Lock()  # moto looks at a condition and writes in two steps

    def watched(environ: dict[str, Any], start: Any) -> Iterable[bytes]:
        s3.requests += 1
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        name = path.rsplit("/", 1)[-1]
        hold = s3.hold if s3.hold is not None and s3.hold.name == name else None
        if method == "PUT" and path.count("/") > 1:
            if hold is not None:
                hold.reached.set()
                hold.released.wait(60)
            s3.uploads.append(name)
        if "HTTP_X_AMZ_TARGET" in environ:
            body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            s3.posts.append(json.loads(body or b"{}"))
            environ["wsgi.input"] = io.BytesIO(body)
        if s3.deny is not None:
            start("503 Slow Down" if s3.deny == "SlowDown" else "403 Forbidden", [("Content-Type", "application/xml")])
            return [f"<Error><Code>{s3.deny}</Code><Message>as asked</Message></Error>".encode()]
        if s3.fail_every and s3.requests % s3.fail_every == 0:
            s3.failed += 1
            with one_at_a_time:
                if s3.failed % 2:  # carried out, but the answer is lost
                    b"".join(moto(environ, lambda *_: None))
            start("503 Service Unavailable", [("Content-Type", "application/xml")])
            return [b"<Error><Code>ServiceUnavailable</Code><Message>as asked</Message></Error>"]
        with one_at_a_time:
            body = b"".join(moto(environ, start))
        if method != "GET" or path.count("/") == 1:  # a bucket's GET is a listing
            return [body]
        s3.downloads.append(name)
        return [body] if hold is None else _held(body, hold)

    server = make_server("127.0.0.1", 0, watched, threaded=True)
    s3.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield s3
    finally:
        if s3.hold is not None:
            s3.hold.released.set()
        server.shutdown()
        thread.join()
        server.server_close()


def _held(body: bytes, hold: Hold) -> Iterator[bytes]:
    yield body[: len(body) // 2]
    hold.reached.set()
    hold.released.wait(60)
    yield body[len(body) // 2 :]
