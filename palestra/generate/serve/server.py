"""The HTTP server: OpenAI's endpoints, tokens in and out, new weights, and how it is doing."""

import asyncio
import tempfile
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from palestra.data.chat import encode_chat
from palestra.data.media import Image
from palestra.data.tokenizers import Tokenizer
from palestra.errors import MissingExtra, UsageError
from palestra.generate.client import MOST_SAMPLES, GenerateBody, StrictBody, result_json
from palestra.generate.engine.engine import Engine
from palestra.generate.engine.request import EngineFailed, PromptTooLong
from palestra.generate.local import LocalGenerator
from palestra.generate.serve import gate, listen
from palestra.generate.serve.images import fetched
from palestra.generate.serve.openai import ApiError, ChatBody, CompletionBody, Reply
from palestra.generate.serve.service import Service, read_safetensors, read_weights
from palestra.generate.serve.tokens import AbortRequests, TokenReply, TokensBody
from palestra.generate.types import Request
from palestra.work.hosts import LOOPBACK

try:
    from fastapi import FastAPI
    from fastapi.exceptions import RequestValidationError
    from fastapi.requests import Request as HttpRequest
    from fastapi.responses import JSONResponse, PlainTextResponse, Response
except ImportError as error:
    raise MissingExtra("The server", "serve") from error


MAX_CONCURRENT = 1024


class UpdateBody(StrictBody):
    """`POST /update_weights`."""

    path: str
    """A Hugging Face folder, a checkpoint, or a safetensors file that the server can read."""
    version: int
    keep_cache: bool = True


class AbortBody(StrictBody):
    """`POST /abort`."""

    id: str


def create_app(
    generator: LocalGenerator,
    tokenizer: Tokenizer,
    *,
    model_name: str,
    api_key: str | None = None,
    max_body_bytes: int | None = None,
    max_concurrent: int = MAX_CONCURRENT,
    allowed_hosts: Sequence[str] = LOOPBACK,
    image_urls: bool = False,
) -> FastAPI:
    """The application over a generator that drives itself; without `allowed_hosts` requests may name any host.

    With `image_urls` it fetches images that requests name by http: from wherever it can reach.
    """
    engine = generator.engine
    service = Service(generator, max_concurrent=max_concurrent)
    app = FastAPI(title="Palestra", docs_url=None, redoc_url=None)
    app.state.service = service
    # Weights are sent in FP32 at most, and the header of the file is small.
    upload_bytes = 4 * engine.model.shape.parameters() + (1 << 20)
    app.add_middleware(
        gate.Gate,
        api_key=api_key,
        max_body_bytes=max_body_bytes or gate.most_bytes(engine.model.shape.vision is not None),
        max_body_bytes_of={"PUT /update_weights": upload_bytes},
        allowed_hosts=allowed_hosts,
        requests=service.requests,
        seconds=service.seconds,
    )
    _explain_errors(app, service)
    _add_openai(app, service, tokenizer, model_name, image_urls)
    _add_generate(app, service)
    _add_tokens(app, service, model_name)
    _add_weights(app, generator)
    _add_monitoring(app, service, model_name)
    return app


def _add_openai(app: FastAPI, service: Service, tokenizer: Tokenizer, model_name: str, image_urls: bool) -> None:
    """OpenAI's endpoints, `/v1/…`."""
    engine = service.generator.engine
    # What is longer cannot fit, and is not worth the seconds that millions of characters take to encode. (Normalization
    # shortens no text to less than a fourth.)
    most_characters = 4 * engine.context * max(len(tokenizer.piece(token)) for token in range(tokenizer.vocab_size))
    model = {"id": model_name, "object": "model", "created": int(time.time()), "owned_by": "palestra"}

    def check(body: ChatBody | CompletionBody) -> None:
        _check_model(body.model, model_name)
        prompts = len(body.prompt) if isinstance(body, CompletionBody) else 1
        if prompts * body.n > MOST_SAMPLES:
            many = f"{prompts:,} prompts with n = {body.n:,} are more than the {MOST_SAMPLES:,} samples of one request"
            raise ApiError(400, f"{many}: send several requests", param="n")
        if body.characters > most_characters:
            long = f"the prompt has {body.characters:,} characters"
            raise PromptTooLong(f"{long}, but the context is {engine.context} tokens")

    async def respond(
        body: ChatBody | CompletionBody,
        prompts: Sequence[Sequence[int]],
        http: HttpRequest,
        media: Sequence[Image] = (),
    ) -> Response:
        id = f"{'chatcmpl' if isinstance(body, ChatBody) else 'cmpl'}-{uuid.uuid4().hex}"
        requests = tuple(
            Request(
                tuple(prompt),
                body.sampling(engine.context),
                body.n,
                id if len(prompts) == 1 else f"{id}-{place}",
                tuple(media),
            )
            for place, prompt in enumerate(prompts)
        )
        scored = ()
        if isinstance(body, CompletionBody) and body.echo and body.logprobs is not None:
            scored = tuple([await asyncio.to_thread(engine.score, prompt, body.logprobs) for prompt in prompts])
        reply = Reply(body, id, int(time.time()), model_name, tokenizer, requests, scored)
        if body.stream:
            return gate.EventStream(service.reply_events(reply), service.explain)
        return JSONResponse(reply.whole(await gate.unless_gone(http.receive, service.results(requests))))

    @app.post("/v1/chat/completions")
    async def chat(body: ChatBody, http: HttpRequest) -> Response:
        check(body)
        messages = await fetched([message.message() for message in body.messages], image_urls)
        settings: dict[str, Any] = {"add_generation_prompt": True, **body.chat_template_kwargs}
        encoded = await asyncio.to_thread(encode_chat, tokenizer, messages, **settings)
        return await respond(body, [encoded.tokens], http, encoded.images)

    @app.post("/v1/completions")
    async def completions(body: CompletionBody, http: HttpRequest) -> Response:
        check(body)
        prompts = [
            await asyncio.to_thread(tokenizer.encode_prompt, prompt) if isinstance(prompt, str) else prompt
            for prompt in body.prompt
        ]
        return await respond(body, prompts, http)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [model]}

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> dict[str, Any]:
        _check_model(name, model_name)
        return model


