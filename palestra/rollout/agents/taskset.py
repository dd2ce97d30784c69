"""An agent that is an environment of the package verifiers, which plays in an interpreter of its own.

Every call it makes to the model goes through the session's gateway: tokens and log-probabilities are those that were
sampled, and its reward is posted as the program's.
"""

import asyncio
import itertools
import json
import urllib.request
from collections.abc import Sequence
from typing import Any

EPISODES = 1000  # of one player: theirs keeps a client for every address and key
_players: dict[tuple[str, ...], "Player"] = {}


class PlayerFailed(RuntimeError):
    """The other interpreter has ended, or its environment failed."""


async def play(problem: dict[str, Any], url: str, key: str) -> None:
    """An agent function of the workflow `agent`, for problems of `verifiers:<taskset>`."""
    command = tuple(problem["metadata"]["command"])
    player = _players.get(command)
    if player is None or player.used:
        player = _players[command] = Player(command)
    reward = await player.play(problem["metadata"]["number"], url, key)
    await asyncio.to_thread(_post, url, key, reward)


def _post(url: str, key: str, reward: float) -> None:
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    with urllib.request.urlopen(
        urllib.request.Request(f"{url}/reward", json.dumps({"reward": reward}).encode(), headers)
    ):
        pass


class Player:
    """A process that plays many episodes at once. It ends when this process does: its input closes."""

    def __init__(self, command: Sequence[str]):
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._started = asyncio.ensure_future(self._start(command))
        self._process: asyncio.subprocess.Process | None = None
        self.used = False
        """Whether another should take its place."""

    async def play(self, number: int, url: str, key: str) -> float:
        """The reward of one episode of the task of this number."""
        id = next(self._numbers)
        self.used = self.used or id + 1 >= EPISODES
        process = await asyncio.shield(self._started)
        self._waiting[id] = done = asyncio.get_running_loop().create_future()
        assert process.stdin is not None
        process.stdin.write(json.dumps({"id": id, "number": number, "url": url, "key": key}).encode() + b"\n")
        try:
            result = await done
        finally:
            del self._waiting[id]
            if self.used and not self._waiting:
                process.stdin.close()
        if "error" in result:
            raise PlayerFailed(result["error"])
        return float(result["reward"])

    async def _start(self, command: Sequence[str]) -> asyncio.subprocess.Process:
        pipes = {"stdin": asyncio.subprocess.PIPE, "stdout": asyncio.subprocess.PIPE}
        process = await asyncio.create_subprocess_exec(*command, **pipes)
        self._reading = asyncio.create_task(self._read(process))
        return process

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        while line := await process.stdout.readline():
            result = json.loads(line)
            if (done := self._waiting.get(result["id"])) is not None and not done.done():
                done.set_result(result)
        self.used = True
        for done in self._waiting.values():
            if not done.done():
                done.set_exception(PlayerFailed(f"the player of verifiers ended with {await process.wait()}"))
