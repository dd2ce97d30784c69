"""Servers of a run: one that it starts, or those that are running already."""

import logging
import os
import socket
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from palestra.errors import PalestraError, UsageError
from palestra.generate.client import httpx
from palestra.spec.generator import EngineLaunch, GeneratorSpec
from palestra.work.child import Child

log = logging.getLogger("palestra.generate")

COMMANDS: dict[str, list[str]] = {
    "vllm": ["-m", "vllm.entrypoints.openai.api_server", "--enable-scale-out", "--logprobs-mode", "processed_logprobs",
             "--max-model-len", "{context}", "--model", "{model}"],
    "sglang": ["-m", "sglang.launch_server", "--context-length", "{context}", "--model-path", "{model}"],
    "palestra": ["-m", "palestra", "serve", "{model}"],
}  # fmt: skip
"""The module of each engine and the arguments without which it cannot be trained with."""
ENV = {"vllm": {"VLLM_SERVER_DEV_MODE": "1"}}
PLUGIN = Path(__file__).parent / "vllm_plugin"
IN_MEMORY = ["--weight-transfer-config", '{"backend": "palestra"}']
"""What makes vLLM take weights through shared memory, with the plugin in its PYTHONPATH."""
TELL_SECONDS = 15.0  # between two lines about a server that is not ready yet
ASK_SECONDS = 5.0  # for a server to say that it is well


def api_key(spec: GeneratorSpec) -> str | None:
    """The key of the servers, from the environment."""
    if spec.api_key_env is None:
        return None
    key = os.environ.get(spec.api_key_env)
    if not key:
        raise UsageError(f"generator.api_key_env: {spec.api_key_env} is not set: export it with the servers' API key")
    return key


def check_running(url: str) -> None:
    """Refuse a server that is not there."""
    if (problem := _unhealthy(url)) is not None:
        raise UsageError(f"generator.url: {url} {problem}: start the server first, or let the run `launch` it")


def launch(
    engine: str,
    how: EngineLaunch,
    memory: bool,
    model: Path,
    context: int,
    log_file: Path,
    stack: ExitStack,
    look: Callable[[], None],
) -> tuple[str, Callable[[], None]]:
    """Start a server of a model folder; its URL once it is ready, and a check that raises when it has ended.

    `stack` ends the server; `look` is called while it starts, and may raise.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    arguments = [part.format(model=model, context=context) for part in COMMANDS[engine]]
    arguments, env = [*arguments, *(IN_MEMORY if memory else [])], {**ENV.get(engine, {}), **how.env}
    if memory:
        paths = [str(PLUGIN), env.get("PYTHONPATH", os.environ.get("PYTHONPATH", ""))]
        env["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    command = [how.python or sys.executable, *arguments, "--host", "127.0.0.1", "--port", str(port), *how.args]
    child = stack.enter_context(Child(command, log_file, env))
    url, started = f"http://127.0.0.1:{port}", time.monotonic()

    def check() -> None:
        if (code := child.exit_code()) is not None:
            raise PalestraError(f"the {engine} server ended with code {code}; the end of {log_file}:\n{child.tail()}")

    told = started
    while _unhealthy(url) is not None:
        check()
        look()
        waited = time.monotonic() - started
        if waited > how.seconds:
            raise PalestraError(
                f"the {engine} server was not ready after {waited:.0f} s: raise generator.launch.seconds, or see "
                f"what it waits for; the end of {log_file}:\n{child.tail()}"
            )
        if time.monotonic() - told > TELL_SECONDS:
            told, last = time.monotonic(), child.tail().rpartition("\n")[2]
            log.info("the %s server (process %d) has been starting for %.0f s: %s", engine, child.pid, waited, last)
        time.sleep(0.2)
    log.info("the %s server is ready at %s after %.1f s", engine, url, time.monotonic() - started)
    return url, check


def _unhealthy(url: str) -> str | None:
    try:
        status = httpx.get(f"{url}/health", timeout=ASK_SECONDS, trust_env=False).status_code
    except httpx.HTTPError as error:
        return f"does not respond ({type(error).__name__})"
    return None if status == 200 else f"has status {status} at /health"
