"""Order files: prompt ids, one a line, on this machine or at any URL that fsspec reads."""

from collections import Counter
from pathlib import Path
from typing import Any

from palestra.data.remote import open_filesystem
from palestra.errors import UsageError

SHOWN = 5


def read_order(where: str) -> list[str]:
    """The ids of an order file; empty lines are not counted, and none may be there twice."""
    try:
        if "://" in where:
            files, path = open_filesystem(where)
            content: Any = files.cat_file(path)
        else:
            content = Path(where).expanduser().read_bytes()
        lines = content.decode().split("\n")
    except UsageError:
        raise
    except Exception as error:  # each backend has errors of its own for no credentials, no network, no such bucket
        raise UsageError(f"the order file {where} cannot be read ({type(error).__name__}: {error})") from error
    ids = [line.strip() for line in lines if line.strip()]
    if not ids:
        raise UsageError(f"the order file {where} has no prompt ids")
    if twice := [id for id, count in Counter(ids).items() if count > 1]:
        raise UsageError(f"the order file {where} has {some(twice)} more than once; list each prompt once")
    return ids


def some(ids: list[str]) -> str:
    """A few of many ids, for a message."""
    more = f" and {len(ids) - SHOWN} more" if len(ids) > SHOWN else ""
    return ", ".join(ids[:SHOWN]) + more
