"""Renamed spec keys and values: an old one is refused in a spec, translated in a stored run, and kept in hashes."""

from collections.abc import Mapping
from typing import Any

Renames = Mapping[tuple[str, ...], str]

FORWARD: Renames = {
    ("env", "normalise_obs"): "normalize_obs",
    ("env", "normalise_reward"): "normalize_reward",
    ("algorithm", "normalise_returns"): "normalize_returns",
    ("algorithm", "normalise_advantages"): "normalize_advantages",
    ("algorithm", "prioritised"): "prioritized",
    ("algorithm", "anchor", "behaviour"): "behavior",
    ("truncated", "type", "penalise"): "penalize",
    ("loss", "centre"): "center",
    ("moe", "normalise"): "normalize",
    ("search", "direction", "maximise"): "maximize",
    ("search", "direction", "minimise"): "minimize",
}
"""(block, old key): new key, and (block, key, old value): new value."""
BACKWARD: Renames = {(*path[:-1], new): path[-1] for path, new in FORWARD.items()}


def renamed(*path: Any) -> str | None:
    """The new name of an old key, given as (…, block, key), or of an old value, given as (…, block, key, value)."""
    return FORWARD.get(path[-2:]) or FORWARD.get(path[-3:])


def translated(data: Any) -> Any:
    """Stored spec data with today's keys and values."""
    return _replaced(data, (), FORWARD)


def original(data: Any) -> Any:
    """Spec data with the first keys and values there were: hashes are taken of these, so that a rename keeps them."""
    return _replaced(data, (), BACKWARD)


def _replaced(data: Any, path: tuple[str, ...], renames: Renames) -> Any:
    if isinstance(data, dict):
        return {_key(path, key, renames): _replaced(item, (*path, str(key)), renames) for key, item in data.items()}
    if isinstance(data, list | tuple):
        return [_replaced(item, path, renames) for item in data]
    return renames.get((*path[-2:], data), data) if isinstance(data, str) else data


def _key(path: tuple[str, ...], key: Any, renames: Renames) -> Any:
    """The key's other name; in a dotted key, such as an axis of a search, the last part's."""
    if not isinstance(key, str):
        return key
    *before, last = key.split(".")
    return ".".join([*before, renames.get((*(*path, *before)[-1:], last), last)])
