"""Servers that speak vLLM's and SGLang's protocols over our tiny engine, and refuse what these would refuse.

The generation routes of vLLM are those of our own server; what its development mode adds, and all of SGLang's, is
here. Every call is checked against a table of recorded signatures: an unknown route, method, field or type fails it.
"""

import asyncio
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import parse_qsl

from fastapi import FastAPI
from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse, PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from tiny_server import CONTEXT, NAME, TOKENIZER, running, tiny_engine, tiny_model

from palestra.cluster.memory import SharedMemory
from palestra.generate.engine.engine import Engine
from palestra.generate.local import LocalGenerator
from palestra.generate.remote.generator import Dialect, RemoteGenerator, WeightFolder, WeightMemory
from palestra.generate.remote.launch import PLUGIN
from palestra.generate.serve.gate import unless_gone
from palestra.generate.serve.server import create_app
from palestra.generate.serve.service import read_weights
from palestra.generate.types import Request, Sampling, StopReason
from palestra.lm.hf import described, slots

sys.path.append(str(PLUGIN))
from palestra_vllm.memory import tensors as shared_tensors

Fields = dict[str, type | tuple[type, ...]]

# vllm 0.32.0: entrypoints/rl/online/api_router.py, serve/dev/rpc, serve/dev/cache
VLLM: dict[str, tuple[Fields, Fields]] = {
    "POST /pause": ({"mode": str, "clear_cache": bool}, {}),
    "POST /resume": ({}, {}),
    "POST /collective_rpc": ({}, {"method": str, "args": list, "kwargs": dict, "timeout": (int, float)}),
    "POST /reset_prefix_cache": ({"reset_running_requests": bool, "reset_external": bool}, {}),
    "POST /init_weight_transfer_engine": ({}, {"init_info": dict}),
    "POST /start_weight_update": ({}, {}),
    "POST /update_weights": ({}, {"update_info": (dict, list)}),
    "POST /finish_weight_update": ({}, {"weight_version": str}),
    "POST /update_weight_version": ({}, {"new_version": str}),
    "GET /weight_info": ({}, {}),
}
"""Parameters of the query and fields of the body, by method and path."""

# sglang cce0a12: srt/managers/io_struct.py, srt/entrypoints/http_server.py
SGLANG: dict[str, tuple[Fields, Fields]] = {
    "GET /health": ({}, {}),
    "POST /generate": (
        {},
        {
            "input_ids": list,
            "sampling_params": dict,
            "return_logprob": bool,
            "logprob_start_len": int,
            "top_logprobs_num": int,
            "rid": str,
            "stream": bool,
        },
    ),
    "POST /abort_request": ({}, {"rid": str, "abort_all": bool}),
    "POST /pause_generation": ({}, {"mode": str}),
    "POST /continue_generation": ({}, {"torch_empty_cache": bool}),
    "POST /update_weights_from_disk": (
        {},
        {
            "model_path": str,
            "load_format": str,
            "abort_all_requests": bool,
            "weight_version": str,
            "is_async": bool,
            "torch_empty_cache": bool,
            "keep_pause": bool,
            "recapture_cuda_graph": bool,
            "token_step": int,
            "flush_cache": bool,
            "manifest": dict,
        },
    ),
    "GET /model_info": ({}, {}),
}
SGLANG_SAMPLING: Fields = {
    "temperature": (int, float),
    "max_new_tokens": int,
    "min_new_tokens": int,
    "stop": list,
    "stop_token_ids": list,
    "ignore_eos": bool,
    "no_stop_trim": bool,
    "sampling_seed": int,
}
"""sampling/sampling_params.py, as far as it is used."""
NEED_A_BODY = ("POST /continue_generation",)


def inspected(app: ASGIApp, table: dict[str, tuple[Fields, Fields]], problems: list[str], *, whole: bool) -> ASGIApp:
    """The application, with what does not fit the table noted; `whole`: there are no other routes."""

    async def call(scope: Scope, receive: Receive, send: Send) -> None:
        route = f"{scope.get('method')} {scope.get('path')}"
        if route not in table:
            if whole and scope["type"] == "http":
                problems.append(route)
                await PlainTextResponse("Not Found", 404)(scope, receive, send)
            else:
                await app(scope, receive, send)
            return
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        problems.extend(misfits(route, table[route], dict(parse_qsl(scope["query_string"].decode())), body))
        whole_body = iter([{"type": "http.request", "body": body, "more_body": False}])

        async def again() -> Message:
            return next(whole_body, None) or await receive()

        await app(scope, again, send)

    return call


