"""Finds models by what people call them: a run, a checkpoint, a folder, a URL or a name on the Hub."""

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from palestra.data.sources import resolve
from palestra.data.tokenizers import Tokenizer
from palestra.errors import UsageError
from palestra.lm.hf import GENERATION_CONFIG, Pretrained, empty_model, has_tokenizer, load_pretrained, read_eos
from palestra.lm.lora import merged_weights
from palestra.lm.peft import CONFIG as ADAPTER_CONFIG
from palestra.lm.peft import load_peft
from palestra.runs.run import open_run
from palestra.runs.store import read_json

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def named_dtype(name: str) -> torch.dtype:
    """The precision that people call by a short name."""
    if name not in DTYPES:
        raise UsageError(f"--dtype {name}: expected {', '.join(DTYPES)}, or to leave it out")
    return DTYPES[name]


@dataclass(frozen=True)
class Found:
    """A model folder that was asked for."""

    folder: Path
    """With weights, or with adapters for the model in `base`."""
    base: Path | None
    """The folder of the model that adapters belong to; it may have adapters itself."""
    weights: Path
    """The folder with the weights that all of it rests on."""
    tokenizer: Path
    """The folder with the tokenizer: that of the adapters, where they have one of their own."""
    generation: Path
    """The folder whose generation_config.json holds, or config.json where there is none."""


def find_model(ref: str | Path, root: Path | str = "runs") -> Found:
    """The folder of a model: a run's best checkpoint, a checkpoint, a model folder, a URL or a name on the Hub."""
    return _found(str(ref), Path(root), ())


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
    if not has_tokenizer(found.tokenizer):
        raise UsageError(f"{found.tokenizer} has no tokenizer: put a tokenizer.json beside its weights")
    if found.base is None:
        loaded = load_pretrained(found.folder, dtype, param_dtype, device)
    else:
        loaded, _ = open_model(found.base, root, dtype=dtype, param_dtype=param_dtype, device=device)
        load_peft(found.folder, loaded.model)
        plain = empty_model(loaded.model.shape, dtype, param_dtype, device)
        plain.load_state_dict(merged_weights(loaded.model))
        eos = read_eos(found.generation, loaded.config)
        loaded = replace(loaded, model=plain, tokenizer=found.tokenizer, eos=eos)
    return loaded, Tokenizer.load(found.tokenizer)


def _found(ref: str, root: Path, seen: tuple[Path, ...]) -> Found:
    folder = _folder(ref, root)
    if not (folder / ADAPTER_CONFIG).exists():
        return Found(folder, None, folder, folder, folder)
    if folder.resolve() in seen:
        raise UsageError(f"{folder / ADAPTER_CONFIG}: base_model_name_or_path leads back to these adapters themselves")
    named = read_json(folder / ADAPTER_CONFIG)["base_model_name_or_path"]
    base = _found(named, root, (*seen, folder.resolve()))
    return Found(
        folder,
        base.folder,
        base.weights,
        folder if has_tokenizer(folder) else base.tokenizer,
        folder if (folder / GENERATION_CONFIG).exists() else base.generation,
    )


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
