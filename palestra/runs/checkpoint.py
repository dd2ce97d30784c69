"""Checkpoints of a session: written to a hidden folder and renamed, metadata last, verified on load, pruned."""

import contextlib
import json
import math
import os
import re
import shutil
import uuid
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from palestra.errors import PalestraError
from palestra.runs.store import sync_folder, write_bytes

FOLDER = "checkpoints"
NAME = re.compile(r"step_(\d{9,})")
# A hidden sibling: a checkpoint being written or removed (part), or one being replaced by another of its step (old).
HIDDEN = re.compile(r"\.(step_\d{9,})\.(part|old)-[0-9a-f]+")


Files = dict[str, dict[str, int]]
"""Sizes and checksums by path inside a checkpoint."""


class DamagedCheckpoint(PalestraError):
    """A checkpoint that is incomplete or corrupt."""


class CheckpointFailed(PalestraError):
    """A checkpoint could not be written; the earlier ones are intact."""


@dataclass(frozen=True)
class Meta:
    """The metadata of a checkpoint."""

    path: Path
    step: int
    created: str
    reasons: frozenset[str]
    """Why it was taken: "kept" is never pruned, "best" competes by score, others are temporary."""
    score: float | None
    metric: str | None
    counters: dict[str, Any]
    offsets: dict[str, int]
    """Bytes of each append-only file that belong to this checkpoint."""
    files: Files
    """Size and CRC-32 of every other file, by path inside the checkpoint."""


@dataclass(frozen=True)
class Checkpoint:
    """A loaded and verified checkpoint."""

    step: int
    state: Any
    meta: Meta


def save(
    folder: Path,
    step: int,
    state: Any,
    *,
    reasons: set[str],
    score: float | None = None,
    metric: str | None = None,
    counters: Mapping[str, Any] | None = None,
    offsets: Mapping[str, int] | None = None,
    model: Callable[[Path], Files | None] | None = None,
) -> Path:
    """Write `folder/checkpoints/step_N`; killed at any instant, it exists whole or not at all.

    `model` writes a form that others can load into the checkpoint's `model/`: a Hugging Face folder for a language
    model. It may write beside it too, and then gives the checksums of all that it wrote.
    """
    from palestra.runs.tree import flatten, safetensors_chunks  # NumPy, which listing runs does without

    tree, leaves = flatten(state)  # an unsupported state is refused before anything is written
    final = folder / FOLDER / f"step_{step:09d}"
    temporary = _hidden(final, "part")
    try:
        finish_renames(folder)
        (temporary / "state").mkdir(parents=True)
        files = {
            "state/tree.json": _write(temporary / "state/tree.json", [json.dumps(tree).encode()]),
            "state/arrays.safetensors": _write(temporary / "state/arrays.safetensors", safetensors_chunks(leaves)),
        }
        sync_folder(temporary / "state")
        if model is not None:
            files |= model(temporary / "model") or checksums(temporary, written(temporary))
            for inner in {(temporary / name).parent for name in files}:
                sync_folder(inner)
        meta = {
            "step": step,
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "reasons": sorted(reasons),
            "score": score,
            "metric": metric,
            "counters": dict(counters or {}),
            "offsets": dict(offsets or {}),
            "files": files,
        }
        _write(temporary / "meta.json", [_meta_bytes(meta)])
        sync_folder(temporary)
        old = final.rename(_hidden(final, "old")) if final.exists() else None
        temporary.rename(final)
        sync_folder(final.parent)
        if old is not None:
            _delete(old)
    except OSError as error:
        existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        free = shutil.disk_usage(existing).free / 2**20
        raise CheckpointFailed(
            f"could not write the checkpoint {final}: {error.strerror or error} ({free:,.0f} MiB free there). "
            "Earlier checkpoints are intact: make room, then resume the run."
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)  # renamed already on success
    return final


def written(folder: Path) -> list[str]:
    """The files of a checkpoint that is being written, but for its small state."""
    files = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return sorted(str(path) for path in files if path.parts[0] != "state")


def checksums(folder: Path, names: Iterable[str]) -> Files:
    """The size and the CRC-32 of some files, which are then on the disk."""
    for name in (names := list(names)):
        with (folder / name).open("rb") as file:
            os.fsync(file.fileno())
    return {name: {"size": (folder / name).stat().st_size, "crc32": _crc_of_file(folder / name)} for name in names}


def read_meta(path: Path) -> Meta:
    """The metadata of a checkpoint, verified; sizes of the other files are checked, their contents are not."""
    try:
        data = json.loads((path / "meta.json").read_bytes())
        if data.pop("crc32") != _crc_of(data):
            raise DamagedCheckpoint(f"checkpoint {path} is damaged: the CRC-32 of meta.json differs")
        meta = Meta(path=path, reasons=frozenset(data.pop("reasons")), **data)
        sizes = {name: (path / name).stat().st_size for name in meta.files}
    except FileNotFoundError as error:
        name = Path(error.filename).relative_to(path)
        raise DamagedCheckpoint(f"checkpoint {path} is incomplete: {name} is missing") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedCheckpoint(f"checkpoint {path} is damaged: meta.json cannot be read ({error})") from error
    for name, size in sizes.items():
        if size != (expected := meta.files[name]["size"]):
            raise DamagedCheckpoint(f"checkpoint {path} is damaged: {name} has {size} bytes instead of {expected}")
    return meta


