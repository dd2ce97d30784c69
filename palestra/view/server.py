"""The server of the web view: what every request passes, the JSON endpoints, and the page's own files."""

import hashlib
import hmac
import math
import secrets
import socket
import sys
import time
import webbrowser
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from threading import Thread
from typing import Annotated, Any, Literal

from palestra.errors import MissingExtra, PalestraError, UsageError

try:
    from fastapi import Body, FastAPI, Query, Request
    from fastapi.exceptions import RequestValidationError
    from starlette.responses import FileResponse, Response
    from starlette.types import ASGIApp, Message, Receive, Scope, Send
except ModuleNotFoundError as error:
    raise MissingExtra("palestra view", "view") from error

from palestra.data.cache import cache_root
from palestra.runs.run import Run, open_run
from palestra.spec.load import differences
from palestra.spec.model import standard_json
from palestra.view import data, rollouts, runs, series
from palestra.view.advice import advise
from palestra.view.demo import make_demo
from palestra.view.index import Index, Indexer
from palestra.view.lines import LineFile
from palestra.view.mirror import Mirror
from palestra.view.others import others
from palestra.view.places import DAMAGED, NotThere, Places, inside
from palestra.view.timeline import timeline
from palestra.work.hosts import LOOPBACK, from_other_site, host_of

STATIC = Path(__file__).parent / "static"
COOKIE = "palestra_view_key"
POLICY = ("default-src 'self'; img-src 'self' data: blob:; style-src 'self' 'unsafe-inline'; object-src 'none'; "
          "base-uri 'none'; form-action 'none'; frame-ancestors 'none'")  # fmt: skip
HEADERS = {"Content-Security-Policy": POLICY, "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer",
           "Cross-Origin-Resource-Policy": "same-origin"}  # fmt: skip
# What a browser may show of a run's own files; all else is offered as a download.
SHOWN = {".png": "image/png", ".svg": "image/svg+xml", ".gif": "image/gif", ".jpg": "image/jpeg", ".mp4": "video/mp4"}
BODY_BYTES = 1 << 20
ADVICE_SECONDS = 20.0  # that advice on a running run is used again


class Guard:
    """An ASGI middleware: only hosts and pages of this server, with the key where there is one."""

    def __init__(self, app: ASGIApp, key: str | None, hosts: Sequence[str]):
        self.app, self.key, self.hosts = app, key, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                present = {name for name, _ in message["headers"]}
                more = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]
                message["headers"] = [*message["headers"], *(pair for pair in more if pair[0] not in present)]
            await send(message)

        request = Request(scope)
        if (problem := self._problem(request)) is not None:
            await refusal(*problem)(scope, receive, with_headers)
        elif self.key is not None and "key" in request.query_params:
            # From now on by a cookie: the key does not stay in the address, the history and what is copied from them.
            response = Response(status_code=303, headers={"Location": "/"})
            response.set_cookie(COOKIE, self.key, httponly=True, samesite="strict")
            await response(scope, receive, with_headers)
        else:
            await self.app(scope, receive, with_headers)

    def _problem(self, request: Request) -> tuple[int, str] | None:
        headers = request.headers
        if self.hosts and host_of(headers) not in self.hosts:
            return 403, f"the host {host_of(headers)!r} is not this server's: open the address that it printed"
        if self.key is not None:
            given = request.query_params.get("key") or request.cookies.get(COOKIE, "")
            if not hmac.compare_digest(given.encode(), self.key.encode()):
                return 401, "a key is needed: open the address with ?key=… that palestra view printed"
        navigation = headers.get("sec-fetch-mode") == "navigate" and not request.url.path.startswith("/api/")
        if not navigation and from_other_site(headers):
            return 403, "requests from pages of other sites are refused"
        writes, length = request.method not in ("GET", "HEAD"), headers.get("content-length", "")
        if writes and headers.get("content-type", "").partition(";")[0] != "application/json":
            return 415, "send JSON (Content-Type: application/json)"
        if writes and (not length.isdecimal() or int(length) > BODY_BYTES):
            return 413, f"the body must say its length, at most {BODY_BYTES:,} bytes"
        return None


