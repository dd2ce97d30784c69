"""Models in use: served over HTTP, and chat in the terminal."""

from pathlib import Path
from typing import Any

import torch

from palestra.errors import UsageError
from palestra.generate.chat import chat_loop
from palestra.generate.engine.engine import Engine
from palestra.generate.local import LocalGenerator
from palestra.generate.types import Sampling
from palestra.kinds.models import named_dtype, open_model
from palestra.spec.shape import precision


def open_engine(ref: str | Path, *, dtype: str, device: str, root: Path, **settings: Any) -> Engine:
    """An engine for a model by name or path."""
    if device not in ("auto", "cpu", "cuda"):
        raise UsageError(f"--device {device}: expected auto, cpu or cuda")
    if device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda, but torch sees no GPU here: use --device cpu, or a torch built for your GPU")
    where = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    chosen = named_dtype(precision(dtype, where))
    # On the CPU first: the engine makes its own copy on the device, and takes what that leaves free for its cache.
    loaded, tokenizer = open_model(ref, root, dtype=chosen, param_dtype=chosen)
    if loaded.score is not None:
        raise UsageError(f"{ref} is a reward model: it scores conversations and cannot generate text")
    return Engine(loaded.model, eos=frozenset(loaded.eos), tokenizer=tokenizer, dtype=chosen, device=where, **settings)


def chat(
    ref: str | Path,
    *,
    root: Path,
    system: str | None = None,
    temperature: float = 0.7,
    max_new_tokens: int = 512,
    dtype: str = "auto",
    device: str = "auto",
) -> None:
    """Chat with a model in the terminal."""
    engine = open_engine(ref, dtype=dtype, device=device, root=root, max_running=1)
    assert engine.tokenizer is not None  # open_model refuses a folder without one
    sampling = Sampling(temperature=temperature, max_new_tokens=max_new_tokens)
    with LocalGenerator(engine, drive="thread") as generator:
        chat_loop(generator, engine.tokenizer, system=system, sampling=sampling)


def serve(
    ref: str | Path,
    *,
    root: Path,
    dtype: str = "auto",
    device: str = "auto",
    name: str | None = None,
    context: int | None = None,
    max_body: int | None = None,
    sessions: Path | None = None,
    image_urls: bool = False,
    **settings: Any,
) -> None:
    """Serve a model until SIGINT or SIGTERM; `settings` are those of `serve_engine`.

    With `sessions` it is served to agents, and what they say is recorded in that folder.
    """
    from palestra.generate.serve.server import serve_engine  # needs the extra `serve`
    from palestra.rollout.gateway.recording import serve_sessions

    engine = open_engine(ref, dtype=dtype, device=device, root=root, context=context)
    if sessions is not None:
        if image_urls:
            raise UsageError("--image-urls: sessions of agents take images as data URLs alone")
        serve_sessions(engine, Path(sessions), name=name or Path(str(ref)).name, max_body_bytes=max_body, **settings)
        return
    shown = name or Path(str(ref)).name
    serve_engine(engine, name=shown, max_body_bytes=max_body, image_urls=image_urls, **settings)
