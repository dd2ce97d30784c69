"""A tiny random model with a character tokenizer, its engine, and the real server over it, in a thread."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import uvicorn

from palestra.data.tokenizers import Tokenizer, character_tokenizer
from palestra.generate.engine.engine import Engine
from palestra.generate.local import LocalGenerator
from palestra.generate.serve.listen import uvicorn_config
from palestra.generate.serve.server import create_app
from palestra.lm.model import Transformer
from palestra.spec.shape import Shape

ALPHABET = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 .,:;!?'\n-é€"
TOKENIZER = character_tokenizer(ALPHABET)
CONTEXT = 192
KEY = "the-key"
NAME = "tiny"


def tiny_model(seed: int = 0) -> Transformer:
    """Weights so large that greedy text is no single letter and samples differ."""
    shape = Shape(
        layers=2, width=32, heads=4, kv_heads=2, mlp=64, context=CONTEXT, vocab=TOKENIZER.vocab_size, tied=False
    )
    model = Transformer(shape)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.3, generator=generator)
        assert model.head is not None
        model.head[sorted(TOKENIZER.special_ids)] = 0.0
    return model


def tiny_engine(**settings: Any) -> Engine:
    """An engine for it. The end token has a small probability: most generations are as long as they may be."""
    tokenizer: Tokenizer = settings.pop("tokenizer", TOKENIZER)
    assert tokenizer.eos is not None
    options = {"max_running": 8, "burst": 2, **settings}
    return Engine(tiny_model(), eos=frozenset({tokenizer.eos}), tokenizer=tokenizer, **options)


@contextmanager
def running(app: Any, port: int = 0) -> Iterator[str]:
    """The address of a real uvicorn server of an application, in a thread."""
    with socket.create_server(("127.0.0.1", port)) as listening:
        server = uvicorn.Server(uvicorn_config(app))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            while not server.started:
                time.sleep(0.01)
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


@contextmanager
def serving(api_key: str | None = KEY, engine: Engine | None = None, **limits: Any) -> Iterator[tuple[str, Engine]]:
    """The address of a server of a tiny engine, and the engine."""
    engine = engine or tiny_engine()
    with (
        LocalGenerator(engine, drive="thread") as generator,
        running(
            create_app(generator, engine.tokenizer or TOKENIZER, model_name=NAME, api_key=api_key, **limits)
        ) as address,
    ):
        yield address, engine
