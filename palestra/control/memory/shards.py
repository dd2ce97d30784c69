"""Rows of a large memory in files beside the checkpoints: each is written once, and a checkpoint says which it needs.

A checkpoint of a memory of many gigabytes would otherwise write all of it again, although most of it is as it was.
"""

import json
import os
import zlib
from pathlib import Path
from typing import Any

from palestra.errors import PalestraError
from palestra.runs.store import sync_folder
from palestra.runs.tree import flatten, read_safetensors, safetensors_chunks, unflatten

LIMIT = 2**30
"""Bytes of rows that a checkpoint holds itself."""


class DamagedShard(PalestraError):
    """A file of rows that a checkpoint needs is missing or not what was written."""


def write_shard(folder: Path, number: int, rows: dict[str, Any]) -> dict[str, Any]:
    """Write one file, beside and renamed; what a checkpoint keeps of it."""
    folder.mkdir(exist_ok=True)
    tree, leaves = flatten(rows)
    path = _path(folder, number)
    temporary = path.with_name(f".{path.name}.tmp")
    size = crc = 0
    with temporary.open("wb") as file:
        for chunk in safetensors_chunks(leaves):
            file.write(chunk)
            size, crc = size + len(chunk), zlib.crc32(chunk, crc)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)
    sync_folder(folder)
    return {"number": number, "size": size, "crc32": crc, "tree": json.dumps(tree)}


def read_shard(folder: Path, shard: dict[str, Any]) -> dict[str, Any]:
    """The rows of a file, verified."""
    path = _path(folder, shard["number"])
    if not path.exists():
        raise DamagedShard(f"{path} is missing: the checkpoint keeps a part of its replay memory there")
    crc = 0
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            crc = zlib.crc32(chunk, crc)
    if path.stat().st_size != shard["size"] or crc != shard["crc32"]:
        raise DamagedShard(f"{path} is not what was written: the checkpoint's replay memory cannot be restored")
    return unflatten(json.loads(shard["tree"]), read_safetensors(path))


def drop_shards(folder: Path, before: int) -> None:
    """Remove the files of lower numbers."""
    for path in folder.glob("rows_*.safetensors"):
        if int(path.stem.removeprefix("rows_")) < before:
            path.unlink()


def _path(folder: Path, number: int) -> Path:
    return folder / f"rows_{number:09d}.safetensors"