def load(path: Path, *, verify: bool = True) -> Checkpoint:
    """Read a checkpoint, verifying the size of every file and, with `verify`, its CRC-32."""
    from palestra.runs.tree import read_safetensors, unflatten

    meta = read_meta(path)
    for name, expected in meta.files.items():
        if verify and _crc_of_file(path / name) != expected["crc32"]:
            raise DamagedCheckpoint(f"checkpoint {path} is damaged: the CRC-32 of {name} differs")
    carriers = read_safetensors(path / "state/arrays.safetensors")
    return Checkpoint(meta.step, unflatten(json.loads((path / "state/tree.json").read_bytes()), carriers), meta)


def newest(folder: Path, warn: Callable[[str], None], check: Callable[[Checkpoint], None]) -> Checkpoint | None:
    """The newest loadable checkpoint; `warn` is called for each newer one that is damaged or fails `check`."""
    for step, path in _candidates(folder):
        if HIDDEN.fullmatch(path.name):
            warn(f"skipping half-written checkpoint {path} (step {step})")
            continue
        try:
            checkpoint = load(path)
            check(checkpoint)
        except DamagedCheckpoint as error:
            warn(f"skipping: {error}")
            continue
        return checkpoint
    return None


def is_checkpoint(path: Path) -> bool:
    """Whether a path is a checkpoint of a session."""
    return NAME.fullmatch(path.name) is not None and (path / "meta.json").exists()


def keep(path: Path) -> None:
    """Mark a checkpoint as never to be pruned, because something else depends on it."""
    if "kept" in read_meta(path).reasons:
        return
    meta = json.loads((path / "meta.json").read_bytes())
    del meta["crc32"]
    meta["reasons"] = sorted({*meta["reasons"], "kept"})
    write_bytes(path / "meta.json", _meta_bytes(meta))


def metas(folder: Path) -> list[Meta]:
    """The metadata of every complete checkpoint, oldest first."""
    complete = []
    for _, path in _candidates(folder):
        if NAME.fullmatch(path.name):
            with contextlib.suppress(DamagedCheckpoint):  # reported by `newest`
                complete.append(read_meta(path))
    return complete[::-1]


def best(candidates: Iterable[Meta]) -> Meta | None:
    """The one with the highest score among those with the reason "best"; the later of equals; NaN is the lowest."""
    scored = [(meta.score, meta) for meta in candidates if "best" in meta.reasons and meta.score is not None]
    ranked = [(-math.inf if math.isnan(score) else score, meta.step, meta) for score, meta in scored]
    return max(ranked, key=lambda entry: entry[:2])[2] if ranked else None


def prune(folder: Path) -> None:
    """Keep every "kept" checkpoint, the newest and the best; delete the rest, damaged ones and temporaries."""
    complete = metas(folder)
    keep = [meta for meta in complete if "kept" in meta.reasons] + complete[-1:] + [best(complete)]
    paths = {meta.path for meta in keep if meta is not None}
    for _, path in _candidates(folder):
        if path not in paths:
            _delete(path)


def set_aside_after(folder: Path, step: int) -> None:
    """Rename checkpoints of later steps to `damaged_step_N-…`: a run that continues from `step` could not load them."""
    for other, path in _candidates(folder):
        if other > step:
            if NAME.fullmatch(path.name):
                path.rename(path.parent / f"damaged_{path.name}-{uuid.uuid4().hex[:8]}")
            else:
                _delete(path)


def finish_renames(folder: Path) -> None:
    """Restore a checkpoint whose replacement was killed between its two renames; only for a session's owner."""
    for _, path in _candidates(folder):
        hidden = HIDDEN.fullmatch(path.name)
        if hidden and hidden[2] == "old" and not (path.parent / hidden[1]).exists():
            path.rename(path.parent / hidden[1])


def _candidates(folder: Path) -> list[tuple[int, Path]]:
    """All checkpoint folders, complete or not, newest step first."""
    paths = []
    if (folder / FOLDER).is_dir():
        for name in os.listdir(folder / FOLDER):
            hidden = HIDDEN.fullmatch(name)
            plain = NAME.fullmatch(hidden[1] if hidden else name)
            if plain:
                paths.append((int(plain[1]), folder / FOLDER / name))
    return sorted(paths, reverse=True)


def _hidden(final: Path, kind: str) -> Path:
    return final.parent / f".{final.name}.{kind}-{uuid.uuid4().hex[:8]}"


def _delete(path: Path) -> None:
    """Remove a checkpoint so that a kill in the middle leaves a hidden part, never a damaged `step_N`."""
    hidden = HIDDEN.fullmatch(path.name)
    if not hidden or hidden[2] == "old":
        path = path.rename(_hidden(path.with_name(hidden[1]) if hidden else path, "part"))
    shutil.rmtree(path)


def _write(path: Path, chunks: Iterable[Any]) -> dict[str, int]:
    size = crc = 0
    with path.open("wb") as file:
        for chunk in chunks:
            file.write(chunk)
            size += len(chunk)
            crc = zlib.crc32(chunk, crc)
        file.flush()
        os.fsync(file.fileno())
    return {"size": size, "crc32": crc}


def _meta_bytes(meta: dict[str, Any]) -> bytes:
    return json.dumps({**meta, "crc32": _crc_of(meta)}, indent=1).encode()


def _crc_of(meta: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(meta, sort_keys=True).encode())


def _crc_of_file(path: Path) -> int:
    crc = 0
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            crc = zlib.crc32(chunk, crc)
    return crc
