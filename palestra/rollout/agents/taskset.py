"""An agent that is an environment of the package verifiers, which plays in an interpreter of its own.

Every call it makes to the model goes through the session's gateway: tokens and log-probabilities are those that were
sampled, and its reward is posted as the program's.
"""

import asyncio
import json
import urllib.request
from collections.abc import Sequence
from typing import Any

from palestra.rollout.agents.lines import LineCalls

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
        self._command, self._plays = command, 0
        self._calls = LineCalls(self._started(), self._gone)

    @property
    def used(self) -> bool:
        """Whether another should take its place."""
        return self._plays >= EPISODES or self._calls.ended

    async def play(self, number: int, url: str, key: str) -> float:
        """The reward of one episode of the task of this number."""
        self._plays += 1
        try:
            result = await self._calls({"number": number, "url": url, "key": key})
        finally:
            if self.used and not self._calls.waiting:
                await self._calls.close()
        if "error" in result:
            raise PlayerFailed(result["error"])
        return float(result["reward"])

    async def _started(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        pipes = {"stdin": asyncio.subprocess.PIPE, "stdout": asyncio.subprocess.PIPE}
        self._process = await asyncio.create_subprocess_exec(*self._command, **pipes)
        assert self._process.stdout is not None
        assert self._process.stdin is not None
        return self._process.stdout, self._process.stdin

    async def _gone(self) -> Exception:
        return PlayerFailed(f"the player of verifiers ended with {await self._process.wait()}")