def misfits(route: str, signature: tuple[Fields, Fields], query: dict[str, str], body: bytes) -> Iterator[str]:
    """What is wrong with a call."""
    parameters, fields = signature
    if route in NEED_A_BODY and not body:
        yield f"{route} without a body"
    for name, value in query.items():
        if name not in parameters or (parameters[name] is bool and value not in ("true", "false")):
            yield f"{route}?{name}={value}"
    data = json.loads(body) if body else {}
    for name in unfit(data, fields):
        yield f"{route} {name}: {data[name]!r}"


def unfit(body: dict[str, Any], fields: Fields) -> list[str]:
    """The fields that are unknown or of another type; a bool is not a number."""
    numbers = {name for name, value in body.items() if isinstance(value, bool) and fields.get(name) is not bool}
    return [name for name in body if name in numbers or name not in fields or not isinstance(body[name], fields[name])]


@contextmanager
def remote(address: str, dialect: Dialect, **settings: Any) -> Iterator[RemoteGenerator]:
    """A generator of a server of the tiny model, and a folder for its weights."""
    model, eos = tiny_model(), [TOKENIZER.eos or 0]
    with TemporaryDirectory() as folder:
        about, in_memory = (Path(folder, "weights"), model.shape, TOKENIZER, eos, {}), getattr(dialect, "memory", False)
        weights = WeightMemory(*about, channel=SharedMemory()) if in_memory else WeightFolder(*about)
        sizes = {"eos": frozenset(eos), "context": CONTEXT, "vocab": TOKENIZER.vocab_size}
        yield RemoteGenerator(address, dialect, TOKENIZER, weights=weights, **sizes, **settings)
        weights.remove()


@contextmanager
def vllm_server(engine: Engine, api_key: str | None = None, held: int = 1) -> Iterator[tuple[str, list[str]]]:
    """The address of a server that behaves as vLLM 0.32 does, and what was wrong with the calls it got.

    The first `held` resets of the prefix cache fail, as while requests hold blocks.
    """
    problems: list[str] = []
    with LocalGenerator(engine, drive="thread") as generator:
        app = create_app(generator, engine.tokenizer or TOKENIZER, model_name=NAME, api_key=api_key)

        @app.post("/collective_rpc")
        async def collective_rpc(http: HttpRequest) -> dict[str, Any]:
            body = await http.json()
            assert body["method"] == "reload_weights"
            assert engine.metrics()["paused"]
            weights = await asyncio.to_thread(read_weights, Path(body["kwargs"]["weights_path"]))
            if engine.model.shape.tied:  # as vLLM's models skip an output matrix that they do not have
                weights.pop("head", None)
            await generator.publish(weights, engine.version)
            return {"results": [None]}

        update: dict[str, Any] = {}
        ours = [route for route in app.router.routes if getattr(route, "path", "") == "/update_weights"]
        for route in ours:  # another thing by the same name
            app.router.routes.remove(route)

        @app.post("/init_weight_transfer_engine")
        async def init_weight_transfer_engine(http: HttpRequest) -> dict[str, str]:
            update["folder"] = (await http.json())["init_info"]["folder"]
            return {"message": "Weight transfer initialized"}

        @app.post("/start_weight_update")
        async def start_weight_update() -> dict[str, str]:
            assert "folder" in update
            assert "weights" not in update
            update["weights"] = {name: weight.clone() for name, weight in engine.model.state_dict().items()}
            return {"message": "Weight update started"}

        @app.post("/update_weights")
        async def update_weights(http: HttpRequest) -> dict[str, str]:
            assert engine.metrics()["paused"]
            received = dict(shared_tensors(update["folder"], (await http.json())["update_info"]["version"]))
            shape, family, _ = described(engine.model.shape, {}, scores=False)
            for slot in slots(shape, family):
                update["weights"][slot.ours][slot.index].copy_(received[slot.theirs])
            return {"message": "Weights updated"}

        @app.post("/finish_weight_update")
        async def finish_weight_update(http: HttpRequest) -> dict[str, str]:
            await generator.publish(update.pop("weights"), int((await http.json())["weight_version"]))
            return {"message": "Weight update finished"}

        @app.post("/reset_prefix_cache")
        async def reset_prefix_cache(reset_running_requests: bool = False) -> dict[str, bool]:
            nonlocal held
            held, success = max(0, held - 1), not held
            if reset_running_requests:
                await generator.publish(dict(engine.model.named_parameters()), engine.version, keep_cache=False)
            return {"success": success}

        @app.post("/update_weight_version")
        async def update_weight_version(http: HttpRequest) -> dict[str, Any]:
            engine.version = int((await http.json())["new_version"])
            return {"success": True, "new_version": str(engine.version)}

        @app.get("/weight_info")
        async def weight_info() -> dict[str, str]:
            return {"weight_version": str(engine.version)}

        with running(inspected(app, VLLM, problems, whole=False)) as address:
            yield address, problems


