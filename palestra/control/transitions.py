"""Files of transitions: read from .npz, .parquet and .hdf5 for offline algorithms, written from a run's replay memory.

Columns: observations, actions as the environment takes them, rewards, next_observations, terminated. Names of D4RL
(`terminals`, `timeouts`) are read too; without next_observations a row's successor is the next row, and rows whose
episode was truncated, which have none, are left out. Minari's files have a group for each episode, with one observation
more than actions; the folder of a data set of Minari stands for its file.
"""

import hashlib
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch

from palestra.control.memory.replay import Replay, ReplayBatch
from palestra.control.nets.heads import ActionHead
from palestra.errors import UsageError
from palestra.runs.store import write_bytes

Columns = dict[str, np.ndarray]
NAMES = {"terminals": "terminated", "terminations": "terminated", "timeouts": "truncated", "truncations": "truncated"}


class Transitions:
    """All transitions of a file, sampled uniformly; stands where an online algorithm has its replay memory."""

    def __init__(self, path: Path, head: ActionHead, obs_shape: tuple[int, ...], gamma: float, device: torch.device):
        columns, self.sha256, self.path = *read_transitions(path), path
        obs = columns["observations"]
        for name in ("observations", "next_observations"):
            if (shape := columns[name].shape[1:]) != obs_shape:
                raise UsageError(f"{path}: {name} have the shape {shape}, the environment's {obs_shape}")
        actions = stored_actions(columns["actions"], head, path)

        def tensor(array: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(np.ascontiguousarray(array)).to(device)

        kept = np.float32 if obs.dtype.kind == "f" else obs.dtype
        self.obs, self.next_obs = (tensor(columns[name].astype(kept)) for name in ("observations", "next_observations"))
        self.actions, self.rewards = tensor(actions), tensor(columns["rewards"].astype(np.float32))
        self.discounts = gamma * tensor(1 - columns["terminated"].astype(np.float32))

    def sample(self, size: int, generator: torch.Generator, beta: float | None = None, batches: int = 1) -> ReplayBatch:
        """`batches` batches of `size` transitions, (batches · size, ...)."""
        rows = torch.randint(len(self.rewards), (batches * size,), generator=generator).to(self.rewards.device)
        columns = (self.obs, self.actions, self.rewards, self.next_obs, self.discounts)
        obs, actions, rewards, next_obs, discounts = (column.index_select(0, rows) for column in columns)
        return ReplayBatch(obs, actions, rewards, next_obs, discounts, None, rows)

    def state(self, folder: Path | None = None) -> dict[str, Any]:
        """Which file it is: it is not copied into checkpoints."""
        return {"sha256": self.sha256}

    def load_state(self, state: dict[str, Any], folder: Path | None = None) -> None:
        """Refuse another file than the one that training began with."""
        if state["sha256"] != self.sha256:
            raise UsageError(f"{self.path} is not the file that this run began with: restore it, or start a new run")


def stored_actions(actions: np.ndarray, head: ActionHead, path: Path) -> np.ndarray:
    """Actions of the environment as policies store them: the inverse of `ActionHead.to_env`."""
    rows = (
        actions.reshape(len(actions), *head.shape) if actions.size == len(actions) * int(np.prod(head.shape)) else None
    )
    if rows is None:
        raise UsageError(f"{path}: actions have the shape {actions.shape[1:]}, the environment's {head.shape}")
    if head.continuous:
        middle, half, low, high = head._units
        return np.clip((rows - middle) / half, low, high).astype(np.float32)
    numbers = rows.astype(np.int64) - np.asarray(head.description.get("start", 0))
    most = np.asarray(head.maskable if head.maskable else 2)
    outside = (numbers < 0) | (numbers >= (most if head.shape else most[0])) | (rows % 1 != 0)
    if outside.any():
        raise UsageError(f"{path}: there are actions outside of the environment's action space")
    return numbers


def read_transitions(path: Path) -> tuple[Columns, str]:
    """The checked columns of a file, and its SHA-256."""
    path = path / "data" / "main_data.hdf5" if path.is_dir() else path
    try:
        content = path.read_bytes()
        columns = READERS.get(path.suffix, _npz)(content, path)
    except (OSError, ValueError) as error:
        raise UsageError(
            f"algorithm.data: {path} is not a file of transitions (.npz, .parquet or .hdf5): {error}. "
            "`palestra export RUN --to transitions -o FILE.npz` writes one"
        ) from error
    columns = {NAMES.get(name, name): np.asarray(column) for name, column in columns.items()}
    needed = ("observations", "actions", "rewards", "terminated")
    if missing := [name for name in needed if name not in columns]:
        raise UsageError(f"{path} has no column {', '.join(missing)}: it has {', '.join(columns)}")
    lengths = {name: len(columns[name]) for name in columns if name in (*needed, "next_observations", "truncated")}
    if len(set(lengths.values())) > 1 or not len(columns["rewards"]):
        raise UsageError(f"{path}: expected columns of one length, at least 1; got {lengths}")
    columns = {name: _checked(columns[name], name, path) for name in lengths}
    if "next_observations" not in columns:
        columns = _with_successors(columns)
    used = {name: columns[name] for name in (*needed, "next_observations")}
    return used, hashlib.sha256(content).hexdigest()


def _checked(column: np.ndarray, name: str, path: Path) -> np.ndarray:
    """A column of numbers; of rewards and flags one a row, also where the file has (rows, 1)."""
    if column.dtype.kind not in "biuf":
        raise UsageError(f"{path}: {name} has entries that are missing, or not numbers")
    if column.dtype.kind == "f" and not np.isfinite(column).all():
        raise UsageError(f"{path}: {name} has numbers that are not finite")
    if name not in ("rewards", "terminated", "truncated"):
        return column
    if column.size != len(column):
        raise UsageError(f"{path}: {name} has the shape {column.shape}: expected one number a row")
    return column.reshape(-1)


def _with_successors(columns: Columns) -> Columns:
    obs, terminated = columns["observations"], columns["terminated"].astype(bool)
    following = np.concatenate([obs[1:], obs[-1:]])  # of a terminated row it is never used
    unknown = columns.get("truncated", np.zeros(len(obs), bool)).astype(bool) & ~terminated
    unknown[-1] |= not terminated[-1]
    return {name: column[~unknown] for name, column in {**columns, "next_observations": following}.items()}


def _npz(content: bytes, path: Path) -> Columns:
    return dict(np.load(BytesIO(content), allow_pickle=False))


def _parquet(content: bytes, path: Path) -> Columns:
    import pyarrow.parquet

    table = pyarrow.parquet.read_table(BytesIO(content))
    return {name: np.array(table[name].to_pylist()) for name in table.column_names}


def _hdf5(content: bytes, path: Path) -> Columns:
    """A file of Minari, else one of D4RL, whose columns lie at its top."""
    try:
        import h5py
    except ImportError as error:
        raise UsageError(f"{path} is read by h5py: pip install 'palestra[minari]'") from error
    with h5py.File(BytesIO(content)) as file:
        episodes = sorted((name for name in file if name.startswith("episode_")), key=lambda name: int(name[8:]))
        if not episodes:
            return {name: column[()] for name, column in file.items() if isinstance(column, h5py.Dataset)}
        parts = [_episode(file[name], name, path) for name in episodes]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _episode(group: Any, name: str, path: Path) -> Columns:
    """The transitions of an episode of Minari; its last observation is a successor alone."""
    kinds = {column: getattr(group.get(column), "dtype", None) for column in ("observations", "actions")}
    if unread := [column for column, dtype in kinds.items() if dtype is None or dtype.kind not in "biuf"]:
        raise UsageError(f"{path}: {', '.join(unread)} of {name} are not an array of numbers: such spaces are not read")
    obs = group["observations"][()]
    columns = {column: group[column][()] for column in ("actions", "rewards", "terminations")}
    if len(obs) != len(columns["rewards"]) + 1:
        raise UsageError(f"{path}: {name} has {len(obs)} observations and {len(columns['rewards'])} rewards")
    return {"observations": obs[:-1], "next_observations": obs[1:], **columns}


READERS = {".parquet": _parquet, ".hdf5": _hdf5, ".h5": _hdf5}  # else .npz


def write_transitions(memory: Replay, head: ActionHead, out: Path) -> int:
    """Write all transitions of a memory made with γ = 1 as .npz; how many there are."""
    batch = memory.everything()
    columns = {
        "observations": batch.obs,
        "next_observations": batch.next_obs,
        "rewards": batch.rewards,
        "terminated": batch.discounts == 0,
    }
    arrays = {name: column.numpy(force=True) for name, column in columns.items()}
    file = BytesIO()
    np.savez_compressed(file, actions=head.to_env(batch.actions), **arrays)  # pyrefly: ignore
    write_bytes(out, file.getvalue())
    return len(batch.rewards)
