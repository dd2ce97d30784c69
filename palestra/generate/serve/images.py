"""Images that requests name by address: fetched where the server allows it, else refused."""

import base64
from collections.abc import Sequence
from typing import Any

import httpx

from palestra.errors import UsageError

MOST_BYTES = 20 << 20
SECONDS = 10.0


async def fetched(messages: Sequence[dict[str, Any]], allowed: bool) -> list[dict[str, Any]]:
    """The messages with data URLs in place of images at http addresses."""
    whole = []
    for message in messages:
        content = message["content"]
        if not isinstance(content, str) and content is not None:
            content = [await _fetched(part, allowed) for part in content]
        whole.append({**message, "content": content})
    return whole


async def _fetched(part: dict[str, Any], allowed: bool) -> dict[str, Any]:
    url = part["image_url"]["url"] if part.get("type") == "image_url" else ""
    if not url.startswith(("http://", "https://")):
        return part
    if not allowed:
        raise UsageError(
            f"the image {url[:80]} is elsewhere, and this server fetches nothing: send it as data:image/png;base64,…, "
            "or start the server with --image-urls"
        )
    data = base64.b64encode(await _get(url)).decode()
    return {**part, "image_url": {"url": f"data:image/png;base64,{data}"}}  # its own bytes say what it is


async def _get(url: str) -> bytes:
    """At most `MOST_BYTES` from an address, without following it elsewhere."""
    data = bytearray()
    try:
        async with httpx.AsyncClient(timeout=SECONDS, trust_env=False) as client, client.stream("GET", url) as response:
            if response.status_code != 200:
                raise UsageError(f"the image {url[:80]} cannot be fetched: status {response.status_code}")
            async for piece in response.aiter_bytes():
                data += piece
                if len(data) > MOST_BYTES:
                    raise UsageError(f"the image {url[:80]} has more than {MOST_BYTES >> 20} MiB")
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise UsageError(f"the image {url[:80]} cannot be fetched: {error or type(error).__name__}") from error
    return bytes(data)
