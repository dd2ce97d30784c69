"""The gateway beside the engine called directly: sessions of several turns at once, all in one process, on the CPU.

    python benchmarks/gateway.py [--sessions 64] [--turns 2] [--new 64] [--layers 8 --width 256]
    python benchmarks/gateway.py soak [--minutes 5]    # bad clients for minutes, and what leaked: gateway_soak.py

Each session sends a conversation and then what follows a turn, as agents do, over HTTP from a process of its own with
one connection a session. Called directly the engine gets the same tokens: prompts are encoded before the clock starts,
and nothing is parsed. Weights are random, sampling is at temperature 1 without an end, so both sample as many tokens.
The two take turns, and the best round of each counts. CPU time is that of the thread that serves, or that calls the
engine: its own thread is not in it, nor are the clients. A JSON line for the result.
"""

import argparse
import asyncio
import json
import platform
import string
import sys
import time
from typing import Any

import torch

from palestra.data.chat import encode_after, encode_chat
from palestra.data.tokenizers import character_tokenizer
from palestra.generate.engine.engine import Engine
from palestra.generate.local import LocalGenerator
from palestra.generate.types import Request, Sampling
from palestra.lm.model import Transformer
from palestra.rollout.gateway.dialect import Source
from palestra.rollout.gateway.server import Gateway, new_key
from palestra.rollout.gateway.session import Session
from palestra.spec.shape import Shape

QUESTION = [{"role": "user", "content": "Count the words of this sentence, and then count them once more, please."}]
MORE = [{"role": "user", "content": "And how many letters are there?"}]
TOKENIZER = character_tokenizer(string.printable)


def main() -> None:
    if sys.argv[1:2] == ["client"]:
        asyncio.run(client(json.loads(sys.argv[2])))
        return
    if sys.argv[1:2] == ["soak"]:
        sys.exit(soaked(sys.argv[2:]))
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"sessions": 64, "turns": 2, "new": 64, "layers": 8, "width": 256, "rounds": 3}.items():
        arguments.add_argument(f"--{name}", type=int, default=default)
    arguments.add_argument("--threads", type=int, default=torch.get_num_threads())
    given = arguments.parse_args()
    torch.set_num_threads(given.threads)
    with LocalGenerator(engine_of(given), drive="thread") as generator:
        gateway = Gateway(model="policy", idle_seconds=600.0)
        try:
            rounds = asyncio.run(measured(generator, gateway, given))
        finally:
            gateway.close()
    requests = given.sessions * given.turns
    direct, through = (sorted(rounds[name]) for name in ("direct", "gateway"))
    cpu = min(cpu for _, cpu in through) - min(cpu for _, cpu in direct)
    result = {
        **vars(given),
        "machine": platform.machine(),
        "direct_seconds": round(direct[0][0], 3),
        "gateway_seconds": round(through[0][0], 3),
        "wall_ratio": round(through[0][0] / direct[0][0], 3),
        "cpu_ms_per_request": round(1000 * cpu / requests, 3),
        "rounds_wall": {name: [round(wall, 3) for wall, _ in rounds[name]] for name in rounds},
    }
    print(json.dumps(result))


def soaked(given: list[str]) -> int:
    """The line of a soak; 1 where something leaked."""
    import gateway_soak

    arguments = argparse.ArgumentParser("gateway.py soak", description=gateway_soak.__doc__)
    arguments.add_argument("--minutes", type=float, default=5.0)
    arguments.add_argument("--wave", type=float, default=10.0, help="seconds from one wave to the next")
    asked = arguments.parse_args(given)
    torch.set_num_threads(1)
    shape = argparse.Namespace(layers=2, width=64, sessions=64)
    with LocalGenerator(engine_of(shape), drive="thread") as generator:
        line = gateway_soak.soak(generator, TOKENIZER, seconds=60 * asked.minutes, wave=asked.wave, idle=5.0)
    print(json.dumps({"machine": platform.machine(), **line}))
    return int(bool(line["leaked"]))


