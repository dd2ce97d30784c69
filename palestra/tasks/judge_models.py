"""Finds and opens the models that judge answers: a run, a checkpoint, a folder, a URL of files or a name on the Hub."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from palestra.errors import UsageError
from palestra.runs.run import open_run

if TYPE_CHECKING:
    from palestra.generate.local import LocalGenerator

OpenGenerator = Callable[[str, Path], "LocalGenerator"]
"""Opens a language model by what people call it and the folder of runs; its engine has a tokenizer."""

ROWS = 16  # answers that are judged at the same time: the trainer needs most of the memory for itself


def model_folder(ref: str, root: Path) -> Path:
    """The model folder that is meant."""
    folder = _folder(ref, root)
    if (folder / "adapter_config.json").exists():
        raise UsageError(f"{folder} has adapters without their model: give a model in whose weights they are")
    return folder


def open_generator(ref: str, root: Path) -> "LocalGenerator":
    """A generator for a model, in a thread of its own: on the GPU where there is one, else on the CPU."""
    import torch

    from palestra.generate.engine import Engine
    from palestra.generate.local import LocalGenerator

    device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    engine = Engine.from_folder(model_folder(ref, root), dtype=dtype, device=device, max_running=ROWS)
    return LocalGenerator(engine)


def _folder(ref: str, root: Path) -> Path:
    path = Path(ref).expanduser()
    if (path / "config.json").exists() or (path / "adapter_config.json").exists():
        return path
    if (path / "meta.json").exists():
        return _model_of(path)
    if "://" not in ref:
        try:
            return _model_of(open_run(ref, root).checkpoint("best"))
        except UsageError:
            if path.exists() or path.parts[0] == root.name:  # something of this machine was meant, not of the Hub
                raise
    from palestra.data.sources import resolve

    return resolve(ref, kind="model", root=root)


def _model_of(checkpoint: Path) -> Path:
    if not (checkpoint / "model").is_dir():
        raise UsageError(f"{checkpoint} holds no language model")
    return checkpoint / "model"
