"""A worker process of agents that are Python functions: many at once, each with the address and key of its session."""

import asyncio
import inspect
import json
import socket
import traceback
from collections.abc import Callable
from typing import Any

from palestra.rollout.agents.lines import LONGEST_LINE
from palestra.spec.imports import load_named


async def work(connection: socket.socket, function: Callable[..., Any]) -> None:
    """Run what each line asks for, and answer with lines, until the connection closes."""
    reader, writer = await asyncio.open_connection(sock=connection, limit=LONGEST_LINE)
    running: dict[int, asyncio.Task[None]] = {}

    async def run(job: dict[str, Any]) -> None:
        done: dict[str, Any] = {"id": job["id"]}
        try:
            arguments = (job["problem"], job["url"], job["key"])
            if inspect.iscoroutinefunction(function):
                answer = await function(*arguments)
            else:
                answer = await asyncio.to_thread(function, *arguments)
            if answer is not None and not isinstance(answer, str):
                raise TypeError(f"the agent returned {type(answer).__name__}: expected a text or None")
            done["answer"] = answer
        except Exception as error:
            done |= {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()[-4000:]}
        finally:
            del running[job["id"]]
        writer.write(json.dumps(done).encode() + b"\n")

    writer.write(b'{"id": null}\n')  # loaded
    while line := await reader.readline():
        job = json.loads(line)
        if "cancel" in job:
            if (task := running.get(job["cancel"])) is not None:
                task.cancel()
        else:
            running[job["id"]] = asyncio.create_task(run(job))


def main(descriptor: int, name: str) -> None:
    """Serve the function of a name over an open socket."""
    from concurrent.futures import ThreadPoolExecutor

    function = load_named(name, "rollout.workflow.function")
    loop = asyncio.new_event_loop()
    loop.set_default_executor(ThreadPoolExecutor(256))
    connection = socket.socket(fileno=descriptor)
    connection.setblocking(False)
    loop.run_until_complete(work(connection, function))