def encoded(content: Any) -> bytes:
    """JSON that browsers read: what is not finite becomes null, half a surrogate pair stays escaped."""
    return standard_json(content, ensure_ascii=False, separators=(",", ":")).encode(errors="backslashreplace")


def reply(content: Any, request: Request | None = None) -> Response:
    """A response of JSON; with the request, 304 where the browser has it already."""
    data = encoded(content)
    headers = {"Cache-Control": "no-cache"}
    if request is not None:
        headers["ETag"] = f'"{hashlib.sha256(data).hexdigest()[:24]}"'
        if request.headers.get("if-none-match") == headers["ETag"]:
            return Response(status_code=304, headers=headers)
    return Response(data, media_type="application/json", headers=headers)


def refusal(status: int, message: str) -> Response:
    """An error in one sentence."""
    return Response(encoded({"detail": message}), status, media_type="application/json")


def explained(request: Request, error: Any) -> Response:
    """What went wrong with a request."""
    match error:
        case NotThere():
            return refusal(404, str(error))
        case PalestraError():
            return refusal(409, str(error))
        case RequestValidationError():
            problems = (f"{problem['loc'][-1]}: {problem['msg']}" for problem in error.errors())
            return refusal(422, "the request is not valid: " + "; ".join(problems))
        case OSError():
            return refusal(404, f"a file of the run cannot be read ({error.strerror or error}): was it removed?")
    return refusal(409, f"a file of the run is not what it should be ({type(error).__name__}: {error})")


@lru_cache(maxsize=64)
def _advice(path: Path, stamp: float | str) -> list[dict[str, Any]]:
    """Advice on a run; `stamp` changes when it may be other."""
    return [asdict(advice) for advice in advise(Run(path))]


Seed = Annotated[int | None, Query()]
Text = str | None
Rows = Literal["rollouts", "answers", "samples"]
Runs = Annotated[list[str], Query()]


def create_app(places: Places, *, key: str | None = None, hosts: Sequence[str] = LOOPBACK) -> Any:
    """The application over the runs of some folders."""
    app = FastAPI(title="palestra view", docs_url=None, redoc_url=None, openapi_url=None)
    for kind in (PalestraError, RequestValidationError, *DAMAGED):
        app.exception_handler(kind)(explained)
    for add in (add_runs, add_metrics, add_records):
        add(app, places)

    @app.get("/{path:path}")
    def page(path: str) -> Response:
        return FileResponse(inside(STATIC, path or "index.html"), headers={"Cache-Control": "no-cache"})

    return Guard(app, key, hosts)


def add_runs(app: FastAPI, places: Places) -> None:
    """The lists of runs and of what is not one, and of a run its state, files, log and notes."""
    listing = runs.RunList(places)

    @app.get("/api/runs")
    def list_runs(request: Request) -> Response:
        return reply({"roots": [str(root) for root in places.roots], "runs": listing.rows()}, request)

    @app.get("/api/others")
    def what_is_not_a_run(request: Request) -> Response:
        return reply(others(places), request)

    @app.get("/api/run")
    def one_run(request: Request, run: str) -> Response:
        found = places.run(run)
        stamp = time.monotonic() // ADVICE_SECONDS if found.state == "running" else found.state
        return reply(runs.detail(run, found) | {"advice": _advice(found.path, stamp)}, request)

    @app.get("/api/files")
    def list_files(run: str) -> Response:
        return reply({"files": runs.files(places.run(run))})

    @app.get("/api/file")
    def file(run: str, path: str) -> Response:
        found = inside(places.run(run).path, path)
        headers = {"Content-Security-Policy": "sandbox; default-src 'none'; style-src 'unsafe-inline'"}
        headers |= {} if found.suffix in SHOWN else {"Content-Disposition": "attachment"}
        return FileResponse(found, media_type=SHOWN.get(found.suffix, "text/plain; charset=utf-8"), headers=headers)

    @app.get("/api/log")
    def log(run: str, seed: Seed = None, after: int | None = None) -> Response:
        return reply(runs.tail(places.session(run, seed).path / "log.txt", after))

    @app.get("/api/notes")
    def notes(run: str) -> Response:
        return reply(runs.read_notes(places.run(run)))

    @app.patch("/api/notes")
    def keep_notes(run: str, changes: Annotated[dict[str, Any], Body()]) -> Response:
        return reply(runs.change_notes(places.run(run), changes))