@contextmanager
def sglang_server(engine: Engine | None = None) -> Iterator[tuple[str, Engine, list[str]]]:
    """The address of a server that behaves as SGLang does, its engine, and what was wrong with the calls it got."""
    engine, problems = engine or tiny_engine(burst=1), []
    app = FastAPI()
    versions = {"now": "default"}
    running_rids: set[str] = set()
    open_ = asyncio.Event()
    open_.set()

    with LocalGenerator(engine, drive="thread") as generator:

        @app.get("/health")
        async def health() -> PlainTextResponse:
            return PlainTextResponse("")

        @app.post("/generate")
        async def generate(http: HttpRequest) -> JSONResponse:
            body = await http.json()
            params, rid = body["sampling_params"], body["rid"]
            problems.extend(f"sampling_params.{name}: {params[name]!r}" for name in unfit(params, SGLANG_SAMPLING))
            await open_.wait()  # a paused server takes no new requests
            sampling = Sampling(
                temperature=params["temperature"],
                max_new_tokens=params["max_new_tokens"],
                min_new_tokens=params["min_new_tokens"],
                stop=tuple(params["stop"]),
                stop_ids=tuple(params["stop_token_ids"]),
                ignore_eos=params["ignore_eos"],
                seed=params["sampling_seed"],
                logprobs=body["top_logprobs_num"],
            )
            running_rids.add(rid)
            try:
                work = generator.generate(Request(tuple(body["input_ids"]), sampling, id=rid))
                (one,) = (await unless_gone(http.receive, work)).generations
            finally:
                running_rids.discard(rid)
            kind = {StopReason.LENGTH: "length", StopReason.ABORT: "abort"}.get(one.stop_reason, "stop")
            meta = {
                "id": rid,
                "finish_reason": {"type": kind},
                "weight_version": versions["now"],
                "output_token_logprobs": [
                    [lp, token, None] for lp, token in zip(one.logprobs, one.tokens, strict=True)
                ],
                "output_top_logprobs": [[[lp, token, None] for token, lp in row] for row in one.top],
            }
            return JSONResponse({"text": one.text, "output_ids": one.tokens, "meta_info": meta})

        @app.post("/abort_request")
        async def abort_request(http: HttpRequest) -> PlainTextResponse:
            await generator.abort((await http.json())["rid"])
            return PlainTextResponse("")

        @app.post("/pause_generation")
        async def pause_generation(http: HttpRequest) -> JSONResponse:
            mode = (await http.json())["mode"]
            open_.clear()
            if mode != "abort":
                await generator.pause()
                return JSONResponse({"status": "ok"})
            await generator.resume()
            while running_rids:
                for rid in list(running_rids):
                    await generator.abort(rid)
                await asyncio.sleep(0.01)
            return JSONResponse({"status": "ok"})

        @app.post("/continue_generation")
        async def continue_generation() -> JSONResponse:
            await generator.resume()
            open_.set()
            return JSONResponse({"status": "ok"})

        @app.post("/update_weights_from_disk")
        async def update_weights_from_disk(http: HttpRequest) -> JSONResponse:
            body = await http.json()
            if not Path(body["model_path"], "config.json").is_file():
                failed = {"success": False, "message": "no such model", "num_paused_requests": 0}
                return JSONResponse(failed, 400)
            assert not running_rids
            weights = await asyncio.to_thread(read_weights, Path(body["model_path"]))
            await generator.publish(weights, engine.version + 1, keep_cache=not body["flush_cache"])
            versions["now"] = body["weight_version"]
            return JSONResponse({"success": True, "message": "ok", "num_paused_requests": 0})

        @app.get("/model_info")
        async def model_info() -> dict[str, str]:
            return {"model_path": "tiny", "weight_version": versions["now"]}

        with running(inspected(app, SGLANG, problems, whole=True)) as address:
            yield address, engine, problems
