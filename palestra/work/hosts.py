"""Where an HTTP request comes from, by its headers: which host it names, and whether a page of another site sent it."""

from collections.abc import Mapping
from urllib.parse import urlsplit

LOOPBACK = ("127.0.0.1", "::1", "localhost")


def host_of(headers: Mapping[str, str]) -> str:
    """The host that a request names, without the port."""
    try:
        return urlsplit(f"//{headers.get('host', '')}").hostname or ""
    except ValueError:  # brackets that are not an address
        return ""


def from_other_site(headers: Mapping[str, str]) -> bool:
    """Whether a page of another server sent it: any page that a browser shows can send one to a loopback address."""
    origin = headers.get("origin")
    other = origin is not None and origin.partition("://")[2] != headers.get("host")
    return other or headers.get("sec-fetch-site") in ("cross-site", "same-site")