def engine_of(given: argparse.Namespace) -> Engine:
    shape = Shape(
        layers=given.layers, width=given.width, heads=8, mlp=3 * given.width, context=2048, vocab=TOKENIZER.vocab_size
    )
    model = Transformer(shape)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.02)
    # No end tokens: every turn is as long as it may be.
    return Engine(model, eos=frozenset(), tokenizer=TOKENIZER, context=2048, max_running=given.sessions)


async def measured(generator: LocalGenerator, gateway: Gateway, given: argparse.Namespace) -> dict[str, list[Any]]:
    rounds: dict[str, list[Any]] = {"direct": [], "gateway": []}
    for number in range(given.rounds + 1):
        for name, run in (("direct", directly), ("gateway", through_http)):
            wall, cpu = await run(generator, gateway, given)
            if number:  # the first warms up
                rounds[name].append((wall, cpu))
    return rounds


async def directly(generator: LocalGenerator, _: Gateway, given: argparse.Namespace) -> tuple[float, float]:
    first = tuple(encode_chat(TOKENIZER, QUESTION, add_generation_prompt=True).tokens)
    suffix = tuple(encode_after(TOKENIZER, QUESTION, MORE).tokens)

    async def session(seed: int) -> None:
        prompt = first
        for turn in range(given.turns):
            sampling = Sampling(max_new_tokens=given.new, seed=1000 * turn + seed)
            result = await generator.generate(Request(prompt, sampling))
            prompt = prompt + result.generations[0].tokens + suffix

    wall, cpu = time.perf_counter(), time.thread_time()
    await asyncio.gather(*map(session, range(given.sessions)))
    return time.perf_counter() - wall, time.thread_time() - cpu


async def through_http(generator: LocalGenerator, gateway: Gateway, given: argparse.Namespace) -> tuple[float, float]:
    async def opened(seed: int) -> Session:
        sampling = Sampling(max_new_tokens=given.new)
        session = Session(
            new_key(),
            Source(generator),
            TOKENIZER,
            context=2048,
            model="policy",
            sampling=sampling,
            seed=seed,
            format="json",
        )
        gateway.sessions.add(session)
        return session

    sessions = [gateway.thread.start(opened(seed)).result() for seed in range(given.sessions)]
    about = {"url": gateway.url, "keys": [session.key for session in sessions], "turns": given.turns}
    process = await asyncio.create_subprocess_exec(
        sys.executable, __file__, "client", json.dumps(about), stdin=-1, stdout=-1
    )
    assert process.stdout is not None and process.stdin is not None  # noqa: PT018
    await process.stdout.readline()  # ready
    wall, cpu = time.perf_counter(), gateway.thread.start(thread_time()).result()
    process.stdin.write(b"go\n")
    await process.stdout.readline()
    took = time.perf_counter() - wall, gateway.thread.start(thread_time()).result() - cpu
    await process.wait()
    assert process.returncode == 0
    assert all(len(session.turns) == given.turns and not session.forks for session in sessions)
    assert sum(session.retokenized for session in sessions) == 0
    for session in sessions:
        gateway.thread.loop.call_soon_threadsafe(gateway.sessions.end, session, "closed")
    return took


async def thread_time() -> float:
    return time.thread_time()


async def client(about: dict[str, Any]) -> None:
    """An agent per key, each over one connection, without a library: what is measured is the server."""
    host, port = about["url"].removeprefix("http://").split(":")

    async def agent(key: str) -> None:
        reader, writer = await asyncio.open_connection(host, int(port))
        messages: list[Any] = list(QUESTION)
        await begin.wait()
        for _ in range(about["turns"]):
            body = json.dumps({"model": "policy", "messages": messages}).encode()
            head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {key}\r\n"
            writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            answer = await reader.readuntil(b"\r\n\r\n")
            length = next(line for line in answer.lower().split(b"\r\n") if line.startswith(b"content-length"))
            message = json.loads(await reader.readexactly(int(length.partition(b":")[2])))["choices"][0]["message"]
            messages += [{"role": "assistant", "content": message["content"]}, *MORE]
        writer.close()

    begin = asyncio.Event()
    agents = [asyncio.create_task(agent(key)) for key in about["keys"]]
    await asyncio.sleep(0.5)  # all are connected
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    begin.set()
    await asyncio.gather(*agents)
    print("done", flush=True)


if __name__ == "__main__":
    main()
