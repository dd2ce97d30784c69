"""Agents for tests: two turns over plain HTTP, and ways to end badly."""

import json
import os
import signal
import socket
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any


def post(url: str, key: str, path: str, body: Any) -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(url + path, json.dumps(body).encode(), headers)) as response:
        return json.load(response)


def chat(url: str, key: str, messages: list[Any], **settings: Any) -> str:
    body = {"messages": messages, **settings}
    return post(url, key, "/v1/chat/completions", body)["choices"][0]["message"]["content"]


def twice(problem: dict[str, Any], url: str, key: str) -> None:
    """Asks, and asks again; the verdict is on the last message."""
    assert "answer" not in json.dumps(problem)
    messages: list[Any] = [{"role": "user", "content": problem["prompt"]}]
    messages.append({"role": "assistant", "content": chat(url, key, messages)})
    chat(url, key, [*messages, {"role": "user", "content": "and now?"}])


def streamed(url: str, key: str, messages: list[Any]) -> str:
    """The reply to a conversation, read as it comes."""
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    body = json.dumps({"messages": messages, "stream": True}).encode()
    with urllib.request.urlopen(urllib.request.Request(f"{url}/v1/chat/completions", body, headers)) as response:
        events = [line.removeprefix(b"data: ") for line in response if line.startswith(b"data: {")]
    return "".join(json.loads(event)["choices"][0]["delta"].get("content") or "" for event in events)


def streaming(problem: dict[str, Any], url: str, key: str) -> None:
    """As `twice`, over streams."""
    messages: list[Any] = [{"role": "user", "content": problem["prompt"]}]
    messages.append({"role": "assistant", "content": streamed(url, key, messages)})
    streamed(url, key, [*messages, {"role": "user", "content": "and now?"}])


async def returning(problem: dict[str, Any], url: str, key: str) -> str:
    """Returns an answer of its own."""
    chat(url, key, [{"role": "user", "content": problem["prompt"]}])
    return "a"


def rewarding(problem: dict[str, Any], url: str, key: str) -> None:
    """Says what it is worth, and ends the session itself."""
    chat(url, key, [{"role": "user", "content": problem["prompt"]}])
    post(url, key, "/reward", {"reward": 0.25})
    post(url, key, "/end", {})
    time.sleep(600)


def forking(problem: dict[str, Any], url: str, key: str) -> None:
    """Two conversations, the second about the same."""
    for word in ("x", "y"):
        chat(url, key, [{"role": "user", "content": f"{problem['prompt']} {word}"}])


def talking(problem: dict[str, Any], url: str, key: str) -> None:
    """Talks until it is refused."""
    messages: list[Any] = [{"role": "user", "content": problem["prompt"]}]
    while True:
        messages += [{"role": "assistant", "content": chat(url, key, messages)}, {"role": "user", "content": "go on"}]


def sleeping(problem: dict[str, Any], url: str, key: str) -> None:
    chat(url, key, [{"role": "user", "content": problem["prompt"]}])
    time.sleep(600)


def silent(problem: dict[str, Any], url: str, key: str) -> None:
    """Never asks."""


def dying(problem: dict[str, Any], url: str, key: str) -> None:
    """The first time somebody gets so far, the process is killed, and with it all agents of this worker."""
    chat(url, key, [{"role": "user", "content": problem["prompt"]}])
    mark = Path(os.environ["PALESTRA_LAB"]) / "died"
    if not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    address, secret = os.environ["PALESTRA_URL"], os.environ["OPENAI_API_KEY"]
    asked = json.loads(os.environ["PALESTRA_PROBLEM"])
    assert os.environ["OPENAI_BASE_URL"] == f"{os.environ['ANTHROPIC_BASE_URL']}/v1"
    said = chat(address, secret, [{"role": "user", "content": asked["prompt"]}])
    odd = asked["id"].endswith(("1", "3", "5", "7", "9"))
    if sys.argv[1] == "die" and hash(said) is not None and odd:
        os.kill(os.getpid(), signal.SIGKILL)
    kept = []
    while sys.argv[1] == "hog" and odd:
        kept.append(bytearray(b"x") * (1 << 20))
    if sys.argv[1] == "confined":
        port, folder = os.environ["LANG"].split(" ", 1)
        for escape in (lambda: socket.create_connection(("127.0.0.1", int(port))), lambda: Path(folder, "x").touch()):
            try:
                escape()
            except OSError:
                continue
            sys.exit("not confined")
        assert "SECRET_KEY" not in os.environ
    print("a", flush=True)