def _add_generate(app: FastAPI, service: Service) -> None:
    """Tokens in, tokens out, and the end of a request."""

    @app.post("/generate")
    async def generate(body: GenerateBody, http: HttpRequest) -> Response:
        request = body.request()
        if body.stream:
            return gate.EventStream(service.chunk_events(request), service.explain)
        (result,) = await gate.unless_gone(http.receive, service.results([request]))
        return JSONResponse(result_json(result))

    @app.post("/abort")
    async def abort(body: AbortBody) -> dict[str, str]:
        await service.generator.abort(body.id)
        return {"id": body.id}


def _add_tokens(app: FastAPI, service: Service, model_name: str) -> None:
    """The same as vLLM has it."""

    @app.post("/inference/v1/generate")
    async def generate(body: TokensBody, http: HttpRequest) -> Response:
        _check_model(body.model, model_name)
        request = body.request(service.generator.engine.context)
        reply = TokenReply(body, request, model_name, int(time.time()))
        if body.stream:
            return gate.EventStream(service.chunk_events(request, reply.part), service.explain)
        (result,) = await gate.unless_gone(http.receive, service.results([request]))
        return JSONResponse(reply.whole(result))

    @app.post("/inference/v1/abort_requests")
    async def abort(body: AbortRequests) -> Response:
        for id in body.ids:
            await service.generator.abort(id)
        return Response()


def _check_model(name: str | None, served: str) -> None:
    if name not in (None, served):
        message = f"The model {name!r} is not served here: this is {served!r}"
        raise ApiError(404, message, param="model", code="model_not_found")


def _add_weights(app: FastAPI, generator: LocalGenerator) -> None:
    """Weight updates, one at a time, and pausing around them."""
    publishing = asyncio.Lock()

    @app.post("/update_weights")
    async def update_weights(body: UpdateBody) -> dict[str, int]:
        async with publishing:
            weights = await asyncio.to_thread(read_weights, Path(body.path))
            await generator.publish(weights, body.version, keep_cache=body.keep_cache)
        return {"version": body.version}

    @app.put("/update_weights")
    async def upload_weights(http: HttpRequest, version: int, keep_cache: bool = True) -> dict[str, int]:
        with tempfile.NamedTemporaryFile(suffix=".safetensors") as file:
            async for piece in http.stream():
                await asyncio.to_thread(file.write, piece)
            file.flush()
            async with publishing:
                weights = await asyncio.to_thread(read_safetensors, Path(file.name))
                await generator.publish(weights, version, keep_cache=keep_cache)
        return {"version": version}

    @app.post("/pause")
    async def pause() -> dict[str, bool]:
        await generator.pause()
        return {"paused": True}

    @app.post("/resume")
    async def resume() -> dict[str, bool]:
        await generator.resume()
        return {"paused": False}


def _add_monitoring(app: FastAPI, service: Service, model_name: str) -> None:
    """Health and Prometheus metrics."""
    engine = service.generator.engine

    @app.get("/health")
    async def health() -> Response:
        if engine.failure is not None:
            return gate.error_response(service.explain(EngineFailed(engine.failure)))
        return JSONResponse({"status": "ok", "model": model_name, "version": engine.version})

    @app.get("/metrics")
    async def metrics() -> Response:
        return PlainTextResponse(service.metrics(), headers={"Content-Type": gate.CONTENT_TYPE})


def serve_engine(
    engine: Engine,
    *,
    name: str,
    host: str = "127.0.0.1",
    port: int = 8000,
    api_key: str | None = None,
    allowed_hosts: Sequence[str] = (),
    image_urls: bool = False,
    **limits: Any,
) -> None:
    """Serve an engine until SIGINT or SIGTERM; port 0 takes one that is free. Limits are those of `create_app`."""
    if engine.tokenizer is None:
        raise UsageError(f"{name} has no tokenizer, which a server of text needs: put its tokenizer.json in its folder")
    with listen.bound(host, port) as listening, LocalGenerator(engine, drive="thread") as generator:
        app = create_app(
            generator,
            engine.tokenizer,
            model_name=name,
            api_key=api_key,
            allowed_hosts=listen.hosts_of(host, allowed_hosts),
            image_urls=image_urls,
            **limits,
        )
        listen.serve(app, listening, app.state.service.abort_all, name=name, api_key=api_key)


def _explain_errors(app: FastAPI, service: Service) -> None:
    """Every refusal and every failure as OpenAI's error object."""

    async def explained(_: HttpRequest, error: Exception) -> Response:
        if isinstance(error, RequestValidationError):
            error = gate.invalid_body(error.errors())
        return gate.error_response(service.explain(error))

    for kind in (*gate.EXPLAINED, RequestValidationError):
        app.add_exception_handler(kind, explained)