def add_metrics(app: FastAPI, places: Places) -> None:
    """Curves, and runs beside each other."""
    metrics = series.Metrics()

    def columns(run: Run, x: str = "step", low: float = -math.inf, high: float = math.inf) -> dict[int, series.Columns]:
        return {one.seed: metrics.window(one.path / series.FILE, x, low, high) for one in run.sessions}

    @app.get("/api/metrics")
    def metric_names(run: Runs) -> Response:
        return reply(series.names([one for name in run for one in columns(places.run(name)).values()]))

    @app.get("/api/series")
    def curves(
        request: Request, run: Runs, metric: Annotated[list[str] | None, Query()] = None, x: str = "step",
        points: Annotated[int, Query(ge=10, le=5000)] = 800, low: float = -math.inf, high: float = math.inf,
    ) -> Response:  # fmt: skip
        found = {}
        for name in run:
            sessions = columns(places.run(name), x, low, high)
            wanted = metric or series.names(sessions.values())["leading"]
            charts = {one: series.series(sessions, one, x, points, (low, high)) for one in wanted}
            about = {key: sum(getattr(one, key) for one in sessions.values()) for key in ("rows", "skipped", "sampled")}
            found[name] = about | {"series": {one: chart for one, chart in charts.items() if chart is not None}}
        return reply({"x": x, "runs": found}, request)

    @app.get("/api/compare")
    def compare(run: Runs) -> Response:
        specs = [places.run(name).spec for name in run]
        table: dict[str, list[Any]] = {}
        for place, spec in enumerate(specs):
            for change in runs.differing(differences(specs[0], spec)):
                row = table.setdefault(change["path"], [change.get("before")] * len(specs))
                row[place] = change.get("after")
        results = []
        for name in run:
            sessions = columns(places.run(name))
            known = series.names(sessions.values())
            shown = [*known["leading"], *(one for one in known["metrics"] if one.startswith("eval/"))]
            results.append(series.finals(sessions, [one for one in dict.fromkeys(shown) if one[-3:] != "_se"]))
        return reply({"runs": run, "spec": table, "finals": results})


def lines(session: Run, name: str) -> LineFile:
    """The lines of a file of a session."""
    try:
        return LineFile(inside(session.path, name))
    except (OSError, NotThere) as error:
        why = "it is of another kind, has not begun, or rollout.record or track.trace is false"
        raise NotThere(f"this session has no {name}: {why}") from error


