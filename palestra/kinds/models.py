"""Finds models by what people call them: a run, a checkpoint, a folder, a URL or a name on the Hub."""

import json
from dataclasses import dataclass
from pathlib import Path

import torch

from palestra.data.sources import resolve
from palestra.data.tokenizers import Tokenizer
from palestra.errors import UsageError
from palestra.lm.hf import Pretrained, load_pretrained
from palestra.lm.lora import merge
from palestra.lm.peft import CONFIG as ADAPTER_CONFIG
from palestra.lm.peft import load_peft
from palestra.runs.run import open_run


@dataclass(frozen=True)
class Found:
    """A model folder that was asked for."""

    folder: Path
    """With weights, or with adapters for those of `base`."""
    base: Path | None
    """The folder of the weights that adapters belong to."""


def find_model(ref: str | Path, root: Path | str = "runs") -> Found:
    """The folder of a model: a run's best checkpoint, a checkpoint, a model folder, a URL or a name on the Hub."""
    folder = _folder(str(ref), Path(root))
    if not (folder / ADAPTER_CONFIG).exists():
        return Found(folder, None)
    base = json.loads((folder / ADAPTER_CONFIG).read_text())["base_model_name_or_path"]
    return Found(folder, find_model(base, root).folder)


def open_model(
    ref: str | Path,
    root: Path | str = "runs",
    *,
    dtype: torch.dtype = torch.float32,
    param_dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> tuple[Pretrained, Tokenizer]:
    """A model with adapters merged, and its tokenizer."""
    found = find_model(ref, root)
    loaded = load_pretrained(found.base or found.folder, dtype, param_dtype, device)
    if found.base is not None:
        load_peft(found.folder, loaded.model)
        merge(loaded.model)
    if loaded.tokenizer is None:
        raise UsageError(f"{found.folder} has no tokenizer: put a tokenizer.json beside its weights")
    return loaded, Tokenizer.load(loaded.tokenizer)


def _folder(ref: str, root: Path) -> Path:
    path = Path(ref).expanduser()
    if (path / "config.json").exists() or (path / ADAPTER_CONFIG).exists():
        return path
    if (path / "meta.json").exists():  # a checkpoint
        return _model_of(path)
    if "://" in ref:
        return resolve(ref, kind="model")
    try:
        run = open_run(ref, root)
    except UsageError:
        if path.exists():
            raise UsageError(
                f"{ref} is no model: it is neither a run, nor a checkpoint, nor a folder with a config.json"
            ) from None
        return resolve(ref, kind="model", root=root)
    return _model_of(run.checkpoint("best"))


def _model_of(checkpoint: Path) -> Path:
    if not (checkpoint / "model").is_dir():
        raise UsageError(f"{checkpoint} holds no language model")
    return checkpoint / "model"
