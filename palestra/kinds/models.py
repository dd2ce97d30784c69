"""Finds models by what people call them: a run, a checkpoint, a folder, a URL or a name on the Hub."""

import json
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from palestra.data.sources import resolve
from palestra.data.tokenizers import Tokenizer
from palestra.errors import UsageError
from palestra.lm.hf import Pretrained, empty_model, load_pretrained
from palestra.lm.lora import merged_weights
from palestra.lm.peft import CONFIG as ADAPTER_CONFIG
from palestra.lm.peft import load_peft
from palestra.runs.run import open_run


@dataclass(frozen=True)
class Found:
    """A model folder that was asked for."""

    folder: Path
    """With weights, or with adapters for the model in `base`."""
    base: Path | None
    """The folder of the model that adapters belong to; it may have adapters itself."""
    weights: Path
    """The folder with the weights and the tokenizer that all of it rests on."""


def find_model(ref: str | Path, root: Path | str = "runs") -> Found:
    """The folder of a model: a run's best checkpoint, a checkpoint, a model folder, a URL or a name on the Hub."""
    folder = _folder(str(ref), Path(root))
    if not (folder / ADAPTER_CONFIG).exists():
        return Found(folder, None, folder)
    base = find_model(json.loads((folder / ADAPTER_CONFIG).read_text())["base_model_name_or_path"], root)
    return Found(folder, base.folder, base.weights)


def open_model(
    ref: str | Path,
    root: Path | str = "runs",
    *,
    dtype: torch.dtype = torch.float32,
    param_dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> tuple[Pretrained, Tokenizer]:
    """A model with its adapters put into its weights, and its tokenizer."""
    found = find_model(ref, root)
    if found.base is not None:
        loaded, tokenizer = open_model(found.base, root, dtype=dtype, param_dtype=param_dtype, device=device)
        load_peft(found.folder, loaded.model)
        plain = empty_model(loaded.model.shape, dtype, param_dtype, device)
        plain.load_state_dict(merged_weights(loaded.model))
        return replace(loaded, model=plain), tokenizer
    loaded = load_pretrained(found.folder, dtype, param_dtype, device)
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
        if path.parts[0] == root.name:  # a run was meant, not an owner on the Hub
            raise
        return resolve(ref, kind="model", root=root)
    return _model_of(run.checkpoint("best"))


def _model_of(checkpoint: Path) -> Path:
    if not (checkpoint / "model").is_dir():
        raise UsageError(f"{checkpoint} holds no language model")
    return checkpoint / "model"