def add_records(app: FastAPI, places: Places) -> None:
    """What was recorded row by row: completions, the timeline, the data that was trained on."""
    groups, indexer = rollouts.Rollouts(), Indexer()

    @app.get("/api/rollouts")
    def step_of_rollouts(
        run: str, seed: Seed = None, step: str | None = None, after: int | None = None, file: Rows = "rollouts",
        limit: Annotated[int, Query(ge=1, le=500)] = 60,
        task: Text = None, fate: Text = None, problem: Text = None, status: Text = None, flag: Text = None,
        text: Text = None, reward_low: float = -math.inf, reward_high: float = math.inf,
        length_low: float = -math.inf, length_high: float = math.inf,
    ) -> Response:  # fmt: skip
        ranges = {"reward": (reward_low, reward_high), "length": (length_low, length_high)}
        wanted = rollouts.Wanted(task, fate, problem, status, flag, text or None, **ranges)
        if step not in (None, "all") and not step.isdecimal():
            raise NotThere(f"step={step} is not a step: give a number, or all")
        with lines(places.session(run, seed), f"{file}.jsonl") as opened:
            index = Index(opened.path)
            about = {"indexed": indexer.share(index, opened)}
            if step == "all":
                return reply(groups.search(opened, index, wanted, after or 0, limit) | about)
            number = None if step is None else int(step)
            return reply(groups.step(opened, number, wanted, -1 if after is None else after, limit) | about)

    @app.get("/api/rollouts/group")
    def group(request: Request, run: str, at: int, seed: Seed = None, file: Rows = "rollouts") -> Response:
        session = places.session(run, seed)
        tokenizer = next(map(rollouts.load_tokenizer, rollouts.tokenizer_folders(session, places.runs())), None)
        about = {"tokenizer": None if tokenizer is None else tokenizer.name}
        with lines(session, f"{file}.jsonl") as opened:
            return reply(rollouts.group_at(opened, at, tokenizer) | about, request)

    @app.get("/api/timeline")
    def spans(
        request: Request, run: str, seed: Seed = None, low: float | None = None, high: float | None = None,
        step: int | None = None, bins: Annotated[int, Query(ge=16, le=2000)] = 256,
    ) -> Response:  # fmt: skip
        session = places.session(run, seed)
        names = sorted(path.name for path in session.path.glob("trace.*.json"))
        with ExitStack() as opened:
            files = [opened.enter_context(lines(session, name)) for name in ("trace.json", *names)]
            share = min(indexer.share(Index(file.path), file) for file in files)
            return reply(timeline(files, share, low=low, high=high, step=step, bins=bins), request)

    @app.get("/api/data")
    def datasets(request: Request, run: Text = None) -> Response:
        return reply(data.sets(places, None if run is None else places.session(run)), request)

    @app.get("/api/data/rows")
    def rows_of_data(
        path: str, run: Text = None, row: Annotated[int, Query(ge=0)] = 0, text: str = "",
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
    ) -> Response:  # fmt: skip
        return reply(data.page(places, path, None if run is None else places.session(run), row, text, limit))


def start(folders: Sequence[str], *, host: str, port: int, key: str | None, open_page: bool, demo: bool) -> None:
    """Print the address and serve some folders until interrupted."""
    import uvicorn

    if host not in LOOPBACK and key is None:
        key = secrets.token_urlsafe(24)
    local = [folder for folder in folders if "://" not in folder]
    roots = [Path(folder) if Path(folder).is_dir() else open_run(folder).path for folder in local]
    for mirror in (Mirror(folder) for folder in folders if "://" in folder):
        print(f"copying the runs at {mirror.url}, checkpoints left out …", file=sys.stderr)
        mirror.update()
        Thread(target=mirror.follow, daemon=True).start()
        roots.append(mirror.folder)
    if demo:
        roots.append(cache_root() / "view" / "demo")
        if not roots[-1].is_dir():
            make_demo(roots[-1])
    app = create_app(Places(roots), key=key, hosts=LOOPBACK if host in LOOPBACK else ())
    try:
        listener = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        message = f"cannot listen on {host}:{port} ({error}): choose another --port, 0 for a free one"
        raise UsageError(message) from error
    name = f"[{host}]" if ":" in host else host
    address = f"http://{name}:{listener.getsockname()[1]}/" + (f"?key={key}" if key else "")
    print(address, file=sys.__stdout__, flush=True)  # past the filter of `palestra.work.redact`, which hides keys
    if open_page:
        webbrowser.open(address)
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=1))
    with listener:
        server.run(sockets=[listener])
