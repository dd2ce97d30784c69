"""Answers from a server that speaks OpenAI's protocol: ours, vLLM's, SGLang's, OpenAI's own."""

import asyncio
import os
import ssl
from typing import Any
from urllib.parse import urlsplit, urlunsplit

try:
    import httpx
except ImportError as error:
    from palestra.errors import MissingExtra

    raise MissingExtra("A language model behind a URL", "serve") from error

from palestra.errors import PalestraError, UsageError

WAITS = (0.5, 2.0, 8.0)  # seconds between attempts
AGAIN = (408, 429, 500, 502, 503, 504)  # statuses after which another attempt may succeed
REFUSED = (401, 403, 404)  # statuses after which none can
TIMEOUT = httpx.Timeout(300.0, connect=10.0)


class OpenAiChat:
    """Asks a model at `http://host:port/v1`, or `…/v1#name` where there are several, with the key `OPENAI_API_KEY`.

    Each question has a connection of its own: it works on any event loop, and a question that is cancelled is gone.
    """

    def __init__(self, url: str, *, max_new_tokens: int, waits: tuple[float, ...] = WAITS):
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UsageError(f"{url!r} is no address of a server: expected one such as http://localhost:8000/v1")
        self.base = urlunsplit((parts.scheme, parts.netloc, parts.path.rstrip("/") or "/v1", "", ""))
        self.max_new_tokens, self._waits = max_new_tokens, waits
        key = os.environ.get("OPENAI_API_KEY")
        self._headers = {} if not key else {"Authorization": f"Bearer {key}"}
        self._trust = ssl.create_default_context() if parts.scheme == "https" else False
        self._name = parts.fragment

    async def ask(self, text: str) -> str:
        """The most likely answer to a message."""
        name = self._name or await self._only_model()
        body = {
            "model": name,
            "messages": [{"role": "user", "content": text}],
            "temperature": 0,
            "max_tokens": self.max_new_tokens,
        }
        said = await self._call("POST", "/chat/completions", json=body)
        try:
            return said["choices"][0]["message"]["content"] or ""
        except (KeyError, IndexError, TypeError) as error:
            raise PalestraError(f"{self.base} gave an answer without a message: {said!r:.200}") from error

    async def _only_model(self) -> str:
        said = await self._call("GET", "/models")
        try:
            names = [one["id"] for one in said["data"]]
        except (KeyError, TypeError) as error:
            raise PalestraError(f"{self.base}/models gave no list of models: {said!r:.200}") from error
        if len(names) != 1:
            known = ", ".join(names) or "none"
            raise UsageError(f"{self.base} has not one model but these: {known}. Name one as {self.base}#NAME")
        self._name = names[0]
        return self._name

    async def _call(self, method: str, path: str, **options: Any) -> Any:
        """What the server says; after what may pass it is asked again."""
        waits = iter(self._waits)
        while True:
            try:
                async with httpx.AsyncClient(
                    headers=self._headers, timeout=TIMEOUT, verify=self._trust, trust_env=False
                ) as client:
                    response = await client.request(method, self.base + path, **options)
                if response.status_code == 200:
                    return response.json()
                said, passing = f"status {response.status_code}: {response.text[:300]}", response.status_code in AGAIN
                if response.status_code in REFUSED:
                    raise UsageError(f"{self.base}{path} refuses: {said}. The key is that of OPENAI_API_KEY")
            except ValueError as error:
                raise PalestraError(f"{self.base}{path} gave an answer that is no JSON") from error
            except httpx.HTTPError as error:
                said, passing = str(error) or type(error).__name__, True
            wait = next(waits, None) if passing else None
            if wait is None:
                raise PalestraError(f"{self.base}{path} does not answer: {said}")
            await asyncio.sleep(wait)
