"""`palestra serve` as a process: signals, warnings, and many clients at once, good and bad."""

import asyncio
import json
import re
import signal
import socket
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import zygote
from conftest import COMMAND, ENVIRONMENT
from tiny_server import KEY, NAME, TOKENIZER, tiny_engine, tiny_model

from palestra.data.chat import encode_chat
from palestra.errors import PalestraError, UsageError
from palestra.generate.engine.engine import Engine
from palestra.generate.serve.server import serve_engine
from palestra.generate.types import Request, Sampling
from palestra.lm.hf import save_pretrained

TOKENS = 48
MESSAGES = [{"role": "user", "content": "Tell me a story."}]
SEEDS = range(4)
MIB = 1 << 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("models") / NAME
    assert TOKENIZER.eos is not None
    save_pretrained(target, tiny_model(), tokenizer=TOKENIZER, eos=(TOKENIZER.eos,))
    return target


class Served:
    """A server process."""

    def __init__(self, folder: Path, *options: str):
        self.process = zygote.Popen(
            [COMMAND, "serve", str(folder), "--port", "0", "--dtype", "fp32", "--device", "cpu", *options],
            env=ENVIRONMENT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        found = re.search(r"http://\S+:(\d+)/v1", line)
        if found is None:
            raise AssertionError(f"{line!r}: {self.end()}")
        self.address = f"http://127.0.0.1:{found[1]}"

    def end(self, number: signal.Signals | None = signal.SIGTERM) -> tuple[int, str]:
        """Its exit code and what it said on standard error."""
        if self.process.poll() is None and number is not None:
            self.process.send_signal(number)
        try:
            _, said = self.process.communicate(timeout=30)
        finally:
            self.process.kill()
        return self.process.returncode, said

    def metrics(self) -> dict[str, float]:
        text = httpx.get(f"{self.address}/metrics", headers={"Authorization": f"Bearer {KEY}"}).text
        return {name: float(value) for name, value in re.findall(r"^(palestra_(?:engine|http)_\w+) (\S+)$", text, re.M)}


@pytest.fixture
def served(folder: Path) -> Iterator[Served]:
    found = Served(folder, "--api-key", KEY)
    yield found
    found.end(signal.SIGKILL)


def body(**changes: Any) -> dict[str, Any]:
    return {"messages": MESSAGES, "max_tokens": TOKENS, "ignore_eos": True, "stream": True, **changes}


# Start and end


def test_sigterm_lets_a_stream_end_and_then_the_server_exits_with_0(folder: Path) -> None:
    served = Served(folder, "--host", "0.0.0.0")
    with (
        httpx.Client(base_url=served.address, timeout=60) as http,
        http.stream("POST", "/v1/chat/completions", json=body(max_tokens=120)) as events,
    ):
        lines = events.iter_lines()
        next(lines)
        served.process.send_signal(signal.SIGTERM)
        rest = [line for line in lines if line]
    code, said = served.end(None)
    assert rest[-1] == "data: [DONE]"
    assert json.loads(rest[-2][6:])["choices"][0]["finish_reason"] == "length"
    assert code == 0
    assert re.search("warning: anyone who can reach 0.0.0.0 .*--api-key", said)
    assert "Traceback" not in said


def test_sigint_while_paused_ends_requests_with_what_they_have(served: Served) -> None:
    async def check() -> httpx.Response:
        headers = {"Authorization": f"Bearer {KEY}"}
        async with httpx.AsyncClient(base_url=served.address, headers=headers, timeout=60) as http:
            await http.post("/pause")
            waiting = asyncio.create_task(http.post("/v1/chat/completions", json=body(stream=False)))
            while (await asyncio.to_thread(served.metrics))["palestra_engine_requests"] == 0:
                await asyncio.sleep(0.01)
            served.process.send_signal(signal.SIGINT)
            return await waiting

    answer = asyncio.run(check())
    assert answer.json()["choices"][0]["finish_reason"] == "abort"
    code, said = served.end(None)
    assert code == 0
    assert "Traceback" not in said


def test_serve_on_a_port_that_is_taken_says_so() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(PalestraError, match="--port"):
        serve_engine(tiny_engine(), name=NAME, port=taken.getsockname()[1])


def test_serve_without_a_tokenizer_says_so() -> None:
    with pytest.raises(UsageError, match="tokenizer"):
        serve_engine(Engine(tiny_model(), eos=frozenset()), name=NAME, port=0)


# Load


def alone() -> dict[int, str]:
    """The text of each seed, from an engine that does nothing else."""
    prompt = tuple(encode_chat(TOKENIZER, MESSAGES, add_generation_prompt=True).tokens)
    sampling = {seed: Sampling(seed=seed, max_new_tokens=TOKENS, ignore_eos=True) for seed in SEEDS}
    engine = tiny_engine()
    return {seed: engine.run([Request(prompt, sampling[seed])])[0].generations[0].text or "" for seed in SEEDS}


async def reads(http: httpx.AsyncClient, seed: int, expected: dict[int, str]) -> str:
    text = ""
    async with http.stream("POST", "/v1/chat/completions", json=body(seed=seed)) as events:
        assert events.status_code == 200
        async for line in events.aiter_lines():
            if line.startswith("data: {"):
                text += json.loads(line[6:])["choices"][0]["delta"].get("content", "")
    assert line == "" or line == "data: [DONE]"
    assert text == expected[seed]
    return "whole"


async def leaves(http: httpx.AsyncClient) -> str:
    async with http.stream("POST", "/v1/chat/completions", json=body(n=2)) as events:
        await anext(events.aiter_lines())
    return "left"


async def refused(http: httpx.AsyncClient, status: int, **request: Any) -> str:
    answer = await http.post("/v1/chat/completions", **request)
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]["message"]
    return str(status)


async def load(address: str, seconds: float, expected: dict[int, str]) -> Counter[str]:
    """64 clients at once for so long; how often each kind of thing was done."""
    done, end = Counter(), time.monotonic() + seconds
    huge = json.dumps(body(messages=[{"role": "user", "content": "a" * 10_000_000}])).encode()
    as_json = {"Content-Type": "application/json"}

    async def act(http: httpx.AsyncClient, number: int, turn: int) -> str:
        match number:
            case 0 | 1:
                return await refused(http, 400, content=b'{"messages": [', headers=as_json)
            case 2 | 3:
                return await refused(http, 413, content=huge, headers=as_json)
            case 4 | 5:
                return await refused(http, 404, json=body(model="gpt-5"))
            case 6 | 7:
                return await refused(http, 401, json=body(), headers={"Authorization": "Bearer wrong"})
            case _ if number < 16:
                return await leaves(http)
        return await reads(http, (number + turn) % len(SEEDS), expected)

    async def client(number: int) -> None:
        headers = {"Authorization": f"Bearer {KEY}"}
        # Certificates would take longer to read than all the rest.
        async with httpx.AsyncClient(base_url=address, headers=headers, timeout=120, verify=False) as http:
            turn = 0
            while turn == 0 or time.monotonic() < end:
                done[await act(http, number, turn)] += 1
                turn += 1
                if number < 16:
                    await asyncio.sleep(0.2)

    async with asyncio.TaskGroup() as group:
        for number in range(64):
            group.create_task(client(number))
    return done


@pytest.mark.parametrize(
    "seconds", [1, pytest.param(60, marks=[pytest.mark.slow, pytest.mark.timeout(600)])], ids=["short", "minute"]
)
def test_64_clients_good_and_bad_leave_nothing_behind(served: Served, seconds: float) -> None:
    process, expected = psutil.Process(served.process.pid), alone()
    asyncio.run(load(served.address, 0, expected))  # buffers and threads are there from now on
    idle, before, files = settled(served), process.memory_info().rss, process.num_fds()
    done = asyncio.run(load(served.address, seconds, expected))
    print(dict(done))
    assert set(done) == {"whole", "left", "400", "401", "404", "413"}
    assert done["whole"] >= 48
    after = settled(served)
    for name in ("palestra_engine_running", "palestra_engine_waiting", "palestra_engine_requests"):
        assert after[name] == 0
    assert after["palestra_engine_free_slots"] == after["palestra_engine_slots"]
    assert after["palestra_http_admitted"] == 0
    assert after["palestra_http_tasks"] == idle["palestra_http_tasks"]
    growth = process.memory_info().rss - before
    print(f"{growth / MIB:.1f} MiB more of {before / MIB:.1f}, {process.num_fds() - files} files more")
    assert growth < 48 * MIB
    assert process.num_fds() <= files + 2
    code, said = served.end()
    assert code == 0
    assert "Traceback" not in said


def settled(served: Served) -> dict[str, float]:
    """The numbers once the server has seen the last client go."""
    end = time.monotonic() + 20
    while True:
        numbers = served.metrics()
        if numbers["palestra_http_admitted"] == numbers["palestra_engine_requests"] == 0 or time.monotonic() > end:
            time.sleep(0.3)
            return served.metrics()
        time.sleep(0.05)
